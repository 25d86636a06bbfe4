// A backend that plays one rank of a world for real: what a run asks of it while it goes on.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "exec/backend.h"

namespace hotbunk {

/// Who computed ops for which there is a choice, on one rank: how often it was made. What a graph of the device repeats
/// was chosen once.
struct LibraryChoice {
  std::string op;   // "linear 8192 x 2048 bf16": kind, the weight's rows and columns, dtypes
  std::string by;   // "own", "cuBLASLt", "cuDNN"
  std::string why;  // of ours: what spoke against the library
  std::int64_t times = 0;
};

class RankBackend : public Backend {
 public:
  /// Between two phases: this rank's stays in the phases of one of the latest two steps, and its memory so far.
  virtual std::vector<PhaseSpan> stays(std::int32_t step) const = 0;
  virtual RankMemory memory_so_far() = 0;
  /// Of this rank, until its trace was taken; none where there is no choice.
  virtual std::vector<LibraryChoice> library_choices() const { return {}; }
};

}  // namespace hotbunk
