// Walks a TrainSpace: the one enumeration that both searches use.
#pragma once
#include <algorithm>

#include "planner/search.h"

namespace hotbunk {

/// What decides the layer costs: points that share it share one computation of them.
struct LayerKey {
  std::int64_t tp, cp, ulysses, ep, etp, micro_batch;
  bool sp;
};
std::vector<LayerKey> layer_keys(const TrainSpace&);

/// visit(point, layers) for every point of the key that divides. Returns how many did not.
template <class Visit>
std::int64_t visit_points(const TrainModel& model, const TrainSpace& space, const LayerKey& key, Visit visit) {
  TrainPoint p{.cp = key.cp,
               .ulysses = key.ulysses,
               .tp = key.tp,
               .ep = key.ep,
               .etp = key.etp,
               .sp = key.sp,
               .micro_batch = key.micro_batch};
  std::int64_t rejected = 0;
  bool known = false;
  TrainModel::Layers shared;
  for (std::int64_t pp : space.pp) {
    const std::int64_t used = key.tp * key.cp * key.ulysses * pp;
    if (space.ranks % used != 0) continue;
    p.pp = pp;
    p.dp = space.ranks / used;
    if (space.ragged ? p.dp > space.batch : space.batch % (p.dp * key.micro_batch) != 0) continue;
    const std::int64_t sequences = (space.batch + p.dp - 1) / p.dp;  // of the busiest data rank
    // Of the micro-batches that hold all of them, one is enough.
    if (std::any_of(space.micro_batch.begin(), space.micro_batch.end(),
                    [&](std::int64_t b) { return b >= sequences && b < key.micro_batch; }))
      continue;
    p.micro_batch = key.micro_batch;
    p.set_sequences(sequences);
    // What fits in one micro-batch may fill the scenario's own budget, whatever the key's (fullest_tokens).
    const bool shorter =
        p.micro_batch < key.micro_batch || (space.ragged && p.micro_batches == 1) || model.layers_follow_stages();
    TrainModel::Layers own;
    bool own_known = false;
    for (std::int64_t vpp : space.vpp) {
      p.vpp = vpp;
      if (!model.divides(p)) {
        ++rejected;
        continue;
      }
      bool& ready = shorter ? own_known : known;
      TrainModel::Layers& layers = shorter ? own : shared;
      if (!ready) layers = model.layers(p), ready = true;
      for (Recompute recompute : space.recompute)
        for (Sharding sharding : space.sharding) {
          // Pipelines reuse parameters over many micro-batches: gathering them each time is no layout anyone runs.
          if (pp > 1 && (sharding == Sharding::zero2 || sharding == Sharding::zero3 || sharding == Sharding::fsdp))
            continue;
          for (bool on_host : space.optimizer_on_host) {
            p.recompute = recompute;
            p.sharding = sharding;
            p.optimizer_on_host = on_host;
            visit(p, layers);
          }
        }
    }
  }
  return rejected;
}

}  // namespace hotbunk
