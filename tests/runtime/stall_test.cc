// Waits that last: who is waited for, what it does, and when a wait is over.
#include "runtime/stall.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <map>
#include <thread>

#include "base/check.h"
#include "base/file.h"
#include "tests/runtime/ranks.h"

namespace hotbunk {
namespace {

using namespace std::chrono_literals;

/// Ranks as a watch sees them, and time as the test says.
struct Scene {
  explicit Scene(StallOptions options = {.rank = 0, .world_size = 4}) : watch(options) {}

  /// One second, or more, goes by.
  std::optional<Stall> pass(std::chrono::duration<double> time = 1s) {
    now += std::chrono::duration_cast<StallWatch::Clock::duration>(time);
    return watch.tick(
        now,
        [&](int rank) -> std::optional<RankLook> {
          if (!ranks.contains(rank)) return std::nullopt;
          return ranks[rank];
        },
        [&](const std::string& line) { said.push_back(line); });
  }
  std::optional<Stall> pass_seconds(
      int n, const std::function<void()>& each = [] {}) {
    for (int i = 0; i < n; ++i) {
      each();
      if (auto stall = pass()) return stall;
    }
    return std::nullopt;
  }

  StallWatch watch;
  StallWatch::Clock::time_point now = StallWatch::Clock::now();
  std::map<int, RankLook> ranks;
  std::vector<std::string> said;
};

RankLook asleep(int pid, const std::string& op = "gemm") {
  RankLook look;
  look.moment.pid = pid;
  look.moment.phase = "train";
  look.moment.op = op;
  look.process = ProcessState{'S', 0.0};
  return look;
}

StallWatch::Wait wait_for(Scene& s, std::vector<int> ranks) {
  return {s.watch, [] { return std::string("all_reduce #17 of group fsdp"); }, [ranks] { return ranks; }};
}

TEST_CASE("a wait is reported after 10 s and then ever more rarely, with who is missing and what it does", "[stall]") {
  Scene s;
  s.ranks[2] = asleep(22);
  s.ranks[2].process->state = 'T';
  const auto wait = wait_for(s, {2});
  s.pass_seconds(9);
  CHECK(s.said.empty());
  s.pass_seconds(3);
  REQUIRE(s.said.size() == 1);
  CHECK_THAT(s.said[0],
             Catch::Contains("hotbunk: rank 0 has waited 1") &&
                 Catch::Contains("s in all_reduce #17 of group fsdp for rank 2 (pid 22): stopped (SIGSTOP, job "
                                 "control or a debugger), last in phase train, op gemm"));
  s.pass_seconds(15);
  CHECK(s.said.size() == 1);
  s.pass_seconds(5);
  CHECK(s.said.size() == 2);
  s.pass_seconds(55);
  CHECK(s.said.size() == 2);
}

TEST_CASE("what a rank that is waited for does: computes, waits itself, does not answer, is gone", "[stall]") {
  const auto report = [](const RankLook& look, double cpu_per_second) {
    Scene s;
    s.ranks[1] = look;
    const auto wait = wait_for(s, {1});
    s.pass_seconds(12, [&] { s.ranks[1].cpu_seconds += cpu_per_second; });
    REQUIRE(s.said.size() == 1);
    return s.said[0];
  };
  CHECK_THAT(report(asleep(7), 0.5),
             Catch::Contains("rank 1 (pid 7): busy (0.50 cores), last in phase train, op gemm"));
  CHECK_THAT(report(asleep(7), 0.0), Catch::Contains("rank 1 (pid 7): alive, but it uses no CPU"));
  RankLook look = asleep(7);
  look.moment.wait = "barrier #2 of group tp";
  look.moment.waiting_for = {3};
  CHECK_THAT(report(look, 0.0), Catch::Contains("rank 1 (pid 7): waits itself in barrier #2 of group tp for ranks 3"));
  look = asleep(7);
  look.process.reset();
  CHECK_THAT(report(look, 0.0), Catch::Contains("its process is gone"));
  look.here = look.answers = false;
  CHECK_THAT(report(look, 0.0), Catch::Contains("on another host, which is there, but the process does not answer"));
}

TEST_CASE("the limit counts time in which nobody works, and names who holds up the rest", "[stall]") {
  Scene s;
  s.ranks[1] = asleep(11);
  s.ranks[2] = asleep(22);
  s.ranks[2].process->state = 'T';
  s.ranks[1].moment.wait = "barrier #3 of group pp";
  s.ranks[1].moment.waiting_for = {2};
  const auto wait = wait_for(s, {1});
  SECTION("nobody does anything: over after 600 s, and the stopped rank is to blame, not the one that waits for it") {
    s.ranks[3] = asleep(33);  // comes first and waits for nobody, but it is not stopped
    s.ranks[1].moment.waiting_for = {3, 2};
    CHECK_FALSE(s.pass_seconds(599));
    const auto stall = s.pass_seconds(10);
    REQUIRE(stall);
    CHECK(stall->blamed == 2);
    CHECK_THAT(stall->text, Catch::Contains("rank 0 waited in all_reduce #17 of group fsdp and for 600 s nobody it "
                                            "waits for worked (run.timeout_s): rank 2 (pid 22): stopped"));
  }
  SECTION("a rank further on computes: for ever") {
    s.ranks[2].process->state = 'R';
    CHECK_FALSE(s.pass_seconds(3000, [&] { s.ranks[2].cpu_seconds += 0.9; }));
    CHECK(s.said.size() < 15);  // said ever more rarely
  }
  SECTION("operations that end, as those of slow disks do, start the count anew") {
    int second = 0;
    CHECK_FALSE(s.pass_seconds(3000, [&] { s.ranks[2].moment.finished += ++second % 500 == 0 ? 1 : 0; }));
  }
  SECTION("work now and then is no excuse: the idle seconds add up") {
    int second = 0;
    const auto stall = s.pass_seconds(1300, [&] { s.ranks[2].cpu_seconds += ++second % 2 ? 0.5 : 0.0; });
    REQUIRE(stall);
    CHECK(second > 1150);
  }
  SECTION("the whole job was stopped for an hour: nobody's fault") {
    s.pass_seconds(5);
    CHECK_FALSE(s.pass(1h));
    CHECK_FALSE(s.pass_seconds(500));
  }
}

TEST_CASE("ranks that wait for each other end too; nobody is to blame", "[stall]") {
  Scene s({.rank = 0, .world_size = 2, .timeout_seconds = 30.0});
  s.ranks[1] = asleep(11);
  s.ranks[1].moment.wait = "all_gather #4 of group tp";
  s.ranks[1].moment.waiting_for = {0};
  const auto wait = wait_for(s, {1});
  const auto stall = s.pass_seconds(60);
  REQUIRE(stall);
  CHECK(stall->blamed == -1);
  CHECK_THAT(stall->text, Catch::Contains("rank 1 (pid 11): waits itself in all_gather #4 of group tp for ranks 0"));
  Scene never({.rank = 0, .world_size = 2, .timeout_seconds = 0.0});
  never.ranks = s.ranks;
  const auto patient = wait_for(never, {1});
  CHECK_FALSE(never.pass_seconds(10'000));
}

TEST_CASE("a status is of one moment, whoever writes beside the reader", "[stall]") {
  auto status = std::make_unique<RankStatus>();
  std::atomic<bool> over{false};
  // Two writers, as two streams' threads: what either leaves alone is the other's, and never half of it.
  std::thread owner([&] {
    for (int i = 0; !over; ++i) {
      const char letter = static_cast<char>('a' + i % 26);
      status->set_phase(std::string(60, letter));
      status->set_op(std::string(60, letter));
    }
  });
  std::thread other([&] {
    for (int i = 0; !over; ++i) status->set_wait(std::string(180, static_cast<char>('a' + i % 26)), {i % 26, i % 26});
  });
  const auto enough = std::chrono::steady_clock::now() + 2s;
  int read = 0, mixed = 0;
  for (; read < 20'000 || std::chrono::steady_clock::now() < enough; ++read) {
    const RankMoment m = status->read();
    if (!m.phase.empty() && (m.phase != std::string(60, m.phase[0]) || (!m.op.empty() && m.op != m.phase))) ++mixed;
    if (!m.wait.empty() &&
        (m.wait != std::string(180, m.wait[0]) || m.waiting_for != std::vector{m.wait[0] - 'a', m.wait[0] - 'a'}))
      ++mixed;
  }
  over = true;
  owner.join();
  other.join();
  CHECK(mixed == 0);
  CHECK(status->read().waiting_for.size() == 2);
}

TEST_CASE("a report survives the way to another host", "[stall]") {
  RankReport r;
  r.moment = {"train", "gemm", "barrier #1 of group tp", {3, -1}, 77, 4711, true};
  r.cpu_seconds = 12.5;
  const auto back = parse_report(report_text(r));
  REQUIRE(back);
  CHECK(back->moment == r.moment);
  CHECK(back->cpu_seconds == 12.5);
  for (const char* bad : {"", "1\n2\n3", "a\n1\n0\n1\np\no\nw\n", "1\n1\n0\n1\np\no\nw\nx", "1\n1\n0\n-1\np\no\nw\n1"})
    CHECK_FALSE(parse_report(bad));
}

/// Runs n ranks whose stderr goes to a file; returns what they said.
std::pair<LaunchResult, std::string> run_ranks(int n, const WorldOptions& options,
                                               const std::function<void(CpuWorld&)>& body) {
  const auto file = std::filesystem::temp_directory_path() / fmt::format("hotbunk_stall_test.{}", getpid());
  const int fd = open(file.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
  const auto result = fork_ranks(n,
                                 [&](const LaunchEnv& env) {
                                   dup2(fd, 2);
                                   try {
                                     CpuWorld world(env, options);
                                     body(world);
                                     world.leave();
                                     return 0;
                                   } catch (const RuntimeFailure& e) {
                                     std::fprintf(stderr, "rank %d ends: %s\n", env.rank, e.what());
                                     return 3;
                                   }
                                 },
                                 {.grace_seconds = 5.0});
  close(fd);
  const std::string text = read_file(file).value_or("");
  std::filesystem::remove(file);
  return {result, text};
}

TEST_CASE("a stopped rank is named by all, and the run ends after the limit", "[stall]") {
  const Transport transport = GENERATE(Transport::shm, Transport::gloo);
  const int victim = GENERATE(0, 2);
  WorldOptions options;
  options.say_after_seconds = 0.5;
  options.timeout_seconds = 3.0;
  const auto [result, said] = run_ranks(3, options, [&](CpuWorld& world) {
    const std::vector<int> all = {0, 1, 2};
    const auto c = world.communicator(all, "fsdp", transport);
    c->barrier();
    world.watch().set_phase("train");
    world.watch().set_op("adamw layers.1");
    if (world.rank() == victim) raise(SIGSTOP);
    c->barrier();
  });
  INFO(said);
  CHECK(result.exit_code == 3);
  CHECK_THAT(result.message,
             Catch::Contains(fmt::format("rank {} (pid {}) was stopped (SIGSTOP", victim, result.ranks[victim].pid)));
  for (int r = 0; r < 3; ++r) {
    if (r == victim) continue;
    CHECK(result.ranks[r].exit_code == 3);
    CHECK_THAT(said, Catch::Contains(fmt::format("hotbunk: rank {} has waited ", r)));
    CHECK_THAT(said, Catch::Contains(fmt::format("rank {} ends: rank ", r)));
  }
  CHECK_THAT(said, Catch::Contains("s in barrier #2 of group fsdp (ranks 0, 1, 2)") &&
                       Catch::Contains(
                           fmt::format(" for rank {} (pid {}): stopped (SIGSTOP", victim, result.ranks[victim].pid)) &&
                       Catch::Contains("last in phase train, op adamw layers.1") &&
                       Catch::Contains("for 3 s nobody it waits for worked (run.timeout_s)"));
}

TEST_CASE("a rank stopped before the ranks have met is named too", "[stall]") {
  WorldOptions options;
  options.say_after_seconds = 0.4;
  options.timeout_seconds = 3.0;
  const auto [result, said] = run_ranks(3, options, [&](CpuWorld& world) {
    if (world.rank() == 1) raise(SIGSTOP);
    world.barrier("all is read");
  });
  INFO(said);
  CHECK(result.exit_code == 3);
  CHECK_THAT(said, Catch::Contains("s in the rendezvous, for \"barrier/all is read/all\" for rank") &&
                       Catch::Contains(fmt::format("rank 1 (pid {}): stopped (SIGSTOP", result.ranks[1].pid)) &&
                       Catch::Contains("for 3 s nobody it waits for worked (run.timeout_s)"));
}

TEST_CASE("a rank that computes longer than the limit is waited for, and so is one that goes on after a stop",
          "[stall]") {
  WorldOptions options;
  options.say_after_seconds = 0.4;
  options.timeout_seconds = 2.0;
  const auto [result, said] = run_ranks(3, options, [&](CpuWorld& world) {
    const std::vector<int> all = {0, 1, 2};
    const auto c = world.communicator(all, "fsdp", Transport::shm);
    c->barrier();
    const auto start = std::chrono::steady_clock::now();
    volatile double x = 1.0;
    if (world.rank() == 1)
      while (std::chrono::steady_clock::now() - start < 6s) x = x * 1.0000001;
    c->barrier();
  });
  INFO(said);
  CHECK(result.message == "");
  CHECK_THAT(said, Catch::Contains("rank 1 (pid ") && Catch::Contains("): busy (") && !Catch::Contains("ends:"));
  options.timeout_seconds = 60.0;
  const auto [stopped, words] = run_ranks(2, options, [&](CpuWorld& world) {
    const std::vector<int> all = {0, 1};
    const auto c = world.communicator(all, "fsdp", Transport::shm);
    const int other = world.rank() == 0 ? std::stoi(world.get("pid")) : getpid();
    if (world.rank() == 1) {
      world.set("pid", std::to_string(getpid()));
      raise(SIGSTOP);
    } else {
      std::thread([other] {
        std::this_thread::sleep_for(3s);
        kill(other, SIGCONT);
      }).detach();
    }
    c->barrier();
  });
  INFO(words);
  CHECK(stopped.message == "");
  CHECK_THAT(words, Catch::Contains("stopped (SIGSTOP"));
}

}  // namespace
}  // namespace hotbunk
