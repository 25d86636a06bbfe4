// Forward GEMM whose rows know nothing of each other: what makes rollout and training agree to the bit. Internal to the
// kernels.
#pragma once
#include "backends/cpu_gloo/kernels/context.h"
#include "backends/cpu_gloo/kernels/fused_linear.h"
#include "backends/cpu_gloo/kernels/prepack.h"

namespace hotbunk::kernels {

/// Columns of x and w whose products are summed before they meet the products of the columns before them.
inline constexpr std::int64_t kRowChunk = 1024;

/// y[T,N] (+)= x[T,K] · w[N,K]ᵀ (+ bias[N], fp32 or nullptr). Every element has one order of sums, whatever T, N, the
/// tile that it falls in and the number of threads: per chunk of kRowChunk columns four chains of fused multiply-adds
/// over ascending k, one per column of a quad, a to d, then (a + c) + (b + d), the chunks in order, then the bias. Its
/// bits depend on its row of x and its row of w only. What is `beside` the product is computed in its region: behind it
/// anything, with `overwrite`; a norm only of rows that are_kept().
void row_gemm(KernelContext&, ConstMatrix x, ConstMatrix w, const float* bias, Matrix y, std::int64_t T, std::int64_t N,
              std::int64_t K, Write, const BesideProduct& beside = {});

/// Whether every thread arranges all T rows of x whole, in memory of its own: few enough for that.
bool are_kept(std::int64_t T);

/// Whether linear_forward of T rows of x is this kernel's, and not oneDNN's (gemm.h).
bool is_row_product(const KernelContext&, DType, std::int64_t T, PackedOrder);

/// In which order a product finds weights that are given so.
PackedOrder packed_order_of(const KernelContext&, DType, std::int64_t N, std::int64_t K, WeightOrder);

/// linear_forward where it is, with what is beside it. Of prepacked weights a gate's halves are whole panels, and with
/// a norm there are no rows behind the panels (fused_linear.cc).
void row_product(KernelContext&, ConstMatrix x, ConstMatrix w, ConstVector bias, const BesideProduct& beside, Matrix y,
                 std::int64_t T, std::int64_t N, std::int64_t K, WeightOrder);

}  // namespace hotbunk::kernels
