// Ranks mostly do the same work on shards of their own.
#pragma once
#include "graph/plan.h"

namespace hotbunk {

/// Whether two programs differ in nothing but names, attributes and boxes: then memory, order and what is said to the
/// groups are the same in both.
bool same_but_boxes(const Program&, const Program&);

}  // namespace hotbunk
