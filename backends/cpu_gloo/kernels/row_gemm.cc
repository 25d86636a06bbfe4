#include "backends/cpu_gloo/kernels/row_gemm.h"

#include "backends/cpu_gloo/kernels/gemm.h"
#include "backends/cpu_gloo/kernels/many_rows_gemm.h"
#include "backends/cpu_gloo/kernels/parallel.h"
#include "backends/cpu_gloo/kernels/row_gemm_tiles.h"

namespace hotbunk::kernels {
namespace {

// --- few rows of x: weights straight from memory --------------------------------------------------------------------

/// kLanes columns of kQuads weight rows from w: vector q holds quad q of each row.
template <class W>
HB_INLINE void load_quads(const W* w, std::int64_t ldw, Vf (&to)[kQuads]) {
#pragma GCC unroll 4
  for (int q = 0; q < kQuads; ++q) to[q] = load(w + q * ldw);
  transpose_quads(to);
}
// Of bf16 the rows meet before they are widened: zeros below a bf16 make an fp32 of it, half the shuffles.
#if defined(__AVX512BW__)
HB_INLINE void load_quads(const bf16* w, std::int64_t ldw, Vf (&to)[kQuads]) {
  using Row = std::int64_t __attribute__((vector_size(32)));  // a quad each
  Row rows[kQuads];
  for (int q = 0; q < kQuads; ++q) std::memcpy(&rows[q], static_cast<const void*>(w + q * ldw), sizeof rows[q]);
  const auto ab = __builtin_shufflevector(rows[0], rows[1], 0, 1, 2, 3, 4, 5, 6, 7),
             cd = __builtin_shufflevector(rows[2], rows[3], 0, 1, 2, 3, 4, 5, 6, 7);
  const auto low = std::bit_cast<__m512i>(__builtin_shufflevector(ab, cd, 0, 1, 4, 5, 8, 9, 12, 13)),
             high = std::bit_cast<__m512i>(__builtin_shufflevector(ab, cd, 2, 3, 6, 7, 10, 11, 14, 15));
  const __m512i zeros = _mm512_setzero_si512();
  to[0] = std::bit_cast<Vf>(_mm512_unpacklo_epi16(zeros, low));
  to[1] = std::bit_cast<Vf>(_mm512_unpackhi_epi16(zeros, low));
  to[2] = std::bit_cast<Vf>(_mm512_unpacklo_epi16(zeros, high));
  to[3] = std::bit_cast<Vf>(_mm512_unpackhi_epi16(zeros, high));
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
HB_INLINE void load_quads(const bf16* w, std::int64_t ldw, Vf (&to)[kQuads]) {
  const auto* high = reinterpret_cast<const __m128i*>(w + ldw);
  const __m256i rows = _mm256_inserti128_si256(
      _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w))), _mm_loadu_si128(high), 1);
  to[0] = std::bit_cast<Vf>(_mm256_unpacklo_epi16(_mm256_setzero_si256(), rows));
  to[1] = std::bit_cast<Vf>(_mm256_unpackhi_epi16(_mm256_setzero_si256(), rows));
}
#endif

/// Asks for the cache line at p. Columns of the tile after next: rows of a few KiB are too short for the processor to
/// see that they follow each other.
HB_INLINE void ask_for(const void* p) { __builtin_prefetch(p); }

/// acc[v][t] += the products of n columns (whole vectors) of NV·kQuads weight rows with TB interleaved rows of x.
template <int NV, int TB, class W>
HB_INLINE void stream_columns(const W* w, std::int64_t ldw, const float* x, std::int64_t n, Vf (&acc)[NV][TB]) {
  const W* rows[NV];  // one pointer each and the rows' distance: what x86 can address without arithmetic
  std::int64_t ahead = 2 * NV * kQuads * ldw;
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) {
    rows[v] = w + v * kQuads * ldw;
    asm("" : "+r"(rows[v]));
  }
  asm("" : "+r"(ahead));
  for (std::int64_t k = 0; k < n; k += kLanes, x += kLanes * TB) {
    Vf wv[NV][kQuads];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      load_quads(rows[v], ldw, wv[v]);
#pragma GCC unroll 4
      for (int q = 0; q < kQuads; ++q) ask_for(rows[v] + ahead + q * ldw);
      rows[v] += kLanes;
    }
#pragma GCC unroll 4
    for (int q = 0; q < kQuads; ++q)
#pragma GCC unroll 16
      for (int t = 0; t < TB; ++t) {
        Vf xv = load_quad(x + (q * TB + t) * 4);
        if constexpr (NV > 1) asm("" : "+v"(xv));  // one load for all vectors
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) acc[v][t] += wv[v][q] * xv;
      }
  }
}

