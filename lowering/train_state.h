// Training's state in the plan, as every rank has it: what persists of each unit, how its parameters become whole for
// its compute, and its gradients what the optimizer steps with.
//
//            parameters            gradients                        optimizer (master, moments)
//   fsdp2    shards, gathered      reduce-scattered each backward   the parameters' shards and their moments
//   fsdp1    the same of flat units, gathered and reduced without a copy (layout/flat_units.h)
//   zero2    whole                 reduce-scattered each backward   shards; whole parameters are gathered from them
//   zero1    whole                 whole; reduce-scattered a step   shards; likewise
//   ddp      whole                 whole; all-reduced a step        whole
//
// Where there are several copies of the shards (HSDP), reduced gradients are summed over the copies as well.
//
// Under train.offload: layerwise all that persists of a unit lies on the host: its shard is copied up in front of each
// gather, its reduced gradients down and added up there, and the host steps it. Under optimizer.cpu_fraction the host
// has the first so many elements of a shard's master copy and moments, and a copy of their gradients in a step.
//
// With adapters (LoRA) a layer has two units. The one that is frozen has neither gradients nor optimizer state and is
// kept in what is computed in, sharded under fsdp2 and else whole; its adapters' are as above. So has a layer of which
// some parameters are frozen (train.frozen); under fsdp2 these are kept as the others are, in the master's dtype.
#pragma once
#include <array>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "layout/train_mesh.h"
#include "layout/train_weights.h"
#include "lowering/builder.h"
#include "lowering/model_shapes.h"
#include "spec/scenario.h"

namespace hotbunk {

/// Elements of a unit's shard that are stepped in one place, with their state there.
struct SteppedPart {
  Range elements;
  bool on_host = false;
  BufferId shard = -1, exp_avg = -1, exp_avg_sq = -1;
  std::int64_t first = 0;  // where the elements begin in `shard`; in the moments at 0
  BufferId grad = -1;      // where their gradients are copied to before; -1: they are stepped where they are summed
};

/// Persistent buffers of one unit, each one shard (ShardedUnit::shard_elements) long but for `whole` and a
/// reference beside it, and `grad` where it is accumulated whole.
struct UnitState {
  const ShardedUnit& unit;
  BufferId shard = -1;                     // precision.master: what the optimizer updates
  BufferId whole = -1;                     // precision.params: what is computed with; -1 (FSDP): gathered from shards
  BufferId exp_avg = -1, exp_avg_sq = -1;  // -1, like grad: it is not trained
  BufferId grad = -1;                      // alive from train.begin to train.step
  std::vector<SteppedPart> parts = {};     // of the shard, ascending; of what is not trained none
  BufferId reference = -1;                 // frozen copy in precision.params, whole where `whole` is; -1: none
  BufferId host_shard = -1, host_whole = -1, host_exp_avg = -1, host_exp_avg_sq = -1, host_reference = -1;
  /// Whole parameters are a copy of their own, in another dtype or of several ranks' shards.
  bool publishes() const { return whole >= 0 && whole != shard; }
  bool is_trained() const { return grad >= 0; }
  /// Its optimizer state lies in two places, or in another than its parameters.
  bool is_split() const { return parts.size() > 1 || (!parts.empty() && parts.front().grad >= 0); }
};

/// The parts of a unit's state that persist, of those that a checkpoint has.
enum class StateTensor : std::uint8_t { shard, exp_avg, exp_avg_sq };

/// What a weight sync reads of one unit on every rank of a shard group: its flat shard, and where that sleeps; -1 on
/// ranks of other pipeline stages.
struct SyncedUnit {
  const ShardedUnit* unit = nullptr;
  std::int64_t stage = 0;  // that has it
  std::size_t number = 0;  // of its units
  BufferId buffer = -1, host = -1;
};

/// Parameters as their compute sees them: whole, unpadded, back to back in a buffer for each unit that has some of them
/// (train_weights.h: full_offset); behind a flat unit's there is its padding.
struct WholeUnit {
  struct Part {
    const ShardedUnit* unit = nullptr;
    BufferId buffer = -1;
    DType dtype = DType::f32;
  };
  std::vector<Part> parts;  // of gradients without those of frozen units
  int layer = -1;           // whose they are; -1: of none
  std::int64_t kind = 0;    // those of one kind lie alike
  /// As a call's inputs; behind `first`.
  std::vector<Input> inputs(std::vector<Input> first = {}) const;
  /// The parameters from one role to another as one matrix (rows added up, equal cols), e.g. q_proj … v_proj, or as a
  /// vector where they are 1-D.
  Tensor tensor(const ProgramBuilder&, ParamRole first, ParamRole last) const;
  Tensor tensor(const ProgramBuilder& b, ParamRole role) const { return tensor(b, role, role); }
};

/// A unit whole, in what is computed in, and what of it is a rank's own. Of a layer's adapters, where matrices get
/// theirs, A is read of all rows, and of B the rows that stand beside a rank's own of the matrix.
struct GatheredUnit {
  WholeUnit whole;
  BufferId parts = -1;           // in what is computed in, or (a flat unit's) as the shard is
  bool parts_are_whole = false;  // as `whole` lies, else as the unit's shard
};
/// Some units of layers' adapters, by their number in the state.
using GatheredAdapters = std::map<std::size_t, GatheredUnit>;

/// The ranks that together hold a copy in `shards` shards, of each of which a tensor-parallel rank has a part.
Family holders_of(std::int64_t shards, const ShardMesh&);

enum class Weights : std::uint8_t { trained, reference };

class TrainState {
 public:
  /// Of a pipeline stage of a model with these shapes, which outlive it. `trains`: with gradients and optimizer state;
  /// else only the parameters, sharded.
  TrainState(const Scenario&, ProgramBuilder&, const ShardMesh&, ModelShapes&, std::int64_t stage, bool trains);
  ModelShapes& shapes() const { return *shapes_; }

