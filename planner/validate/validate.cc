#include "planner/validate/validate.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>

#include "base/json.h"
#include "planner/validate/validate_tables.h"
#include "spec/family.h"
#include "spec/loader.h"

namespace hotbunk {

double ValidationTable::mean_abs_error() const {
  double sum = 0.0;
  for (const PredictedRow& r : rows) sum += std::abs(r.error());
  return rows.empty() ? 0.0 : sum / static_cast<double>(rows.size());
}

double ValidationTable::max_abs_error() const {
  double most = 0.0;
  for (const PredictedRow& r : rows) most = std::max(most, std::abs(r.error()));
  return most;
}

double ValidationTable::bias() const {
  double sum = 0.0;
  for (const PredictedRow& r : rows) sum += r.error();
  return rows.empty() ? 0.0 : sum / static_cast<double>(rows.size());
}

std::vector<ValidationTable> ValidationTable::parts() const {
  std::vector<ValidationTable> out;
  for (const PredictedRow& r : rows) {
    if (!in_parts) break;
    const std::string part = r.label.substr(r.label.rfind(' ') + 1);
    auto at = std::ranges::find(out, part, &ValidationTable::name);
    if (at == out.end()) at = out.insert(out.end(), ValidationTable{part, quantity, unit, setting, {}, {}, {}});
    at->rows.push_back(r);
  }
  return out;
}

Result<CostModel> ValidationContext::cost(const std::string& gpu, std::int64_t gpus, double network,
                                          const std::string& profile, std::int64_t per_node) {
  if (!clusters_.contains(gpu)) {
    auto cluster = catalogue_cluster(gpu);
    if (!cluster) return fail(cluster.error());
    clusters_[gpu] = std::move(*cluster);
  }
  const std::string key = gpu + "/" + profile;
  if (!hardware_.contains(key)) {
    ClusterSpec named = clusters_[gpu];
    named.calibration = profile;
    auto hardware = hardware_for(named, catalogue_);
    if (!hardware) return fail(hardware.error());
    hardware_[key] = *hardware;
  }
  ClusterSpec cluster = clusters_[gpu];
  cluster.gpus_per_node = per_node;
  cluster.nodes = std::max<std::int64_t>(1, (gpus + per_node - 1) / per_node);
  Hardware hardware = hardware_[key];
  // Another fabric than the catalogue's: the same share of its line rate.
  if (network > 0.0) hardware.inter.bandwidth.value *= network / cluster.network_bandwidth.value;
  return CostModel(std::move(hardware), cluster);
}

Result<ModelSpec> ValidationContext::model(const std::string& name) {
  if (!models_.contains(name)) {
    auto scenario = load_scenario_text(
        fmt::format("model: {}\ncluster: {{gpu: h100-sxm-80gb, nodes: 1, gpus_per_node: 1}}\n", name), "validate");
    if (!scenario) return fail(scenario.error());
    models_[name] = scenario->model;
  }
  return models_[name];
}

Result<FrameworkProfile> ValidationContext::framework(const std::string& name) {
  if (!frameworks_.contains(name)) {
    auto frame = framework_named(name, catalogue_);
    if (!frame) return fail(frame.error());
    frameworks_.emplace(name, std::move(*frame));
  }
  return frameworks_.at(name);
}

ModelSpec gpt_model(std::int64_t layers, std::int64_t hidden, std::int64_t heads, std::int64_t vocab,
                    std::int64_t sequence) {
  ModelSpec m;
  m.name = fmt::format("gpt-{}x{}", layers, hidden);
  m.family = find_family("gpt2");
  m.layers = layers;
  m.hidden = hidden;
  m.intermediate = 4 * hidden;
  m.heads = m.kv_heads = heads;
  m.head_dim = hidden / std::max<std::int64_t>(heads, 1);
  m.vocab = vocab;
  m.max_position = sequence;
  m.gated_mlp = false;
  m.tie_embeddings = m.qkv_bias = m.o_bias = m.mlp_bias = m.learned_positions = m.layer_norm = true;
  return m;
}

Result<Validation> validate_published(const std::filesystem::path& data, const std::filesystem::path& catalogue) {
  ValidationContext context(catalogue);
  return validate_published(data, context);
}

Result<Validation> validate_published(const std::filesystem::path& data, ValidationContext& context) {
  using Check = std::function<TableResult(const CsvTable&, ValidationContext&)>;
  const auto vtrain = [](const char* name) {
    return [name](const CsvTable& t, ValidationContext& c) { return validate_vtrain(t, c, name); };
  };
  const std::vector<std::pair<std::string, Check>> checks = {
      {"korthikanti_a100", validate_korthikanti},
      {"simumax_b200", validate_simumax},
      {"vtrain_a100_multi_node", vtrain("vtrain_a100_multi_node")},
      {"vtrain_a100_single_node", vtrain("vtrain_a100_single_node")},
      {"megatron_sc21_weak_scaling", validate_sc21_scaling},
      {"megatron_sc21_zero3_vs_ptd", validate_sc21_zero3},
      {"megatron_readme_h100", validate_megatron_h100},
      {"llama3_405b", validate_llama3_405b},
      {"megascale_175b", validate_megascale},
      {"torchtitan", validate_torchtitan},
      {"megatron_bridge", validate_megatron_bridge},
      {"weight_sync", validate_weight_sync},
      {"rl_phases", validate_rl_phases},
      {"rl_iterations", validate_rl_iterations},
      {"rl_phase_seconds",
       [&](const CsvTable& t, ValidationContext& c) { return validate_rl_phase_seconds(t, c, data / "launches"); }},
      {"rl_launch_memory",
       [&](const CsvTable& t, ValidationContext& c) { return validate_rl_launch_memory(t, c, data / "launches"); }},
  };
  Validation out;
  for (const auto& [name, check] : checks) {
    const std::filesystem::path file = data / (name + ".csv");
    std::error_code ignored;
    if (!std::filesystem::exists(file, ignored)) continue;
    auto table = CsvTable::read(file);
    auto result = table ? check(*table, context) : TableResult(fail(table.error()));
    if (!result) {
      out.unreadable.insert(out.unreadable.end(), result.error().begin(), result.error().end());
      continue;
    }
    for (ValidationTable& t : *result) out.tables.push_back(std::move(t));
  }
  if (out.tables.empty() && !out.unreadable.empty()) return fail(std::move(out.unreadable));
  std::vector<std::string> known;
  for (const auto& [name, check] : checks) known.push_back(name + ".csv");
  std::error_code unreadable;
  for (const auto& entry : std::filesystem::directory_iterator(data, unreadable)) {
    const std::string name = entry.path().filename().string();
    if (entry.path().extension() == ".csv" && std::find(known.begin(), known.end(), name) == known.end())
      out.ignored.push_back(name);
  }
  std::sort(out.ignored.begin(), out.ignored.end());
  if (auto added = add_left_out(context.catalogue() / "left_out.csv", out.tables); !added) return fail(added.error());
  if (out.tables.empty())
    return fail(Diagnostic{.code = "E101",
                           .message = fmt::format("no published table in {}", data.string()),
                           .where = {},
                           .notes = {fmt::format("a table is known by its file name: {}", fmt::join(known, ", "))},
                           .help = "give the folder with --data"});
  return out;
}

std::string render(const Validation& v, bool with_rows) {
  std::string out;
  if (with_rows)
    for (const ValidationTable& t : v.tables) {
      out += fmt::format("{} · {} ({})\n  assumed: {}\n", t.name, t.quantity, t.unit, t.setting);
      const bool shown_there = !t.rows_of.empty();
      for (const PredictedRow& r : shown_there ? std::span<const PredictedRow>() : std::span(t.rows))
        out += fmt::format("  {:<64} measured {:>10.4g}  predicted {:>10.4g}  {:>+7.1f} %\n", r.label, r.measured,
                           r.predicted, 100.0 * r.error());
      if (!t.left_out.rows.empty()) out += fmt::format("  predicted without {} in the fit:\n", t.left_out.how);
      for (const PredictedRow& r : t.left_out.rows)
        out += fmt::format("  {:<64} measured {:>10.4g}  predicted {:>10.4g}  {:>+7.1f} %\n", r.label, r.measured,
                           r.predicted, 100.0 * r.error());
      for (const SkippedRow& r : t.left_out.skipped)
        out += fmt::format("  {:<64} not without it: {}\n", r.label, r.why);
      for (const SkippedRow& r : shown_there ? std::span<const SkippedRow>() : std::span(t.skipped))
        out += fmt::format("  {:<64} out of scope: {}\n", r.label, r.why);
      out += "\n";
    }
  out += fmt::format("{:<28} {:<28} {:>5} {:>5} {:>8} {:>8} {:>8} {:>9}  {}\n", "table", "quantity", "rows", "out",
                     "mean", "max", "bias", "left out", "other tools on these rows (own claims)");
  for (const ValidationTable& t : v.tables) {
    std::string peers;
    for (const PeerFigure& p : t.peers) {
      peers += fmt::format("{}{} {:.2f} %", peers.empty() ? "" : ", ", p.tool, 100.0 * p.mean_abs_error);
      if (p.max_abs_error >= 0.0) peers += fmt::format(" (max {:.2f} %)", 100.0 * p.max_abs_error);
    }
    out += fmt::format("{:<28} {:<28} {:>5} {:>5} ", t.name, t.quantity, t.rows.size(), t.skipped.size());
    if (t.rows.empty()) {
      out += fmt::format("{:>8} {:>8} {:>8} {:>9}  {}\n", "-", "-", "-", "",
                         t.skipped.empty() ? "the file has no such row" : "every row is out of scope: see --rows");
      continue;
    }
    const std::string left_out =
        t.left_out.rows.empty() ? "" : fmt::format("{:.2f} %", 100.0 * t.left_out.mean_abs_error());
    out += fmt::format("{:>6.2f} % {:>6.2f} % {:>+6.2f} % {:>9}  {}\n", 100.0 * t.mean_abs_error(),
                       100.0 * t.max_abs_error(), 100.0 * t.bias(), left_out, peers);
    for (const ValidationTable& part : t.parts())
      out += fmt::format("{:<28} {:<28} {:>5} {:>5} {:>6.2f} % {:>6.2f} % {:>+6.2f} %\n", "", "  " + part.name,
                         part.rows.size(), "", 100.0 * part.mean_abs_error(), 100.0 * part.max_abs_error(),
                         100.0 * part.bias());
  }
  for (const ValidationTable& t : v.tables)
    if (!t.left_out.rows.empty())
      out += fmt::format("left out of {}: {}, {} of {} rows\n", t.name, t.left_out.how, t.left_out.rows.size(),
                         t.rows.size());
  std::vector<std::string> bad;
  for (const Diagnostic& d : v.unreadable)
    if (const std::string file = std::filesystem::path(d.where.file).filename().string();
        std::find(bad.begin(), bad.end(), file) == bad.end())
      bad.push_back(file);
  if (!bad.empty()) out += fmt::format("\nCould not be read, see the errors: {}\n", fmt::join(bad, ", "));
  if (!v.ignored.empty()) out += fmt::format("\nNot read, none of the tables: {}\n", fmt::join(v.ignored, ", "));
  return out;
}

std::string to_json(const Validation& v) {
  nlohmann::ordered_json doc;
  doc["schema"] = "hotbunk.validate/1";
  doc["tables"] = nlohmann::ordered_json::array();
  for (const ValidationTable& t : v.tables) {
    // Of no rows there is no error: null, not 0.
    const auto of_rows = [&](double error) {
      return t.rows.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(error);
    };
    nlohmann::ordered_json table = {{"name", t.name},
                                    {"quantity", t.quantity},
                                    {"rows", t.rows.size()},
                                    {"mean_abs_error", of_rows(t.mean_abs_error())},
                                    {"max_abs_error", of_rows(t.max_abs_error())},
                                    {"bias", of_rows(t.bias())},
                                    {"unit", t.unit},
                                    {"setting", t.setting},
                                    {"predictions", nlohmann::ordered_json::array()},
                                    {"out_of_scope", nlohmann::ordered_json::array()},
                                    {"peers", nlohmann::ordered_json::array()}};
    for (const PredictedRow& r : t.rows)
      table["predictions"].push_back({{"row", r.label}, {"measured", r.measured}, {"predicted", r.predicted}});
    for (const SkippedRow& r : t.skipped) table["out_of_scope"].push_back({{"row", r.label}, {"why", r.why}});
    for (const ValidationTable& part : t.parts())
      table["parts"].push_back({{"name", part.name},
                                {"rows", part.rows.size()},
                                {"mean_abs_error", part.mean_abs_error()},
                                {"max_abs_error", part.max_abs_error()},
                                {"bias", part.bias()}});
    if (!t.left_out.rows.empty()) {
      table["left_out"] = {{"how", t.left_out.how},
                           {"mean_abs_error", t.left_out.mean_abs_error()},
                           {"predictions", nlohmann::ordered_json::array()},
                           {"not_without_it", nlohmann::ordered_json::array()}};
      for (const PredictedRow& r : t.left_out.rows)
        table["left_out"]["predictions"].push_back(
            {{"row", r.label}, {"measured", r.measured}, {"predicted", r.predicted}});
      for (const SkippedRow& r : t.left_out.skipped)
        table["left_out"]["not_without_it"].push_back({{"row", r.label}, {"why", r.why}});
    }
    for (const PeerFigure& p : t.peers) {
      nlohmann::ordered_json peer = {{"tool", p.tool}, {"mean_abs_error", p.mean_abs_error}};
      if (p.max_abs_error >= 0.0) peer["max_abs_error"] = p.max_abs_error;
      table["peers"].push_back(std::move(peer));
    }
    doc["tables"].push_back(std::move(table));
  }
  doc["ignored_files"] = v.ignored;
  doc["unreadable"] = nlohmann::ordered_json::array();
  for (const Diagnostic& d : v.unreadable)
    doc["unreadable"].push_back(
        {{"code", d.code}, {"file", d.where.file}, {"line", d.where.line}, {"message", d.message}});
  // A file's name and its cells need not be UTF-8; JSON is.
  return json_text(doc, 2, NotUtf8::replaced);
}

}  // namespace hotbunk
