// FSDP2 state in the plan, as every rank has it: the persistent shards, and how a unit's parameters become whole for
// its compute and its gradients become shards again.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "layout/train_weights.h"
#include "lowering/builder.h"
#include "spec/scenario.h"

namespace hotbunk {

/// Persistent buffers of one unit, each one shard (ShardedUnit::shard_elements) long.
struct UnitState {
  const ShardedUnit& unit;
  BufferId shard = -1;                     // precision.master: under FSDP2 this is the parameter itself
  BufferId exp_avg = -1, exp_avg_sq = -1;  // -1, like grad: nothing is trained
  BufferId grad = -1;                      // alive from train.begin to train.step
  BufferId reference = -1;                 // frozen copy in precision.params; -1: none
  BufferId host_shard = -1, host_exp_avg = -1, host_exp_avg_sq = -1, host_reference = -1;
};

/// A unit's parameters as its compute sees them: whole, unpadded, back to back (train_weights.h: full_offset).
struct WholeUnit {
  const ShardedUnit* unit = nullptr;
  BufferId buffer = -1;
  DType dtype = DType::f32;
  /// The parameters from one role to another as one matrix (rows added up, equal cols), e.g. q_proj … v_proj.
  Tensor matrix(const ProgramBuilder&, ParamRole first, ParamRole last) const;
  Tensor matrix(const ProgramBuilder& b, ParamRole role) const { return matrix(b, role, role); }
  Tensor vector(const ProgramBuilder&, ParamRole first, ParamRole last) const;
  Tensor vector(const ProgramBuilder& b, ParamRole role) const { return vector(b, role, role); }
};

enum class Weights : std::uint8_t { trained, reference };

class TrainState {
 public:
  /// Over the units of `world` ranks, which outlive it. `trains`: with gradients and optimizer state; else only the
  /// parameters.
  TrainState(const Scenario&, ProgramBuilder&, std::int64_t world, const std::vector<ShardedUnit>& units, bool trains);

  const std::vector<UnitState>& units() const { return units_; }
  std::int64_t world() const { return world_; }

  /// Emits what makes unit `u` whole: [cast ->] all-gather -> copy-out on the gather stream; nothing when one rank
  /// holds it all in the compute dtype. The buffers live until their last use; with a limit they take its next turn.
  WholeUnit gather(ProgramBuilder&, std::size_t u, Weights, const std::string& prefix,
                   std::optional<SlotLimitId> = {}) const;

  /// Where the backward of unit `u` writes its gradients: the persistent shard itself when there is one rank (then it
  /// accumulates), else a whole buffer of its own.
  WholeUnit gradients(ProgramBuilder&, std::size_t u, const std::string& prefix, std::optional<SlotLimitId> = {}) const;
  bool accumulates() const { return world_ == 1; }
  /// Emits copy-in -> reduce-scatter -> add to the gradient shard on the reduce stream; nothing for one rank.
  void reduce(ProgramBuilder&, std::size_t u, const WholeUnit& gradients, const std::string& prefix) const;

 private:
  const Scenario& scenario_;
  std::int64_t world_;
  std::vector<UnitState> units_;
};

/// Where the shards of a unit's parameter lie: in `tensor`, the flat shard of the unit (mine), or all of them one after
/// another (every).
Side shards_of(const ShardedUnit&, const UnitParam&, std::int64_t world, Holds, std::int32_t tensor = 0);
/// The parameter by itself, without a gap.
Side logical(const UnitParam&);

/// What the names of a unit's parameters begin with: "model.layers.3.".
std::string parameters_prefix(const ShardedUnit&);

/// Bytes of padding in a collective over all shards of a unit.
std::int64_t padding_bytes(const ShardedUnit&, DType);

// Phases of the training side. Each emits into the phase's blocks.
void lower_load(ProgramBuilder&, const TrainState&, std::int32_t phase);
void lower_train(const Scenario&, ProgramBuilder&, const TrainState&, std::int32_t phase);
void lower_log_probs(const Scenario&, ProgramBuilder&, const TrainState&, std::int32_t phase, Weights,
                     const std::string& prefix);
void lower_export(ProgramBuilder&, const TrainState&, std::int32_t phase, const std::string& prefix);

}  // namespace hotbunk
