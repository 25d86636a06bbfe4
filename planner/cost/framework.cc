#include "planner/cost/framework.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/file.h"
#include "planner/cost/capabilities.h"
#include "planner/cost/profile_mistake.h"
#include "spec/yaml_tree.h"

namespace hotbunk {
namespace {

struct Flag {
  const char* key;
  bool* at;
};
struct Number {
  const char* key;
  Sourced* at;
};

std::vector<Flag> flags_of(FrameworkProfile& f) {
  return {{"fused_attention", &f.fused_attention},
          {"flash2_attention", &f.flash2_attention},
          {"repeated_kv", &f.repeated_kv},
          {"gathered_context", &f.gathered_context},
          {"dropout", &f.dropout},
          {"overlap_tensor", &f.overlap_tensor},
          {"overlap_grad_reduce", &f.overlap_grad_reduce},
          {"overlap_param_gather", &f.overlap_param_gather},
          {"overlap_pipeline", &f.overlap_pipeline},
          {"fused_accumulation", &f.fused_accumulation},
          {"overlap_expert", &f.overlap_expert},
          {"distinct_dispatch", &f.distinct_dispatch},
          {"uneven_chunks", &f.uneven_chunks},
          {"pads_sequences", &f.pads_sequences},
          {"lowered_ops", &f.lowered_ops},
          {"flat_units", &f.flat_units},
          {"eager_activations", &f.eager_activations},
          {"selective_products", &f.selective_products},
          {"dummy_weight_grads", &f.dummy_weight_grads},
          {"sleeps_gradients", &f.sleeps_gradients},
          {"separate_master", &f.separate_master},
          {"own_reference", &f.own_reference},
          {"rebuilds_communicators", &f.rebuilds_communicators},
          {"sleeps_graphs", &f.sleeps_graphs},
          {"engine_first", &f.engine_first}};
}

std::vector<Number> numbers_of(FrameworkProfile& f) {
  return {{"loss_bytes", &f.loss_bytes},
          {"loss_traffic", &f.loss_traffic},
          {"vocab_multiple", &f.vocab_multiple},
          {"token_multiple", &f.token_multiple},
          {"workspace_bytes", &f.workspace_bytes},
          {"context_bytes", &f.context_bytes},
          {"communicator_bytes", &f.communicator_bytes},
          {"dispatch_bytes", &f.dispatch_bytes},
          {"forward_kernels", &f.forward_kernels},
          {"routing_kernels", &f.routing_kernels},
          {"loss_kernels", &f.loss_kernels},
          {"backward_kernels", &f.backward_kernels},
          {"kernel_seconds", &f.kernel_seconds},
          {"kernel_overhead", &f.kernel_overhead},
          {"softmax_kernels", &f.softmax_kernels},
          {"elementwise_passes", &f.elementwise_passes},
          {"collective_kernels", &f.collective_kernels},
          {"launch_seconds", &f.launch_seconds},
          {"unit_tensors", &f.unit_tensors},
          {"rank_launches", &f.rank_launches},
          {"host_step_passes", &f.host_step_passes},
          {"data_rate", &f.data_rate},
          {"iteration_seconds", &f.iteration_seconds},
          {"sample_seconds", &f.sample_seconds},
          {"logprob_token_seconds", &f.logprob_token_seconds},
          {"update_cleanup_seconds", &f.update_cleanup_seconds},
          {"asleep_reserved_bytes", &f.asleep_reserved_bytes},
          {"host_weight_copies", &f.host_weight_copies},
          {"host_process_bytes", &f.host_process_bytes},
          {"load_copies", &f.load_copies},
          {"host_node_bytes", &f.host_node_bytes},
          {"host_share", &f.host_share},
          {"broadcast_ports", &f.broadcast_ports},
          {"memory_error", &f.memory_error},
          {"step_seconds", &f.step_seconds}};
}

bool read_number(const YamlNode& node, Sourced& out) {
  const YamlNode* value = node.find("value");
  const YamlNode* source = node.find("source");
  if (!value || !source || source->text.empty() || value->quoted) return false;
  double number = 0.0;
  const char* end = value->text.data() + value->text.size();
  const auto [stop, error] = std::from_chars(value->text.data(), end, number);
  if (error != std::errc{} || stop != end || !std::isfinite(number) || number < 0.0) return false;
  out = {number, source->text};
  return true;
}

void read_modules(const YamlNode& list, FrameworkProfile& f, Diagnostics& errors) {
  if (list.kind != YamlNode::Kind::sequence)
    return errors.push_back(
        profile_mistake(list, fmt::format("recompute_modules: expected a list of modules, found {}", list.describe())));
  f.recompute_modules = {};
  for (const YamlNode& item : list.items) {
    if (const auto module = recompute_module(item.text)) f.recompute_modules.add(*module);
    else
      errors.push_back(profile_mistake(item, fmt::format("recompute_modules: no module {}", item.describe()),
                                       fmt::format("one of {}", fmt::join(recompute_module_names, ", "))));
  }
}

void read_entry(const YamlEntry& entry, FrameworkProfile& f, Diagnostics& errors) {
  const YamlNode& value = entry.value;
  for (const Flag& flag : flags_of(f)) {
    if (entry.key != flag.key) continue;
    if (value.text != "true" && value.text != "false")
      errors.push_back(
          profile_mistake(value, fmt::format("{}: expected true or false, found {}", entry.key, value.describe())));
    *flag.at = value.text == "true";
    return;
  }
  for (const Number& number : numbers_of(f)) {
    if (entry.key != number.key) continue;
    if (!read_number(value, *number.at))
      errors.push_back(
          profile_mistake(value, fmt::format("{}: expected {{value: number >= 0, source: text}}", entry.key)));
    return;
  }
  if (entry.key == "recompute_modules") {
    read_modules(value, f, errors);
  } else if (entry.key == "can") {
    read_capabilities(value, f.can, errors);
  } else if (entry.key == "name") {
    f.name = value.text;
  } else if (entry.key == "source") {
    f.source = value.text;
  } else if (entry.key == "scenario") {
    // Defaults of scenario keys: the loader's.
  } else if (entry.key == "schema") {
    if (value.text != "hotbunk.framework/1")
      errors.push_back(profile_mistake(value, fmt::format("schema is '{}', expected hotbunk.framework/1", value.text)));
  } else {
    std::vector<std::string> names = {"name", "source", "schema", "recompute_modules"};
    for (const Flag& flag : flags_of(f)) names.emplace_back(flag.key);
    for (const Number& number : numbers_of(f)) names.emplace_back(number.key);
    const std::string near = nearest_name(entry.key, names);
    errors.push_back(profile_mistake(value, fmt::format("unknown key '{}' in a framework profile", entry.key),
                                     near.empty() ? "" : "did you mean " + near + "?"));
  }
}

}  // namespace

Result<FrameworkProfile> parse_framework(const std::string& text, const std::string& file) {
  auto root = parse_yaml(text, file);
  if (!root) return fail(root.error());
  if (root->kind != YamlNode::Kind::map || !root->find("schema"))
    return fail(profile_mistake(*root, "not a framework profile", "the file starts with schema: hotbunk.framework/1"));
  FrameworkProfile f;
  Diagnostics errors;
  for (const YamlEntry& entry : root->entries) read_entry(entry, f, errors);
  if (!errors.empty()) return fail(std::move(errors));
  return f;
}

Result<FrameworkProfile> read_framework(const std::filesystem::path& path) {
  auto text = read_file(path, std::int64_t{1} << 20);
  if (!text) return fail(text.error());
  return parse_framework(*text, path.string());
}

Result<FrameworkProfile> framework_named(const std::string& name, const std::filesystem::path& catalogue) {
  const std::filesystem::path folder = catalogue / "frameworks";
  std::error_code error;
  std::vector<std::string> known;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error))
    if (entry.path().extension() == ".yaml") known.push_back(entry.path().stem().string());
  std::sort(known.begin(), known.end());
  if (std::find(known.begin(), known.end(), name) != known.end())
    return with_engines(read_framework(folder / (name + ".yaml")), catalogue);
  const std::string near = nearest_name(name, known);
  return fail(Diagnostic{.code = "E209",
                         .message = fmt::format("no framework profile '{}'", name),
                         .where = {},
                         .notes = {fmt::format("known: {}", fmt::join(known, ", "))},
                         .help = near.empty() ? "" : "did you mean " + near + "?"});
}

}  // namespace hotbunk
