// From a Hugging Face config.json to a ModelSpec: long for the families' keys, of which each has its default and what
// it may say, and which share one reader of numbers and its errors.
#include "spec/model_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/file.h"
#include "base/format.h"
#include "spec/architectures.h"
#include "spec/json_read.h"
#include "spec/safetensors.h"

namespace hotbunk {
namespace {

using nlohmann::json;
using std::int64_t;

// Far above any published model, far below what overflows 64-bit byte counts.
constexpr int64_t max_width = int64_t{1} << 22, max_layers = 1 << 14, max_heads = 1 << 14, max_vocab = int64_t{1} << 28,
                  max_experts = 1 << 16, max_tokens = int64_t{1} << 32;
constexpr long double max_parameters = 1e15L;
// Outside of these, angles or norms are infinite or no numbers at all.
constexpr double least_eps = 1e-12, least_theta = 1e-6, most_theta = 1e12, most_factor = 1e6;

/// By what tells architectures apart: most are called something + "ForCausalLM".
/// Of families that are not read: what they have that no known one has, and whose sizes give the nearest estimate.
struct OtherFamily {
  std::string_view stem, has, estimate;
};
constexpr OtherFamily other_families[] = {
    {"Phi3", "one matrix for q, k and v and one for gate and up, rotary positions on a part of a head", "Llama"},
    {"PhiMoE", "LayerNorm, sparse-mixer routing", "Mixtral"},
    {"Phi", "attention and MLP side by side, LayerNorm with biases, an MLP without a gate", "Llama"},
    {"Llama4", "attention in chunks, layers without rotary positions, a shared expert beside one of many", "Qwen3Moe"},
    {"Qwen3Next", "linear attention in three of four layers", ""},
    {"Falcon", "attention and MLP side by side, LayerNorm with biases", "Llama"},
    {"Mamba", "state spaces in the place of attention", ""},
    {"Jamba", "state spaces beside attention", ""},
    {"Granite", "multipliers of residuals, embeddings, attention and logits", "Llama"},
    {"Olmo", "norms behind attention and MLP, or without weights", "Llama"},
    {"Cohere", "attention and MLP side by side, LayerNorm without bias", "Llama"},
    {"Glm4For", "norms on both sides, rotary positions on a part of a head", "Llama"},
};

/// Whether two names differ in digits alone: another generation of a model, no slip of the pen.
bool is_other_generation(std::string a, std::string b) {
  const auto letters = [](std::string& s) { std::erase_if(s, [](unsigned char c) { return std::isdigit(c) != 0; }); };
  letters(a), letters(b);
  return a == b;
}

std::string nearest_architecture(const std::string& found, const std::vector<std::string>& names) {
  const auto stem = [](const std::string& name) {
    return name.substr(0, std::min(name.find("For"), name.find("LMHead")));
  };
  std::vector<std::string> stems;
  for (const std::string& name : names) stems.push_back(stem(name));
  const std::string nearest = nearest_name(stem(found), stems);
  const auto at = std::ranges::find(stems, nearest);
  return at == stems.end() ? "" : names[static_cast<std::size_t>(at - stems.begin())];
}

class ConfigReader {
 public:
  ConfigReader(const json& config, const KeyLocator& locate) : json_(config), locate_(locate) {}

  Result<ModelSpec> read(const std::string& name) {
    ModelSpec m;
    m.name = name;
    if (!json_.is_object()) {
      report("E411", "", fmt::format("the config is {}, expected an object", describe_json(json_)));
      return fail(std::move(problems_));
    }
    if (!read_family(m)) return fail(std::move(problems_));
    if (m.family == ModelFamily::gpt2) read_gpt2(m);
    else read_llama_like(m);
    m.eos_token = token("eos_token_id", m.vocab);
    m.bos_token = token("bos_token_id", m.vocab);
    m.init_range = real("initializer_range", 0.02, 0.0, 1e3);
    if (problems_.empty()) check_sizes(m);
    if (!problems_.empty()) return fail(std::move(problems_));
    return m;
  }

 private:
  void report(const char* code, std::string_view key, std::string message, std::vector<std::string> notes = {},
              std::string help = {}) {
    problems_.push_back({.code = code,
                         .message = std::move(message),
                         .where = locate_(key),
                         .notes = std::move(notes),
                         .help = std::move(help)});
  }

  /// nullptr when the key is absent or null, which Hugging Face configs use alike.
  const json* find(std::string_view key) const {
    const auto at = json_.find(std::string(key));
    return at == json_.end() || at->is_null() ? nullptr : &*at;
  }

  int64_t integer(std::string_view key, std::optional<int64_t> fallback, int64_t low, int64_t high) {
    const json* value = find(key);
    if (value == nullptr) {
      if (!fallback) report("E410", key, fmt::format("config key \"{}\" is missing", key));
      return fallback.value_or(low);
    }
    const bool whole = value->is_number_integer() &&
                       !(value->is_number_unsigned() &&
                         value->get<std::uint64_t>() > static_cast<std::uint64_t>(std::numeric_limits<int64_t>::max()));
    if (!whole || value->get<int64_t>() < low || value->get<int64_t>() > high) {
      report("E411", key,
             fmt::format("config key \"{}\" is {}, expected an integer from {} to {}", key, describe_json(*value), low,
                         high));
      return low;
    }
    return value->get<int64_t>();
  }

