// One step of the online softmax, for training's attention and rollout's: compiled once, so that a query's output has
// the same bits whichever of them asks, whatever queries stand beside it. Internal to the kernels.
#pragma once
#include <utility>

#include "backends/cpu_gloo/kernels/attention_tiles.h"

namespace hotbunk::kernels {

/// One thread's tiles, carved from its share of the scratch memory: keys and values of `max_length` tokens, and a tile
/// of kBlock queries with its scores and output. dp: a value's width, rounded up to whole vectors.
struct AttentionTile {
  float* k_t;          // tiles of kBlock keys, each [d][kBlock]
  float* v;            // [max_length][dp]
  float* q;            // [kBlock][d], scaled
  float* s;            // [kBlock][kBlock]
  float* o;            // [kBlock][dp], Σ p·v
  SoftmaxState state;  // of each query
  std::int64_t dp;
  static std::int64_t floats(std::int64_t max_length, std::int64_t d, std::int64_t dp) {
    return round_up(max_length, kBlock) * (d + dp) + kBlock * (d + kBlock + dp + 3);
  }
  AttentionTile(float* base, std::int64_t max_length, std::int64_t d, std::int64_t padded) : dp(padded) {
    const std::int64_t length = round_up(max_length, kBlock);
    const auto take = [&](std::int64_t n) { return std::exchange(base, base + n); };
    k_t = take(length * d), v = take(length * dp), o = take(kBlock * dp), s = take(kBlock * kBlock);
    q = take(kBlock * d), state = {take(kBlock), take(kBlock), take(kBlock)};
  }
};

/// `rows` queries (packed in t.q) against the kBlock keys of one block, given as tiles; `first`: the queries' first
/// block, of which each sees a key or has a window that begins behind it.
void attend_block(const AttentionTile& t, std::int64_t rows, std::int64_t d, const float* k_t, const float* v,
                  const SeenKeys&, float softcap, bool first);

/// The step between its two products: scores t.s of n queries from r0, `width` keys wide, become weights, and what
/// t.o has summed so far shrinks. For who forms the products without tiles, each element as one chain of multiply-adds
/// over ascending k (gemm_small).
void weigh_scores(const AttentionTile& t, std::int64_t r0, std::int64_t n, std::int64_t width, const SeenKeys&,
                  float softcap, bool first);

}  // namespace hotbunk::kernels
