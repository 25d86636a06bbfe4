// What an op must come behind for its own sake: whoever wrote what it reads, or read and wrote what it writes, of the
// same buffers; and whoever has the slot that it needs (plan.h: SlotLimit). Never because of an address: two buffers of
// the transient section are strangers wherever they lie.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "graph/clock.h"
#include "graph/conflicts.h"

namespace hotbunk {

/// Of one block: its borders are joined, so nothing before it is left to wait for.
class TrueOrder {
 public:
  /// Accesses name buffers below `num_buffers`; the limits outlive it.
  TrueOrder(std::size_t num_buffers, const std::vector<SlotLimit>& limits)
      : limits_(limits), conflicts_(num_buffers), places_(num_buffers) {
    for (std::size_t l = 0; l < limits.size(); ++l) {
      const SlotLimit& limit = limits[l];
      for (std::size_t t = 0; t < limit.turns.size(); ++t)
        for (BufferId id : limit.turns[t])
          places_[static_cast<std::size_t>(id)] = {static_cast<std::int32_t>(l), static_cast<std::int32_t>(t)};
      uses_.emplace_back(limit.turns.size(), before_all);
    }
  }

  /// Another block begins.
  void forget() {
    conflicts_.forget();
    for (std::vector<Clock>& turns : uses_) std::ranges::fill(turns, before_all);
  }

  /// Op `index` comes next on `stream`; accesses(visit) visits what it touches. Calls by_bytes(stream, op index) for
  /// each op that it shares bytes with and must follow, and by_slot(stream, op index, limit) for the last uses of the
  /// turn that has to be over first.
  template <class Accesses, class ByBytes, class BySlot>
  void follow(Accesses&& accesses, StreamId stream, std::int32_t index, ByBytes&& by_bytes, BySlot&& by_slot) {
    accesses([&](const Access& a) {
      conflicts_.touch(a, stream, index, [&](StreamId s, std::int32_t earlier) {
        if (earlier != index) by_bytes(s, earlier);
      });
      if (a.buffer < 0) return;
      const Place& place = places_[static_cast<std::size_t>(a.buffer)];
      if (place.limit < 0) return;
      const auto l = static_cast<std::size_t>(place.limit);
      const SlotLimit& limit = limits_[l];
      uses_[l][static_cast<std::size_t>(place.turn)][at(stream)] = index;
      if (place.turn < limit.slots) return;
      const Clock& former = uses_[l][static_cast<std::size_t>(place.turn - limit.slots)];
      for (std::size_t s = 0; s < former.size(); ++s)
        if (former[s] >= 0) by_slot(static_cast<StreamId>(s), former[s], limit);
    });
  }

  /// Whether the buffer has a turn of a limit.
  bool takes_turn(BufferId id) const { return places_[static_cast<std::size_t>(id)].limit >= 0; }

  /// The limit of which the buffer's slot has gone to a later turn already; nullptr: none.
  const SlotLimit* lost_slot(BufferId id) const {
    const Place& place = places_[static_cast<std::size_t>(id)];
    if (place.limit < 0) return nullptr;
    const auto l = static_cast<std::size_t>(place.limit);
    const SlotLimit& limit = limits_[l];
    const std::size_t next = static_cast<std::size_t>(place.turn) + static_cast<std::size_t>(limit.slots);
    return next < limit.turns.size() && uses_[l][next] != before_all ? &limit : nullptr;
  }

 private:
  struct Place {
    std::int32_t limit = -1, turn = -1;
  };

  const std::vector<SlotLimit>& limits_;
  ConflictMap conflicts_;
  std::vector<Place> places_;             // [buffer]
  std::vector<std::vector<Clock>> uses_;  // [limit][turn]: its last op per stream
};

}  // namespace hotbunk
