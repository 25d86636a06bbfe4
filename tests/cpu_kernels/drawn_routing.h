// Routers' logits drawn at random and what follows from them, which tests of routers and of experts share.
#pragma once
#include <cstdint>
#include <vector>

#include "backends/cpu_gloo/kernels/experts.h"
#include "tests/cpu_kernels/oracle.h"

namespace hotbunk::kernels::test {

using Index = std::vector<std::int32_t>;

/// Router logits and what follows from them.
struct DrawnRouting {
  Routing r;
  std::vector<float> logits, weights;
  Index chosen, rows, offsets;

  DrawnRouting(KernelContext& ctx, Routing routing, Random& rng) : r(routing) {
    const auto choices = static_cast<std::size_t>(r.tokens * r.choices);
    logits.resize(static_cast<std::size_t>(r.tokens * r.experts)), weights.resize(choices);
    chosen.resize(choices), rows.resize(choices), offsets.resize(static_cast<std::size_t>(r.experts) + 1);
    for (float& x : logits) x = static_cast<float>(2 * rng.normal());
    route(ctx, r, logits.data(), weights.data(), chosen.data());
    expert_sort(chosen, {0, r.experts, r.experts}, rows.data(), offsets.data());
  }
  double logit(std::int64_t t, std::int64_t e) const { return logits[static_cast<std::size_t>(t * r.experts + e)]; }
  std::int64_t choice(std::int64_t t, std::int64_t j) const {
    return chosen[static_cast<std::size_t>(t * r.choices + j)];
  }
};

/// Softmax over all and over what is chosen, one choice and several.
inline const std::vector<Routing>& routings() {
  static const std::vector<Routing> all = {{1, 1, 1, false}, {7, 4, 2, true}, {33, 8, 3, false}, {33, 5, 5, true}};
  return all;
}

}  // namespace hotbunk::kernels::test
