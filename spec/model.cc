#include "spec/model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "base/check.h"
#include "spec/architectures.h"
#include "spec/frozen.h"
#include "spec/parameter_roles.h"

namespace hotbunk {

std::string_view name_of(ModelFamily family) { return architecture_of(family).model_type; }

double RopeScaling::score_scale() const {
  if (mscale_all_dim == 0.0 || factor <= 1.0) return 1.0;
  const double mscale = 0.1 * mscale_all_dim * std::log(factor) + 1.0;
  return mscale * mscale;
}

std::int64_t ModelSpec::window_of(int layer) const {
  const bool full = !full_layers.empty() && full_layers[static_cast<std::size_t>(layer)];
  return full || sliding_window >= max_position ? 0 : sliding_window;
}

const LoraTarget* lora_target(ParamRole base) {
  const auto at = std::ranges::find(lora_targets, base, &LoraTarget::base);
  return at == lora_targets.end() ? nullptr : at;
}

bool ModelSpec::adapts(ParamRole base) const {
  const LoraTarget* const target = lora.on() ? lora_target(base) : nullptr;
  if (target == nullptr) return false;
  if (lora.targets == "all-linear") return true;
  return ("-" + lora.targets + "-").find(fmt::format("-{}-", target->module)) != std::string::npos;
}

ModelSpec base_of(ModelSpec model) {
  model.lora = {};
  return model;
}

namespace {

using Emit = std::function<void(ParamSpec)>;
using R = ParamRole;
using Shape = std::vector<std::int64_t>;

/// Emits the parameters of one layer; of a MoE layer's routed experts only [0, experts).
class LayerVisitor {
 public:
  LayerVisitor(const ModelSpec& model, int layer, std::int64_t experts, const Emit& emit)
      : m_(model),
        layer_(layer),
        experts_(experts),
        emit_(emit),
        prefix_(fmt::format("{}.{}.", model.family == ModelFamily::gpt2 ? "transformer.h" : "model.layers", layer)) {}

  void visit() {
    if (m_.family == ModelFamily::gpt2) return gpt2();
    if (m_.is_linear_layer(layer_)) linear_attention();
    else if (m_.mla) latent_attention();
    else attention();
    if (m_.is_moe_layer(layer_)) moe();
    else dense_mlp();
    put("input_layernorm.weight", {m_.hidden}, R::input_norm);
    if (!m_.output_norms) return put("post_attention_layernorm.weight", {m_.hidden}, R::post_norm);
    put("post_attention_layernorm.weight", {m_.hidden}, R::attention_out_norm);
    put("pre_feedforward_layernorm.weight", {m_.hidden}, R::post_norm);
    put("post_feedforward_layernorm.weight", {m_.hidden}, R::mlp_out_norm);
  }

 private:
  void put(const std::string& suffix, Shape shape, R role, int expert = -1) {
    emit_({prefix_ + suffix, std::move(shape), role, layer_, expert});
  }
  void linear(const std::string& name, std::int64_t out, std::int64_t in, R role, bool bias, R bias_role) {
    put(name + ".weight", {out, in}, role);
    if (bias) put(name + ".bias", {out}, bias_role);
  }

  void attention() {
    linear("self_attn.q_proj", (m_.gated_attention ? 2 : 1) * m_.q_rows(), m_.hidden, R::q_proj, m_.qkv_bias,
           R::q_bias);
    linear("self_attn.k_proj", m_.kv_rows(), m_.hidden, R::k_proj, m_.qkv_bias, R::k_bias);
    linear("self_attn.v_proj", m_.kv_rows(), m_.hidden, R::v_proj, m_.qkv_bias, R::v_bias);
    linear("self_attn.o_proj", m_.hidden, m_.q_rows(), R::o_proj, m_.o_bias, R::o_bias);
    if (m_.attention_sinks) put("self_attn.sinks", {m_.heads}, R::sinks);
    if (m_.qk_norm) {
      put("self_attn.q_norm.weight", {m_.head_dim}, R::q_norm);
      put("self_attn.k_norm.weight", {m_.head_dim}, R::k_norm);
    }
  }

