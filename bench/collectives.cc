// Collectives of local ranks over both transports, in nccl-tests' columns.
//
//   algbw  bytes of the full tensor (all-gather: output, reduce-scatter: input) per second of one call, GB/s = 1e9 B/s
//   busbw  algbw times what a ring sends per byte: 2(W-1)/W for all-reduce, (W-1)/W for all-gather, reduce-scatter and
//          all-to-all, 1 for broadcast and p2p; comparable with the link's (here: the memory's) rate whatever W is
//   cpu    processor time that one rank spends per call, mean over ranks: with W ranks on C cores no call can be
//   shorter than
//          W/C of it, and unlike the time it means something on a busy machine
// A time is the slowest rank's, the median over repetitions that follow one warm-up. Every call is checked elsewhere
// (tests/cpu_comm).
//
//   bench_collectives [--ranks 4] [--max-mib 64] [--transport shm|gloo|both] [--heap] [--cold]
// --heap: buffers in ordinary memory, staged through shared memory, instead of in a shared arena.
// --cold: peers' pages leave a process before each repetition, as they do where a section sleeps.
#include <fmt/format.h>
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "backends/cpu_gloo/arena.h"
#include "backends/cpu_gloo/cpu_world.h"
#include "runtime/communicator.h"
#include "runtime/launch.h"
#include "runtime/stream_thread.h"

namespace {

using namespace hotbunk;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

struct Options {
  int ranks = 4;
  int max_mib = 64;
  std::string transport = "both";
  bool heap = false, cold = false;
};

struct Bench {
  std::string name;
  double bus_factor;
  std::function<void(std::int64_t bytes)> call;  // bytes of the full tensor
};

/// Of this process and all its threads, user and system.
double cpu_seconds() {
  rusage r;
  getrusage(RUSAGE_SELF, &r);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(r.ru_utime) + seconds(r.ru_stime);
}

struct Measured {
  double seconds;      // median over repetitions of the slowest rank's time per call
  double cpu_seconds;  // per rank and call
};

template <class Prepare>
Measured measure(Communicator& c, const Bench& b, std::int64_t bytes, Prepare&& prepare) {
  const int per_round = bytes <= (64 << 10) ? 20 : 1, rounds = bytes >= (64 << 20) ? 5 : 15;
  b.call(bytes);
  std::vector<double> times;
  double cpu = 0;
  for (int i = 0; i < rounds; ++i) {
    prepare();
    c.barrier();
    const double cpu_before = cpu_seconds();
    const auto start = Clock::now();
    for (int k = 0; k < per_round; ++k) b.call(bytes);
    cpu += cpu_seconds() - cpu_before;
    auto mine = static_cast<float>(seconds_since(start) / per_round), slowest = 0.0f;
    c.all_reduce(&mine, &slowest, 1, DType::f32, ReduceOp::max);
    times.push_back(static_cast<double>(slowest));
  }
  std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
  auto mine = static_cast<float>(cpu / (rounds * per_round)), sum = 0.0f;
  c.all_reduce(&mine, &sum, 1, DType::f32);
  return {times[static_cast<std::size_t>(rounds / 2)], static_cast<double>(sum) / c.size()};
}

void run_transport(CpuWorld& world, const Options& o, Transport transport, float* send, float* recv) {
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto c = world.communicator(ranks, fmt::format("bench-{}", name_of(transport)), transport);
  const int w = c->size(), next = (c->rank() + 1) % w, previous = (c->rank() + w - 1) % w;
  const double shared = static_cast<double>(w - 1) / w;
  const std::vector<Bench> benches = {
      {"all_reduce", 2 * shared, [&](std::int64_t n) { c->all_reduce(send, recv, n / 4, DType::f32); }},
      {"all_gather", shared, [&](std::int64_t n) { c->all_gather(send, recv, n / w); }},
      {"reduce_scatter", shared, [&](std::int64_t n) { c->reduce_scatter(send, recv, n / 4 / w, DType::f32); }},
      {"broadcast", 1, [&](std::int64_t n) { c->broadcast(send, n, 0); }},
      {"all_to_all", shared, [&](std::int64_t n) { c->all_to_all(send, recv, n / w); }},
      {"p2p ring", 1, [&](std::int64_t n) { c->send_recv(next, send, n, previous, recv, n); }},
  };
  for (const Bench& b : benches)
    for (std::int64_t bytes = 4 << 10; bytes <= std::int64_t{o.max_mib} << 20; bytes *= 8) {
      const Measured m = measure(*c, b, bytes, [&] {
        if (o.cold) world.forget_peers();
      });
      const double algbw = static_cast<double>(bytes) / m.seconds / 1e9;
      if (c->rank() == 0)
        fmt::print("{:>9} {:>15} {:>12} {:>10.1f} {:>8.2f} {:>8.2f} {:>10.1f}\n", name_of(transport), b.name, bytes,
                   m.seconds * 1e6, algbw, algbw * b.bus_factor, m.cpu_seconds * 1e6);
      std::fflush(stdout);
    }
}

int run_rank(const LaunchEnv& env, const Options& o) {
  CpuWorld world(env);
  const std::int64_t bytes = std::int64_t{o.max_mib} << 20;
  Arena arena({"bench", 2 * bytes, 2 * bytes, !o.heap});
  const auto start = Clock::now();
  arena.map(0, 2 * bytes, "bench");
  if (env.rank == 0)
    fmt::print("# map {} MiB: {:.2f} GB/s\n", 2 * o.max_mib,
               2 * static_cast<double>(bytes) / seconds_since(start) / 1e9);
  if (!o.heap) world.share(arena);
  auto* send = reinterpret_cast<float*>(arena.base());
  auto* recv = reinterpret_cast<float*>(arena.at(bytes));
  std::fill(send, send + bytes / 4, 1.0f);
  if (env.rank == 0)
    fmt::print("{:>9} {:>15} {:>12} {:>10} {:>8} {:>8} {:>10}\n", "transport", "operation", "bytes", "us", "algbw",
               "busbw", "cpu us");
  if (o.transport != "gloo") run_transport(world, o, Transport::shm, send, recv);
  if (o.transport != "shm") run_transport(world, o, Transport::gloo, send, recv);
  world.leave();
  return 0;
}

/// Seconds per enqueue and run of an empty closure.
double stream_cost() {
  StreamThread s("bench");
  constexpr int n = 200'000;
  const auto start = Clock::now();
  for (int i = 0; i < n; ++i) s.enqueue([] {});
  s.sync();
  return seconds_since(start) / n;
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  CLI::App app("Collectives between local ranks");
  app.add_option("--ranks", o.ranks, "ranks on this host")->check(CLI::Range(1, 64));
  app.add_option("--max-mib", o.max_mib, "largest tensor, MiB")->check(CLI::Range(1, 4096));
  app.add_option("--transport", o.transport)->check(CLI::IsMember({"shm", "gloo", "both"}));
  app.add_flag("--heap", o.heap, "buffers outside shared arenas");
  app.add_flag("--cold", o.cold, "peers' pages leave a process before each repetition");
  CLI11_PARSE(app, argc, argv);
  const LaunchResult r = fork_ranks(o.ranks, [&](const LaunchEnv& env) { return run_rank(env, o); });
  if (r.exit_code != 0) fmt::print(stderr, "{}\n", r.message);
  fmt::print("# stream: {:.2f} us per enqueue and run of an empty closure\n", stream_cost() * 1e6);
  return r.exit_code;
}