  /// Of this stage: the root and the head, where it has them, then its layers.
  const std::vector<UnitState>& units() const { return units_; }
  std::int64_t stage() const { return stage_; }
  const StagePart& part() const { return parts_[static_cast<std::size_t>(stage_)]; }
  const std::vector<StagePart>& parts() const { return parts_; }
  const std::vector<ShardedUnit>& units_of(std::int64_t stage) const { return *cut_[static_cast<std::size_t>(stage)]; }
  const ModelSpec& model() const { return scenario_.model; }
  const Precision& precision() const { return scenario_.train.precision; }
  bool has_outer() const { return part().first || part().last; }
  std::size_t num_layers() const { return layers_.size(); }
  /// The layers of a chunk, counted from the stage's first.
  Range layers_of(std::int64_t chunk) const;
  /// A layer so counted: its number in the model.
  int layer(std::size_t i) const { return layers_[i].number; }
  /// The unit of the adapter that a matrix has.
  std::size_t adapters_of(const UnitParam&) const;
  /// The units that are trained, as numbers of units().
  std::vector<std::size_t> trained() const;
  const ShardMesh& mesh() const { return mesh_; }
  std::int64_t shards() const { return mesh_.shards; }
  /// Its parameters' shards, gradients and optimizer state live on the host (train.offload: layerwise).
  bool streams_from_host() const { return streams_; }
  /// The first rank reads all files and says what is in them (train.load: rank0).
  bool first_rank_reads() const { return scenario_.train.load == "rank0"; }
  std::int64_t ranks() const { return scenario_.cluster.ranks(); }
  /// Whether each unit of the job's training has a frozen copy beside it.
  bool has_reference() const { return !units_.empty() && units_.front().reference >= 0; }
  /// Some of what the optimizer has is stepped by the host.
  bool steps_on_host() const { return host_step_ >= 0; }
  /// On the host: what gradients' squares are summed in, sums of four kinds; and what a step needs to know, learning
  /// rate, number and clip coefficient. -1: it does not step there.
  BufferId host_sums() const { return host_sums_; }
  /// Whether ranks that share an expert's columns each have all of one of its adapters' two matrices.
  bool repeats_adapters() const { return mesh_.experts.columns() > 1 && model().adapts_experts(); }
  BufferId host_step() const { return host_step_; }
  bool trains(const ShardedUnit& u) const { return scenario_.model.lora.on() ? u.adapters : !u.frozen; }
  /// As its state is cut: what is frozen is whole where parameters are.
  const ShardedUnit& exported_unit(std::int64_t stage, std::size_t u) const;
  std::int64_t shards_of(const ShardedUnit& u) const { return whole_params_ && !trains(u) ? 1 : shards(); }

  /// What a weight sync reads, of all stages, into how many shards it is cut, and which ranks of a stage together hold
  /// all of it: parameters that every rank has whole come from nowhere else.
  std::vector<SyncedUnit> synced() const;
  std::int64_t synced_shards() const { return whole_params_ ? 1 : shards(); }
  std::int64_t synced_holders() const { return mesh_.holders(synced_shards()); }
  Family synced_family() const { return holders_of(synced_shards(), mesh_); }

