#include "planner/answers/stated_error.h"

#include <fmt/format.h>

#include <cstdlib>

#include "base/check.h"
#include "base/file.h"
#include "spec/catalog.h"
#include "spec/yaml_tree.h"

namespace hotbunk {
namespace {

/// scenarios/catalog/errors.yaml: part of the program.
std::optional<Sourced> stated(const char* table, const std::string& name) {
  static const YamlNode root = [] {
    const auto path = catalog_root() / "errors.yaml";
    auto text = read_file(path, std::int64_t{1} << 20);
    HB_CHECK(text.has_value(), "the catalogue's errors.yaml is not there");
    auto read = parse_yaml(*text, path.string());
    HB_CHECK(read.has_value(), "the catalogue's errors.yaml: {}", read.error().front().message);
    return std::move(*read);
  }();
  const YamlNode* const of = root.find(table);
  const YamlNode* const entry = of ? of->find(name) : nullptr;
  const YamlNode* const value = entry ? entry->find("value") : nullptr;
  const YamlNode* const source = entry ? entry->find("source") : nullptr;
  if (value == nullptr || source == nullptr) return std::nullopt;
  return Sourced{std::strtod(value->text.c_str(), nullptr), source->text};
}

}  // namespace

std::optional<Sourced> iteration_error(const std::string& framework) { return stated("iteration", framework); }

std::optional<Sourced> iteration_error(const Scenario& s) {
  return s.algorithm.name == AlgorithmName::sft ? stated("train", s.cluster.gpu.name) : iteration_error(s.profile);
}

std::optional<Sourced> phase_error(RlPhase phase, const std::string& gpu, const std::string& framework,
                                   SyncMechanism sync) {
  if (phase == RlPhase::train || phase == RlPhase::critic) return stated("train", gpu);
  if (phase == RlPhase::sync) return stated("sync", std::string(name_of(sync)));
  return stated(std::string(name_of(phase)).c_str(), framework);
}

std::string error_text(const std::optional<Sourced>& error) {
  return error ? fmt::format("± {:.2g} %", 100.0 * error->value) : "unvalidated";
}

}  // namespace hotbunk
