// The kernels of the ops, registered against the op catalogue: one plain table, kind -> launches.
#pragma once
#include <string>

#include "backends/cuda/dnn_attention.h"
#include "backends/cuda/launch.h"
#include "backends/cuda/op_tables.h"
#include "backends/cuda/products.h"
#include "runtime/op_call.h"

namespace hotbunk::cuda {

/// One run of an op, to be enqueued.
struct CudaCall : OpCall {
  const Launcher& launch;
  const OpTables& tables;
  CUdeviceptr scratch;                // scratch_bytes of the op, this stream's own
  BlasProducts* products = nullptr;   // cuBLASLt on this stream; none: our kernels form all products
  DnnAttention* attention = nullptr;  // cuDNN on this stream; none: our kernels form attention's gradients
};

using OpLaunch = void (*)(const CudaCall&);

/// The launches of a compute or data op on device memory; nullptr when this backend has none.
OpLaunch op_launch(OpKind);

/// Memory that the op's kernels hand to each other, at its capacity.
std::int64_t scratch_bytes(const Op&);

/// "" or why this op's dtypes, or what its attributes ask for, are not handled.
std::string why_unsupported(const Op&);

/// Strided copies of one run of boxes, with a cast where the dtypes differ. `first`, `count`: which of them.
void copy_boxes(const Launcher&, CUdeviceptr from, DType from_dtype, CUdeviceptr to, DType to_dtype, const BoxRun&,
                std::int64_t first, std::int64_t count);

}  // namespace hotbunk::cuda
