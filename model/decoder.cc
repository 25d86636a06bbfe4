#include "model/decoder.h"

#include <optional>

#include "model/experts.h"

namespace hotbunk {
namespace {

using R = ParamRole;

ResidualStream stream_into(Forward& f) {
  const ValueId h = f.input("stream", Width::hidden);
  return {h, f.input("stream.added", Width::hidden)};
}

ValueId dense_mlp(Forward& f, ValueId x) {
  const ValueId gate_up = f.linear("gate_up_proj", x, "gate_up", Width::gate_up, {R::gate_proj, R::up_proj});
  return f.linear("down_proj", f.swiglu("swiglu", gate_up, "activated"), "mlp_out", Width::hidden, R::down_proj);
}

}  // namespace

DecoderLayer decoder_layer(const ModelSpec& model, bool first) {
  DecoderLayer layer;
  Forward& f = layer.forward;
  layer.in = stream_into(f);
  const auto entered = f.rms_norm("input_norm", layer.in.h, first ? std::nullopt : std::optional(layer.in.z),
                                  R::input_norm, "normed1", "x");

  ValueId qkv = f.linear("qkv_proj", entered.normed, "qkv", Width::qkv, {R::q_proj, R::v_proj},
                         model.qkv_bias ? std::optional(Weight{R::q_bias, R::v_bias}) : std::nullopt);
  if (model.qk_norm) qkv = f.qk_norm("qk_norm", qkv, "qkv_normed", R::q_norm, R::k_norm);
  qkv = f.rope("rope", qkv);
  const ValueId attended = f.attention("attention", qkv, "attended");
  const ValueId y = f.linear("o_proj", attended, "attention_out", Width::hidden, R::o_proj);

  const auto behind = f.rms_norm("post_norm", entered.sum, y, R::post_norm, "normed2", "h");
  layer.out = {behind.sum, model.moe ? expert_mlp(f, behind.normed) : dense_mlp(f, behind.normed)};
  layer.x = entered.sum;
  return layer;
}

DecoderEmbedding decoder_embedding() {
  DecoderEmbedding out;
  out.embedded = out.forward.embedding("embedding", "embedded", R::embedding);
  return out;
}

DecoderEnd decoder_end() {
  DecoderEnd end;
  end.in = stream_into(end.forward);
  const auto left = end.forward.rms_norm("final_norm", end.in.h, end.in.z, R::final_norm, "final_normed", "final_x");
  end.x = left.sum, end.normed = left.normed;
  return end;
}

}  // namespace hotbunk
