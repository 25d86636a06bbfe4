// Benchmarks that take turns with another program: a round of work, one JSON line on stdout, then a wait for a line on
// stdin before the next round. scripts/bench_torch.py speaks the same way, so rounds of the two are interleaved and a
// load that comes and goes on the machine meets both.
#pragma once
#include <fmt/format.h>
#include <time.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/diagnostic.h"
#include "spec/model.h"

namespace hotbunk::bench {

/// Of every program that decodes: contexts of 128 to 384 tokens. A prefill is of longer prompts.
constexpr int prompt_tokens = 128, new_tokens = 257, steps_per_round = 16, prefill_tokens = 512;

class Rounds {
 public:
  /// The warm-up is over: says so and waits for the first turn.
  void ready() {
    std::puts("{\"ready\": true}");
    take_turn();
  }
  /// The round's work is done; `tokens` were processed in it.
  void done(std::int64_t tokens) {
    const double wall = seconds(CLOCK_MONOTONIC) - wall_, cpu = seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu_;
    fmt::print("{{\"tokens\": {}, \"seconds\": {:.6f}, \"cpu_seconds\": {:.6f}}}\n", tokens, wall, cpu);
    take_turn();
  }

 private:
  static double seconds(clockid_t clock) {
    timespec t{};
    ::clock_gettime(clock, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  }
  /// The other program has finished, or gone: so has this one when nobody says go.
  void take_turn() {
    std::fflush(stdout);
    for (int c = std::getchar(); c != '\n'; c = std::getchar())
      if (c == EOF) std::exit(0);
    wall_ = seconds(CLOCK_MONOTONIC);
    cpu_ = seconds(CLOCK_PROCESS_CPUTIME_ID);
  }
  double wall_ = 0.0, cpu_ = 0.0;
};

/// 46M parameters, Llama-like: the model of every figure in docs/benchmarks.md. Without its family, which needs the
/// library: bench/llama_step.cc is built without it.
inline ModelSpec llama_46m() {
  ModelSpec m;
  m.name = "llama-46m";
  m.hidden = 512;
  m.intermediate = 1376;
  m.layers = 12;
  m.heads = m.kv_heads = 8;
  m.head_dim = 64;
  m.vocab = 8192;
  m.max_position = 2048;
  m.norm_eps = 1e-5;
  return m;
}

inline std::vector<std::int32_t> random_tokens(std::int64_t count, std::uint32_t seed) {
  std::mt19937 draw(seed);
  std::vector<std::int32_t> out;
  for (std::int64_t i = 0; i < count; ++i)
    out.push_back(static_cast<std::int32_t>(draw() % static_cast<std::uint32_t>(llama_46m().vocab)));
  return out;
}

template <class T>
T value_or_exit(Result<T> result) {
  if (!result) {
    std::fprintf(stderr, "%s", render(result.error()).c_str());
    std::exit(1);
  }
  return std::move(*result);
}

/// `--name value`, or the default.
inline std::string option(int argc, char** argv, std::string_view name, std::string fallback) {
  for (int i = 1; i + 1 < argc; i += 2)
    if (argv[i] == name) return argv[i + 1];
  return fallback;
}

}  // namespace hotbunk::bench
