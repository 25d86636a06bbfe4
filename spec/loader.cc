// One reader of a scenario's file, from YAML to the checked Scenario: long for the places of keys in the user's files,
// which every error of it names and all its parts share.
#include "spec/loader.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>

#include "base/file.h"
#include "base/format.h"
#include "spec/auto_ranks.h"
#include "spec/catalog.h"
#include "spec/model_source.h"
#include "spec/names.h"
#include "spec/scenario_keys.h"
#include "spec/validate.h"
#include "spec/yaml_tree.h"

namespace hotbunk {
namespace fs = std::filesystem;
namespace {

constexpr std::int64_t max_file_bytes = 4 << 20;

template <class T>
bool parse_whole(const std::string& text, T& value) {
  const char* begin = text.data() + (text.size() > 1 && text[0] == '+' && text[1] != '-' ? 1 : 0);
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(begin, end, value);
  return error == std::errc() && at == end;
}

bool parse_number(const YamlNode& node, double& value) {
  if (node.kind != YamlNode::Kind::scalar || node.quoted) return false;
  if (node.text == ".inf" || node.text == "-.inf" || node.text == ".nan" || node.text == ".NaN") {
    value = std::nan("");
    return true;
  }
  return parse_whole(node.text, value);
}

/// "an integer from 1 to 64", "one of none, full": what a key takes.
std::string expectation(const ScenarioKey& key) {
  const std::string range = fmt::format(" from {} to {}{}{}", key.low, key.high, key.unit.empty() ? "" : " ", key.unit);
  switch (key.type) {
    case KeyType::integer:
      return "an integer" + range + (key.may_be_auto ? ", or auto" : "");
    case KeyType::real:
      return "a number" + range;
    case KeyType::boolean:
      return key.may_be_count ? "true, false, or an integer" + range : "true or false";
    case KeyType::text:
      return "text";
    case KeyType::steps:
      return "text, or a list of words";
    case KeyType::choice:
      return fmt::format("one of {}", fmt::join(key.choices, ", "));
    case KeyType::integers:
      return "a list of integers" + range;
    case KeyType::slowdowns:
      return fmt::format("a list of maps {{{}}}", fmt::join(key.fields, ", "));
    case KeyType::sourced:
      return "a number" + range + ", or {value: …, source: …}";
  }
  return "";
}

class Loader {
 public:
  explicit Loader(std::string file) : file_(std::move(file)), folder_(fs::path(file_).parent_path()) {}

  Result<Scenario> load(YamlNode root, const std::vector<std::string>& overrides) {
    if (root.kind == YamlNode::Kind::null) root.kind = YamlNode::Kind::map, root.where = {file_};
    if (root.kind != YamlNode::Kind::map) {
      report("E205", fmt::format("the scenario is {}, expected a map of keys", root.describe()), root.where);
      return fail(std::move(problems_));
    }
    for (const auto& text : overrides) apply_override(root, text);
    load_gpu_base(root);
    load_profile_defaults(root);
    walk(root, "");
    if (root.find("model") == nullptr && !problems_have("E202"))
      report("E208", "the scenario names no model", {file_}, {},
             "add `model: ` with a catalogue name, a config.json or a model folder");
    fill_derived();
    open_layouts(root);
    const auto locator = [this](std::string_view path) { return locate(path); };
    if (problems_.empty()) problems_ = fill_auto(scenario_, locator);
    if (problems_.empty()) problems_ = validate(scenario_, locator);
    if (!problems_.empty()) return fail(std::move(problems_));
    return std::move(scenario_);
  }

 private:
  void report(const char* code, std::string message, SourceLocation where, std::vector<std::string> notes = {},
              std::string help = {}) {
    problems_.push_back({.code = code,
                         .message = std::move(message),
                         .where = std::move(where),
                         .notes = std::move(notes),
                         .help = std::move(help)});
  }
  void report(const Diagnostics& more) { problems_.insert(problems_.end(), more.begin(), more.end()); }
  bool problems_have(std::string_view code) const {
    return std::any_of(problems_.begin(), problems_.end(), [&](const Diagnostic& d) { return d.code == code; });
  }

