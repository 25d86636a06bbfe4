// The decoder: GPT-2, Llama, Mistral, Qwen2, Qwen3, Gemma-2 and 3; with experts (model/experts.h) Mixtral, Qwen3-MoE,
// GLM-4.5 and gpt-oss; with latent attention besides (model/latent_attention.h) DeepSeek-V2 and V3.
#pragma once
#include "model/forward.h"

namespace hotbunk {

/// The residual stream between layers: h itself, or the two parts whose sum it is (after attention, the MLP's output).
/// The next norm adds them, fused.
struct ResidualStream {
  ValueId h = 0, z = 0;
};

/// One layer, from the stream that enters to the one that leaves.
struct DecoderLayer {
  Forward forward;
  ResidualStream in, out;
  ValueId x = 0;  // the sum that entered: all that follows can be computed from it
};
/// What tells a model's layers apart. All of one sort have the same values, by the same ids.
struct LayerSort {
  std::int64_t window = 0;  // tokens that a query sees (ModelSpec::window_of)
  bool experts = false;     // in the place of the MLP
};
/// `first`: what enters is the embedding, h alone.
DecoderLayer decoder_layer(const ModelSpec&, bool first, LayerSort);

/// The layers of a model, one of each sort.
class DecoderLayers {
 public:
  explicit DecoderLayers(const ModelSpec&);
  /// `first`: what enters is h alone.
  const DecoderLayer& at(int layer, bool first) const { return sorts_[2 * sort_of(layer) + (first ? 0 : 1)]; }
  /// Of two layers that compute the same: the same.
  std::size_t sort_of(int layer) const {
    return (model_.window_of(layer) == 0 ? 0 : 1) + (model_.moe && !model_.is_moe_layer(layer) ? 2 : 0);
  }
  static constexpr std::size_t num_sorts = 4;

 private:
  const ModelSpec& model_;
  std::vector<DecoderLayer>
      sorts_;  // without the window and with it, each first and not; then of dense ones among MoE's
};

struct DecoderEmbedding {
  Forward forward;
  ValueId embedded = 0;
};
DecoderEmbedding decoder_embedding(const ModelSpec&);

/// The norm in front of the head.
struct DecoderEnd {
  Forward forward;
  ResidualStream in;
  ValueId x = 0, normed = 0;
};
DecoderEnd decoder_end(const ModelSpec&);

}  // namespace hotbunk
