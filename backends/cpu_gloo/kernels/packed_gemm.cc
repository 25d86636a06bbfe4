#include "backends/cpu_gloo/kernels/packed_gemm.h"

#include "backends/cpu_gloo/kernels/many_rows_gemm.h"
#include "backends/cpu_gloo/kernels/parallel.h"
#include "backends/cpu_gloo/kernels/row_gemm_tiles.h"

namespace hotbunk::kernels {
namespace {

/// Panel after panel, in quads.
template <class W>
struct QuadPanels {
  const W* w;
  std::int64_t K;
  static constexpr std::int64_t together = 1, most_together = 1;  // panels whose lines lie among each other: a block
  /// Where columns of a block begin, which panel p is of.
  const W* columns(std::int64_t p, std::int64_t k) const { return w + (p * K + k) * kPanelRows; }
  ArrangedPanel<W> panel(std::int64_t p, std::int64_t k) const { return {columns(p, k)}; }
};

#if defined(__AVX512BW__)
/// kPanelRows rows of a block of pairs.
struct PairPanel {
  const bf16* at;
  std::int64_t pitch;
  /// Four columns of 16 rows are two vectors of 16 pairs. Zeros below a bf16 make an fp32 of it.
  HB_INLINE void take(Vf (&to)[kVecs]) {
    Vu first, second;
    std::memcpy(&first, static_cast<const void*>(at), sizeof first);
    std::memcpy(&second, static_cast<const void*>(at + pitch), sizeof second);
    const auto low = std::bit_cast<__m512i>(
                   __builtin_shufflevector(first, second, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)),
               high = std::bit_cast<__m512i>(
                   __builtin_shufflevector(first, second, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31));
    const __m512i zeros = _mm512_setzero_si512();
    to[0] = std::bit_cast<Vf>(_mm512_unpacklo_epi16(zeros, low));
    to[1] = std::bit_cast<Vf>(_mm512_unpackhi_epi16(zeros, low));
    to[2] = std::bit_cast<Vf>(_mm512_unpacklo_epi16(zeros, high));
    to[3] = std::bit_cast<Vf>(_mm512_unpackhi_epi16(zeros, high));
    at += 2 * pitch;
  }
};

/// Blocks of rows, pair after pair.
struct PairPanels {
  const bf16* w;
  std::int64_t K, together;
  static constexpr std::int64_t most_together = 64 / kPanelRows;
  const bf16* columns(std::int64_t p, std::int64_t k) const {
    return w + (p / together * K + k) * together * kPanelRows;
  }
  PairPanel panel(std::int64_t p, std::int64_t k) const {
    return {columns(p, k) + p % together * kPanelRows * 2, together * kPanelRows * 2};
  }
};
#endif

constexpr std::int64_t kStepColumns = 64;       // of a block that two tiles pass over while they are in the first cache
constexpr std::int64_t kLongStepColumns = 128;  // that more of them do
static_assert(kRowChunk % kStepColumns == 0 && kRowChunk % kLongStepColumns == 0, "a chunk ends with a step");
constexpr std::int64_t kLineBytes = 64;

constexpr std::int64_t kAheadBytes = 8192;

/// What lies some way behind the columns at hand, line by line as they are multiplied.
class LinesAhead {
 public:
  /// `bytes` from `begin`, asked for in `steps`.
  LinesAhead(const void* begin, std::int64_t bytes, std::int64_t steps)
      : at_(static_cast<const std::byte*>(begin)),
        end_(at_ + bytes),
        at_once_(((bytes + kLineBytes - 1) / kLineBytes + steps - 1) / steps) {}
  HB_INLINE void ask() {
    for (std::int64_t i = 0; i < at_once_ && at_ < end_; ++i, at_ += kLineBytes) __builtin_prefetch(at_);
  }
  template <class Panel>
  HB_INLINE void ask(const Panel&) {
    ask();
  }