  /// A layout of which the scenario says nothing is open: on more than one GPU its dimensions are auto. Two sets of
  /// GPUs have none: nothing says how many ranks each has.
  void open_layouts(const YamlNode& root) {
    const Scenario& s = scenario_;
    const bool rolls = s.algorithm.name != AlgorithmName::sft;
    if (s.cluster.ranks() <= 1 || (rolls && s.placement != PlacementMode::colocated)) return;
    const auto silent = [&](const char* section) {
      const YamlNode* const of = root.find(section);
      return of == nullptr || of->find("layout") == nullptr;
    };
    if (silent("train")) scenario_.open.keys.push_back("train.layout.dp");
    if (rolls && silent("rollout"))
      for (const char* key : {"rollout.layout.dp", "rollout.layout.tp"}) scenario_.open.keys.push_back(key);
  }

  SourceLocation locate(std::string_view path) const {
    for (;;) {
      if (const auto at = where_.find(path); at != where_.end()) return at->second;
      const auto dot = path.rfind('.');
      if (dot == std::string_view::npos) return {file_};
      path = path.substr(0, dot);
    }
  }

  // ---- --set -------------------------------------------------------------------------------------------------------

  void apply_override(YamlNode& root, const std::string& text) {
    if (!is_utf8(text))
      return report("E201", "the text is no UTF-8", {fmt::format("--set {}", text.substr(0, text.find('=')))}, {},
                    "write names and paths in UTF-8");
    // Every value of it will carry this name.
    const SourceLocation where{fmt::format("--set {}", text.size() > 200 ? text.substr(0, 200) + "…" : text)};
    const auto equals = text.find('=');
    const std::string path = text.substr(0, equals);
    if (equals == std::string::npos || path.empty() || path.front() == '.' || path.back() == '.' ||
        path.find("..") != std::string::npos || std::count(path.begin(), path.end(), '.') > 8)
      return report("E210", "--set needs the form a.b.c=value", where, {}, "for example --set train.layout.tp=2");
    auto value = parse_yaml(text.substr(equals + 1), where.file);
    if (!value) {
      for (const auto& problem : value.error()) report(problem.code.c_str(), problem.message, where);
      return;
    }
    move_to(*value, where);
    YamlNode* map = &root;
    for (std::size_t from = 0;;) {
      const auto dot = path.find('.', from);
      const std::string key = path.substr(from, dot == std::string::npos ? dot : dot - from);
      YamlNode* child = map->find(key);
      if (child == nullptr) {
        map->entries.push_back({key, where, {}});
        child = &map->entries.back().value;
        child->where = where;
      }
      if (dot == std::string::npos) {
        *child = std::move(*value);
        for (auto& entry : map->entries)
          if (entry.key == key) entry.where = where;
        return;
      }
      const std::string here = path.substr(0, dot);
      if (child->kind == YamlNode::Kind::null) child->kind = YamlNode::Kind::map;
      if (child->kind == YamlNode::Kind::scalar && (here == "model" || here == "cluster.gpu")) {
        // `gpu: NAME` is short for `gpu: {base: NAME}`: one key of a catalogue entry may be changed.
        YamlNode base = *child;
        *child = {};
        child->kind = YamlNode::Kind::map;
        child->where = base.where;
        const SourceLocation base_where = base.where;
        child->entries.push_back({"base", base_where, std::move(base)});
      }
      if (child->kind != YamlNode::Kind::map)
        return report(
            "E205", fmt::format("{} is {}, so it has no key {}", here, child->describe(), path.substr(dot + 1)), where);
      map = child;
      from = dot + 1;
    }
  }

  static void move_to(YamlNode& node, const SourceLocation& where) {
    node.where = where;
    for (auto& item : node.items) move_to(item, where);
    for (auto& entry : node.entries) {
      entry.where = where;
      move_to(entry.value, where);
    }
  }

  // ---- the GPU before every other key ------------------------------------------------------------------------------

  void load_gpu_base(YamlNode& root) {
    YamlNode* cluster = root.find("cluster");
    YamlNode* gpu = cluster == nullptr ? nullptr : cluster->find("gpu");
    if (YamlNode* devices = cluster == nullptr ? nullptr : cluster->find("gpus_per_node"))
      if (double n = 0; parse_number(*devices, n) && n >= 1 && n <= 4096) local_devices_ = std::floor(n);
    if (gpu == nullptr || gpu->kind == YamlNode::Kind::null) return load_gpu("local-cpu", {file_});
    if (gpu->kind == YamlNode::Kind::scalar) return load_gpu(gpu->text, gpu->where);
    if (const YamlNode* base = gpu->find("base"); base != nullptr && base->kind == YamlNode::Kind::scalar)
      return load_gpu(base->text, base->where);
    if (gpu->kind == YamlNode::Kind::map)
      for (const char* needed : {"name", "memory_gib"})
        if (gpu->find(needed) == nullptr)
          report("E208", fmt::format("cluster.gpu spells a device out but has no {}", needed), gpu->where, {},
                 "add it, or name a catalogue GPU with `base`");
  }

