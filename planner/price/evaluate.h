// What a lowered scenario's plan takes, read from the plan over its bodies and calls:
//
//   memory   peaks of a rank, live and mapped, by phase and category (trace/static_memory.h), by the phases of a job
//   shifts   what the phases between training and rollout map, unmap and copy
//   traffic  calls, payload and padding of a rank per phase, group and op, for so many runs of each block
//
// tests/planner/evaluate_test.cc holds them to walks over all ops of random plans.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "lowering/builder.h"
#include "lowering/phases.h"
#include "spec/scenario.h"
#include "trace/trace.h"

namespace hotbunk {

struct PlanPeak {
  std::int64_t bytes = 0;         // live
  CategoryBytes by_category{};    // when the total was highest, first time
  std::int64_t mapped_bytes = 0;  // of the arena's pages
};

/// Peaks of one rank in one space, or the highest of several ranks.
struct PlanSpace {
  PlanPeak whole;
  PlanPhase peak_phase = PlanPhase::load;
  std::array<PlanPeak, num_plan_phases> phases{};
};
struct PlanMemory {
  JobPhases phases;  // that the plan has, in order
  PlanSpace device, host;
};

/// Mapped bytes of one rank: the peak of each phase, and of all of them.
struct MappedBytes {
  JobPhases phases;
  PhaseBytes device{}, host{};
  std::int64_t device_peak = 0, host_peak = 0;
};
MappedBytes mapped_bytes(const PlanMemory&);

/// One op that maps, unmaps or copies between device and host, in the order of the plan. Copies of a sync bring
/// parameters up that sleep.
struct ShiftOp {
  PlanPhase phase{};
  OpKind kind{};                      // map, unmap: memory taken, given back; copy
  std::string section = "transient";  // of map and unmap
  Space space = Space::device;        // its
  std::int64_t count = 1, bytes = 0;  // so many alike, each of these bytes
  std::int32_t every = 1;             // of its phase: only in each so manieth iteration
  friend bool operator==(const ShiftOp&, const ShiftOp&) = default;
};

/// How often the blocks of one iteration run, with which sizes in total.
struct BlockRuns {
  std::int64_t runs = 0, tokens = 0, seqs = 0;
};
struct PlanRuns {
  BlockRuns prefill, decode;
  std::int64_t reference = 0, old_logprobs = 0, micro_batches = 0;  // of one rank
  // Of all its micro-batches, in each of the three passes over them; in a pipeline as many of each, and as many
  // micro-batches in each step, as nearly as they divide.
  std::int64_t trained_tokens = 0;
  std::int64_t optimizer_steps = 0, checkpoints = 0, exports = 0;
};
struct PlanTraffic {
  PlanPhase phase{};
  std::string group;  // a family of the plan's
  OpKind op{};
  std::int64_t calls = 0, payload_bytes = 0, padding_bytes = 0;
  friend bool operator==(const PlanTraffic&, const PlanTraffic&) = default;
};

/// Of a job's plan: of whichever rank has the most, peak by peak.
PlanMemory memory_of(const Scenario&, const Plan&);
PlanMemory memory_of(const Scenario&, const Plan&, Rank);
/// Maps and unmaps in their order, neighbouring copies of one size as one; of the ranks of one program (a stage).
std::vector<ShiftOp> shifts_of(const Scenario&, const Plan&, std::size_t program = 0);
/// Of lists of several stages, the one that shifts most bytes.
std::size_t most_shifted(const std::vector<std::vector<ShiftOp>>&);
/// Of one rank; the lines that have calls, in the order of the phases.
std::vector<PlanTraffic> traffic_of(const Plan&, Rank, const PlanRuns&);

/// What a job maps, put together of plans of some of its phases each (lower_phases): they meet in the transient section
/// alone, which is mapped for what all need.
class JobMaps {
 public:
  /// `shifts`: of plans with the phases that are not training's, in their order. The job's pool takes `kv_bytes`,
  /// whatever that of those plans does, and its transients `need`. `keep_mapped`: nothing sleeps.
  JobMaps(const JobPhases&, bool keep_mapped, std::int64_t chunk_bytes, const std::vector<ShiftOp>& shifts,
          std::int64_t kv_bytes, const PhaseBytes& need);
  const std::vector<ShiftOp>& shifts() const { return shifts_; }
  MappedBytes mapped() const;

 private:
  JobPhases phases_;
  std::vector<ShiftOp> shifts_;
};

}  // namespace hotbunk