 private:
  const std::byte *at_, *end_;
  std::int64_t at_once_;
};

/// What lies kAheadBytes behind the columns at hand, where all that follows is read in the order of the memory.
struct NextAhead {
  template <class W>
  HB_INLINE void ask(const ArrangedPanel<W>& panel) {
    const auto* from = reinterpret_cast<const std::byte*>(panel.at) + kAheadBytes;
#pragma GCC unroll 8
    for (std::int64_t i = 0; i < kTurnColumns * kPanelRows * std::int64_t{sizeof(W)}; i += kLineBytes)
      __builtin_prefetch(from + i);  // of what is no memory, too
  }
};

/// n columns of a panel times `tokens` interleaved rows of x. Between two sums, the accumulators of a tile lie in
/// `held` while other tiles have the same columns: at `first` they are zero, at `last` they are added to sums.
template <int TB, class Panel, class Ahead>
void panel_tile(std::int64_t tokens, Panel panel, const float* x, std::int64_t n, Vf* held, bool first, bool last,
                float* sums, std::int64_t pitch, bool fresh, Ahead& ahead) {
  if (tokens == TB) {
    Vf acc[TB][kVecs] = {};  // one by one: copied as a whole it would lie in memory, and every turn write it
    const auto each = [](auto&& body) HB_FORCE_INLINE {
#pragma GCC unroll 8
      for (int t = 0; t < TB; ++t)
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) body(t, v);
    };
    if (!first) each([&](int t, int v) HB_FORCE_INLINE { acc[t][v] = held[t * kVecs + v]; });
    panel_columns(panel, x, n, acc, ahead);
    if (last) add_panel(acc, sums, pitch, fresh);
    else each([&](int t, int v) HB_FORCE_INLINE { held[t * kVecs + v] = acc[t][v]; });
    return;
  }
  if constexpr (TB > 1) panel_tile<TB - 1>(tokens, panel, x, n, held, first, last, sums, pitch, fresh, ahead);
}

/// n elements of a panel as fp32: what several tiles pass over is widened once for all of them.
void widen_panel(const bf16* from, std::int64_t n, float* to) {
  for (std::int64_t i = 0; i < n; i += 4 * kPanelRows) {
    Vf part[kVecs];
    load_panel(from + i, part);
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) store(to + i + v * kLanes, part[v]);
  }
}

/// Whether a panel's elements lie behind each other, and are narrower than a tile has them.
template <class Panels, class W>
constexpr bool widens_panels = std::is_same_v<Panels, QuadPanels<W>> && sizeof(W) < sizeof(float);

/// Panels [begin, end), whose columns y begins with, times rows of x that are one tile: nobody else wants a panel's
/// columns, so each is passed over at once. y is written by whole vectors.
template <class W, class Y>
void multiply_tile(const Operands<W, Y>& o, const QuadPanels<W>& panels, std::int64_t begin, std::int64_t end,
                   std::int64_t tokens, const float* x) {
  constexpr std::int64_t panels_of_vector = kLanes / kPanelRows;
  float sums[kPanelTokens * kLanes];
  NextAhead ahead;
  for (std::int64_t p0 = begin; p0 < end; p0 += panels_of_vector) {
    const std::int64_t count = std::min(panels_of_vector, end - p0);
    for (std::int64_t s = 0; s < count; ++s)
      for (std::int64_t k = 0; k < o.K; k += kRowChunk)
        panel_tile<kPanelTokens>(tokens, panels.panel(p0 + s, k), x + k * tokens, std::min(kRowChunk, o.K - k), nullptr,
                                 true, true, sums + s * kPanelRows, kLanes, k == 0, ahead);
    for (std::int64_t t = 0; t < tokens; ++t)
      o.write(t, (p0 - begin) * kPanelRows, sums + t * kLanes, count * kPanelRows);
  }
}