  /// Emits what makes units whole, those of no layer or layer i's: [cast ->] all-gather -> copy-out on the gather
  /// stream; nothing when a rank holds all in the compute dtype. The buffers live until their last use; with a limit
  /// they take its next turn. A layer may have parameters in `outer` units, which are whole.
  /// `outer`: which of those of no layer; those of the loss alone may be left for then (add_loss_units).
  enum class Outer : std::uint8_t { all, all_but_loss };
  WholeUnit gather_outer(ProgramBuilder&, Weights, const std::string& prefix, Outer = Outer::all) const;
  void add_loss_units(ProgramBuilder&, Weights, const std::string& prefix, WholeUnit& outer,
                      std::optional<SlotLimitId> limit) const;
  WholeUnit gather_layer(ProgramBuilder&, std::size_t i, Weights, const std::string& prefix, const WholeUnit& outer,
                         std::optional<SlotLimitId> = {}) const;

  /// All layers of the stage, whole until the buffers that are added to `held` are freed: a pipeline's micro-batches
  /// share them (train.reshard_after_forward: false).
  std::vector<WholeUnit> hold_layers(ProgramBuilder&, const std::string& prefix, std::vector<BufferId>& held) const;

  /// FSDP2's reshard to a smaller mesh: of units that are whole, flat parts of equal size, one for each rank of the
  /// family reshard. keep_parts() copies this rank's, gather_kept() makes the units whole again from those of all.
  bool keeps_parts() const { return scenario_.train.reshard_ranks > 0; }
  /// `held`: the parts lie in buffers that are added to it, until these are freed; else until their last use.
  std::vector<Tensor> keep_parts(ProgramBuilder&, const WholeUnit&, const std::string& prefix,
                                 std::vector<BufferId>* held = nullptr) const;
  /// What this rank keeps of all layers of the stage: a pipeline's micro-batches share it, for no parameter changes
  /// between them. Each layer is gathered once, one by one.
  struct KeptLayer {
    WholeUnit layer;  // as it was; its buffers are gone
    std::vector<Tensor> parts;
  };
  std::vector<KeptLayer> keep_layers(ProgramBuilder&, const std::string& prefix, SlotLimitId,
                                     std::vector<BufferId>& held) const;
  WholeUnit gather_kept(ProgramBuilder&, const WholeUnit&, const std::vector<Tensor>& parts, const std::string& prefix,
                        SlotLimitId) const;

  /// Unit `u` as it trains; `awake`: where its shard is, if not where it trains.
  GatheredUnit gather_unit(ProgramBuilder&, std::size_t u, const std::string& prefix, BufferId awake = -1) const;

  /// Brings what every rank has whole up to date with the shards: [cast ->] all-gather -> copy-out on the gather
  /// stream; nothing under FSDP.
  void publish(ProgramBuilder&, const std::string& prefix) const;
  /// Whole parameters that are stepped in place: what the host has stepped of them goes up.
  void take_up_in_place(ProgramBuilder&, const std::string& prefix) const;

  /// Where the backward writes gradients: for each unit the persistent buffer itself where it is whole (then it
  /// accumulates), else a whole buffer of its own.
  WholeUnit outer_gradients(ProgramBuilder&, const std::string& prefix) const;
  WholeUnit layer_gradients(ProgramBuilder&, std::size_t i, const std::string& prefix, const WholeUnit& outer,
                            std::optional<SlotLimitId> = {}) const;
  bool accumulates() const {
    const bool one_dtype = scenario_.train.precision.grads == scenario_.train.summed_grads();
    return whole_grads_ || (!sums_gradients() && !streams_ && one_dtype);
  }
  /// After each backward of units that do not accumulate, of no layer or layer i's: sums their gradients (sum_of_ranks)
  /// and adds them to the persistent shards.
  void reduce_outer(ProgramBuilder&, const WholeUnit& gradients, const std::string& prefix, Outer = Outer::all) const;
  void reduce_loss_units(ProgramBuilder&, const WholeUnit& gradients, const std::string& prefix) const;
  void reduce_layer(ProgramBuilder&, std::size_t i, const WholeUnit& gradients, const std::string& prefix) const;
  /// In a step: the gradients of unit `u` that its optimizer takes, as long as its shard, summed over all ranks. What
  /// is accumulated whole is summed here, and freed.
  BufferId reduced(ProgramBuilder&, std::size_t u, const std::string& prefix) const;

  /// What gradients need on the host in the passes and in the step: made, and given back.
  void alloc_host_gradients(ProgramBuilder&) const;
  void free_host_gradients(ProgramBuilder&) const;

