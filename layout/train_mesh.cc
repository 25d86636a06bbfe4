#include "layout/train_mesh.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "base/check.h"
#include "spec/expert_rounds.h"
#include "spec/train_axes.h"

namespace hotbunk {

Mesh train_mesh(const TrainLayout& l) {
  std::vector<MeshAxis> axes;
  for (const std::string& axis : axes_in_order(l)) axes.push_back({axis, ranks_of(l, axis)});
  return Mesh(std::move(axes));
}

ShardMesh shard_mesh(const Scenario& s) {
  const TrainSpec& train = s.train;
  const TrainLayout& l = train.layout;
  const std::int64_t data = l.dp * l.cp * l.ulysses, shards = train.engine == TrainEngine::ddp ? 1 : l.shard_ranks();
  HB_CHECK(data % shards == 0, "{} data ranks in shard groups of {}", data, shards);
  return {shards, data / shards, l.tp, expert_mesh(s), l.pp};
}

std::int64_t rows_sent_of_token(const Scenario& s) {
  const ExpertMesh mesh = expert_mesh(s);
  return s.model.moe && mesh.spread > 1 ? s.model.moe->experts_per_token * mesh.parts : 0;
}

std::int64_t most_rows_received(const Scenario& s) { return expert_rounds(s).most; }

std::vector<std::vector<std::int64_t>> data_ranks(const TrainLayout& l, std::int64_t stage) {
  const Mesh mesh = train_mesh(l);
  std::vector<std::string> apart;  // axes that no shard group spans, but for the stage's
  for (const std::string& axis : axes_in_order(l))
    if (axis == "tp" || (is_data_axis(axis) && !l.shards_over(axis))) apart.push_back(axis);
  std::map<std::int64_t, std::vector<std::int64_t>> shardable;  // by the place on those axes
  for (std::int64_t rank = 0; rank < mesh.size(); ++rank) {
    if (mesh.coordinate(rank, "pp") != stage) continue;
    std::int64_t place = 0;
    for (const std::string& axis : apart) place = place * mesh.extent(axis) + mesh.coordinate(rank, axis);
    shardable[place].push_back(rank);
  }
  std::vector<std::vector<std::int64_t>> groups;  // that share a copy
  const std::int64_t shards = l.shard_ranks();
  for (const auto& [place, ranks] : shardable)
    for (auto first = ranks.begin(); first < ranks.end(); first += shards) groups.emplace_back(first, first + shards);
  std::ranges::sort(groups);
  std::vector<std::vector<std::int64_t>> out(static_cast<std::size_t>(l.tp));
  for (const std::vector<std::int64_t>& group : groups) {
    auto& of_place = out[static_cast<std::size_t>(mesh.coordinate(group.front(), "tp"))];
    of_place.insert(of_place.end(), group.begin(), group.end());
  }
  return out;
}

std::vector<std::vector<std::int64_t>> block_ranks(const TrainLayout& l, const ExpertMesh& mesh, std::int64_t stage) {
  const std::vector<std::vector<std::int64_t>> by_place = data_ranks(l, stage);
  std::vector<std::vector<std::int64_t>> out(static_cast<std::size_t>(mesh.places));
  for (std::size_t d = 0; d < by_place.front().size(); ++d)
    for (std::size_t t = 0; t < by_place.size(); ++t) out[t % out.size()].push_back(by_place[t][d]);
  return out;
}

Result<std::vector<StageChunk>> train_stages(const Scenario& s) {
  const TrainLayout& l = s.train.layout;
  if (l.pp == 1) return std::vector<StageChunk>{{0, 0, {0, s.model.layers}}};
  return split_pipeline(pipeline_split_of(s));
}

std::vector<StagePart> stage_parts(const Scenario& s) {
  const auto chunks = train_stages(s);
  HB_CHECK(chunks.has_value(), "stages that the loader let pass");
  const std::int64_t stages = s.train.layout.pp;
  std::vector<StagePart> out;
  for (std::int64_t stage = 0; stage < stages; ++stage)
    out.push_back({.layers = {}, .first = stage == 0, .last = stage + 1 == stages});
  for (const StageChunk& c : *chunks) out[static_cast<std::size_t>(c.stage)].layers.push_back(c.layers);
  return out;
}

}  // namespace hotbunk