  void load_gpu(const std::string& name, const SourceLocation& where) {
    const std::vector<std::string> matches = catalog_matches("gpus", name);
    if (matches.size() != 1) {
      const auto names = catalog_names("gpus");
      const std::string nearest = matches.empty() ? nearest_name(name, names) : "";
      return report("E209",
                    matches.empty() ? fmt::format("no GPU '{}' in the catalogue", name)
                                    : fmt::format("'{}' may be {} GPUs of the catalogue", name, matches.size()),
                    where, {fmt::format("catalogue: {}", fmt::join(names, ", "))},
                    !matches.empty()  ? fmt::format("name one of {}", fmt::join(matches, ", "))
                    : nearest.empty() ? "spell it out: gpu: {name: …, memory_gib: …}"
                                      : fmt::format("did you mean {}?", nearest));
    }
    const fs::path file = catalog_file("gpus", matches[0]);
    auto text = read_file(file, max_file_bytes);
    auto tree = text ? parse_yaml(*text, file.string()) : fail(text.error());
    if (!tree) return report(tree.error());
    for (const auto& [key, key_where, value] : tree->entries) {
      if (key == "gpu") walk(value, "cluster.gpu");
      else if (key == "node") walk(value, "cluster");
      else report("E202", fmt::format("unknown key {}", key), key_where, {}, "a GPU file has gpu and node");
    }
    where_.clear();  // an error about a default should point at the scenario, not into the catalogue
    if (scenario_.cluster.gpu.is_cpu && matches[0] == "local-cpu") scale_to_local_machine();
  }

  /// What the framework of `profile` does where the scenario is silent: its order of sleep and wake, its bucket.
  void load_profile_defaults(const YamlNode& root) {
    const YamlNode* const profile = root.find("profile");
    const fs::path file = profile == nullptr || profile->kind != YamlNode::Kind::scalar
                              ? fs::path()
                              : catalog_file("frameworks", profile->text);
    if (file.empty()) return;  // no such profile: reported with the key
    auto text = read_file(file, max_file_bytes);
    auto tree = text ? parse_yaml(*text, file.string()) : fail(text.error());
    if (!tree) return report(tree.error());
    if (const YamlNode* defaults = tree->find("scenario")) walk(*defaults, "");
    where_.clear();  // as for the GPU
  }

  /// The catalogue states one core; the machine says how many there are and how much memory. Devices of one machine
  /// (gpus_per_node > 1) have equal parts of both.
  void scale_to_local_machine() {
    const LocalMachine machine = local_machine();
    GpuSpec& cpu = scenario_.cluster.gpu;
    const auto scale = [&](Sourced& s) {
      s.value *= static_cast<double>(machine.cores) / local_devices_;
      s.source += fmt::format("; x {} cores", machine.cores);
      if (local_devices_ > 1) s.source += fmt::format(" / {} devices", local_devices_);
    };
    for (auto& [precision, flops] : cpu.flops) scale(flops);
    scale(cpu.memory_bandwidth);
    scale(cpu.pcie_bandwidth);
    scenario_.cluster.host_memory_bytes = machine.memory_bytes;
    cpu.memory_bytes = machine.memory_bytes / static_cast<std::int64_t>(local_devices_);
  }

  // ---- keys --------------------------------------------------------------------------------------------------------

  void walk(const YamlNode& map, const std::string& section) {
    for (const auto& entry : map.entries) {
      const std::string path = section.empty() ? entry.key : section + "." + entry.key;
      where_[path] = entry.where;
      if (path == "model") set_model(entry.value);
      else if (const ScenarioKey* key = find_scenario_key(path)) set_key(*key, entry.value);
      else if (is_scenario_section(path)) enter(entry, path);
      else report_unknown(entry, section);
    }
  }

