// E301 where a plan is interpreted: what every interpreter says of a map that asks for more than a rank's capacity.
#pragma once
#include <functional>

#include "base/diagnostic.h"
#include "graph/bound.h"

namespace hotbunk {

/// Bytes that may be mapped in a space at once, the device's without the plan's overhead; below 0: the plan gives no
/// limit.
std::int64_t mappable_bytes(const Plan&, Space);

/// A map that mappable_bytes does not allow.
struct RefusedMap {
  Rank rank = 0;
  std::int32_t step = 0;
  std::int16_t phase = 0;
  BoundOp op;
  std::int64_t mapped_bytes = 0;  // in the op's space before it
};

/// E301: who, where, the arithmetic, and the largest of what is live in that space or waits for its map.
Diagnostic does_not_fit(const Plan&, const RefusedMap&, const std::function<bool(const Buffer&)>& is_live);

}  // namespace hotbunk
