// A rank dies: the others stop within seconds and say who it was, in which phase and operation.
#include "runtime/death_watch.h"

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <thread>
#include <vector>

#include "base/check.h"
#include "runtime/communicator.h"
#include "runtime/wire.h"
#include "tests/runtime/ranks.h"

namespace hotbunk {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

/// Exit code 5: the rank noticed, with a message that contains every part; 6: noticed late or with another message.
int expect_death(const LaunchEnv& env, const std::function<void(CpuWorld&)>& work,
                 const std::vector<std::string>& parts) {
  const auto start = Clock::now();
  try {
    CpuWorld world(env);
    work(world);
    return 0;
  } catch (const RuntimeFailure& e) {
    const std::string message = e.what();
    bool ok = seconds_since(start) < 10.0;
    for (const std::string& part : parts) ok &= message.find(part) != std::string::npos;
    if (!ok) std::fprintf(stderr, "rank %d after %.1f s: %s\n", env.rank, seconds_since(start), message.c_str());
    return ok ? 5 : 6;
  }
}

TEST_CASE("kill -9 in the middle of collectives: the others throw and name the dead rank", "[death]") {
  const Transport transport = GENERATE(Transport::shm, Transport::gloo);
  const int victim = GENERATE(0, 2);
  const auto result = fork_ranks(4, [&](const LaunchEnv& env) {
    const auto work = [&](CpuWorld& world) {
      const std::vector<int> all = {0, 1, 2, 3};
      const auto c = world.communicator(all, "fsdp", transport);
      std::vector<float> data(100'000);
      for (int i = 0;; ++i) {
        world.watch().set_phase(i < 3 ? "rollout" : "train");
        world.watch().set_op("all_reduce grads");
        c->all_reduce(data.data(), data.data(), std::ssize(data), DType::f32);
        if (i == 5 && world.rank() == victim) {
          world.watch().set_op("adamw layers.1");
          kill(getpid(), SIGKILL);
        }
      }
    };
    return expect_death(env, work,
                        {fmt::format("rank {} (pid ", victim), "died while in phase train, op adamw layers.1",
                         "noticed it in all_reduce #"});
  });
  CHECK(result.first_failure->rank == victim);
  CHECK(result.first_failure->signal == SIGKILL);
  CHECK(result.exit_code == 3);
  for (const RankExit& e : result.ranks)
    if (e.rank != victim) {
      INFO("rank " << e.rank << ", signal " << e.signal);
      CHECK(e.exit_code == 5);
    }
}

TEST_CASE("a rank that leaves without goodbye, or fails, ends the others with its reason", "[death]") {
  const bool announced = GENERATE(false, true);
  const auto result = fork_ranks(3, [&](const LaunchEnv& env) {
    return expect_death(env,
                        [&](CpuWorld& world) {
                          world.watch().set_phase("wake");
                          world.barrier("together");  // so that the phase was published everywhere
                          if (world.rank() == 1) {
                            if (announced) world.watch().announce_failure("arena full");
                            throw RuntimeFailure("rank 1 (pid in phase wake itself: failed died arena full");
                          }
                          world.get("never set");
                        },
                        {"rank 1 (pid ", announced ? "failed" : "died", "phase wake", announced ? "arena full" : ""});
  });
  for (const RankExit& e : result.ranks) CHECK(e.exit_code == 5);
}

TEST_CASE("groups without the dead rank are told as well", "[death]") {
  const auto result = fork_ranks(3, [&](const LaunchEnv& env) {
    return expect_death(
        env,
        [&](CpuWorld& world) {
          const auto pair = world.rank() < 2 ? world.communicator(std::vector{0, 1}, "tp", Transport::gloo) : nullptr;
          world.barrier("connected");
          if (world.rank() == 2) {
            std::this_thread::sleep_for(std::chrono::milliseconds(300));  // the others are on their way by then
            _exit(7);
          }
          if (world.rank() == 1)
            std::this_thread::sleep_for(std::chrono::seconds(60));  // computes; ended by the unwinding limit
          float x = 0;
          pair->all_reduce(&x, &x, 1, DType::f32);
        },
        {"rank 2 (pid "});
  });
  CHECK(result.ranks[0].exit_code == 5);  // out of a gloo wait for rank 1, because rank 2 died
  CHECK(result.ranks[1].exit_code == 3);  // could not unwind
  CHECK(result.ranks[2].exit_code == 7);
}

TEST_CASE("leave waits for everybody, and nobody is taken for dead", "[death]") {
  const auto result = test::with_ranks(3, [](CpuWorld& world) {
    if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    const auto start = Clock::now();
    world.leave();
    if (world.rank() == 0) RANK_REQUIRE(seconds_since(start) > 0.1);
    RANK_REQUIRE(!world.watch().any_dead());
  });
  CHECK(result.exit_code == 0);
}

/// Whether the other side hangs up within 10 s.
bool hung_up(int fd) {
  const timeval patience{10, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  char answer[256];
  ssize_t n = 0;
  while ((n = recv(fd, answer, sizeof answer, 0)) > 0) {
  }
  return n == 0 || errno == ECONNRESET;
}

/// Strangers without the token come no further than store_test.cc shows.
TEST_CASE("what no rank says is hung up on, and the ranks notice nothing", "[death]") {
  const std::string http = "GET / HTTP/1.1\r\nHost: a\r\n\r\n";
  const std::vector<Frame> frames = {
      {Message::hello, "x", "1"},          {Message::hello, "", "1"},
      {Message::hello, "1junk", "1"},  // would read as rank 1
      {Message::hello, "-1", "1"},         {Message::hello, "99999999999999999999", "1"},
      {Message::hello, "1", "1"},  // rank 1 is there already
      {Message::hello, "1", "no pid"},     {Message::add, "counter", "many"},
      {Message::add, "word", "1"},   // whose value is no number
      {Message::add, "large", "1"},  // does not fit
      {static_cast<Message>('?'), "", ""},
  };
  const auto result = fork_ranks(2, [&](const LaunchEnv& env) {
    try {
      CpuWorld world(env);
      if (world.rank() == 0) {
        world.set("word", "no number");
        world.set("large", "9223372036854775807");
        for (std::size_t i = 0; i <= frames.size(); ++i) {
          const int fd = join({env.master_addr, env.master_port, env.token}, 10.0);
          if (i < frames.size()) send_frame(fd, frames[i].type, frames[i].key, frames[i].value);
          else if (send(fd, http.data(), http.size(), 0) < 0) return 7;
          if (!hung_up(fd)) return 10 + static_cast<int>(i);
          close(fd);
        }
      }
      world.barrier("after the strangers");
      world.leave();
      return 0;
    } catch (const std::exception& e) {
      std::fprintf(stderr, "rank %d: %s\n", env.rank, e.what());
      return 4;
    }
  });
  CHECK(result.message == "");
  CHECK(result.exit_code == 0);
}

TEST_CASE("garbage where rank 0's watch should speak is a death with a reason, not the end of the process", "[death]") {
  const auto [type, key, value] = GENERATE(table<Message, std::string, std::string>({
      {Message::died, "x", "1\ntrain\n"},
      {Message::died, "-1", "1\ntrain\n"},
      {Message::died, "2", "1\ntrain\n"},
      {Message::died, "1", "no lines"},
      {Message::died, "1", std::string((4 << 20) + 1, 'x')},
  }));
  int ends[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
  std::thread stranger([&, type = type, key = key, value = value] { send_frame(ends[1], type, key, value); });
  {
    DeathWatchOptions options;
    options.rank = 0;
    options.world_size = 2;
    options.socket = ends[0];
    DeathWatch watch(options);
    CHECK(watch.wait_for_death(10.0));
    CHECK_THAT(watch.message(), Catch::Contains("carries garbage"));
  }
  close(ends[1]);
  stranger.join();
}

TEST_CASE("status texts are cut, not spilled", "[death]") {
  DeathWatch watch(DeathWatchOptions{});
  watch.set_phase(std::string(100, 'p'));
  watch.set_op(std::string(100, 'o'));
  CHECK(watch.status_of(0) == "phase " + std::string(63, 'p') + ", op " + std::string(63, 'o'));
  CHECK(watch.status_of(1) == "");
  watch.leave();  // of a world of one: nothing to wait for
}

}  // namespace
}  // namespace hotbunk