  void enter(const YamlEntry& entry, const std::string& path) {
    const bool named_gpu = path == "cluster.gpu" && entry.value.kind == YamlNode::Kind::scalar;
    if (entry.value.kind == YamlNode::Kind::map) return walk(entry.value, path);
    if (entry.value.kind == YamlNode::Kind::null || named_gpu) return;
    report("E205", fmt::format("{} is {}, expected a map", path, entry.value.describe()), entry.value.where,
           {fmt::format("its keys: {}", fmt::join(names_under(path), ", "))});
  }

  void report_unknown(const YamlEntry& entry, const std::string& section) {
    const auto names = names_under(section);
    const std::string where = section.empty() ? "" : section + ".";
    std::string help = nearest_name(entry.key, names);
    if (!help.empty()) {
      help = fmt::format("did you mean {}{}?", where, help);
    } else {
      for (const auto& key : scenario_keys())  // the right name in the wrong map
        if (key.path.ends_with("." + entry.key)) help = fmt::format("did you mean {}?", key.path);
    }
    report("E202", fmt::format("unknown key {}{}", where, entry.key.substr(0, 100)), entry.where,
           {fmt::format("keys of {}: {}", section.empty() ? "a scenario" : section, fmt::join(names, ", "))}, help);
  }

  void set_model(const YamlNode& node) {
    auto model = read_model(node, folder_);
    if (!model) return report(model.error());
    model->lora = scenario_.model.lora;  // of keys that came before
    model->frozen = scenario_.model.frozen;
    model->vocab_multiple = scenario_.model.vocab_multiple;
    scenario_.model = std::move(*model);
  }

  void set_key(const ScenarioKey& key, const YamlNode& node) {
    KeyValue value = convert(key, node);
    if (!std::holds_alternative<std::monostate>(value)) key.set(scenario_, value);
  }

  KeyValue wrong_type(const ScenarioKey& key, const YamlNode& node) {
    if (key.path == "train.offload" && node.kind == YamlNode::Kind::sequence) {
      report("E214", "layer-wise offload and whole-state sleep exclude each other", node.where,
             {"layerwise keeps the optimizer state on the host for ever; sleep moves it back before each step"},
             "set train.offload to one of none, sleep, layerwise");
      return {};
    }
    std::string help;
    if (key.type == KeyType::choice && node.kind == YamlNode::Kind::scalar) {
      const std::string nearest = nearest_name(node.text, key.choices);
      if (!nearest.empty()) help = fmt::format("did you mean {}?", nearest);
    }
    if (node.quoted && key.type != KeyType::text && key.type != KeyType::choice) help = "remove the quotes";
    report(key.type == KeyType::choice && node.kind == YamlNode::Kind::scalar ? "E207" : "E205",
           fmt::format("{} is {}, expected {}", key.path, node.describe(), expectation(key)), node.where, {}, help);
    return {};
  }

  KeyValue convert(const ScenarioKey& key, const YamlNode& node) {
    const bool scalar = node.kind == YamlNode::Kind::scalar;
    switch (key.type) {
      case KeyType::boolean:
        if (scalar && !node.quoted && (node.text == "true" || node.text == "True")) return true;
        if (scalar && !node.quoted && (node.text == "false" || node.text == "False")) return false;
        if (double number = 0; key.may_be_count && parse_number(node, number)) return integer(key, node);
        return wrong_type(key, node);
      case KeyType::text:
        return scalar ? KeyValue(node.text) : wrong_type(key, node);
      case KeyType::choice:
        if (scalar && std::find(key.choices.begin(), key.choices.end(), node.text) != key.choices.end())
          return node.text;
        return wrong_type(key, node);
      case KeyType::integer:
        return integer(key, node);
      case KeyType::real:
        return real(key, node);
      case KeyType::integers:
        return integers(key, node);
      case KeyType::sourced:
        return sourced(key, node);
      case KeyType::steps:
        return scalar ? KeyValue(node.text) : steps(key, node);
      case KeyType::slowdowns:
        return slowdowns(key, node);
    }
    return {};
  }

  /// "a-b-c" of [a, b, c]; where each word stands is known as KEY.0, KEY.1, …
  KeyValue steps(const ScenarioKey& key, const YamlNode& node) {
    if (node.kind != YamlNode::Kind::sequence) return wrong_type(key, node);
    std::string all;
    for (std::size_t i = 0; i < node.items.size(); ++i) {
      const YamlNode& item = node.items[i];
      if (item.kind != YamlNode::Kind::scalar) return wrong_type(key, item);
      where_[fmt::format("{}.{}", key.path, i)] = item.where;
      all += (i == 0 ? "" : "-") + item.text;
    }
    return all;
  }

