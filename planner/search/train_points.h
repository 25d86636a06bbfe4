// Walks a TrainSpace: the one enumeration that both searches use.
#pragma once
#include <algorithm>
#include <tuple>

#include "planner/search/search.h"

namespace hotbunk {

/// What decides the layer costs: points that share it share one computation of them.
struct LayerKey {
  std::int64_t tp, cp, ulysses, ep, etp;
  bool sp;
  std::int64_t micro_batch;
  /// Their points are of the same layouts, in other micro-batches.
  bool same_layouts(const LayerKey& o) const {
    return std::tie(tp, cp, ulysses, ep, etp, sp) == std::tie(o.tp, o.cp, o.ulysses, o.ep, o.etp, o.sp);
  }
  friend auto operator<=>(const LayerKey&, const LayerKey&) = default;
};
/// In order, each once: those of the same layouts side by side.
std::vector<LayerKey> layer_keys(const TrainSpace&);

/// Backward keeps as much, and computes nothing again.
inline bool saves_nothing(const LayerCost& c) {
  return c.recompute_core == 0.0 && c.kept_selective_bytes == c.kept_bytes;
}

/// visit(point) for every way to shard the point's state that differs from the others: over all data ranks or groups of
/// them, gathered units freed or kept.
template <class Visit>
void visit_shardings(const TrainSpace& space, TrainPoint p, Visit visit) {
  const auto streams = [](Sharding s) { return s == Sharding::zero3 || s == Sharding::fsdp; };
  // Pipelines reuse parameters over many micro-batches: gathering them each time is no layout anyone runs.
  const auto taken = [&](Sharding s) { return p.pp == 1 || (s != Sharding::zero2 && !streams(s)); };
  p.fsdp = -1;
  // Where nothing has a second copy all shardings are one layout; the least stands for them.
  const bool alone = p.data_ranks() == 1 && p.expert_shard_ranks() == 1.0;
  for (Sharding sharding : space.sharding) {
    if (!taken(sharding)) continue;
    if (alone &&
        std::any_of(space.sharding.begin(), space.sharding.end(), [&](Sharding s) { return taken(s) && s < sharding; }))
      continue;
    p.sharding = sharding;
    for (std::int64_t shard : space.shard) {
      // A group of all data ranks is -1, one of a single rank another sharding.
      if (shard > 0 &&
          (sharding == Sharding::replicated || shard == 1 || shard >= p.data_ranks() || p.data_ranks() % shard != 0))
        continue;
      p.fsdp = shard, p.shard_over = {};
      if (space.own_group && shard != -1) continue;
      if (space.own_group) fill_shard_group(*space.own_group, p);
      for (bool reshard : space.reshard) {
        // Where nothing is gathered nothing is freed.
        if (!reshard && (!streams(sharding) || p.shard_ranks() == 1)) continue;
        p.reshard_after_forward = reshard;
        for (const std::int64_t few : space.reshard_ranks) {
          if (few > 0 && (!reshard || sharding != Sharding::fsdp || few >= p.shard_ranks() ||
                          p.shard_ranks() % few != 0 || p.ep > 1))
            continue;
          p.reshard_ranks = few;
          visit(p);
        }
        p.reshard_ranks = 0;
      }
    }
  }
}

/// visit(point) for every order of its micro-batches: one stage has nothing to order, and what is interleaved is 1F1B.
template <class Visit>
void visit_schedules(const TrainSpace& space, TrainPoint p, Visit visit) {
  for (PipelineSchedule schedule : space.schedule) {
    const bool plain = p.pp == 1 || p.vpp > 1;
    if (plain && schedule != space.schedule.front()) continue;
    p.schedule = plain ? PipelineSchedule::one_f_one_b : schedule;
    visit(p);
  }
}

/// visit(point, layers) for every point of the key that divides. Returns how many did not.
template <class Visit>
std::int64_t visit_points(const TrainModel& model, const TrainSpace& space, const LayerKey& key, Visit visit) {
  TrainPoint p{.cp = key.cp,
               .ulysses = key.ulysses,
               .tp = key.tp,
               .ep = key.ep,
               .etp = key.etp,
               .sp = key.sp,
               .micro_batch = key.micro_batch,
               .optimizer = space.optimizer};
  const bool keeps_all =
      std::find(space.recompute.begin(), space.recompute.end(), Recompute::none) != space.recompute.end();
  std::int64_t rejected = 0;
  bool known = false;
  TrainModel::Layers shared;
  for (std::int64_t pp : space.pp) {
    const std::int64_t used = key.tp * key.cp * key.ulysses * pp;
    if (space.ranks % used != 0) continue;
    p.pp = pp;
    if (!space.takes_cut(p)) continue;
    p.dp = space.ranks / used;
    if (space.ragged ? p.dp > space.batch : space.batch % (p.dp * key.micro_batch) != 0) continue;
    const std::int64_t sequences = (space.batch + p.dp - 1) / p.dp;  // of the busiest data rank
    // Of the micro-batches that hold all of them, one is enough.
    if (std::any_of(space.micro_batch.begin(), space.micro_batch.end(),
                    [&](std::int64_t b) { return b >= sequences && b < key.micro_batch; }))
      continue;
    p.micro_batch = key.micro_batch;
    p.set_sequences(sequences);
    // What fits in one micro-batch may fill the scenario's own budget, whatever the key's; how many sequences a rank
    // has says what may come (fullest_tokens).
    const bool shorter = p.micro_batch < key.micro_batch || (space.ragged && p.micro_batches == 1) ||
                         model.layers_follow_stages() || model.load_follows_batch();
    TrainModel::Layers own;
    bool own_known = false;
    for (std::int64_t vpp : space.vpp) {
      p.vpp = vpp, p.fsdp = -1;
      if (!model.divides(p)) {
        ++rejected;
        continue;
      }
      bool& ready = shorter ? own_known : known;
      TrainModel::Layers& layers = shorter ? own : shared;
      if (!ready) layers = model.layers(p), ready = true;
      const bool idle = keeps_all && saves_nothing(layers.dense) && saves_nothing(layers.moe);
      visit_schedules(space, p, [&](TrainPoint ordered) {
        for (Recompute recompute : space.recompute) {
          // Fused attention leaves selective recomputation nothing to drop: it is `none` by another name.
          if (idle && recompute == Recompute::selective) continue;
          ordered.recompute = recompute;
          visit_shardings(space, ordered, [&](TrainPoint sharded) {
            for (bool on_host : space.optimizer_on_host) {
              if (on_host && !space.accumulates_on_host && p.micro_batches > 1) continue;
              sharded.optimizer_on_host = on_host;
              if (space.takes(sharded)) visit(sharded, layers);
            }
          });
        }
      });
    }
  }
  return rejected;
}

}  // namespace hotbunk