/// Panels [begin, end), whose columns y begins with, times all rows of x, interleaved, block after block.
template <class Panels, class W, class Y>
void multiply_kept(const Operands<W, Y>& o, const Panels& panels, std::int64_t begin, std::int64_t end,
                   const Groups& groups, const float* x) {
  constexpr std::int64_t most_groups = (kKeptTokens + kPanelTokens - 1) / kPanelTokens;
  if constexpr (std::is_same_v<Panels, QuadPanels<W>>)
    if (groups.count == 1) return multiply_tile(o, panels, begin, end, groups.rows, x);
  const std::int64_t step = groups.count > 2 ? kLongStepColumns : kStepColumns;
  float sums[kKeptTokens * Panels::most_together * kPanelRows];
  Vf held[Panels::most_together * most_groups][kPanelTokens * kVecs];
  [[maybe_unused]] alignas(kLineBytes) float wide[kLongStepColumns * kPanelRows];  // the columns of a panel
  const std::int64_t pitch = panels.together * kPanelRows;
  // Memory is asked between tiles, but where one tile is all that there is to do meanwhile.
  const bool between = groups.count > 1;
  NothingAhead nothing;
  std::int64_t count;
  for (std::int64_t p0 = begin; p0 < end; p0 += count) {
    count = Panels::most_together == 1 ? 1 : std::min(end - p0, panels.together - p0 % panels.together);
    for (std::int64_t k = 0; k < o.K; k += step) {
      const std::int64_t n = std::min(step, o.K - k);
      const bool starts = k % kRowChunk == 0, ends = (k + n) % kRowChunk == 0 || k + n == o.K;
      const std::int64_t steps = count * (between ? groups.count : n / kTurnColumns);
      const std::int64_t bytes = pitch * n * std::int64_t{sizeof(W)};
      LinesAhead ahead(reinterpret_cast<const std::byte*>(panels.columns(p0, k)) + std::max(kAheadBytes, 2 * bytes),
                       bytes, steps);
      for (std::int64_t s = 0; s < count; ++s)
        for (std::int64_t g = 0; g < groups.count; ++g) {
          const std::int64_t t0 = groups.first(g), tokens = groups.first(g + 1) - t0;
          const auto multiply = [&](auto panel, auto& asks) {
            panel_tile<kPanelTokens>(tokens, panel, x + t0 * o.K + k * tokens, n, held[s * most_groups + g], starts,
                                     ends, sums + t0 * pitch + s * kPanelRows, pitch, k < kRowChunk, asks);
          };
          if (between) ahead.ask();
          if constexpr (widens_panels<Panels, W>) {
            if (g == 0) widen_panel(panels.columns(p0 + s, k), n * kPanelRows, wide);
            multiply(ArrangedPanel<float>{wide}, nothing);
          } else if (between) multiply(panels.panel(p0 + s, k), nothing);
          else multiply(panels.panel(p0 + s, k), ahead);
        }
    }
    for (std::int64_t t = 0; t < groups.rows; ++t)
      o.write(t, (p0 - begin) * kPanelRows, sums + t * pitch, count * kPanelRows);
  }
}

/// Four columns of kLanes weight rows from panel p, of which `count` panels are there: to[i] has column i of each.
template <class W>
HB_INLINE void load_panel_columns(const QuadPanels<W>& panels, std::int64_t p, std::int64_t count, std::int64_t k,
                                  Vf (&to)[kChains]) {
  constexpr std::int64_t panels_of_vector = kLanes / kPanelRows;
#pragma GCC unroll 2
  for (std::int64_t s = 0; s < panels_of_vector; ++s) {
    Vf part[kVecs] = {};
    if (s < count) load_panel(panels.columns(p + s, k), part);
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) to[s * kVecs + v] = part[v];
  }
  transpose_inside_quads(to[0], to[1], to[2], to[3]);
#if !defined(__AVX512F__)
#pragma GCC unroll 4
  for (Vf& v : to) v = __builtin_shufflevector(v, v, 0, 1, 4, 5, 2, 3, 6, 7);
#endif
}

