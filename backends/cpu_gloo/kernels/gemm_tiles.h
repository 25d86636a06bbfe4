// What a product of large matrices is made of, whose operands are put into the order in which tiles read them: a strip
// of columns, as wide as a tile, stays in the first cache while groups of rows, which the second one holds, pass over
// it (Goto, van de Geijn, ACM TOMS 2008). Internal to the kernels.
#pragma once
#include <cstddef>
#include <cstdint>

#include "backends/cpu_gloo/kernels/simd.h"

namespace hotbunk::kernels {

inline constexpr int kTileVecs = 2;                         // vectors of a strip's columns
inline constexpr int kTileRows = kLanes == 16 ? 12 : 6;     // of a group: 24 (12) accumulators of 32 (16) registers
inline constexpr std::int64_t kStrip = kTileVecs * kLanes;  // columns

/// Rows in groups of at most `most` and as equal as they go: [first(g), first(g + 1)) is group g.
struct Groups {
  std::int64_t rows, count;
  Groups(std::int64_t all, std::int64_t most) : rows(all), count((all + most - 1) / most) {}
  std::int64_t first(std::int64_t g) const { return rows * g / count; }
};

/// kLanes elements from each of `count` ≤ kLanes rows, those from `left` on zero: to[c] has element c of each.
template <class W>
HB_INLINE void load_transposed(const W* rows, std::int64_t pitch, std::int64_t count, std::int64_t left,
                               Vf (&to)[kLanes]) {
  if (count == kLanes && left >= kLanes) {
    const W* each[kLanes];
    for (int r = 0; r < kLanes; ++r) each[r] = rows + r * pitch;
    return load_columns(each, 0, to);
  }
  for (int r = 0; r < kLanes; ++r)
    to[r] = r >= count ? Vf{} : left >= kLanes ? load(rows + r * pitch) : load_n(rows + r * pitch, left);
  transpose(to);
}

/// sums[row][pitch] (+)= R rows of a, [depth][R], times `vecs` vectors of a strip, [depth][pitch].
template <int R, int vecs = kTileVecs, std::int64_t pitch = kStrip>
void tile(std::int64_t rows, const float* a, const float* strip, std::int64_t depth, float* sums, bool first) {
  if (rows != R) {
    if constexpr (R > 1) tile<R - 1, vecs, pitch>(rows, a, strip, depth, sums, first);
    return;
  }
  Vf acc[R][vecs] = {};
#pragma GCC unroll 4
  for (std::int64_t k = 0; k < depth; ++k, a += R, strip += pitch) {
    Vf of_strip[vecs];
#pragma GCC unroll 3
    for (int v = 0; v < vecs; ++v) of_strip[v] = load(strip + v * kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      Vf x = splat(a[r]);
      asm("" : "+v"(x));  // one load for all vectors
#pragma GCC unroll 3
      for (int v = 0; v < vecs; ++v) acc[r][v] += x * of_strip[v];
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
    for (int v = 0; v < vecs; ++v) {
      float* to = sums + r * pitch + v * kLanes;
      store(to, first ? acc[r][v] : load(to) + acc[r][v]);
    }
}

/// Rows that are read or written soon, asked for line by line while others are multiplied, which leaves memory idle.
class RowsAhead {
 public:
  RowsAhead() = default;
  /// `rows` rows of `columns` elements from `first`, `pitch` elements apart.
  template <class E>
  RowsAhead(const E* first, std::int64_t pitch, std::int64_t rows, std::int64_t columns)
      : row_(reinterpret_cast<const std::byte*>(first)),
        pitch_(pitch * std::int64_t{sizeof(E)}),
        width_(columns * std::int64_t{sizeof(E)}),
        left_(rows) {}
  std::int64_t lines() const { return left_ * ((width_ + kLine - 1) / kLine); }
  /// For the next `lines`. Not between the multiplications of a tile, which these instructions would wait among.
  void ask(std::int64_t lines) {
    for (; lines > 0 && left_ > 0; --lines) {
      __builtin_prefetch(row_ + at_, 0, 2);
      if ((at_ += kLine) < width_) continue;
      at_ = 0, row_ += pitch_, --left_;
    }
  }

 private:
  static constexpr std::int64_t kLine = 64;
  const std::byte* row_ = nullptr;
  std::int64_t pitch_ = 0, width_ = 0, left_ = 0, at_ = 0;
};

}  // namespace hotbunk::kernels
