// How rows come to the experts of data ranks: all at once, or in rounds of a bounded size (train.expert_capacity).
#pragma once
#include <cstdint>

#include "spec/scenario.h"

namespace hotbunk {

/// Of a micro-batch on one rank, in rows (a token's choice of an expert).
struct ExpertRounds {
  std::int64_t sent = 0;      // of its own tokens, to all ranks: as many come where every expert gets as many
  std::int64_t most = 0;      // that may come: every token of every rank may take as many experts of one rank as it can
  std::int64_t capacity = 0;  // that there is room for at once
  std::int64_t rounds = 1;    // ⌈most / capacity⌉: as many as may be needed
};

/// Nothing where no data ranks have other experts. Assumes: ep and etp that the loader let pass.
ExpertRounds expert_rounds(const Scenario&);

/// More rounds than this are no plan but a loop.
inline constexpr std::int64_t max_expert_rounds = 64;

}  // namespace hotbunk
