// What the products whose rows know nothing of each other are made of, whatever order the weights are in: quads of x
// side by side, a panel of weight rows times a few of x. Internal to row_gemm.cc and packed_gemm.cc.
//
// A vector holds a quad (four consecutive k) of each of several weight rows, and meets the same quad of one row of x in
// all of them. So four chains make an element: few enough that a tile's last additions cost little beside many rows of
// x, and arranging the weights so costs two shuffles a vector, less than the memory takes to bring it to one row of x.
#pragma once
#if defined(__AVX__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <array>
#include <cstring>

#include "backends/cpu_gloo/kernels/gemm_tiles.h"
#include "backends/cpu_gloo/kernels/norm_rows.h"
#include "backends/cpu_gloo/kernels/parallel.h"
#include "backends/cpu_gloo/kernels/row_gemm.h"
#include "backends/cpu_gloo/kernels/simd.h"

namespace hotbunk::kernels {

constexpr int kRowGemmSlot = 3;             // of scratch
constexpr int kVecs = kQuads;               // vectors of a panel, each of so many weight rows
constexpr int kPanelRows = kQuads * kVecs;  // weight rows per panel
constexpr int kPanelTokens = 6;             // tokens per tile of a panel: 24 (12) accumulators of 32 (16) registers
constexpr std::int64_t kKeptTokens = 64;  // so many rows of x each thread interleaves whole; many_rows_gemm.h has more

/// Four floats in every quad of a vector.
HB_INLINE Vf load_quad(const float* p) {
#if defined(__AVX512F__)
  return std::bit_cast<Vf>(_mm512_maskz_broadcast_f32x4(0xffff, _mm_loadu_ps(p)));
#elif defined(__AVX__)
  return std::bit_cast<Vf>(_mm256_broadcast_ps(reinterpret_cast<const __m128*>(p)));
#else
  return Vf{p[0], p[1], p[2], p[3], p[0], p[1], p[2], p[3]};
#endif
}

/// Of each quad (a, b, c, d): (a + c) + (b + d), in all of its lanes but the last two.
HB_INLINE std::array<float, kQuads> sum_quads(Vf v) {
#if defined(__AVX512F__)
  const Vf h = v + __builtin_shufflevector(v, v, 2, 3, 2, 3, 6, 7, 6, 7, 10, 11, 10, 11, 14, 15, 14, 15);
  const Vf s = h + __builtin_shufflevector(h, h, 1, 1, 1, 1, 5, 5, 5, 5, 9, 9, 9, 9, 13, 13, 13, 13);
  return std::bit_cast<std::array<float, kQuads>>(__builtin_shufflevector(s, s, 0, 4, 8, 12));
#else
  const Vf h = v + __builtin_shufflevector(v, v, 2, 3, 2, 3, 6, 7, 6, 7);
  const Vf s = h + __builtin_shufflevector(h, h, 1, 1, 1, 1, 5, 5, 5, 5);
  return {s[0], s[4]};
#endif
}

/// The sums of a panel's vectors at once, by the same additions: element q·kVecs + v is the sum of quad q of acc[v]. A
/// vector holds those of kSummedTokens rows of x, one row's behind the other's.
constexpr int kSummedTokens = kLanes / kPanelRows;
#if defined(__AVX512F__)
HB_INLINE Vf sum_panels(const Vf (&acc)[kVecs]) {
  const auto halves = [](Vf a, Vf b) HB_FORCE_INLINE {
    return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  };
  const Vf a = halves(acc[0], acc[1]), b = halves(acc[2], acc[3]);
  return __builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
         __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
}
#else
HB_INLINE Vf sum_panels(const Vf (&first)[kVecs], const Vf (&second)[kVecs]) {
  const auto halves = [](const Vf(&acc)[kVecs]) HB_FORCE_INLINE {
    return __builtin_shufflevector(acc[0], acc[1], 0, 1, 8, 9, 4, 5, 12, 13) +
           __builtin_shufflevector(acc[0], acc[1], 2, 3, 10, 11, 6, 7, 14, 15);
  };
  const Vf a = halves(first), b = halves(second);
  const Vf s =
      __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) +  // both rows' lower quads, then their upper ones
      __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
  return __builtin_shufflevector(s, s, 0, 1, 4, 5, 2, 3, 6, 7);
}
#endif

