#include "backends/cpu_gloo/kernels/prepack.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "backends/cpu_gloo/kernels/gemm.h"
#include "backends/cpu_gloo/kernels/onednn.h"
#include "backends/cpu_gloo/kernels/parallel.h"
#include "backends/cpu_gloo/kernels/row_gemm_tiles.h"

namespace hotbunk::kernels {
namespace {

/// Whether rows of x, many and few, have a kernel for blocks of pairs here.
bool multiplies_pairs() {
#if defined(__AVX512BW__)
  static const bool onednn_does = has_pairs_matmul();  // what lowers its instruction set is read at its first use
  return onednn_does;
#else
  return false;
#endif
}

/// Units of U side by side, of a weight's rows and of what `rows` of them are packed to: unit u of row r is number
/// place(r, u).
template <class U, class Place>
void reorder_block(std::byte* block, std::byte* room, std::int64_t rows, std::int64_t units, bool back, Place&& place) {
  std::memcpy(room, block, static_cast<std::size_t>(rows * units) * sizeof(U));
  constexpr std::int64_t line = 64 / sizeof(U);  // of a row, whose rows may be a power of two apart
  for (std::int64_t u0 = 0; u0 < units; u0 += line)
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t u = u0; u < std::min(u0 + line, units); ++u) {
        const std::int64_t of_rows = r * units + u, packed = place(r, u);
        std::memcpy(block + (back ? of_rows : packed) * std::int64_t{sizeof(U)},
                    room + (back ? packed : of_rows) * std::int64_t{sizeof(U)}, sizeof(U));
      }
}

/// All whole blocks of `rows` rows, each in turn on one thread.
template <class U, class Place>
void reorder_blocks(KernelContext& ctx, void* w, std::int64_t N, std::int64_t rows, std::int64_t units, bool back,
                    Place&& place) {
  const std::int64_t bytes = rows * units * std::int64_t{sizeof(U)};
  auto* rooms = static_cast<std::byte*>(ctx.scratch(kRowGemmSlot, static_cast<std::size_t>(ctx.num_threads() * bytes)));
  parallel_for(ctx, N / rows, rows_grain(rows * units), [&](std::int64_t begin, std::int64_t end, std::int64_t thread) {
    for (std::int64_t b = begin; b < end; ++b)
      reorder_block<U>(static_cast<std::byte*>(w) + b * bytes, rooms + thread * bytes, rows, units, back, place);
  });
}

void reorder(KernelContext& ctx, void* w, DType dtype, std::int64_t N, std::int64_t K, bool back) {
  const PackedOrder order = packed_order(dtype, N, K, ctx.product_paths());
  if (order == PackedOrder::rows) return;
  if (order != PackedOrder::quads) {
    const std::int64_t rows = rows_of_pairs(order);
    return reorder_blocks<std::array<bf16, 2>>(ctx, w, N, rows, K / 2, back,
                                               [rows](std::int64_t r, std::int64_t u) { return u * rows + r; });
  }
  with_float_type(dtype, [&](auto tag) {
    using W = decltype(tag);
    reorder_blocks<std::array<W, 4>>(ctx, w, N, kPanelRows, K / 4, back, [](std::int64_t r, std::int64_t u) {
      return u * kPanelRows + quad_of_panel<W>(r);
    });
  });
}

}  // namespace

PackedOrder packed_order(DType dtype, std::int64_t N, std::int64_t K, const ProductPaths& paths) {
  using enum ProductClass;
  const auto by_unit = [&](ProductClass c) { return paths[c] == ProductPath::unit; };
  if (dtype == DType::bf16 && (by_unit(few_rows) || by_unit(some_rows) || by_unit(many_rows))) {
    if (K == 0 || K % 32 != 0 || !multiplies_pairs()) return PackedOrder::rows;
    return N % 64 == 0 ? PackedOrder::pairs64 : N % 32 == 0 ? PackedOrder::pairs32 : PackedOrder::rows;
  }
  if (dtype == DType::bf16 && paths[some_rows] == ProductPath::wide) return PackedOrder::rows;
  return K > 0 && K % kLanes == 0 && N >= kPanelRows ? PackedOrder::quads : PackedOrder::rows;
}

std::int64_t rows_of_pairs(PackedOrder order) {
  return order == PackedOrder::pairs64 ? 64 : order == PackedOrder::pairs32 ? 32 : 0;
}

void prepack(KernelContext& ctx, void* w, DType dtype, std::int64_t N, std::int64_t K) {
  reorder(ctx, w, dtype, N, K, false);
}
void unpack(KernelContext& ctx, void* w, DType dtype, std::int64_t N, std::int64_t K) {
  reorder(ctx, w, dtype, N, K, true);
}

}  // namespace hotbunk::kernels
