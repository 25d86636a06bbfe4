// Weights in the order in which products read them, arranged once and read by every product until they are written
// again: what engines do behind a load of weights.
#pragma once
#include "backends/cpu_gloo/kernels/context.h"

namespace hotbunk::kernels {

/// Whether products read a weight of N rows and K columns in an order of its own here: by shape, type and machine
/// alone, so that whoever packs and whoever reads agree.
bool prepacks(DType, std::int64_t N, std::int64_t K);

/// w[N,K], fp32 or bf16, rows behind each other: in place into the order that linear_forward reads with
/// WeightOrder::prepacked. As many bytes; nothing where the shape is none that is packed.
void prepack(KernelContext&, void* w, DType, std::int64_t N, std::int64_t K);

/// The reverse.
void unpack(KernelContext&, void* w, DType, std::int64_t N, std::int64_t K);

}  // namespace hotbunk::kernels