  double real(std::string_view key, double fallback, double low, double high) {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    return checked_real(*value, key, fallback, low, high);
  }
  double checked_real(const json& value, std::string_view key, double fallback, double low, double high) {
    if (value.is_number()) {
      const double x = value.get<double>();
      if (x >= low && x <= high) return x;
    }
    report(
        "E411", key,
        fmt::format("config key \"{}\" is {}, expected a number from {} to {}", key, describe_json(value), low, high));
    return fallback;
  }

  bool boolean(std::string_view key, bool fallback) {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    if (value->is_boolean()) return value->get<bool>();
    report("E411", key, fmt::format("config key \"{}\" is {}, expected true or false", key, describe_json(*value)));
    return fallback;
  }

  std::string text(std::string_view key, const std::string& fallback) {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    if (value->is_string()) return value->get<std::string>();
    report("E411", key, fmt::format("config key \"{}\" is {}, expected a string", key, describe_json(*value)));
    return fallback;
  }

  /// An id, or the first of a list of ids (Llama 3.1 lists several ends of text); -1 when there is none. All of them
  /// lie in the vocabulary.
  int64_t token(std::string_view key, int64_t vocab) {
    const json* value = find(key);
    if (value == nullptr) return -1;
    const json listed = value->is_array() && !value->empty() ? *value : json::array({*value});
    for (const json& id : listed) {
      if (!id.is_number_integer() || id.get<int64_t>() < -1 || id.get<int64_t>() > max_vocab) {
        report("E411", key,
               fmt::format("config key \"{}\" is {}, expected a token id or a list of them", key,
                           describe_json(value->is_array() ? id : *value)));
        return -1;
      }
      if (id.get<int64_t>() >= vocab && problems_.empty())
        report("E413", key, fmt::format("{} {} lies outside the vocabulary of {}", key, id.get<int64_t>(), vocab));
    }
    return listed.front().get<int64_t>();
  }

  /// The first of "architectures", a list of class names; "" when there is none.
  std::string architecture() {
    const json* list = find("architectures");
    if (list == nullptr || (list->is_array() && list->empty())) return "";
    if (list->is_array() && list->front().is_string()) return list->front().get<std::string>();
    report("E411", "architectures",
           fmt::format("config key \"architectures\" is {}, expected a list of class names",
                       list->is_array() ? "a list of something else" : describe_json(*list)));
    return "";
  }

  bool read_family(ModelSpec& m) {
    std::string key = "model_type", found = text("model_type", "");
    if (const std::string first = architecture(); !first.empty()) {
      key = "architectures";
      found = first;
    }
    if (!problems_.empty()) return false;
    if (found.empty()) {
      report("E410", key, "config names neither \"architectures\" nor \"model_type\"");
      return false;
    }
    std::vector<std::string> names;
    for (const auto& known : architectures) {
      if (found == known.class_name || found == known.model_type) {
        m.family = known.family;
        return true;
      }
      names.emplace_back(key == "architectures" ? known.class_name : known.model_type);
    }
    std::string all;
    for (const auto& n : names) all += (all.empty() ? "" : ", ") + n;
    std::string nearest = nearest_architecture(found, names);
    if (!nearest.empty() && is_other_generation(found, nearest)) nearest.clear();
    std::vector<std::string> notes = {"known: " + all};
    const auto other = std::ranges::find_if(
        other_families, [&](const OtherFamily& o) { return key == "architectures" && found.starts_with(o.stem); });
    if (other != std::end(other_families)) {
      notes.insert(notes.begin(),
                   fmt::format("{} has {}: not read, so neither priced nor executed", other->stem, other->has));
      report("E412", key, fmt::format("architecture \"{}\" is not known", found.substr(0, 100)), std::move(notes),
             other->estimate.empty()
                 ? "a known architecture has no like of it: no estimate"
                 : fmt::format("for an estimate, its sizes in a config.json that says \"{}ForCausalLM\"; "
                               "what differs is then not counted",
                               other->estimate));
      return false;
    }
    report("E412", key, fmt::format("architecture \"{}\" is not known", found.substr(0, 100)), std::move(notes),
           nearest.empty() ? "for an estimate, a config.json of its sizes that names one of these; what differs beside "
                             "sizes (norms, windows, biases) is then not counted"
                           : fmt::format("did you mean \"{}\"?", nearest));
    return false;
  }

