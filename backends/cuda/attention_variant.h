// Which of attention's two kernels an op takes.
#pragma once
#include <algorithm>
#include <cstdint>

#include "base/dtype.h"

namespace hotbunk::cuda {

inline constexpr int most_tiled = 128;  // numbers of a head

/// In tiles on tensor cores, of keys of d numbers and values of v; else a warp for each row. By the dtype and the heads
/// alone, which training and rollout have in common: both take the same variant, and their log-probabilities stay equal
/// to the bit (P5).
constexpr bool attends_in_tiles(DType dtype, std::int64_t d, std::int64_t v) {
  return dtype == DType::bf16 && (d | v) % 8 == 0 && std::max(d, v) <= most_tiled;
}

}  // namespace hotbunk::cuda
