// The experts' mesh over the dense one: etp x ep x copies over the same ranks of a pipeline stage as tp x data, etp
// fastest, then ep.
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>

#include "spec/scenario.h"

namespace hotbunk {

/// How training's tensor-parallel ranks and data ranks share experts. The ranks of a stage, tensor-parallel place by
/// place and then data rank by data rank, are blocks of `places` neighbours each; a block has tokens of its own, and
/// its places compute the experts' part of these together: each of them `1 / columns` of `1 / (wholes spread)` of the
/// experts, and `spread` neighbouring blocks have other experts each. `blocks` of them are the ranks of one tp.
///
///   etp = tp                columns = tp, a block is all tp ranks, ep blocks have other experts each
///   etp = 1, ep = tp n      wholes = tp, a block is all tp ranks, n of them have other experts each
///   etp = ep = 1            each rank is a block, and has all experts
///
/// As etp divides tp, places = gcd(tp, etp ep) = wholes columns, and wholes spread = ep. So blocks and spread have no
/// common divisor: whatever spread divides of the blocks of some data ranks, it divides the data ranks.
struct ExpertMesh {
  std::int64_t blocks = 1, places = 1, wholes = 1, spread = 1;
  std::int64_t columns() const { return places / wholes; }
  /// Whether a part of an expert has other copies than a tensor-parallel rank's part of all else.
  bool lies_apart() const { return blocks > 1 || spread > 1; }
  /// Whether copies of tokens may go to blocks (train.expert_dispatch): where the places of one all have the same
  /// experts, and no extent counts its tokens.
  bool may_send_copies() const { return wholes == 1 && !counts_tokens(); }
  /// Whether a block's tokens are counted by themselves: neither a rank's own nor all of a tensor-parallel group.
  bool counts_tokens() const { return blocks > 1 && places > 1; }
  friend auto operator<=>(const ExpertMesh&, const ExpertMesh&) = default;
};

/// Of a layout that the loader let pass; where tp % etp is not 0, which nothing executes, as many blocks of all tp
/// ranks have other experts as ep etp ranks are. `moe`: of a model without experts one block of all tp ranks.
inline ExpertMesh expert_mesh(const TrainLayout& l, bool moe) {
  if (!moe) return {.places = l.tp};
  if (l.tp % l.etp != 0) return {.places = l.tp, .spread = std::max<std::int64_t>(1, l.ep * l.etp / l.tp)};
  const std::int64_t places = std::gcd(l.tp, l.etp * l.ep);
  return {.blocks = l.tp / places, .places = places, .wholes = places / l.etp, .spread = l.etp * l.ep / places};
}
inline ExpertMesh expert_mesh(const Scenario& s) { return expert_mesh(s.train.layout, s.model.moe.has_value()); }

}  // namespace hotbunk