  void read_llama_like(ModelSpec& m) {
    const bool gemma = is_gemma(m.family), gemma3 = m.family == ModelFamily::gemma3,
               glm = m.family == ModelFamily::glm4_moe, gpt_oss = m.family == ModelFamily::gpt_oss;
    m.hidden = integer("hidden_size", {}, 1, max_width);
    m.layers = integer("num_hidden_layers", {}, 1, max_layers);
    m.heads = integer("num_attention_heads", {}, 1, max_heads);
    m.vocab = integer("vocab_size", {}, 1, max_vocab);
    m.kv_heads = integer("num_key_value_heads", gpt_oss ? 8 : m.heads, 1, max_heads);
    m.max_position = integer("max_position_embeddings", gemma3 || glm || gpt_oss ? 131072 : 2048, 1, max_tokens);
    m.norm_eps = real("rms_norm_eps", glm || gpt_oss ? 1e-5 : 1e-6, least_eps, 1.0);
    m.tie_embeddings = boolean("tie_word_embeddings", gemma);
    const bool hybrid = m.family == ModelFamily::qwen3_5;
    const bool qwen3 = m.family == ModelFamily::qwen3 || m.family == ModelFamily::qwen3_moe;
    const bool has_head_dim = find("head_dim") != nullptr || qwen3 || gemma || gpt_oss || hybrid;
    const bool deepseek = m.family == ModelFamily::deepseek_v2 || m.family == ModelFamily::deepseek_v3;
    m.head_dim = integer("head_dim",
                         qwen3             ? 128
                         : gemma || hybrid ? 256
                         : gpt_oss         ? 64
                                           : std::max<int64_t>(1, m.hidden / std::max<int64_t>(1, m.heads)),
                         1, max_width);
    if (problems_.empty() && !has_head_dim && !deepseek && m.heads > 0 && m.hidden % m.heads != 0)
      report("E413", "num_attention_heads", "hidden size is no multiple of the attention heads",
             {fmt::format("hidden_size {} % num_attention_heads {} = {}", m.hidden, m.heads, m.hidden % m.heads)},
             "set head_dim, or a divisor of hidden_size");
    const bool bias = boolean("attention_bias", gpt_oss);
    m.qkv_bias = m.family == ModelFamily::qwen2 || bias;
    m.o_bias = m.family != ModelFamily::qwen2 && !glm && bias;
    m.qk_norm = qwen3 || hybrid || gemma3 || (glm && boolean("use_qk_norm", false));
    if (boolean("mlp_bias", false))
      report("E412", "mlp_bias", "a gated MLP with biases is not known", {},
             "no published model of this family has them");
    read_activation(m);
    read_window(m);
    read_rope(m);
    m.intermediate = integer("intermediate_size", {}, 1, max_width);
    if (m.family == ModelFamily::mixtral) read_mixtral(m);
    if (m.family == ModelFamily::qwen3_moe) read_qwen3_moe(m);
    if (deepseek) read_deepseek(m);
    if (glm) read_glm4_moe(m);
    if (gpt_oss) read_gpt_oss(m);
    if (gemma) read_gemma(m);
    if (hybrid) read_qwen3_5(m);
  }

  void read_activation(ModelSpec& m) {
    m.geglu = is_gemma(m.family);
    const char* known = m.geglu ? "gelu_pytorch_tanh" : "silu";
    // Gemma's first configs say gelu in hidden_act, which transformers does not read.
    const char* key = m.geglu ? "hidden_activation" : "hidden_act";
    const std::string activation = text(key, known);
    if (activation != known)
      report("E412", key, fmt::format("activation \"{}\" is not known for this architecture", activation.substr(0, 50)),
             {}, fmt::format("the gated MLP of this family uses {}", known));
  }

  /// A window, and the layers without it: those that layer_types names, or by the family's rule.
  void read_window(ModelSpec& m) {
    const bool qwen =
        m.family == ModelFamily::qwen2 || m.family == ModelFamily::qwen3 || m.family == ModelFamily::qwen3_moe;
    const bool gemma = is_gemma(m.family), mixtral = m.family == ModelFamily::mixtral;
    const bool gpt_oss = m.family == ModelFamily::gpt_oss;
    if (!qwen && !gemma && !mixtral && !gpt_oss && m.family != ModelFamily::mistral) return;
    if (qwen && !boolean("use_sliding_window", false)) return;
    const bool absent = !json_.contains("sliding_window");  // null is no window
    m.sliding_window = integer("sliding_window", !absent || mixtral ? 0 : gpt_oss ? 128 : 4096, 0, max_tokens);
    if (m.sliding_window == 0 || !problems_.empty() || !has_layer_types(m.family)) return;
    const int64_t first = qwen ? integer("max_window_layers", 28, 0, max_layers) : 0;
    // Of so many layers that follow one another the last has none.
    const int64_t period = m.family == ModelFamily::gemma3 ? integer("sliding_window_pattern", 6, 1, max_layers)
                           : gemma || gpt_oss              ? 2
                                                           : 0;
    std::vector<bool> full;
    for (int64_t layer = 0; layer < m.layers; ++layer)
      full.push_back(period > 0 ? (layer + 1) % period == 0 : layer < first);
    if (find("layer_types") != nullptr) full = layer_types(m.layers);
    if (std::ranges::count(full, false) == 0) m.sliding_window = 0;
    else if (std::ranges::count(full, true) > 0) m.full_layers = std::move(full);
  }

