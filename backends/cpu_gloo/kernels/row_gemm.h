// Forward GEMM whose rows know nothing of each other: what makes rollout and training agree to the bit. Internal to the
// kernels.
#pragma once
#include "backends/cpu_gloo/kernels/context.h"

namespace hotbunk::kernels {

/// Columns of x and w whose products are summed before they meet the products of the columns before them.
inline constexpr std::int64_t kRowChunk = 1024;

/// y[T,N] (+)= x[T,K] · w[N,K]ᵀ (+ bias[N], fp32 or nullptr). Every element has one order of sums, whatever T, N, the
/// tile that it falls in and the number of threads: per chunk of kRowChunk columns one chain of fused multiply-adds per
/// vector lane over ascending k, a tree over the lanes (sum_lanes), the chunks in order, then the bias. Its bits depend
/// on its row of x and its row of w only (and on the vector width of the build).
void row_gemm(KernelContext&, ConstMatrix x, ConstMatrix w, const float* bias, Matrix y, std::int64_t T, std::int64_t N,
              std::int64_t K, Write);

}  // namespace hotbunk::kernels