constexpr std::int64_t whole_vectors(std::int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

/// Four elements as fp32.
HB_INLINE void copy_quad(const float* from, float* to) { std::memcpy(to, from, 4 * sizeof(float)); }
HB_INLINE void copy_quad(const bf16* from, float* to) {
  using Halves = std::uint16_t __attribute__((vector_size(8)));
  using Words = std::uint32_t __attribute__((vector_size(16)));
  Halves bits;
  std::memcpy(&bits, static_cast<const void*>(from), sizeof bits);
  const Words wide = __builtin_convertvector(bits, Words) << 16;
  std::memcpy(to, &wide, sizeof wide);
}

/// `tokens` rows of x as fp32 with their quads side by side: [whole_vectors(K) / 4][tokens][4], zeros behind K. A tile
/// so reads one stream, whatever the rows' pitch: rows a multiple of 1 KiB apart would share a few sets of the L1
/// cache.
template <class W>
void interleave(const W* x, std::int64_t ldx, std::int64_t tokens, std::int64_t K, float* to) {
  const auto last_columns = [&](std::int64_t t, std::int64_t k) {
    const W* from = x + t * ldx;
    float* quad = to + k * tokens + t * 4;
    for (; k + 4 <= K; k += 4, quad += tokens * 4) copy_quad(from + k, quad);
    for (; k < whole_vectors(K); k += 4, quad += tokens * 4)
      for (std::int64_t i = 0; i < 4; ++i) quad[i] = k + i < K ? as_f32(from[k + i]) : 0.0f;
  };
  std::int64_t t = 0;
  for (; t + kQuads <= tokens; t += kQuads) {  // rows whose quads fill vectors
    const W* from = x + t * ldx;
    float* quads = to + t * 4;
    std::int64_t k = 0;
    for (; k + kLanes <= K; k += kLanes) {
      Vf part[kQuads];
#pragma GCC unroll 4
      for (int q = 0; q < kQuads; ++q) part[q] = load(from + q * ldx + k);
      transpose_quads(part);
#pragma GCC unroll 4
      for (int q = 0; q < kQuads; ++q, quads += tokens * 4) store(quads, part[q]);
    }
    for (int q = 0; q < kQuads; ++q) last_columns(t + q, k);
  }
  for (; t < tokens; ++t) last_columns(t, 0);
}

/// What a sum, its bias in it, meets on its way to y.
enum class Meets : std::uint8_t {
  nothing,
  old,       // y + sum
  residual,  // residual + the sum as y's dtype holds it
};

/// What a call works on.
template <class W, class Y>
struct Operands {
  const W* x;
  std::int64_t ldx;
  const W* w;
  std::int64_t ldw;
  const float* bias;  // or nullptr
  Y* y;
  std::int64_t ldy;
  std::int64_t K;
  Meets meets = Meets::nothing;
  const Y* residual = nullptr;
  std::int64_t ld_residual = 0;
  const BesideProduct* norm = nullptr;  // whose norm rows of x go through; or nullptr
  bool has_gate = false;

  Operands(const W* x_, std::int64_t ldx_, const W* w_, std::int64_t ldw_, const float* bias_, Y* y_, std::int64_t ldy_,
           std::int64_t K_)
      : x(x_), ldx(ldx_), w(w_), ldw(ldw_), bias(bias_), y(y_), ldy(ldy_), K(K_) {}
  Operands(ConstMatrix x_, const W* w_, std::int64_t ldw_, const float* bias_, Matrix y_, std::int64_t K_, Write write,
           const BesideProduct& beside)
      : Operands(static_cast<const W*>(x_.data), x_.ld, w_, ldw_, bias_, static_cast<Y*>(y_.data), y_.ld, K_) {
    if (write == Write::accumulate) meets = Meets::old;
    if (beside.residual.data) meets = Meets::residual;
    residual = static_cast<const Y*>(beside.residual.data), ld_residual = beside.residual.ld;
    if (beside.norm.data) norm = &beside;
    has_gate = beside.swiglu;
  }

  /// Weight rows from n on, whose results begin at `to`, rows of them ld_to apart.
  Operands from(std::int64_t n, Y* to, std::int64_t ld_to) const {
    Operands of = *this;
    of.w += n * ldw, of.y = to, of.ldy = ld_to;
    if (bias) of.bias += n;
    if (residual) of.residual += n;
    return of;
  }

  /// What is left behind the first n rows of x.
  void skip_rows(std::int64_t n) {
    x += n * ldx, y += n * ldy;
    if (residual) residual += n * ld_residual;
  }

  /// sums: of row t of x with the n weight rows from n0.
  HB_INLINE void write(std::int64_t t, std::int64_t n0, const float* sums, std::int64_t n) const {
    Y* out = y + t * ldy + n0;
    const auto sum = [&](std::int64_t i, auto ld) HB_FORCE_INLINE {
      const Vf v = ld(sums + i);
      return bias ? v + ld(bias + n0 + i) : v;
    };
    if (sizeof(W) == sizeof(Y) && meets == Meets::residual) {
      const Y* to = residual + t * ld_residual + n0;
      return for_vectors(n, [&](std::int64_t i, auto ld, auto st)
                                HB_FORCE_INLINE { st(out + i, rounded<Y>(sum(i, ld)) + ld(to + i)); });
    }
    for_vectors(n, [&](std::int64_t i, auto ld, auto st) HB_FORCE_INLINE {
      Vf v = sum(i, ld);
      if (meets == Meets::old) v += ld(out + i);
      st(out + i, v);
    });
  }
};

/// v's quads, `pitch` floats apart.
HB_INLINE void store_quads(float* to, std::int64_t pitch, Vf v) {
  const auto put = [&](int q, auto quad) HB_FORCE_INLINE { std::memcpy(to + q * pitch, &quad, sizeof quad); };
  put(0, __builtin_shufflevector(v, v, 0, 1, 2, 3));
  put(1, __builtin_shufflevector(v, v, 4, 5, 6, 7));
#if defined(__AVX512F__)
  put(2, __builtin_shufflevector(v, v, 8, 9, 10, 11));
  put(3, __builtin_shufflevector(v, v, 12, 13, 14, 15));
#endif
}

/// A row that is normed on its way into a group of `tokens`. `sum`: where what is normed lies, x itself or x + delta.
template <class W, class N>
void interleave_normed(const W* sum, const N* norm, const BesideProduct& by, std::int64_t tokens, std::int64_t K,
                       float* to) {
  const float rstd = inverse_rms(sum, K, by.eps);
  for_vectors(K, [&](std::int64_t k, auto ld, auto) HB_FORCE_INLINE {
    store_quads(to + k * tokens, tokens * 4, rounded<W>(normalized(ld(sum + k), ld(norm + k), by.offset, rstd)));
  });
}

/// Rows [begin, end) of the sum are a thread's to write; of the others it keeps one at a time in `room`, of K elements.
template <class W>
struct SumRows {
  std::int64_t begin, end;
  W* room;
};

/// All rows of x, normed if they are to be, group behind group: T·whole_vectors(K) floats. Each thread does so for
/// itself, which is less than waiting for one another.
template <class W, class Y>
void interleave(const Operands<W, Y>& o, const Groups& groups, SumRows<W> mine, float* to) {
  for (std::int64_t g = 0; g < groups.count; ++g) {
    const std::int64_t t0 = groups.first(g), tokens = groups.first(g + 1) - t0;
    float* group = to + t0 * whole_vectors(o.K);
    if (!o.norm) interleave(o.x + t0 * o.ldx, o.ldx, tokens, o.K, group);
    else
      for (std::int64_t t = t0; t < t0 + tokens; ++t) {
        const W* from = o.x + t * o.ldx;
        if (o.norm->delta.data) {
          W* sum = mine.begin <= t && t < mine.end ? row<W>(o.norm->sum, t) : mine.room;
          add_rows(from, row<W>(o.norm->delta, t), sum, o.K);
          from = sum;
        }
        with_float_type(o.norm->norm.dtype, [&](auto tag) {
          const auto* norm = static_cast<const decltype(tag)*>(o.norm->norm.data);
          interleave_normed(from, norm, *o.norm, tokens, o.K, group + (t - t0) * 4);
        });
      }
  }
}

/// A row of whole vectors alone, which is interleaved as it is; nullptr where rows of x are to be.
template <class W, class Y>
const float* lies_interleaved(const Operands<W, Y>& o, std::int64_t T) {
  if constexpr (sizeof(W) == sizeof(float))
    if (T == 1 && !o.norm && o.K % kLanes == 0) return o.x;
  return nullptr;
}

/// y = SiLU of y, which has gates, times `up`: n columns of T rows, both as their dtype holds them.
template <class Y>
void gate_rows(Y* y, std::int64_t ldy, const Y* up, std::int64_t T, std::int64_t n) {
  for (std::int64_t t = 0; t < T; ++t, y += ldy, up += n)
    for_vectors(n, [&](std::int64_t j, auto ld, auto st) HB_FORCE_INLINE {
      const Vf gate = ld(y + j);
      st(y + j, gate * sigmoid(gate) * ld(up + j));
    });
}

/// The team's shares of N weight rows, each of whole units of `unit` rows but the last: multiply(operands, first, n, x,
/// room) is to multiply n rows from `first`, which the operands begin at. Of a gated product a thread does so for some
/// gates and then for what these are multiplied with. `room` is the thread's own: `block` floats. x: all rows of it, at
/// most kKeptTokens, interleaved.
template <class W, class Y, class Multiply>
void share_rows(KernelContext& ctx, const Operands<W, Y>& o, const Groups& groups, std::int64_t N, std::int64_t unit,
                std::int64_t block, Multiply&& multiply) {
  const std::int64_t T = groups.rows, rows = o.has_gate ? N / 2 : N, units = (rows + unit - 1) / unit;
  const std::int64_t of_x = T * whole_vectors(o.K);
  const std::int64_t of_sum = o.norm && o.norm->delta.data ? whole_vectors(o.K) : 0;
  const std::int64_t share = block + of_x + of_sum, shares = ctx.num_threads() * share;
  auto* scratch = static_cast<float*>(
      ctx.scratch(kRowGemmSlot, static_cast<std::size_t>(shares) * sizeof(float) +
                                    (o.has_gate ? static_cast<std::size_t>(T * rows) * sizeof(Y) : 0)));
  const std::int64_t elements = N / units * o.K * ((T + kPanelTokens - 1) / kPanelTokens);  // of a unit, times tiles
  parallel_for(ctx, units, rows_grain(elements), [&](std::int64_t begin, std::int64_t end, std::int64_t thread) {
    const std::int64_t first = begin * unit, n = std::min(rows, end * unit) - first;
    float *room = scratch + thread * share, *all = room + block;
    const float* x = lies_interleaved(o, T);
    if (!x) {
      interleave(o, groups, {T * begin / units, T * end / units, reinterpret_cast<W*>(all + of_x)}, all);
      x = all;
    }
    Y* y = o.y + first;
    multiply(o.from(first, y, o.ldy), first, n, x, room);
    if (!o.has_gate) return;
    Y* up = reinterpret_cast<Y*>(scratch + shares) + T * first;
    multiply(o.from(rows + first, up, n), rows + first, n, x, room);
    gate_rows(y, o.ldy, up, T, n);
  });
}

/// Where the quad of a row of four columns of a panel lies, in quads. As fp32 the panel is [K/4][kVecs] vectors: quad q
/// of vector v is of row q·kVecs + v. As bf16 the same, but with AVX2 row behind row, which load_panel() then has in
/// these vectors.
template <class W>
constexpr std::int64_t quad_of_panel(std::int64_t row) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if (sizeof(W) == sizeof(bf16)) return row;
#endif
  return row % kVecs * kQuads + row / kVecs;
}