  /// Which layers have no window.
  std::vector<bool> layer_types(int64_t layers) {
    const json& list = *find("layer_types");
    std::vector<bool> full;
    for (const json& type : list.is_array() ? list : json::array()) {
      if (type != "full_attention" && type != "sliding_attention") break;
      full.push_back(type == "full_attention");
    }
    if (!list.is_array() || std::ssize(full) != layers || full.size() != list.size()) {
      report("E411", "layer_types",
             fmt::format("config key \"layer_types\" does not give each of {} layers \"full_attention\" or "
                         "\"sliding_attention\"",
                         layers));
      return {};
    }
    return full;
  }

  void read_gemma(ModelSpec& m) {
    m.output_norms = m.scaled_embedding = true;
    m.norm_offset = 1.0;
    m.query_scalar = real("query_pre_attn_scalar", 256.0, 1e-6, 1e12);
    const auto cap = [&](const char* key, double otherwise) {
      return json_.contains(key) && find(key) == nullptr ? 0.0 : real(key, otherwise, 1e-3, 1e12);
    };
    const bool caps = m.family == ModelFamily::gemma2;
    m.attention_softcap = cap("attn_logit_softcapping", caps ? 50.0 : 0.0);
    m.logit_softcap = cap("final_logit_softcapping", caps ? 30.0 : 0.0);
    if (boolean("use_bidirectional_attention", false))
      report("E412", "use_bidirectional_attention", "attention to later tokens is not known");
  }

  /// What layers with the window turn by.
  void read_window_rope(ModelSpec& m, const json& by_type) {
    const auto at = by_type.find("sliding_attention");
    if (at == by_type.end() || !at->is_object()) return;
    if (at->contains("rope_theta"))
      m.window_rope_theta = checked_real((*at)["rope_theta"], "rope_parameters", 1e4, least_theta, most_theta);
    if (at->value("rope_type", json("default")) != "default")
      report("E412", "rope_parameters", "a scaled rotation of layers with the window is not known", {},
             "rope_type of sliding_attention is default in published models");
  }

  /// rope_parameters (transformers 5), of Gemma-3 by type of layer, or rope_theta and rope_scaling (4).
  void read_rope(ModelSpec& m) {
    const bool by_type = m.family == ModelFamily::gemma3;
    const bool gpt_oss = m.family == ModelFamily::gpt_oss;
    const double theta = real("rope_theta", by_type ? 1e6 : gpt_oss ? 150000.0 : 10000.0, least_theta, most_theta);
    m.rope_theta = theta;
    const std::string_view key = find("rope_parameters") != nullptr ? "rope_parameters" : "rope_scaling";
    const json* rope = find(key);
    if (by_type) {
      m.window_rope_theta = real("rope_local_base_freq", 10000.0, least_theta, most_theta);
      if (key == "rope_parameters" && rope->is_object()) read_window_rope(m, *rope);
      if (rope != nullptr && rope->contains("full_attention")) rope = &(*rope)["full_attention"];
    }
    // What transformers takes where the config says nothing.
    static const json yarn = {{"rope_type", "yarn"}, {"factor", 32.0},    {"beta_fast", 32.0},
                              {"beta_slow", 1.0},    {"truncate", false}, {"original_max_position_embeddings", 4096}};
    if (rope == nullptr && gpt_oss) rope = &yarn;
    if (rope == nullptr) return;
    if (!rope->is_object()) {
      report("E411", key, fmt::format("config key \"{}\" is {}, expected an object", key, describe_json(*rope)));
      return;
    }
    const auto number = [&](const char* name, double fallback, double low, double high) {
      const auto at = rope->find(name);
      return at == rope->end() || at->is_null() ? fallback : checked_real(*at, name, fallback, low, high);
    };
    m.rope_theta = number("rope_theta", theta, least_theta, most_theta);
    std::string type = "default";
    for (const char* spelling : {"type", "rope_type"}) {
      const auto at = rope->find(spelling);
      if (at == rope->end() || at->is_null()) continue;
      if (at->is_string()) type = at->get<std::string>();
      else report("E411", key, fmt::format("{} is {}, expected a string", spelling, describe_json(*at)));
    }
    if (type == "default") return;
    // Hugging Face's ROPE_INIT_FUNCTIONS.
    const std::vector<std::string> known = {"default", "linear", "dynamic", "yarn", "longrope", "llama3"};
    if (std::ranges::find(known, type) == known.end()) {
      const std::string nearest = nearest_name(type, known);
      report("E412", key, fmt::format("rope_type \"{}\" is not known", type.substr(0, 100)),
             {fmt::format("known: {}", fmt::join(known, ", "))},
             nearest.empty() ? "" : fmt::format("did you mean \"{}\"?", nearest));
      return;
    }
    RopeScaling scaling;
    scaling.type = type;
    if (type == "llama3") {
      scaling.low_freq_factor = number("low_freq_factor", 1.0, 1.0 / most_factor, most_factor);
      scaling.high_freq_factor = number("high_freq_factor", 4.0, 1.0 / most_factor, most_factor);
      if (scaling.high_freq_factor <= scaling.low_freq_factor)
        report("E413", key, "high_freq_factor is not above low_freq_factor",
               {fmt::format("the frequencies between are divided by their difference, {} - {} = {}",
                            scaling.high_freq_factor, scaling.low_freq_factor,
                            scaling.high_freq_factor - scaling.low_freq_factor)});
    }
    const double positions = type == "yarn" ? static_cast<double>(m.max_position) : 8192.0;
    scaling.original_max_position = static_cast<int64_t>(
        number("original_max_position_embeddings", positions, 1.0, static_cast<double>(max_tokens)));
    const double longer = static_cast<double>(m.max_position) / static_cast<double>(scaling.original_max_position);
    scaling.factor = number("factor", type == "yarn" ? std::max(1.0, longer) : 1.0, 1.0,
                            most_factor);  // a smaller one would shrink positions
    if (type == "yarn") {
      scaling.beta_fast = number("beta_fast", 32.0, 1.0 / most_factor, most_factor);
      scaling.beta_slow = number("beta_slow", 1.0, 1.0 / most_factor, most_factor);
      if (const auto at = rope->find("truncate"); at != rope->end() && at->is_boolean())
        scaling.truncate = at->get<bool>();
      // By the paper; with both mscales their ratio (transformers: _compute_yarn_parameters).
      const auto of = [&](double mscale) {
        return scaling.factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(scaling.factor) + 1.0;
      };
      const double mscale = number("mscale", 0.0, 0.0, most_factor),
                   of_all = number("mscale_all_dim", 0.0, 0.0, most_factor);
      scaling.mscale_all_dim = of_all;
      scaling.attention_factor =
          number("attention_factor", mscale > 0.0 && of_all > 0.0 ? of(mscale) / of(of_all) : of(1.0),
                 1.0 / most_factor, most_factor);
    }
    m.rope_scaling = scaling;
  }

