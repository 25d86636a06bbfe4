#include "planner/rl/reshard_volume.h"

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <vector>

#include "base/check.h"
#include "planner/rl/rl_model.h"
#include "planner/train/layer_kinds.h"

namespace hotbunk {
namespace {

std::vector<StageChunk> chunks_of(const TrainPoint& p, const TrainSetting& setting, std::int64_t layers) {
  PipelineSplit split;
  split.layers = layers, split.stages = p.pp, split.chunks = p.vpp;
  split.custom = setting.pipeline_split;
  if (static_cast<std::int64_t>(split.custom.size()) != p.pp * p.vpp) split.custom = even_chunks(layers, p.pp * p.vpp);
  auto out = split_pipeline(split);
  HB_CHECK(out.has_value(), "{} layers in {} x {} chunks", layers, p.pp, p.vpp);
  return std::move(*out);
}

const char* name_of(RankAxis axis) {
  constexpr std::array<const char*, 6> names = {"tp", "cp", "ulysses", "ep", "dp", "pp"};
  return names[static_cast<std::size_t>(axis)];
}

}  // namespace

std::optional<Layout> trainer_layout(const TrainPoint& p, const TrainSetting& setting, const ModelSpec& model) {
  const bool sharded = p.gathers_units() && p.shard_ranks() > 1;
  const ShardOver& over = p.shard_over;
  const std::int64_t shardable = over.some() ? over.over(p.dp, p.cp, p.ulysses) : p.data_ranks();
  std::vector<MeshAxis> dense, expert;
  bool cut = false, ended = false;
  for (const RankAxis axis : setting.order) {
    const bool has_shards = axis == RankAxis::cp        ? !over.some() || over.cp
                            : axis == RankAxis::ulysses ? !over.some() || over.ulysses
                                                        : axis == RankAxis::dp && (!over.some() || over.dp);
    const std::int64_t size = axis == RankAxis::tp        ? p.tp
                              : axis == RankAxis::cp      ? p.cp
                              : axis == RankAxis::ulysses ? p.ulysses
                              : axis == RankAxis::dp      ? p.dp
                                                          : p.pp;
    if (axis == RankAxis::ep || (sharded && has_shards && size == 1)) continue;
    if (sharded && has_shards) {  // neighbours in the order as one axis of shards and one of copies
      if (ended) return std::nullopt;
      if (!cut) dense.insert(dense.end(), {{"fsdp", p.shard_ranks()}, {"replicate", shardable / p.shard_ranks()}});
      cut = true;
      continue;
    }
    if (cut && size > 1) ended = true;
    if (size > 1 || axis == RankAxis::tp) dense.push_back({name_of(axis), size});
  }
  const bool own_mesh = layer_kinds(model).moe > 0 && (p.ep > 1 || p.etp != p.tp);
  if (!own_mesh) {
    expert = dense;
    for (MeshAxis& axis : expert)
      if (axis.name == "tp") axis.name = "etp";
  } else {
    if (sharded) return std::nullopt;
    for (const RankAxis axis : setting.order) {
      if (axis == RankAxis::tp) expert.push_back({"etp", p.etp});
      if (axis == RankAxis::ep) expert.push_back({"ep", p.ep});
      if (axis == RankAxis::dp) expert.push_back({"edp", p.ranks() / (p.etp * p.ep * p.pp)});
      if (axis == RankAxis::pp && p.pp > 1) expert.push_back({"pp", p.pp});
    }
  }
  return Layout{Mesh(dense), Mesh(expert), p.pp > 1 ? chunks_of(p, setting, model.layers) : std::vector<StageChunk>{},
                1};
}

std::optional<Layout> engine_layout(const RolloutPoint& r, RolloutEngine engine, std::int64_t layers) {
  if (r.attention_dp > 1) return std::nullopt;
  EngineAxes axes{r.tp, r.cp, {}};
  std::int64_t before = 0;
  for (std::int64_t i = 0; i < r.pp && r.pp > 1; ++i) {
    const std::int64_t own = stage_layers(engine, layers, r.pp, i);
    axes.stages.push_back({i, 0, {before, before + own}});
    before += own;
  }
  const EngineOrder order = r.strided ? EngineOrder::strided : EngineOrder::contiguous;
  Layout out = rollout_layout(axes, r.engines, order);
  std::vector<MeshAxis> expert;
  // Routed experts are spread or split over all ranks of a stage; of ours the context-parallel ones have the same.
  const auto spread = static_cast<std::int64_t>(token_shares(engine, r));
  for (const MeshAxis& axis : out.dense.axes()) {
    if (axis.name == "cp" && spread == r.cp) continue;
    if (axis.name != "tp") {
      expert.push_back(axis);
      continue;
    }
    expert.insert(expert.end(), {{"etp", r.tp * spread / r.ep}, {"ep", r.ep}});
  }
  out.expert = Mesh(expert);
  return out;
}

ReshardCounter::ReshardCounter(const ModelSpec& model) : model_(model) {
  const LayerKinds kinds = layer_kinds(model);
  dense_layers_ = kinds.dense;
  ModelSpec thin = model;
  thin.layers = (kinds.dense > 0 ? 1 : 0) + (kinds.moe > 0 ? 1 : 0);
  if (thin.moe) thin.moe->first_dense_layers = kinds.dense > 0 ? 1 : 0;
  for (ParamSpec& p : parameters_of(thin)) {
    if (p.expert > 0) continue;
    const bool moe = p.layer >= 0 && kinds.moe > 0 && p.layer == thin.layers - 1;
    (p.layer < 0 ? outer_ : moe ? moe_ : dense_).push_back(std::move(p));
  }
}

std::vector<std::pair<std::int64_t, std::int64_t>> ReshardCounter::layer_units() const {
  const auto elements = [&](const std::vector<ParamSpec>& list) {
    std::int64_t sum = 0;
    for (const ParamSpec& p : list) sum += p.numel() * (p.expert < 0 ? 1 : model_.moe->experts);
    return sum;
  };
  return {{elements(outer_), 1}, {elements(dense_), dense_layers_}, {elements(moe_), model_.layers - dense_layers_}};
}

/// One layout, seen by rank: where it is, and the slices of every place in the axes that cut.
struct ReshardCounter::Side {
  Side(const ReshardCounter& of, const Layout& layout) : counter(of), layout_of(layout) {}

