// The CPU kernels, registered against the op catalogue: one plain table, kind -> function.
#pragma once
#include <cstddef>
#include <string>

#include "backends/cpu_gloo/kernels/context.h"
#include "runtime/op_call.h"

namespace hotbunk {

struct KernelCall : OpCall {
  kernels::KernelContext& context;
};

using OpKernel = void (*)(const KernelCall&);

/// The kernel of a compute or data op; nullptr when this backend has none.
OpKernel op_kernel(OpKind);

/// "" or why this op's dtypes are not handled.
std::string why_unsupported(const Op&);

}  // namespace hotbunk
