// A product and what stands beside it in a transformer's layer: the norm in front of it, the residual stream's sum, the
// gate behind it. With the bits that the kernels have one after the other, and in one parallel region where our own
// kernels multiply (row_gemm.h) and that is no slower:
//   norm      each thread norms all rows of x while it arranges them for itself; few rows, or few threads
//   gate      a thread multiplies some gates and what belongs to them, then takes SiLU; where a gate is worth a region.
//             Prepacked, the halves are whole panels of rows
//   residual  added as a result is written; always
// Elsewhere, and where oneDNN multiplies, it is one kernel after the other here too.
#pragma once
#include "backends/cpu_gloo/kernels/context.h"

namespace hotbunk::kernels {

/// What a product has beside it. All that is absent (data == nullptr, false) does nothing.
struct BesideProduct {
  ConstVector norm{};      // [K]: rows of x are RMS-normed with it, and the product is of those (norm.h)
  float eps = 0.0f;        // of the norm
  float offset = 0.0f;     // the norm's weights are `norm` + that
  ConstMatrix delta{};     // [T, K], with a norm: x + delta is what is normed, and written to
  Matrix sum{};            // [T, K]
  ConstMatrix residual{};  // [T, N], without a gate: y is the product, rounded to y's dtype, + residual
  bool swiglu = false;     // y[T, N/2] is SwiGLU of the product, whose first half are gates (elementwise.h)
};

/// y = what `beside` makes of x[T,K] · w[N,K]ᵀ (+ bias[N]). x, w, delta, sum, residual have one dtype; y has it too or,
/// without gate and residual, is fp32. y and sum overlap no input. Same bits as rmsnorm_forward, linear_forward and
/// swiglu_forward or add one after the other, each of which rounds its result to x's dtype.
void fused_linear_forward(KernelContext&, ConstMatrix x, ConstMatrix w, ConstVector bias, const BesideProduct& beside,
                          Matrix y, std::int64_t T, std::int64_t N, std::int64_t K, WeightOrder);

}  // namespace hotbunk::kernels
