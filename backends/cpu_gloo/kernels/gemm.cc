#include "backends/cpu_gloo/kernels/gemm.h"

#include <fmt/format.h>

#include <oneapi/dnnl/dnnl.hpp>
#include <utility>

#include "backends/cpu_gloo/kernels/elementwise.h"
#include "backends/cpu_gloo/kernels/gradient_gemm.h"
#include "backends/cpu_gloo/kernels/onednn.h"
#include "backends/cpu_gloo/kernels/packed_gemm.h"
#include "backends/cpu_gloo/kernels/parallel.h"
#include "backends/cpu_gloo/kernels/row_gemm.h"
#include "backends/cpu_gloo/kernels/simd.h"

namespace hotbunk::kernels {
namespace {

std::array<std::int64_t, 2> rows_of(ConstMatrix m) { return {m.ld, 1}; }
std::array<std::int64_t, 2> columns_of(ConstMatrix m) { return {1, m.ld}; }

void write_zeros(KernelContext& ctx, Matrix c, std::int64_t rows, std::int64_t cols) {
  parallel_for(ctx, rows, rows_grain(cols), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r)
      std::memset(static_cast<char*>(c.data) + r * c.ld * size_of(c.dtype), 0,
                  static_cast<std::size_t>(cols * size_of(c.dtype)));
  });
}

void matmul(KernelContext& ctx, const MatmulShape& shape, ConstMatrix a, ConstMatrix b, const float* bias, Matrix c,
            ProductPath path) {
  HB_CHECK(a.dtype == b.dtype, "GEMM operands are {} and {}", name_of(a.dtype), name_of(b.dtype));
  if (shape.M == 0 || shape.N == 0) return;
  if (shape.K == 0) {
    if (!shape.accumulate) write_zeros(ctx, c, shape.M, shape.N);
    if (bias) add_bias(ctx, c, {bias, DType::f32}, shape.M, shape.N);
    return;
  }
  // A forward product by our kernels is none of these.
  if (a.dtype == DType::bf16 && path == ProductPath::own) return gradient_gemm(ctx, shape, a.data, b.data, c.data);
  const bool widen = a.dtype == DType::bf16 && path == ProductPath::wide;
  if (widen || !try_matmul(ctx, shape, a.data, b.data, bias, c.data))
    matmul_widened(ctx, shape, a.data, b.data, bias, c.data);
}

/// What a forward product is given, checked: its bias as fp32 or nullptr, and how its weights lie.
struct ForwardOperands {
  std::vector<float> wide_bias;
  const float* bias;
  PackedOrder packed;
  ForwardOperands(KernelContext& ctx, ConstMatrix x, ConstMatrix w, ConstVector any_bias, std::int64_t N,
                  std::int64_t K, WeightOrder order)
      : bias(static_cast<const float*>(any_bias.data)), packed(packed_order_of(ctx, w.dtype, N, K, order)) {
    HB_CHECK(x.dtype == w.dtype, "GEMM operands are {} and {}", name_of(x.dtype), name_of(w.dtype));
    HB_CHECK(order == WeightOrder::rows || w.ld == K, "prepacked rows of {} columns lie {} apart", K, w.ld);
    if (!any_bias.data || any_bias.dtype == DType::f32) return;
    wide_bias.resize(static_cast<std::size_t>(N));
    cast(ctx, any_bias, wide_bias.data(), DType::f32, N);
    bias = wide_bias.data();
  }
};

ProductPath path_of(const KernelContext& ctx, DType dtype, std::int64_t T) {
  return dtype == DType::f32 ? ProductPath::own : ctx.product_paths()[class_of_rows(T)];
}

void multiply_rows(KernelContext& ctx, const ForwardOperands& given, ConstMatrix x, ConstMatrix w,
                   const BesideProduct& beside, Matrix y, std::int64_t T, std::int64_t N, std::int64_t K, Write write) {
  if (given.packed == PackedOrder::rows) row_gemm(ctx, x, w, given.bias, y, T, N, K, write, beside);
  else packed_gemm(ctx, x, w.data, given.bias, y, T, N, K, write, given.packed, beside);
}

}  // namespace

PackedOrder packed_order_of(const KernelContext& ctx, DType dtype, std::int64_t N, std::int64_t K, WeightOrder order) {
  return order == WeightOrder::prepacked ? packed_order(dtype, N, K, ctx.product_paths()) : PackedOrder::rows;
}

bool is_row_product(const KernelContext& ctx, DType dtype, std::int64_t T, PackedOrder packed) {
  const ProductPath path = path_of(ctx, dtype, T);
  return path == ProductPath::own || (path == ProductPath::wide && packed != PackedOrder::rows);
}

void row_product(KernelContext& ctx, ConstMatrix x, ConstMatrix w, ConstVector bias, const BesideProduct& beside,
                 Matrix y, std::int64_t T, std::int64_t N, std::int64_t K, WeightOrder order) {
  multiply_rows(ctx, ForwardOperands(ctx, x, w, bias, N, K, order), x, w, beside, y, T, N, K, Write::overwrite);
}

