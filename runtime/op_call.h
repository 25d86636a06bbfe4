// One run of an op as an executing backend sees it.
#pragma once
#include <cstddef>

#include "exec/driver.h"
#include "graph/boxes.h"

namespace hotbunk {

/// Where a tensor's first element is on this rank.
class Addresses {
 public:
  virtual ~Addresses() = default;
  virtual std::byte* address(const Tensor&) const = 0;
};

struct OpCall {
  const Addresses& addresses;
  const Op& op;
  const Sizes& sizes;
  const Places& places;
  const BoundOp& bound;  // the same op, for who wants names
};

}  // namespace hotbunk
