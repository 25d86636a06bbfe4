// The model over one micro-batch of packed sequences, forward and explicit backward, as calls: its family's forward
// (model/) by the rules of shard/, over the units that training has whole.
#pragma once
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "lowering/train_state.h"
#include "model/decoder.h"
#include "shard/rules.h"

namespace hotbunk {

/// What arrives with every micro-batch.
struct TokenFeeds {
  Tensor ids, positions, cu_seqlens;
  RouterLossFeeds router_loss;  // without tensors: routers add nothing to the loss
};

/// Whose matrix makes logits: the embedding's where the two are one.
inline ParamRole head_role(const ModelSpec& m) { return m.tie_embeddings ? ParamRole::embedding : ParamRole::lm_head; }

class PackedModel {
 public:
  PackedModel(const PackedModel&) = delete;  // its parts refer to its model
  PackedModel& operator=(const PackedModel&) = delete;
  /// Of a pipeline stage: what enters the first layer of a chunk is h alone.
  /// `which`: the reference of adapters is the model without them.
  PackedModel(const Scenario&, ProgramBuilder&, std::string prefix, TokenFeeds, const StagePart&,
              Weights which = Weights::trained);

  /// The residual stream between layers (model/decoder.h); z without a buffer: there is only h.
  struct Stream {
    Tensor h, z;
  };

  Stream embed(const WholeUnit& root);
  /// `kept`: what train.recompute lets stand until the layer's backward.
  Stream layer_forward(const WholeUnit&, int layer, const Stream& in, Values& kept);
  /// Computes again what of the layer was not kept and its backward reads; nothing with recompute: none.
  void recompute(const WholeUnit&, int layer, Values& kept);
  /// Products that make gradients of matrices, left for later; and where gradients do not accumulate, copies of what
  /// was found of the others meanwhile.
  struct Deferred {
    std::vector<Op> ops;  // named without the layer
    template <class F>
    friend void each_tensor(Deferred& d, F&& visit) {
      for (Op& op : d.ops)
        for (auto* side : {&op.inputs, &op.outputs})
          for (Tensor& t : *side) visit(t);
    }
  };
  /// `gradient` [T,H] is that of the layer's output and then of its input. Writes the unit's gradients, or with
  /// `defers` those that layer_weights() does not; where they do not accumulate, none: it writes all of them then.
  Deferred layer_backward(const WholeUnit&, const WholeUnit& gradients, int layer, const Values&,
                          const Tensor& gradient, bool accumulate, bool defers = false);
  void layer_weights(const WholeUnit& gradients, int layer, const Deferred&);

  /// The norm in front of the head, and its result [T,H].
  Values end(const WholeUnit& root, const Stream&);
  Tensor normed(const WholeUnit& root, const Values& end);
  /// The matrix that makes logits.
  Tensor head(const WholeUnit& root) const { return root.tensor(b_, head_role(scenario_.model)); }
  /// Where the head's backward leaves the gradient of normed() [T,H], on each rank of a tensor-parallel group what its
  /// part of the vocabulary adds.
  Tensor make_d_normed(const WholeUnit& root);
  /// The gradient of the stream, from what make_d_normed() made.
  Tensor end_backward(const WholeUnit& root, const WholeUnit& gradients, const Values& end, const Tensor& d_normed,
                      bool accumulate);
  /// Adds to the gradient of the table what is there.
  void embedding_backward(const WholeUnit& root, const WholeUnit& gradients, const Tensor& gradient);

  /// What is computed from now on is called so: calls of the same bodies go by the names of their slots.
  void set_name(std::string name) { name_ = std::move(name); }
  const std::string& name() const { return name_; }

  Dim T() const { return sharding_.tokens; }
  const TensorSharding& sharding() const { return sharding_; }
  /// Of a layer: which of its parameters do not train.
  TensorSharding sharding_of(int layer) const;

 private:
  class Emits;
  const DecoderLayer& layer_at(int layer) const {
    return layers_.at(layer, std::ranges::count(first_layers_, layer) > 0);
  }
  /// Bodies of layers are the same where their units are of one kind and they compute the same.
  std::int64_t variant_of(const WholeUnit& w, int layer) const {
    return static_cast<std::int64_t>(DecoderLayers::num_sorts) * w.kind +
           static_cast<std::int64_t>(layers_.sort_of(layer));
  }
  std::string layer_name(int layer) const;
  /// What of a layer stands until its backward.
  std::vector<ValueId> kept_between(const DecoderLayer&, const TensorSharding&) const;

  const Scenario& scenario_;
  ModelSpec model_;
  ProgramBuilder& b_;
  std::string prefix_, name_;  // of bodies, of calls
  TokenFeeds feeds_;
  std::vector<int> first_layers_;  // of the chunks
  TensorSharding sharding_;
  DecoderEmbedding embedding_;
  DecoderLayers layers_;
  DecoderEnd end_;
  std::vector<FrozenRoles> frozen_;  // behind those of no layer; empty: all train
};

}  // namespace hotbunk
