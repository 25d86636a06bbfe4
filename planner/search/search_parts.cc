#include "planner/search/search_parts.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <map>
#include <ranges>
#include <tuple>

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

/// Whether `a` is in no combination worse than `b`, and comes first where they are equal: what an engine, a sync and
/// the shifts mind is the same, and nothing takes more seconds or bytes.
bool beats(const Trained& a, const Trained& b) {
  const TrainSide &x = a.side, &y = b.side;
  const auto held = [](const Trained& t) {
    const TrainSide& s = t.side;
    return std::tie(t.point.optimizer_on_host, t.source, s.overhead_bytes, s.params, s.optimizer, s.reference, s.critic,
                    s.swapped_reference, s.streamed_source);
  };
  return a.point < b.point && held(a) == held(b) && x.total_bytes <= y.total_bytes && x.host_bytes <= y.host_bytes &&
         x.train_seconds <= y.train_seconds && x.old_seconds <= y.old_seconds &&
         x.reference_seconds <= y.reference_seconds && x.values_seconds <= y.values_seconds &&
         x.critic_seconds <= y.critic_seconds;
}

/// Equal but for what same_layout leaves out: of such variants at most one is an answer.
bool are_variants(const Trained& a, const Trained& b) {
  return same_layout({.train = a.point, .rollout = {}}, {.train = b.point, .rollout = {}});
}

/// Drops what another variant beats. Variants are neighbours: what they differ in is compared last.
void drop_beaten(std::vector<Trained>& all) {
  std::vector<Trained> out;
  std::size_t layout = 0;  // where the present one's begin in `out`
  for (const Trained& t : all) {
    if (layout < out.size() && !are_variants(out[layout], t)) layout = out.size();
    const auto variants = std::ranges::subrange(out.begin() + static_cast<std::ptrdiff_t>(layout), out.end());
    if (std::ranges::none_of(variants, [&](const Trained& o) { return beats(o, t); })) out.push_back(t);
  }
  all = std::move(out);
}

void add_training(const RlModel& model, TrainSpace space, const SearchOptions& options, Segment& s) {
  space.ranks = s.placement.train_ranks;
  const TrainModel& train = model.train();
  const std::vector<LayerKey> keys = layer_keys(space);
  std::vector<std::vector<Trained>> parts(static_cast<std::size_t>(threads_of(options.threads)));
  std::atomic<std::int64_t> rejected{0};
  each_of(keys.size(), options.threads, [&](std::size_t k, int thread) {
    rejected += visit_points(train, space, keys[k], [&](const TrainPoint& p, const auto& layers) {
      const TrainSide side = model.train_side(p, train.price(p, layers), layers);
      const double brought = side.swapped_reference > 0 ? train.cost().host_copy_seconds(side.swapped_reference) : 0.0;
      parts[static_cast<std::size_t>(thread)].push_back(
          {p, side, side.train_seconds + side.scoring_seconds() + brought});
    });
  });
  for (const auto& part : parts) s.training.insert(s.training.end(), part.begin(), part.end());
  s.rejected = rejected;
  in_order(s.training, [](const Trained& a, const Trained& b) { return a.point < b.point; });
  std::map<SyncSource, std::uint32_t> known;
  for (Trained& t : s.training) {
    const auto [at, is_new] = known.try_emplace(SyncSource(t.point), static_cast<std::uint32_t>(s.sources.size()));
    if (is_new) s.sources.push_back(at->first);
    t.source = at->second;
  }
  s.trained = static_cast<std::int64_t>(s.training.size());
  s.on_host = std::ranges::count_if(s.training, [](const Trained& t) { return t.point.optimizer_on_host; });
  // Estimates say nothing about the bytes of plans.
  if (options.prune && !options.plan_bytes) drop_beaten(s.training);
}

