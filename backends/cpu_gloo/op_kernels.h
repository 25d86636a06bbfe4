// The CPU kernels, registered against the op catalogue: one plain table, kind -> function.
#pragma once
#include <cstddef>
#include <string>

#include "backends/cpu_gloo/kernels/context.h"
#include "exec/driver.h"
#include "graph/boxes.h"

namespace hotbunk {

/// Where a tensor's first element is on this rank.
class Addresses {
 public:
  virtual ~Addresses() = default;
  virtual std::byte* address(const Tensor&) const = 0;
};

struct KernelCall {
  kernels::KernelContext& context;
  const Addresses& addresses;
  const Op& op;
  const Sizes& sizes;
  const Places& places;
  const BoundOp& bound;  // the same op, for who wants names
};

using OpKernel = void (*)(const KernelCall&);

/// The kernel of a compute or data op; nullptr when this backend has none.
OpKernel op_kernel(OpKind);

/// "" or why this op's dtypes are not handled.
std::string why_unsupported(const Op&);

}  // namespace hotbunk
