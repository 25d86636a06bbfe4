#include "planner/rl/engine_parts.h"

#include <algorithm>

#include "planner/rl/rl_model.h"

namespace hotbunk {
namespace {

double attention_elements(const ModelSpec& m) {
  const auto h = static_cast<double>(m.hidden), heads = static_cast<double>(m.heads);
  const double gates = m.gated_attention ? heads : 0.0, full = m.attending_share();
  const double linear =
      m.linear ? h * static_cast<double>(m.linear->convolved() + 2 * m.linear->values() + 2 * m.linear->value_heads)
               : 0.0;
  if (!m.mla)  // of the mean layer
    return full * h * static_cast<double>(m.head_dim) * (2.0 * heads + gates + 2.0 * static_cast<double>(m.kv_heads)) +
           (1.0 - full) * linear;
  const MlaSpec& a = *m.mla;
  const auto nope = static_cast<double>(a.qk_nope_head_dim), rope = static_cast<double>(a.qk_rope_head_dim),
             v = static_cast<double>(a.v_head_dim), q = static_cast<double>(a.q_lora_rank),
             kv = static_cast<double>(a.kv_lora_rank);
  const double queries = q > 0 ? h * q + q * heads * (nope + rope) : h * heads * (nope + rope);
  return queries + h * (kv + rope) + kv * heads * (nope + v) + heads * v * h;
}

/// The model with no layers, or with one of a kind.
ModelSpec with_layers(ModelSpec m, std::int64_t layers, bool dense) {
  m.layers = layers;
  if (m.moe) m.moe->first_dense_layers = dense ? layers : 0;
  return m;
}

bool is_product(ParamRole r) {
  using R = ParamRole;
  constexpr R products[] = {R::q_proj,    R::k_proj,      R::v_proj,     R::o_proj,      R::q_a_proj,
                            R::q_b_proj,  R::kv_a_proj,   R::kv_b_proj,  R::gate_proj,   R::up_proj,
                            R::down_proj, R::expert_gate, R::expert_up,  R::expert_down, R::shared_gate,
                            R::shared_up, R::shared_down, R::linear_qkv, R::linear_gate, R::linear_out};
  return std::find(std::begin(products), std::end(products), r) != std::end(products);
}

/// Of a model of one layer: all that its layer multiplies tokens with, but the router.
void count_products(ModelSpec m, double& elements, double& tensors) {
  const double experts = m.moe ? static_cast<double>(m.moe->experts) : 0.0;
  if (m.moe) m.moe->experts = std::min<std::int64_t>(m.moe->experts, 1);  // it stands for all
  for (const ParamSpec& p : parameters_of(m)) {
    if (!is_product(p.role)) continue;
    const double times = p.expert >= 0 ? experts : 1.0;
    elements += times * static_cast<double>(p.numel()), tensors += times;
  }
}

/// Of a model of which `one` is one layer, and `layers` are alike.
void count_adapters(ModelSpec one, double layers, ModelCounts& c) {
  if (!one.lora.on()) return;
  const double experts = one.moe ? static_cast<double>(one.moe->experts) : 0.0;
  if (one.moe) one.moe->experts = std::min<std::int64_t>(one.moe->experts, 1);  // it stands for all
  const auto times = [&](const ParamSpec& p) { return p.expert >= 0 ? layers * experts : layers; };
  for (const ParamSpec& p : adapters_of(one)) c.adapters += times(p) * static_cast<double>(p.numel());
  for (const ParamSpec& p : parameters_of(one)) {
    if (!one.adapts(p.role)) continue;
    c.adapted_matrices += times(p), c.adapted_elements += times(p) * static_cast<double>(p.numel());
  }
}

}  // namespace

ModelCounts counts_of(const ModelSpec& m) {
  const auto h = static_cast<double>(m.hidden), table = static_cast<double>(m.vocab) * h;
  const bool moe = m.moe && m.moe->experts > 0;
  ModelCounts c;
  c.parameters = static_cast<double>(parameter_count(m));
  c.active = static_cast<double>(active_parameter_count(m));
  c.ends = table * (m.tie_embeddings ? 1.0 : 2.0);
  const ModelSpec ends = with_layers(m, 0, true), one_dense = with_layers(m, 1, true);
  const auto both = static_cast<double>(parameter_count(ends));
  c.front = table + (m.learned_positions ? static_cast<double>(m.max_position) * h : 0.0);
  c.back = both - c.front;
  c.tied_head = m.tie_embeddings ? table : 0.0;
  c.attention = attention_elements(m);
  c.dense_layer = static_cast<double>(parameter_count(one_dense)) - both;
  c.tensors = tensor_count(m);
  c.dense_layer_tensors = tensor_count(one_dense) - tensor_count(ends);
  count_products(one_dense, c.dense_layer_products, c.dense_product_tensors);
  if (m.linear) {  // the mean of all layers
    const auto layers = static_cast<double>(m.layers);
    double products = 0.0, tensors = 0.0;
    count_products(m, products, tensors);
    c.dense_layer = (c.parameters - both) / layers, c.dense_layer_tensors = (c.tensors - tensor_count(ends)) / layers;
    c.dense_layer_products = products / layers, c.dense_product_tensors = tensors / layers;
  }
  const std::int64_t dense = moe ? std::min(m.moe->first_dense_layers, m.layers) : m.layers;
  count_adapters(one_dense, static_cast<double>(dense), c);
  if (!moe) return c;
  const ModelSpec one_moe = with_layers(m, 1, false);
  count_adapters(one_moe, static_cast<double>(m.layers - dense), c);
  c.moe_layer = static_cast<double>(parameter_count(one_moe)) - both;
  c.moe_layer_tensors = tensor_count(one_moe) - tensor_count(ends);
  count_products(one_moe, c.moe_layer_products, c.moe_product_tensors);
  c.experts = 3.0 * h * static_cast<double>(m.moe->expert_intermediate * m.moe->experts);
  return c;
}

std::int64_t stage_layers(RolloutEngine engine, std::int64_t layers, std::int64_t pp, std::int64_t i) {
  const std::int64_t base = layers / pp, rest = layers % pp, end = engine == RolloutEngine::sglang ? pp : pp - 1;
  return base + (i >= end - rest && i < end ? 1 : 0);
}

double token_shares(RolloutEngine engine, const RolloutPoint& r) {
  return engine == RolloutEngine::hotbunk ? 1.0 : static_cast<double>(r.cp);
}

double cache_shares(RolloutEngine engine, const RolloutPoint& r) {
  return static_cast<double>(engine == RolloutEngine::sglang ? r.attention_dp : r.attention_dp * r.cp);
}

double cache_bytes(const ModelSpec& m, const RolloutPoint& r, double layers, double element, double shares) {
  if (m.mla) return layers * static_cast<double>(m.mla->kv_lora_rank + m.mla->qk_rope_head_dim) * element / shares;
  const double heads = std::max(static_cast<double>(m.kv_heads) / static_cast<double>(r.attention_tp()), 1.0);
  return m.attending_share() * layers * heads * static_cast<double>(m.head_dim) * 2.0 * element / shares;
}

double attention_flops_per_pair(const ModelSpec& m, bool decode) {
  const auto heads = static_cast<double>(m.heads);
  if (!m.mla) return m.attending_share() * 4.0 * heads * static_cast<double>(m.head_dim);
  const MlaSpec& a = *m.mla;
  const std::int64_t widths =
      decode ? 2 * a.kv_lora_rank + a.qk_rope_head_dim : a.qk_nope_head_dim + a.qk_rope_head_dim + a.v_head_dim;
  return 2.0 * heads * static_cast<double>(widths);
}

double state_bytes(const ModelSpec& m, const RolloutPoint& r, double element) {
  if (!m.linear) return 0.0;
  const double one = 4.0 * static_cast<double>(m.linear->state()) + element * static_cast<double>(m.linear->tail());
  return (1.0 - m.attending_share()) * one / static_cast<double>(r.attention_tp());
}

double mlp_elements(const ModelSpec& m) {
  return (m.gated_mlp ? 3.0 : 2.0) * static_cast<double>(m.hidden) * static_cast<double>(m.intermediate);
}

double stage_elements(const ModelCounts& c, RolloutEngine engine, const RolloutPoint& r, const RolloutStage& s) {
  // A rank of ours that has sequences of its own has all of what is no MLP and no expert.
  const bool apart = engine == RolloutEngine::hotbunk && r.attention_dp > 1;
  const double ends = (s.first ? c.front : 0.0) + (s.last ? c.back : 0.0) + (s.last && !s.first ? c.tied_head : 0.0);
  const double alone = apart ? ends * (1.0 - 1.0 / static_cast<double>(r.tp)) : 0.0;
  const double whole = s.dense() * c.dense_layer + s.moe * c.moe_layer + (s.first ? c.front : 0.0) +
                       (s.last ? c.back : 0.0) + (s.last && !s.first ? c.tied_head : 0.0);
  const double attention = c.attention * s.layers,
               elsewhere = s.moe * c.experts * (1.0 - 1.0 / token_shares(engine, r));
  return alone + attention / static_cast<double>(r.attention_tp()) +
         (whole - attention - elsewhere) / static_cast<double>(r.tp);
}

double stage_products(const ModelCounts& c, RolloutEngine engine, const RolloutPoint& r, const RolloutStage& s) {
  const double whole = s.dense() * c.dense_layer_products + s.moe * c.moe_layer_products;
  const double attention = c.attention * s.layers,
               elsewhere = s.moe * c.experts * (1.0 - 1.0 / token_shares(engine, r));
  return attention / static_cast<double>(r.attention_tp()) +
         (whole - attention - elsewhere) / static_cast<double>(r.tp);
}

}  // namespace hotbunk
