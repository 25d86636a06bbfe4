// IterationDriver: the order of blocks in every driven phase of an RL iteration, for every rank (DESIGN: Driver).
// What differs between a simulation and a real run (lengths, end of sequence, data) are the hooks of derived classes.
//
// Phases by name. rollout: the engine's scheduler picks "prefill" (block 0) or "decode" (block 1). exchange, export:
// once. reference, old_logprobs, values: all micro-batches of the iteration. train, critic: per mini-batch "begin", its
// "micro"s, "step" (blocks 0, 1, 2); of a pipeline's stage its own order of passes (layout/pipeline_turns.h) and of
// the messages between them. A plan of priced blocks has both in one block, and one before and behind the micro-batches
// of a log-prob pass. checkpoint: once in
// every checkpoint_every-th iteration and in one that ends the run early. All others: block 0.
//
// Sizes: prefill tokens and chunks; decode tokens = seqs = running requests; micro tokens and samples (an empty
// micro-batch has 0 of both); all other blocks 0. With sequence parallelism a micro-batch is filled up to a multiple of
// the tensor-parallel ranks, each of which has its part of the tokens; with Ulysses to a multiple of its ranks (times
// those). With context parallelism each sequence is filled up to a multiple of two chunks a rank. A rank's tokens are
// its own, samples and pairs those of all.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "exec/batching.h"
#include "exec/driver.h"
#include "exec/lengths.h"
#include "exec/scheduler.h"
#include "layout/mesh.h"
#include "layout/pipeline_turns.h"
#include "spec/scenario.h"
#include "trace/folds.h"

namespace hotbunk {

enum class PhaseRole : std::uint8_t {
  other,
  load,
  sync,
  rollout,
  exchange,
  reference,
  old_logprobs,
  train,
  checkpoint,
  export_weights
};
PhaseRole role_of_phase(std::string_view name);

/// KV blocks of one engine: the pool that the plan's kv_write ops write to; 0 when the plan has none.
std::int64_t kv_blocks_of(const Plan&);

/// What is wrong with a scenario's lengths before anything runs: E310 a longest sample that the KV pool cannot hold,
/// E312 a longest sample that a micro-batch cannot hold.
Diagnostics check_lengths(const Scenario&, std::int64_t num_kv_blocks);

/// 6 FLOPs per parameter and token (2 forward, 4 backward) over the parameters that multiply activations: all but an
/// untied embedding table, which is only looked up (a tied one is the head). Attention: 12 * heads * head_dim * layers
/// per (query, key) pair: QK^T and PV are 2 FLOPs per multiply-add each, backward twice that. A layer with a window has
/// at most as many pairs as fit there. No recompute.
double training_flops(const ModelSpec&, std::int64_t tokens, std::int64_t attention_pairs);

class IterationDriver : public Driver {
 public:
  IterationDriver(const Plan&, const Scenario&);

  std::optional<Args> next(Rank, std::int32_t step, std::int16_t phase) final;
  void completed(Rank, const Args&, std::int16_t) override {}
  std::vector<Args> mini_batch(Rank, std::int32_t step, std::int64_t mini) final;
  void report(Trace&) const override;
  bool ends_after(std::int32_t step) const final { return step == end_step_; }
  /// The run ends after this iteration, which then has a checkpoint.
  void end_after(std::int32_t step) { end_step_ = step; }
  /// The iteration that ends the run early, or -1.
  std::int32_t end_step() const { return end_step_; }

  /// Where a rank stands in the rollout. Groups are numbered through all engines (lowering/sample_rows.h:
  /// attention_groups); where an engine is one, they are the engines.
  std::int64_t engine_of(Rank) const;
  std::int64_t place_of(Rank) const;
  std::int64_t group_of(Rank) const;

 protected:
  /// The rollout of one iteration by one group of an engine's ranks.
  struct Engine {
    Scheduler scheduler;
    std::optional<ScheduledStep> open;  // its next step, or the one that the last decision was about
    Args taken;                         // that decision, if it was, with what this group alone has of it
    std::vector<Args> decisions;        // the same for all ranks of the group
    bool done = false, runs = false;    // runs: the last decision was about `open`
  };
  /// One iteration, shared by the ranks of this process.
  struct Iteration {
    std::int32_t step = 0;
    std::vector<Engine> engines;  // by group; empty until the rollout
    std::optional<std::vector<MiniBatch>> batches;
    std::optional<std::vector<MiniBatch>> scored;  // where passes that only score have micro-batches of their own
  };
  /// The position of one pass over a micro-batch.
  struct MicroId {
    Rank rank = 0;
    PhaseRole role = PhaseRole::train;
    std::int64_t mini = 0, micro = 0;
  };

