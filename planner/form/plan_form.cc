#include "planner/form/plan_form.h"

#include <algorithm>

#include "base/check.h"
#include "layout/rollout_weights.h"
#include "lowering/sample_rows.h"
#include "spec/validate.h"

namespace hotbunk {

PlanPhases plan_phases_of(const Scenario& s) {
  PlanPhases out{};
  for (const JobPhase& p : JobPhases(s)) out[static_cast<std::size_t>(p.phase)] = true;
  return out;
}

std::string PlanForm::why_not(const Scenario& s) {
  if (const auto reasons = unsupported_to_execute(s); !reasons.empty()) return reasons.front();
  if (s.algorithm.name == AlgorithmName::sft) return "";
  if (std::string why = why_not_rollout_tp(s.model, s.rollout.layout.tp); !why.empty()) return why;
  if (!PlanForm(s.model).kv_blocks(s)) return "rollout.memory_fraction leaves no room for one sequence's KV cache";
  return "";
}

std::optional<std::int64_t> PlanForm::kv_blocks(const Scenario& s) const {
  const std::int64_t block = s.rollout.block_tokens, longest = max_blocks_per_seq(s);
  const std::int64_t useful = s.rollout.max_running_requests * longest;
  if (s.rollout.kv_cache_tokens > 0) return s.rollout.kv_cache_tokens / block;
  if (s.cluster.device_memory_bytes <= 0) return useful;
  const EngineSlices* engine = shapes_.engine(s.rollout.layout.tp);
  if (!engine) return std::nullopt;
  const std::int64_t element = size_of(s.rollout.dtype);
  const auto pool =
      static_cast<std::int64_t>(s.rollout.memory_fraction * static_cast<double>(s.cluster.device_memory_bytes)) -
      engine->elements(shapes_.layers) * element;
  const std::int64_t blocks =
      std::min(useful, pool / (2 * block * engine->kv_heads * s.model.head_dim * shapes_.layers * element));
  if (pool <= 0 || blocks < longest) return std::nullopt;
  return blocks;
}

}  // namespace hotbunk
