// Ranges for profilers, as one that is attached sees them: this program is its own profiler.
#include "backends/cuda/nvtx.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <mutex>
#include <string>
#include <vector>

#include "lowering/lower.h"
#include "tests/cuda_backend/iteration.h"

#ifdef HOTBUNK_NVTX
namespace nvtx_test {
namespace {

std::mutex mutex;
std::vector<std::string> names;
bool recording = false;
thread_local int depth = 0;
int deepest = 0;

int NVTX_API push(const char* name) {
  const std::lock_guard lock(mutex);
  if (recording) names.emplace_back(name);
  ++depth;
  if (recording) deepest = std::max(deepest, depth);
  return depth;
}
int NVTX_API pop() { return --depth; }

int NVTX_API inject(NvtxGetExportTableFunc_t get) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(get(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned size = 0;
  if (callbacks == nullptr || callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size) == 0) return 0;
  *table[NVTX_CBID_CORE_RangePushA] = reinterpret_cast<NvtxFunctionPointer>(push);
  *table[NVTX_CBID_CORE_RangePop] = reinterpret_cast<NvtxFunctionPointer>(pop);
  return 1;
}

}  // namespace
}  // namespace nvtx_test

// What a program that is its own profiler sets, before its first range.
[[maybe_unused]] const bool profiler_attached = (InitializeInjectionNvtx2_fnptr = nvtx_test::inject) != nullptr;

TEST_CASE("a profiler sees ranges of phases and of bodies, each ended") {
  using namespace hotbunk;
  using namespace hotbunk::test;
  const Scenario scenario = tiny_job();
  const auto plan = lower(scenario);
  REQUIRE(plan);
  using namespace nvtx_test;
  recording = true;
  const Iteration it = run_iteration(*plan, scenario);
  recording = false;
  REQUIRE_THAT(it.text(), Catch::Equals(""));
  const auto seen = [](const std::string& name) { return std::ranges::find(names, name) != names.end(); };
  for (const auto& phase : plan->phases)
    if (!phase.players.empty()) CHECK(seen(phase.name));
  int bodies = 0;
  for (const Program& program : plan->programs)
    for (const Body& body : program.bodies) bodies += seen(body.name) ? 1 : 0;
  CHECK(bodies > 5);
  CHECK(deepest == 1);  // calling threads have phases, streams' threads bodies
  CHECK(depth == 0);
}
#endif
