// row_gemm of many rows of x: the same chains and sums for each element, by the loops of a product of large matrices.
// A tile there has one chain per element, so chunks of K are put in order by chain: what the first column of every quad
// adds to, then what the second one adds to, and so on. Internal to row_gemm.cc and packed_gemm.cc.
#pragma once
#include <algorithm>

#include "backends/cpu_gloo/kernels/gemm_tiles.h"
#include "backends/cpu_gloo/kernels/parallel.h"
#include "backends/cpu_gloo/kernels/row_gemm_tiles.h"

namespace hotbunk::kernels {

constexpr std::int64_t kChains = 4;  // of an element in a chunk, one per column of a quad
static_assert(kTileRows <= kLanes && kRowChunk % kLanes == 0 && kStrip % kPanelRows == 0);
// Measured on two cores of a Zen 3 (docs/benchmarks.md).
constexpr std::int64_t kStripBytes = 4 * 1024 * 1024;  // of strips that are made once for all rows of x
constexpr std::int64_t kStripsWritten = 4;             // whose sums are written together, a row's behind each other
constexpr std::int64_t kStripsOfThread = 8;            // where there are fewer, rows of x are shared instead
// Of groups that pass over a strip: a third of a small second cache, which another hyperthread may want half of.
constexpr std::int64_t kBlockBytes = 160 * 1024;

/// How many of what fit into a thread's room.
struct ManyRows {
  std::int64_t K, depth, strips, rows;
  /// Of N weight rows and T rows of x.
  ManyRows(std::int64_t N, std::int64_t T, std::int64_t K_)
      : K(whole_vectors(K_)),
        depth(std::min(K, kRowChunk)),
        strips(std::clamp<std::int64_t>(kStripBytes / strip_bytes(), 1, (N + kStrip - 1) / kStrip)),
        rows(std::min(T, std::clamp<std::int64_t>(kBlockBytes / group_bytes(), 4, 32) * kTileRows)) {}
  std::int64_t strip_floats() const { return std::max<std::int64_t>(K * kStrip, 1); }
  /// From a chain to the next of `count` rows: behind it is room for what a last vector stores too much, and chains
  /// begin in different sets of a cache.
  std::int64_t chain_floats(std::int64_t count) const { return depth / kChains * count + kLanes; }
  std::int64_t group_floats() const { return kChains * chain_floats(kTileRows); }
  std::int64_t group_count() const { return (rows + kTileRows - 1) / kTileRows; }
  /// Of a strip's sums; of every strip's, where chunks behind the first add to them.
  std::int64_t sum_floats() const { return rows * kStrip; }
  std::int64_t kept_floats() const { return K > kRowChunk ? strips * sum_floats() : 0; }
  std::int64_t floats() const {
    return strips * strip_floats() + group_count() * group_floats() + 2 * kStripsWritten * sum_floats() + kept_floats();
  }

