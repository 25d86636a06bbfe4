// When a buffer may be filled with NaN: an alloc is no op of a plan's order, so nothing there keeps the fill behind the
// last reader of the bytes on another stream, nor before their first writer.
#pragma once
#include <functional>
#include <vector>

#include "runtime/access_order.h"
#include "runtime/stream_thread.h"

namespace hotbunk {

/// Treats the fill as one more access of its range on the stream of the alloc, and orders it by events of its own: they
/// are no part of what AccessOrder knows, so a race of the plan stays one. All calls come from the device's calling
/// thread, in program order; every wait is for what was enqueued before, so none of them can block for ever.
class PoisonOrder {
 public:
  using StreamOf = std::function<StreamThread&(StreamId)>;
  explicit PoisonOrder(StreamOf stream) : stream_(std::move(stream)) {}

  /// Enqueues `fill` on the stream, behind everything that touched the buffer's bytes.
  void poison(StreamId, const BoundBuffer&, std::function<void()> fill);
  /// Before the op is enqueued: it starts behind the fills of what it touches.
  void touch(const BoundOp&, const Sizes&);
  /// Every stream has ended.
  void join();

 private:
  struct Fill {
    std::int32_t index = -1;  // sequence number of the access
    StreamEvent done;
  };
  const StreamOf stream_;
  ConflictMap accesses_;
  std::int32_t sequence_ = -1;
  std::vector<Fill> fills_;  // since the last join, ascending
};

}  // namespace hotbunk
