// row_gemm of weights in their packed order: the same bits. Internal to the kernels.
#pragma once
#include "backends/cpu_gloo/kernels/context.h"
#include "backends/cpu_gloo/kernels/fused_linear.h"
#include "backends/cpu_gloo/kernels/prepack.h"

namespace hotbunk::kernels {

/// y[T,N] (+)= x[T,K] · w[N,K]ᵀ (+ bias[N], fp32 or nullptr), w as prepack left it, which is not PackedOrder::rows; its
/// dtype is x's. `beside`: as row_product takes it.
void packed_gemm(KernelContext&, ConstMatrix x, const void* w, const float* bias, Matrix y, std::int64_t T,
                 std::int64_t N, std::int64_t K, Write, PackedOrder, const BesideProduct& beside = {});

}  // namespace hotbunk::kernels
