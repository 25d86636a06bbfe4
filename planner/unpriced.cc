// Why a layout has no price, with the arithmetic.
#include <fmt/format.h>

#include "base/format.h"
#include "planner/answers.h"

namespace hotbunk {
namespace {

Diagnostic no_layout(std::string why, std::string help) {
  return {.code = "E263",
          .message = "the layout does not divide: " + std::move(why),
          .where = {},
          .notes = {},
          .help = std::move(help)};
}

std::string rollout_sizes(const ModelSpec& m, const RolloutPoint& r) {
  const std::string experts = m.moe ? fmt::format(", {} experts", m.moe->experts) : std::string();
  return fmt::format("rollout tp {} attention dp {} ep {} cp {} over {} heads, {} KV heads, intermediate size {}{}",
                     r.tp, r.attention_dp, r.ep, r.cp, m.heads, m.kv_heads, m.intermediate, experts);
}

/// E301 with the sum that is too large.
Diagnostic no_room(const ScenarioPricer& s, const RolloutPoint& p) {
  const RlSetting& set = s.rl().setting();
  const RolloutPrice r = s.rl().price_rollout(p);
  const double longest = set.prompt_tokens + set.longest_response, cache = longest * r.kv_bytes_per_token;
  Diagnostic out{
      .code = "E301",
      .message = "the rollout does not hold its weights and one sequence of the longest length",
      .where = {},
      .notes = {fmt::format("weights {} + {:.0f} tokens x {} = {} on a rank, which has {:.2f} x {} = {}",
                            format_bytes(r.weight_bytes), longest, format_bytes(r.kv_bytes_per_token),
                            format_bytes(r.weight_bytes + cache), p.memory_fraction, format_bytes(set.device_bytes),
                            format_bytes(p.memory_fraction * set.device_bytes))},
      .help = "more tensor parallelism, or a larger rollout.memory_fraction"};
  if (set.pool_tokens > 0 && set.pool_tokens < longest) {
    out.notes = {fmt::format("the pool has {:.0f} tokens, the longest sequence {:.0f}", set.pool_tokens, longest)};
    out.help = "a larger rollout.kv_cache_tokens";
  }
  return out;
}

}  // namespace

std::optional<Diagnostic> ScenarioPricer::why_unpriced(const RlPoint& p) const {
  if (!train_.divides(p.train)) return no_layout(train_.why_invalid(p.train), "change train.layout or the batch");
  if (scenario_.algorithm.name == AlgorithmName::sft) return std::nullopt;
  if (!rl_.divides(p.rollout)) return no_layout(rollout_sizes(scenario_.model, p.rollout), "change rollout.layout");
  if (!rl_.price_rollout(p.rollout).fits) return no_room(*this, p.rollout);
  return std::nullopt;
}

}  // namespace hotbunk