  /// Experts as DeepSeek-V3 has them; of queries and keys a part turns.
  void read_glm4_moe(ModelSpec& m) {
    read_partial_rotation(m, 0.5);
    read_deepseek_experts(m);
  }

  /// Of four layers three have linear attention, unless layer_types or full_attention_interval say otherwise; the
  /// others' output has a gate. The vision tower of the published models is not read, nor the layer that predicts a
  /// second token.
  void read_qwen3_5(ModelSpec& m) {
    read_partial_rotation(m, 0.25);
    m.norm_offset = 1.0;
    m.gated_attention = boolean("attn_output_gate", true);
    LinearAttentionSpec a;
    a.key_heads = integer("linear_num_key_heads", 16, 1, max_heads);
    a.value_heads = integer("linear_num_value_heads", 32, 1, max_heads);
    a.key_dim = integer("linear_key_head_dim", 128, 1, max_width);
    a.value_dim = integer("linear_value_head_dim", 128, 1, max_width);
    a.kernel = integer("linear_conv_kernel_dim", 4, 1, max_width);
    if (a.value_heads % a.key_heads != 0)
      report("E413", "linear_num_value_heads", "value heads of linear attention are no multiple of its key heads",
             {fmt::format("{} % {} = {}", a.value_heads, a.key_heads, a.value_heads % a.key_heads)});
    const int64_t interval = integer("full_attention_interval", 4, 1, max_layers);
    for (int64_t layer = 0; layer < m.layers; ++layer) a.layers.push_back((layer + 1) % interval != 0);
    if (const json* const types = find("layer_types"); types != nullptr) {
      a.layers.clear();
      for (const json& type : types->is_array() ? *types : json::array()) {
        if (type != "full_attention" && type != "linear_attention") break;
        a.layers.push_back(type == "linear_attention");
      }
      if (std::ssize(a.layers) != m.layers || a.layers.size() != types->size())
        report("E411", "layer_types",
               fmt::format("config key \"layer_types\" does not give each of {} layers \"full_attention\" or "
                           "\"linear_attention\"",
                           m.layers));
    }
    if (std::ranges::count(a.layers, true) > 0) m.linear = std::move(a);
  }

  /// Which part of a head turns: rope_parameters say it (transformers 5), or the config itself (4).
  void read_partial_rotation(ModelSpec& m, double fallback) {
    double part = real("partial_rotary_factor", fallback, 0.0, 1.0);
    if (const json* rope = find("rope_parameters"); rope != nullptr && rope->is_object())
      if (const auto at = rope->find("partial_rotary_factor"); at != rope->end() && !at->is_null())
        part = checked_real(*at, "partial_rotary_factor", part, 0.0, 1.0);
    m.rotary_dim = static_cast<int64_t>(part * static_cast<double>(m.head_dim));
    if (m.rotary_dim % 2 != 0 || m.rotary_dim == 0)
      report("E413", "partial_rotary_factor",
             fmt::format("{} of a head's {} numbers turn; rotary embedding turns pairs", m.rotary_dim, m.head_dim),
             {fmt::format("partial_rotary_factor {} x head_dim {}", part, m.head_dim)});
    if (m.rotary_dim == m.head_dim) m.rotary_dim = 0;
  }