  /// The convolution has one filter for each channel: (channels, kernel) here, (channels, 1, kernel) in files.
  void linear_attention() {
    const LinearAttentionSpec& a = *m_.linear;
    put("linear_attn.in_proj_qkv.weight", {a.convolved(), m_.hidden}, R::linear_qkv);
    put("linear_attn.in_proj_z.weight", {a.values(), m_.hidden}, R::linear_gate);
    put("linear_attn.in_proj_b.weight", {a.value_heads, m_.hidden}, R::linear_write);
    put("linear_attn.in_proj_a.weight", {a.value_heads, m_.hidden}, R::linear_decay);
    put("linear_attn.conv1d.weight", {a.convolved(), a.kernel}, R::linear_conv);
    put("linear_attn.dt_bias", {a.value_heads}, R::linear_offset);
    put("linear_attn.A_log", {a.value_heads}, R::linear_rate);
    put("linear_attn.norm.weight", {a.value_dim}, R::linear_norm);
    put("linear_attn.out_proj.weight", {m_.hidden, a.values()}, R::linear_out);
  }

  void latent_attention() {
    const MlaSpec& a = *m_.mla;
    const std::int64_t q_rows = m_.heads * (a.qk_nope_head_dim + a.qk_rope_head_dim);
    if (a.q_lora_rank > 0) {
      put("self_attn.q_a_proj.weight", {a.q_lora_rank, m_.hidden}, R::q_a_proj);
      put("self_attn.q_a_layernorm.weight", {a.q_lora_rank}, R::q_a_norm);
      put("self_attn.q_b_proj.weight", {q_rows, a.q_lora_rank}, R::q_b_proj);
    } else {
      put("self_attn.q_proj.weight", {q_rows, m_.hidden}, R::q_proj);
    }
    put("self_attn.kv_a_proj_with_mqa.weight", {a.kv_lora_rank + a.qk_rope_head_dim, m_.hidden}, R::kv_a_proj);
    put("self_attn.kv_a_layernorm.weight", {a.kv_lora_rank}, R::kv_a_norm);
    put("self_attn.kv_b_proj.weight", {m_.heads * (a.qk_nope_head_dim + a.v_head_dim), a.kv_lora_rank}, R::kv_b_proj);
    put("self_attn.o_proj.weight", {m_.hidden, m_.heads * a.v_head_dim}, R::o_proj);
  }

  void dense_mlp() {
    put("mlp.gate_proj.weight", {m_.intermediate, m_.hidden}, R::gate_proj);
    put("mlp.up_proj.weight", {m_.intermediate, m_.hidden}, R::up_proj);
    put("mlp.down_proj.weight", {m_.hidden, m_.intermediate}, R::down_proj);
  }

  void moe() {
    const MoeSpec& e = *m_.moe;
    if (m_.family == ModelFamily::gpt_oss) return gpt_oss_experts(e);
    const bool mixtral = m_.family == ModelFamily::mixtral;
    const std::string block = mixtral ? "block_sparse_moe." : "mlp.";
    put(block + "gate.weight", {e.experts, m_.hidden}, R::router);
    if (e.router_bias) put(block + "gate.e_score_correction_bias", {e.experts}, R::router_bias);
    for (int i = 0; i < experts_; ++i) {
      const std::string expert = fmt::format("{}experts.{}.", block, i);
      put(expert + (mixtral ? "w1.weight" : "gate_proj.weight"), {e.expert_intermediate, m_.hidden}, R::expert_gate, i);
      put(expert + (mixtral ? "w3.weight" : "up_proj.weight"), {e.expert_intermediate, m_.hidden}, R::expert_up, i);
      put(expert + (mixtral ? "w2.weight" : "down_proj.weight"), {m_.hidden, e.expert_intermediate}, R::expert_down, i);
    }
    if (e.shared_experts > 0) {
      const std::int64_t width = e.shared_experts * e.expert_intermediate;
      put(block + "shared_experts.gate_proj.weight", {width, m_.hidden}, R::shared_gate);
      put(block + "shared_experts.up_proj.weight", {width, m_.hidden}, R::shared_up);
      put(block + "shared_experts.down_proj.weight", {m_.hidden, width}, R::shared_down);
    }
  }

