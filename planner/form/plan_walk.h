// What walks the plan's alloc and free in program order without a plan: sizes only, written once (plan_train_walk.cc,
// plan_rollout_walk.cc) and walked in two ways.
//
//   LiveWalk   counts live bytes as MemoryMeter (trace/meter.h) does of a graph; skips layers that repeat; allocates
//              nothing
//
//   ArenaWalk  places every buffer as place_transients (graph/passes.h) does, layer by layer: how much must be mapped.
//   It
//              is told which stream allocates and frees, and where one waits for another
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "graph/ordered_ranges.h"
#include "planner/form/plan_form.h"

namespace hotbunk {

/// A transient buffer that is alive.
struct Held {
  Category category{};
  std::int64_t bytes = 0;  // may be 0, where a layout does without it
  std::int64_t at = 0;     // ArenaWalk only
};

class LiveWalk {
 public:
  /// One T for each layer; all layers' are alike.
  template <class T>
  class PerLayer {
   public:
    explicit PerLayer(std::int64_t /*layers*/) {}
    T& operator[](std::int64_t /*layer*/) { return one_; }

   private:
    T one_{};
  };
  /// Live bytes know no streams.
  struct Mark {};
  void begin_block() {}
  void on(StreamId) {}
  Mark mark() { return {}; }
  void wait(Mark) {}
  /// How many times in a row the same allocs and frees are worth walking.
  static constexpr bool skips = true;

  void enter(PlanPhase p) {
    note();
    at_ = static_cast<std::size_t>(p);
    note();
  }

  Held up(Category c, std::int64_t bytes) {
    live_.transients += aligned_bytes(bytes);
    hold(c, bytes);
    return {c, bytes, 0};
  }
  void down(const Held& b) {
    drop(b.category, b.bytes);
    live_.transients -= aligned_bytes(b.bytes);
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
    if (n > 4) {
      step(i++);
      const Live before = live_;
      step(i++);
      if (rising_) note();
      i += skip(before, n);
    }
    for (; i < n; ++i) step(i);
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

  /// Steps to leave out of n after the second, which changed `before`. Where bytes rise, the last of them is highest.
  std::int64_t skip(const Live& before, std::int64_t n) {
    const std::int64_t skipped = live_.total > before.total ? n - 4 : n - 3;
    for (std::size_t c = 0; c < live_.by_category.size(); ++c)
      live_.by_category[c] += skipped * (live_.by_category[c] - before.by_category[c]);
    live_.total += skipped * (live_.total - before.total);
    live_.transients += skipped * (live_.transients - before.transients);
    return skipped;
  }

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

class ArenaWalk {
 public:
  template <class T>
  using PerLayer = std::vector<T>;
  static constexpr bool skips = false;
  /// What a stream has done and knows of the others; counts the marks of each.
  using Mark = Clock;

  ArenaWalk() { begin_block(); }

  void enter(PlanPhase p) { phase_ = static_cast<std::size_t>(p), begin_block(); }
  /// All streams meet.
  void begin_block() {
    ranges_.settle();
    known_.fill(before_all), done_.fill(0);
    stream_ = at(StreamId::compute);
  }
  /// The stream of what follows.
  void on(StreamId s) { stream_ = at(s); }
  /// Behind the op whose buffers were the last to be freed.
  Mark mark() {
    Mark out = known_[stream_];
    out[stream_] = done_[stream_]++;
    return out;
  }
  /// In front of the op whose buffers are the next to be allocated.
  void wait(const Mark& m) { merge(known_[stream_], m); }

  Held up(Category c, std::int64_t bytes) {
    Held out{c, bytes, 0};
    if (bytes > 0) {
      Clock known = known_[stream_];
      known[stream_] = done_[stream_];
      out.at = ranges_.take(aligned_bytes(bytes), known);
    }
    transients_[phase_] = std::max(transients_[phase_], out.at + bytes);
    return out;
  }
  void down(const Held& b) {
    if (b.bytes == 0) return;
    Clock done = before_all;
    done[stream_] = done_[stream_];
    ranges_.give(b.at, aligned_bytes(b.bytes), done);
  }
  template <class Step>
  void repeat(std::int64_t n, Step&& step) {
    for (std::int64_t i = 0; i < n; ++i) step(i);
  }
  std::int64_t transients(std::size_t phase) const { return transients_[phase]; }

 private:
  OrderedRanges ranges_;
  std::array<Clock, num_streams> known_{};
  Clock done_{};  // [stream]: its marks so far
  std::array<std::int64_t, num_plan_phases> transients_{};
  std::size_t phase_ = 0, stream_ = 0;
};

// Blocks of the phases that have transients, for both walks; each leaves what is alive as it found it (train: after all
// three blocks).
template <class Walk>
void walk_train(Walk&, const ShardedShapes&, const Scenario&);
template <class Walk>
void walk_log_probs(Walk&, const ShardedShapes&, const Scenario&, bool reference);
template <class Walk>
void walk_export(Walk&, const ShardedShapes&, const Scenario&);
template <class Walk>
void walk_sync(Walk&, const ShardedShapes&, const Scenario&, bool from_host);
template <class Walk>
void walk_rollout(Walk&, const PlanShapes&, const Scenario&);
template <class Walk>
void walk_exchange(Walk&, const Scenario&);

/// The phase's transients, whichever phase it is.
template <class Walk>
void walk_phase(Walk& w, const JobPhase& p, const ShardedShapes& sharded, const Scenario& s) {
  switch (p.phase) {
    case PlanPhase::sync:
      return walk_sync(w, sharded, s, p.from_host);
    case PlanPhase::rollout:
      return walk_rollout(w, sharded.shapes, s);
    case PlanPhase::exchange:
      return walk_exchange(w, s);
    case PlanPhase::reference:
    case PlanPhase::old_logprobs:
      return walk_log_probs(w, sharded, s, p.phase == PlanPhase::reference);
    case PlanPhase::train:
      return walk_train(w, sharded, s);
    case PlanPhase::checkpoint:
    case PlanPhase::export_:
      return walk_export(w, sharded, s);
    default:
      return;
  }
}

/// The engine of the scenario's rollout layout; internal fault when the heads do not allow it.
const EngineSlices& engine_of(const PlanShapes&, const Scenario&);

}  // namespace hotbunk