  /// Every layer has experts; biases everywhere, sinks of attention, clamped gates.
  void read_gpt_oss(ModelSpec& m) {
    m.attention_sinks = true;
    MoeSpec e;
    e.experts = integer(
        find("num_local_experts") == nullptr && find("num_experts") != nullptr ? "num_experts" : "num_local_experts",
        128, 1, max_experts);
    e.experts_per_token = integer("num_experts_per_tok", 4, 1, max_experts);
    e.expert_intermediate = m.intermediate;
    e.biases = true;
    e.swiglu_limit = real("swiglu_limit", 7.0, 1e-3, 1e6);
    e.swiglu_alpha = real("swiglu_alpha", 1.702, 1e-3, 1e3);
    read_balance(e);
    m.moe = e;
  }

  void read_mixtral(ModelSpec& m) {
    MoeSpec e;
    e.experts = integer("num_local_experts", 8, 1, max_experts);
    e.experts_per_token = integer("num_experts_per_tok", 2, 1, max_experts);
    e.expert_intermediate = m.intermediate;
    e.router_jitter = real("router_jitter_noise", 0.0, 0.0, 1.0);
    read_balance(e);
    m.moe = e;
  }

  /// transformers adds the loss where router logits are asked for.
  void read_balance(MoeSpec& e) {
    const double coefficient = real("router_aux_loss_coef", 0.001, 0.0, 1e6);
    if (boolean("output_router_logits", false)) e.balance_loss = coefficient;
  }

  void read_qwen3_moe(ModelSpec& m) {
    MoeSpec e;
    e.experts =
        integer(find("num_local_experts") != nullptr ? "num_local_experts" : "num_experts", 128, 1, max_experts);
    e.experts_per_token = integer("num_experts_per_tok", 8, 1, max_experts);
    e.expert_intermediate = integer("moe_intermediate_size", 768, 1, max_width);
    e.norm_topk = boolean("norm_topk_prob", false);
    read_balance(e);
    if (integer("decoder_sparse_step", 1, 1, max_layers) != 1 ||
        (find("mlp_only_layers") != nullptr &&
         !(find("mlp_only_layers")->is_array() && find("mlp_only_layers")->empty())))
      report("E412", "decoder_sparse_step", "dense layers between MoE layers are not known", {},
             "decoder_sparse_step must be 1 and mlp_only_layers empty");
    m.moe = e;
  }

  void read_deepseek(ModelSpec& m) {
    MlaSpec a;
    a.q_lora_rank = integer("q_lora_rank", 0, 0, max_width);
    a.kv_lora_rank = integer("kv_lora_rank", 512, 1, max_width);
    a.qk_nope_head_dim = integer("qk_nope_head_dim", 128, 1, max_width);
    a.qk_rope_head_dim = integer("qk_rope_head_dim", 64, 1, max_width);
    a.v_head_dim = integer("v_head_dim", 128, 1, max_width);
    if (a.qk_rope_head_dim % 2 != 0)
      report("E413", "qk_rope_head_dim",
             fmt::format("qk_rope_head_dim {} is odd; rotary embedding turns pairs", a.qk_rope_head_dim));
    m.head_dim = a.qk_nope_head_dim + a.qk_rope_head_dim;
    m.kv_heads = m.heads;  // each query head has a key and a value of its own, made of the latent
    m.mla = a;
    if (m.qkv_bias)
      report("E412", "attention_bias", "latent attention with biases is not known", {},
             "no published model of this family has them");
    if (!boolean("rope_interleave", true))
      report("E412", "rope_interleave", "latent attention that turns halves of the rotary part is not known", {},
             "neighbours turn together in published models of this family");
    read_deepseek_experts(m);
  }

  void read_deepseek_experts(ModelSpec& m) {
    const bool v2 = m.family == ModelFamily::deepseek_v2, glm = m.family == ModelFamily::glm4_moe;
    MoeSpec e;
    e.experts = integer("n_routed_experts", glm ? 128 : 0, 0, max_experts);
    e.experts_per_token = integer("num_experts_per_tok", glm ? 8 : 1, 1, max_experts);
    e.expert_intermediate = integer("moe_intermediate_size", glm ? 1408 : 1407, 1, max_width);
    e.shared_experts = integer("n_shared_experts", glm ? 1 : 0, 0, max_experts);
    e.first_dense_layers = integer("first_k_dense_replace", glm ? 1 : 0, 0, max_layers);
    e.groups = integer("n_group", 1, 1, max_experts);
    e.topk_groups = integer("topk_group", 1, 1, max_experts);
    e.norm_topk = boolean("norm_topk_prob", !v2);
    e.routed_scaling = real("routed_scaling_factor", 1.0, 0.0, 1e6);
    e.sigmoid_scores = text("scoring_func", v2 ? "softmax" : "sigmoid") == "sigmoid";
    const std::string method = text("topk_method", v2 ? "greedy" : "noaux_tc");
    e.router_bias = method == "noaux_tc";
    if (method == "greedy") e.groups = e.topk_groups = 1;
    if (e.router_bias != e.sigmoid_scores)
      report("E412", "topk_method",
             fmt::format("topk_method {} with scores by {} is not known", method.substr(0, 50),
                         e.sigmoid_scores ? "sigmoid" : "softmax"),
             {},
             "noaux_tc (DeepSeek-V3) goes with sigmoid, greedy and group_limited_greedy (DeepSeek-V2) with softmax");
    if (v2 && e.norm_topk)
      report("E412", "norm_topk_prob",
             "a softmax over all experts that the chosen ones' weights are divided by is not known",
             {"transformers does not read this key of DeepSeek-V2, DeepSeek's own code does"},
             "norm_topk_prob is false in published models");
    if (integer("moe_layer_freq", 1, 1, max_layers) != 1)
      report("E412", "moe_layer_freq", "dense layers between MoE layers are not known", {}, "moe_layer_freq must be 1");
    if (e.experts > 0 && e.first_dense_layers < m.layers) m.moe = e;
  }

