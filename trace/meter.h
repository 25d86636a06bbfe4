// Counts live and mapped bytes of one rank as the plan says they change: for the simulator and for what is known
// without running. A run does not use it: its numbers are the arenas' own (P1), so a mistake here shows in compare.
#pragma once
#include <cstdint>

#include "trace/trace.h"

namespace hotbunk {

/// How live bytes change over a stretch of work whose order is fixed, counted from what is live before it.
struct LiveProfile {
  struct Side {
    CategoryBytes net{};             // behind it
    CategoryBytes at_peak{};         // when the total is highest, the first time
    CategoryBytes category_peaks{};  // of each by itself; >= 0
    std::int64_t peak_bytes = 0;     // the total then; 0: never above what was before
    bool changes() const { return peak_bytes > 0 || net != CategoryBytes{}; }
    friend bool operator==(const Side&, const Side&) = default;
  };
  Side device, host;
  Side& side(Space s) { return s == Space::device ? device : host; }
  const Side& side(Space s) const { return s == Space::device ? device : host; }
  /// In order.
  void add(Space, Category, std::int64_t delta_bytes);
  friend bool operator==(const LiveProfile&, const LiveProfile&) = default;
};

class MemoryMeter {
 public:
  /// What follows belongs to this step and phase; a phase's peak starts from what is live when it is entered.
  void enter(std::int32_t step, std::int16_t phase);
  void add_live(Space, Category, std::int64_t delta_bytes);
  /// All of a stretch at once.
  void add_live(const LiveProfile&);
  void add_mapped(Space, std::int64_t delta_bytes);
  std::int64_t live(Space s) const { return side(s).live_total; }
  std::int64_t mapped(Space s) const { return side(s).mapped; }
  RankMemory result() const;

 private:
  struct Side {
    SpaceMemory memory;
    CategoryBytes live{};
    std::int64_t live_total = 0, mapped = 0;
    SpaceMemory::PhasePeak* phase = nullptr;
  };
  Side& side(Space s) { return s == Space::device ? device_ : host_; }
  const Side& side(Space s) const { return s == Space::device ? device_ : host_; }
  void note_peak(Side&);

  Side device_, host_;
  std::int32_t step_ = 0;
  std::int16_t phase_ = -1;
};

}  // namespace hotbunk
