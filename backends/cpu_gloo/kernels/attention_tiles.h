// What attention's forward and backward share: tile sizes, packing of heads to fp32 tiles, the shape of a diagonal
// tile. Internal to the kernels.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>

#include "backends/cpu_gloo/kernels/heads.h"
#include "backends/cpu_gloo/kernels/microkernel.h"
#include "base/rounding.h"

namespace hotbunk::kernels {

inline constexpr std::int64_t kBlock = 64;  // tokens per tile, of queries and of keys: three tiles of d = 64 fit L1
/// In a tile on the diagonal, rows are taken in groups, each as wide as its last row sees: half a tile is skipped.
inline constexpr std::int64_t kGroup = 16;

/// Rows of one head lie a whole packed row apart, where the hardware prefetcher does not follow: ask for the row some
/// iterations ahead (asking past the end is harmless).
template <class E>
HB_INLINE void prefetch_row(const E* row, std::int64_t d) {
  constexpr std::int64_t kLine = 64 / sizeof(E);
  for (std::int64_t c = 0; c < d; c += kLine) __builtin_prefetch(row + c);
}
inline constexpr std::int64_t kPrefetchRows = 8;

/// dst[n][width] = factor · src rows (stride ld), columns [d, width) zero.
template <class E>
void pack_rows(const E* src, std::int64_t ld, std::int64_t n, std::int64_t d, float factor, float* dst,
               std::int64_t width) {
  for (std::int64_t r = 0; r < n; ++r) {
    const E* s = src + r * ld;
    prefetch_row(s + kPrefetchRows * ld, d);
    float* t = dst + r * width;
    std::int64_t c = 0;
    for (; c + kLanes <= d; c += kLanes) store(t + c, load(s + c) * factor);
    for (; c < d; ++c) t[c] = as_f32(s[c]) * factor;
    for (; c < width; ++c) t[c] = 0.0f;
  }
}

/// Transposed tiles: row_of(p), d elements, becomes column p % kBlock of tile p / kBlock, each tile [d][kBlock];
/// columns past n are zero.
template <class RowOf>
void pack_transposed(RowOf&& row_of, std::int64_t n, std::int64_t d, float* dst) {
  static_assert(kBlock % kLanes == 0);
  for (std::int64_t p0 = 0; p0 < round_up(n, kBlock); p0 += kLanes) {
    const std::int64_t tokens = std::min<std::int64_t>(kLanes, n - p0);  // ≤ 0 in the tail of the last tile
    for (std::int64_t p = 0; p < tokens && p0 + kLanes + p < n; ++p) prefetch_row(row_of(p0 + kLanes + p), d);
    float* tile = dst + p0 / kBlock * d * kBlock + p0 % kBlock;
    for (std::int64_t c0 = 0; c0 < d; c0 += kLanes) {
      const std::int64_t columns = std::min<std::int64_t>(kLanes, d - c0);
      Vf rows[kLanes] = {};
      for (std::int64_t p = 0; p < tokens; ++p) {
        const auto* s = row_of(p0 + p) + c0;
        rows[p] = columns == kLanes ? load(s) : load_n(s, columns);
      }
      transpose(rows);
      for (std::int64_t c = 0; c < columns; ++c) store(tile + (c0 + c) * kBlock, rows[c]);
    }
  }
}

/// The same for rows that lie `ld` elements apart.
template <class E>
void pack_transposed(const E* src, std::int64_t ld, std::int64_t n, std::int64_t d, float* dst) {
  pack_transposed([&](std::int64_t p) { return src + p * ld; }, n, d, dst);
}

template <class E>
void unpack_rows(const float* src, std::int64_t width, std::int64_t n, std::int64_t d, float factor, E* dst,
                 std::int64_t ld) {
  for (std::int64_t r = 0; r < n; ++r)
    for_vectors(d, [&](std::int64_t c, auto load_at, auto store_at)
                       HB_FORCE_INLINE { store_at(dst + r * ld + c, load_at(src + r * width + c) * factor); });
}

/// f(first row, number of rows, number of keys they see) for the row groups of a tile of `rows` queries: one group
/// that sees all kBlock keys, or, on the diagonal, groups of kGroup that see the keys up to their last row.
template <class F>
HB_INLINE void for_row_groups(std::int64_t rows, bool diagonal, F&& f) {
  if (!diagonal) return f(std::int64_t{0}, rows, kBlock);
  for (std::int64_t r0 = 0; r0 < rows; r0 += kGroup) {
    const std::int64_t n = std::min(kGroup, rows - r0);
    f(r0, n, r0 + n);
  }
}

/// The keys of a block that queries see: query r those from begin + r·per_row up to end + r·per_row, where these are
/// keys of the block at all. per_row: 1 for successive tokens, 0 for heads of one token.
/// None from `limit` on: there the block's keys end.
struct SeenKeys {
  std::int64_t begin, end, per_row, limit = kBlock;
  static constexpr std::int64_t from_first = std::numeric_limits<std::int64_t>::min() / 2;  // begin, without a window
};
/// Of the block whose first key stands at `block`; the first query at `position`.
inline SeenKeys seen_keys(const Scores& scores, std::int64_t position, std::int64_t block, std::int64_t per_row) {
  return {scores.window > 0 ? position - scores.window + 1 - block : SeenKeys::from_first, position + 1 - block,
          per_row};
}

/// Running maximum and sum of the online softmax for the rows of a tile, and the factor by which what was summed so far
/// shrinks at this step.
struct SoftmaxState {
  float *max, *sum, *shrink;  // [kBlock]
  void reset() const {
    std::fill_n(max, kBlock, std::numeric_limits<float>::lowest());  // finite: a row may see nothing of a first block
    std::fill_n(sum, kBlock, 0.0f);
  }
};

/// Lane r of the result = reduction over the lanes of rows[r]; a balanced tree, always in the same order.
template <class Op>
HB_INLINE Vf reduce_rows(Vf (&rows)[kLanes], Op&& op) {
  transpose(rows);
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) rows[i] = op(rows[i], rows[i + half]);
  return rows[0];
}

