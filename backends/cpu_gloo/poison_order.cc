#include "backends/cpu_gloo/poison_order.h"

#include <algorithm>

namespace hotbunk {

void PoisonOrder::poison(StreamId stream, const BoundBuffer& b, std::function<void()> fill) {
  std::array<bool, max_streams> behind{};
  accesses_.touch({b.section(), b.offset, b.offset + b.bytes(), true}, stream, ++sequence_,
                  [&](StreamId other, std::int32_t) { behind[static_cast<std::size_t>(other)] = other != stream; });
  for (std::size_t s = 0; s < behind.size(); ++s) {
    if (!behind[s]) continue;
    const StreamEvent so_far;
    stream_(static_cast<StreamId>(s)).record(so_far);
    stream_(stream).wait(so_far);
  }
  stream_(stream).enqueue(std::move(fill));
  fills_.push_back({sequence_, {}});
  stream_(stream).record(fills_.back().done);
}

void PoisonOrder::touch(const BoundOp& op, const Sizes& sizes) {
  ++sequence_;
  each_actual_access(op, sizes, [&](const Access& a) {
    accesses_.touch(a, op->stream, sequence_, [&](StreamId other, std::int32_t earlier) {
      if (other == op->stream) return;
      const auto fill = std::ranges::lower_bound(fills_, earlier, {}, &Fill::index);
      if (fill != fills_.end() && fill->index == earlier) stream_(op->stream).wait(fill->done);
    });
  });
}

void PoisonOrder::join() {
  accesses_ = {};
  sequence_ = -1;
  fills_.clear();
}

}  // namespace hotbunk
