// Sections that take shifts in the same pages: where the device's memory of a rank lies in its file.
#pragma once
#include <vector>

#include "backends/cpu_gloo/moving_copies.h"
#include "graph/plan.h"
#include "runtime/shm_region.h"

namespace hotbunk {

/// Where each section of a program's device memory lies in the file of its arena, by addresses (section_bases). Bytes
/// of two sections lie on the same bytes of the file if no walk of the program has both mapped at once; what moves to
/// the host keeps its own, for its pages are elsewhere then. The file is about as long as the most that is mapped.
std::vector<FilePiece> file_places(const Plan&, const Program&, const MovingCopies&);

}  // namespace hotbunk