  void read_gpt2(ModelSpec& m) {
    m.hidden = integer("n_embd", 768, 1, max_width);
    m.layers = integer("n_layer", 12, 1, max_layers);
    m.heads = integer("n_head", 12, 1, max_heads);
    m.vocab = integer("vocab_size", 50257, 1, max_vocab);
    m.max_position = integer("n_positions", 1024, 1, max_tokens);
    m.intermediate = integer("n_inner", 4 * m.hidden, 1, 4 * max_width);
    m.norm_eps = real("layer_norm_epsilon", 1e-5, least_eps, 1.0);
    m.tie_embeddings = boolean("tie_word_embeddings", true);
    m.kv_heads = m.heads;
    m.head_dim = std::max<int64_t>(1, m.hidden / m.heads);
    m.qkv_bias = m.o_bias = m.mlp_bias = true;
    m.gated_mlp = false;
    m.learned_positions = m.layer_norm = true;
    const std::string activation = text("activation_function", "gelu_new");
    if (activation != "gelu_new" && activation != "gelu_pytorch_tanh")  // one function by two names
      report("E412", "activation_function",
             fmt::format("activation \"{}\" is not known for this architecture", activation.substr(0, 50)), {},
             "the MLP of this family uses gelu_new");
    if (!boolean("scale_attn_weights", true))
      report("E412", "scale_attn_weights", "attention without the scale of 1/sqrt(head_dim) is not known");
    if (boolean("scale_attn_by_inverse_layer_idx", false))
      report("E412", "scale_attn_by_inverse_layer_idx", "attention scaled by the layer's number is not known");
    if (boolean("add_cross_attention", false))
      report("E412", "add_cross_attention", "attention to an encoder is not known");
    if (m.hidden % m.heads != 0)
      report("E413", "n_head", "hidden size is no multiple of the attention heads",
             {fmt::format("n_embd {} % n_head {} = {}", m.hidden, m.heads, m.hidden % m.heads)});
  }

  void check_sizes(const ModelSpec& m) {
    if (m.heads % m.kv_heads != 0)
      report("E413", "num_key_value_heads", "query heads are no multiple of the key-value heads",
             {fmt::format("num_attention_heads {} % num_key_value_heads {} = {}", m.heads, m.kv_heads,
                          m.heads % m.kv_heads)});
    if (m.head_dim % 2 != 0 && !m.learned_positions && !m.mla)
      report("E413", "head_dim", fmt::format("head_dim {} is odd; rotary embedding turns pairs", m.head_dim));
    if (m.moe && m.moe->experts_per_token > m.moe->experts)
      report("E413", "num_experts_per_tok",
             fmt::format("{} experts per token of {} experts", m.moe->experts_per_token, m.moe->experts));
    if (m.moe && m.moe->groups > 1 && m.moe->experts % m.moe->groups != 0)
      report("E413", "n_group", fmt::format("{} experts do not divide into {} groups", m.moe->experts, m.moe->groups));
    else if (m.moe && m.moe->groups > 1) check_groups(*m.moe);
    const long double n = approximate_parameter_count(m);
    if (n > max_parameters)
      report("E413", "hidden_size", fmt::format("the model has {:.3g} parameters", static_cast<double>(n)),
             {fmt::format("more than {:.0e} is taken for a mistake", static_cast<double>(max_parameters))});
  }

  void check_groups(const MoeSpec& e) {
    const int64_t each = e.experts / e.groups;
    if (e.topk_groups > e.groups || e.topk_groups * each < e.experts_per_token)
      report("E413", "topk_group", "the groups taken do not hold a token's experts",
             {fmt::format("topk_group {} of n_group {}, {} experts each; num_experts_per_tok {}", e.topk_groups,
                          e.groups, each, e.experts_per_token)});
    if (e.router_bias && each < 2)
      report("E413", "n_group", "a group is rated by its two best experts",
             {fmt::format("{} experts / n_group {} = {}", e.experts, e.groups, each)});
  }