/// Four columns of a panel.
template <class W>
HB_INLINE void load_panel(const W* from, Vf (&to)[kVecs]) {
#pragma GCC unroll 4
  for (int v = 0; v < kVecs; ++v) to[v] = load(from + v * kLanes);
}
#if defined(__AVX2__) && !defined(__AVX512F__)
// Zeros below a bf16 make an fp32 of it: half of what widening one vector after the other takes.
HB_INLINE void load_panel(const bf16* from, Vf (&to)[kVecs]) {
  const __m256i rows = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  to[0] = std::bit_cast<Vf>(_mm256_unpacklo_epi16(_mm256_setzero_si256(), rows));
  to[1] = std::bit_cast<Vf>(_mm256_unpackhi_epi16(_mm256_setzero_si256(), rows));
}
#endif

/// A panel of arranged weights.
template <class W>
struct ArrangedPanel {
  const W* at;
  /// The next four columns.
  HB_INLINE void take(Vf (&to)[kVecs]) {
    load_panel(at, to);
    at += 4 * kPanelRows;
  }
};

/// acc[t][v] += four columns of a panel times TB interleaved rows of x.
template <int TB, class Panel>
HB_INLINE void panel_quad(Panel& panel, const float* x, Vf (&acc)[TB][kVecs]) {
  Vf wv[kVecs];
  panel.take(wv);
#pragma GCC unroll 4
  for (Vf& v : wv) asm("" : "+v"(v));  // one load for all rows of x
#pragma GCC unroll 8
  for (int t = 0; t < TB; ++t) {
    Vf xv = load_quad(x + t * 4);
    asm("" : "+v"(xv));  // one load for all vectors
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) acc[t][v] += wv[v] * xv;
  }
}

