#include "backends/cpu_gloo/kernels/fused_linear.h"

#include "backends/cpu_gloo/kernels/elementwise.h"
#include "backends/cpu_gloo/kernels/gemm.h"
#include "backends/cpu_gloo/kernels/norm.h"
#include "backends/cpu_gloo/kernels/prepack.h"
#include "backends/cpu_gloo/kernels/row_gemm_tiles.h"
#include "base/check.h"

namespace hotbunk::kernels {
namespace {

constexpr int kBesideSlot = 4;  // of scratch: normed rows, what is behind the gate's product, and the norm's rstd

/// What of `all` a product computes in its own region: as fused_linear.h says.
BesideProduct within_product(const KernelContext& ctx, const BesideProduct& all, DType dtype, std::int64_t T,
                             std::int64_t N, std::int64_t K, WeightOrder order) {
  BesideProduct within;
  const PackedOrder found = packed_order_of(ctx, dtype, N, K, order);
  if (T == 0 || N == 0 || !is_row_product(ctx, dtype, T, found)) return within;
  within.residual = all.residual;
  const bool packed = found != PackedOrder::rows;
  // A thread that passes over two halves finds each of them cold: that is made up for where a gate alone wakes a team.
  within.swiglu = all.swiglu && T > rows_grain(3 * N / 2) && (!packed || N % (2 * kPanelRows) == 0);
  // Every thread norms all rows, some 25,000 elements in 5 µs: less than to share them and wake a team.
  const std::int64_t more_than_shared = T * K * (ctx.num_threads() - 1) / ctx.num_threads();
  if (are_kept(T) && (T == 1 || more_than_shared <= kTeamElements) && (!packed || N % kPanelRows == 0))
    within.norm = all.norm, within.eps = all.eps, within.offset = all.offset, within.delta = all.delta,
    within.sum = all.sum;
  return within;
}

}  // namespace

void fused_linear_forward(KernelContext& ctx, ConstMatrix x, ConstMatrix w, ConstVector bias,
                          const BesideProduct& beside, Matrix y, std::int64_t T, std::int64_t N, std::int64_t K,
                          WeightOrder order) {
  HB_CHECK(!beside.swiglu || N % 2 == 0, "a gate of {} columns", N);
  HB_CHECK(!beside.residual.data || (!beside.swiglu && y.dtype == x.dtype), "a residual beside a gate, or in {}",
           name_of(y.dtype));
  HB_CHECK(!beside.swiglu || y.dtype == x.dtype, "a gate of {} to {}", name_of(x.dtype), name_of(y.dtype));
  const BesideProduct within = within_product(ctx, beside, x.dtype, T, N, K, order);
  const bool norm_before = beside.norm.data && !within.norm.data, gate_behind = beside.swiglu && !within.swiglu;
  const std::int64_t element = size_of(x.dtype), rstd_bytes = norm_before ? T * std::int64_t{sizeof(float)} : 0,
                     normed_bytes = norm_before ? T * K * element : 0,
                     product_bytes = gate_behind ? T * N * element : 0;
  std::byte* room = nullptr;
  if (norm_before || gate_behind)
    room = static_cast<std::byte*>(
        ctx.scratch(kBesideSlot, static_cast<std::size_t>(rstd_bytes + normed_bytes + product_bytes)));
  if (norm_before) {
    const Matrix normed{room + rstd_bytes, x.dtype, K};
    auto* rstd = reinterpret_cast<float*>(room);
    if (beside.delta.data)
      add_rmsnorm_forward(ctx, x, beside.delta, beside.norm, beside.sum, normed, rstd, T, K, beside.eps, beside.offset);
    else rmsnorm_forward(ctx, x, beside.norm, normed, rstd, T, K, beside.eps, beside.offset);
    x = normed;
  }
  const Matrix product = gate_behind ? Matrix{room + rstd_bytes + normed_bytes, x.dtype, N} : y;
  if (is_row_product(ctx, x.dtype, T, packed_order_of(ctx, x.dtype, N, K, order)))
    row_product(ctx, x, w, bias, within, product, T, N, K, order);
  else linear_forward(ctx, x, w, bias, product, T, N, K, Write::overwrite, order);
  if (gate_behind) swiglu_forward(ctx, product, y, T, N / 2);
  if (beside.residual.data && !within.residual.data) add(ctx, y, beside.residual, T, N);
}

}  // namespace hotbunk::kernels