  const json& json_;
  const KeyLocator& locate_;
  Diagnostics problems_;
};

}  // namespace

Result<ModelSpec> model_from_json(const json& config, const std::string& name, const KeyLocator& locate) {
  // Of a model with a vision tower the language model, whose config lies within.
  if (config.is_object() && config.value("model_type", json()) == "qwen3_5" && config.contains("text_config") &&
      config["text_config"].is_object()) {
    json text = config["text_config"];
    text["architectures"] = {architecture_of(ModelFamily::qwen3_5).class_name};
    if (!text.contains("tie_word_embeddings") && config.contains("tie_word_embeddings"))
      text["tie_word_embeddings"] = config["tie_word_embeddings"];
    return ConfigReader(text, locate).read(name);
  }
  return ConfigReader(config, locate).read(name);
}

Result<ModelSpec> model_from_text(std::string_view text, const std::string& file, const std::string& name) {
  auto config = parse_json(text, file);
  if (!config) return fail(config.error());
  return model_from_json(*config, name, [&](std::string_view key) { return locate_json_key(text, file, key); });
}

Result<ModelSpec> load_model(const std::filesystem::path& path) {
  std::error_code ec;
  const bool is_folder = std::filesystem::is_directory(path, ec);
  const std::filesystem::path file = is_folder ? path / "config.json" : path;
  auto text = read_file(file, std::int64_t{16} << 20);
  if (!text) return fail(text.error());
  const std::filesystem::path folder = file.has_parent_path() ? file.parent_path() : std::filesystem::path(".");
  std::filesystem::path titled = is_folder || file.filename() == "config.json" ? folder : file.stem();
  if (titled.filename().empty()) titled = titled.parent_path();  // "folder/"
  std::string name = titled.filename().string();
  if (name.empty() || name == "." || name == "..") name = "model";
  auto model = model_from_text(*text, file.string(), name);
  if (model && (std::filesystem::exists(folder / "model.safetensors", ec) ||
                std::filesystem::exists(folder / "model.safetensors.index.json", ec)))
    model->weights_path = folder.string();
  if (model && is_folder && model->weights_path.empty()) return fail(no_weights(path));
  return model;
}

const std::vector<std::string>& config_keys() {
  static const std::vector<std::string> keys = {"architectures",
                                                "model_type",
                                                "hidden_size",
                                                "intermediate_size",
                                                "num_hidden_layers",
                                                "num_attention_heads",
                                                "num_key_value_heads",
                                                "head_dim",
                                                "vocab_size",
                                                "max_position_embeddings",
                                                "rms_norm_eps",
                                                "rope_theta",
                                                "rope_scaling",
                                                "rope_parameters",
                                                "tie_word_embeddings",
                                                "attention_bias",
                                                "mlp_bias",
                                                "hidden_act",
                                                "sliding_window",
                                                "use_sliding_window",
                                                "max_window_layers",
                                                "sliding_window_pattern",
                                                "rope_local_base_freq",
                                                "layer_types",
                                                "hidden_activation",
                                                "query_pre_attn_scalar",
                                                "attn_logit_softcapping",
                                                "final_logit_softcapping",
                                                "use_bidirectional_attention",
                                                "eos_token_id",
                                                "bos_token_id",
                                                "pad_token_id",
                                                "initializer_range",
                                                "num_local_experts",
                                                "num_experts",
                                                "num_experts_per_tok",
                                                "moe_intermediate_size",
                                                "norm_topk_prob",
                                                "output_router_logits",
                                                "router_aux_loss_coef",
                                                "router_jitter_noise",
                                                "decoder_sparse_step",
                                                "mlp_only_layers",
                                                "q_lora_rank",
                                                "kv_lora_rank",
                                                "qk_nope_head_dim",
                                                "qk_rope_head_dim",
                                                "v_head_dim",
                                                "n_routed_experts",
                                                "n_shared_experts",
                                                "first_k_dense_replace",
                                                "n_group",
                                                "topk_group",
                                                "routed_scaling_factor",
                                                "scoring_func",
                                                "topk_method",
                                                "moe_layer_freq",
                                                "rope_interleave",
                                                "partial_rotary_factor",
                                                "use_qk_norm",
                                                "attn_output_gate",
                                                "full_attention_interval",
                                                "linear_conv_kernel_dim",
                                                "linear_key_head_dim",
                                                "linear_value_head_dim",
                                                "linear_num_key_heads",
                                                "linear_num_value_heads",
                                                "mamba_ssm_dtype",
                                                "swiglu_limit",
                                                "swiglu_alpha",
                                                "n_embd",
                                                "n_layer",
                                                "n_head",
                                                "n_positions",
                                                "n_inner",
                                                "layer_norm_epsilon",
                                                "activation_function",
                                                "scale_attn_weights",
                                                "scale_attn_by_inverse_layer_idx",
                                                "add_cross_attention",
                                                "torch_dtype",
                                                "dtype",
                                                "use_cache",
                                                "attention_dropout",
                                                "transformers_version",
                                                "pretraining_tp"};
  return keys;
}

}  // namespace hotbunk
