// Which bytes of which section an op touches: what dependencies, verification and liveness are made of.
#pragma once
#include <vector>

#include "graph/plan.h"

namespace hotbunk {

struct Access {
  Section section = Section::transient;
  std::int64_t begin = 0, end = 0;  // bytes from the section's base
  bool write = false;
};

/// All accesses of one op, reads first. In-place outputs (rope, all_reduce, adamw, accumulate) appear as writes; a
/// write orders after reads and writes alike, so a read of the same bytes need not be listed again.
std::vector<Access> accesses(const Program&, const Op&);

/// The order in which one iteration visits blocks, for static walks: every block of a driven phase in order, those that
/// leave no buffer behind twice, so that the steady state of a loop is seen.
struct BlockVisit {
  std::int16_t phase = 0;
  std::int32_t block = 0;
};
std::vector<BlockVisit> block_visits(const Plan&, const Program&, When);

}  // namespace hotbunk
