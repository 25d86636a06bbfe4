// Reading and writing profiles, schema hotbunk.hardware/1.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/file.h"
#include "planner/cost/hardware.h"
#include "planner/cost/profile_mistake.h"
#include "spec/yaml_tree.h"

namespace hotbunk {
namespace {

/// Every sourced number of a profile: its key, where it lives, and the range outside of which it is a mistake.
struct Field {
  const char* key;
  Sourced* at;
  double least, most;
};

std::vector<Field> fields_of(Hardware& h) {
  constexpr double rate = 1e18;
  return {
      {"memory_efficiency", &h.memory_efficiency, 0.01, 1.0},
      {"gemm.efficiency", &h.gemm.efficiency, 0.001, 1.0},
      {"gemm.half_k", &h.gemm.half_k, 0.0, 1e6},
      {"gemm.units", &h.gemm.units, 0.0, 1e5},
      {"attention.forward", &h.attention.forward, 0.001, 1.0},
      {"attention.backward", &h.attention.backward, 0.001, 1.0},
      {"attention.half_keys", &h.attention.half_keys, 0.0, 1e7},
      {"flash2.forward", &h.flash2.forward, 0.0, 1.0},
      {"flash2.backward", &h.flash2.backward, 0.0, 1.0},
      {"flash2.half_keys", &h.flash2.half_keys, 0.0, 1e7},
      {"intra.bandwidth", &h.intra.bandwidth, 1.0, rate},
      {"intra.latency", &h.intra.latency, 0.0, 1.0},
      {"intra.hop_latency", &h.intra.hop_latency, 0.0, 1.0},
      {"inter.bandwidth", &h.inter.bandwidth, 1.0, rate},
      {"inter.latency", &h.inter.latency, 0.0, 1.0},
      {"inter.hop_latency", &h.inter.hop_latency, 0.0, 1.0},
      {"nvls_gain", &h.nvls_gain, 1.0, 4.0},
      {"host_bandwidth", &h.host_bandwidth, 1.0, rate},
      {"host_latency", &h.host_latency, 0.0, 1.0},
      {"host_memory_bandwidth", &h.host_memory_bandwidth, 1.0, rate},
      {"map_bandwidth", &h.map_bandwidth, 1.0, rate},
      {"cores", &h.cores, 0.0, 65536.0},
      {"wake", &h.wake, 0.0, 1.0},
      {"thread_switch", &h.thread_switch, 0.0, 1.0},
      {"call", &h.call, 0.0, 1.0},
      {"decision", &h.decision, 0.0, 1.0},
      {"first_use", &h.first_use, 0.0, 10.0},
      {"time_slice", &h.time_slice, 1e-6, 1.0},
      {"launch", &h.launch, 0.0, 1.0},
      {"kernel_overhead", &h.kernel_overhead, 0.0, 1.0},
      {"sustained_clock", &h.sustained_clock, 0.05, 1.0},
      {"overlap_slowdown", &h.overlap_slowdown, 0.0, 1.0},
  };
}

bool number_of(const YamlNode& node, double& value) {
  if (node.kind != YamlNode::Kind::scalar || node.quoted) return false;
  const char* end = node.text.data() + node.text.size();
  const auto [stop, error] = std::from_chars(node.text.data(), end, value);
  return error == std::errc{} && stop == end && std::isfinite(value);
}

void read_sourced(const YamlNode& node, const Field& field, Diagnostics& errors) {
  const YamlNode* value = node.kind == YamlNode::Kind::map ? node.find("value") : nullptr;
  const YamlNode* source = node.kind == YamlNode::Kind::map ? node.find("source") : nullptr;
  double number = 0.0;
  if (!value || !number_of(*value, number)) {
    errors.push_back(profile_mistake(
        node, fmt::format("{}: expected {{value: number, source: text}}, found {}", field.key, node.describe())));
    return;
  }
  if (number < field.least || number > field.most) {
    errors.push_back(profile_mistake(
        *value, fmt::format("{} is {}, outside of {} to {}", field.key, value->text, field.least, field.most)));
    return;
  }
  if (!source || source->text.empty()) {
    errors.push_back(
        profile_mistake(node, fmt::format("{} has no source", field.key), "say where the number comes from"));
    return;
  }
  *field.at = {number, source->text};
}

/// The keys that give a measurement's coordinates, in the order of Measurement::at.
const std::vector<std::string>& coordinates_of(const std::string& op) {
  static const std::vector<std::string> gemm = {"m", "n", "k"}, attention = {"tokens", "keys", "heads"},
                                        collective = {"ranks", "nodes", "bytes"}, bytes = {"bytes"}, none = {};
  if (is_gemm(op)) return gemm;
  if (op.starts_with("attention") || op.starts_with("context_attention") || op == "paged_attention") return attention;
  if (op == "launch") return none;
  for (int k = 0; k < num_op_kinds; ++k)
    if (is_communication(static_cast<OpKind>(k)) && op == name_of(static_cast<OpKind>(k))) return collective;
  return bytes;
}

bool known_op(const std::string& op) {
  if (op == "h2d" || op == "d2h" || op == "launch" || is_mapping(op)) return true;
  for (int k = 0; k < num_op_kinds; ++k)
    if (op == name_of(static_cast<OpKind>(k))) return true;
  return false;
}

/// Of what an op works on, bytes and ranks too: products of three such numbers stay finite.
constexpr double most_extent = 1e18;

void read_measurement(const YamlNode& node, Hardware& h, Diagnostics& errors) {
  Measurement m;
  const YamlNode* op = node.find("op");
  if (!op || !known_op(op->text)) {
    errors.push_back(profile_mistake(node, "measurement names no known op", "use an op kind, h2d, d2h or launch"));
    return;
  }
  m.op = op->text;
  const std::vector<std::string>& keys = coordinates_of(m.op);
  for (const YamlEntry& entry : node.entries) {
    const auto at = std::find(keys.begin(), keys.end(), entry.key);
    double value = 0.0;
    if (entry.key == "op") continue;
    if (entry.key == "dtype") {
      const auto dtype = dtype_from(entry.value.text);
      if (!dtype) errors.push_back(profile_mistake(entry.value, fmt::format("unknown dtype '{}'", entry.value.text)));
      m.dtype = dtype.value_or(DType::f32);
    } else if (!number_of(entry.value, value) || value <= 0.0) {
      errors.push_back(profile_mistake(entry.value, fmt::format("{} of {}: expected a positive number, found {}",
                                                                entry.key, m.op, entry.value.describe())));
    } else if (entry.key == "seconds") {
      m.seconds = value;
    } else if (at != keys.end() && value > most_extent) {
      errors.push_back(profile_mistake(entry.value, fmt::format("{} of {} is {:g}: no op is larger than {:g}",
                                                                entry.key, m.op, value, most_extent)));
    } else if (at != keys.end()) {
      m.at[static_cast<std::size_t>(at - keys.begin())] = value;
    } else {
      errors.push_back(
          profile_mistake(entry.value, fmt::format("unknown key '{}' in a measurement of {}", entry.key, m.op)));
    }
  }
  if (m.seconds <= 0.0) errors.push_back(profile_mistake(node, fmt::format("measurement of {} has no seconds", m.op)));
  if (m.seconds > most_price)
    errors.push_back(
        profile_mistake(node, fmt::format("measurement of {} says {:g} s: more than {:g} s are no time of an op", m.op,
                                          m.seconds, most_price)));
  h.measurements.push_back(std::move(m));
}

void read_entry(const YamlEntry& entry, const std::string& prefix, Hardware& h, Diagnostics& errors) {
  const std::string key = prefix + entry.key;
  for (const Field& field : fields_of(h))
    if (key == field.key) return read_sourced(entry.value, field, errors);
  if (prefix.empty() && entry.value.kind == YamlNode::Kind::map) {
    for (const YamlEntry& inner : entry.value.entries) read_entry(inner, key + ".", h, errors);
    return;
  }
  double number = 0.0;
  if (key == "schema") {
    if (entry.value.text != "hotbunk.hardware/1")
      errors.push_back(
          profile_mistake(entry.value, fmt::format("schema is '{}', expected hotbunk.hardware/1", entry.value.text)));
  } else if (key == "name") {
    h.name = entry.value.text;
  } else if (key == "source") {
    h.source = entry.value.text;
  } else if (key == "shared_transport" && (entry.value.text == "true" || entry.value.text == "false")) {
    h.shared_transport = entry.value.text == "true";
  } else if (key == "calibrated" && (entry.value.text == "true" || entry.value.text == "false")) {
    h.calibrated = entry.value.text == "true";
  } else if (key == "measured_ranks_per_device" && number_of(entry.value, number) && number >= 1 && number <= 4096) {
    h.measured_ranks_per_device = static_cast<std::int64_t>(number);
  } else if ((key == "siblings" || key == "gpus") && entry.value.kind == YamlNode::Kind::sequence) {
    for (const YamlNode& node : entry.value.items) (key == "gpus" ? h.gpus : h.siblings).push_back(node.text);
  } else if (key == "measurements" && entry.value.kind == YamlNode::Kind::sequence) {
    for (const YamlNode& node : entry.value.items) read_measurement(node, h, errors);
  } else {
    std::vector<std::string> names = {"schema",      "name",       "source",           "gpus",
                                      "siblings",    "calibrated", "shared_transport", "measured_ranks_per_device",
                                      "measurements"};
    for (const Field& field : fields_of(h)) names.emplace_back(field.key);
    const std::string near = nearest_name(key, names);
    errors.push_back(profile_mistake(entry.value,
                                     fmt::format("unknown or malformed key '{}' in a hardware profile", key),
                                     near.empty() || near == key ? "" : "did you mean " + near + "?"));
  }
}

std::string in_quotes(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c == '\n' ? ' ' : c;
  }
  return out + '"';
}

}  // namespace

