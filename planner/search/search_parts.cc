#include "planner/search/search_parts.h"

#include <algorithm>
#include <limits>
#include <ranges>

#include "planner/search/ranking.h"
#include "planner/search/train_points.h"

namespace hotbunk {
namespace {

/// Sorted; a knob that lists a value twice does not count its points twice.
template <class Part, class Less>
void in_order(std::vector<Part>& parts, Less less) {
  std::sort(parts.begin(), parts.end(), less);
  parts.erase(std::unique(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.point == b.point; }),
              parts.end());
}

void add_training(const RlModel& model, TrainSpace space, const SearchOptions& options, Segment& s) {
  space.ranks = s.placement.train_ranks;
  const TrainModel& train = model.train();
  const std::vector<LayerKey> keys = layer_keys(space);
  const int threads = keys.size() < 64 ? 1 : threads_of(options.threads);
  std::vector<std::vector<Trained>> parts(static_cast<std::size_t>(threads));
  std::vector<std::int64_t> rejected(static_cast<std::size_t>(threads), 0);
  on_threads(threads, [&](int i) {
    const auto mine = static_cast<std::size_t>(i);
    for (std::size_t k = mine; k < keys.size(); k += static_cast<std::size_t>(threads))
      rejected[mine] += visit_points(train, space, keys[k], [&](const TrainPoint& p, const auto& layers) {
        const TrainSide side = model.train_side(p, train.price(p, layers), layers);
        const double brought =
            side.swapped_reference > 0 ? train.cost().host_copy_seconds(side.swapped_reference) : 0.0;
        parts[mine].push_back({p, side, side.train_seconds + side.scoring_seconds() + brought});
      });
  });
  for (const auto& part : parts) s.training.insert(s.training.end(), part.begin(), part.end());
  for (std::int64_t r : rejected) s.rejected += r;
  in_order(s.training, [](const Trained& a, const Trained& b) { return a.point < b.point; });
}

/// Every engine of one shape.
void add_engines(const RlModel& model, const RlSpace& space, const RolloutPoint& shape, Segment& s) {
  const bool apart = s.placement.mode == PlacementMode::disaggregated;
  double overhead = s.training.empty() ? 0.0 : std::numeric_limits<double>::infinity();
  for (const Trained& t : s.training) overhead = std::min(overhead, t.side.overhead_bytes);
  for (std::int64_t groups : space.attention_dp)
    for (bool whole : space.whole_experts)
      for (bool strided : space.strided)
        for (double fraction : space.memory_fraction) {
          RolloutPoint p = shape;
          p.strided = strided, p.memory_fraction = fraction, p.attention_dp = groups;
          p.ep = whole ? p.tp * p.cp : 1;
          if (!model.divides(p)) continue;
          if (const RolloutPrice price = model.price_rollout(p); price.fits)
            s.rollouts.push_back(
                {p, price, apart ? model.apart_bytes(p, price) : model.least_rollout_bytes(p, price, 0.0, overhead)});
        }
}

void add_rollouts(const RlModel& model, const RlSpace& space, const SearchOptions& options, Segment& s) {
  const std::int64_t ranks = s.placement.rollout_ranks;
  for (std::int64_t tp : space.rollout_tp)
    for (std::int64_t cp : space.rollout_cp)
      for (std::int64_t pp : space.rollout_pp)
        if (tp >= 1 && cp >= 1 && pp >= 1 && ranks % (tp * cp * pp) == 0 && space.has_engine(tp, cp, pp))
          add_engines(model, space, {.tp = tp, .engines = ranks / (tp * cp * pp), .cp = cp, .pp = pp}, s);
  const bool memory = options.objective == Objective::memory;
  in_order(s.rollouts, [&](const Rolled& a, const Rolled& b) {
    const double x = memory ? a.least_bytes : a.price.seconds(), y = memory ? b.least_bytes : b.price.seconds();
    return x != y ? x < y : a.point < b.point;
  });
  double least = std::numeric_limits<double>::infinity();
  for (Rolled& r : std::views::reverse(s.rollouts)) r.least_later_bytes = least = std::min(least, r.least_bytes);
}

}  // namespace

Segment segment_of(RlModel& model, const RlSpace& space, const SearchOptions& options, const PlacementChoice& choice) {
  Segment s;
  s.placement = choice;
  const bool shared = choice.mode == PlacementMode::colocated;
  s.gpus = static_cast<double>(shared ? choice.train_ranks : choice.train_ranks + choice.rollout_ranks);
  add_training(model, space.train, options, s);
  add_rollouts(model, space, options, s);
  if (shared) {
    s.sync = space.sync;
    const auto awake = [](const TransitionOrder& o) {
      return !o.has(TransitionStep::sleep_optimizer) && !o.has(TransitionStep::sleep_train);
    };
    s.orders = space.transition;
    s.num_awake = static_cast<std::size_t>(
        std::distance(s.orders.begin(), std::stable_partition(s.orders.begin(), s.orders.end(), awake)));
    for (const Rolled& r : s.rollouts)
      model.learn_reshard({.dp = choice.train_ranks, .sharding = Sharding::fsdp}, r.point);
  } else {
    s.orders.emplace_back();
    s.num_awake = 1;
    // Buckets cross the network as a broadcast.
    for (SyncMechanism m : space.sync) {
      const bool direct = m == SyncMechanism::shard_to_shard || m == SyncMechanism::point_to_point;
      const SyncMechanism used = direct ? m : SyncMechanism::broadcast;
      if (std::find(s.sync.begin(), s.sync.end(), used) == s.sync.end()) s.sync.push_back(used);
    }
  }
  for (const TransitionOrder& o : s.orders) s.shifts.emplace_back(o);
  return s;
}

}  // namespace hotbunk
