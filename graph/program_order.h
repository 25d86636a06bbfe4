// In which order a rank launches what it meets others by, where a meeting holds up what is launched behind it.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "graph/plan.h"

namespace hotbunk {

/// Whether the op waits for other ranks: one that communicates, of a group.
bool meets_others(const Op&);

/// [phase][block][i]: the place of the block's i-th op that meets others, in program order, among them.
using LaunchPlaces = std::vector<std::vector<std::vector<std::int32_t>>>;

/// An order of each block's meetings in which ranks that did one after another, with all streams as one, would come to
/// an end: of this rank. The program's, where that is one. Else, as where one rank sends on one stream before it
/// receives on another and so does its neighbour, the order in which a walk of all ranks' streams comes by them; it
/// keeps each stream's and each event's order. None, where that is no such order either.
std::optional<LaunchPlaces> launch_places(const Plan&, Rank);

}  // namespace hotbunk