  const Plan& plan() const { return plan_; }
  std::size_t share_of(Rank r) const { return shares_[static_cast<std::size_t>(r)]; }
  /// With Ulysses: of the tokens that its group has, which of as many equal parts as ranks share them.
  std::int64_t part_of(Rank r) const { return parts_[static_cast<std::size_t>(r)]; }
  /// With context parallelism: of each sequence, which chunk from the start, and from the end, is the rank's.
  std::int64_t context_of(Rank r) const { return contexts_[static_cast<std::size_t>(r)]; }
  /// Tokens of a sequence of so many, with what fills its chunks up.
  std::int64_t padded(std::int64_t tokens) const;
  const Scenario& scenario() const { return scenario_; }
  PhaseRole role(std::int16_t phase) const { return roles_[static_cast<std::size_t>(phase)]; }
  Iteration& iteration(std::int32_t step);
  const std::vector<MiniBatch>& batches(std::int32_t step);
  /// As the phase's passes take them.
  const std::vector<MiniBatch>& batches(std::int32_t step, PhaseRole);
  /// A micro-batch of so much, as the plan has it.
  Sizes packed(const Sizes& micro) const;
  /// A figure of this step, for the trace and metrics.jsonl.
  void note(std::int32_t step, const std::string& name, double value) { open_figures_[step][name] = value; }
  /// Those of one of the latest steps so far.
  const std::map<std::string, double>& figures(std::int32_t step) { return open_figures_[step]; }
  /// Called once per step, when its samples are known.
  virtual void samples_known(std::int32_t /*step*/, const SampleLengths&) {}

  /// How many decode steps a decision may stand for.
  virtual std::int64_t most_decode_steps() const { return 1; }
  /// The samples of each group, in an iteration with these prompts.
  std::vector<std::vector<std::int64_t>> samples_of_engines(std::span<const std::int64_t> prompt_tokens) const;
  /// What is trained of samples of these lengths, in order.
  std::vector<MiniBatch> mini_batches_of(const SampleLengths& lengths) const {
    return mini_batches_of(lengths, scenario_);
  }
  std::int64_t groups_per_engine() const { return groups_; }
  Rank first_engine_rank() const { return first_engine_rank_; }
  Rank num_train_ranks() const { return static_cast<Rank>(shares_.size()); }

  // Hooks. Payloads stay alive from next() to completed(), and are immutable but for what fetch() stores.
  virtual std::vector<std::int64_t> prompt_tokens(std::int32_t step) = 0;  // per prompt, before the rollout
  virtual std::vector<std::int64_t> response_caps(std::int32_t step) = 0;  // per sample, before the rollout
  virtual SampleLengths sample_lengths(std::int32_t step) = 0;             // after the exchange
  /// Of a group's step, or of one without chunks, which others of its engine take.
  virtual std::shared_ptr<Payload> rollout_payload(Iteration&, std::int64_t /*group*/, const ScheduledStep&) {
    return {};
  }
  /// What the ranks of group `own` have of a step that all of an engine's groups take, who learn what each samples, of
  /// so many slots.
  virtual std::shared_ptr<Payload> joint_payload(const std::vector<std::shared_ptr<Payload>>& all, std::size_t own,
                                                 std::int64_t /*seqs*/) {
    return all[own];
  }
  /// Which of the step's sampled tokens ended their sequence; empty: none.
  virtual std::vector<std::uint8_t> ended(Iteration&, std::int64_t, const ScheduledStep&, const Args&) { return {}; }
  virtual std::shared_ptr<Payload> exchange_payload(Iteration&, Rank) { return {}; }
  virtual std::shared_ptr<Payload> micro_payload(Iteration&, const MicroId&, const MicroBatch&) { return {}; }
  virtual std::shared_ptr<Payload> sync_payload(std::int32_t /*step*/, Rank) { return {}; }
  /// For the block that begins a mini-batch.
  virtual std::shared_ptr<Payload> begin_payload(Iteration&, Rank, std::int64_t /*mini*/) { return {}; }
  virtual std::shared_ptr<Payload> step_payload(Iteration&, Rank, std::int64_t /*mini*/) { return {}; }
  /// For load, checkpoint and export.
  virtual std::shared_ptr<Payload> weights_payload(PhaseRole, std::int32_t /*step*/, Rank) { return {}; }