/// Every engine of one shape that divides.
void add_engines(const RlModel& model, const RlSpace& space, const RolloutPoint& shape,
                 std::vector<RolloutPoint>& out) {
  for (std::int64_t groups : space.attention_dp)
    for (bool whole : space.whole_experts)
      for (bool strided : space.strided)
        for (double fraction : space.memory_fraction) {
          RolloutPoint p = shape;
          p.strided = strided, p.memory_fraction = fraction, p.attention_dp = groups;
          p.ep = whole ? p.tp * p.cp : 1;
          if (model.divides(p)) out.push_back(p);
        }
}

void add_rollouts(const RlModel& model, const RlSpace& space, const SearchOptions& options, Segment& s) {
  const std::int64_t ranks = s.placement.rollout_ranks;
  std::vector<RolloutPoint> engines;
  for (std::int64_t tp : space.rollout_tp)
    for (std::int64_t cp : space.rollout_cp)
      for (std::int64_t pp : space.rollout_pp)
        if (tp >= 1 && cp >= 1 && pp >= 1 && ranks % (tp * cp * pp) == 0 && space.has_engine(tp, cp, pp))
          add_engines(model, space, {.tp = tp, .engines = ranks / (tp * cp * pp), .cp = cp, .pp = pp}, engines);
  const bool apart = s.placement.mode == PlacementMode::disaggregated;
  double overhead = s.training.empty() ? 0.0 : std::numeric_limits<double>::infinity();
  for (const Trained& t : s.training) overhead = std::min(overhead, t.side.overhead_bytes);
  std::vector<RolloutPrice> prices(engines.size());
  each_of(engines.size(), options.threads, [&](std::size_t i, int) { prices[i] = model.price_rollout(engines[i]); });
  for (std::size_t i = 0; i < engines.size(); ++i)
    if (const RolloutPoint& p = engines[i]; prices[i].fits)
      s.rollouts.push_back(
          {p, prices[i],
           apart ? model.apart_bytes(p, prices[i]) : model.least_rollout_bytes(p, prices[i], 0.0, overhead)});
  const bool memory = options.objective == Objective::memory;
  in_order(s.rollouts, [&](const Rolled& a, const Rolled& b) {
    const double x = memory ? a.least_bytes : a.price.seconds(), y = memory ? b.least_bytes : b.price.seconds();
    return x != y ? x < y : a.point < b.point;
  });
  double least = std::numeric_limits<double>::infinity();
  for (Rolled& r : std::views::reverse(s.rollouts)) r.least_later_bytes = least = std::min(least, r.least_bytes);
}

}  // namespace

std::int64_t Segment::points() const {
  const auto shifted =
      (trained - on_host) * static_cast<std::int64_t>(orders.size()) + on_host * static_cast<std::int64_t>(num_awake);
  return shifted * static_cast<std::int64_t>(rollouts.size() * num_syncs());
}

const SyncPrices& SyncsBetween::price(const RlModel& model, const Segment& s, const Trained& t, const Rolled& r) {
  if (held_ >= most) known_.clear(), held_ = 0;
  const SyncSource& source = s.sources[t.source];
  const auto [at, is_new] = known_.try_emplace({&source, &r});
  SyncPrices& out = at->second;
  if (!is_new) return out;
  held_ += s.num_syncs();
  out.each.reserve(s.num_syncs());
  SyncJob job = model.sync_job(source, r.point, s.placement.mode, 0.0);
  out.least_seconds = std::numeric_limits<double>::infinity();
  for (SyncMechanism sync : s.sync)
    for (double bucket : s.bucket_bytes) {
      job.bucket_bytes = bucket;
      out.each.push_back(price_sync(sync, job, model.train().cost()));
      out.least_seconds = std::min(out.least_seconds, out.each.back().seconds());
    }
  return out;
}

Segment segment_of(RlModel& model, const RlSpace& space, const SearchOptions& options, const PlacementChoice& choice) {
  Segment s;
  s.placement = choice;
  const bool shared = choice.mode == PlacementMode::colocated;
  s.gpus = static_cast<double>(shared ? choice.train_ranks : choice.train_ranks + choice.rollout_ranks);
  s.bucket_bytes = space.bucket_bytes;
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
