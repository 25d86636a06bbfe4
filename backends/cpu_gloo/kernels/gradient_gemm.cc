#include "backends/cpu_gloo/kernels/gradient_gemm.h"

#include <algorithm>

#include "backends/cpu_gloo/kernels/gemm_tiles.h"
#include "backends/cpu_gloo/kernels/parallel.h"

namespace hotbunk::kernels {
namespace {

// Of tiles with as many sums, one as wide as registers allow: it reads less for each multiplication. On a Skylake eight
// rows of three vectors take 48 cycles for 96 of them, twelve rows of two 54 (llvm-mca).
constexpr int kVecs = kLanes == 16 ? 3 : 2, kRowsOfTile = kLanes == 16 ? 8 : 6;
constexpr std::int64_t kWidth = kVecs * kLanes;  // columns of a strip

constexpr int kGradientSlot = 3;                           // of scratch
constexpr std::int64_t kDepth = kLanes == 16 ? 128 : 256;  // of K: a strip is 24 (16) KiB of the first cache
constexpr std::int64_t kRows = 360;                        // of a, two thirds (AVX2) or less of a small second cache
constexpr std::int64_t kColumns = 96 * kLanes;             // that the same rows of a pass over
// Floats from a group of rows to the next: behind it is room for what a last vector stores too much, and groups begin
// in different sets of a cache.
constexpr std::int64_t kGroup = kDepth * kRowsOfTile + 16;
static_assert(kRows % kRowsOfTile == 0 && kColumns % kWidth == 0);

/// Columns [0, width) of `depth` rows of b as [depth][kWidth], zeros behind them.
template <class W>
void pack_strip(const W* b, std::int64_t ldb, std::int64_t width, std::int64_t depth, float* to) {
  for (std::int64_t k = 0; k < depth; ++k, b += ldb, to += kWidth) {
    if (width < kWidth) std::fill_n(to, kWidth, 0.0f);
    for_vectors(width, [&](std::int64_t j, auto ld, auto st) HB_FORCE_INLINE { st(to + j, ld(b + j)); });
  }
}

/// A group of up to kRowsOfTile rows of a, [depth][rows], from rows of a whose elements lie behind each other. A whole
/// vector is stored for each column, of which the next column overwrites what is too much.
template <class W>
void pack_rows(const W* a, std::int64_t lda, std::int64_t rows, std::int64_t depth, float* to) {
  for (std::int64_t k = 0; k < depth; k += kLanes) {
    Vf part[kLanes];
    load_transposed(a + k, lda, rows, depth - k, part);
    for (std::int64_t j = 0; j < std::min<std::int64_t>(kLanes, depth - k); ++j) store(to + (k + j) * rows, part[j]);
  }
}

/// The same of all groups from a's transpose, where it is its columns that lie behind each other.
template <class W>
void pack_columns(const W* a, std::int64_t lda, const Groups& groups, std::int64_t depth, float* to) {
  for (std::int64_t k = 0; k < depth; ++k, a += lda)
    for (std::int64_t g = 0; g < groups.count; ++g) {
      const std::int64_t t0 = groups.first(g), rows = groups.first(g + 1) - t0;
      const Vf v = t0 + kLanes <= groups.rows ? load(a + t0) : load_n(a + t0, rows);
      store(to + g * kGroup + k * rows, v);
    }
}

/// The tile of a strip's `width` columns: the last one of all may be narrower.
template <int vecs = kVecs>
void multiply_tile(std::int64_t rows, std::int64_t width, const float* a, const float* strip, std::int64_t depth,
                   float* sums, bool first) {
  if constexpr (vecs > 1)
    if (width <= (vecs - 1) * kLanes) return multiply_tile<vecs - 1>(rows, width, a, strip, depth, sums, first);
  tile<kRowsOfTile, vecs, kWidth>(rows, a, strip, depth, sums, first);
}

/// Sums of `rows` rows and `width` columns into c.
template <class C>
void write(const float* sums, std::int64_t rows, std::int64_t width, C* c, std::int64_t ldc, bool accumulate) {
  for (; rows > 0; --rows, sums += kWidth, c += ldc)
    for_vectors(width, [&](std::int64_t j, auto ld, auto st)
                           HB_FORCE_INLINE { st(c + j, accumulate ? ld(c + j) + ld(sums + j) : ld(sums + j)); });
}

/// Room of a thread, in floats: a strip, the groups and, strip by strip, sums.
struct Room {
  std::int64_t groups, strips, rows;
  explicit Room(const MatmulShape& s)
      : groups((std::min(s.M, kRows) + kRowsOfTile - 1) / kRowsOfTile),
        strips((std::min(s.N, kColumns) + kWidth - 1) / kWidth),
        rows(std::min(s.M, kRows)) {}
  std::int64_t floats() const { return kDepth * kWidth + groups * kGroup + strips * rows * kWidth; }
};

/// Rows [m, m + groups.rows) of c, its columns [n, n + columns).
template <class W, class C>
void multiply(const MatmulShape& s, const W* a, const W* b, C* c, std::int64_t m, const Groups& groups, std::int64_t n,
              std::int64_t columns, float* room) {
  float *strip = room, *packed = strip + kDepth * kWidth, *all_sums = packed + groups.count * kGroup;
  for (std::int64_t k = 0; k < s.K; k += kDepth) {
    const std::int64_t depth = std::min(kDepth, s.K - k);
    const W* from = a + m * s.a_strides[0] + k * s.a_strides[1];
    const bool transposed = s.a_strides[1] != 1;
    if (transposed) pack_columns(from, s.a_strides[1], groups, depth, packed);
    else
      for (std::int64_t g = 0; g < groups.count; ++g) {
        const std::int64_t t0 = groups.first(g);
        pack_rows(from + t0 * s.a_strides[0], s.a_strides[0], groups.first(g + 1) - t0, depth, packed + g * kGroup);
      }
    const bool last = k + depth == s.K;
    RowsAhead next_a;
    if (const std::int64_t then = std::min(kDepth, s.K - k - depth); !last)
      next_a = transposed ? RowsAhead(from + depth * s.a_strides[1], s.a_strides[1], then, groups.rows)
                          : RowsAhead(from + depth, s.a_strides[0], groups.rows, then);
    const std::int64_t lines_of_a = next_a.lines() / (groups.count * ((columns + kWidth - 1) / kWidth)) + 1;
    float* sums = all_sums;
    for (std::int64_t j = 0; j < columns; j += kWidth) {
      const std::int64_t width = std::min(kWidth, columns - j);
      const W* columns_of_b = b + k * s.b_strides[0] + n + j;
      pack_strip(columns_of_b, s.b_strides[0], width, depth, strip);
      RowsAhead next_strip;
      if (const std::int64_t then = std::min(kWidth, columns - j - kWidth); then > 0)
        next_strip = RowsAhead(columns_of_b + kWidth, s.b_strides[0], depth, then);
      const std::int64_t lines_of_strip = next_strip.lines() / groups.count + 1;
      for (std::int64_t g = 0; g < groups.count; ++g) {
        const std::int64_t t0 = groups.first(g), rows = groups.first(g + 1) - t0;
        C* to = c + (m + t0) * s.ldc + n + j;
        RowsAhead results;
        if (last) results = RowsAhead(to, s.ldc, rows, width);
        results.ask(results.lines()), next_strip.ask(lines_of_strip), next_a.ask(lines_of_a);
        multiply_tile(rows, width, packed + g * kGroup, strip, depth, sums, k == 0);
        if (last) write(sums, rows, width, to, s.ldc, s.accumulate);
        sums += rows * kWidth;
      }
    }
  }
}

/// All of them, threads sharing what there is more of, rows or columns.
template <class W, class C>
void multiply_all(KernelContext& ctx, const MatmulShape& s, const W* a, const W* b, C* c) {
  const std::int64_t share = Room(s).floats();
  auto* scratch = static_cast<float*>(
      ctx.scratch(kGradientSlot, static_cast<std::size_t>(ctx.num_threads() * share) * sizeof(float)));
  const auto run = [&](std::int64_t m0, std::int64_t m1, std::int64_t n0, std::int64_t n1, float* room) {
    for (std::int64_t m = m0; m < m1; m += kRows)
      for (std::int64_t n = n0; n < n1; n += kColumns)
        multiply(s, a, b, c, m, Groups(std::min(kRows, m1 - m), kRowsOfTile), n, std::min(kColumns, n1 - n), room);
  };
  const bool share_rows = s.M >= s.N;
  const std::int64_t unit = share_rows ? kRowsOfTile : kWidth, all = share_rows ? s.M : s.N;
  const std::int64_t grain = rows_grain(s.K * (share_rows ? s.N : s.M) * unit / kWidth);
  parallel_for(ctx, (all + unit - 1) / unit, grain, [&](std::int64_t begin, std::int64_t end, std::int64_t thread) {
    const std::int64_t first = begin * unit, behind = std::min(all, end * unit);
    if (share_rows) run(first, behind, 0, s.N, scratch + thread * share);
    else run(0, s.M, first, behind, scratch + thread * share);
  });
}

}  // namespace

void gradient_gemm(KernelContext& ctx, const MatmulShape& s, const void* a, const void* b, void* c) {
  HB_CHECK(s.K > 0 && !s.bias && s.b_pairs == 0 && s.b_strides[1] == 1, "no gradient of {}x{}x{}", s.M, s.N, s.K);
  with_float_type(s.in, [&](auto in_tag) {
    with_float_type(s.out, [&](auto out_tag) {
      using W = decltype(in_tag);
      multiply_all(ctx, s, static_cast<const W*>(a), static_cast<const W*>(b), static_cast<decltype(out_tag)*>(c));
    });
  });
}

}  // namespace hotbunk::kernels