 private:
  /// `cut`: the scenario whose micro-batches these are.
  std::vector<MiniBatch> mini_batches_of(const SampleLengths&, const Scenario& cut) const;
  /// Whether the plan has sizes of a rank's part of a micro-batch: one of priced blocks has not.
  bool has_parts() const;
  struct Cursor {
    std::int32_t step = -1;
    std::int16_t phase = -1;
    std::int64_t index = 0;
  };
  std::optional<Args> rollout_decision(Iteration&, Rank, std::int64_t index);
  void next_step(Iteration&, std::int64_t first);
  std::optional<Args> micro_decision(Iteration&, Rank, std::int16_t phase, std::int64_t index);
  /// The same, where a pipeline has its messages in blocks of their own.
  std::optional<Args> stage_decision(Iteration&, Rank, std::int16_t phase, std::int64_t index);
  std::optional<Args> train_decision(Iteration&, Rank, std::int64_t index);
  Args train_block(Iteration&, Rank, std::int64_t mini, std::int64_t index);
  /// One block of a mini-batch between its begin and its step.
  struct Pass {
    std::int32_t block = 0;
    std::int64_t micro = 0;      // whose sizes and data it has
    std::int64_t returned = -1;  // a message: whose gradient goes back
    bool message = false;        // it has sizes alone
  };
  const std::vector<Pass>& passes(Rank, std::int16_t phase, std::int64_t micro_batches);
  std::vector<Pass> stage_passes(Rank, std::int16_t phase, std::int64_t micro_batches);
  /// What a pass has of the iteration's micro-batches, counted from a mini-batch's first.
  Args pass_args(Iteration&, Rank, PhaseRole, std::int64_t mini, const Pass&);
  std::int32_t last_block(Rank, std::int16_t phase) const;
  void pipeline_of_plan(const Mesh& train);
  std::optional<Args> decide(Rank, std::int32_t step, std::int16_t phase, std::int64_t index);
  void start_rollout(Iteration&);
  void note_trained(std::int32_t step, const SampleLengths&);
  SchedulerStatistics replay(const SampleLengths&) const;
  Scheduler make_scheduler(std::span<const std::int64_t> samples, const SampleLengths&) const;

  const Plan& plan_;
  const Scenario scenario_;
  std::int64_t num_kv_blocks_ = 0;
  std::int64_t groups_ = 1;          // of an engine
  std::vector<PhaseRole> roles_;     // by phase
  std::vector<Cursor> cursors_;      // by rank
  std::vector<std::size_t> shares_;  // by rank that trains: of the layout's dp shares of the samples, its own
  std::vector<std::int64_t> parts_, contexts_;  // by rank that trains
  Pipeline pipeline_;                           // that the plan plays; of one stage: none
  bool priced_pipeline_ = false;                // by blocks that have their messages in them
  std::int64_t fills_ = 0;                      // of such blocks
  std::vector<std::int64_t> stages_;            // by rank that trains
  std::int16_t train_phase_ = -1;
  /// By phase, stage and micro-batches.
  std::map<std::tuple<std::int16_t, std::int64_t, std::int64_t>, std::vector<Pass>> passes_;
  std::map<std::pair<PipelinePasses, std::int64_t>, std::vector<std::vector<StageTurn>>> turns_;  // by micro-batches
  /// The blocks of a pipeline's stage, in the phases that have its messages in blocks of their own.
  struct StagePhase {
    std::map<std::string, std::int32_t> numbers;  // by name
    StageBlocks blocks;
  };
  std::map<std::pair<std::int16_t, std::int32_t>, StagePhase> stage_phases_;  // by phase and program
  Rank first_engine_rank_ = 0;
  std::int32_t end_step_ = -1;
  std::map<std::int32_t, std::unique_ptr<Iteration>> iterations_;
  // Of all steps, in bounded memory.
  std::int64_t trained_tokens_ = 0;
  double model_flops_ = 0.0;
  std::map<std::int32_t, std::map<std::string, double>> open_figures_;  // of the latest steps, which may still grow
  MetricFold curves_;                                                   // of those before
};

}  // namespace hotbunk
