// Where the device's memory of a rank lies in its file: sections that are never there together share pages.
#pragma once
#include <vector>

#include "backends/cpu_gloo/moving_copies.h"
#include "graph/plan.h"
#include "runtime/shm_region.h"

namespace hotbunk {

/// Of each section of a program's device memory its addresses (section_bases) and where they lie in the arena's file.
/// Bytes of two sections lie on the same bytes of the file if no walk of the program has both mapped at once; what
/// moves to the host has its own, for its pages are elsewhere meanwhile. The file is about as long as the most that is
/// mapped. No part of the plan: other backends give memory back to a device that has pages of its own.
std::vector<FilePiece> section_pieces(const Plan&, const Program&, const MovingCopies&);

}  // namespace hotbunk
