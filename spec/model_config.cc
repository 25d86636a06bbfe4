// From a Hugging Face config.json to a ModelSpec: what all families have in common, and which one it is. Each reads its
// own keys (spec/family.h).
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
#include "spec/config_reader.h"
#include "spec/family.h"
#include "spec/json_read.h"
#include "spec/safetensors.h"

namespace hotbunk {
namespace {

using nlohmann::json;
using std::int64_t;

constexpr long double max_parameters = 1e15L;

/// By what tells architectures apart: most are called something + "ForCausalLM".
/// Of families that are not read: what they have that no known one has, and whose sizes give the nearest estimate.
struct OtherFamily {
  std::string_view stem, has, estimate;
};
constexpr OtherFamily other_families[] = {
    {"PhiMoE", "LayerNorm, sparse-mixer routing", "Mixtral"},
    {"Phi3V", "an encoder of images", "Phi3"},
    {"Phi3Small", "blocks of sparse attention, LayerNorm, another activation", "Phi3"},
    {"Phi4", "encoders of images and speech, or attention that another layer's keys serve", "Phi3"},
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

/// The first of "architectures", a list of class names; "" when there is none.
std::string architecture(ConfigReader& c) {
  const json* list = c.find("architectures");
  if (list == nullptr || (list->is_array() && list->empty())) return "";
  if (list->is_array() && list->front().is_string()) return list->front().get<std::string>();
  c.report("E411", "architectures",
           fmt::format("config key \"architectures\" is {}, expected a list of class names",
                       list->is_array() ? "a list of something else" : describe_json(*list)));
  return "";
}

/// nullptr: it has been reported why.
const FamilySpec* family_named(ConfigReader& c) {
  std::string key = "model_type", found = c.text("model_type", "");
  if (const std::string first = architecture(c); !first.empty()) {
    key = "architectures";
    found = first;
  }
  if (!c.ok()) return nullptr;
  if (found.empty()) {
    c.report("E410", key, "config names neither \"architectures\" nor \"model_type\"");
    return nullptr;
  }
  std::vector<std::string> names;
  for (const FamilySpec* known : families()) {
    if (found == known->class_name || found == known->model_type) return known;
    names.emplace_back(key == "architectures" ? known->class_name : known->model_type);
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
    c.report("E412", key, fmt::format("architecture \"{}\" is not known", found.substr(0, 100)), std::move(notes),
             other->estimate.empty()
                 ? "a known architecture has no like of it: no estimate"
                 : fmt::format("for an estimate, its sizes in a config.json that says \"{}ForCausalLM\"; "
                               "what differs is then not counted",
                               other->estimate));
    return nullptr;
  }
  c.report("E412", key, fmt::format("architecture \"{}\" is not known", found.substr(0, 100)), std::move(notes),
           nearest.empty() ? "for an estimate, a config.json of its sizes that names one of these; what differs beside "
                             "sizes (norms, windows, biases) is then not counted"
                           : fmt::format("did you mean \"{}\"?", nearest));
  return nullptr;
}

void check_groups(ConfigReader& c, const MoeSpec& e) {
  const int64_t each = e.experts / e.groups;
  if (e.topk_groups > e.groups || e.topk_groups * each < e.experts_per_token)
    c.report("E413", "topk_group", "the groups taken do not hold a token's experts",
             {fmt::format("topk_group {} of n_group {}, {} experts each; num_experts_per_tok {}", e.topk_groups,
                          e.groups, each, e.experts_per_token)});
  if (e.router_bias && each < 2)
    c.report("E413", "n_group", "a group is rated by its two best experts",
             {fmt::format("{} experts / n_group {} = {}", e.experts, e.groups, each)});
}

void check_sizes(ConfigReader& c, const ModelSpec& m) {
  if (m.heads % m.kv_heads != 0)
    c.report("E413", "num_key_value_heads", "query heads are no multiple of the key-value heads",
             {fmt::format("num_attention_heads {} % num_key_value_heads {} = {}", m.heads, m.kv_heads,
                          m.heads % m.kv_heads)});
  if (m.head_dim % 2 != 0 && !m.learned_positions && !m.mla)
    c.report("E413", "head_dim", fmt::format("head_dim {} is odd; rotary embedding turns pairs", m.head_dim));
  if (m.moe && m.moe->experts_per_token > m.moe->experts)
    c.report("E413", "num_experts_per_tok",
             fmt::format("{} experts per token of {} experts", m.moe->experts_per_token, m.moe->experts));
  if (m.moe && m.moe->groups > 1 && m.moe->experts % m.moe->groups != 0)
    c.report("E413", "n_group", fmt::format("{} experts do not divide into {} groups", m.moe->experts, m.moe->groups));
  else if (m.moe && m.moe->groups > 1) check_groups(c, *m.moe);
  const long double n = approximate_parameter_count(m);
  if (n > max_parameters)
    c.report("E413", "hidden_size", fmt::format("the model has {:.3g} parameters", static_cast<double>(n)),
             {fmt::format("more than {:.0e} is taken for a mistake", static_cast<double>(max_parameters))});
}

Result<ModelSpec> read_config(ConfigReader& c, const std::string& name) {
  ModelSpec m;
  m.name = name;
  if (!c.document().is_object()) {
    c.report("E411", "", fmt::format("the config is {}, expected an object", describe_json(c.document())));
    return fail(c.take_problems());
  }
  const FamilySpec* const family = family_named(c);
  if (family == nullptr) return fail(c.take_problems());
  m.family = family;
  family->read(c, m);
  m.eos_token = c.token("eos_token_id", m.vocab);
  m.bos_token = c.token("bos_token_id", m.vocab);
  m.init_range = c.real("initializer_range", 0.02, 0.0, 1e3);
  if (c.ok()) check_sizes(c, m);
  if (!c.ok()) return fail(c.take_problems());
  return m;
}

}  // namespace

Result<ModelSpec> model_from_json(const json& config, const std::string& name, const KeyLocator& locate) {
  // Of a model with a vision tower the language model, whose config lies within.
  const auto within = std::ranges::find_if(families(), [&](const FamilySpec* f) {
    return !f->model_type_around.empty() && config.is_object() &&
           config.value("model_type", json()) == std::string(f->model_type_around) && config.contains("text_config") &&
           config["text_config"].is_object();
  });
  if (within == families().end()) {
    ConfigReader reader(config, locate);
    return read_config(reader, name);
  }
  json text = config["text_config"];
  text["architectures"] = {(*within)->class_name};
  if (!text.contains("tie_word_embeddings") && config.contains("tie_word_embeddings"))
    text["tie_word_embeddings"] = config["tie_word_embeddings"];
  ConfigReader reader(text, locate);
  return read_config(reader, name);
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
  static const std::vector<std::string> keys = [] {
    // Llama's, which most families have, and what says nothing here.
    std::vector<std::string> all = {"architectures",
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
                                    "layer_types",
                                    "eos_token_id",
                                    "bos_token_id",
                                    "pad_token_id",
                                    "initializer_range",
                                    "torch_dtype",
                                    "dtype",
                                    "use_cache",
                                    "attention_dropout",
                                    "transformers_version",
                                    "pretraining_tp"};
    for (const FamilySpec* family : families())
      for (const auto& more : {family->keys, family->keys_of_parts})
        for (const std::string_view key : more)
          if (std::ranges::find(all, key) == all.end()) all.emplace_back(key);
    return all;
  }();
  return keys;
}

}  // namespace hotbunk
