// Peaks of a plan without running it: the walk of alloc, free, map and unmap over one iteration.
#pragma once
#include <vector>

#include "trace/trace.h"

namespace hotbunk {

/// Memory of one rank over prologue, two iterations (the steady state) and epilogue.
RankMemory static_memory(const Plan&, Rank);

/// Which buffers of a space were alive when its live bytes peaked in a phase (-1: in any), largest first.
struct LiveBuffer {
  std::string name;
  std::string section;
  Category category = Category::params;
  std::int64_t bytes = 0;
};
std::vector<LiveBuffer> live_at_peak(const Plan&, Rank, std::int16_t phase = -1, Space = Space::device);

/// The same, with buffers that differ in a number only as one: "train.layers.*.q_proj". Largest first; together they
/// are the phase's peak_bytes, to the byte.
struct LiveTensors {
  std::string name;     // * stands for a number
  std::string section;  // where they lie
  Category category = Category::params;
  std::int64_t buffers = 0, bytes = 0;  // of all of them
};
std::vector<LiveTensors> live_tensors_at_peak(const Plan&, Rank, std::int16_t phase = -1, Space = Space::device);
/// "layers.17.q_proj" -> "layers.*.q_proj"
std::string without_numbers(const std::string& name);

/// The rank that maps most, and whether every rank's mapped bytes plus overhead stay within its capacity, on both
/// sides.
struct FitReport {
  bool fits = true;
  Rank worst_rank = 0;
  Space space = Space::device;  // of what does not fit
  std::int64_t mapped_peak_bytes = 0, capacity_bytes = 0, overhead_bytes = 0;
  std::int16_t phase = -1;  // of those in which the worst rank's mapped bytes peak, the one that fills them most
};
FitReport check_fit(const Plan&);

}  // namespace hotbunk
