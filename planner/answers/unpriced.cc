// Why a layout has no price, with the arithmetic.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/format.h"
#include "planner/answers/answers.h"
#include "spec/names.h"

namespace hotbunk {
namespace {

Diagnostic no_layout(std::string why, std::string help) {
  return {.code = "E263",
          .message = "the layout does not divide: " + std::move(why),
          .where = {},
          .notes = {},
          .help = std::move(help)};
}

std::string rollout_sizes(const ModelSpec& m, const RolloutPoint& r, const WeightFormat& w) {
  const std::string blocks =
      w.narrow ? fmt::format("; a rank's slice is whole blocks of {} in {}", w.block, w.products) : "";
  const std::string experts = m.moe ? fmt::format(", {} experts", m.moe->experts) : std::string();
  return fmt::format(
      "rollout tp {} attention dp {} ep {} cp {} pp {} over {} heads, {} KV heads, {} layers, intermediate "
      "size {}{}{}",
      r.tp, r.attention_dp, r.ep, r.cp, r.pp, m.heads, m.kv_heads, m.layers, m.intermediate, experts, blocks);
}

Diagnostic lacks_room(std::string message, std::string note, std::string help) {
  return {
      .code = "E301", .message = std::move(message), .where = {}, .notes = {std::move(note)}, .help = std::move(help)};
}

/// E301 with the sum that is too large: what the start asks for, the pool that was given, or what the engine's rule
/// leaves of the device.
Diagnostic no_room(const ScenarioPricer& s, const RlPoint& p) {
  const RlSetting& set = s.rl().setting();
  const RolloutPrice r = s.rl().price_rollout(p.rollout);
  if (r.start_lacking_bytes > 0) {
    const double asked = std::ceil(p.rollout.memory_fraction * set.device_bytes), free = asked - r.start_lacking_bytes;
    return lacks_room(
        fmt::format("{} does not start: it asks for more free memory than it finds", name_of(set.engine)),
        fmt::format("rollout.memory_fraction {} x {} = {}, free beside contexts and communicators are {}",
                    p.rollout.memory_fraction, format_bytes(set.device_bytes), format_bytes(asked), format_bytes(free)),
        "");
  }
  const std::string message = "the rollout does not hold its weights and one sequence of the longest length";
  const double longest = set.longest_sample;
  if (set.pool_tokens > 0 && set.pool_tokens < longest)
    return lacks_room(
        message, fmt::format("the pool has {:.0f} tokens, the longest sequence {:.0f}", set.pool_tokens, longest),
        fmt::format("a rollout.kv_cache_tokens of {:.0f}, or 0 for what memory_fraction leaves", longest));
  const double need = r.weight_bytes + longest * r.kv_bytes_per_token, left = need - r.lacking_bytes;
  return lacks_room(
      message,
      fmt::format("weights {} + {:.0f} tokens x {} = {} on a rank; rollout.memory_fraction {} of {} leaves {} for them",
                  format_bytes(r.weight_bytes), longest, format_bytes(r.kv_bytes_per_token), format_bytes(need),
                  p.rollout.memory_fraction, format_bytes(set.device_bytes), left > 0 ? format_bytes(left) : "nothing"),
      "");
}

}  // namespace

std::optional<Diagnostic> ScenarioPricer::why_unpriced(const RlPoint& p) const {
  if (!train_.divides(p.train)) return no_layout(train_.why_invalid(p.train), "change train.layout or the batch");
  if (scenario_.algorithm.name == AlgorithmName::sft) return std::nullopt;
  if (!rl_.divides(p.rollout))
    return no_layout(rollout_sizes(scenario_.model, p.rollout, rl_.setting().weights), "change rollout.layout");
  if (!rl_.price_rollout(p.rollout).fits) return no_room(*this, p);
  return std::nullopt;
}

}  // namespace hotbunk
