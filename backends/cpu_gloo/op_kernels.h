// The CPU kernels, registered against the op catalogue: one plain table, kind -> function.
#pragma once
#include <cstddef>

#include "backends/cpu_gloo/kernels/context.h"
#include "exec/backend.h"
#include "runtime/op_call.h"

namespace hotbunk {

struct KernelCall : OpCall {
  kernels::KernelContext& context;
};

using OpKernel = void (*)(const KernelCall&);

/// The kernel of a compute or data op; nullptr when this backend has none.
OpKernel op_kernel(OpKind);

/// Whether what executes by these kernels executes the op; memory, copies and messages are the backend's own.
Capability kernels_support(const Op&);

}  // namespace hotbunk
