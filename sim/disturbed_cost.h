// Prices of a cluster that is not as it should be: slow ranks, slow links, times that scatter (DisturbanceSpec).
#pragma once
#include <vector>

#include "sim/op_cost.h"
#include "spec/scenario.h"

namespace hotbunk {

/// How many times as long a rank's things take. Ranks that differ in it do not do the same.
struct RankFactors {
  double own = 1.0;                                // its kernels and priced blocks
  double network = 1.0, nvlink = 1.0, pcie = 1.0;  // bytes over its links
  bool operator==(const RankFactors&) const = default;
};
/// By rank; empty without slow ranks, nodes and links. Factors of a rank and of its node multiply.
std::vector<RankFactors> rank_factors(const DisturbanceSpec&, const ClusterSpec&);

/// Another cost, disturbed:
///   kernels, priced blocks        x own of the rank
///   collectives, sends            x network of the rank where its group leaves the node, else x nvlink; as the slowest
///                                 participant's answer holds for all, one slow link slows the group
///   copies from and to the host   x pcie
/// The whole price with its latency. Jitter is of what a rank does by itself, also its copies: a collective waits for
/// its slowest member's anyway. Lognormal: factors are above 0, and their mean is 1.
class DisturbedCost final : public OpCost {
 public:
  /// `cost` outlives this.
  DisturbedCost(const OpCost& cost, const DisturbanceSpec&, const ClusterSpec&);
  std::int64_t nanoseconds(const Plan&, Rank, const Op&, const Args&) const override;
  std::int64_t rank_class(Rank r) const override {
    return jitters() ? r : classes_.empty() ? 0 : classes_[static_cast<std::size_t>(r)];
  }
  ThreadModel threads() const override { return cost_.threads(); }
  FirstUse first_use(const Op& op, const Args& args) const override { return cost_.first_use(op, args); }
  std::int64_t decision_nanoseconds() const override { return cost_.decision_nanoseconds(); }
  bool jitters() const override { return jitter_.relative > 0.0; }
  double jitter(Rank, const Op&, std::uint64_t execution) const override;

 private:
  double factor(const Plan&, Rank, const Op&) const;

  const OpCost& cost_;
  JitterSpec jitter_;
  std::vector<RankFactors> factors_;   // by rank, or empty
  std::vector<std::int64_t> classes_;  // by rank: the first one with the same factors
  std::int64_t ranks_per_node_;
};

}  // namespace hotbunk
