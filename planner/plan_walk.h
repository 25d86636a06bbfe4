// LiveWalk: live bytes as alloc and free change them in program order, for the closed form. MemoryMeter (trace/meter.h)
// counts the same of a graph; this one allocates nothing and skips the layers that repeat.
#pragma once
#include <algorithm>
#include <cstdint>

#include "planner/plan_form.h"

namespace hotbunk {

class LiveWalk {
 public:
  void enter(PlanPhase p) {
    note();
    at_ = static_cast<std::size_t>(p);
    note();
  }

  /// A buffer of the transient section; `bytes` may be 0 where a layout does without it.
  void up(Category c, std::int64_t bytes) {
    live_.transients += aligned_bytes(bytes);
    hold(c, bytes);
  }
  void down(Category c, std::int64_t bytes) {
    drop(c, bytes);
    live_.transients -= aligned_bytes(bytes);
  }
  /// Buffers of the other sections, any number together.
  void hold(Category c, std::int64_t bytes) {
    live_.by_category[static_cast<std::size_t>(c)] += bytes;
    live_.total += bytes;
    rising_ = true;
  }
  /// What is alive has peaked only where it falls next.
  void drop(Category c, std::int64_t bytes) {
    if (rising_) note();
    const auto i = static_cast<std::size_t>(c);
    space_.category_peaks[i] = std::max(space_.category_peaks[i], live_.by_category[i]);
    live_.by_category[i] -= bytes;
    live_.total -= bytes;
  }

  /// step(i) for all i of [0, n) in order, where steps 1 … n-2 are alike: each changes what is alive by the same
  /// amounts, all of one sign. Those between the first and the last of them are not walked: no peak lies there.
  template <class Step>
  void repeat(std::int64_t n, Step&& step) {
    std::int64_t i = 0;
    const auto one = [&] { step(i++); };
    if (n <= 4) {
      while (i < n) one();
      return;
    }
    one();
    const Live before = live_;
    one();
    if (rising_) note();
    const std::int64_t skipped = live_.total > before.total ? n - 4 : n - 3;  // rising: the last of them is highest
    for (std::size_t c = 0; c < live_.by_category.size(); ++c)
      live_.by_category[c] += skipped * (live_.by_category[c] - before.by_category[c]);
    live_.total += skipped * (live_.total - before.total);
    live_.transients += skipped * (live_.transients - before.transients);
    i += skipped;
    while (i < n) one();
  }

  /// Peaks of all that was walked; mapped bytes are not known here.
  FormSpace finish() {
    note();
    for (std::size_t c = 0; c < live_.by_category.size(); ++c)
      space_.category_peaks[c] = std::max(space_.category_peaks[c], live_.by_category[c]);
    return space_;
  }
  /// Bytes that the transients of a phase need at least: their highest sum, each aligned.
  std::int64_t transients(std::size_t phase) const { return transients_[phase]; }

 private:
  struct Live {
    CategoryBytes by_category{};
    std::int64_t total = 0, transients = 0;
  };

  void note() {
    rising_ = false;
    transients_[at_] = std::max(transients_[at_], live_.transients);
    FormPeak& peak = space_.phases[at_];
    if (live_.total <= peak.bytes) return;
    peak.bytes = live_.total;
    peak.by_category = live_.by_category;
  }

  Live live_;
  FormSpace space_;
  std::array<std::int64_t, num_plan_phases> transients_{};
  std::size_t at_ = 0;
  bool rising_ = false;
};

/// Blocks of the driven phases; each leaves what is alive as it found it (train: after all three blocks).
void walk_train(LiveWalk&, const ShardedShapes&, const Scenario&);
void walk_log_probs(LiveWalk&, const ShardedShapes&, const Scenario&, bool reference);
void walk_rollout(LiveWalk&, const PlanShapes&, const Scenario&);
void walk_exchange(LiveWalk&, const Scenario&);
void walk_export(LiveWalk&, const ShardedShapes&, const Scenario&);
void walk_sync(LiveWalk&, const ShardedShapes&, const Scenario&);

}  // namespace hotbunk
