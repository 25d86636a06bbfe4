// Events of the driver, handed out and taken back: a record gets one of its own, so that a later record of the plan's
// event does not move a wait for an earlier one.
#pragma once
#include <memory>
#include <mutex>
#include <vector>

#include "backends/cuda/context.h"

namespace hotbunk::cuda {

/// Goes back to its pool when the last owner lets go. The pool outlives it.
using PooledEvent = std::shared_ptr<std::remove_pointer_t<CUevent>>;

/// Thread-safe.
class EventPool {
 public:
  explicit EventPool(const Context& context) : context_(context) {}
  /// All of them are back.
  ~EventPool();
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  /// RuntimeFailure when the driver makes none. `timed`: for cuEventElapsedTime.
  PooledEvent take(bool timed = false);

 private:
  const Context& context_;
  std::mutex mutex_;
  std::vector<CUevent> free_[2];  // [timed]
};

}  // namespace hotbunk::cuda
