#include "layout/train_weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "layout/placement.h"
#include "layout/rollout_weights.h"
#include "spec/parameter_roles.h"

namespace hotbunk {
namespace {

using R = ParamRole;

// Behind what no expert has: gate and up of expert 0, of expert 1, …, then all down projections. So what is multiplied
// together is one stack of matrices.
bool stands_before(const ParamSpec& a, const ParamSpec& b) {
  const auto place = [](const ParamSpec& p) {
    return std::tuple(p.layer, p.frozen, rule_of(p.role).stack, p.expert, place_in_unit(p.role));
  };
  return place(a) < place(b);
}

/// Learned positions are cut as the vocabulary is (Megatron, whose placement this is otherwise, repeats them): their
/// rows are summands of the same sum over the ranks.
TensorPlacement tensor_cut(const ParamSpec& spec, const ModelSpec& model) {
  if (spec.role == R::position_embedding) return {{"tp", Placement::shard(0)}};
  return tensor_parallel(spec, model);
}

/// An expert's: what a rank has of it, and where in the tensor that all ranks' experts make of those that share its
/// place. There the parts of all places of a block follow one another in one direction, and then the next block's do.
void lay_expert(UnitParam& param, const ParamSpec& spec, const ModelSpec& model, const ExpertMesh& mesh) {
  const Rectangle all = whole(spec), first = place(all, tensor_cut(spec, model), Mesh({{"etp", mesh.columns()}}), 0);
  param.rows = first.rows.size(), param.cols = first.cols.size();
  param.apart = mesh.lies_apart();
  param.spread = mesh.groups();
  const bool is_whole = mesh.columns() > 1 && first == all;  // on all that share the expert
  HB_CHECK(!is_whole || is_adapter(spec.role), "experts over {} ranks that share each have {} whole", mesh.columns(),
           spec.name);
  if (is_whole) param.step.repeat = mesh.columns();
  const std::int64_t holder = spec.expert / (model.moe->experts / param.spread);
  if (param.cols < param.whole_cols) param.step.cols = param.cols, param.base.col = holder * param.whole_cols;
  else if (param.spread * mesh.columns() > 1) param.step.rows = param.rows, param.base.row = holder * param.whole_rows;
}

/// A vocabulary's: every rank has room for as many rows, of which the last ones, or all, may be padding.
void lay_vocabulary(UnitParam& param, const ModelSpec& model, std::int64_t tp) {
  param.rows = model.vocab_rows(tp), param.cols = param.whole_cols;
  if (tp > 1) param.step = {.rows = param.rows};
}

/// `tensor`: axis tp.
UnitParam shard_of(const ParamSpec& spec, const ModelSpec& model, const Mesh& tensor, const ExpertMesh& mesh,
                   std::int64_t world, std::int64_t rank) {
  UnitParam param;
  param.parameter = spec.name;
  param.role = spec.role;
  param.layer = spec.layer;
  param.expert = spec.expert;
  const Rectangle all = whole(spec);
  param.whole_rows = all.rows.size(), param.whole_cols = all.cols.size();
  const std::int64_t tp = tensor.size();
  std::int64_t shards = world;
  if (spec.expert >= 0) {
    lay_expert(param, spec, model, mesh);
    if (world > 1) shards = world * mesh.blocks / mesh.spread, rank = rank * mesh.blocks / mesh.spread;
  } else if (rule_of(spec.role).cut == RoleCut::vocabulary) {
    lay_vocabulary(param, model, tp);
  } else {
    const TensorPlacement cut = tp > 1 ? tensor_cut(spec, model) : TensorPlacement{};
    const Rectangle first = place(all, cut, tensor, 0);
    param.rows = first.rows.size(), param.cols = first.cols.size();
    if (tp > 1 && first == all) param.step.repeat = tp;
    for (std::int64_t t = 1; t < tp && first != all; ++t) {
      const Rectangle next = place(all, cut, tensor, t);
      if (next == first) continue;  // a KV head that neighbours share
      param.step = {next.rows.begin - first.rows.begin, next.cols.begin - first.cols.begin, t};
      break;
    }
  }
  param.shard = chunk_range(param.rows, shards, rank);
  param.padded_rows = ceil_div(param.rows, shards);
  return param;
}

bool has(const StagePart& stage, const ParamSpec& p, const ModelSpec& model) {
  if (p.layer >= 0) return stage.has_layer(p.layer);
  if (p.role == R::embedding) return stage.first || (stage.last && model.tie_embeddings);
  return p.role == R::position_embedding ? stage.first : stage.last;
}

void append(ShardedUnit& unit, UnitParam param, std::int64_t experts) {
  if (!param.has_place()) {  // that of an expert of the first rank
    const auto at = std::ranges::find_if(
        unit.params, [&](const UnitParam& p) { return p.role == param.role && p.expert == param.expert % experts; });
    param.shard_offset = at->shard_offset, param.full_offset = at->full_offset;
    unit.params.push_back(std::move(param));
    return;
  }
  param.shard_offset = unit.shard_elements;
  param.full_offset = unit.full_elements;
  unit.shard_elements += param.padded_elements();
  unit.full_elements += param.elements();
  UnitRegion& region = param.apart ? unit.experts : unit.shared;
  HB_CHECK(param.apart || unit.experts.full_elements == 0, "{} lies behind experts", param.parameter);
  region.shard_elements += param.padded_elements();
  region.full_elements += param.elements();
  unit.params.push_back(std::move(param));
}

/// Whether they differ in names only.
bool alike(const UnitParam& a, const UnitParam& b) {
  const auto all_but_name = [](const UnitParam& p) {
    return std::tuple(p.whole_rows, p.whole_cols, p.rows, p.cols, p.step.rows, p.step.cols, p.step.repeat, p.shard,
                      p.padded_rows, p.shard_offset, p.full_offset, p.role, p.spread, p.base.row, p.base.col, p.apart);
  };
  return all_but_name(a) == all_but_name(b);
}

}  // namespace

bool is_of_head(ParamRole role) { return role == R::lm_head || role == R::final_norm || role == R::final_norm_bias; }

void number_kinds(std::vector<ShardedUnit>& units) {
  std::vector<const ShardedUnit*> kinds;
  for (ShardedUnit& unit : units) {
    const auto at = std::ranges::find_if(kinds, [&](const ShardedUnit* k) {
      return k->frozen == unit.frozen && std::ranges::equal(k->params, unit.params, alike);
    });
    unit.kind = static_cast<int>(at - kinds.begin());
    if (at == kinds.end()) kinds.push_back(&unit);
  }
}

std::string why_not_train_tp(const ModelSpec& model, std::int64_t tp, std::int64_t expert_columns) {
  if (tp == 1 && expert_columns <= 1) return "";
  return why_not_tensor_parallel(model, tp, expert_columns > 0 ? expert_columns : tp);
}

std::vector<ShardedUnit> train_units(const ModelSpec& model, std::int64_t tp, std::int64_t world, std::int64_t rank,
                                     const std::optional<ExpertMesh>& experts) {
  return train_units(model, {.layers = {{0, model.layers}}}, tp, world, rank, experts);
}

std::vector<ShardedUnit> train_units(const ModelSpec& model, const StagePart& stage, std::int64_t tp,
                                     std::int64_t world, std::int64_t rank,
                                     const std::optional<ExpertMesh>& of_experts) {
  HB_CHECK(world > 0 && rank >= 0 && rank < world, "rank {} of {}", rank, world);
  const ExpertMesh mesh = of_experts.value_or(ExpertMesh{.places = tp});
  const std::string why_not = why_not_train_tp(model, tp, mesh.columns());
  HB_CHECK(why_not.empty(), "{}", why_not);
  const std::int64_t holders = mesh.groups();  // of other experts
  HB_CHECK(mesh.places * mesh.blocks == tp && mesh.places % mesh.wholes == 0 &&
               (world == 1 || world * mesh.blocks % mesh.spread == 0),
           "experts over {} of {} places of {} blocks of {} tensor-parallel ranks, and {} of those of {} data ranks",
           mesh.wholes, mesh.places, mesh.blocks, tp, mesh.spread, world);
  HB_CHECK(holders == 1 || (model.moe && model.moe->experts % holders == 0), "experts over {} ranks", holders);
  const Mesh tensor({{"tp", tp}});
  // Adapters have units of their own, behind the others.
  std::vector<ParamSpec> parameters;
  const LayerFilter of_stage = [&](int layer) { return stage.has_layer(layer); };
  const auto take = [&](std::vector<ParamSpec> all) {
    std::erase_if(all, [&](const ParamSpec& p) { return !has(stage, p, model); });
    std::ranges::stable_sort(all, stands_before);
    std::ranges::move(all, std::back_inserter(parameters));
  };
  take(parameters_of(model, of_stage)), take(adapters_of(model, of_stage));

  std::vector<ShardedUnit> units;
  bool before_of_head = false;
  for (const ParamSpec& parameter : parameters) {
    const bool adapts = is_adapter(parameter.role), of_head = !model.tie_embeddings && is_of_head(parameter.role);
    const bool frozen = parameter.frozen,
               again = !units.empty() && units.back().layer == parameter.layer && before_of_head == of_head;
    before_of_head = of_head;
    if (!again || units.back().adapters != adapts || units.back().frozen != frozen) {
      ShardedUnit unit;
      unit.name = of_head               ? "lm_head"
                  : parameter.layer < 0 ? "root"
                                        : fmt::format("layers.{}{}", parameter.layer, adapts ? ".lora" : "");
      if (frozen && std::ranges::count(units, unit.name, &ShardedUnit::name) > 0) unit.name += ".frozen";
      unit.layer = parameter.layer, unit.adapters = adapts, unit.frozen = frozen;
      units.push_back(std::move(unit));
    }
    append(units.back(), shard_of(parameter, model, tensor, mesh, world, rank),
           model.moe ? model.moe->experts / holders : 0);
  }
  for (ShardedUnit& unit : units)
    unit.shared.shards = world, unit.experts.shards = world > 1 ? world * mesh.blocks / mesh.spread : 1;
  number_kinds(units);
  return units;
}

}  // namespace hotbunk
