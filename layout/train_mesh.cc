#include "layout/train_mesh.h"

#include "base/check.h"

namespace hotbunk {

Mesh train_mesh(const TrainLayout& l) {
  auto mesh = mesh_from_order(l.order, {{"tp", l.tp}, {"cp", l.cp * l.ulysses}, {"dp", l.dp}, {"pp", l.pp}});
  HB_CHECK(mesh.has_value(), "an order that the loader let pass: {}", l.order);
  return std::move(*mesh);
}

ShardMesh shard_mesh(const TrainSpec& train) {
  const TrainLayout& l = train.layout;
  const std::int64_t data = l.dp * l.cp * l.ulysses, shards = train.engine == TrainEngine::ddp ? 1
                                                              : l.fsdp > 0                     ? l.fsdp
                                                                                               : data;
  HB_CHECK(data % shards == 0, "{} data ranks in shard groups of {}", data, shards);
  return {shards, data / shards, l.tp, l.ep};
}

std::vector<std::vector<std::int64_t>> data_ranks(const TrainLayout& l) {
  const Mesh mesh = train_mesh(l);
  std::vector<std::vector<std::int64_t>> out(static_cast<std::size_t>(l.tp));
  for (std::int64_t rank = 0; rank < mesh.size(); ++rank)
    out[static_cast<std::size_t>(mesh.coordinate(rank, "tp"))].push_back(rank);
  return out;
}

}  // namespace hotbunk
