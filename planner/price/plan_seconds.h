// Seconds of what a lowered scenario's plan computes and moves, read from the plan: its blocks replayed with the sizes
// that the workload is expected to have (stream_seconds.h), so many times as it is expected to run them.
//
//   training   per optimizer step its begin, its micro-batches, its step; log-prob passes over the same micro-batches.
//              Stages of a pipeline play their turns (layout/pipeline_turns.h), each side of a message waiting for
//              the other; told is what the stage takes that works longest, and as waiting for the others the rest
//   rollout    an engine's prompts, its decode steps with all slots taken, and while the last sequences end
//              (planner/rl/engine_schedule.h); a step is replayed at the context that a sequence holds on average: what
//              it takes more for a longer one it takes less for a shorter one
//   sync       its buckets, each as long as the rank takes that reads most of it
//
// Sleep and wake are evaluate.h's ShiftOps.
#pragma once
#include <string_view>

#include "lowering/lower.h"
#include "planner/price/stream_seconds.h"
#include "planner/rl/engine_schedule.h"
#include "planner/train/train_model.h"

namespace hotbunk {

/// One iteration's. Empty: the job has no such phase.
struct TrainingSeconds {
  StreamSeconds reference, old_logprobs, train;
};
/// One engine's; steps: of each kind, with so many tokens and sequences.
struct RolloutSeconds {
  struct Part {
    StreamSeconds seconds;
    double steps = 0, tokens = 0, sequences = 0;  // of all steps
  };
  Part prefill, decode, tail;
  StreamSeconds exchange;
  double slots = 0, context = 0;  // sequences decoded together; tokens that each of them holds
  double total() const;
};
struct PlanSeconds {
  TrainingSeconds training;
  RolloutSeconds rollout;
  StreamSeconds sync;  // of one; without memory taken for its buckets
};

/// The blocks of a plan, or of a part of one as it is written, on the ranks of one program. Both outlive it.
class PlanBlocks {
 public:
  explicit PlanBlocks(const Plan& plan, std::size_t program = 0) : plan_(&plan), program_(program) {}
  explicit PlanBlocks(const WrittenPart& part, std::size_t program = 0)
      : plan_(&part.plan), part_(&part), program_(program) {}
  const Plan& plan() const { return *plan_; }
  /// The same of the program that a rank plays.
  PlanBlocks of_rank(Rank) const;
  Rank first_rank() const;
  bool has(PlanPhase) const;
  /// Of a phase that has such a block.
  BlockStreams block(PlanPhase, std::string_view name) const;
  /// All of a phase that is not driven.
  std::vector<BlockStreams> blocks(PlanPhase) const;

 private:
  const Plan* plan_;
  const WrittenPart* part_ = nullptr;
  std::size_t program_ = 0;
};

/// Mean tokens of a sample where context-parallel ranks fill its chunks up: of lengths that vary, by half a multiple.
double mean_padded_tokens(const Scenario&);

/// Sizes of a micro-batch of so many sequences of the workload's mean length.
Sizes micro_batch_sizes(const Scenario&, double sequences);

/// Of the phases of training that the plan has, at the scenario's own micro-batches: those of `point`.
TrainingSeconds training_seconds(const Scenario&, const TrainPoint& point, const PlanBlocks&, const CostModel&);

/// An engine's steps, ready to be priced for any number of sequences. The stages of its pipeline follow one another: a
/// step takes as long as all of them, and a message as on both of its sides.
class EngineBlocks {
 public:
  EngineBlocks(const Scenario&, const PlanBlocks&, const CostModel&);
  /// `pool_tokens`: of the engine's cache.
  RolloutSeconds seconds(const Scenario&, double pool_tokens, const CostModel&) const;

 private:
  DeviceSharing sharing_;
  struct Stage {
    RankPlace place;
    BlockStreams prefill, decode;
  };
  std::vector<Stage> stages_;
  StreamSeconds exchange_;
};

/// Of the ranks that wait for one another those that take longest.
StreamSeconds sync_seconds(const Scenario&, const Plan&, const CostModel&);

/// All of them, of a job's whole plan.
PlanSeconds plan_seconds(const Scenario&, const TrainPoint&, const Plan&, const CostModel&);

}  // namespace hotbunk
