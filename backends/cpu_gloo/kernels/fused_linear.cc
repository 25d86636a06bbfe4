#include "backends/cpu_gloo/kernels/fused_linear.h"

#include "backends/cpu_gloo/kernels/elementwise.h"
#include "backends/cpu_gloo/kernels/gemm.h"
#include "backends/cpu_gloo/kernels/norm.h"
#include "base/check.h"

namespace hotbunk::kernels {
namespace {

constexpr int kBesideSlot = 4;  // of scratch: normed rows, what is behind the gate's product, and the norm's rstd

}  // namespace

void fused_linear_forward(KernelContext& ctx, ConstMatrix x, ConstMatrix w, ConstVector bias,
                          const BesideProduct& beside, Matrix y, std::int64_t T, std::int64_t N, std::int64_t K,
                          WeightOrder order) {
  HB_CHECK(!beside.swiglu || N % 2 == 0, "a gate of {} columns", N);
  HB_CHECK(!beside.residual.data || (!beside.swiglu && y.dtype == x.dtype), "a residual beside a gate, or in {}",
           name_of(y.dtype));
  const std::int64_t element = size_of(x.dtype);
  const std::int64_t normed_bytes = beside.norm.data ? T * K * element : 0,
                     product_bytes = beside.swiglu ? T * N * element : 0;
  auto* room = static_cast<std::byte*>(ctx.scratch(
      kBesideSlot, static_cast<std::size_t>(normed_bytes + product_bytes + T * std::int64_t{sizeof(float)})));
  if (beside.norm.data) {
    const Matrix normed{room, x.dtype, K};
    auto* rstd = reinterpret_cast<float*>(room + normed_bytes + product_bytes);
    if (beside.delta.data)
      add_rmsnorm_forward(ctx, x, beside.delta, beside.norm, beside.sum, normed, rstd, T, K, beside.eps, beside.offset);
    else rmsnorm_forward(ctx, x, beside.norm, normed, rstd, T, K, beside.eps, beside.offset);
    x = normed;
  }
  const Matrix product = beside.swiglu ? Matrix{room + normed_bytes, x.dtype, N} : y;
  linear_forward(ctx, x, w, bias, product, T, N, K, Write::overwrite, order);
  if (beside.swiglu) swiglu_forward(ctx, product, y, T, N / 2);
  if (beside.residual.data) add(ctx, y, beside.residual, T, N);
}

}  // namespace hotbunk::kernels
