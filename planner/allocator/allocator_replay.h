// What `torch.cuda.memory_reserved` would show: one optimizer step of a layout, tensor by tensor in program order,
// replayed through PyTorch's caching allocator.
#pragma once
#include "planner/allocator/caching_allocator.h"
#include "planner/train/train_model.h"

namespace hotbunk {

struct ReservedMemory {
  std::int64_t allocated = 0, reserved = 0;  // peaks, as max_memory_allocated and max_memory_reserved
  /// Share of what is reserved at the peak that no tensor uses.
  double unused() const {
    return reserved > 0 ? 1.0 - static_cast<double>(allocated) / static_cast<double>(reserved) : 0.0;
  }
};

/// Stage `stage` of the layout: states first, then micro-batches in 1F1B order (warm-up, steady state, drain), the
/// layers of each forward and backward. Sizes are those of the closed form; nothing for a layout that does not divide.
ReservedMemory replay_step(const TrainModel&, const TrainPoint&, std::int64_t stage);
/// The most of any stage, of either.
ReservedMemory replay_step(const TrainModel&, const TrainPoint&);

}  // namespace hotbunk
