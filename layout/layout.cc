#include "layout/layout.h"

#include <algorithm>
#include <array>

#include "base/check.h"

namespace hotbunk {
namespace {

// Whether a parameter outside the layers lives on this pipeline stage.
bool outer_parameter_on(const ModelSpec& model, ParamRole role, std::int64_t stage, std::int64_t stages) {
  const bool first = stage == 0, last = stage == stages - 1;
  if (role == ParamRole::embedding) return first || (last && model.tie_embeddings);
  return role == ParamRole::position_embedding ? first : last;
}

bool on_stage(const Layout& layout, const ModelSpec& model, const ParamSpec& parameter, std::int64_t rank) {
  if (!layout.dense.has("pp")) return true;
  const std::int64_t stage = layout.dense.coordinate(rank, "pp");
  if (parameter.layer < 0) return outer_parameter_on(model, parameter.role, stage, layout.dense.extent("pp"));
  return std::any_of(layout.stages.begin(), layout.stages.end(), [&](const StageChunk& chunk) {
    return chunk.stage == stage && chunk.layers.begin <= parameter.layer && parameter.layer < chunk.layers.end;
  });
}

bool has_expert(const Layout& layout, const ModelSpec& model, const ParamSpec& parameter, std::int64_t rank) {
  if (parameter.expert < 0 || !layout.expert.has("ep")) return true;
  const std::int64_t ranks = layout.expert.extent("ep");
  HB_CHECK(model.moe->experts % ranks == 0, "{} experts over {} ranks", model.moe->experts, ranks);
  const Range experts = even_range(model.moe->experts, ranks, layout.expert.coordinate(rank, "ep"));
  return experts.begin <= parameter.expert && parameter.expert < experts.end;
}

bool is_of_mlp(ParamRole role) {
  using R = ParamRole;
  constexpr std::array roles = {R::gate_proj, R::up_proj,     R::up_bias,   R::down_proj,
                                R::down_bias, R::shared_gate, R::shared_up, R::shared_down};
  return std::ranges::find(roles, role) != roles.end();
}

}  // namespace

Layout fsdp_layout(std::int64_t shard, std::int64_t replicas) {
  const Mesh mesh({{"fsdp", shard}, {"replicate", replicas}});
  return {mesh, mesh, {}, 1};
}

Layout rollout_layout(const EngineAxes& engine, std::int64_t engines, EngineOrder order) {
  std::vector<MeshAxis> axes = {{"tp", engine.tp}};
  if (engine.cp > 1) axes.push_back({"cp", engine.cp});
  if (engine.stages.size() > 1) axes.push_back({"pp", static_cast<std::int64_t>(engine.stages.size())});
  axes.insert(order == EngineOrder::strided ? axes.begin() : axes.end(), {"dp", engines});
  const Mesh mesh(axes);
  return {mesh, mesh, engine.stages, 1};
}

Rectangle slice_of(const Layout& layout, const ModelSpec& model, const ParamSpec& parameter, std::int64_t rank) {
  const Mesh& mesh = parameter.expert >= 0                     ? layout.expert
                     : layout.mlp && is_of_mlp(parameter.role) ? *layout.mlp
                                                               : layout.dense;
  TensorPlacement placement = tensor_parallel(parameter, model, layout.vocab_multiple);
  std::erase_if(placement, [&](const AxisPlacement& axis) { return !mesh.has(axis.axis); });
  if (mesh.has("fsdp")) placement.push_back({"fsdp", Placement::shard(0)});
  const Rectangle box = place(whole(parameter), placement, mesh, rank);
  return box.elements() > 0 ? box : Rectangle{};
}

Rectangle held_by(const Layout& layout, const ModelSpec& model, const ParamSpec& parameter, std::int64_t rank) {
  if (!on_stage(layout, model, parameter, rank) || !has_expert(layout, model, parameter, rank)) return {};
  return slice_of(layout, model, parameter, rank);
}

std::vector<std::vector<Rectangle>> holdings(const Layout& layout, const ModelSpec& model, const ParamSpec& parameter) {
  std::vector<std::vector<Rectangle>> all(static_cast<std::size_t>(layout.dense.size()));
  for (std::int64_t rank = 0; rank < layout.dense.size(); ++rank) {
    const Rectangle box = held_by(layout, model, parameter, rank);
    if (box.elements() > 0) all[static_cast<std::size_t>(rank)].push_back(box);
  }
  return all;
}

}  // namespace hotbunk
