#include "backends/cuda/rank_sums.h"

#include <fmt/format.h>

#include "base/check.h"

namespace hotbunk::cuda {
namespace {

constexpr int sum_threads = 256;

CUdeviceptr device_address(const std::byte* p) { return reinterpret_cast<CUdeviceptr>(p); }

struct RankSources {
  CUdeviceptr rank[most_summed_ranks] = {};
};

}  // namespace

void reduce_ranks(const Launcher& launch, std::byte* to, std::span<const std::byte* const> from, std::int64_t count,
                  DType dtype, ReduceOp op) {
  if (from.size() == 1) return launch.copy(device_address(to), device_address(from[0]), count * size_of(dtype));
  if (from.size() > most_summed_ranks && dtype == DType::bf16 && op == ReduceOp::sum)
    throw RuntimeFailure(
        fmt::format("a sum of bf16 over {} ranks, which is rounded once: {} at most", from.size(), most_summed_ranks));
  const std::string kernel = fmt::format("{}_ranks_{}", op == ReduceOp::sum ? "sum" : "max", kernel_dtype(dtype));
  std::size_t done = 0;
  while (done < from.size()) {
    RankSources sources;
    int n = 0;
    if (done > 0) sources.rank[n++] = device_address(to);  // what was summed before comes first
    while (n < most_summed_ranks && done < from.size()) sources.rank[n++] = device_address(from[done++]);
    launch(kernel, {walking_blocks_of(count, sum_threads)}, sum_threads, sources, n, device_address(to), count);
  }
}

}  // namespace hotbunk::cuda