/// sums[t][row of the tile] += the products of n columns of NV·kQuads weight rows with TB interleaved rows of x. The
/// sums of a row of x lie `pitch` apart.
template <int NV, int TB, class W>
void stream_tile(const W* w, std::int64_t ldw, const float* x, std::int64_t n, float* sums, std::int64_t pitch) {
  Vf acc[NV][TB] = {};
  const std::int64_t whole = n / kLanes * kLanes;
  stream_columns<NV, TB>(w, ldw, x, whole, acc);
  if (whole < n) {  // the last columns, zeros behind them
    W end[NV * kQuads * kLanes] = {};
    for (int r = 0; r < NV * kQuads; ++r) std::copy_n(w + r * ldw + whole, n - whole, end + r * kLanes);
    stream_columns<NV, TB>(static_cast<const W*>(end), kLanes, x + whole * TB, kLanes, acc);
  }
#pragma GCC unroll 16
  for (int t = 0; t < TB; ++t)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      const auto s = sum_quads(acc[v][t]);
      for (int q = 0; q < kQuads; ++q) sums[t * pitch + v * kQuads + q] += s[static_cast<std::size_t>(q)];
    }
}

template <int NV, int TB, class W>
void stream_tokens(std::int64_t tokens, const W* w, std::int64_t ldw, const float* x, std::int64_t n, float* sums,
                   std::int64_t pitch) {
  if (tokens == TB) return stream_tile<NV, TB>(w, ldw, x, n, sums, pitch);
  if constexpr (TB > 1) stream_tokens<NV, TB - 1>(tokens, w, ldw, x, n, sums, pitch);
}

constexpr int kStreamRows = 8;                     // weight rows of a tile, and of those that threads share
constexpr int kFewTokens = 2;                      // one tile for all of them
constexpr int kSomeTokens = kLanes == 16 ? 8 : 4;  // per tile of two vectors

/// Weight rows whose results are written together: of bf16 whole vectors, which are narrowed on their way.
template <class W>
constexpr std::int64_t strip_rows = sizeof(W) == sizeof(bf16) ? 64 : kStreamRows;

/// `rows` ≤ strip_rows weight rows from n0, whole tiles of NV·kQuads, times all rows of x, whose groups are interleaved
/// one behind the other.
template <int NV, int TB, class W, class Y>
void stream_rows(const Operands<W, Y>& o, std::int64_t n0, std::int64_t rows, const Groups& groups, const float* x) {
  constexpr std::int64_t pitch = strip_rows<W>;
  float sums[(TB <= kFewTokens ? kFewTokens : kSkinnyRows) * pitch] = {};
  for (std::int64_t r = 0; r < rows; r += NV * kQuads)
    for (std::int64_t k0 = 0; k0 < o.K; k0 += kRowChunk)  // a chunk of the tile's rows stays in the L1 cache
      for (std::int64_t g = 0; g < groups.count; ++g) {
        const std::int64_t t0 = groups.first(g), tokens = groups.first(g + 1) - t0;
        stream_tokens<NV, TB>(tokens, o.w + (n0 + r) * o.ldw + k0, o.ldw, x + t0 * whole_vectors(o.K) + k0 * tokens,
                              std::min(kRowChunk, o.K - k0), sums + t0 * pitch + r, pitch);
      }
  for (std::int64_t t = 0; t < groups.rows; ++t) o.write(t, n0, sums + t * pitch, rows);
}

/// N weight rows times all rows of x, at most kSkinnyRows, interleaved.
template <class W, class Y>
void stream(const Operands<W, Y>& o, std::int64_t N, const Groups& groups, const float* x) {
  std::int64_t n = 0;
  for (std::int64_t rows; n + kStreamRows <= N; n += rows) {
    rows = strip_rows<W> == kStreamRows ? kStreamRows : std::min(strip_rows<W>, (N - n) / kStreamRows * kStreamRows);
    if (groups.rows <= kFewTokens) stream_rows<kStreamRows / kQuads, kFewTokens>(o, n, rows, groups, x);
    else stream_rows<2, kSomeTokens>(o, n, rows, groups, x);
  }
  for (; n < N; ++n) {  // a row alone: beside copies of itself, whose results go nowhere
    float y[kSkinnyRows * kQuads];
    const Operands<W, float> alone(o.x, o.ldx, o.w + n * o.ldw, 0, nullptr, y, kQuads, o.K);
    stream_rows<1, kSomeTokens>(alone, 0, kQuads, groups, x);
    for (std::int64_t t = 0; t < groups.rows; ++t) o.write(t, n, y + t * kQuads, 1);
  }
}

// --- some rows of x: blocks of arranged weights ---------------------------------------------------------------------

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

// Weight rows of a block: a panel or so, which is still in the first cache when all rows of x pass over it, and so that
// few are a thread's first, which nobody asks for ahead.
constexpr std::int64_t kBlockRows = 16;
static_assert(kBlockRows % kPanelRows == 0);

