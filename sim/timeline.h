// What the engine tells the trace: spans, memory events and stays in phases, of the steps that were asked for.
#pragma once
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "graph/boxes.h"
#include "sim/program_index.h"
#include "trace/folds.h"

namespace hotbunk {

struct TimelineOptions {
  std::int32_t first_step = 0, last_step = 2;      // spans and memory events of these steps only; 0: the prologue
  std::int64_t max_spans = std::int64_t{1} << 20;  // then recording stops, so that a long run cannot fill the memory
  std::int64_t max_memory_events = std::int64_t{1} << 20;
};

/// One run of one block on one rank, with its actual sizes.
struct BlockRun {
  Sizes sizes;
  std::int32_t step = 0;
  std::int32_t block = 0;
  std::uint32_t visit = 0;  // index into the rank's phase visits
};

class Timeline {
 public:
  Timeline(const Plan&, const TimelineOptions&);

  const Places& places(Rank r) const { return ranks_[static_cast<std::size_t>(r)].places; }

  /// Returns the number of the visit on this rank.
  std::uint32_t enter(Rank, std::int32_t step, std::int16_t phase);
  /// The rank's host came to this visit at `now_ns`: so long the visit before lasted, though its ops were done earlier.
  void entered(Rank, std::uint32_t visit, std::int64_t now_ns);
  /// The phase is done, after so many blocks: one that only allocates and frees begins no run.
  void leave(Rank, std::int64_t blocks);
  /// A new run of a block of the current phase; its number on this rank.
  std::uint32_t begin_run(Rank, const Sizes&, std::int32_t block);
  /// The sizes of a run that began with ops that have none (map, unmap).
  void set_sizes(Rank r, std::uint32_t run, const Sizes& sizes) {
    ranks_[static_cast<std::size_t>(r)].runs.at(run).sizes = sizes;
  }
  const BlockRun& run(Rank r, std::uint32_t run) const { return ranks_[static_cast<std::size_t>(r)].runs.at(run); }
  /// Index of a memory event whose time is still open, or -1 when this step is not recorded.
  std::int64_t open_memory_event(Rank, const BoundBuffer&, std::int64_t delta_bytes);
  void set_memory_time(Rank r, std::int64_t event, std::int64_t now_ns) {
    ranks_[static_cast<std::size_t>(r)].memory_events[static_cast<std::size_t>(event)].time_ns = now_ns;
  }
  /// An op is done. Ops of no duration leave no span. A rank syncs at the end of each phase, so every op of its earlier
  /// visits is done too: they are closed, and what they needed is let go.
  void finished(Rank, StreamId, const BoundOp&, std::uint32_t run, std::int64_t start_ns, std::int64_t end_ns);

  /// Into names, spans (by rank, start, stream), memory events (by rank, in program order) and phases. A phase of a
  /// rank starts where the one before ended: waiting for a slower rank belongs to the phase that waits.
  void write(Trace&);

 private:
  /// Numbered from the first that ever was; those at the front may be gone.
  template <class T>
  struct Numbered {
    std::deque<T> items;
    std::uint32_t first = 0;  // number of the front
    std::uint32_t end() const { return first + static_cast<std::uint32_t>(items.size()); }
    T& at(std::uint32_t number) { return items[number - first]; }
    const T& at(std::uint32_t number) const { return items[number - first]; }
    void pop() { items.pop_front(), ++first; }
  };
  struct RankLine {
    RankLine(const Plan& plan, Rank rank, KeptSteps kept) : places(places_of(plan, rank)), stays(plan, rank, kept) {}
    Places places;
    Numbered<PhaseSpan> visits;
    Numbered<BlockRun> runs;
    std::vector<MemoryEvent> memory_events;
    StayFold stays;              // of the visits that are over
    std::int64_t before_ns = 0;  // the end of the last of them
  };
  void close_visits(RankLine&, std::uint32_t until);
  /// The index of a name in two parts; the parts are the plan's, which outlives this.
  std::int32_t intern(std::string_view prefix, std::string_view name);
  bool recorded(std::int32_t step) const { return step >= options_.first_step && step <= options_.last_step; }

  const Plan& plan_;
  TimelineOptions options_;
  std::vector<RankLine> ranks_;
  std::vector<Span> spans_;
  std::int64_t num_memory_events_ = 0;
  std::vector<std::string> names_;  // of ops and buffers
  struct HashOfParts {
    std::size_t operator()(const std::pair<const char*, const char*>& p) const {
      return std::hash<const char*>()(p.first) * 31 + std::hash<const char*>()(p.second);
    }
  };
  /// By where the plan has the parts, which is much quicker to look up than what they say.
  std::unordered_map<std::pair<const char*, const char*>, std::int32_t, HashOfParts> index_of_parts_;
  std::unordered_map<std::string, std::int32_t> index_of_name_;
};

}  // namespace hotbunk
