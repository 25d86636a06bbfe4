// What the joint search has found so far, and what could still change it.
#pragma once
#include <cstdint>

#include "planner/search/ranking.h"
#include "planner/search/search_parts.h"

namespace hotbunk {

Value value_of(Objective, const RlSetting&, double gpus, double seconds, double bytes);

struct SameLayout {
  bool operator()(const RlPoint& a, const RlPoint& b) const { return same_layout(a, b); }
};

/// What of a price decides.
struct Judged {
  Value value;
  double bytes = 0, over = 0;  // at the fullest moment; too many, on device and host
};
/// Sets whether the price fits.
Judged judge(const RlModel&, const SearchOptions&, const RlPoint&, RlPrice&);

struct Found {
  TopList<RlCandidate, SameLayout> best;
  Front<RlCandidate> front, lacking;  // lacking: objective against the bytes that are too many
  std::int64_t priced = 0, feasible = 0;
  RolloutsBeside beside;
  SyncsBetween syncs;
  explicit Found(std::size_t keep) : best(keep, {}) {}

  void offer(const RlCandidate&, const Judged&);
  /// What another found moves here; what it knows of rollouts and syncs stays for its next batch.
  void take(Found&);
};

}  // namespace hotbunk
