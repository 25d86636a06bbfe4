#include "planner/cost/capabilities.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "base/file.h"
#include "spec/names.h"
#include "spec/transition.h"

namespace hotbunk {
namespace {

struct CapabilityFlag {
  const char* key;
  bool* at;
};
struct EngineNumber {
  const char* key;
  Sourced* at;
};

std::vector<CapabilityFlag> capability_flags(Capabilities& c) {
  return {{"tensor", &c.tensor},
          {"pipeline", &c.pipeline},
          {"expert", &c.expert},
          {"ring", &c.ring},
          {"ulysses", &c.ulysses},
          {"gpipe", &c.gpipe},
          {"zero_bubble", &c.zero_bubble},
          {"shard_groups", &c.shard_groups},
          {"layerwise_offload", &c.layerwise_offload},
          {"loss_chunks", &c.loss_chunks},
          {"critic_apart", &c.critic_apart},
          {"reference_apart", &c.reference_apart},
          {"padding", &c.padding},
          {"strided_engines", &c.strided_engines},
          {"rollout_pipeline", &c.rollout_pipeline},
          {"rollout_context", &c.rollout_context},
          {"rollout_experts", &c.rollout_experts},
          {"attention_dp", &c.attention_dp},
          {"apart", &c.apart},
          {"awake", &c.awake},
          {"sleeps_apart", &c.sleeps_apart},
          {"reshard_choice", &c.reshard_choice},
          {"bucket_choice", &c.bucket_choice},
          {"padded_vocabulary", &c.padded_vocabulary}};
}

struct CapabilityWords {
  const char* key;
  std::vector<std::string>* at;
  std::vector<std::string> known;
};

template <class E>
std::vector<std::string> all_words() {
  return {EnumNames<E>::names.begin(), EnumNames<E>::names.end()};
}

std::vector<CapabilityWords> capability_words(Capabilities& c) {
  const auto orders = transition_names();
  return {{"syncs", &c.syncs, all_words<SyncMode>()},
          {"syncs_apart", &c.syncs_apart, all_words<SyncMode>()},
          {"transitions", &c.transitions, {orders.begin(), orders.end()}},
          {"optimizers", &c.optimizers, all_words<OptimizerName>()},
          {"recomputes", &c.recomputes, all_words<Recompute>()},
          {"shards_over", &c.shards_over, {"dp", "cp", "ulysses"}}};
}

Diagnostic capability_mistake(const YamlNode& node, std::string message, std::string help = "") {
  return {.code = "E205", .message = std::move(message), .where = node.where, .notes = {}, .help = std::move(help)};
}

bool read_capability_flag(const YamlEntry& entry, Capabilities& can, Diagnostics& errors) {
  for (const CapabilityFlag& flag : capability_flags(can)) {
    if (entry.key != flag.key) continue;
    const YamlNode& value = entry.value;
    if (value.text != "true" && value.text != "false")
      errors.push_back(capability_mistake(
          value, fmt::format("can.{}: expected true or false, found {}", entry.key, value.describe())));
    *flag.at = value.text == "true";
    return true;
  }
  return false;
}

bool read_engine_number(const YamlNode& node, Sourced& out) {
  const YamlNode* const value = node.find("value");
  const YamlNode* const source = node.find("source");
  if (!value || !source || source->text.empty() || value->quoted) return false;
  char* end = nullptr;
  const double number = std::strtod(value->text.c_str(), &end);
  if (end == value->text.c_str() || *end != 0 || !std::isfinite(number) || number < 0.0) return false;
  out = {number, source->text};
  return true;
}

void read_words(const YamlEntry& entry, const CapabilityWords& words, Diagnostics& errors) {
  if (entry.value.kind != YamlNode::Kind::sequence)
    return errors.push_back(capability_mistake(
        entry.value, fmt::format("can.{}: expected a list, found {}", entry.key, entry.value.describe())));
  words.at->clear();
  for (const YamlNode& item : entry.value.items)
    if (std::ranges::find(words.known, item.text) == words.known.end())
      errors.push_back(capability_mistake(item, fmt::format("can.{}: no word {}", entry.key, item.describe()),
                                          fmt::format("one of {}", fmt::join(words.known, ", "))));
    else words.at->push_back(item.text);
}

Result<EngineProfile> read_engine(const std::filesystem::path& path) {
  auto text = read_file(path, std::int64_t{1} << 20);
  if (!text) return fail(text.error());
  auto root = parse_yaml(*text, path.string());
  if (!root) return fail(root.error());
  EngineProfile out;
  const std::vector<EngineNumber> numbers = {{"decode_sequence_seconds", &out.decode_sequence_seconds},
                                             {"decode_node_seconds", &out.decode_node_seconds},
                                             {"eager_kernel_seconds", &out.eager_kernel_seconds},
                                             {"graph_bytes", &out.graph_bytes},
                                             {"state_step_seconds", &out.state_step_seconds},
                                             {"state_sequence_seconds", &out.state_sequence_seconds}};
  Diagnostics errors;
  for (const YamlEntry& entry : root->entries) {
    if (entry.key == "schema" || entry.key == "name") continue;
    const auto at = std::ranges::find_if(numbers, [&](const EngineNumber& n) { return entry.key == n.key; });
    if (at == numbers.end())
      errors.push_back(
          capability_mistake(entry.value, fmt::format("unknown key '{}' in an engine's profile", entry.key)));
    else if (!read_engine_number(entry.value, *at->at))
      errors.push_back(
          capability_mistake(entry.value, fmt::format("{}: expected {{value: number >= 0, source: text}}", entry.key)));
  }
  if (!errors.empty()) return fail(std::move(errors));
  return out;
}

}  // namespace

void read_capabilities(const YamlNode& table, Capabilities& can, Diagnostics& errors) {
  if (table.kind != YamlNode::Kind::map)
    return errors.push_back(capability_mistake(table, fmt::format("can: expected a map, found {}", table.describe())));
  for (const YamlEntry& entry : table.entries) {
    if (entry.key == "source") {
      can.source = entry.value.text;
    } else if (!read_capability_flag(entry, can, errors)) {
      const auto words = capability_words(can);
      const auto at = std::ranges::find_if(words, [&](const CapabilityWords& w) { return entry.key == w.key; });
      if (at != words.end()) read_words(entry, *at, errors);
      else errors.push_back(capability_mistake(entry.value, fmt::format("can: unknown key '{}'", entry.key)));
    }
  }
  if (can.source.empty()) errors.push_back(capability_mistake(table, "can: a table of capabilities has a source"));
}

Result<FrameworkProfile> with_engines(Result<FrameworkProfile> frame, const std::filesystem::path& catalogue) {
  if (!frame) return frame;
  for (const auto& [name, at] : {std::pair{"vllm", &FrameworkProfile::vllm}, {"sglang", &FrameworkProfile::sglang}}) {
    auto engine = read_engine(catalogue / "engines" / fmt::format("{}.yaml", name));
    if (!engine) return fail(engine.error());
    (*frame).*at = std::move(*engine);
  }
  return frame;
}

}  // namespace hotbunk
