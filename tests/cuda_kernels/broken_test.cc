// Fourteen kernels with one bug each: which check finds it.
#include <catch2/catch.hpp>
#include <numeric>

#include "tests/cuda_ptx/device.h"

namespace hotbunk {
std::string_view broken_kernel_ptx(std::string_view name);
}

using namespace hotbunk;
using namespace hotbunk::ptx;

namespace {

struct Broken {
  Broken()
      : module(parse(broken_kernel_ptx("broken"))),
        machine(module, memory),
        x(memory, "x", 128, true),
        y(memory, "y", 128) {
    std::iota(x.begin(), x.begin() + 128, 1.0f);
  }
  void run(const char* kernel, std::uint32_t blocks, std::uint32_t threads, int n) {
    machine.launch(kernel, {{blocks}, {threads}, 0, Arguments(x.begin(), y.begin(), n).bytes()});
  }
  Check found(const char* kernel, std::uint32_t blocks, std::uint32_t threads, int n) {
    try {
      run(kernel, blocks, threads, n);
    } catch (const Finding& f) {
      CHECK_THAT(f.what(), Catch::Contains(kernel));
      return f.check();
    }
    FAIL("nothing found in " << kernel);
    return Check::launch;
  }
  Module module;
  DeviceMemory memory;
  Machine machine;
  Array<float> x, y;
};

}  // namespace

TEST_CASE("the executor's checks find these bugs", "[broken]") {
  CHECK(Broken().found("missing_barrier", 1, 64, 64) == Check::shared_race);
  CHECK(Broken().found("missing_bound", 5, 32, 128) == Check::out_of_bounds);
  CHECK(Broken().found("divergent_shuffle", 1, 32, 32) == Check::warp_operation);
  CHECK(Broken().found("race_in_warp", 1, 32, 32) == Check::shared_race);
  CHECK(Broken().found("uninitialised", 1, 32, 32) == Check::uninitialised);
  CHECK(Broken().found("misaligned", 1, 8, 32) == Check::misaligned);
  CHECK(Broken().found("overlapping_boxes", 1, 128, 128) == Check::shared_race);
  CHECK(Broken().found("missing_wait", 1, 32, 128) == Check::in_flight);
  CHECK(Broken().found("divergent_barrier", 1, 64, 40) == Check::barrier);
  Broken dtype;
  dtype.run("wrong_dtype", 1, 32, 32);
  Array<float> z(dtype.memory, "z", 32);
  CHECK_THROWS_WITH(
      dtype.machine.launch("reads_fp32", {{1}, {32}, 0, Arguments(dtype.y.begin(), z.begin(), 32).bytes()}),
      Catch::Contains("uninitialised"));
}

TEST_CASE("and what they cannot see, the numbers show", "[broken]") {
  // Sums of 1 .. 32 are 528; a butterfly over 16 lanes sums lanes 0 to 15 alone.
  Broken lane;
  lane.run("wrong_lane", 1, 32, 32);
  CHECK(lane.y[0] == 136.0f);
  // Four rows of 32: the second begins one element early.
  Broken stride;
  stride.run("wrong_stride", 4, 32, 32);
  CHECK(stride.y[0] == 528.0f);
  CHECK(stride.y[1] != 528.0f + 32 * 32);
  // 30 elements: the last two were never written, which whoever reads them is told.
  Broken tail;
  tail.run("dropped_tail", 1, 32, 30);
  Array<float> z(tail.memory, "z", 32);
  CHECK_THROWS_WITH(tail.machine.launch("reads_fp32", {{1}, {32}, 0, Arguments(tail.y.begin(), z.begin(), 30).bytes()}),
                    Catch::Contains("uninitialised"));
  // An order of additions that is not fixed: 1e8 + 1 + … - 1e8 depends on who comes first.
  Broken order;
  order.y[0] = 0.0f;
  order.memory.mark_written(reinterpret_cast<std::uint64_t>(order.y.begin()), 512);
  for (int i = 0; i < 128; ++i) order.x[static_cast<std::size_t>(i)] = i == 0 ? 1e8f : i == 127 ? -1e8f : 1.0f;
  order.run("unordered_sum", 4, 32, 128);
  CHECK(order.y[0] != 126.0f);
}
