// A cable is cut: ranks in network namespaces of their own, joined by a virtual cable, over gloo. Both ends stop, and
// say who is gone. Needs root (namespaces); where that is not permitted the test says that it is skipped.
#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <cstdlib>
#include <filesystem>

#include "base/check.h"
#include "base/file.h"
#include "tests/runtime/ranks.h"

namespace hotbunk {
namespace {

/// Two namespaces and the cable between them: 10.231.7.1 in `left`, 10.231.7.2 in `right`. Gone with the object.
struct Cable {
  Cable() {
    made = command("ip netns add {}", left) && command("ip netns add {}", right) &&
           command("ip link add {} netns {} type veth peer name {} netns {}", left, left, right, right) &&
           command("ip -n {0} address add 10.231.7.1/24 dev {0}", left) &&
           command("ip -n {0} address add 10.231.7.2/24 dev {0}", right) &&
           command("ip -n {0} link set {0} up", left) && command("ip -n {0} link set {0} up", right) &&
           command("ip -n {} link set lo up", left) && command("ip -n {} link set lo up", right);
  }
  ~Cable() {
    command("ip netns del {}", left);
    command("ip netns del {}", right);
  }
  template <class... Args>
  static bool command(fmt::format_string<Args...> text, Args&&... args) {
    return std::system((fmt::format(text, std::forward<Args>(args)...) + " 2>/dev/null").c_str()) == 0;
  }
  /// Frames of both ends go to a card that is not there: lost without a sign, as on a wire that is cut further on.
  bool misdirect() const {
    const char* const nobody = "lladdr 02:00:00:00:00:07 nud permanent";
    return command("ip -n {0} neigh replace 10.231.7.2 dev {0} {1}", left, nobody) &&
           command("ip -n {0} neigh replace 10.231.7.1 dev {0} {1}", right, nobody);
  }
  /// This process lives in that namespace from here on.
  static void enter(const std::string& name) {
    const int fd = open(("/run/netns/" + name).c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0 || setns(fd, CLONE_NEWNET) != 0) throw RuntimeFailure("cannot enter " + name);
    close(fd);
  }

  std::string left = fmt::format("hbl{}", getpid()), right = fmt::format("hbr{}", getpid());
  bool made = false;
};

TEST_CASE("a cut cable ends the ranks at both ends, and each names who is gone", "[network]") {
  const Cable cable;
  if (!cable.made) {
    std::fprintf(stderr, "skipped: network namespaces are not permitted here (they need root and iproute2)\n");
    WARN("skipped: network namespaces are not permitted here (they need root and iproute2)");
    return;
  }
  const bool silent = GENERATE(false, true);  // or the near end sees its interface go down
  const auto file = std::filesystem::temp_directory_path() / fmt::format("hotbunk_network_test.{}", getpid());
  const int fd = open(file.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
  const auto start = std::chrono::steady_clock::now();
  LaunchOptions launch;
  launch.grace_seconds = 90.0;  // nobody is to be ended from outside
  const auto result = fork_ranks(
      3,
      [&](LaunchEnv env) {
        dup2(fd, 2);
        env.listen_fd = -1;
        env.master_addr = "10.231.7.1";
        env.master_port = 29517;
        Cable::enter(env.rank == 2 ? cable.right : cable.left);
        try {
          CpuWorld world(env);
          const std::vector<int> all = {0, 1, 2};
          const auto c = world.communicator(all, "fsdp", Transport::gloo);
          world.watch().set_phase("train");
          std::vector<float> data(300'000);
          for (int i = 0;; ++i) {
            if (i == 20 && world.rank() == 2) {
              const bool cut = silent ? cable.misdirect() : Cable::command("ip -n {0} link set {0} down", cable.right);
              if (!cut) throw RuntimeFailure("the cable cannot be cut");
              world.watch().set_phase("train");  // said into the cut: what waits for an answer is not kept alive
            }
            c->all_reduce(data.data(), data.data(), std::ssize(data), DType::f32);
          }
        } catch (const RuntimeFailure& e) {
          std::fprintf(stderr, "rank %d ends: %s\n", env.rank, e.what());
          return 3;
        }
      },
      launch);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  close(fd);
  const std::string said = read_file(file).value_or("");
  std::filesystem::remove(file);
  INFO(said);
  CHECK(took.count() < 60.0);  // 30 s on a machine that is not busy; 600 and more without the watch
  for (const RankExit& e : result.ranks) CHECK(e.exit_code == 3);
  const std::string gone = fmt::format("rank 2 (pid {}) is gone while in phase train", result.ranks[2].pid);
  CHECK_THAT(said,
             Catch::Contains("rank 0 ends: " + gone) && Catch::Contains("rank 1 ends: " + gone) &&
                 Catch::Contains("10.231.7.2 has not answered for 20 s") &&
                 Catch::Contains(fmt::format("rank 2 ends: rank 0 (pid {}) is gone, and with it all ranks beyond: "
                                             "10.231.7.1 has not answered for 20 s",
                                             result.ranks[0].pid)));
}

}  // namespace
}  // namespace hotbunk