  KeyValue out_of_range(const ScenarioKey& key, const YamlNode& node) {
    double number = 0.0;
    std::string help;
    if (parse_number(node, number) && number == 0.0 && !key.derived.empty())
      help = fmt::format("leave {} out where it is not known", key.path);
    report("E206", fmt::format("{} is {}, expected {}", key.path, node.text, expectation(key)), node.where, {}, help);
    return {};
  }

  KeyValue integer(const ScenarioKey& key, const YamlNode& node) {
    double number = 0;
    if (key.may_be_auto && node.kind == YamlNode::Kind::scalar && node.text == "auto") {
      scenario_.open.keys.push_back(key.path);
      return {};
    }
    if (!parse_number(node, number)) return wrong_type(key, node);
    std::int64_t value = 0;
    if (!parse_whole(node.text, value))  // "1e400", "99999999999999999999" or "3.5"
      return std::isfinite(number) && std::abs(number) < 9e18 ? wrong_type(key, node) : out_of_range(key, node);
    if (static_cast<double>(value) < key.low || static_cast<double>(value) > key.high) return out_of_range(key, node);
    return value;
  }

  KeyValue real(const ScenarioKey& key, const YamlNode& node) {
    double value = 0;
    if (!parse_number(node, value)) return wrong_type(key, node);
    if (!std::isfinite(value) || value < key.low || value > key.high) return out_of_range(key, node);
    return value;
  }

  KeyValue integers(const ScenarioKey& key, const YamlNode& node) {
    if (node.kind != YamlNode::Kind::sequence) return wrong_type(key, node);
    std::vector<std::int64_t> values;
    for (const auto& item : node.items) {
      const KeyValue value = integer(key, item);
      if (const auto* n = std::get_if<std::int64_t>(&value)) values.push_back(*n);
    }
    return values;
  }

  /// Where each map stands is known as KEY.0, KEY.1, …
  KeyValue slowdowns(const ScenarioKey& key, const YamlNode& node) {
    if (node.kind != YamlNode::Kind::sequence) return wrong_type(key, node);
    std::vector<Slowdown> all;
    for (std::size_t i = 0; i < node.items.size(); ++i) {
      const YamlNode& item = node.items[i];
      if (item.kind != YamlNode::Kind::map) return wrong_type(key, item);
      where_[fmt::format("{}.{}", key.path, i)] = item.where;
      all.push_back(slowdown(key, item));
    }
    return all;
  }

  Slowdown slowdown(const ScenarioKey& key, const YamlNode& map) {
    Slowdown out;
    ScenarioKey field = key;  // one entry of the map, with its own range
    for (const auto& [name, where, value] : map.entries) {
      field.path = fmt::format("{}.{}", key.path, name.substr(0, 100));
      field.low = key.low, field.high = key.high;
      if (std::ranges::find(key.fields, name) == key.fields.end()) {
        const std::string nearest = nearest_name(name, key.fields);
        report("E202", fmt::format("unknown key {}", field.path), where,
               {fmt::format("keys of one of its maps: {}", fmt::join(key.fields, ", "))},
               nearest.empty() ? "" : fmt::format("did you mean {}?", nearest));
      } else if (name == "factor") {
        field.type = KeyType::real;
        if (const KeyValue x = real(field, value); std::holds_alternative<double>(x)) out.factor = std::get<double>(x);
      } else if (name == "link") {
        field.type = KeyType::choice;
        field.choices.assign(EnumNames<LinkKind>::names.begin(), EnumNames<LinkKind>::names.end());
        if (const KeyValue x = convert(field, value); std::holds_alternative<std::string>(x))
          out.link =
              static_cast<LinkKind>(std::ranges::find(field.choices, std::get<std::string>(x)) - field.choices.begin());
      } else {
        field.type = KeyType::integer, field.low = 0, field.high = 1 << 20;
        const KeyValue x = integer(field, value);
        if (std::holds_alternative<std::int64_t>(x)) (name == "rank" ? out.rank : out.node) = std::get<std::int64_t>(x);
      }
    }
    const bool rank = map.find("rank") != nullptr, node = map.find("node") != nullptr;
    if (rank && node)
      report("E214", fmt::format("one of {} names a rank and a node", key.path), map.where, {},
             "leave one of them out");
    if (!rank && !node)
      report("E208", fmt::format("one of {} says not where", key.path), map.where, {},
             fmt::format("add {}", key.fields.size() > 2 ? "rank or node" : key.fields.front()));
    if (map.find("factor") == nullptr)
      report("E208", fmt::format("one of {} has no factor", key.path), map.where, {},
             "add how many times as long it takes");
    return out;
  }

