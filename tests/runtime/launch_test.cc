// Local ranks: their exit codes, the first failure among them, programs started anew.
#include "runtime/launch.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <chrono>
#include <csignal>
#include <thread>

namespace hotbunk {
namespace {

TEST_CASE("all ranks end well", "[launch]") {
  const auto r = fork_ranks(3, [](const LaunchEnv& e) { return e.world_size == 3 && e.local_rank == e.rank ? 0 : 1; });
  CHECK(r.exit_code == 0);
  CHECK(r.message.empty());
  CHECK_FALSE(r.first_failure);
}

TEST_CASE("the first failure is the result; what the others say afterwards is not", "[launch]") {
  const auto r = fork_ranks(3, [](const LaunchEnv& e) {
    if (e.rank == 1) return 2;
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    return 3;
  });
  CHECK(r.exit_code == 2);  // bad input stays bad input
  CHECK(r.first_failure->rank == 1);
  CHECK_THAT(r.message, Catch::Contains("rank 1 (pid ") && Catch::Contains("ended with exit code 2"));
}

TEST_CASE("a killed rank: signal, exit code 3, and the rest is ended after the grace", "[launch]") {
  LaunchOptions options;
  options.grace_seconds = 0.2;
  const auto start = std::chrono::steady_clock::now();
  const auto r = fork_ranks(
      2,
      [](const LaunchEnv& e) {
        if (e.rank == 1) kill(getpid(), SIGKILL);
        std::this_thread::sleep_for(std::chrono::seconds(60));
        return 0;
      },
      options);
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(20));
  CHECK(r.exit_code == 3);
  CHECK_THAT(r.message, Catch::Contains("rank 1") && Catch::Contains("was killed by signal 9 (Killed)"));
  CHECK(r.ranks[0].signal == SIGKILL);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which take all addresses, and the signal
TEST_CASE("a fault of memory under a limit of addresses is said with the limit", "[launch]") {
  const auto message_under = [](rlim_t addresses) {
    int text[2];
    REQUIRE(pipe(text) == 0);
    fork_ranks(1, [&](const LaunchEnv&) {  // a launcher of its own, with the limit
      const rlimit limit{addresses, addresses};
      setrlimit(RLIMIT_AS, &limit);
      const std::string said = fork_ranks(1, [](const LaunchEnv&) {
                                 std::signal(SIGSEGV, SIG_DFL);  // Catch2 has one
                                 return raise(SIGSEGV);
                               }).message;
      return write(text[1], said.data(), said.size()) < 0 ? 1 : 0;
    });
    char said[512];
    const ssize_t n = ::read(text[0], said, sizeof said);
    close(text[0]), close(text[1]);
    return std::string(said, static_cast<std::size_t>(std::max<ssize_t>(n, 0)));
  };
  CHECK_THAT(message_under(rlim_t{8} << 30),
             Catch::Contains("was killed by signal 11 (Segmentation fault): this process may have 8589934592 B of "
                             "addresses (ulimit -v), and libraries that get no more end so"));
  CHECK_THAT(message_under(RLIM_INFINITY), Catch::EndsWith("was killed by signal 11 (Segmentation fault)"));
}
#endif

TEST_CASE("a child that is stopped is named by the launcher, whether anybody waits for it or not", "[launch]") {
  std::vector<std::string> said;
  LaunchOptions options;
  options.say_after_seconds = 0.5;
  options.say = [&](const std::string& line) {
    said.push_back(line);
    if (said.size() == 2) kill(std::stoi(line.substr(line.find("(pid ") + 5)), SIGCONT);
  };
  const auto r = fork_ranks(
      2,
      [](const LaunchEnv& e) {
        if (e.rank == 0) return raise(SIGSTOP);
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        return 0;
      },
      options);
  CHECK(r.exit_code == 0);
  REQUIRE(said.size() == 2);
  CHECK_THAT(said[0], Catch::StartsWith("rank 0 (pid ") &&
                          Catch::Contains("has been stopped (SIGSTOP, job control or a debugger) for ") &&
                          Catch::Matches(".*: kill -CONT [0-9]+ lets it go on"));
}

TEST_CASE("an exception in a rank is exit code 3", "[launch]") {
  CHECK(fork_ranks(1, [](const LaunchEnv&) -> int { throw std::runtime_error("expected by this test"); }).exit_code ==
        3);
}

TEST_CASE("programs find their rank in the environment", "[launch]") {
  const std::string script =
      "test \"$WORLD_SIZE\" = 2 && test \"$MASTER_ADDR\" = 127.0.0.1 && test \"$MASTER_PORT\" -gt 0 && "
      "case $RANK in 0) test -e /proc/self/fd/$HOTBUNK_LISTEN_FD ;; 1) test -z \"$HOTBUNK_LISTEN_FD\" && exit 2 ;; "
      "esac";
  const auto r = spawn_local(2, {"/bin/sh", "-c", script});
  CHECK(r.ranks[0].exit_code == 0);
  CHECK(r.ranks[1].exit_code == 2);
  CHECK(spawn_local(1, {"/nonexistent/program"}).exit_code == 3);
}

}  // namespace
}  // namespace hotbunk
