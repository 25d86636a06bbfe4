#include "spec/wrapping.h"

#include <fnmatch.h>

#include <algorithm>
#include <memory>
#include <sstream>
#include <utility>

#include "base/check.h"

namespace hotbunk {
namespace {

std::vector<std::string> parts_between(const std::string& text, char separator) {
  std::vector<std::string> out;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, separator);) out.push_back(part);
  return out;
}

/// The innermost module around a parameter that may be a unit, as names from the outside in.
std::vector<std::string> module_around(const ParamSpec& p) {
  std::vector<std::string> path = parts_between(p.name, '.');
  path.pop_back();  // the parameter's own
  if (p.layer < 0) return path;
  const auto at = std::ranges::find(path, std::to_string(p.layer));
  HB_CHECK(at != path.end(), "{} names no layer", p.name);
  if (path.end() - at > 2) path.erase(at + 2, path.end());
  return path;
}

struct Module {
  std::string name;
  int layer = -1;
  bool is_layer = false, is_list = false, is_unit = false;
  std::int64_t parameters = 0;  // with those inside it
  std::vector<std::pair<std::string, std::unique_ptr<Module>>> inside;

  /// `of_layer`: whose number is among the names.
  Module& child(const std::string& part, int of_layer) {
    for (const auto& [known, module] : inside)
      if (known == part) return *module;
    Module& made = *inside.emplace_back(part, std::make_unique<Module>()).second;
    made.name = name.empty() ? part : name + '.' + part;
    made.is_layer = layer < 0 && of_layer >= 0 && part == std::to_string(of_layer);
    made.layer = made.is_layer ? of_layer : layer;
    is_list |= made.is_layer;
    return made;
  }
};

Module tree_of(const std::vector<ParamSpec>& parameters) {
  Module root;
  for (const ParamSpec& p : parameters) {
    Module* module = &root;
    module->parameters += p.numel();
    for (const std::string& part : module_around(p)) {
      module = &module->child(part, p.layer);
      module->parameters += p.numel();
    }
  }
  return root;
}

void add_modules(const Module& module, std::vector<std::string>& out) {
  if (!module.name.empty() && !module.is_list) out.push_back(module.name);
  for (const auto& [_, inside] : module.inside) add_modules(*inside, out);
}

/// How many of the module's parameters have become units' own.
std::int64_t wrap(Module& module, const WrapSpec& spec, const std::vector<std::string>& patterns) {
  if (spec.policy == WrapPolicy::size && module.parameters < spec.min_parameters) return 0;
  std::int64_t wrapped = 0;
  for (const auto& [_, inside] : module.inside) wrapped += wrap(*inside, spec, patterns);
  if (module.name.empty() || module.is_list) return wrapped;
  module.is_unit = spec.policy == WrapPolicy::layer ? module.is_layer
                   : spec.policy == WrapPolicy::size
                       ? module.parameters - wrapped >= spec.min_parameters
                       : std::ranges::any_of(patterns, [&](const std::string& p) { return matches(p, module.name); });
  return module.is_unit ? module.parameters : wrapped;
}

}  // namespace

bool matches(const std::string& pattern, const std::string& module) {
  return ::fnmatch(pattern.c_str(), module.c_str(), 0) == 0;
}

std::vector<std::string> patterns_of(const WrapSpec& spec) { return parts_between(spec.names, '-'); }

std::vector<std::string> wrappable_modules(const ModelSpec& model) {
  std::vector<std::string> out;
  add_modules(tree_of(parameters_of(model)), out);
  return out;
}

std::vector<WrappedModule> wrapped_modules(const ModelSpec& model, const WrapSpec& spec) {
  const std::vector<ParamSpec> parameters = parameters_of(model);
  Module root = tree_of(parameters);
  wrap(root, spec, patterns_of(spec));
  std::vector<WrappedModule> out;
  for (const ParamSpec& p : parameters) {
    WrappedModule& unit = out.emplace_back(WrappedModule{"root", -1});
    Module* module = &root;
    for (const std::string& part : module_around(p)) {
      module = &module->child(part, p.layer);
      if (module->is_unit) unit = {module->name, module->layer};
    }
  }
  return out;
}

}  // namespace hotbunk
