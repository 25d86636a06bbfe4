#include "backends/cpu_gloo/kernels/rope.h"

#include <algorithm>
#include <cmath>

#include "backends/cpu_gloo/kernels/parallel.h"
#include "backends/cpu_gloo/kernels/simd.h"

namespace hotbunk::kernels {
namespace {

constexpr int kScratchSlot = 3;

/// cos and ±sin of one position: [half] cosines, then [half] sines. The angle is fp32 as transformers forms it.
void fill_angles(float position, const float* inv_freq, float amplitude, std::int64_t half, float sign, float* table) {
  for (std::int64_t j = 0; j < half; ++j) {
    const float angle = position * inv_freq[j];
    table[j] = amplitude * std::cos(angle);
    table[half + j] = sign * amplitude * std::sin(angle);
  }
}

template <class E>
HB_INLINE void rotate_heads(E* heads, std::int64_t num, std::int64_t head_dim, std::int64_t half, const float* table) {
  for (std::int64_t i = 0; i < num; ++i) {
    E* lo = heads + i * head_dim;
    E* hi = lo + half;
    for_vectors(half, [&](std::int64_t j, auto ld, auto st) HB_FORCE_INLINE {
      const Vf a = ld(lo + j), b = ld(hi + j), c = ld(table + j), s = ld(table + half + j);
      st(lo + j, a * c - b * s);
      st(hi + j, b * c + a * s);
    });
  }
}

/// The angles of a call's tokens, table + place(t) * 2 half of each. Packed sequences repeat positions: where the
/// largest is below T, one table of all positions costs fewer sines than one per token. Either way the values are the
/// same.
struct Angles {
  float* table;
  bool shared;
  const std::int32_t* positions;
  std::int64_t half;
  const float* of(std::int64_t t) const { return table + (shared ? positions[t] : t) * 2 * half; }
};
Angles form_angles(KernelContext& ctx, const std::int32_t* positions, const float* inv_freq, std::int64_t T,
                   std::int64_t half, RopeDirection direction, float amplitude) {
  const float sign = direction == RopeDirection::forward ? 1.0f : -1.0f;
  const std::int64_t num_positions = std::int64_t{*std::max_element(positions, positions + T)} + 1;
  const bool shared = num_positions <= T;
  const std::int64_t rows = shared ? num_positions : T;
  auto* table = static_cast<float*>(ctx.scratch(kScratchSlot, static_cast<std::size_t>(rows * 2 * half) * 4));
  parallel_for(ctx, rows, 256 / half, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r)
      fill_angles(static_cast<float>(shared ? r : positions[r]), inv_freq, amplitude, half, sign, table + r * 2 * half);
  });
  return {table, shared, positions, half};
}

template <class E>
void rotate_neighbours(E* x, std::int64_t half, const float* table) {
  for (std::int64_t j = 0; j < half; ++j) {
    const float a = as_f32(x[2 * j]), b = as_f32(x[2 * j + 1]), c = table[j], s = table[half + j];
    x[2 * j] = from_f32<E>(a * c - b * s);
    x[2 * j + 1] = from_f32<E>(b * c + a * s);
  }
}

}  // namespace

void rope_neighbours(KernelContext& ctx, Matrix x, const std::int32_t* positions, const float* inv_freq, std::int64_t T,
                     std::int64_t heads, std::int64_t head_dim, std::int64_t turned, RopeDirection direction,
                     float amplitude) {
  if (T == 0) return;
  HB_CHECK(turned % 2 == 0 && turned > 0 && turned <= head_dim, "{} of {} dimensions turn", turned, head_dim);
  const Angles angles = form_angles(ctx, positions, inv_freq, T, turned / 2, direction, amplitude);
  with_float_type(x.dtype, [&](auto tag) {
    using E = decltype(tag);
    parallel_for(ctx, T, rows_grain(heads * turned), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t)
        for (std::int64_t h = 0; h < heads; ++h)
          rotate_neighbours(row<E>(x, t) + (h + 1) * head_dim - turned, turned / 2, angles.of(t));
    });
  });
}

void rope(KernelContext& ctx, Matrix qkv, const std::int32_t* positions, const float* inv_freq, std::int64_t T,
          HeadShape shape, RopeDirection direction, float amplitude, std::int64_t turned) {
  if (T == 0) return;
  if (turned == 0) turned = shape.head_dim;
  HB_CHECK(turned % 2 == 0 && turned > 0 && turned <= shape.head_dim, "{} of {} dimensions turn", turned,
           shape.head_dim);
  const std::int64_t half = turned / 2;
  const std::int64_t heads = shape.num_heads + shape.num_kv_heads;
  const Angles angles = form_angles(ctx, positions, inv_freq, T, half, direction, amplitude);
  with_float_type(qkv.dtype, [&](auto tag) {
    using E = decltype(tag);
    parallel_for(ctx, T, rows_grain(2 * heads * half), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t)
        rotate_heads(row<E>(qkv, t), heads, shape.head_dim, half, angles.of(t));
    });
  });
}

}  // namespace hotbunk::kernels
