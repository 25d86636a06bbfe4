// What training's passes over a micro-batch are made of, for a whole model (train.cc) and for a stage of it
// (pipeline.cc): what is fed, gathers ahead of use, the layers both ways, the loss.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lowering/packed_model.h"
#include "lowering/train_state.h"

namespace hotbunk {

/// What the Driver fills for a micro-batch: its tokens and, for the loss, fp32 or int32 vectors [T].
struct MicroFeeds {
  TokenFeeds tokens;
  Tensor targets, old_logps, ref_logps, advantages, loss_weights;
};
/// Token ids are only read where the embedding is.
void feed_tokens(ProgramBuilder&, const TokenFeeds&, bool ids = true);
void feed_loss(ProgramBuilder&, const MicroFeeds&);
/// What losses of routers take, of a part of the model where routers add such; else without tensors. `make`: a tensor
/// of a name, dtype and shape.
RouterLossFeeds router_loss_feeds(const Scenario&, const StagePart&, const Tensor& metrics,
                                  const std::function<Tensor(const char*, DType, const Dim&)>& make);
void feed_router_loss(ProgramBuilder&, const RouterLossFeeds&);

/// Tensors for them that live from their feed to their last use in a block.
TokenFeeds transient_tokens(const Scenario&, ProgramBuilder&, const std::string& prefix);
Tensor transient_vector(const Scenario&, ProgramBuilder&, const std::string& name, DType);

/// FSDP2's limit: of the layers, and a head behind them, the one that computes and those gathered ahead of it are
/// whole.
SlotLimitId limit_layers(const Scenario&, ProgramBuilder&, const std::string& prefix);

/// Walks layers of the stage in an order and gathers each one `prefetch` units before it is used.
class Gathers {
 public:
  /// `gather`: makes the layer whole that the stage has at a place.
  Gathers(const Scenario&, std::vector<std::size_t> order, std::function<WholeUnit(std::size_t)> gather);
  /// From shards.
  Gathers(const Scenario&, ProgramBuilder&, const TrainState&, Weights, std::string prefix,
          std::vector<std::size_t> order, const WholeUnit& outer, std::optional<SlotLimitId> limit);
  /// What comes behind the last layer of the order, as if it were one more: `gather` is called once.
  void then(std::function<void()> gather) { behind_ = std::move(gather); }
  /// The i-th layer of the order, whole; gathers those up to `prefetch` further.
  WholeUnit use(std::size_t i);
  /// All layers have been used: gathers what is behind them, if that was not done ahead.
  void end();

 private:
  std::vector<std::size_t> order_;
  std::function<WholeUnit(std::size_t)> gather_;
  std::function<void()> behind_;
  std::size_t ahead_;
  std::vector<WholeUnit> ready_;
};

/// Some of the stage's layers, forward or backward.
std::vector<std::size_t> layers_in_order(Range layers, bool backward);

/// The log-probs of the next tokens, of what left the last layer, in chunks of tokens (train.loss_chunk_tokens);
/// fetched.
void lower_logps(const Scenario&, ProgramBuilder&, PackedModel&, const std::string& prefix, const WholeUnit& root,
                 const PackedModel::Stream&, const Tensor& targets);

class TrainPasses {
 public:
  TrainPasses(const Scenario&, ProgramBuilder&, const TrainState&, const Tensor& metrics, const TokenFeeds&);

  PackedModel& model() { return model_; }
  /// Of what is gathered for forward passes; none where it stays whole for the backward.
  std::optional<SlotLimitId> forward_limit() const {
    return s_.train.reshard_after_forward ? std::optional(layers_) : std::nullopt;
  }
  /// Layers that are whole in all passes, by their place in the stage; else each pass gathers its own.
  void hold(std::vector<WholeUnit> layers) { held_ = std::move(layers); }
  /// Gathers each layer once and keeps this rank's parts of it for all passes, in buffers that are added to `held`.
  void keep_layers(std::vector<BufferId>& held) { shared_ = state_.keep_layers(b_, "train.kept.", layers_, held); }

  /// What a forward pass leaves for its backward pass.
  struct Kept {
    std::vector<Values> values;                   // of the layers
    std::vector<WholeUnit> whole;                 // that stay, where nothing is resharded after forward
    std::vector<std::vector<Tensor>> parts;       // of each that this rank keeps, where few keep it among them
    std::vector<PackedModel::Deferred> deferred;  // by layer, of backward for weights()
    std::vector<WholeUnit> gradients;             // by layer, where those go
  };
  /// Through some of the stage's layers. `root`: what is of no layer, where the stage has such. `behind`
  /// gathers what comes behind them.
  PackedModel::Stream forward(PackedModel::Stream, Range layers, const WholeUnit& root, Kept&,
                              std::function<void()> behind = nullptr);
  /// The loss of what leaves the last layer, and its gradient there.
  Tensor loss(const MicroFeeds&, const WholeUnit& root, const WholeUnit& d_root, const PackedModel::Stream&);
  /// `gradient` is that of what left the last layer and then of what entered the first. Reduces gradients.
  /// `defers`: leaves products that make gradients of matrices to weights(), keeps what they read, and leaves it to
  /// them to reduce.
  void backward(Kept&, Range layers, const WholeUnit& root, const WholeUnit& d_root, const Tensor& gradient,
                bool defers = false);
  void weights(const Kept&, Range layers);
  /// Of what the embedding made. Its table's gradients are added to what is there, and reduced with the root's.
  void embedding_backward(const WholeUnit& root, const WholeUnit& d_root, const Tensor& gradient);

 private:
  Tensor head(const MicroFeeds&, const WholeUnit& root, const WholeUnit& d_root, const Tensor& normed);

  const Scenario& s_;
  ProgramBuilder& b_;
  const TrainState& state_;
  Tensor metrics_;
  PackedModel model_;
  /// Layers from what few ranks keep for all passes.
  Gathers gathers_shared(std::vector<std::size_t> order, const std::string& prefix) const;
  /// Layers for their backward: from all shards, or from what few ranks kept.
  Gathers gathers_again(const Kept&, Range layers, const WholeUnit& root) const;
  SlotLimitId layers_, gradients_;
  std::vector<WholeUnit> held_;
  std::vector<TrainState::KeptLayer> shared_;
};

/// Norm over all shards of all ranks, clip, AdamW, metrics: what a step ends with.
void lower_step(const Scenario&, ProgramBuilder&, const TrainState&, const Tensor& metrics);

}  // namespace hotbunk
