#include "lowering/decoder.h"

#include <fmt/format.h>

#include <tuple>
#include <utility>

namespace hotbunk {
namespace {

using R = ParamRole;

}  // namespace

Op& with_heads(Op& op, std::int64_t heads, std::int64_t kv_heads, std::int64_t head_dim) {
  return with(with(with(op, Attr::heads, heads), Attr::kv_heads, kv_heads), Attr::head_dim, head_dim);
}

Op& with_rope(Op& op, const ModelSpec& model) {
  with(op, Attr::rope_theta, model.rope_theta);
  if (model.rope_scaling) {
    with(op, Attr::rope_factor, model.rope_scaling->factor);
    with(op, Attr::rope_low, model.rope_scaling->low_freq_factor);
    with(op, Attr::rope_high, model.rope_scaling->high_freq_factor);
    with(op, Attr::rope_original, model.rope_scaling->original_max_position);
  }
  return op;
}

Decoder::Decoder(const Scenario& s, ProgramBuilder& b, std::string prefix, TokenFeeds feeds)
    : scenario_(s),
      model_(s.model),
      b_(b),
      prefix_(std::move(prefix)),
      feeds_(feeds),
      compute_(s.train.precision.params) {}

std::string Decoder::layer_name(int layer, const char* what, const std::string& suffix) const {
  return fmt::format("{}layers.{}.{}{}", prefix_, layer, what, suffix);
}

Tensor Decoder::activation(const std::string& name, std::initializer_list<Dim> shape, DType dtype) {
  return b_.transient(name, dtype, shape, Category::activations);
}

Op& Decoder::op(OpKind kind, std::string name, std::vector<Tensor> inputs, std::vector<Tensor> outputs) {
  return b_.emit(kind, streams::compute, std::move(name), std::move(inputs), std::move(outputs));
}

Tensor Decoder::embed(const WholeUnit& root) {
  b_.begin_call(prefix_ + "embed", prefix_);
  const Tensor x = activation(prefix_ + "embedded", {T(), fixed(model_.hidden)});
  Op& e = op(OpKind::embedding, prefix_ + "embedding", {root.matrix(b_, R::embedding), feeds_.ids}, {x});
  with(with(e, Attr::vocab_begin, std::int64_t{0}), Attr::vocab_end, model_.vocab);
  return x;
}

Decoder::Stream Decoder::layer_forward(const WholeUnit& w, int layer, const Stream& in, LayerActivations& kept) {
  const Forward f = forward(w, layer, in, false);
  kept = f.kept;
  return f.out;
}

Decoder::Forward Decoder::forward(const WholeUnit& w, int layer, const Stream& in, bool again) {
  std::vector<Input> inputs = {w.buffer, in.h};
  if (in.z) inputs.emplace_back(*in.z);
  return b_.call(prefix_ + (again ? "layer.recompute" : "layer.forward"), w.unit->kind, layer_name(layer, ""),
                 std::move(inputs), [&] { return write_forward(w, layer, in, again ? ".recomputed" : ""); });
}

Decoder::Forward Decoder::write_forward(const WholeUnit& w, int layer, const Stream& in, const std::string& suffix) {
  LayerActivations a;
  const auto name = [&](const char* what) { return layer_name(layer, what, suffix); };
  const Dim H = fixed(model_.hidden), I = fixed(model_.intermediate);
  a.normed1 = activation(name("normed1"), {T(), H});
  a.rstd1 = activation(name("rstd1"), {T()}, DType::f32);
  const Tensor norm1 = w.vector(b_, R::input_norm);
  if (in.z) {
    a.x = activation(name("x"), {T(), H});
    with(op(OpKind::rms_norm, name("input_norm"), {in.h, norm1, *in.z}, {a.normed1, a.rstd1, a.x}), Attr::eps,
         model_.norm_eps);
  } else {
    a.x = in.h;
    with(op(OpKind::rms_norm, name("input_norm"), {in.h, norm1}, {a.normed1, a.rstd1}), Attr::eps, model_.norm_eps);
  }
  attention_forward(w, layer, a, suffix);

  const Tensor y = activation(name("attention_out"), {T(), H});
  op(OpKind::linear, name("o_proj"), {a.attended, w.matrix(b_, R::o_proj)}, {y});
  a.h = activation(name("h"), {T(), H});
  a.normed2 = activation(name("normed2"), {T(), H});
  a.rstd2 = activation(name("rstd2"), {T()}, DType::f32);
  with(op(OpKind::rms_norm, name("post_norm"), {a.x, w.vector(b_, R::post_norm), y}, {a.normed2, a.rstd2, a.h}),
       Attr::eps, model_.norm_eps);

  a.gate_up = activation(name("gate_up"), {T(), fixed(2 * model_.intermediate)});
  op(OpKind::linear, name("gate_up_proj"), {a.normed2, w.matrix(b_, R::gate_proj, R::up_proj)}, {a.gate_up});
  a.activated = activation(name("activated"), {T(), I});
  op(OpKind::swiglu, name("swiglu"), {a.gate_up}, {a.activated});
  if (!suffix.empty()) return {{}, a};  // a recomputed run needs nothing behind the activation
  const Tensor z = activation(name("mlp_out"), {T(), H});
  op(OpKind::linear, name("down_proj"), {a.activated, w.matrix(b_, R::down_proj)}, {z});
  return {{a.h, z}, a};
}

void Decoder::attention_forward(const WholeUnit& w, int layer, LayerActivations& a, const std::string& suffix) {
  const auto name = [&](const char* what) { return layer_name(layer, what, suffix); };
  const ModelSpec& m = model_;
  const Dim Q = fixed(m.q_rows() + 2 * m.kv_rows());
  a.qkv_raw = activation(name("qkv"), {T(), Q});
  std::vector<Tensor> inputs = {a.normed1, w.matrix(b_, R::q_proj, R::v_proj)};
  if (m.qkv_bias) inputs.push_back(w.vector(b_, R::q_bias, R::v_bias));
  op(OpKind::linear, name("qkv_proj"), std::move(inputs), {a.qkv_raw});
  a.qkv = a.qkv_raw;
  if (m.qk_norm) {
    a.qkv = activation(name("qkv_normed"), {T(), Q});
    a.qk_rstd = activation(name("qk_rstd"), {T(), fixed(m.heads + m.kv_heads)}, DType::f32);
    Op& n = op(OpKind::qk_norm, name("qk_norm"), {a.qkv_raw, w.vector(b_, R::q_norm), w.vector(b_, R::k_norm)},
               {a.qkv, a.qk_rstd});
    with(with_heads(n, m.heads, m.kv_heads, m.head_dim), Attr::eps, m.norm_eps);
  }
  with_rope(
      with_heads(op(OpKind::rope, name("rope"), {a.qkv, feeds_.positions}, {a.qkv}), m.heads, m.kv_heads, m.head_dim),
      m);
  a.attended = activation(name("attended"), {T(), fixed(m.q_rows())});
  a.lse = activation(name("lse"), {T(), fixed(m.heads)}, DType::f32);
  with_heads(op(OpKind::attention, name("attention"), {a.qkv, feeds_.cu_seqlens}, {a.attended, a.lse}), m.heads,
             m.kv_heads, m.head_dim);
}

void Decoder::recompute_layer(const WholeUnit& w, int layer, LayerActivations& kept) {
  kept = forward(w, layer, {kept.x, std::nullopt}, true).kept;
}

void Decoder::recompute_selective(const WholeUnit& w, int layer, LayerActivations& kept) {
  const auto write = [&] {
    const auto name = [&](const char* what) { return layer_name(layer, what, ".recomputed"); };
    const Dim H = fixed(model_.hidden);
    const auto norm = [&](const char* what, ParamRole weight, const Tensor& x) {
      const Tensor y = activation(name(what), {T(), H});
      const Tensor rstd = activation(name(what) + ".rstd", {T()}, DType::f32);
      with(op(OpKind::rms_norm, name(what), {x, w.vector(b_, weight)}, {y, rstd}), Attr::eps, model_.norm_eps);
      return std::pair(y, rstd);
    };
    const auto [normed1, rstd1] = norm("normed1", R::input_norm, kept.x);
    const auto [normed2, rstd2] = norm("normed2", R::post_norm, kept.h);
    const Tensor activated = activation(name("activated"), {T(), fixed(model_.intermediate)});
    op(OpKind::swiglu, name("swiglu"), {kept.gate_up}, {activated});
    return std::array{normed1, rstd1, normed2, rstd2, activated};
  };
  const auto made = b_.call(prefix_ + "layer.recompute", w.unit->kind, layer_name(layer, ""),
                            {w.buffer, kept.x, kept.h, kept.gate_up}, write);
  std::tie(kept.normed1, kept.rstd1, kept.normed2, kept.rstd2, kept.activated) = std::tuple_cat(made);
}

void Decoder::layer_backward(const WholeUnit& w, const WholeUnit& dw, int layer, const LayerActivations& a,
                             const Tensor& g, bool accumulate) {
  std::vector<Input> inputs = {w.buffer,   dw.buffer, g,   a.x,       a.normed1, a.rstd1,   a.qkv_raw,  a.qkv,
                               a.attended, a.lse,     a.h, a.normed2, a.rstd2,   a.gate_up, a.activated};
  if (model_.qk_norm) inputs.emplace_back(a.qk_rstd);
  b_.call(prefix_ + "layer.backward", w.unit->kind, layer_name(layer, ""), std::move(inputs),
          [&] { write_backward(w, dw, layer, a, g, accumulate); });
}

void Decoder::write_backward(const WholeUnit& w, const WholeUnit& dw, int layer, const LayerActivations& a,
                             const Tensor& g, bool accumulate) {
  const auto name = [&](const char* what) { return layer_name(layer, what); };
  const std::int64_t acc = accumulate ? 1 : 0;
  const Dim H = fixed(model_.hidden), I = fixed(model_.intermediate);
  const Tensor w_down = w.matrix(b_, R::down_proj), w_gate_up = w.matrix(b_, R::gate_proj, R::up_proj);

  const Tensor d_activated = activation(name("d_activated"), {T(), I});
  op(OpKind::linear_dgrad, name("down_proj.dgrad"), {g, w_down}, {d_activated});
  with(op(OpKind::linear_wgrad, name("down_proj.wgrad"), {g, a.activated}, {dw.matrix(b_, R::down_proj)}),
       Attr::accumulate, acc);
  const Tensor d_gate_up = activation(name("d_gate_up"), {T(), fixed(2 * model_.intermediate)});
  op(OpKind::swiglu_backward, name("swiglu.backward"), {d_activated, a.gate_up}, {d_gate_up});
  with(op(OpKind::linear_wgrad, name("gate_up_proj.wgrad"), {d_gate_up, a.normed2},
          {dw.matrix(b_, R::gate_proj, R::up_proj)}),
       Attr::accumulate, acc);
  const Tensor d_normed2 = activation(name("d_normed2"), {T(), H});
  op(OpKind::linear_dgrad, name("gate_up_proj.dgrad"), {d_gate_up, w_gate_up}, {d_normed2});
  Op& n = op(OpKind::rms_norm_backward, name("post_norm.backward"),
             {d_normed2, a.h, w.vector(b_, R::post_norm), a.rstd2}, {g, dw.vector(b_, R::post_norm)});
  with(with(n, Attr::residual, std::int64_t{1}), Attr::accumulate, acc);

  attention_backward(w, dw, layer, a, g, accumulate);
}

void Decoder::attention_backward(const WholeUnit& w, const WholeUnit& dw, int layer, const LayerActivations& a,
                                 const Tensor& g, bool accumulate) {
  const auto name = [&](const char* what) { return layer_name(layer, what); };
  const std::int64_t acc = accumulate ? 1 : 0;
  const ModelSpec& m = model_;
  const Tensor d_attended = activation(name("d_attended"), {T(), fixed(m.q_rows())});
  op(OpKind::linear_dgrad, name("o_proj.dgrad"), {g, w.matrix(b_, R::o_proj)}, {d_attended});
  with(op(OpKind::linear_wgrad, name("o_proj.wgrad"), {g, a.attended}, {dw.matrix(b_, R::o_proj)}), Attr::accumulate,
       acc);

  const Tensor d_qkv = activation(name("d_qkv"), {T(), fixed(m.q_rows() + 2 * m.kv_rows())});
  with_heads(op(OpKind::attention_backward, name("attention.backward"),
                {d_attended, a.qkv, a.attended, a.lse, feeds_.cu_seqlens}, {d_qkv}),
             m.heads, m.kv_heads, m.head_dim);
  with_rope(with_heads(op(OpKind::rope_backward, name("rope.backward"), {d_qkv, feeds_.positions}, {d_qkv}), m.heads,
                       m.kv_heads, m.head_dim),
            m);
  if (m.qk_norm) {
    Op& n = op(OpKind::qk_norm_backward, name("qk_norm.backward"),
               {d_qkv, a.qkv_raw, w.vector(b_, R::q_norm), w.vector(b_, R::k_norm), a.qk_rstd},
               {d_qkv, dw.vector(b_, R::q_norm), dw.vector(b_, R::k_norm)});
    with(with(with_heads(n, m.heads, m.kv_heads, m.head_dim), Attr::eps, m.norm_eps), Attr::accumulate, acc);
  }
  std::vector<Tensor> outputs = {dw.matrix(b_, R::q_proj, R::v_proj)};
  if (m.qkv_bias) outputs.push_back(dw.vector(b_, R::q_bias, R::v_bias));
  with(op(OpKind::linear_wgrad, name("qkv_proj.wgrad"), {d_qkv, a.normed1}, std::move(outputs)), Attr::accumulate, acc);
  const Tensor d_normed1 = activation(name("d_normed1"), {T(), fixed(m.hidden)});
  op(OpKind::linear_dgrad, name("qkv_proj.dgrad"), {d_qkv, w.matrix(b_, R::q_proj, R::v_proj)}, {d_normed1});
  Op& n = op(OpKind::rms_norm_backward, name("input_norm.backward"),
             {d_normed1, a.x, w.vector(b_, R::input_norm), a.rstd1}, {g, dw.vector(b_, R::input_norm)});
  with(with(n, Attr::residual, std::int64_t{1}), Attr::accumulate, acc);
}

Decoder::FinalNorm Decoder::final_norm(const WholeUnit& root, const Stream& in) {
  b_.begin_call(prefix_ + "final_norm", prefix_);
  FinalNorm f;
  const Dim H = fixed(model_.hidden);
  f.normed = activation(prefix_ + "final_normed", {T(), H});
  f.rstd = activation(prefix_ + "final_rstd", {T()}, DType::f32);
  std::vector<Tensor> inputs = {in.h, root.vector(b_, R::final_norm)}, outputs = {f.normed, f.rstd};
  f.x = in.h;
  if (in.z) {
    f.x = activation(prefix_ + "final_x", {T(), H});
    inputs.push_back(*in.z);
    outputs.push_back(f.x);
  }
  with(op(OpKind::rms_norm, prefix_ + "final_norm", std::move(inputs), std::move(outputs)), Attr::eps, model_.norm_eps);
  return f;
}

}  // namespace hotbunk
