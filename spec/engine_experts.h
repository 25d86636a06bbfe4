// Which groups of an engine's ranks may have other experts each: what rollout.layout.ep may be, and the search tries.
#pragma once
#include <cstdint>

#include "spec/scenario.h"

namespace hotbunk {

/// Whether `ep` groups of an engine's `ranks` (tp x cp) may have other experts each, as far as its launch can say so.
/// vLLM's ranks spread whole experts over all of them (--enable-expert-parallel) or none: "EP_SIZE = TP_SIZE x
/// DP_SIZE", which nothing sets (docs.vllm.ai, Expert Parallel Deployment). SGLang's --ep-size and our engine's ep
/// divide tp.
inline bool may_spread_experts(RolloutEngine engine, std::int64_t ep, std::int64_t ranks) {
  return engine != RolloutEngine::vllm || ep == 1 || ep == ranks;
}

}  // namespace hotbunk
