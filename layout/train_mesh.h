// Which rank of training is where: the scenario's dimensions as a mesh.
#pragma once
#include "layout/mesh.h"
#include "spec/scenario.h"

namespace hotbunk {

/// Axes "tp", "cp", "dp" and "pp" in the layout's order, all of them there; "cp": context parallelism of either kind,
/// whose ranks share their sequences. Ranks of one "dp" coordinate work on the same samples.
Mesh train_mesh(const TrainLayout&);

}  // namespace hotbunk
