#include "interop/export.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "interop/import.h"
#include "interop/rule_parts.h"
#include "spec/model_config.h"
#include "spec/pipeline_split.h"
#include "spec/scenario_keys.h"
#include "spec/shard_over.h"

namespace hotbunk {
namespace {

/// Their word for ours; none where they have none.
std::optional<std::string> word_for(const WordPairs& words, const std::string& ours) {
  for (const auto& [theirs, mine] : words)
    if (mine == ours && theirs != "*") return theirs;
  return words.empty() || number_of(ours) ? std::optional(ours) : std::nullopt;
}

std::string scenario_value(const std::string& key, const Scenario& scenario) {
  return yaml_of(find_scenario_key(key)->get(scenario));
}

class Exporter {
 public:
  Exporter(const LaunchTable& table, const Scenario& scenario)
      : table_(table),
        scenario_(scenario),
        roles_(scenario, std::ranges::any_of(table.keys, [](const LaunchKey& row) { return row.role == "layers"; })) {}

  ExportedLaunch run() {
    out_.command = table_.command;
    for (const LaunchRule& rule : launch_rules()) rule.write(roles_);
    for (const bool conditional : {false, true})  // what decides, before what it decides of
      for (const LaunchKey& row : table_.keys)
        if (row.when_key.empty() != conditional) put(row);
    for (const LaunchKey& row : table_.keys)
      if (const auto at = values_.find(row.key); at != values_.end()) out_.arguments.emplace_back(row.key, at->second);
    std::ranges::copy(roles_.beside, std::back_inserter(out_.arguments));
    std::ranges::copy(table_.writes, std::back_inserter(out_.arguments));
    LaunchSettings launch;
    for (const auto& [key, value] : out_.arguments) launch.settings.push_back({key, value, {}, {}, false});
    const auto back = import_settings(table_, launch, "export", ".");
    check_others(back ? back->scenario : scenario_, back.has_value());
    if (back) check_said(back->scenario), check_model(back->scenario.model);
    else out_.unsaid.push_back(fmt::format("the whole of it: {}", back.error()[0].message));
    check_folder();
    write();
    return std::move(out_);
  }

 private:
  void put(const LaunchKey& row) {
    if (row.to.empty() && row.role.empty()) return;
    if (!row.when_key.empty()) {
      const auto decides = values_.find(row.when_key);
      if (decides == values_.end() || std::ranges::find(row.when_values, decides->second) == row.when_values.end())
        return;
    }
    std::optional<std::string> value;
    if (!row.role.empty()) {
      const auto role = roles_.roles.find(row.role);
      if (role == roles_.roles.end()) return;
      value = word_for(row.words, role->second);
    } else {
      const std::string ours = scenario_value(row.to[0].scenario_key, scenario_);
      if (ours == "null") return;
      value = word_for(row.to[0].words, ours);
      if (value && row.factor != 1.0 && number_of(*value)) value = fmt::format("{}", *number_of(*value) / row.factor);
    }
    if (value) values_.emplace(row.key, *value);
  }

  /// fsdp and shard_over are two ways to say one group; a system that has neither may have a group all the same.
  static bool is_shard_group(const std::string& key) {
    return key == "train.layout.fsdp" || key == "train.layout.shard_over";
  }

  /// Those that the launch says something of.
  std::set<std::string> said_keys(const Scenario& back) const {
    std::set<std::string> out = exported_keys(table_);
    if (!back.train.layout.shard_over.empty()) out.insert("train.layout.shard_over");
    return out;
  }

