#include "interop/launch_model.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "spec/catalog.h"
#include "spec/family.h"
#include "spec/model_source.h"
#include "spec/scenario_keys.h"
#include "spec/yaml_tree.h"

namespace hotbunk {
namespace {

/// "deepseek-v3" of "/models/DeepSeek-V3/": the catalogue's word for what a path ends in; a name of the hub stays; "".
std::string known_name(std::string text) {
  while (text.ends_with('/')) text.pop_back();
  const std::string last = text.substr(text.rfind('/') + 1);
  std::string lower = last;
  std::ranges::transform(lower, lower.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const auto names = catalog_names("models");
  if (std::ranges::find(names, lower) != names.end() && last == text) return lower;
  const bool of_the_hub = text != last && text[0] != '/' && text[0] != '.' && std::ranges::count(text, '/') == 1;
  const std::string known = catalog_model_of_hub(last);
  if (!known.empty()) return of_the_hub ? text : known;
  // "llama-3-8b" of "Llama-3-8b-sft-mixture": the longest name that it begins with.
  std::string longest;
  for (const std::string& name : names) {
    const bool begins = lower.starts_with(name) &&
                        (lower.size() == name.size() || lower[name.size()] == '-' || lower[name.size()] == '_');
    if (begins && name.size() > longest.size()) longest = name;
  }
  return longest;
}

/// "deepseek-v3" of "grpo-deepseek-v3-32n8g": the longest of the catalogue's names that stands whole in the launch's;
/// "".
std::string name_within(std::string launch) {
  std::ranges::transform(launch, launch.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const auto ends = [&](std::size_t at) {
    return at >= launch.size() || std::isalnum(static_cast<unsigned char>(launch[at])) == 0;
  };
  std::string longest;
  for (const std::string& name : catalog_names("models")) {
    const auto at = launch.find(name);
    if (at != std::string::npos && (at == 0 || ends(at - 1)) && ends(at + name.size()) && name.size() > longest.size())
      longest = name;
  }
  return longest;
}

/// With the keys of config.json that the user sets: --set model.num_hidden_layers=2.
std::string with_chosen(const RuleInput& in, std::string yaml) {
  std::string more;
  for (const auto& [key, value] : in.chosen)
    if (key.starts_with("model.")) more += fmt::format(", {}: {}", key.substr(6), value);
  if (more.empty()) return yaml;
  if (yaml.starts_with('{')) yaml.pop_back();
  else yaml = "{base: " + yaml;
  return yaml + more + "}";
}

bool take(RuleInput& in, const std::string& said, const std::string& comment, const SourceLocation& where) {
  const std::string yaml = with_chosen(in, said);
  const auto tree = parse_yaml("model: " + yaml, where.file.empty() ? "--set model" : where.file);
  if (!tree || tree->find("model") == nullptr) return false;
  auto model = read_model(*tree->find("model"), in.folder);
  if (!model) {
    for (Diagnostic& d : model.error()) {
      d.where = where;
      in.problems.push_back(std::move(d));
    }
    return true;
  }
  in.model = std::move(*model);
  in.set("model", yaml, comment, where);
  return true;
}

/// Megatron's sizes as keys of config.json; "": they are not all there.
std::string spelled_out(RuleInput& in) {
  const auto layers = in.number("layers"), hidden = in.number("hidden"), heads = in.number("heads");
  // Latent attention and shared experts have sizes that no role has: their config.json says them.
  if (!layers || !hidden || !heads || in.find("unspelled") != nullptr) return "";
  std::vector<std::string> keys;
  const auto add = [&](const char* key, const std::string& value) {
    keys.push_back(fmt::format("{}: {}", key, value));
  };
  const auto vocab = in.number("vocab"), positions = in.number("positions");
  const bool gated = in.is_true("swiglu");
  if (!gated) {
    add("model_type", "gpt2");
    add("n_layer", fmt::format("{}", *layers));
    add("n_embd", fmt::format("{}", *hidden));
    add("n_head", fmt::format("{}", *heads));
    if (const auto ffn = in.number("ffn")) add("n_inner", fmt::format("{}", *ffn));
    if (positions) add("n_positions", fmt::format("{}", *positions));
    add("vocab_size", fmt::format("{}", vocab.value_or(50257)));
    add("layer_norm_epsilon", fmt::format("{}", in.number("norm_epsilon").value_or(1e-5)));
    if (in.is_true("untied")) add("tie_word_embeddings", "false");
    return fmt::format("{{{}}}", fmt::join(keys, ", "));
  }
  const auto experts = in.number("experts");
  const bool moe = experts && *experts > 1;
  const bool mixtral = moe && !in.number("expert_ffn");
  // Biases of q, k and v without one behind attention are Qwen2's.
  add("model_type", moe ? (mixtral ? "mixtral" : "qwen3_moe") : in.is_true("qkv_bias") ? "qwen2" : "llama");
  add("num_hidden_layers", fmt::format("{}", *layers));
  add("hidden_size", fmt::format("{}", *hidden));
  add("intermediate_size", fmt::format("{}", in.number("ffn").value_or(4 * *hidden)));
  add("num_attention_heads", fmt::format("{}", *heads));
  add("num_key_value_heads", fmt::format("{}", in.number("kv_heads").value_or(*heads)));
  if (const auto dim = in.number("head_dim")) add("head_dim", fmt::format("{}", *dim));
  add("vocab_size", fmt::format("{}", vocab.value_or(32000)));
  add("max_position_embeddings", fmt::format("{}", positions.value_or(131072)));
  // Megatron's defaults, of any family.
  add("rope_theta", fmt::format("{}", in.number("rotary_base").value_or(10000)));
  add("rms_norm_eps", fmt::format("{}", in.number("norm_epsilon").value_or(1e-5)));
  if (mixtral) {
    add("num_local_experts", fmt::format("{}", *experts));
    add("num_experts_per_tok", fmt::format("{}", in.number("experts_per_token").value_or(2)));
  } else if (moe) {
    add("num_experts", fmt::format("{}", *experts));
    add("num_experts_per_tok", fmt::format("{}", in.number("experts_per_token").value_or(2)));
    add("moe_intermediate_size", fmt::format("{}", *in.number("expert_ffn")));
  }
  add("tie_word_embeddings", in.is_true("untied") ? "false" : "true");
  return fmt::format("{{{}}}", fmt::join(keys, ", "));
}

/// The base with more positions than its config says.
std::string with_positions(RuleInput& in, const std::string& name) {
  const auto positions = in.number("max_positions");
  return positions ? fmt::format("{{base: {}, max_position_embeddings: {}}}", yaml_text(name), *positions)
                   : yaml_text(name);
}

}  // namespace

void find_launch_model(RuleInput& in) {
  if (const auto chosen = in.chosen.find("model"); chosen != in.chosen.end()) {
    const std::string value = chosen->second;
    in.chosen.erase(chosen);
    take(in, value, "--set", {});
    in.chosen.emplace("model", value);
    return;
  }
  const RoleValue* const role = in.find("model");
  if (role != nullptr) {
    const RoleValue found = *role;
    const RoleValue* const variant = in.find("model_flavor");
    const std::string flavor = variant == nullptr || variant->value.empty() ? "" : "-" + variant->value;
    std::error_code ignored;
    const auto path = resolve_path(found.value, in.folder);
    if (!found.value.empty() && std::filesystem::exists(path / "config.json", ignored)) {
      take(in, with_positions(in, (path / "config.json").string()), found.said, found.where);
      return;
    }
    if (const std::string name = known_name(found.value + flavor); !name.empty()) {
      const bool by_beginning = catalog_model_of_hub(found.value).empty() && !found.value.ends_with(name);
      take(in, with_positions(in, name), found.said + (by_beginning ? ", by the name's beginning" : ""), found.where);
      return;
    }
  }
  // A sentence in the model's place: "Follow instructions in …".
  if (role != nullptr && role->value.find(' ') != std::string::npos)
    if (const std::string name = name_within(in.launch); !name.empty()) {
      take(in, name, "by the launch's name, " + role->said + " is none: --set model=NAME", role->where);
      return;
    }
  if (const std::string sizes = spelled_out(in); !sizes.empty()) {
    take(in, sizes, "Megatron's sizes: " + in.said("layers"), in.find("layers")->where);
    return;
  }
  in.problems.push_back(
      {.code = "E153",
       .message = role == nullptr ? "the launch names no model"
                                  : fmt::format("no model of the catalogue is meant by {}", role->said),
       .where = role == nullptr ? SourceLocation{} : role->where,
       .notes = {"known are names of the catalogue and of the Hugging Face hub for them, also as the end of a path; "
                 "folders with a config.json; Megatron's sizes"},
       .help = "say which it is: --set model=NAME (a name of the catalogue, or the path of a config.json)"});
}

bool give_model_sizes(RuleOutput& out) {
  const ModelSpec& m = out.scenario.model;
  const std::string_view type = m.family == nullptr ? "" : m.family->model_type;
  const bool gpt = type == "gpt2", mixtral = type == "mixtral", moe = mixtral || type == "qwen3_moe";
  if (!gpt && !moe && type != "llama" && type != "qwen2") return false;
  const auto give = [&](const char* role, std::int64_t value) { out.give(role, static_cast<double>(value)); };
  give("layers", m.layers), give("hidden", m.hidden), give("heads", m.heads);
  give("ffn", m.intermediate), give("vocab", m.vocab), give("positions", m.max_position);
  out.give("untied", !m.tie_embeddings), out.give("norm_epsilon", m.norm_eps);
  if (gpt) return true;
  give("kv_heads", m.kv_heads), give("head_dim", m.head_dim);
  out.give("swiglu", true);
  if (m.qkv_bias) out.give("qkv_bias", true);
  // A whole number there.
  if (m.rope_theta == std::floor(m.rope_theta)) out.give("rotary_base", m.rope_theta);
  if (moe) give("experts", m.moe->experts), give("experts_per_token", m.moe->experts_per_token);
  if (moe && !mixtral) give("expert_ffn", m.moe->expert_intermediate);
  out.beside = {{"normalization", "RMSNorm"}, {"position-embedding-type", "rope"}, {"disable-bias-linear", "true"}};
  if (m.kv_heads < m.heads) out.beside.emplace_back("group-query-attention", "true");
  if (m.qk_norm) out.beside.emplace_back("qk-layernorm", "true");
  return true;
}

}  // namespace hotbunk
