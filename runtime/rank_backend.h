// A backend that plays one rank of a world for real: what a run asks of it while it goes on.
#pragma once
#include <vector>

#include "exec/backend.h"

namespace hotbunk {

class RankBackend : public Backend {
 public:
  /// Between two phases: this rank's stays in the phases of one of the latest two steps, and its memory so far.
  virtual std::vector<PhaseSpan> stays(std::int32_t step) const = 0;
  virtual RankMemory memory_so_far() = 0;
};

}  // namespace hotbunk
