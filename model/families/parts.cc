#include "model/families/parts.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "spec/json_read.h"

namespace hotbunk {
namespace {

using nlohmann::json;
using R = ParamRole;

void read_activation(ConfigReader& c, ModelSpec& m) {
  const char* known = m.geglu ? "gelu_pytorch_tanh" : "silu";
  // Gemma's first configs say gelu in hidden_act, which transformers does not read.
  const char* key = m.geglu ? "hidden_activation" : "hidden_act";
  const std::string activation = c.text(key, known);
  if (activation != known)
    c.report("E412", key, fmt::format("activation \"{}\" is not known for this architecture", activation.substr(0, 50)),
             {}, fmt::format("the gated MLP of this family uses {}", known));
}

void read_windows(ConfigReader& c, const Windows& w, ModelSpec& m) {
  if (!w.any || (w.if_used && !c.boolean("use_sliding_window", false))) return;
  m.sliding_window = c.integer("sliding_window", c.names("sliding_window") ? 0 : w.absent, 0, c.max_tokens);
  if (m.sliding_window == 0 || !c.ok() || !w.by_layer) return;
  const std::int64_t first = w.if_used ? c.integer("max_window_layers", 28, 0, c.max_layers) : 0;
  const std::int64_t period = w.period_key.empty() ? w.period : c.integer(w.period_key, w.period, 1, c.max_layers);
  std::vector<bool> full;
  for (std::int64_t layer = 0; layer < m.layers; ++layer)
    full.push_back(period > 0 ? (layer + 1) % period == 0 : layer < first);
  if (auto said = c.layer_types(m.layers, "full_attention", "sliding_attention")) full = std::move(*said);
  if (std::ranges::count(full, false) == 0) m.sliding_window = 0;
  else if (std::ranges::count(full, true) > 0) m.full_layers = std::move(full);
}

void write_windows(const ModelSpec& m, const Windows& w, json& c) {
  if (m.sliding_window == 0) {
    if (w.any && !w.if_used && w.absent > 0) c["sliding_window"] = nullptr;
    return;
  }
  c["sliding_window"] = m.sliding_window, c["use_sliding_window"] = true;
  if (!w.by_layer) return;
  json types = json::array();
  for (std::int64_t layer = 0; layer < m.layers; ++layer)
    types.push_back(!m.full_layers.empty() && m.full_layers[static_cast<std::size_t>(layer)] ? "full_attention"
                                                                                             : "sliding_attention");
  c["layer_types"] = std::move(types);
}

/// What layers with the window turn by.
void read_window_rotation(ConfigReader& c, ModelSpec& m, const json& by_type) {
  const auto at = by_type.find("sliding_attention");
  if (at == by_type.end() || !at->is_object()) return;
  if (at->contains("rope_theta"))
    m.window_rope_theta = c.checked_real((*at)["rope_theta"], "rope_parameters", 1e4, c.least_theta, c.most_theta);
  if (at->value("rope_type", json("default")) != "default")
    c.report("E412", "rope_parameters", "a scaled rotation of layers with the window is not known", {},
             "rope_type of sliding_attention is default in published models");
}

/// rope_parameters (transformers 5), of Gemma-3 by type of layer, or rope_theta and rope_scaling (4).
void read_rotation(ConfigReader& c, const Rotation& r, ModelSpec& m) {
  const double theta = c.real("rope_theta", r.theta, c.least_theta, c.most_theta);
  m.rope_theta = theta;
  const std::string_view key = c.find("rope_parameters") != nullptr ? "rope_parameters" : "rope_scaling";
  const json* rope = c.find(key);
  if (r.by_layer_type) {
    m.window_rope_theta = c.real("rope_local_base_freq", 10000.0, c.least_theta, c.most_theta);
    if (key == "rope_parameters" && rope->is_object()) read_window_rotation(c, m, *rope);
    if (rope != nullptr && rope->contains("full_attention")) rope = &(*rope)["full_attention"];
  }
  if (rope == nullptr) {
    if (r.scaling != nullptr) m.rope_scaling = r.scaling();
    return;
  }
  if (!rope->is_object()) {
    c.report("E411", key, fmt::format("config key \"{}\" is {}, expected an object", key, describe_json(*rope)));
    return;
  }
  const auto number = [&](const char* name, double fallback, double low, double high) {
    const auto at = rope->find(name);
    return at == rope->end() || at->is_null() ? fallback : c.checked_real(*at, name, fallback, low, high);
  };
  m.rope_theta = number("rope_theta", theta, c.least_theta, c.most_theta);
  std::string type = "default";
  for (const char* spelling : {"type", "rope_type"}) {
    const auto at = rope->find(spelling);
    if (at == rope->end() || at->is_null()) continue;
    if (at->is_string()) type = at->get<std::string>();
    else c.report("E411", key, fmt::format("{} is {}, expected a string", spelling, describe_json(*at)));
  }
  if (type == "default") return;
  // Hugging Face's ROPE_INIT_FUNCTIONS.
  const std::vector<std::string> known = {"default", "linear", "dynamic", "yarn", "longrope", "llama3"};
  if (std::ranges::find(known, type) == known.end()) {
    const std::string nearest = nearest_name(type, known);
    c.report("E412", key, fmt::format("rope_type \"{}\" is not known", type.substr(0, 100)),
             {fmt::format("known: {}", fmt::join(known, ", "))},
             nearest.empty() ? "" : fmt::format("did you mean \"{}\"?", nearest));
    return;
  }
  RopeScaling scaling;
  scaling.type = type;
  if (type == "llama3") {
    scaling.low_freq_factor = number("low_freq_factor", 1.0, 1.0 / c.most_factor, c.most_factor);
    scaling.high_freq_factor = number("high_freq_factor", 4.0, 1.0 / c.most_factor, c.most_factor);
    if (scaling.high_freq_factor <= scaling.low_freq_factor)
      c.report("E413", key, "high_freq_factor is not above low_freq_factor",
               {fmt::format("the frequencies between are divided by their difference, {} - {} = {}",
                            scaling.high_freq_factor, scaling.low_freq_factor,
                            scaling.high_freq_factor - scaling.low_freq_factor)});
  }
  const double positions = type == "yarn" ? static_cast<double>(m.max_position) : 8192.0;
  scaling.original_max_position = static_cast<std::int64_t>(
      number("original_max_position_embeddings", positions, 1.0, static_cast<double>(c.max_tokens)));
  const double longer = static_cast<double>(m.max_position) / static_cast<double>(scaling.original_max_position);
  scaling.factor = number("factor", type == "yarn" ? std::max(1.0, longer) : 1.0, 1.0,
                          c.most_factor);  // a smaller one would shrink positions
  if (type == "yarn") {
    scaling.beta_fast = number("beta_fast", 32.0, 1.0 / c.most_factor, c.most_factor);
    scaling.beta_slow = number("beta_slow", 1.0, 1.0 / c.most_factor, c.most_factor);
    if (const auto at = rope->find("truncate"); at != rope->end() && at->is_boolean())
      scaling.truncate = at->get<bool>();
    // By the paper; with both mscales their ratio (transformers: _compute_yarn_parameters).
    const auto of = [&](double mscale) {
      return scaling.factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(scaling.factor) + 1.0;
    };
    const double mscale = number("mscale", 0.0, 0.0, c.most_factor),
                 of_all = number("mscale_all_dim", 0.0, 0.0, c.most_factor);
    scaling.mscale_all_dim = of_all;
    scaling.attention_factor =
        number("attention_factor", mscale > 0.0 && of_all > 0.0 ? of(mscale) / of(of_all) : of(1.0),
               1.0 / c.most_factor, c.most_factor);
  }
  m.rope_scaling = scaling;
}

json written_rotation(const ModelSpec& m, const Rotation& r) {
  json rope = {{"rope_type", "default"}, {"rope_theta", m.rope_theta}};
  if (r.part > 0.0)
    rope["partial_rotary_factor"] =
        m.rotary_dim > 0 ? static_cast<double>(m.rotary_dim) / static_cast<double>(m.head_dim) : 1.0;
  if (!m.rope_scaling) return rope;
  rope["rope_type"] = m.rope_scaling->type;
  rope["factor"] = m.rope_scaling->factor;
  rope["original_max_position_embeddings"] = m.rope_scaling->original_max_position;
  if (m.rope_scaling->type == "llama3") {
    rope["low_freq_factor"] = m.rope_scaling->low_freq_factor;
    rope["high_freq_factor"] = m.rope_scaling->high_freq_factor;
  }
  if (m.rope_scaling->type == "yarn") {
    rope["beta_fast"] = m.rope_scaling->beta_fast;
    rope["beta_slow"] = m.rope_scaling->beta_slow;
    rope["truncate"] = m.rope_scaling->truncate;
    rope["attention_factor"] = m.rope_scaling->attention_factor;
    if (m.rope_scaling->mscale_all_dim > 0.0) rope["mscale_all_dim"] = m.rope_scaling->mscale_all_dim;
  }
  return rope;
}

}  // namespace

void read_llama_config(ConfigReader& c, const LlamaConfig& l, ModelSpec& m) {
  m.hidden = c.integer("hidden_size", {}, 1, c.max_width);
  m.layers = c.integer("num_hidden_layers", {}, 1, c.max_layers);
  m.heads = c.integer("num_attention_heads", {}, 1, c.max_heads);
  m.vocab = c.integer("vocab_size", {}, 1, c.max_vocab);
  m.kv_heads = c.integer("num_key_value_heads", l.kv_heads > 0 ? l.kv_heads : m.heads, 1, c.max_heads);
  m.max_position = c.integer("max_position_embeddings", l.max_position, 1, c.max_tokens);
  m.norm_eps = c.real("rms_norm_eps", l.norm_eps, c.least_eps, 1.0);
  m.tie_embeddings = c.boolean("tie_word_embeddings", l.tie_embeddings);
  const bool divides = c.find("head_dim") == nullptr && l.head_dim == 0 && !l.latent;
  const std::int64_t share = std::max<std::int64_t>(1, m.hidden / std::max<std::int64_t>(1, m.heads));
  m.head_dim = c.integer("head_dim", l.head_dim > 0 ? l.head_dim : share, 1, c.max_width);
  if (c.ok() && divides && m.hidden % m.heads != 0)
    c.report("E413", "num_attention_heads", "hidden size is no multiple of the attention heads",
             {fmt::format("hidden_size {} % num_attention_heads {} = {}", m.hidden, m.heads, m.hidden % m.heads)},
             "set head_dim, or a divisor of hidden_size");
  const bool bias = c.boolean("attention_bias", l.attention_bias);
  m.qkv_bias = l.qkv_bias || bias;
  m.o_bias = l.o_bias && bias;
  m.qk_norm = l.qk_norm || (l.asks_qk_norm && c.boolean("use_qk_norm", false));
  if (c.boolean("mlp_bias", false))
    c.report("E412", "mlp_bias", "a gated MLP with biases is not known", {},
             "no published model of this family has them");
  m.geglu = l.geglu;
  read_activation(c, m);
  read_windows(c, l.windows, m);
  read_rotation(c, l.rotation, m);
  m.intermediate = c.integer("intermediate_size", {}, 1, c.max_width);
}

void write_llama_config(const ModelSpec& m, const LlamaConfig& l, json& c) {
  c.update({{"hidden_size", m.hidden},
            {"intermediate_size", m.intermediate},
            {"num_hidden_layers", m.layers},
            {"num_attention_heads", m.heads},
            {"num_key_value_heads", m.kv_heads},
            {"max_position_embeddings", m.max_position},
            {"rms_norm_eps", m.norm_eps}});
  c[l.geglu ? "hidden_activation" : "hidden_act"] = l.geglu ? "gelu_pytorch_tanh" : "silu";
  json rope = written_rotation(m, l.rotation);
  if (l.rotation.by_layer_type)
    rope = {{"full_attention", std::move(rope)},
            {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", m.window_rope_theta}}}};
  c["rope_parameters"] = std::move(rope);
  if (!l.latent) c["head_dim"] = m.head_dim;
  if (l.writes_attention_bias) c["attention_bias"] = m.qkv_bias;
  if (l.asks_qk_norm) c["use_qk_norm"] = m.qk_norm;
  write_windows(m, l.windows, c);
}

void read_partial_rotation(ConfigReader& c, const Rotation& r, ModelSpec& m) {
  double part = c.real("partial_rotary_factor", r.part, 0.0, 1.0);
  if (const json* rope = c.find("rope_parameters"); rope != nullptr && rope->is_object())
    if (const auto at = rope->find("partial_rotary_factor"); at != rope->end() && !at->is_null())
      part = c.checked_real(*at, "partial_rotary_factor", part, 0.0, 1.0);
  m.rotary_dim = static_cast<std::int64_t>(part * static_cast<double>(m.head_dim));
  if (m.rotary_dim % 2 != 0 || m.rotary_dim == 0)
    c.report("E413", "partial_rotary_factor",
             fmt::format("{} of a head's {} numbers turn; rotary embedding turns pairs", m.rotary_dim, m.head_dim),
             {fmt::format("partial_rotary_factor {} x head_dim {}", part, m.head_dim)});
  if (m.rotary_dim == m.head_dim) m.rotary_dim = 0;
}

void read_balance(ConfigReader& c, MoeSpec& e) {
  const double coefficient = c.real("router_aux_loss_coef", 0.001, 0.0, 1e6);
  if (c.boolean("output_router_logits", false)) e.balance_loss = coefficient;
}

void write_balance(const MoeSpec& e, json& c) {
  c["num_experts_per_tok"] = e.experts_per_token;
  if (e.balance_loss > 0.0) c["output_router_logits"] = true, c["router_aux_loss_coef"] = e.balance_loss;
}

void put_attention(const LayerParameters& p) {
  const ModelSpec& m = p.model();
  p.linear("self_attn.q_proj", (m.gated_attention ? 2 : 1) * m.q_rows(), m.hidden, R::q_proj, m.qkv_bias, R::q_bias);
  p.linear("self_attn.k_proj", m.kv_rows(), m.hidden, R::k_proj, m.qkv_bias, R::k_bias);
  p.linear("self_attn.v_proj", m.kv_rows(), m.hidden, R::v_proj, m.qkv_bias, R::v_bias);
  p.linear("self_attn.o_proj", m.hidden, m.q_rows(), R::o_proj, m.o_bias, R::o_bias);
  if (m.attention_sinks) p.put("self_attn.sinks", {m.heads}, R::sinks);
  if (!m.qk_norm) return;
  p.put("self_attn.q_norm.weight", {m.head_dim}, R::q_norm);
  p.put("self_attn.k_norm.weight", {m.head_dim}, R::k_norm);
}

void put_mlp(const LayerParameters& p) {
  const ModelSpec& m = p.model();
  p.put("mlp.gate_proj.weight", {m.intermediate, m.hidden}, R::gate_proj);
  p.put("mlp.up_proj.weight", {m.intermediate, m.hidden}, R::up_proj);
  p.put("mlp.down_proj.weight", {m.hidden, m.intermediate}, R::down_proj);
}

void put_experts(const LayerParameters& p, const ExpertNames& n) {
  const ModelSpec& m = p.model();
  const MoeSpec& e = *m.moe;
  p.put(fmt::format("{}gate.weight", n.block), {e.experts, m.hidden}, R::router);
  if (e.router_bias) p.put(fmt::format("{}gate.e_score_correction_bias", n.block), {e.experts}, R::router_bias);
  for (int i = 0; i < p.experts(); ++i) {
    const auto put = [&](std::string_view name, std::int64_t out, std::int64_t in, R role) {
      p.put(fmt::format("{}experts.{}.{}.weight", n.block, i, name), {out, in}, role, i);
    };
    put(n.gate, e.expert_intermediate, m.hidden, R::expert_gate);
    put(n.up, e.expert_intermediate, m.hidden, R::expert_up);
    put(n.down, m.hidden, e.expert_intermediate, R::expert_down);
  }
  if (e.shared_experts == 0) return;
  const std::int64_t width = e.shared_experts * e.expert_intermediate;
  p.put(fmt::format("{}shared_experts.gate_proj.weight", n.block), {width, m.hidden}, R::shared_gate);
  p.put(fmt::format("{}shared_experts.up_proj.weight", n.block), {width, m.hidden}, R::shared_up);
  p.put(fmt::format("{}shared_experts.down_proj.weight", n.block), {m.hidden, width}, R::shared_down);
}

void put_norms(const LayerParameters& p) {
  p.put("input_layernorm.weight", {p.model().hidden}, R::input_norm);
  p.put("post_attention_layernorm.weight", {p.model().hidden}, R::post_norm);
}

void put_llama_layer(const LayerParameters& p) {
  put_attention(p);
  if (p.model().is_moe_layer(p.layer())) put_experts(p);
  else put_mlp(p);
  put_norms(p);
}

}  // namespace hotbunk