  /// Keys of training, rollout, sync and algorithm that are not as they are by default, that the system lacks and that
  /// nothing else of the launch gives. `back`: what it says, where it `is_read`.
  void check_others(const Scenario& back, bool is_read) {
    const auto known = said_keys(back);
    const Scenario defaults;
    for (const ScenarioKey& key : scenario_keys()) {
      const bool is_of_launches = key.path.starts_with("train.") || key.path.starts_with("optimizer.") ||
                                  key.path.starts_with("rollout.") || key.path.starts_with("sync.") ||
                                  key.path.starts_with("algorithm.") || key.path == "workload.max_tokens";
      const bool said = known.contains(key.path) || std::ranges::any_of(table_.scenario, [&](const auto& fixed) {
                          return fixed.first == key.path;
                        });
      if (is_shard_group(key.path) && same_shard_group(scenario_.train.layout, back.train.layout)) continue;
      if (is_read && key.get(back) == key.get(scenario_)) continue;
      if (is_of_launches && key.in_resolved && !said && key.get(scenario_) != key.get(defaults))
        out_.unsaid.push_back(fmt::format("{}: {}", key.path, yaml_of(key.get(scenario_))));
    }
  }

  /// What the launch says otherwise than the scenario.
  void check_said(const Scenario& back) {
    for (const std::string& key : said_keys(back)) {
      if (is_shard_group(key) && same_shard_group(scenario_.train.layout, back.train.layout)) continue;
      // Layers of the ends and a list are two ways to say one split.
      const bool of_split = key == "train.pipeline_split" || key.ends_with("_pipeline_stage");
      if (of_split && split_layers(scenario_) == split_layers(back)) continue;
      if (const std::string wanted = scenario_value(key, scenario_), said = scenario_value(key, back); wanted != said)
        out_.unsaid.push_back(fmt::format("{}: {}; this says {}", key, wanted, said));
    }
  }

  /// The model's keys of config.json that the launch says otherwise, or not at all.
  void check_model(const ModelSpec& back) {
    if (scenario_.model.family == nullptr || back.family == nullptr) return;
    const auto keys_of = [](const ModelSpec& model) {
      std::map<std::string, std::string> out;
      flatten(config_of(model, DType::bf16), "model", out);
      out.erase("model.architectures");  // model_type says it
      // A tokenizer's, not of the model's sizes.
      out.erase("model.bos_token_id"), out.erase("model.eos_token_id");
      return out;
    };
    const auto wanted = keys_of(scenario_.model), said = keys_of(back);
    for (const auto& [key, value] : wanted) {
      const auto at = said.find(key);
      if (at == said.end()) out_.unsaid.push_back(fmt::format("{}: {}; this says nothing of it", key, value));
      else if (at->second != value) out_.unsaid.push_back(fmt::format("{}: {}; this says {}", key, value, at->second));
    }
    for (const auto& [key, value] : said)
      if (!wanted.contains(key)) out_.unsaid.push_back(fmt::format("no {}; this says {}", key, value));
  }

  /// Objects within it too, each value under its whole key.
  static void flatten(const nlohmann::json& config, const std::string& prefix,
                      std::map<std::string, std::string>& out) {
    for (const auto& [key, value] : config.items()) {
      const std::string path = prefix + "." + key;
      if (value.is_object()) flatten(value, path, out);
      else out[path] = value.dump();
    }
  }

  /// Sizes are all that training takes of a model; what rolls out reads its folder besides.
  void check_folder() {
    if (scenario_.algorithm.name == AlgorithmName::sft || !roles_.roles.contains("layers") ||
        roles_.roles.contains("model"))
      return;
    for (const LaunchKey& row : table_.keys)
      if (row.role == "model")
        out_.unsaid.push_back(
            fmt::format("the model's folder, which engine and tokenizer read: add {}", argument(row.key, "FOLDER")));
  }

  /// As a shell takes it: quoted where it has more than letters, digits and what paths hold.
  static std::string quoted(const std::string& text) {
    const bool plain = std::ranges::all_of(text, [](unsigned char c) {
      return std::isalnum(c) != 0 ||
             std::string_view("._-/=+,:@%").find(static_cast<char>(c)) != std::string_view::npos;
    });
    if (plain && !text.empty()) return text;
    std::string out = "'";
    for (const char c : text) {
      if (c == '\'') out += "'\\''";
      else out.push_back(c);
    }
    return out + "'";
  }

