// Ranks that are alike: the same work, with the same data, among neighbours that are alike in turn. One of them is
// played, and what it does all of them do, at the same nanosecond.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "graph/plan.h"

namespace hotbunk {

struct OpCost;

class RankClasses {
 public:
  RankClasses() = default;
  /// Each rank by itself.
  static RankClasses unfolded(Rank num_ranks);
  /// The coarsest classes such that ranks of one class have equal numbers in `data` (what the Driver decides for them)
  /// and OpCost::rank_class, run the same program, and in each family meet ranks of the same classes; that all they
  /// communicate costs and counts the same; and that who is asked by name (send, recv, send_recv) is asked from the
  /// same place.
  /// `neighbours`: numbers of ranks that share something one behind the other, such as a node's; they too must be
  /// alike.
  static RankClasses fold(const Plan&, const OpCost&, std::span<const std::int32_t> data,
                          std::span<const std::int64_t> neighbours = {});

  bool folds() const { return players_.size() < representative_.size(); }
  /// The ranks that are played, ascending: of each class the lowest.
  const std::vector<Rank>& players() const { return players_; }
  /// Who stands for a rank; itself, where it is played.
  Rank player_of(Rank r) const { return representative_[static_cast<std::size_t>(r)]; }
  bool plays(Rank r) const { return player_of(r) == r; }
  Rank num_ranks() const { return static_cast<Rank>(representative_.size()); }
  /// By rank.
  const std::vector<Rank>& representatives() const { return representative_; }

 private:
  explicit RankClasses(std::vector<Rank> representative);
  std::vector<Rank> representative_, players_;
};

}  // namespace hotbunk
