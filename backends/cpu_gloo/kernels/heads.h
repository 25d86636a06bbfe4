// The packed projection of attention: one row = [q heads | k heads | v heads], (a + 2k)·d elements; and its parts, of
// which each has some of the heads.
#pragma once
#include <algorithm>
#include <cstdint>

#include "backends/cpu_gloo/kernels/context.h"

namespace hotbunk::kernels {

struct HeadShape {
  std::int64_t num_heads = 0;     // a: query heads of this rank; a multiple of num_kv_heads
  std::int64_t num_kv_heads = 0;  // k
  std::int64_t head_dim = 0;      // d
  constexpr std::int64_t width() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
  constexpr std::int64_t k_offset() const { return num_heads * head_dim; }
  constexpr std::int64_t v_offset() const { return (num_heads + num_kv_heads) * head_dim; }
  /// One of so many parts: num_heads is a multiple of them, num_kv_heads a multiple or a divisor, or 0.
  constexpr HeadShape part(std::int64_t parts) const {
    return {num_heads / parts, num_kv_heads > 0 ? std::max<std::int64_t>(1, num_kv_heads / parts) : 0, head_dim};
  }
};

/// y[r, t] = of x[t] the r-th part of the query, key and value heads. Where there are fewer KV heads than parts,
/// neighbours have the same one. x: [T, shape.width()]; y: [parts, T, shape.part(parts).width()], of x's dtype.
void split_heads(KernelContext&, ConstMatrix x, HeadShape, std::int64_t parts, Matrix y, std::int64_t T);
/// Back: x[t] of its parts y[r, t]. A KV head that several parts have is their sum, in fp32 and in their order.
void merge_heads(KernelContext&, ConstMatrix y, HeadShape, std::int64_t parts, Matrix x, std::int64_t T);

}  // namespace hotbunk::kernels