  std::string argument(const std::string& key, const std::string& value) const {
    if (table_.form == LaunchForm::hydra)
      return quoted(fmt::format("{}{}={}", key.find(".override_") == std::string::npos ? "" : "++", key, value));
    if (value == "true") return "--" + key;
    if (value.starts_with('[')) return fmt::format("--{} {}", key, fmt::join(rules::listed(value), " "));
    return fmt::format("--{} {}", key, quoted(value));
  }

  void write() {
    std::string& text = out_.text;
    for (const std::string& what : out_.unsaid) text += fmt::format("# {} has no key for {}\n", table_.title, what);
    const auto launcher = [](const std::string& key) { return key.starts_with("torchrun."); };
    text += out_.command;
    for (const auto& [key, value] : out_.arguments)
      if (launcher(key)) text += fmt::format(" --{} {}", key.substr(9), value);
    if (table_.command == "torchrun") text += " " + table_.entries[0];
    for (const auto& [key, value] : out_.arguments)
      if (!launcher(key) && !(table_.form == LaunchForm::flags && value == "false"))
        text += " \\\n    " + argument(key, value);
    text += "\n";
  }

  const LaunchTable& table_;
  const Scenario& scenario_;
  RuleOutput roles_;
  std::map<std::string, std::string> values_;
  ExportedLaunch out_;
};

}  // namespace

std::set<std::string> exported_keys(const LaunchTable& table) {
  std::set<std::string> out;
  for (const LaunchKey& row : table.keys)
    for (const KeyTarget& target : row.to) out.insert(target.scenario_key);
  const auto has = [&](const std::string& role) {
    return std::ranges::any_of(table.keys, [&](const LaunchKey& row) { return row.role == role; });
  };
  for (const LaunchRule& rule : launch_rules())
    for (const auto& [key, roles] : rule.scenario_keys)
      if (std::ranges::any_of(roles, has)) out.insert(key);
  return out;
}

std::optional<Diagnostic> why_not_exported(const LaunchTable& table, const Scenario& scenario) {
  const auto refused = [](std::string message, std::string help) {
    return Diagnostic{.code = "E156", .message = std::move(message), .where = {}, .notes = {}, .help = std::move(help)};
  };
  const bool only_trains = std::ranges::any_of(
      table.scenario, [](const auto& fixed) { return fixed.first == "algorithm.name" && fixed.second == "sft"; });
  if (only_trains && scenario.algorithm.name != AlgorithmName::sft)
    return refused(fmt::format("{} pre-trains, and the scenario's algorithm has a rollout", table.title),
                   "export verl, slime or nemo-rl, or set algorithm.name to sft");
  if (!only_trains && scenario.algorithm.name == AlgorithmName::sft)
    return refused(fmt::format("the scenario trains on data alone, and what is written of {} rolls out", table.title),
                   "export megatron, or set algorithm.name to grpo");
  if (scenario.model.lora.on() && !exported_keys(table).contains("train.lora.rank"))
    return refused(
        fmt::format("{} trains no adapters: a launch of it would train all of the model, and the scenario has "
                    "train.lora.rank {}",
                    table.title, scenario.model.lora.rank),
        "export verl or nemo-rl, or set train.lora.rank to 0");
  if (scenario.train.engine == TrainEngine::megatron)
    if (const auto lost = rules::without_bridge_module(scenario.model); !lost.empty())
      return refused(
          fmt::format("Megatron has no modules for adapters of {}'s {}", scenario.model.name, fmt::join(lost, ", ")),
          "set train.engine to fsdp2 and profile to verl-fsdp, whose launch names a model's own matrices, or "
          "train.lora.rank to 0");
  return std::nullopt;
}

ExportedLaunch export_launch(const LaunchTable& table, const Scenario& scenario) {
  return Exporter(table, scenario).run();
}

}  // namespace hotbunk