void linear_forward(KernelContext& ctx, ConstMatrix x, ConstMatrix w, ConstVector bias, Matrix y, std::int64_t T,
                    std::int64_t N, std::int64_t K, Write write, WeightOrder order) {
  const ForwardOperands given(ctx, x, w, bias, N, K, order);
  if (is_row_product(ctx, x.dtype, T, given.packed)) return multiply_rows(ctx, given, x, w, {}, y, T, N, K, write);
  const MatmulShape shape{.M = T,
                          .N = N,
                          .K = K,
                          .a_strides = rows_of(x),
                          .b_strides = columns_of(w),
                          .ldc = y.ld,
                          .in = x.dtype,
                          .out = y.dtype,
                          .accumulate = write == Write::accumulate,
                          .bias = given.bias != nullptr,
                          .b_pairs = rows_of_pairs(given.packed)};
  if (given.packed == PackedOrder::rows) matmul(ctx, shape, x, w, given.bias, y, path_of(ctx, x.dtype, T));
  else if (T > 0 && !try_matmul(ctx, shape, x.data, w.data, given.bias, y.data))
    packed_gemm(ctx, x, w.data, given.bias, y, T, N, K, write, given.packed);
}

void linear_dgrad(KernelContext& ctx, ConstMatrix dy, ConstMatrix w, Matrix dx, std::int64_t T, std::int64_t N,
                  std::int64_t K, Write write) {
  const MatmulShape shape{.M = T,
                          .N = K,
                          .K = N,
                          .a_strides = rows_of(dy),
                          .b_strides = rows_of(w),
                          .ldc = dx.ld,
                          .in = dy.dtype,
                          .out = dx.dtype,
                          .accumulate = write == Write::accumulate};
  matmul(ctx, shape, dy, w, nullptr, dx, ctx.product_paths()[ProductClass::gradients]);
}

void linear_wgrad(KernelContext& ctx, ConstMatrix dy, ConstMatrix x, Matrix dw, std::int64_t T, std::int64_t N,
                  std::int64_t K, Write write) {
  const MatmulShape shape{.M = N,
                          .N = K,
                          .K = T,
                          .a_strides = columns_of(dy),
                          .b_strides = rows_of(x),
                          .ldc = dw.ld,
                          .in = dy.dtype,
                          .out = dw.dtype,
                          .accumulate = write == Write::accumulate};
  matmul(ctx, shape, dy, x, nullptr, dw, ctx.product_paths()[ProductClass::gradients]);
}

void prepare_products() {
  KernelContext ctx(1);
  constexpr std::int64_t n = 16;
  const std::vector<float> ones(n * n, 1.0f);
  std::vector<float> out(n * n);
  linear_dgrad(ctx, {ones.data(), DType::f32, n}, {ones.data(), DType::f32, n}, {out.data(), DType::f32, n}, n, n, n,
               Write::overwrite);
}

void bias_grad(KernelContext& ctx, ConstMatrix dy, float* db, std::int64_t T, std::int64_t N, Write write) {
  // Columns are split over threads, tokens are not: the order of every sum is the order of the tokens.
  parallel_for(ctx, N, T > 0 ? 16384 / T : N, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t n = end - begin;
    std::vector<double> sum(static_cast<std::size_t>(n));
    with_float_type(dy.dtype, [&](auto tag) {
      for (std::int64_t t = 0; t < T; ++t) {
        const auto* d = row<decltype(tag)>(dy, t) + begin;
        for (std::int64_t c = 0; c < n; ++c) sum[static_cast<std::size_t>(c)] += as_f32(d[c]);
      }
    });
    for (std::int64_t c = 0; c < n; ++c) {
      const double old = write == Write::accumulate ? db[begin + c] : 0.0;
      db[begin + c] = static_cast<float>(old + sum[static_cast<std::size_t>(c)]);
    }
  });
}

std::string onednn_instruction_set() {
  using enum dnnl::cpu_isa;
  constexpr std::pair<dnnl::cpu_isa, const char*> names[] = {{all, "ALL"},
                                                             {sse41, "SSE41"},
                                                             {avx, "AVX"},
                                                             {avx2, "AVX2"},
                                                             {avx2_vnni, "AVX2_VNNI"},
                                                             {avx512_core, "AVX512_CORE"},
                                                             {avx512_core_vnni, "AVX512_CORE_VNNI"},
                                                             {avx512_core_bf16, "AVX512_CORE_BF16"},
                                                             {avx512_core_amx, "AVX512_CORE_AMX"}};
  const dnnl::cpu_isa isa = dnnl::get_effective_cpu_isa();
  for (const auto& [known, name] : names)
    if (known == isa) return name;
  return fmt::format("{:#x}", static_cast<unsigned>(isa));  // of a later oneDNN, by its number there
}

std::string onednn_version() {
  const dnnl_version_t& v = *dnnl_version();
  return fmt::format("{}.{}.{}", v.major, v.minor, v.patch);
}

std::string_view compiled_instruction_set() {
#if defined(__AVX512F__) && defined(__AMX_TILE__) && defined(__AMX_BF16__)
  return "AVX-512 with AMX";
#elif defined(__AVX512F__)
  return "AVX-512";
#elif defined(__AVX2__)
  return "AVX2";
#else
  return "baseline";
#endif
}

}  // namespace hotbunk::kernels
