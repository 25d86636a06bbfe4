#include "backends/cuda/event_pool.h"

namespace hotbunk::cuda {

EventPool::~EventPool() {
  for (const auto& events : free_)
    for (const CUevent e : events) context_.driver().cuEventDestroy(e);
}

PooledEvent EventPool::take(bool timed) {
  auto& free = free_[timed ? 1 : 0];
  CUevent e = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (!free.empty()) e = free.back(), free.pop_back();
  }
  if (e == nullptr) HB_CUDA(context_.driver(), cuEventCreate(&e, timed ? CU_EVENT_DEFAULT : CU_EVENT_DISABLE_TIMING));
  return {e, [this, &free](CUevent back) {
            const std::lock_guard lock(mutex_);
            free.push_back(back);
          }};
}

}  // namespace hotbunk::cuda