  /// Files hold all experts of a layer in one tensor, gate and up side by side; here each has its own.
  void gpt_oss_experts(const MoeSpec& e) {
    const auto each = [&](auto&& put_expert) {
      for (int i = 0; i < experts_; ++i) put_expert(fmt::format("mlp.experts.{}.", i), i);
    };
    linear("mlp.router", e.experts, m_.hidden, R::router, true, R::router_linear_bias);
    each([&](const std::string& expert, int i) {
      put(expert + "gate_proj.weight", {e.expert_intermediate, m_.hidden}, R::expert_gate, i);
      put(expert + "up_proj.weight", {e.expert_intermediate, m_.hidden}, R::expert_up, i);
      put(expert + "down_proj.weight", {m_.hidden, e.expert_intermediate}, R::expert_down, i);
      put(expert + "gate_proj.bias", {e.expert_intermediate}, R::expert_gate_bias, i);
      put(expert + "up_proj.bias", {e.expert_intermediate}, R::expert_up_bias, i);
      put(expert + "down_proj.bias", {m_.hidden}, R::expert_down_bias, i);
    });
  }

  /// Files hold q, k and v packed in `c_attn` (and every matrix transposed, Conv1D); here they are three (out, in)
  /// parameters, because layouts split them by heads.
  void gpt2() {
    put("ln_1.weight", {m_.hidden}, R::input_norm);
    put("ln_1.bias", {m_.hidden}, R::input_norm_bias);
    linear("attn.c_attn.q", m_.q_rows(), m_.hidden, R::q_proj, m_.qkv_bias, R::q_bias);
    linear("attn.c_attn.k", m_.kv_rows(), m_.hidden, R::k_proj, m_.qkv_bias, R::k_bias);
    linear("attn.c_attn.v", m_.kv_rows(), m_.hidden, R::v_proj, m_.qkv_bias, R::v_bias);
    linear("attn.c_proj", m_.hidden, m_.q_rows(), R::o_proj, m_.o_bias, R::o_bias);
    put("ln_2.weight", {m_.hidden}, R::post_norm);
    put("ln_2.bias", {m_.hidden}, R::post_norm_bias);
    linear("mlp.c_fc", m_.intermediate, m_.hidden, R::up_proj, m_.mlp_bias, R::up_bias);
    linear("mlp.c_proj", m_.hidden, m_.intermediate, R::down_proj, m_.mlp_bias, R::down_bias);
  }

