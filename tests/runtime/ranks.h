// Ranks as forked children of one test: what they require is said on stderr and ends the rank, the parent sees who
// ended how.
#pragma once
#include <fmt/format.h>

#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>

#include "backends/cpu_gloo/cpu_world.h"
#include "runtime/launch.h"

namespace hotbunk::test {

/// Catch2's macros count in the process that runs the test; inside a rank this takes their place.
[[noreturn]] inline void rank_fail(const char* text, const char* file, int line, const std::string& detail) {
  throw std::runtime_error(fmt::format("{}:{}: {} {}", file, line, text, detail));
}

/// Runs body on n ranks that have met and says goodbye for them. A rank that throws ends with exit code 4.
inline LaunchResult with_ranks(int n, const std::function<void(CpuWorld&)>& body, const WorldOptions& options = {}) {
  return fork_ranks(n, [&](const LaunchEnv& env) {
    try {
      CpuWorld world(env, options);
      body(world);
      world.leave();
      return 0;
    } catch (const std::exception& e) {
      std::fprintf(stderr, "rank %d: %s\n", env.rank, e.what());
      return 4;
    }
  });
}

}  // namespace hotbunk::test

#define RANK_REQUIRE(condition, ...)                                                                             \
  do {                                                                                                           \
    if (!(condition)) ::hotbunk::test::rank_fail(#condition, __FILE__, __LINE__, ::fmt::format("" __VA_ARGS__)); \
  } while (false)