Result<Hardware> parse_hardware(const std::string& text, const std::string& file, const ClusterSpec& cluster) {
  auto root = parse_yaml(text, file);
  if (!root) return fail(root.error());
  Hardware h = hardware_from_datasheet(cluster);
  h.calibrated = true;
  Diagnostics errors;
  if (root->kind != YamlNode::Kind::map || !root->find("schema"))
    return fail(profile_mistake(*root, "not a hardware profile", "the file starts with schema: hotbunk.hardware/1"));
  for (const YamlEntry& entry : root->entries) read_entry(entry, "", h, errors);
  if (!errors.empty()) return fail(std::move(errors));
  return h;
}

Result<Hardware> read_hardware(const std::filesystem::path& path, const ClusterSpec& cluster) {
  auto text = read_file(path, std::int64_t{64} << 20);
  if (!text) return fail(text.error());
  return parse_hardware(*text, path.string(), cluster);
}

std::vector<HardwareNumber> numbers_of(Hardware& h) {
  std::vector<HardwareNumber> out;
  for (const Field& field : fields_of(h)) out.push_back({field.key, field.at});
  return out;
}

std::string to_yaml(const Hardware& hardware) {
  Hardware h = hardware;
  std::string out =
      fmt::format("schema: hotbunk.hardware/1\nname: {}\nsource: {}\n", in_quotes(h.name), in_quotes(h.source));
  std::string group;
  for (const Field& field : fields_of(h)) {
    if (field.at->value < field.least) continue;  // a rate that is not known
    const std::string key = field.key;
    const auto dot = key.find('.');
    const std::string prefix = dot == std::string::npos ? "" : key.substr(0, dot);
    if (prefix != group && !prefix.empty()) out += prefix + ":\n";
    group = prefix;
    out += fmt::format("{}{}: {{value: {}, source: {}}}\n", prefix.empty() ? "" : "  ",
                       dot == std::string::npos ? key : key.substr(dot + 1), field.at->value,
                       in_quotes(field.at->source.empty() ? "stated" : field.at->source));
  }
  out += fmt::format("shared_transport: {}\nmeasured_ranks_per_device: {}\n", h.shared_transport,
                     h.measured_ranks_per_device);
  if (h.measurements.empty()) return out;
  out += "measurements:\n";
  for (const Measurement& m : h.measurements) {
    out += fmt::format("  - {{op: {}, dtype: {}", m.op, name_of(m.dtype));
    const auto& keys = coordinates_of(m.op);
    for (std::size_t i = 0; i < keys.size(); ++i) out += fmt::format(", {}: {}", keys[i], m.at[i]);
    out += fmt::format(", seconds: {:.4g}}}\n", m.seconds);
  }
  return out;
}

}  // namespace hotbunk
