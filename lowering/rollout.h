// The rollout side of a colocated plan: the engine's weights and KV pool on one tensor-parallel rank, its prefill and
// decode steps, weight sync into it, and sleep and wake of both sides.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "lowering/model_shapes.h"
#include "lowering/phases.h"
#include "lowering/sleep.h"
#include "lowering/train_state.h"
#include "model/forward.h"

namespace hotbunk {

/// Which engine a rank serves, and its place there: tensor-parallel ranks are neighbours, those of context parallelism
/// lie tp apart, stages tp x cp.
struct EngineSeat {
  std::int64_t engine = 0, place = 0;
};
EngineSeat engine_seat(const RolloutLayout&, std::int64_t rank);
/// The stage of its engine's pipeline that a rank serves.
std::int64_t engine_stage(const RolloutLayout&, std::int64_t rank);
/// The rank that sits there; inverse of engine_seat.
std::int64_t rank_of_seat(const RolloutLayout&, EngineSeat);

/// Whether several of an engine's ranks share attention, and others have sequences of their own.
inline bool has_attention_groups(const RolloutLayout& l) { return l.attention_dp > 1 && l.attention_dp < l.tp; }

/// The layers of a stage of an engine's pipeline.
Range engine_stage_layers(const Scenario&, std::int64_t stage);

/// What a layer of an engine's KV pool has for each token on one of its ranks: keys and values of its heads, or of
/// latent attention the latent and the shared part of keys, on every rank all of it.
std::int64_t kv_row_elements(const Scenario&);
/// Bytes of one block of an engine's KV pool on one of its ranks, of so many layers; of all.
std::int64_t kv_block_bytes(const Scenario&, std::int64_t layers);
inline std::int64_t kv_block_bytes(const Scenario& s) { return kv_block_bytes(s, s.model.layers); }

/// The weight of an engine that holds these parameters, by its name in a layer or in none.
std::string weight_of(const Weight&);
/// As engines have the model: adapters are in its matrices, and training's padding of the vocabulary is not there.
ModelSpec served_model(const Scenario&);

/// Of one stage of an engine's pipeline.
class RolloutState {
 public:
  /// `stage`: which one. `weights`: those of its part.
  RolloutState(const Scenario&, ProgramBuilder&, ModelShapes::Weights, std::int64_t stage, std::int64_t kv_blocks);

  std::int64_t stage() const { return stage_; }
  bool is_first() const { return stage_ == 0; }
  bool is_last() const { return stage_ + 1 == scenario_.rollout.layout.pp; }
  /// Of the model, those of this stage.
  const Range& layers() const { return layers_; }

  /// As the first tensor-parallel rank holds them; the others' pieces lie LocalWeight::Step further.
  const std::vector<LocalWeight>& weights() const { return *weights_; }
  /// Index into weights(); internal fault when absent.
  std::size_t index(const std::string& name) const;
  bool has(const std::string& name) const { return by_name_.contains(name); }
  /// The weights of one layer, in the same order for all.
  const std::vector<BufferId>& layer_buffers(std::int64_t layer) const {
    return by_layer_[static_cast<std::size_t>(layer)];
  }
  BufferId buffer(std::size_t weight) const { return buffers_[weight]; }
  BufferId host_buffer(std::size_t weight) const { return host_buffers_[weight]; }
  Tensor matrix(const ProgramBuilder&, const std::string& name) const;
  Tensor vector(const ProgramBuilder&, const std::string& name) const;
  /// The weight that makes logits, on the last stage: the table where the two are one.
  std::string head() const { return has("lm_head") ? "lm_head" : "embedding"; }
  /// Whether a sync leaves the weight as products read it (prepack.cc).
  bool is_prepacked(std::size_t weight) const { return prepacked_[weight]; }
  bool is_prepacked(const Tensor& of_weight) const;
  BufferId kv() const { return kv_; }
  /// [blocks, 2 kv heads, block_tokens * head dim] of one layer; of latents [blocks, block_tokens, what is kept].
  Tensor kv_layer(const ProgramBuilder&, std::int64_t layer) const;

 private:
  const Scenario& scenario_;
  ModelShapes::Weights weights_;
  std::int64_t stage_ = 0;
  Range layers_;
  std::map<std::string, std::size_t> by_name_;
  std::vector<BufferId> buffers_, host_buffers_;
  std::vector<std::vector<BufferId>> by_layer_;
  std::vector<bool> prepacked_;  // by weight
  BufferId kv_ = -1;
  std::int64_t kv_blocks_ = 0;
};

/// Blocks 0 "prefill" and 1 "decode".
void lower_rollout(const Scenario&, ProgramBuilder&, const RolloutState&, std::int32_t phase);
/// FSDP shards -> buckets -> rollout weights (sync.cc). `from_host`: training's parameters sleep.
void lower_sync(const Scenario&, ProgramBuilder&, const TrainState&, const RolloutState&, bool from_host,
                std::int32_t phase);
/// The part of it behind all else: what of the weights only products read, in the order in which they read it
/// (prepack.cc).
void lower_prepack(const Scenario&, ProgramBuilder&, const RolloutState&);
/// By weight of a stage: whether every op of the engine that reads it is a linear, of which it is the matrix, and the
/// device is a CPU. CUDA's products read rows as they come.
std::vector<bool> prepacked_weights(const Scenario&, const RolloutState&);
/// All ranks learn all finished samples.
void lower_exchange(const Scenario&, ProgramBuilder&, std::int64_t world, std::int32_t phase);

/// What sleeps of both sides. No rollout: nullptr.
ShiftBuffers shift_buffers(const TrainState&, const RolloutState*);

}  // namespace hotbunk