/// n columns from k of `rows` weight rows from panel p, as pack_weight_rows has them.
template <class W>
void pack_panels(const QuadPanels<W>& panels, std::int64_t p, std::int64_t rows, std::int64_t k, std::int64_t n,
                 float* to) {
  const std::int64_t chain = n / kChains * kStrip;  // n is whole vectors: packed_order() says so of K
  for (std::int64_t r = 0; r < kStrip; r += kLanes)
    for (std::int64_t i = 0; i < n; i += kChains) {
      Vf part[kChains];
      load_panel_columns(panels, p + r / kPanelRows, (rows - r) / kPanelRows, k + i, part);
#pragma GCC unroll 4
      for (int j = 0; j < kChains; ++j) store(to + j * chain + i / kChains * kStrip + r, part[j]);
    }
}

/// All panels of N weight rows times at most kKeptTokens rows of x, shared by the team block by block, or panel by
/// panel where half of them, a gate's, end inside a block.
template <class Panels, class W, class Y>
void share_panels(KernelContext& ctx, const Operands<W, Y>& o, const Panels& panels, std::int64_t T, std::int64_t N) {
  const Groups groups(T, kPanelTokens);
  const std::int64_t of_block = panels.together * kPanelRows;
  share_rows(ctx, o, groups, N, N / (o.has_gate ? 2 : 1) % of_block == 0 ? of_block : kPanelRows, 0,
             [&](const Operands<W, Y>& part, std::int64_t first, std::int64_t n, const float* x, float*) {
               multiply_kept(part, panels, first / kPanelRows, (first + n) / kPanelRows, groups, x);
             });
}

template <class W, class Y>
void multiply(KernelContext& ctx, Operands<W, Y> o, std::int64_t T, std::int64_t N, PackedOrder order) {
  const std::int64_t whole = N / kPanelRows * kPanelRows;
  if (order == PackedOrder::quads) {
    const QuadPanels<W> panels{o.w, o.K};
    if (are_kept(T)) return share_panels(ctx, o, panels, T, whole);
    return share_many_rows(ctx, o, T, whole,
                           [&](std::int64_t row, std::int64_t rows, std::int64_t k, std::int64_t n, float* to) {
                             pack_panels(panels, row / kPanelRows, rows, k, n, to);
                           });
  }
#if defined(__AVX512BW__)
  if constexpr (sizeof(W) == sizeof(bf16)) {
    const PairPanels blocks{o.w, o.K, rows_of_pairs(order) / kPanelRows};
    for (std::int64_t left = T; left > 0; left -= kKeptTokens) {  // of more, oneDNN's kernel is the one to take
      share_panels(ctx, o, blocks, std::min(left, kKeptTokens), whole);
      o.skip_rows(kKeptTokens);
    }
    return;
  }
#endif
  HB_CHECK(false, "no kernel reads weights in this order");
}

}  // namespace

void packed_gemm(KernelContext& ctx, ConstMatrix x, const void* w, const float* bias, Matrix y, std::int64_t T,
                 std::int64_t N, std::int64_t K, Write write, PackedOrder order, const BesideProduct& beside) {
  if (T == 0 || N == 0) return;
  const std::int64_t whole = N / kPanelRows * kPanelRows;
  with_float_type(x.dtype, [&](auto w_tag) {
    with_float_type(y.dtype, [&](auto y_tag) {
      using W = decltype(w_tag);
      multiply(ctx, Operands<W, decltype(y_tag)>(x, static_cast<const W*>(w), K, bias, y, K, write, beside), T, N,
               order);
    });
  });
  if (whole == N) return;  // the rows behind the panels are as they were
  HB_CHECK(!beside.norm.data && !beside.swiglu, "{} rows behind the panels", N - whole);
  const auto behind = [&](auto m) {
    m.data = const_cast<std::byte*>(static_cast<const std::byte*>(m.data)) + whole * size_of(m.dtype);
    return m;
  };
  row_gemm(ctx, x, {static_cast<const std::byte*>(w) + whole * K * size_of(x.dtype), x.dtype, K},
           bias ? bias + whole : nullptr, behind(y), T, N - whole, K, write,
           beside.residual.data ? BesideProduct{.residual = behind(beside.residual)} : BesideProduct{});
}

}  // namespace hotbunk::kernels
