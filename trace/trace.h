// Trace: what one execution of a plan did, simulated or measured, in one shape (DESIGN: nouns).
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "graph/plan.h"
#include "trace/durations.h"

namespace hotbunk {

// Rows go from rank to rank as bytes (trace/merge.h): they hold numbers, no pointers.

/// One op on one stream of one rank. Times in nanoseconds since the execution's start.
struct Span {
  Rank rank = 0;
  StreamId stream = lead_stream;
  OpKind kind = OpKind::alloc;
  std::int16_t phase = 0;  // index into Plan::phases
  std::int32_t step = 0;   // iteration, from 1; 0 = prologue
  std::int32_t name = 0;   // index into Trace::names
  std::int64_t start_ns = 0, end_ns = 0;
  std::int64_t bytes = 0;  // payload for communication, else read + written
  double flops = 0.0;
};

/// A change of live bytes. A trace has them in program order of their rank, each with the time when its stream came to
/// it (trace/memory_in_time.h).
struct MemoryEvent {
  Rank rank = 0;
  Space space = Space::device;
  Category category = Category::params;
  std::int16_t phase = 0;
  std::int32_t step = 0;
  std::int32_t name = 0;  // the buffer's
  std::int64_t time_ns = 0;
  std::int64_t delta_bytes = 0;
};

using CategoryBytes = std::array<std::int64_t, num_categories>;

/// Peaks of one rank in one space. `at_peak` is the composition when the live total was highest (first time it was).
struct SpaceMemory {
  std::int64_t peak_bytes = 0;         // live bytes asked for
  std::int64_t mapped_peak_bytes = 0;  // mapped chunks
  std::int32_t peak_step = 0;
  std::int16_t peak_phase = -1;
  CategoryBytes at_peak{}, category_peaks{};
  struct PhasePeak {
    std::int64_t peak_bytes = 0, mapped_peak_bytes = 0;
    CategoryBytes by_category{};  // composition at the phase's peak
    friend bool operator==(const PhasePeak&, const PhasePeak&) = default;
  };
  std::map<std::int16_t, PhasePeak> phase_peaks;  // by phase index, over all steps
  std::int64_t end_live_bytes = 0, end_mapped_bytes = 0;
  friend bool operator==(const SpaceMemory&, const SpaceMemory&) = default;
};

struct RankMemory {
  SpaceMemory device, host;
  friend bool operator==(const RankMemory&, const RankMemory&) = default;
};

/// One line of the traffic table, per rank: key (step, phase, group family, op kind).
struct TrafficKey {
  std::int32_t step = 0;
  std::int16_t phase = 0;
  std::int16_t group = 0;  // family
  OpKind op = OpKind::all_gather;
  friend auto operator<=>(const TrafficKey&, const TrafficKey&) = default;
};
/// Definitions of payload, padding and wire: DESIGN, contracts.
struct TrafficCount {
  std::int64_t calls = 0, payload_bytes = 0, padding_bytes = 0, wire_bytes = 0;
  friend bool operator==(const TrafficCount&, const TrafficCount&) = default;
};
using RankTraffic = std::map<TrafficKey, TrafficCount>;

/// One rank's stay in one phase, from entering it to leaving it, waiting included: the one meaning of a phase's time.
/// Where one number stands for several ranks it is their mean.
struct PhaseSpan {
  Rank rank = 0;
  std::int32_t step = 0;
  std::int16_t phase = 0;
  std::int64_t start_ns = 0, end_ns = 0;
  std::int64_t blocks = 0;  // blocks run
  /// Of this time, how long it had nothing to do but to wait for other ranks; -1: not known.
  std::int64_t waiting_ns = -1;
};

/// One rank's stays in one phase, all steps together.
struct PhaseTotal {
  static constexpr std::int16_t iteration = -1;  // from entering an iteration's first phase to leaving its last
  Rank rank = 0;
  std::int16_t phase = 0;
  std::int64_t blocks = 0;       // run
  std::int64_t waiting_ns = -1;  // as PhaseSpan's, all together; of the iteration: not known
  Durations stays;
};

/// Named figures of one step, from the Driver: "reward", "actor/kl_loss", ….
struct StepMetrics {
  std::int32_t step = 0;
  std::map<std::string, double> values;
};

/// What one link of the cluster carried (sim/cluster_links.h), over the whole simulation.
struct LinkTraffic {
  std::string name;                 // "node 0 gpu 3 nvlink out"
  std::string kind;                 // "nvlink out"
  std::int64_t links = 1;           // how many carry the same, itself among them
  double capacity_bytes_per_s = 0;  // one way
  double bytes = 0;                 // over this link
  std::int64_t busy_ns = 0;         // while anything was on it
  double full_ns = 0;               // what it would have been busy for at its full capacity
  double peak = 0;                  // the largest part of its capacity that was in use, in [0, 1]
  friend bool operator==(const LinkTraffic&, const LinkTraffic&) = default;
};

struct Trace {
  std::string source = "simulated";  // or "measured"
  /// Of a simulation, by rank, who was played in its place: itself, or the first of the ranks that are all alike.
  /// Empty: each itself. Spans and memory events are those of the ranks that were played; all else is there for every
  /// rank.
  std::vector<Rank> players;
  Rank player_of(Rank r) const { return players.empty() ? r : players[static_cast<std::size_t>(r)]; }
  bool plays(Rank r) const { return player_of(r) == r; }
  /// Ranks that were played.
  std::int64_t num_players() const {
    std::int64_t num = players.empty() ? std::ssize(memory) : 0;
    for (std::size_t r = 0; r < players.size(); ++r) num += plays(static_cast<Rank>(r)) ? 1 : 0;
    return num;
  }
  std::vector<std::string> streams;  // their names, by StreamId
  std::vector<std::string> names;
  std::vector<Span> spans;                 // may cover only some steps (RunOptions::span_steps)
  std::vector<MemoryEvent> memory_events;  // likewise
  // Rows of a long run are those of some steps (trace/kept_steps.h); totals are over all of them.
  std::vector<PhaseSpan> phases;
  std::vector<PhaseTotal> phase_totals;     // by rank and phase; where a rank has been
  std::vector<RankMemory> memory;           // by rank
  std::vector<RankTraffic> traffic;         // by rank
  std::vector<RankTraffic> traffic_totals;  // by rank; the keys' step is 0
  std::vector<StepMetrics> metrics;         // thinned as MetricFold does
  /// Of a simulation whose devices share links, those that something was on; else empty.
  std::vector<LinkTraffic> links;
  std::int64_t trained_tokens = 0;  // prompt + response tokens trained, all steps and ranks
  double model_flops = 0.0;         // of training: 6 N per token + attention, no recompute, all steps and ranks
};

}  // namespace hotbunk