  KeyValue sourced(const ScenarioKey& key, const YamlNode& node) {
    if (node.kind != YamlNode::Kind::map) {
      const KeyValue value = real(key, node);
      if (const auto* x = std::get_if<double>(&value)) return Sourced{*x, "scenario"};
      return {};
    }
    Sourced result;
    for (const auto& entry : node.entries) {
      if (entry.key == "source" && entry.value.kind == YamlNode::Kind::scalar) {
        result.source = entry.value.text;
      } else if (entry.key == "value") {
        const KeyValue value = real(key, entry.value);
        if (const auto* x = std::get_if<double>(&value)) result.value = *x;
      } else {
        report("E202", fmt::format("unknown key {}.{}", key.path, entry.key.substr(0, 100)), entry.where, {},
               "a number with its source is {value: …, source: …}");
      }
    }
    if (node.find("value") == nullptr) return wrong_type(key, node);
    if (result.source.empty()) result.source = "scenario";
    return result;
  }

  // ---- defaults that depend on other keys (ScenarioKey::derived) ---------------------------------------------------

  bool given(std::string_view path) const { return where_.contains(path); }

  void fill_derived() {
    ClusterSpec& cluster = scenario_.cluster;
    if (given("cluster.device_memory_gib") && given("cluster.device_memory_mib"))
      report("E204", "cluster.device_memory_gib and cluster.device_memory_mib are one key in two units",
             locate("cluster.device_memory_mib"), {}, "keep one of the two");
    if (!given("cluster.device_memory_gib") && !given("cluster.device_memory_mib"))
      cluster.device_memory_bytes = cluster.gpu.memory_bytes / cluster.ranks_per_device;
    // Memory of peers is read on one host alone.
    if (!given("sync.transport") && cluster.nodes > 1) scenario_.sync.transport = SyncTransport::collective;
    RolloutSpec& rollout = scenario_.rollout;
    if (!given("rollout.dtype") || !rollout.quantization.empty()) rollout.dtype = scenario_.train.precision.params;
    // Kernels of narrow products write 16 bits.
    if (!rollout.quantization.empty() && rollout.dtype == DType::f32) rollout.dtype = DType::bf16;
    // As the model's: from where the scenario lies. A profile of the catalogue is a name, no path.
    if (!scenario_.task.data.empty()) scenario_.task.data = resolve_path(scenario_.task.data, folder_).string();
    if (std::string& adapter = scenario_.model.lora.adapter; !adapter.empty())
      adapter = resolve_path(adapter, folder_).string();
    if (!cluster.calibration.empty() && catalog_file("profiles", cluster.calibration).empty())
      cluster.calibration = resolve_path(cluster.calibration, folder_).string();
    if (!given("name")) {
      const std::string stem = fs::path(file_).stem().string();
      if (!stem.empty() && is_utf8(stem)) scenario_.name = stem;
    }
  }

  std::string file_;
  fs::path folder_;
  Scenario scenario_;
  Diagnostics problems_;
  double local_devices_ = 1;  // cluster.gpus_per_node, where the GPU is the local machine
  std::map<std::string, SourceLocation, std::less<>> where_;
};

}  // namespace

Result<Scenario> load_scenario_text(const std::string& text, const std::string& file,
                                    const std::vector<std::string>& overrides) {
  auto tree = parse_yaml(text, file);
  if (!tree) return fail(tree.error());
  return Loader(file).load(std::move(*tree), overrides);
}

Result<std::string> read_scenario(const fs::path& path) { return read_file_or_stdin(path, max_file_bytes); }

Result<Scenario> load_scenario(const fs::path& path, const std::vector<std::string>& overrides) {
  auto text = read_scenario(path);
  if (!text) return fail(text.error());
  return load_scenario_text(*text, name_of_input(path), overrides);
}

}  // namespace hotbunk