/// Asks for nothing.
struct NothingAhead {
  template <class Panel>
  void ask(const Panel&) {}
};

constexpr std::int64_t kTurnColumns = 8;  // of a panel between two questions of what is ahead
static_assert(kLanes % kTurnColumns == 0);

/// Of n columns, whole vectors. Two quads a turn: with one, a fifth of the instructions would only count turns.
template <int TB, class Panel, class Ahead>
HB_INLINE void panel_columns(Panel panel, const float* x, std::int64_t n, Vf (&acc)[TB][kVecs], Ahead& ahead) {
  for (std::int64_t k = 0; k < n; k += kTurnColumns, x += kTurnColumns * TB) {
    ahead.ask(panel);
    panel_quad(panel, x, acc);
    panel_quad(panel, x + 4 * TB, acc);
  }
}

/// sums[t·pitch + row] += the panel's rows of acc; what was there before the `first` columns is nothing.
template <int TB>
HB_INLINE void add_panel(const Vf (&acc)[TB][kVecs], float* sums, std::int64_t pitch, bool first) {
  const auto add = [&](int t, auto panel) HB_FORCE_INLINE {
    float* to = sums + t * pitch;
    decltype(panel) old{};
    if (!first) std::memcpy(&old, to, sizeof old);
    panel += old;  // 0 + (-0) is 0 whoever sums
    std::memcpy(to, &panel, sizeof panel);
  };
#pragma GCC unroll 8
  for (int t = 0; t < TB; t += kSummedTokens) {
#if defined(__AVX512F__)
    add(t, sum_panels(acc[t]));
#else
    const Vf s = sum_panels(acc[t], acc[t + 1 < TB ? t + 1 : t]);
    add(t, __builtin_shufflevector(s, s, 0, 1, 2, 3));
    if (t + 1 < TB) add(t + 1, __builtin_shufflevector(s, s, 4, 5, 6, 7));
#endif
  }
}

}  // namespace hotbunk::kernels