  /// A unit's whole shard of some of its state, on the device: where it lies, or brought together in a transient.
  Tensor on_device(ProgramBuilder&, std::size_t u, StateTensor, const std::string& name) const;
  /// The other way round: makes the buffers of what is split, and fills them from a tensor as long as the shard.
  void put_parts(ProgramBuilder&, const UnitState&, StateTensor, const Tensor& from, const std::string& name) const;

 private:
  /// A layer's own units, and whether others have some of it. `kind`: as WholeUnit::kind.
  struct Layer {
    int number = 0;
    std::vector<std::size_t> units;
    bool is_shared = false;
    std::int64_t kind = 0;
  };
  /// Whether several ranks find gradients of the same parameters.
  bool sums_gradients() const { return mesh_.data() > 1 || mesh_.experts.blocks > 1; }
  void find_layers();
  /// Where the optimizer state of a unit that is trained lies, in buffers that it makes.
  void make_parts(ProgramBuilder&, UnitState&, std::int64_t on_host, const std::string& name) const;
  void make_host_buffers(ProgramBuilder&);
  /// What of a split unit is on the host, as a call's inputs.
  void add_host_parts(const UnitState&, std::vector<Input>&) const;
  /// Where its part on the host is cast for its way up; -1: it is as it is computed with.
  BufferId cast_below(const UnitState&) const;
  /// Of unit `u` what its compute takes; buffers on the way are added to `made`. `source`: -1: where it trains.
  /// `stays`: the whole unit is allocated here, and freed by who asked.
  WholeUnit::Part gather(ProgramBuilder&, std::size_t u, Weights, const std::string& prefix,
                         std::vector<BufferId>& made, BufferId source = -1, bool stays = false) const;
  /// Nothing of a unit that is frozen.
  void add_gradients(ProgramBuilder&, std::size_t u, const std::string& prefix, WholeUnit& out) const;
  void reduce(ProgramBuilder&, const std::vector<std::size_t>& units, const WholeUnit& gradients,
              const std::string& prefix) const;
  /// Elements of a buffer in which a unit is whole.
  static std::int64_t whole_elements(const ShardedUnit&);
  /// [cast ->] all-gather -> copy-out of a unit's shards into `whole`; the buffers that it makes. Experts that lie
  /// apart are gathered apart, of those ranks that have them.
  std::vector<BufferId> fill(ProgramBuilder&, const UnitState&, const Tensor& shard, const Tensor& whole,
                             const std::string& name) const;
  /// What the parts of a split unit have, in what is computed in: those of the host are cast there and copied up.
  void publish_parts(ProgramBuilder&, const UnitState&, const Tensor& to, const std::string& name) const;
  /// Copy-in -> reduce-scatter over the shards -> all-reduce over the replicas: a tensor as long as the shard, and the
  /// stream that it comes from; of experts that lie apart among those that have them. The all-reduce
  /// has a stream of its own, beside the next unit's reduce-scatter. Source: PyTorch FSDP2 with a 2-D mesh
  /// (foreach_reduce).
  std::pair<Tensor, StreamId> sum_of_ranks(ProgramBuilder&, const UnitState&, const Tensor& whole, Category,
                                           const std::string& name) const;
  /// A region of a unit: how it lies in a rank's shard and, from all ranks of `shards` behind one another, in what a
  /// collective makes or takes; and who holds copies of the same shard.
  struct Region {
    UnitRegion size;
    std::int64_t shard_offset = 0, full_offset = 0, gathered_offset = 0;
    Family shards = Family::fsdp, replicas = Family::replicas;
    std::int64_t num_replicas = 1;
    bool is_experts = false;
    bool in_place = false;  // behind one another they are what is computed with: no copy stands between
    std::string name;       // what its ops' names have behind the unit's
  };
  /// Those that have something: a unit may be of experts alone.
  std::vector<Region> regions(const ShardedUnit&) const;
  /// The same by collectives: large parameters have their own (train.in_place_elements). Only those that are not in
  /// place have a gathered_offset, and together so many elements.
  struct Collectives {
    std::vector<Region> regions;
    std::int64_t copied = 0;
  };
  Collectives collectives(const ShardedUnit&) const;
  /// Between what lies behind one another of all ranks, padded, and the unit as it is computed with.
  std::vector<Move> shard_moves(const ShardedUnit&, const Collectives&, bool to_whole) const;
  /// The part of a tensor over a whole unit, or over a shard of one, that a region is.
  static Tensor part_of(const ProgramBuilder&, const Tensor&, std::int64_t offset, std::int64_t elements);