  struct Place {
    const std::vector<Rectangle>* slices = nullptr;  // of outer, dense and moe parameters, in that order
    Range experts;
    std::int64_t stage = 0;
  };
  Place at(std::int64_t rank) {
    const auto coordinate = [&](const Mesh& mesh, const char* axis) {
      return mesh.has(axis) ? mesh.coordinate(rank, axis) : 0;
    };
    const Mesh &dense = layout_of.dense, &expert = layout_of.expert;
    Place out;
    out.stage = coordinate(dense, "pp");
    const std::int64_t all = counter.model_.moe ? counter.model_.moe->experts : 0;
    out.experts = expert.has("ep") ? even_range(all, expert.extent("ep"), coordinate(expert, "ep")) : Range{0, all};
    const std::array key = {coordinate(dense, "tp"), coordinate(dense, "fsdp"), coordinate(expert, "etp"),
                            coordinate(expert, "fsdp")};
    auto [slices, is_new] = slices_.try_emplace(key);
    if (is_new)
      for (const auto* list : {&counter.outer_, &counter.dense_, &counter.moe_})
        for (const ParamSpec& p : *list) slices->second.push_back(slice_of(layout_of, counter.model_, p, rank));
    out.slices = &slices->second;
    return out;
  }
  std::int64_t stages() const { return layout_of.dense.has("pp") ? layout_of.dense.extent("pp") : 1; }
  bool has_layer(std::int64_t stage, std::int64_t layer) const {
    return layout_of.stages.empty() || std::ranges::any_of(layout_of.stages, [&](const StageChunk& c) {
             return c.stage == stage && c.layers.begin <= layer && layer < c.layers.end;
           });
  }
  bool has_outer(std::int64_t stage, ParamRole role) const {
    const bool first = stage == 0, last = stage + 1 == stages();
    if (role == ParamRole::embedding) return first || (last && counter.model_.tie_embeddings);
    return role == ParamRole::position_embedding ? first : last;
  }

  const ReshardCounter& counter;
  const Layout& layout_of;

 private:
  std::map<std::array<std::int64_t, 4>, std::vector<Rectangle>> slices_;
};

namespace {

std::int64_t common(const Range& a, const Range& b) {
  return std::max<std::int64_t>(0, std::min(a.end, b.end) - std::max(a.begin, b.begin));
}
std::int64_t lacks(const Rectangle& need, const Rectangle& have) {
  return need.elements() - common(need.rows, have.rows) * common(need.cols, have.cols);
}

/// Layers of each kind that a stage of the engine needs, and of these that a stage of training has.
struct SharedLayers {
  std::int64_t needed[2] = {0, 0}, shared[2] = {0, 0};  // dense, moe
};

}  // namespace

std::vector<std::int64_t> ReshardCounter::received(const Layout& have, const Layout& need) const {
  Side from(*this, have), to(*this, need);
  const std::int64_t ranks = need.dense.size();
  HB_CHECK(have.dense.size() == ranks, "{} ranks train, {} generate", have.dense.size(), ranks);
  std::map<std::pair<std::int64_t, std::int64_t>, SharedLayers> layers;
  std::vector<std::int64_t> out(static_cast<std::size_t>(ranks), 0);
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    const Side::Place source = from.at(rank), target = to.at(rank);
    auto [known, is_new] = layers.try_emplace({source.stage, target.stage});
    SharedLayers& both = known->second;
    for (std::int64_t l = 0; is_new && l < model_.layers; ++l) {
      if (!to.has_layer(target.stage, l)) continue;
      const int kind = l < dense_layers_ ? 0 : 1;
      ++both.needed[kind], both.shared[kind] += from.has_layer(source.stage, l) ? 1 : 0;
    }
    std::int64_t& sum = out[static_cast<std::size_t>(rank)];
    std::size_t i = 0;
    for (const ParamSpec& p : outer_) {
      const Rectangle &wanted = (*target.slices)[i], &held = (*source.slices)[i];
      ++i;
      if (to.has_outer(target.stage, p.role))
        sum += from.has_outer(source.stage, p.role) ? lacks(wanted, held) : wanted.elements();
    }
    for (const int kind : {0, 1})
      for (const ParamSpec& p : kind == 0 ? dense_ : moe_) {
        const Rectangle &wanted = (*target.slices)[i], &held = (*source.slices)[i];
        ++i;
        const std::int64_t size = p.expert < 0 ? 1 : target.experts.size(),
                           same = p.expert < 0 ? 1 : common(target.experts, source.experts);
        sum += both.needed[kind] * size * wanted.elements() -
               both.shared[kind] * same * (wanted.elements() - lacks(wanted, held));
      }
  }
  return out;
}

}  // namespace hotbunk
