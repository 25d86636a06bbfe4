// A vector holds a quad (four consecutive k) of each of several weight rows, and meets the same quad of one row of x in
// all of them. So four chains make an element: few enough that a tile's last additions cost little beside many rows of
// x, and arranging the weights so costs two shuffles a vector, less than the memory takes to bring it to one row of x.
#include "backends/cpu_gloo/kernels/row_gemm.h"

#if defined(__AVX__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <array>

#include "backends/cpu_gloo/kernels/gemm.h"
#include "backends/cpu_gloo/kernels/parallel.h"
#include "backends/cpu_gloo/kernels/simd.h"

namespace hotbunk::kernels {
namespace {

constexpr int kScratchSlot = 3;
constexpr int kQuads = kLanes / 4;          // weight rows per vector
constexpr int kVecs = kQuads;               // vectors of a panel
constexpr int kPanelRows = kQuads * kVecs;  // weight rows per panel
constexpr int kPanelTokens = 6;             // tokens per tile of a panel: 24 (12) accumulators of 32 (16) registers
constexpr std::int64_t kCacheBytes = 512 * 1024;  // of arranged weights that all tokens pass over: half of a small L2
constexpr std::int64_t kBlockRows = 128;          // weight rows of such a block, at most

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

/// Quad c of rows[q] becomes quad q of rows[c].
HB_INLINE void transpose_quads(Vf (&rows)[kQuads]) {
#if defined(__AVX512F__)
  const auto low = [](Vf a, Vf b) HB_FORCE_INLINE {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
  };
  const auto high = [](Vf a, Vf b) HB_FORCE_INLINE {
    return __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  };
  const auto even = [](Vf a, Vf b) HB_FORCE_INLINE {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
  };
  const auto odd = [](Vf a, Vf b) HB_FORCE_INLINE {
    return __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  };
  const Vf ab = low(rows[0], rows[1]), cd = low(rows[2], rows[3]);
  const Vf ab2 = high(rows[0], rows[1]), cd2 = high(rows[2], rows[3]);
  rows[0] = even(ab, cd), rows[1] = odd(ab, cd), rows[2] = even(ab2, cd2), rows[3] = odd(ab2, cd2);
#else
  const Vf a = rows[0], b = rows[1];
  rows[0] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
  rows[1] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
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

/// The sums of a panel's vectors at once, the same additions: element q·kVecs + v is the sum of quad q of acc[v].
HB_INLINE std::array<float, kPanelRows> sum_panel(const Vf (&acc)[kVecs]) {
#if defined(__AVX512F__)
  const auto halves = [](Vf a, Vf b) HB_FORCE_INLINE {
    return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  };
  const Vf a = halves(acc[0], acc[1]), b = halves(acc[2], acc[3]);
  return std::bit_cast<std::array<float, kPanelRows>>(
      __builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
      __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31));
#else
  const Vf a = __builtin_shufflevector(acc[0], acc[1], 0, 1, 8, 9, 4, 5, 12, 13) +
               __builtin_shufflevector(acc[0], acc[1], 2, 3, 10, 11, 6, 7, 14, 15);
  const Vf s = a + __builtin_shufflevector(a, a, 1, 1, 3, 3, 5, 5, 7, 7);
  return {s[0], s[2], s[4], s[6]};
#endif
}

constexpr std::int64_t whole_vectors(std::int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

/// Floats between rows of x where it is copied. Rows a multiple of 1 KiB apart share a few sets of the L1 cache: of 16
/// of them each would push out the others.
constexpr std::int64_t padded_pitch(std::int64_t K) {
  const std::int64_t n = whole_vectors(K);
  return n % 256 == 0 ? n + kLanes : n;
}

/// What a call works on. x is fp32; behind its K columns there are zeros up to a whole vector.
template <class W, class Y>
struct Operands {
  const float* x;
  std::int64_t ldx;
  const W* w;
  std::int64_t ldw;
  const float* bias;  // or nullptr
  Y* y;
  std::int64_t ldy;
  std::int64_t K;
  bool accumulate;

  /// sums: of row t of x with the n weight rows from n0.
  HB_INLINE void write(std::int64_t t, std::int64_t n0, const float* sums, std::int64_t n) const {
    Y* out = y + t * ldy + n0;
    for_vectors(n, [&](std::int64_t i, auto ld, auto st) HB_FORCE_INLINE {
      Vf v = ld(sums + i);
      if (bias) v += ld(bias + n0 + i);
      if (accumulate) v += ld(out + i);
      st(out + i, v);
    });
  }
};

// --- few rows of x: weights straight from memory
// ----------------------------------------------------------------------

/// NV·kQuads weight rows from n0 times TB rows of x from t0.
template <int NV, int TB, class W, class Y>
HB_INLINE void stream_tile(const Operands<W, Y>& o, std::int64_t n0, std::int64_t t0) {
  float sums[TB][NV][kQuads] = {};
  const W* w = o.w + n0 * o.ldw;
  const float* x = o.x + t0 * o.ldx;
  for (std::int64_t k0 = 0; k0 < o.K; k0 += kRowChunk) {
    Vf acc[NV][TB] = {};
    for_vectors(std::min(kRowChunk, o.K - k0), [&](std::int64_t i, auto ld, auto) HB_FORCE_INLINE {
      Vf wv[NV][kQuads];
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
#pragma GCC unroll 4
        for (int q = 0; q < kQuads; ++q) wv[v][q] = ld(w + (v * kQuads + q) * o.ldw + k0 + i);
        transpose_quads(wv[v]);
      }
#pragma GCC unroll 4
      for (int q = 0; q < kQuads; ++q)
#pragma GCC unroll 16
        for (int t = 0; t < TB; ++t) {
          Vf xv = load_quad(x + t * o.ldx + k0 + i + 4 * q);
          if constexpr (NV > 1) asm("" : "+v"(xv));  // one load for all vectors
#pragma GCC unroll 4
          for (int v = 0; v < NV; ++v) acc[v][t] += wv[v][q] * xv;
        }
    });
    for (int t = 0; t < TB; ++t)
      for (int v = 0; v < NV; ++v) {
        const auto s = sum_quads(acc[v][t]);
        for (int q = 0; q < kQuads; ++q) sums[t][v][q] += s[static_cast<std::size_t>(q)];
      }
  }
  for (int t = 0; t < TB; ++t) o.write(t0 + t, n0, sums[t][0], NV * kQuads);
}

template <int NV, int TB, class W, class Y>
void stream_tokens(const Operands<W, Y>& o, std::int64_t n0, std::int64_t t0, std::int64_t tokens) {
  if (tokens == TB) return stream_tile<NV, TB>(o, n0, t0);
  if constexpr (TB > 1) stream_tokens<NV, TB - 1>(o, n0, t0, tokens);
}

constexpr int kFewTokens = kLanes == 16 ? 4 : 2;    // two vectors of weights per tile
constexpr int kSomeTokens = kLanes == 16 ? 16 : 8;  // one

/// Weight rows [begin, end) times rows [t0, t0 + tokens) of x, tokens ≤ kSomeTokens.
template <class W, class Y>
void stream_rows(const Operands<W, Y>& o, std::int64_t begin, std::int64_t end, std::int64_t t0, std::int64_t tokens) {
  std::int64_t n = begin;
  if (tokens <= kFewTokens)
    for (; n + 2 * kQuads <= end; n += 2 * kQuads) stream_tokens<2, kFewTokens>(o, n, t0, tokens);
  for (; n + kQuads <= end; n += kQuads) stream_tokens<1, kSomeTokens>(o, n, t0, tokens);
  for (; n < end; ++n) {  // a row alone: beside copies of itself, whose results go nowhere
    float y[kSomeTokens * kQuads];
    const Operands<W, float> alone{o.x + t0 * o.ldx, o.ldx, o.w + n * o.ldw, 0, nullptr, y, kQuads, o.K, false};
    stream_tokens<1, kSomeTokens>(alone, 0, 0, tokens);
    for (std::int64_t t = 0; t < tokens; ++t) o.write(t0 + t, n, y + t * kQuads, 1);
  }
}

// --- many rows of x: blocks of arranged weights
// -----------------------------------------------------------------------

/// Panels of kPanelRows weight rows, one after the other, each [K/4][kVecs] vectors: quad q of vector v is of row
/// q·kVecs + v of the panel. Rows that are not there are zero.
template <class W>
void arrange(const W* w, std::int64_t ldw, std::int64_t rows, std::int64_t K, float* to) {
  for (std::int64_t n0 = 0; n0 < rows; n0 += kPanelRows, to += kPanelRows * whole_vectors(K))
    for_vectors(K, [&](std::int64_t k, auto ld, auto) HB_FORCE_INLINE {
      for (int v = 0; v < kVecs; ++v) {
        Vf part[kQuads] = {};
        for (int q = 0; q < kQuads; ++q)
          if (const std::int64_t n = n0 + q * kVecs + v; n < rows) part[q] = ld(w + n * ldw + k);
        transpose_quads(part);
        for (int q = 0; q < kQuads; ++q) store(to + k * kPanelRows + (q * kVecs + v) * kLanes, part[q]);
      }
    });
}

/// One panel times TB rows of x, over n columns (whole vectors): sums[t] += products.
template <int TB>
HB_INLINE void panel_tile(const float* panel, const float* x, std::int64_t ldx, std::int64_t n,
                          std::array<float, kPanelRows>* sums) {
  Vf acc[TB][kVecs] = {};
  for (std::int64_t k = 0; k < n; k += 4) {
    Vf wv[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) wv[v] = load(panel + k * kPanelRows + v * kLanes);
#pragma GCC unroll 8
    for (int t = 0; t < TB; ++t) {
      Vf xv = load_quad(x + t * ldx + k);
      asm("" : "+v"(xv));  // one load for all vectors
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) acc[t][v] += wv[v] * xv;
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < TB; ++t) {
    const auto s = sum_panel(acc[t]);
    for (std::size_t i = 0; i < kPanelRows; ++i) sums[t][i] += s[i];
  }
}

template <int TB>
void panel_tokens(std::int64_t tokens, const float* panel, const float* x, std::int64_t ldx, std::int64_t n,
                  std::array<float, kPanelRows>* sums) {
  if (tokens == TB) return panel_tile<TB>(panel, x, ldx, n, sums);
  if constexpr (TB > 1) panel_tokens<TB - 1>(tokens, panel, x, ldx, n, sums);
}

/// Weight rows [n0, n0 + rows) times all T rows of x; `block`: rows·whole_vectors(K) floats, rows rounded up to panels.
template <class W, class Y>
void block_of_rows(const Operands<W, Y>& o, std::int64_t n0, std::int64_t rows, std::int64_t T, float* block) {
  arrange(o.w + n0 * o.ldw, o.ldw, rows, o.K, block);
  for (std::int64_t t0 = 0; t0 < T; t0 += kPanelTokens) {
    const std::int64_t tokens = std::min<std::int64_t>(kPanelTokens, T - t0);
    for (std::int64_t p0 = 0; p0 < rows; p0 += kPanelRows) {
      const float* panel = block + p0 * whole_vectors(o.K);
      std::array<float, kPanelRows> sums[kPanelTokens] = {};
      for (std::int64_t k0 = 0; k0 < o.K; k0 += kRowChunk)
        panel_tokens<kPanelTokens>(tokens, panel + k0 * kPanelRows, o.x + t0 * o.ldx + k0, o.ldx,
                                   whole_vectors(std::min(kRowChunk, o.K - k0)), sums);
      const std::int64_t there = std::min<std::int64_t>(kPanelRows, rows - p0);
      for (std::int64_t t = 0; t < tokens; ++t) o.write(t0 + t, n0 + p0, sums[t].data(), there);
    }
  }
}

/// Weight rows of a block: as many as stay in the cache.
std::int64_t block_rows(std::int64_t K) {
  const std::int64_t fitting = kCacheBytes / static_cast<std::int64_t>(sizeof(float)) / std::max<std::int64_t>(K, 1);
  return std::clamp<std::int64_t>(fitting / kPanelRows * kPanelRows, kPanelRows, kBlockRows);
}

template <class W, class Y>
void run(KernelContext& ctx, const Operands<W, Y>& o, std::int64_t T, std::int64_t N, float* blocks) {
  const std::int64_t step = block_rows(o.K), share = step * whole_vectors(o.K);
  const std::int64_t panels = (N + kPanelRows - 1) / kPanelRows;
  parallel_for(ctx, panels, rows_grain(kPanelRows * o.K * ((T + kPanelTokens - 1) / kPanelTokens)),
               [&](std::int64_t begin, std::int64_t end, std::int64_t thread) {
                 const std::int64_t last = std::min(N, end * kPanelRows);
                 if (T <= kSkinnyRows)
                   for (std::int64_t n = begin * kPanelRows; n < last; n += kPanelRows)
                     for (std::int64_t t = 0; t < T; t += kSomeTokens)
                       stream_rows(o, n, std::min<std::int64_t>(n + kPanelRows, last), t,
                                   std::min<std::int64_t>(kSomeTokens, T - t));
                 else
                   for (std::int64_t n = begin * kPanelRows; n < last; n += step)
                     block_of_rows(o, n, std::min(step, last - n), T, blocks + thread * share);
               });
}

}  // namespace

void row_gemm(KernelContext& ctx, ConstMatrix x, ConstMatrix w, const float* bias, Matrix y, std::int64_t T,
              std::int64_t N, std::int64_t K, Write write) {
  if (T == 0 || N == 0) return;
  // One row has nobody to push out; many are not streamed side by side.
  const bool pushed_out = T > 1 && T <= kSkinnyRows && x.ld % 256 == 0;
  const bool in_place = x.dtype == DType::f32 && K % kLanes == 0 && !pushed_out;
  const std::int64_t x_floats = in_place ? 0 : T * padded_pitch(K);
  const std::int64_t block_floats = T <= kSkinnyRows ? 0 : ctx.num_threads() * block_rows(K) * whole_vectors(K);
  auto* scratch =
      static_cast<float*>(ctx.scratch(kScratchSlot, static_cast<std::size_t>(x_floats + block_floats) * sizeof(float)));
  if (!in_place)
    with_float_type(x.dtype, [&](auto tag) {
      parallel_for(ctx, T, rows_grain(2 * K), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) {
          const auto* from = row<decltype(tag)>(x, t);
          float* to = scratch + t * padded_pitch(K);
          for_vectors(K, [&](std::int64_t k, auto ld, auto) HB_FORCE_INLINE { store(to + k, ld(from + k)); });
        }
      });
    });
  with_float_type(w.dtype, [&](auto w_tag) {
    with_float_type(y.dtype, [&](auto y_tag) {
      using W = decltype(w_tag);
      using Y = decltype(y_tag);
      const Operands<W, Y> operands{in_place ? static_cast<const float*>(x.data) : scratch,
                                    in_place ? x.ld : padded_pitch(K),
                                    static_cast<const W*>(w.data),
                                    w.ld,
                                    bias,
                                    static_cast<Y*>(y.data),
                                    y.ld,
                                    K,
                                    write == Write::accumulate};
      run(ctx, operands, T, N, scratch + x_floats);
    });
  });
}

}  // namespace hotbunk::kernels
