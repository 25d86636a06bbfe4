#include "spec/auto_ranks.h"

#include <fmt/format.h>

#include <initializer_list>
#include <limits>
#include <string>

namespace hotbunk {
namespace {

/// 2^63 - 1 where it is more: files may hold any number.
std::int64_t saturated_product(std::initializer_list<std::int64_t> factors) {
  std::int64_t n = 1;
  for (const std::int64_t f : factors)
    if (__builtin_mul_overflow(n, f, &n)) return std::numeric_limits<std::int64_t>::max();
  return n;
}

std::int64_t others_of(const TrainLayout& t) { return saturated_product({t.cp, t.ulysses, t.tp, t.pp}); }
std::int64_t others_of(const RolloutLayout& r) { return saturated_product({r.tp, r.pp, r.cp}); }

Diagnostic undivided(const SourceLocation& where, const char* key, const char* names, std::int64_t left,
                     std::int64_t others) {
  return {.code = "E203",
          .message = fmt::format("{} is auto, and the other dimensions do not divide the ranks", key),
          .where = where,
          .notes = {left > 0 ? fmt::format("{} ranks % ({} = {}) = {}", left, names, others, left % others)
                             : fmt::format("no ranks are left of the cluster's")},
          .help = "change them, or the cluster's nodes"};
}

}  // namespace

Diagnostics fill_auto_ranks(Scenario& s, AutoRanks open, const ScenarioLocator& locate) {
  constexpr const char *train_key = "train.layout.dp", *rollout_key = "rollout.layout.dp";
  TrainLayout& train = s.train.layout;
  RolloutLayout& rollout = s.rollout.layout;
  const bool rolls = s.algorithm.name != AlgorithmName::sft;
  const bool apart = rolls && s.placement == PlacementMode::disaggregated;
  if (apart && open.train && open.rollout)
    return {{.code = "E203",
             .message = "train.layout.dp and rollout.layout.dp are both auto, and share no ranks",
             .where = locate(rollout_key),
             .notes = {"disaggregated: the ranks of both add up to the cluster's"},
             .help = "give one of the two"}};
  Diagnostics out;
  const auto fill = [&](std::int64_t& dp, std::int64_t left, std::int64_t others, const char* key, const char* names) {
    if (left > 0 && left % others == 0) dp = left / others;
    else out.push_back(undivided(locate(key), key, names, left, others));
  };
  const std::int64_t ranks = s.cluster.ranks();
  const std::int64_t sampling = apart ? saturated_product({rollout.dp, others_of(rollout)}) : 0;
  const std::int64_t training = apart ? saturated_product({train.dp, others_of(train)}) : 0;
  if (open.train) fill(train.dp, ranks - sampling, others_of(train), train_key, "cp x ulysses x tp x pp");
  if (open.rollout && rolls) fill(rollout.dp, ranks - training, others_of(rollout), rollout_key, "tp x pp x cp");
  return out;
}

}  // namespace hotbunk
