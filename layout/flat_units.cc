#include "layout/flat_units.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "base/check.h"
#include "spec/wrapping.h"

namespace hotbunk {
namespace {

/// Layers by the names that they have elsewhere, whatever the family calls them.
std::string unit_name(const WrappedModule& module) {
  for (const std::string prefix : {"model.", "transformer.h.", "transformer."})
    if (module.name.starts_with(prefix) && module.name.size() > prefix.size())
      return (prefix == "transformer.h." ? "layers." : "") + module.name.substr(prefix.size());
  return module.name;
}

}  // namespace

std::vector<ShardedUnit> flat_units(const ModelSpec& model, const WrapSpec& spec, std::int64_t world) {
  return flat_units(model, spec, {.layers = {{0, model.layers}}}, 1, world, ExpertMesh());
}

std::vector<ShardedUnit> flat_units(const ModelSpec& model, const WrapSpec& spec, const StagePart& stage,
                                    std::int64_t tp, std::int64_t world, const ExpertMesh& experts) {
  HB_CHECK(world > 0, "{} ranks", world);
  HB_CHECK(world == 1 || world * experts.blocks % experts.spread == 0, "experts over {} of {} blocks", experts.spread,
           world * experts.blocks);
  std::map<std::string, WrappedModule> module_of;
  const std::vector<ParamSpec> parameters = parameters_of(model);
  std::vector<WrappedModule> modules = wrapped_modules(model, spec);
  const bool is_part = !stage.first || !stage.last;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const ParamSpec& p = parameters[i];
    if (is_part && p.layer >= 0 && modules[i].layer < 0) modules[i] = {fmt::format("layers.{}", p.layer), p.layer};
    if (is_part && p.role == ParamRole::embedding && model.tie_embeddings) modules[i] = {"embedding", -1};
    module_of.emplace(p.name, std::move(modules[i]));
  }

  std::set<std::string> part_trains;  // units of which some parameters train
  for (const ParamSpec& p : parameters)
    if (!p.frozen) part_trains.insert(unit_name(module_of.at(p.name)));
  std::vector<ShardedUnit> units;
  for (const ShardedUnit& whole : train_units(model, stage, tp, 1, 0, experts)) {
    std::map<std::int64_t, std::int64_t> places;  // where those of other units' offsets have come to be
    for (UnitParam p : whole.params) {
      // Adapters stand in the layers' modules, and are units of their own: they train and these do not.
      const WrappedModule module = whole.adapters ? WrappedModule{whole.name, whole.layer} : module_of.at(p.parameter);
      std::string name = unit_name(module);
      if (whole.frozen && part_trains.contains(name)) name += ".frozen";
      if (p.apart) name += ".experts";
      auto unit = std::ranges::find(units, name, &ShardedUnit::name);
      if (unit == units.end()) {
        unit = units.emplace(units.end());
        unit->name = name, unit->layer = module.layer;
        unit->adapters = whole.adapters, unit->frozen = whole.frozen;
      }
      const auto [place, is_new] = places.emplace(p.full_offset, unit->full_elements);
      HB_CHECK(is_new == p.has_place(), "{} shares no place with another expert", p.parameter);
      p.full_offset = p.shard_offset = place->second;
      if (is_new) unit->full_elements += p.elements();
      unit->params.push_back(std::move(p));
    }
  }
  for (ShardedUnit& unit : units) {
    unit.flat = world > 1;
    const bool apart = unit.params.front().apart;
    const std::int64_t parts = apart && world > 1 ? world * experts.blocks / experts.spread : world;
    unit.shard_elements = ceil_div(unit.full_elements, parts);
    (apart ? unit.experts : unit.shared) = {parts, unit.shard_elements, unit.full_elements};
    (apart ? unit.shared : unit.experts).shards = apart ? world : parts;
  }
  std::ranges::stable_partition(units,
                                [](const ShardedUnit& u) { return u.name == "root" || u.name.starts_with("root."); });
  number_kinds(units);
  return units;
}

}  // namespace hotbunk
