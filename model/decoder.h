// The decoder: Llama, Mistral, Qwen2, Qwen3; with experts (model/experts.h) Mixtral, Qwen3-MoE.
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
/// `first`: what enters is the embedding, h alone. All layers of a model have the same values, by the same ids; that is
/// why dense layers among those with experts are refused (spec/validate.cc).
DecoderLayer decoder_layer(const ModelSpec&, bool first);

struct DecoderEmbedding {
  Forward forward;
  ValueId embedded = 0;
};
DecoderEmbedding decoder_embedding();

/// The norm in front of the head.
struct DecoderEnd {
  Forward forward;
  ResidualStream in;
  ValueId x = 0, normed = 0;
};
DecoderEnd decoder_end();

}  // namespace hotbunk
