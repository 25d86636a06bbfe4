// A trace's device memory for PyTorch's memory viewer (pytorch.org/memory_viz): what
// torch.cuda.memory._dump_snapshot() writes, one device per rank.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "trace/trace.h"

namespace hotbunk {

/// The ranks whose memory events are buffers of the plan, one by one, and not calls or runs taken together.
std::vector<Rank> ranks_with_buffers(const Plan&, const Trace&);

/// {"segments": […], "device_traces": [[…] per rank]}, of those ranks; the others' lists are empty. A segment is a
/// section of a rank's arena at its address there, tiled by blocks: what is live after the last event, and the gaps.
/// Events are alloc, and free_requested with free_completed; their one frame is {filename: phase, line: step, name:
/// buffer}. Addresses are the plan's. Source of the schema: torch/cuda/memory.py, _snapshot.
nlohmann::ordered_json memory_snapshot(const Plan&, const Trace&);

/// The same document as a pickle (protocol 2), which is what the viewer opens. Strings, integers below 2^63, booleans,
/// null, arrays and objects.
std::string to_pickle(const nlohmann::ordered_json&);

}  // namespace hotbunk