  const Scenario& scenario_;
  ShardMesh mesh_;
  std::int64_t stage_ = 0;
  std::vector<StagePart> parts_;  // of all stages
  bool whole_params_ = false, whole_grads_ = false, streams_ = false;
  // On the host, while there are gradients: where reduced ones come down, by turns; host_sums(), host_step(). Where
  // parameters that the host stepped are cast for their way up, by turns; -1: they are as the master is.
  std::array<BufferId, 2> come_down_ = {-1, -1}, cast_below_ = {-1, -1};
  BufferId host_sums_ = -1, host_step_ = -1;
  // Of each stage: cut into as many shards as the mesh has; into one, where parameters are whole.
  ModelShapes* shapes_;  // outlives it
  std::vector<ModelShapes::Units> cut_, uncut_;
  std::vector<UnitState> units_;
  std::vector<std::size_t> outer_, loss_;  // units of no layer; of these those that nothing but the loss reads
  std::vector<Layer> layers_;
};

/// How a parameter is cut over the ranks that hold it in `shards` shards (one: every data rank has all that its
/// tensor-parallel place has). `pitch`: of every, from one rank's to the next one's.
Parts parts_of(const UnitParam&, std::int64_t shards, const ShardMesh&, Holds, std::int64_t pitch = 0);
/// Of a flat unit: what the ranks' shards, or so many elements of each, have of what a tensor-parallel rank has of the
/// parameter; with Holds::every, `pitch` elements apart.
Side runs_of(const ShardedUnit&, const UnitParam&, Holds, Range of_shard, std::int64_t pitch);
/// The same in the parameter itself, with Holds::every of all its tensor-parallel ranks.
Side logical_runs_of(const ShardedUnit&, const UnitParam&, const ShardMesh&, Holds, Range of_shard, std::int64_t pitch);
/// Where a rank's shard of it lies in the flat shard of its unit; with Holds::every, in all of them one after another.
Side shards_of(const ShardedUnit&, const UnitParam&, std::int64_t shards, const ShardMesh&, Holds);
/// What a tensor-parallel rank has of the parameter by itself, without a gap.
Side local(const UnitParam&);
/// The parameter by itself, without a gap; of experts that share a place, among these.
Side logical(const UnitParam&);
/// The same where the first of so many ranks, the world's, has it, and the others nothing.
Side on_first_rank(const UnitParam&, std::int64_t ranks);

/// Rows [begin, end) of a rank's part of a matrix, with its adapter in it where it has one (in fp32, rounded once),
/// from a tensor [rows, cols] into another.
void emit_merge(ProgramBuilder&, const ModelSpec&, const GatheredUnit& adapters, const UnitParam&, Range rows,
                const Tensor& from, const Tensor& to, const std::string& name);
/// What a matrix's merge is called in its layer.
std::string merged_name(const ModelSpec&, const UnitParam&);
/// The adapters of the matrices that a unit has, one layer after another: `gather` brings a unit of the state, by its
/// number.
GatheredAdapters adapters_for(const TrainState&, const ShardedUnit&,
                              const std::function<GatheredUnit(std::size_t)>& gather);
/// A rank's shard of a flat unit whose matrices get their adapters, in `dtype`. A row may begin in one rank's shard and
/// end in the next one's, so every rank makes each matrix whole, one after another, and takes its own elements.
/// Source: verl and PEFT merge so under FSDP1 (summon_full_params around merge_adapter).
Tensor merge_flat(ProgramBuilder&, const TrainState&, const GatheredUnit& unit, const GatheredAdapters&, DType,
                  const std::string& name);

/// What the names of a unit's parameters begin with: "model.layers.3.".
std::string parameters_prefix(const ShardedUnit&);

/// Bytes of padding where all ranks' shards of a unit lie behind one another.
std::int64_t padding_bytes(const ShardedUnit&, const ShardMesh&, DType);

// Phases of the training side. Each emits into the phase's blocks.
void lower_load(ProgramBuilder&, const TrainState&, std::int32_t phase);
void lower_train(const Scenario&, ProgramBuilder&, const TrainState&, std::int32_t phase);
void lower_log_probs(const Scenario&, ProgramBuilder&, const TrainState&, std::int32_t phase, Weights,
                     const std::string& prefix);
/// What a checkpoint has: the parameters that are trained and their moments. `merges`: and the others, with adapters in
/// them.
void lower_export(ProgramBuilder&, const TrainState&, std::int32_t phase, const std::string& prefix, bool merges);

}  // namespace hotbunk