HB_INLINE Vi lane_numbers() {
#if defined(__AVX512F__)
  return Vi{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
  return Vi{0, 1, 2, 3, 4, 5, 6, 7};
#endif
}

/// One step for n ≤ kLanes rows from row r0: scores s[n][width] (stride kBlock) become weights exp(scale·s − max),
/// handed to put(row, column, vector). Row r sees `seen` columns, those that there are of them; a row that sees none
/// keeps its bits. Rows are reduced together, so that no row waits for another's
/// maximum or sum.
template <class Put>
HB_INLINE void softmax_step(float* s, std::int64_t r0, std::int64_t n, std::int64_t width, const SeenKeys& seen,
                            float scale, const SoftmaxState& state, Put&& put) {
  constexpr float kNegInf = -std::numeric_limits<float>::infinity();
  Vf rows[kLanes] = {};
  for (std::int64_t r = 0; r < n; ++r) {
    float* x = s + r * kBlock;
    const auto column = [&](std::int64_t first) {
      return static_cast<std::int32_t>(std::clamp<std::int64_t>(first + r * seen.per_row, 0, width));
    };
    const std::int32_t hidden = column(seen.begin),
                       visible = std::min(column(seen.end), static_cast<std::int32_t>(seen.limit));
    for (std::int64_t c = 0; c < hidden; c += kLanes)
      store(x + c, lane_numbers() + static_cast<std::int32_t>(c) >= hidden ? load(x + c) : splat(kNegInf));
    for (std::int64_t c = visible / kLanes * kLanes; c < width; c += kLanes)
      store(x + c, lane_numbers() + static_cast<std::int32_t>(c) < visible ? load(x + c) : splat(kNegInf));
    Vf best = load(x);
    for (std::int64_t c = kLanes; c < width; c += kLanes) best = max(best, load(x + c));
    rows[r] = best;
  }
  const Vf old_max = load(state.max + r0);
  const Vf new_max = max(old_max, reduce_rows(rows, [](Vf a, Vf b) HB_FORCE_INLINE { return max(a, b); }) * scale);
  const Vf shrink = exp(old_max - new_max);
  store(state.max + r0, new_max);
  store(state.shrink + r0, shrink);
  for (std::int64_t r = 0; r < n; ++r) {
    const Vf shift = splat(state.max[r0 + r]);
    Vf total{};
    for (std::int64_t c = 0; c < width; c += kLanes) {
      const Vf p = exp(load(s + r * kBlock + c) * scale - shift);
      put(r, c, p);
      total += p;
    }
    rows[r] = total;
  }
  const Vf sums = reduce_rows(rows, [](Vf a, Vf b) HB_FORCE_INLINE { return a + b; });
  store(state.sum + r0, load(state.sum + r0) * shrink + sums);
}

/// P and dS of one row of a tile, from p = S and ds = dP; zero where no key in [hidden, visible) is.
HB_INLINE void probabilities_row(float* p, float* ds, std::int64_t hidden, std::int64_t visible, std::int64_t width,
                                 float lse, float d_row) {
  for (std::int64_t c = 0; c < width; c += kLanes) {
    const Vf prob = exp(load(p + c) - lse);
    store(p + c, prob);
    store(ds + c, prob * (load(ds + c) - d_row));
  }
  for (std::int64_t c = 0; c < hidden; ++c) p[c] = ds[c] = 0.0f;
  for (std::int64_t c = visible; c < width; ++c) p[c] = ds[c] = 0.0f;
}

/// The same of capped scores: P = exp(c tanh(S/c) − lse), and dS gets the slope of the cap.
HB_INLINE void capped_probabilities_row(float* p, float* ds, std::int64_t hidden, std::int64_t visible,
                                        std::int64_t width, float lse, float d_row, float cap) {
  const float inverse = 1.0f / cap;
  for (std::int64_t c = 0; c < width; c += kLanes) {
    const Vf t = tanh(load(p + c) * inverse), prob = exp(cap * t - lse);
    store(p + c, prob);
    store(ds + c, prob * (load(ds + c) - d_row) * (1.0f - t * t));
  }
  for (std::int64_t c = 0; c < hidden; ++c) p[c] = ds[c] = 0.0f;
  for (std::int64_t c = visible; c < width; ++c) p[c] = ds[c] = 0.0f;
}

template <class E>
float dot(const E* a, const E* b, std::int64_t n) {
  Vf sum{};
  for_vectors(n, [&](std::int64_t j, auto ld, auto) HB_FORCE_INLINE { sum += ld(a + j) * ld(b + j); });
  return sum_lanes(sum);
}

/// o[n][width] *= shrink, row by row.
HB_INLINE void shrink_rows(const float* shrink, float* o, std::int64_t n, std::int64_t width) {
  for (std::int64_t r = 0; r < n; ++r)
    for (std::int64_t c = 0; c < width; c += kLanes) store(o + r * width + c, load(o + r * width + c) * shrink[r]);
}

}  // namespace hotbunk::kernels
