#include "layout/scenario_layout.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "layout/flat_units.h"
#include "layout/train_mesh.h"
#include "spec/parameter_roles.h"

namespace hotbunk {
namespace {

/// FSDP keeps shards; the other engines shard gradients or the optimizer's state and keep parameters whole.
bool keeps_shards(TrainEngine e) { return e == TrainEngine::fsdp1 || e == TrainEngine::fsdp2; }

/// The experts' mesh over the same ranks: of a stage, tensor-parallel place by place and there data rank by data rank
/// (data_ranks()), whatever their order, etp fastest, then ep, then copies ("dp").
Mesh expert_mesh_over(const TrainLayout& l) {
  std::vector<std::int64_t> ranks;
  for (std::int64_t stage = 0; stage < l.pp; ++stage) {
    const std::vector<std::vector<std::int64_t>> data = data_ranks(l, stage);
    for (std::size_t d = 0; d < data.front().size(); ++d)
      for (const std::vector<std::int64_t>& of_place : data) ranks.push_back(of_place[d]);
  }
  const std::int64_t copies = std::ssize(ranks) / (l.etp * l.ep * l.pp);
  std::vector<MeshAxis> axes{{"etp", l.etp}, {"ep", l.ep}, {"dp", copies}, {"pp", l.pp}};
  if (l.etp * l.ep * copies * l.pp != std::ssize(ranks)) return Mesh(std::move(axes));  // E242
  return Mesh(std::move(axes), std::move(ranks));
}

}  // namespace

Result<TrainHoldings> TrainHoldings::of(const Scenario& s) {
  const TrainLayout& l = s.train.layout;
  auto stages = train_stages(s);
  if (!stages) return tl::unexpected(stages.error());
  const Mesh dense = train_mesh(l);
  const Mesh expert = s.model.moe && s.model.moe->experts > 0 ? expert_mesh_over(l) : dense;
  if (Status ok = check_expert_mesh(dense, expert); !ok) return tl::unexpected(ok.error());
  const std::int64_t shards = keeps_shards(s.train.engine) ? shard_mesh(s).shards : 1;
  const std::int64_t vocab_multiple = std::max<std::int64_t>(1, s.model.vocab_multiple);
  return TrainHoldings(s, {dense, expert, std::move(*stages), vocab_multiple}, shards);
}

TrainHoldings::TrainHoldings(const Scenario& s, Layout layout, std::int64_t shards)
    : model_(s.model),
      layout_(std::move(layout)),
      shards_(shards),
      experts_(expert_mesh(s)),
      parameters_(parameters_of(s.model)) {
  const TrainLayout& l = s.train.layout;
  places_.resize(static_cast<std::size_t>(layout_.dense.size()));
  for (std::int64_t stage = 0; stage < l.pp; ++stage) {
    data_.push_back(data_ranks(l, stage));
    for (const std::vector<std::int64_t>& ranks : data_.back())
      for (std::size_t place = 0; place < ranks.size(); ++place)
        places_[static_cast<std::size_t>(ranks[place])] = static_cast<std::int64_t>(place);
  }
  if (s.train.engine != TrainEngine::fsdp1 || shards == 1 ||
      !why_not_train_tp(s.model, l.tp, experts_.columns()).empty())
    return;
  for (const StagePart& part : stage_parts(s)) {
    auto& of_stage = flat_.emplace_back();
    for (const ShardedUnit& unit : flat_units(s.model, s.train.wrap, part, l.tp, shards, experts_))
      for (const UnitParam& p : unit.params) of_stage[p.parameter] = {p.full_offset, unit.shard_elements};
  }
}

std::vector<StageChunk> TrainHoldings::chunks_of(std::int64_t rank) const {
  std::vector<StageChunk> out;
  const std::int64_t stage = layout_.dense.coordinate(rank, "pp");
  for (const StageChunk& c : layout_.stages)
    if (c.stage == stage) out.push_back(c);
  return out;
}

const std::vector<std::int64_t>& TrainHoldings::data_of(std::int64_t rank) const {
  return data_[static_cast<std::size_t>(layout_.dense.coordinate(rank, "pp"))]
              [static_cast<std::size_t>(layout_.dense.coordinate(rank, "tp"))];
}

std::int64_t TrainHoldings::shard_of(std::int64_t rank) const { return place_among_data(rank) % shards_; }

std::vector<std::int64_t> TrainHoldings::shard_group(std::int64_t rank) const {
  const std::vector<std::int64_t>& data = data_of(rank);
  const auto first = data.begin() + place_among_data(rank) / shards_ * shards_;
  return {first, first + shards_};
}

std::vector<std::int64_t> TrainHoldings::replicas(std::int64_t rank) const {
  const std::vector<std::int64_t>& data = data_of(rank);
  std::vector<std::int64_t> out;
  for (auto at = static_cast<std::size_t>(shard_of(rank)); at < data.size(); at += static_cast<std::size_t>(shards_))
    out.push_back(data[at]);
  return out;
}

TrainHoldings::Part TrainHoldings::part_of(const ParamSpec& parameter, std::int64_t rank) const {
  if (parameter.expert < 0) return {shards_, shard_of(rank)};
  const std::int64_t block = layout_.dense.coordinate(rank, "tp") / experts_.places;
  return {std::max<std::int64_t>(1, shards_ * experts_.blocks / experts_.spread),
          (shard_of(rank) * experts_.blocks + block) / experts_.spread};
}

std::vector<Rectangle> TrainHoldings::held(const ParamSpec& parameter, std::int64_t rank) const {
  Rectangle box = held_by(layout_, model_, parameter, rank);
  if (box.elements() == 0) return {};
  if (shards_ == 1) return {box};
  if (!flat_.empty()) {
    const InUnit& at = flat_[static_cast<std::size_t>(layout_.dense.coordinate(rank, "pp"))].at(parameter.name);
    const std::int64_t first = part_of(parameter, rank).index * at.shard_elements - at.offset;
    std::vector<Rectangle> out;
    each_rectangle({std::max<std::int64_t>(first, 0), std::min(first + at.shard_elements, box.elements())},
                   box.cols.size(), [&](const Range& rows, const Range& cols, auto) {
                     out.push_back({{box.rows.begin + rows.begin, box.rows.begin + rows.end},
                                    {box.cols.begin + cols.begin, box.cols.begin + cols.end}});
                   });
    return out;
  }
  // All tensor-parallel places shard as many rows: of a vocabulary that does not divide, the last has padding.
  // An expert's ranks are others than those of the first place, and it is cut over the blocks that have it.
  const bool expert = parameter.expert >= 0;
  const std::int64_t first = expert ? rank : layout_.dense.group_of(rank, {"tp"}).front();
  const std::int64_t rows = rule_of(parameter.role).cut == RoleCut::vocabulary
                                ? model_.vocab_rows(layout_.dense.extent("tp"))
                                : held_by(layout_, model_, parameter, first).rows.size();
  const Part mine = part_of(parameter, rank);
  const Range part = chunk_range(rows, mine.count, mine.index);
  box.rows = {std::min(box.rows.begin + part.begin, box.rows.end), std::min(box.rows.begin + part.end, box.rows.end)};
  if (box.elements() == 0) return {};
  return {box};
}

std::int64_t TrainHoldings::elements(std::int64_t rank) const {
  std::int64_t all = 0;
  for (const ParamSpec& p : parameters_)
    for (const Rectangle& box : held(p, rank)) all += box.elements();
  return all;
}

namespace {

Result<std::vector<StageChunk>> engine_stages(const Scenario& s) {
  return split_pipeline(
      {.layers = s.model.layers, .stages = s.rollout.layout.pp, .chunks = 1, .first = {}, .last = {}, .custom = {}});
}

}  // namespace

std::vector<EngineCut> engine_cuts(const Scenario& s) {
  const RolloutLayout& l = s.rollout.layout;
  if (l.pp == 1) return {{.tp = l.tp, .experts = l.ep, .attention = l.attention_dp}};
  const auto stages = engine_stages(s);
  HB_CHECK(stages.has_value(), "{} layers in {} stages of an engine", s.model.layers, l.pp);
  std::vector<EngineCut> out;
  for (const StageChunk& c : *stages)
    out.push_back({.tp = l.tp,
                   .experts = l.ep,
                   .stage = {.layers = {c.layers}, .first = c.stage == 0, .last = c.stage + 1 == l.pp},
                   .attention = l.attention_dp});
  return out;
}

Result<Layout> engine_layout(const Scenario& s) {
  const RolloutLayout& l = s.rollout.layout;
  auto stages = engine_stages(s);
  if (!stages) return tl::unexpected(stages.error());
  const EngineOrder order = l.order == RankOrder::strided ? EngineOrder::strided : EngineOrder::contiguous;
  Layout out = rollout_layout({l.tp, l.cp, std::move(*stages)}, l.dp, order);
  // Of the ranks that share a layer, attention_dp groups have all of its attention each, and ep groups other experts;
  // its MLP they all share.
  const auto split = [](const Mesh& mesh, const char* inner, const char* outer, std::int64_t outer_size) {
    std::vector<MeshAxis> axes;
    for (const MeshAxis& axis : mesh.axes())
      if (axis.name == "tp") axes.push_back({inner, axis.size / outer_size}), axes.push_back({outer, outer_size});
      else axes.push_back(axis);
    return Mesh(std::move(axes));
  };
  if (l.ep <= l.tp) {
    out.expert = split(out.dense, "etp", "ep", l.ep);
  } else {  // over the context-parallel ranks too
    std::vector<MeshAxis> axes;
    for (const MeshAxis& axis : out.dense.axes())
      if (axis.name == "tp") axes.push_back({"etp", l.tp * l.cp / l.ep}), axes.push_back({"ep", l.ep});
      else if (axis.name != "cp") axes.push_back(axis);
    out.expert = Mesh(std::move(axes));
  }
  if (l.attention_dp > 1) out.mlp = out.dense;
  out.dense = split(out.dense, "tp", "attention_dp", l.attention_dp);
  return out;
}

}  // namespace hotbunk
