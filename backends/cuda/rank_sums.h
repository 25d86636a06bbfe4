// Sums over ranks in rank order, whatever transport brought the parts: the same bits as on the CPU.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "backends/cuda/launch.h"
#include "runtime/communicator.h"

namespace hotbunk::cuda {

/// Addresses that one kernel takes (kernels/elementwise.cu). More ranks take more kernels; bf16, which is rounded once
/// at the end, has no more.
inline constexpr int most_summed_ranks = 32;

/// to[count] = the sum (or maximum) over ranks of from[rank][count], in rank order; `to` may be one of them where they
/// are at most most_summed_ranks, else the first. RuntimeFailure for bf16 of more.
void reduce_ranks(const Launcher&, std::byte* to, std::span<const std::byte* const> from, std::int64_t count, DType,
                  ReduceOp);

}  // namespace hotbunk::cuda
