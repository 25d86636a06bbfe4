// Whether ranks that do one thing after another, each in its program's order, would come to an end.
#pragma once
#include "graph/plan.h"

namespace hotbunk {

/// Each block is walked on all its ranks as if a rank had one stream: an op that communicates waits until its peers
/// have come to it too. True: the plan's order is one order of meetings for all ranks. False: only streams side by side
/// resolve it, as where one rank of a pipeline sends before it receives and so does its neighbour.
bool meets_in_program_order(const Plan&);

}  // namespace hotbunk
