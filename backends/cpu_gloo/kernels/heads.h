// The packed projection of attention: one row = [q heads | k heads | v heads], (a + 2k)·d elements, and with values of
// another width dv than queries and keys (a + k)·d + k·dv; and its parts, of which each has some of the heads.
#pragma once
#include <algorithm>
#include <cstdint>

#include "backends/cpu_gloo/kernels/context.h"

namespace hotbunk::kernels {

struct HeadShape {
  std::int64_t num_heads = 0;     // a: query heads of this rank; a multiple of num_kv_heads
  std::int64_t num_kv_heads = 0;  // k
  std::int64_t head_dim = 0;      // d
  std::int64_t value_dim = 0;     // dv; 0: d
  constexpr std::int64_t dv() const { return value_dim > 0 ? value_dim : head_dim; }
  constexpr std::int64_t width() const { return v_offset() + num_kv_heads * dv(); }
  constexpr std::int64_t k_offset() const { return num_heads * head_dim; }
  constexpr std::int64_t v_offset() const { return (num_heads + num_kv_heads) * head_dim; }
  /// One of so many parts: num_heads is a multiple of them, num_kv_heads a multiple or a divisor, or 0.
  constexpr HeadShape part(std::int64_t parts) const {
    return {num_heads / parts, num_kv_heads > 0 ? std::max<std::int64_t>(1, num_kv_heads / parts) : 0, head_dim,
            value_dim};
  }
};

/// What becomes of a query's products with keys before the softmax: times `scale`, then s → cap · tanh(s/cap) with a
/// `softcap` > 0, of the keys in the `window` alone: so many, the query's own token the last; 0: all before it.
struct Scores {
  float scale = 1.0f;
  float softcap = 0.0f;
  std::int64_t window = 0;
  constexpr explicit(false) Scores(float scale_, float softcap_ = 0.0f, std::int64_t window_ = 0)
      : scale(scale_), softcap(softcap_), window(window_) {}
  constexpr bool is_scaled_alone() const { return softcap == 0.0f && window == 0; }
  /// The first position that the query at `position` sees.
  constexpr std::int64_t first_seen(std::int64_t position) const {
    return window > 0 ? std::max<std::int64_t>(0, position - window + 1) : 0;
  }
};

/// y[r, t] = of x[t] the r-th part of the query, key and value heads. Where there are fewer KV heads than parts,
/// neighbours have the same one. x: [T, shape.width()]; y: [parts, T, shape.part(parts).width()], of x's dtype.
void split_heads(KernelContext&, ConstMatrix x, HeadShape, std::int64_t parts, Matrix y, std::int64_t T);
/// Back: x[t] of its parts y[r, t]. A KV head that several parts have is their sum, in fp32 and in their order.
void merge_heads(KernelContext&, ConstMatrix y, HeadShape, std::int64_t parts, Matrix x, std::int64_t T);

/// kv[t] = the key and value heads of x[t]. x: [T, shape.width()]; kv: [T, k·(d + dv)], of x's dtype.
void take_kv(KernelContext&, ConstMatrix x, HeadShape, Matrix kv, std::int64_t T);
/// x[t] of its query heads q[t] and its key and value heads kv[t], to which those of `more` are added where its data is
/// there. q: [T, a·d], kv and more: [T, k·(d + dv)], fp32; x: [T, shape.width()].
void merge_qkv(KernelContext&, ConstMatrix q, ConstMatrix kv, ConstMatrix more, HeadShape, Matrix x, std::int64_t T);

}  // namespace hotbunk::kernels