/// sums[t·kBlockRows + row] (+)= n columns of a panel, between two sums, times `tokens` interleaved rows of x.
template <int TB>
void panel_tokens(std::int64_t tokens, const float* panel, const float* x, std::int64_t n, float* sums, bool first) {
  if (tokens == TB) {
    Vf acc[TB][kVecs] = {};
    NothingAhead nothing;
    panel_columns(ArrangedPanel<float>{panel}, x, n, acc, nothing);
    return add_panel(acc, sums, kBlockRows, first);
  }
  if constexpr (TB > 1) panel_tokens<TB - 1>(tokens, panel, x, n, sums, first);
}

/// Weight rows [n0, n0 + rows) of a block, arranged, times all rows of x, interleaved, group after group. `weights`:
/// what is multiplied behind this.
template <class W, class Y>
void multiply_block(const Operands<W, Y>& o, std::int64_t n0, std::int64_t rows, const Groups& groups,
                    const float* block, const float* x, RowsAhead weights) {
  const std::int64_t panels = (rows + kPanelRows - 1) / kPanelRows;
  const std::int64_t weight_lines = weights.lines() / (panels * groups.count) + 1;
  for (std::int64_t g = 0; g < groups.count; ++g) {
    const std::int64_t t0 = groups.first(g), tokens = groups.first(g + 1) - t0;
    RowsAhead results(o.y + t0 * o.ldy + n0, o.ldy, tokens, rows);
    const std::int64_t result_lines = results.lines() / panels + 1;
    float sums[kPanelTokens][kBlockRows];
    if (o.K == 0) std::fill_n(&sums[0][0], kPanelTokens * kBlockRows, 0.0f);
    for (std::int64_t n = 0; n < rows; n += kPanelRows) {
      results.ask(result_lines), weights.ask(weight_lines);
      for (std::int64_t k = 0; k < o.K; k += kRowChunk)
        panel_tokens<kPanelTokens>(tokens, block + n * whole_vectors(o.K) + k * kPanelRows,
                                   x + t0 * whole_vectors(o.K) + k * tokens,
                                   whole_vectors(std::min(kRowChunk, o.K - k)), &sums[0][n], k == 0);
    }
    for (std::int64_t t = 0; t < tokens; ++t) o.write(t0 + t, n0, sums[t], rows);
  }
}

/// N weight rows, block after block, times all rows of x. `block`: room for a block's, arranged.
template <class W, class Y>
void blocks(const Operands<W, Y>& o, std::int64_t N, const Groups& groups, float* block, const float* x) {
  for (std::int64_t n = 0; n < N; n += kBlockRows) {
    const std::int64_t rows = std::min(kBlockRows, N - n), then = n + kBlockRows, more = std::min(kBlockRows, N - then);
    const RowsAhead ahead = more > 0 ? RowsAhead(o.w + then * o.ldw, o.ldw, more, o.K) : RowsAhead();
    arrange(o.w + n * o.ldw, o.ldw, rows, o.K, block);
    multiply_block(o, n, rows, groups, block, x, ahead);
  }
}

template <class W, class Y>
void run(KernelContext& ctx, const Operands<W, Y>& o, std::int64_t T, std::int64_t N) {
  if (!are_kept(T))
    return share_many_rows(ctx, o, T, N,
                           [&](std::int64_t row, std::int64_t rows, std::int64_t k, std::int64_t n, float* to) {
                             pack_weight_rows(o.w + row * o.ldw + k, o.ldw, rows, n, to);
                           });
  const bool few = T <= kSkinnyRows;
  const Groups groups(T, !few ? kPanelTokens : T <= kFewTokens ? kFewTokens : kSomeTokens);
  const std::int64_t block = few ? 0 : kBlockRows * whole_vectors(o.K);
  share_rows(ctx, o, groups, N, few ? kStreamRows : kPanelRows, block,
             [&](const Operands<W, Y>& part, std::int64_t, std::int64_t n, const float* x, float* room) {
               if (few) stream(part, n, groups, x);
               else blocks(part, n, groups, room, x);
             });
}

}  // namespace

bool are_kept(std::int64_t T) { return T <= kKeptTokens; }

void row_gemm(KernelContext& ctx, ConstMatrix x, ConstMatrix w, const float* bias, Matrix y, std::int64_t T,
              std::int64_t N, std::int64_t K, Write write, const BesideProduct& beside) {
  if (T == 0 || N == 0) return;
  HB_CHECK(x.dtype == w.dtype, "GEMM operands are {} and {}", name_of(x.dtype), name_of(w.dtype));
  with_float_type(w.dtype, [&](auto w_tag) {
    with_float_type(y.dtype, [&](auto y_tag) {
      using W = decltype(w_tag);
      run(ctx, Operands<W, decltype(y_tag)>(x, static_cast<const W*>(w.data), w.ld, bias, y, K, write, beside), T, N);
    });
  });
}

}  // namespace hotbunk::kernels
