#include "backends/cuda/staging.h"

#include <algorithm>
#include <bit>

#include "base/check.h"

namespace hotbunk::cuda {

Staging::~Staging() {
  for (const Block& b : blocks_) {
    context_.driver().cuEventDestroy(b.copied);
    context_.driver().cuMemFreeHost(b.data);
  }
}

std::byte* Staging::take(std::int64_t bytes) {
  const Driver& d = context_.driver();
  const auto use = [&](std::size_t i) {
    std::rotate(blocks_.begin() + static_cast<std::ptrdiff_t>(i), blocks_.begin() + static_cast<std::ptrdiff_t>(i) + 1,
                blocks_.end());
    blocks_.back().in_use = false;
    return blocks_.back().data;
  };
  std::size_t large = 0, first_large = 0;
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    Block& b = blocks_[i];
    if (b.bytes < bytes) continue;
    if (large++ == 0) first_large = i;
    if (!b.in_use) return use(i);
    const CUresult r = d.cuEventQuery(b.copied);
    if (r == CUDA_SUCCESS) return use(i);
    if (r != CUDA_ERROR_NOT_READY) check(d, r, "cuEventQuery(copied)");
  }
  if (large >= most_blocks) {
    HB_CUDA(d, cuEventSynchronize(blocks_[first_large].copied));
    return use(first_large);
  }
  constexpr std::int64_t least = std::int64_t{64} << 10;
  Block b;
  b.bytes = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(std::max(bytes, least))));
  void* data = nullptr;
  HB_CUDA(d, cuMemHostAlloc(&data, static_cast<std::size_t>(b.bytes), 0));
  b.data = static_cast<std::byte*>(data);
  if (const CUresult r = d.cuEventCreate(&b.copied, CU_EVENT_DISABLE_TIMING); r != CUDA_SUCCESS) {
    d.cuMemFreeHost(data);
    check(d, r, "cuEventCreate(&copied, CU_EVENT_DISABLE_TIMING)");
  }
  blocks_.push_back(b);
  return b.data;
}

void Staging::in_use() {
  HB_CHECK(!blocks_.empty(), "nothing was taken");
  HB_CUDA(context_.driver(), cuEventRecord(blocks_.back().copied, stream_));
  blocks_.back().in_use = true;
}

}  // namespace hotbunk::cuda
