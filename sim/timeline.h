// What the engine tells the trace: spans, memory events and stays in phases, of the steps that were asked for.
#pragma once
#include <array>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "exec/driver.h"
#include "graph/boxes.h"
#include "sim/program_index.h"
#include "sim/rank_classes.h"
#include "trace/folds.h"
#include "trace/meter.h"

namespace hotbunk {

/// How closely the runs of a rank are recorded. Nothing is left out: what is not kept one by one is kept together.
enum class Detail : std::uint8_t {
  nothing,  // no spans and no memory events: the step was not asked for
  stay,     // a span for all further runs of the stay, by stream; a block's memory where it runs for the first time
  run,      // a span for the run, by stream; the memory of the run as one step
  items     // a span for each item; the memory of each call, or of each buffer where it is played op by op
};

struct TimelineOptions {
  std::int32_t first_step = 0, last_step = 2;  // spans and memory events of these steps only; 0: the prologue
  /// Spans up to which all is kept one by one; what comes then is kept with Detail::stay.
  std::int64_t max_spans = std::int64_t{1} << 20;
  /// About how many spans all ranks together have room for; 0: max_spans, and nobody has a share. A rank's stays in
  /// driven phases divide what a step has. One that has used up its share goes on with Detail::run and, after twice the
  /// share, with Detail::stay; several runs that are played together are Detail::run from the start. Of very many ranks
  /// the first ones have a share, some more are Detail::stay, and of the rest there is no more than when they came and
  /// went.
  std::int64_t room = 0;
  std::vector<Rank> in_full{};  // ranks of which everything is kept one by one
};

/// One run of one block on one rank, with its actual sizes; of several together (Args::times) those of the first.
struct BlockRun {
  Sizes sizes;
  std::int64_t times = 1, pairs_per_time = 0;
  std::int32_t step = 0;
  std::int32_t block = 0;
  std::uint32_t visit = 0;  // index into the rank's phase visits
  Detail detail = Detail::nothing;
};

class Timeline {
 public:
  /// Of ranks that are all alike only the first is played.
  Timeline(const Plan&, const RankClasses&, const TimelineOptions&);

  const Places& places(Rank r) const { return line(r).places; }

  /// Returns the number of the visit on this rank.
  std::uint32_t enter(Rank, std::int32_t step, std::int16_t phase);
  /// The rank's host came to this visit at `now_ns`: so long the visit before lasted, though its ops were done earlier.
  void entered(Rank, std::uint32_t visit, std::int64_t now_ns);
  /// The phase is done, after so many blocks: one that only allocates and frees begins no run.
  void leave(Rank, std::int64_t blocks);
  /// A new run of a block of the current phase, of so many ops or items; its number on this rank.
  std::uint32_t begin_run(Rank, const Args&, std::int32_t block, std::int64_t num_items);
  /// The sizes of a run that began with ops that have none (map, unmap).
  void set_sizes(Rank r, std::uint32_t run, const Sizes& sizes) { line(r).runs.at(run).sizes = sizes; }
  const BlockRun& run(Rank r, std::uint32_t run) const { return line(r).runs.at(run); }

  /// Memory events of a rank whose time is still open: [first, first + count).
  struct OpenEvents {
    std::int64_t first = 0, count = 0;
  };
  /// A buffer's; none where the current step is not recorded.
  OpenEvents open_memory(Rank, const BoundBuffer&, std::int64_t delta_bytes);
  /// A change of many buffers at once, under the name of a call or a block.
  OpenEvents open_memory(Rank, std::string_view name, const CategoryBytes& device, const CategoryBytes& host);
  void set_memory_time(Rank r, std::int64_t first, std::int64_t count, std::int64_t now_ns) {
    for (std::int64_t i = first; i < first + count; ++i)
      line(r).memory_events[static_cast<std::size_t>(i)].time_ns = now_ns;
  }
  /// Whether a block's memory is to be drawn in a run of Detail::stay: the first time in the stay.
  bool draws_memory(Rank, std::int32_t block);