  const ModelSpec& m_;
  int layer_;
  std::int64_t experts_;
  const Emit& emit_;
  std::string prefix_;
};

void visit_front(const ModelSpec& m, const Emit& emit) {
  const bool gpt = m.family == ModelFamily::gpt2;
  emit({gpt ? "transformer.wte.weight" : "model.embed_tokens.weight", {m.vocab, m.hidden}, R::embedding, -1, -1});
  if (m.learned_positions) emit({"transformer.wpe.weight", {m.max_position, m.hidden}, R::position_embedding, -1, -1});
}

void visit_back(const ModelSpec& m, const Emit& emit) {
  const std::string norm = m.family == ModelFamily::gpt2 ? "transformer.ln_f" : "model.norm";
  emit({norm + ".weight", {m.hidden}, R::final_norm, -1, -1});
  if (m.layer_norm) emit({norm + ".bias", {m.hidden}, R::final_norm_bias, -1, -1});
  if (!m.tie_embeddings) emit({"lm_head.weight", {m.vocab, m.hidden}, R::lm_head, -1, -1});
}

bool is_routed(R role) { return rule_of(role).stack > 0; }

/// Sum of numel with one routed expert standing for `experts` of them. long double, so that sizes read from a file
/// can be judged before integers overflow.
long double count(const ModelSpec& m, std::int64_t experts) {
  long double sum = 0, weight = 1;
  const Emit add = [&](const ParamSpec& p) {
    long double numel = weight * (is_routed(p.role) ? static_cast<long double>(experts) : 1.0L);
    for (std::int64_t extent : p.shape) numel *= static_cast<long double>(extent);
    sum += numel;
  };
  visit_front(m, add);
  visit_back(m, add);
  if (m.linear) {  // one layer of each kind stands for all of it
    std::int64_t linear = 0;
    int first[] = {-1, -1};
    for (int layer = 0; layer < m.layers; ++layer) {
      const bool is = m.is_linear_layer(layer);
      linear += is ? 1 : 0;
      if (first[is ? 1 : 0] < 0) first[is ? 1 : 0] = layer;
    }
    weight = static_cast<long double>(m.layers - linear);
    if (first[0] >= 0) LayerVisitor(m, first[0], 1, add).visit();
    weight = static_cast<long double>(linear);
    if (first[1] >= 0) LayerVisitor(m, first[1], 1, add).visit();
    return sum;
  }
  const std::int64_t dense = m.moe ? std::min(m.moe->first_dense_layers, m.layers) : m.layers;
  weight = static_cast<long double>(dense);
  if (dense > 0) LayerVisitor(m, 0, 1, add).visit();
  weight = static_cast<long double>(m.layers - dense);
  if (m.layers > dense) LayerVisitor(m, static_cast<int>(dense), 1, add).visit();
  return sum;
}

}  // namespace

std::vector<ParamSpec> parameters_of(const ModelSpec& model) {
  std::vector<ParamSpec> all;
  const Emit add = [&](ParamSpec p) { all.push_back(std::move(p)); };
  visit_front(model, add);
  for (int layer = 0; layer < model.layers; ++layer)
    LayerVisitor(model, layer, model.moe ? model.moe->experts : 0, add).visit();
  visit_back(model, add);
  if (const auto patterns = frozen_patterns(model); !patterns.empty())
    for (ParamSpec& p : all) p.frozen = is_frozen(patterns, p.name);
  return all;
}

std::vector<ParamSpec> adapters_of(const ModelSpec& model) {
  std::vector<ParamSpec> all;
  if (!model.lora.on()) return all;
  const std::int64_t rank = model.lora.rank;
  const std::string suffix = "weight";
  const Emit add = [&](const ParamSpec& p) {
    if (!model.adapts(p.role)) return;
    const LoraTarget& target = *lora_target(p.role);
    const std::string module = p.name.substr(0, p.name.size() - suffix.size());
    all.push_back({module + "lora_A.weight", {rank, p.shape[1]}, target.a, p.layer, -1});
    all.push_back({module + "lora_B.weight", {p.shape[0], rank}, target.b, p.layer, -1});
  };
  for (int layer = 0; layer < model.layers; ++layer) LayerVisitor(model, layer, 0, add).visit();
  return all;
}

long double approximate_parameter_count(const ModelSpec& model) {
  return count(model, model.moe ? model.moe->experts : 0);
}

std::int64_t parameter_count(const ModelSpec& model) {
  const long double n = approximate_parameter_count(model);
  HB_CHECK(n < 9.0e18L, "model {} has more parameters than 64 bits count", model.name);
  return static_cast<std::int64_t>(n);
}

std::int64_t active_parameter_count(const ModelSpec& model) {
  return static_cast<std::int64_t>(count(model, model.moe ? model.moe->experts_per_token : 0));
}

}  // namespace hotbunk
