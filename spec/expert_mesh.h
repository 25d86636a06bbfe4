// The experts' mesh over the dense one: etp x ep x copies over the same ranks of a pipeline stage as tp x data, etp
// fastest, then ep.
#pragma once
#include <cstdint>
#include <numeric>

#include "spec/scenario.h"

namespace hotbunk {

/// How training's tensor-parallel ranks and data ranks share experts. The ranks of a stage, tensor-parallel place by
/// place and then data rank by data rank, are blocks of `places` neighbours each; a block has tokens of its own, and
/// its places compute the experts' part of these together: each of them `1 / columns` of `1 / groups` of the experts,
/// and `spread` neighbouring blocks have others each. `blocks` of them are the ranks of one tp.
///
///   etp = tp                columns = tp, a block is all tp ranks, ep blocks have other experts each
///   etp = 1, ep = tp n      wholes = tp, a block is all tp ranks, n of them have other experts each
///   etp = ep = 1            each rank is a block, and has all experts
///
/// places = gcd(tp, etp ep) and places spread = etp ep. So blocks and spread have no common divisor: whatever spread
/// divides of the blocks of some data ranks, it divides the data ranks.
///
/// Where etp does not divide tp, an expert is shared by `parts` = etp / gcd(tp, etp) neighbouring ones of these blocks,
/// each of which has a part of it, and by gcd(tp, etp) places of each: a choice sends a row to every part. Columns add
/// up as the experts of one token do, so a part is to all that follows what a whole expert is elsewhere.
///
///   tp = 1, etp = 2        two data ranks share each expert: blocks of one place, parts = 2
///   tp = 4, etp = 6        places = 2 of which both have columns of the same experts, parts = 3
struct ExpertMesh {
  std::int64_t blocks = 1, places = 1, wholes = 1, spread = 1, parts = 1;
  /// Ranks that share an expert: etp.
  std::int64_t columns() const { return places / wholes * parts; }
  /// Of these, neighbours in one block.
  std::int64_t columns_of_block() const { return places / wholes; }
  /// Ranks, or groups of those that share an expert, which have other experts each: ep.
  std::int64_t groups() const { return wholes * spread / parts; }
  /// Whether a part of an expert has other copies than a tensor-parallel rank's part of all else.
  bool lies_apart() const { return blocks > 1 || spread > 1; }
  /// Whether copies of tokens may go to blocks (train.expert_dispatch): where the places of one all have the same
  /// experts, and no extent counts its tokens.
  bool may_send_copies() const { return wholes == 1 && !counts_tokens(); }
  /// Whether a block's tokens are counted by themselves: neither a rank's own nor all of a tensor-parallel group.
  bool counts_tokens() const { return blocks > 1 && places > 1; }
  friend auto operator<=>(const ExpertMesh&, const ExpertMesh&) = default;
};

/// Of a layout that the loader let pass. `moe`: of a model without experts one block of all tp ranks.
inline ExpertMesh expert_mesh(const TrainLayout& l, bool moe) {
  if (!moe) return {.places = l.tp};
  const std::int64_t places = std::gcd(l.tp, l.etp * l.ep), shared = std::gcd(l.tp, l.etp);
  return {.blocks = l.tp / places,
          .places = places,
          .wholes = places / shared,
          .spread = l.etp * l.ep / places,
          .parts = l.etp / shared};
}
inline ExpertMesh expert_mesh(const Scenario& s) { return expert_mesh(s.train.layout, s.model.moe.has_value()); }

}  // namespace hotbunk
