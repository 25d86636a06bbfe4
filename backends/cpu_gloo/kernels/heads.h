// The packed projection of attention: one row = [q heads | k heads | v heads], (a + 2k)·d elements.
#pragma once
#include <cstdint>

namespace hotbunk::kernels {

struct HeadShape {
  std::int64_t num_heads = 0;     // a: query heads of this rank; a multiple of num_kv_heads
  std::int64_t num_kv_heads = 0;  // k
  std::int64_t head_dim = 0;      // d
  constexpr std::int64_t width() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
  constexpr std::int64_t k_offset() const { return num_heads * head_dim; }
  constexpr std::int64_t v_offset() const { return (num_heads + num_kv_heads) * head_dim; }
};

}  // namespace hotbunk::kernels
