// The arithmetic of reducing collectives: inputs in rank order, so that every rank computes the same bits.
#pragma once
#include <span>

#include "backends/cpu_gloo/kernels/context.h"

namespace hotbunk::kernels {

/// out[i] (+)= Σ_r inputs[r][i], r ascending. fp32, i32, i64, or bf16 (summed in fp32, rounded once). `out` may be one
/// of the inputs.
void reduce_sum(KernelContext&, std::span<const void* const> inputs, DType, void* out, std::int64_t n,
                Write = Write::overwrite);

/// out[i] = max_r inputs[r][i]; fp32 or i32; NaN wins. At least one input. `out` may be one of the inputs.
void reduce_max(KernelContext&, std::span<const void* const> inputs, DType, void* out, std::int64_t n);

}  // namespace hotbunk::kernels
