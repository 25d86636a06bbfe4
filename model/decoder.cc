#include "model/decoder.h"

#include <cmath>
#include <optional>
#include <string>

#include "model/experts.h"
#include "model/latent_attention.h"

namespace hotbunk {
namespace {

using R = ParamRole;

ResidualStream stream_into(Forward& f) {
  const ValueId h = f.input("stream", Width::hidden);
  return {h, f.input("stream.added", Width::hidden)};
}

std::optional<Weight> bias_of(bool there, Weight bias) { return there ? std::optional(bias) : std::nullopt; }

/// A norm of the residual stream.
Forward::Normed stream_norm(Forward& f, const ModelSpec& model, const char* op, ResidualStream in, bool adds,
                            Weight weight, Weight bias, const char* normed, const char* sum) {
  const auto residual = adds ? std::optional(in.z) : std::nullopt;
  if (model.layer_norm) return f.layer_norm(op, in.h, residual, weight, bias, normed, sum);
  return f.rms_norm(op, in.h, residual, weight, normed, sum, model.norm_offset);
}

ValueId dense_mlp(Forward& f, const ModelSpec& model, ValueId x) {
  const std::optional<Weight> up_bias = bias_of(model.mlp_bias, R::up_bias),
                              down_bias = bias_of(model.mlp_bias, R::down_bias);
  if (!model.gated_mlp) {
    const ValueId up = f.adapted(model, "up_proj", x, "up", Width::inner, R::up_proj, up_bias);
    return f.adapted(model, "down_proj", f.gelu("gelu", up, "activated"), "mlp_out", Width::hidden, R::down_proj,
                     down_bias);
  }
  const ValueId gate_up = f.adapted(model, "gate_up_proj", x, "gate_up", Width::gate_up, {R::gate_proj, R::up_proj});
  const ValueId activated =
      model.geglu ? f.geglu("geglu", gate_up, "activated") : f.swiglu("swiglu", gate_up, "activated");
  return f.adapted(model, "down_proj", activated, "mlp_out", Width::hidden, R::down_proj);
}

/// A norm of what goes back into the stream (Gemma).
ValueId output_norm(Forward& f, const ModelSpec& model, const std::string& name, ValueId y, Weight weight) {
  return f.rms_norm(name, y, std::nullopt, weight, name + "ed", name + ".in", model.norm_offset).normed;
}

/// From the normed stream to what all heads attended.
ValueId grouped_query_attention(Forward& f, const ModelSpec& model, ValueId normed, std::int64_t window) {
  ValueId qkv = f.adapted(model, "qkv_proj", normed, "qkv", Width::qkv, {R::q_proj, R::v_proj},
                          bias_of(model.qkv_bias, {R::q_bias, R::v_bias}));
  if (model.qk_norm) qkv = f.qk_norm("qk_norm", qkv, "qkv_normed", R::q_norm, R::k_norm, model.norm_offset);
  if (!model.learned_positions) qkv = f.rope("rope", qkv, window > 0 ? model.window_rope_theta : 0.0);
  const double scale = model.query_scalar > 0.0 ? 1.0 / std::sqrt(model.query_scalar) : 0.0;
  return f.attention("attention", qkv, "attended", {window, scale, model.attention_softcap},
                     bias_of(model.attention_sinks, R::sinks));
}

}  // namespace

DecoderLayer decoder_layer(const ModelSpec& model, bool first, LayerSort sort) {
  DecoderLayer layer;
  Forward& f = layer.forward;
  layer.in = stream_into(f);
  const auto entered =
      stream_norm(f, model, "input_norm", layer.in, !first, R::input_norm, R::input_norm_bias, "normed1", "x");

  const ValueId attended = model.mla ? latent_attention(f, model, entered.normed)
                                     : grouped_query_attention(f, model, entered.normed, sort.window);
  ValueId y =
      f.adapted(model, "o_proj", attended, "attention_out", Width::hidden, R::o_proj, bias_of(model.o_bias, R::o_bias));
  if (model.output_norms) y = output_norm(f, model, "attention_out_norm", y, R::attention_out_norm);

  const auto behind =
      stream_norm(f, model, "post_norm", {entered.sum, y}, true, R::post_norm, R::post_norm_bias, "normed2", "h");
  ValueId z = sort.experts ? expert_mlp(f, model, behind.normed) : dense_mlp(f, model, behind.normed);
  if (model.output_norms) z = output_norm(f, model, "mlp_out_norm", z, R::mlp_out_norm);
  layer.out = {behind.sum, z};
  layer.x = entered.sum;
  return layer;
}

DecoderLayers::DecoderLayers(const ModelSpec& model) : model_(model) {
  for (const bool dense : {false, true})
    for (const std::int64_t window : {std::int64_t{0}, model.sliding_window})
      for (const bool first : {true, false})
        sorts_.push_back(decoder_layer(model, first, {window, model.moe.has_value() && !dense}));
}

DecoderEmbedding decoder_embedding(const ModelSpec& model) {
  DecoderEmbedding out;
  const double factor = model.scaled_embedding ? std::sqrt(static_cast<double>(model.hidden)) : 1.0;
  out.embedded = out.forward.embedding("embedding", "embedded", R::embedding, factor,
                                       bias_of(model.learned_positions, R::position_embedding));
  return out;
}

DecoderEnd decoder_end(const ModelSpec& model) {
  DecoderEnd end;
  end.in = stream_into(end.forward);
  const auto left = stream_norm(end.forward, model, "final_norm", end.in, true, R::final_norm, R::final_norm_bias,
                                "final_normed", "final_x");
  end.x = left.sum, end.normed = left.normed;
  return end;
}

}  // namespace hotbunk
