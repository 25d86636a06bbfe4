// The sum (or maximum) of W buffers in rank order: the one place where a collective's arithmetic happens.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "runtime/communicator.h"

namespace hotbunk {

/// dst[i] = op over r = 0 … W-1 of sources[r][i], from left to right; fp32 and bf16 in fp32, rounded once; i32 wraps.
/// dst may be one of the sources. dtype: f32, bf16, i32 (InternalError otherwise). Sources are aligned to their
/// element.
void reduce_in_rank_order(std::byte* dst, std::span<const std::byte* const> sources, std::int64_t count, DType,
                          ReduceOp);

}  // namespace hotbunk