 private:
  std::int64_t strip_bytes() const { return strip_floats() * std::int64_t{sizeof(float)}; }
  std::int64_t group_bytes() const {
    return std::max<std::int64_t>(depth * kTileRows, 1) * std::int64_t{sizeof(float)};
  }
};

/// n columns of `count` ≤ kLanes rows, chain by chain, `chain` floats apart: [n/4] steps, `step` floats apart, of a
/// column each. A whole vector is stored for it, zeros for rows that are not there; where steps lie closer, the chain's
/// next one overwrites what is too much.
template <class W>
void pack_chains(const W* rows, std::int64_t pitch, std::int64_t count, std::int64_t n, float* to, std::int64_t chain,
                 std::int64_t step) {
  for (std::int64_t k = 0; k < n; k += kLanes) {
    Vf part[kLanes];
    load_transposed(rows + k, pitch, count, n - k, part);
#pragma GCC unroll 16
    for (int j = 0; j < kLanes; ++j) store(to + j % kChains * chain + (k + j) / kChains * step, part[j]);
  }
}

/// n columns of up to kStrip weight rows, chain by chain, [n/4][kStrip] each.
template <class W>
void pack_weight_rows(const W* w, std::int64_t ldw, std::int64_t rows, std::int64_t n, float* to) {
  const std::int64_t chain = whole_vectors(n) / kChains * kStrip;
  for (std::int64_t r = 0; r < kStrip; r += kLanes)
    pack_chains(w + (rows > r ? r : 0) * ldw, ldw, std::clamp<std::int64_t>(rows - r, 0, kLanes), n, to + r, chain,
                kStrip);
}

/// A chunk's strip times rows of x: what the even chains of a quad sum to, and the odd ones, [row][kStrip] each.
inline void multiply_chains(const ManyRows& shape, const Groups& groups, const float* packed, const float* strip,
                            std::int64_t steps, float* even, float* odd, RowsAhead& results, std::int64_t lines) {
  for (std::int64_t chain = 0; chain < kChains; ++chain)
    for (std::int64_t g = 0; g < groups.count; ++g) {
      const std::int64_t first = groups.first(g), count = groups.first(g + 1) - first;
      results.ask(lines);
      tile<kTileRows>(count, packed + g * shape.group_floats() + chain * shape.chain_floats(count),
                      strip + chain * steps * kStrip, steps, (chain % 2 == 0 ? even : odd) + first * kStrip, chain < 2);
    }
}

/// A block's strips times rows [t0, t0 + groups.rows) of x, for `columns` columns of y from n0.
template <class W, class Y>
void multiply_strips(const Operands<W, Y>& o, const ManyRows& shape, std::int64_t t0, const Groups& groups,
                     std::int64_t n0, std::int64_t columns, const float* strips, float* room) {
  const std::int64_t of_strip = shape.sum_floats();
  float *packed = room, *even = packed + groups.count * shape.group_floats(), *odd = even + kStripsWritten * of_strip,
        *all_kept = odd + kStripsWritten * of_strip;
  std::int64_t k0 = 0;
  do {
    const std::int64_t n = std::min(kRowChunk, o.K - k0), steps = whole_vectors(n) / kChains;
    for (std::int64_t g = 0; g < groups.count; ++g) {
      const std::int64_t first = groups.first(g), count = groups.first(g + 1) - first;
      pack_chains(o.x + (t0 + first) * o.ldx + k0, o.ldx, count, n, packed + g * shape.group_floats(),
                  shape.chain_floats(count), count);
    }
    const bool last = k0 + n == o.K;
    for (std::int64_t j = 0; j < columns; j += kStripsWritten * kStrip) {
      const std::int64_t width = std::min(kStripsWritten * kStrip, columns - j), count = (width + kStrip - 1) / kStrip;
      RowsAhead results;
      if (last) results = RowsAhead(o.y + t0 * o.ldy + n0 + j, o.ldy, groups.rows, width);
      const std::int64_t lines = results.lines() / (groups.count * kChains * count) + 1;
      for (std::int64_t s = 0; s < count; ++s)
        multiply_chains(shape, groups, packed, strips + (j / kStrip + s) * shape.strip_floats() + k0 * kStrip, steps,
                        even + s * of_strip, odd + s * of_strip, results, lines);
      float* kept = all_kept + j / kStrip * of_strip;
      for (std::int64_t t = 0; t < groups.rows; ++t) {
        float sums[kStripsWritten * kStrip];
        for (std::int64_t s = 0; s < count; ++s)
#pragma GCC unroll 2
          for (int v = 0; v < kTileVecs; ++v) {
            const std::int64_t at = s * of_strip + t * kStrip + v * kLanes;
            const Vf sum = load(even + at) + load(odd + at) + (k0 > 0 ? load(kept + at) : Vf{});
            store(last ? sums + s * kStrip + v * kLanes : kept + at, sum);
          }
        if (last) o.write(t0 + t, n0 + j, sums, width);
      }
    }
    k0 += n;
  } while (k0 < o.K);
}

/// All T rows of x times the N weight rows from `first`, which the operands begin at. pack_strip(row, rows, k, n, to):
/// columns [k, k + n) of weight rows from `row` as pack_weight_rows has them. `room`: ManyRows's floats.
template <class W, class Y, class PackStrip>
void multiply_many_rows(const Operands<W, Y>& o, std::int64_t T, std::int64_t first, std::int64_t N,
                        PackStrip&& pack_strip, float* room) {
  const ManyRows shape(N, T, o.K);
  for (std::int64_t n0 = 0; n0 < N; n0 += shape.strips * kStrip) {
    const std::int64_t columns = std::min(shape.strips * kStrip, N - n0);
    float* strip = room;
    for (std::int64_t j = 0; j < columns; j += kStrip, strip += shape.strip_floats())
      for (std::int64_t k = 0; k < o.K; k += kRowChunk)
        pack_strip(first + n0 + j, std::min(kStrip, columns - j), k, std::min(kRowChunk, o.K - k), strip + k * kStrip);
    for (std::int64_t t = 0; t < T; t += shape.rows)
      multiply_strips(o, shape, t, Groups(std::min(shape.rows, T - t), kTileRows), n0, columns, room,
                      room + shape.strips * shape.strip_floats());
  }
}

/// The same of all weight rows, which the team shares, or rows of x where there are more of these and few strips for
/// each: a thread reads all rows of x once a block of strips, and all strips once a block of rows. Of a gated product
/// it multiplies with gates and then with what these are multiplied with.
template <class W, class Y, class PackStrip>
void share_many_rows(KernelContext& ctx, const Operands<W, Y>& o, std::int64_t T, std::int64_t N,
                     PackStrip&& pack_strip) {
  const std::int64_t columns = o.has_gate ? N / 2 : N, threads = ctx.num_threads();
  const auto units_of = [](std::int64_t all, std::int64_t unit) { return (all + unit - 1) / unit; };
  const bool by_rows =
      columns < threads * kStripsOfThread * kStrip && units_of(T, kTileRows) >= units_of(columns, kStrip);
  const std::int64_t unit = by_rows ? kTileRows : kStrip, all = by_rows ? T : columns, units = units_of(all, unit);
  const std::int64_t grain = rows_grain(o.K * (by_rows ? columns : T) * unit / kStrip);
  const std::int64_t at_once = (units <= grain ? units : units_of(units, threads)) * unit;  // that there is room for
  const std::int64_t share = ManyRows(by_rows ? columns : at_once, by_rows ? at_once : T, o.K).floats(),
                     shares = threads * share;
  auto* scratch = static_cast<float*>(
      ctx.scratch(kRowGemmSlot, static_cast<std::size_t>(shares) * sizeof(float) +
                                    (o.has_gate ? static_cast<std::size_t>(T * columns) * sizeof(Y) : 0)));
  Y* gated = reinterpret_cast<Y*>(scratch + shares);
  const auto multiply = [&](std::int64_t t, std::int64_t rows, std::int64_t n, std::int64_t width, float* room) {
    Operands<W, Y> part = o;
    part.skip_rows(t);
    Y* y = part.y + n;
    multiply_many_rows(part.from(n, y, o.ldy), rows, n, width, pack_strip, room);
    if (!o.has_gate) return;
    Y* up = gated + (by_rows ? t * columns : T * n);
    multiply_many_rows(part.from(columns + n, up, width), rows, columns + n, width, pack_strip, room);
    gate_rows(y, o.ldy, up, rows, width);
  };
  parallel_for(ctx, units, grain, [&](std::int64_t begin, std::int64_t end, std::int64_t thread) {
    const std::int64_t behind = std::min(all, end * unit);  // a team smaller than asked for has more than fits at once
    for (std::int64_t first = begin * unit; first < behind; first += at_once) {
      const std::int64_t count = std::min(at_once, behind - first);
      if (by_rows) multiply(first, count, 0, columns, scratch + thread * share);
      else multiply(0, T, first, count, scratch + thread * share);
    }
  });
}

}  // namespace hotbunk::kernels