  /// An op or item is done. What takes no time leaves no span. A rank syncs at the end of each phase, so every op of
  /// its earlier visits is done too: they are closed, and what they needed is let go.
  void finished(Rank, StreamId, const ProgramIndex&, const OpInfo&, std::uint32_t run, std::int64_t start_ns,
                std::int64_t end_ns);
  /// The rank's host has launched all of a run.
  void launched(Rank r, std::uint32_t run, std::int64_t now_ns) {
    PhaseSpan& visit = line(r).visits.at(line(r).runs.at(run).visit);
    visit.end_ns = std::max(visit.end_ns, now_ns);
  }
  /// The rank had nothing to do for so long but to wait for others, in the visit of this run.
  void waited(Rank, std::uint32_t run, std::int64_t duration_ns);

  /// Into names, spans (by rank, start, stream), memory events (by rank, in program order) and phases. A phase of a
  /// rank starts where the one before ended: waiting for a slower rank belongs to the phase that waits.
  void write(Trace&);

 private:
  static constexpr std::int64_t unrecorded = -1;  // RankLine::of_step
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
  /// A span that may still grow, by stream.
  struct Growing {
    Detail detail = Detail::nothing;
    std::uint32_t of = 0;  // the run or the visit
    std::size_t span = 0;
  };
  /// What a segment moves and computes with these sizes.
  struct Figures {
    Sizes sizes{-1, -1, -1};
    std::int64_t bytes = 0;
    double flops = 0.0;
  };
  struct RankLine {
    RankLine(const Plan& plan, Rank r, KeptSteps kept, std::int64_t spans)
        : rank(r), places(places_of(plan, r)), stays(plan, r, kept), of_step(spans) {}
    Rank rank;
    Places places;
    Numbered<PhaseSpan> visits;
    Numbered<BlockRun> runs;
    std::vector<MemoryEvent> memory_events;
    StayFold stays;              // of the visits that are over
    std::int64_t before_ns = 0;  // the end of the last of them
    std::array<Growing, max_streams> growing;
    std::vector<Figures> figures;  // by segment
    std::vector<bool> drawn;       // by block of the current visit: draws_memory
    std::int64_t of_step;          // spans that a step has room for; unrecorded: none, and no memory events
    std::int64_t left = 0;         // of them, for the current visit and those behind it
    std::int64_t share = 0;        // of the current visit
    std::int64_t num_spans = 0;    // of the current visit, as far as it has been enqueued
    std::int32_t step = -1;        // of the current visit
  };
  RankLine& line(Rank r) { return lines_[static_cast<std::size_t>(line_of_rank_[static_cast<std::size_t>(r)])]; }
  const RankLine& line(Rank r) const {
    return lines_[static_cast<std::size_t>(line_of_rank_[static_cast<std::size_t>(r)])];
  }
  void close_visits(RankLine&, std::uint32_t until);
  Figures figures_of(RankLine&, const ProgramIndex&, const OpInfo&, const Sizes&) const;
  std::int32_t name_of_item(const OpInfo&);
  std::int32_t name_of_run(const BlockRun&, const OpInfo&, const PhaseSpan& visit);
  void add_together(RankLine&, const Span&, const BlockRun&, std::uint32_t run_index, const OpInfo&,
                    const PhaseSpan& visit);
  /// The index of a name in two parts; the parts are the plan's, which outlives this.
  std::int32_t intern(std::string_view prefix, std::string_view name);
  std::int32_t intern(const std::string& name);
  bool recorded(const RankLine& mine, std::int32_t step) const {
    return mine.of_step != unrecorded && step >= options_.first_step && step <= options_.last_step;
  }

  const Plan& plan_;
  TimelineOptions options_;
  std::vector<RankLine> lines_;
  std::vector<std::int32_t> line_of_rank_;   // of ranks that are played
  std::vector<std::int32_t> driven_behind_;  // by phase: how many driven phases there are from it on
  std::vector<Span> spans_;
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
