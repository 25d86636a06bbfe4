// Forward GEMM for a handful of rows: streams the weights once, at memory bandwidth. Internal to the kernels.
#pragma once
#include "backends/cpu_gloo/kernels/context.h"

namespace hotbunk::kernels {

/// y[T,N] (+)= x[T,K] · w[N,K]ᵀ (+ bias[N], fp32 or nullptr). Every element is one chain of fused multiply-adds per
/// vector lane over k, then a tree over lanes: its bits depend on its row of x and its row of w only.
void skinny_forward(KernelContext&, ConstMatrix x, ConstMatrix w, const float* bias, Matrix y, std::int64_t T,
                    std::int64_t N, std::int64_t K, Write);

}  // namespace hotbunk::kernels
