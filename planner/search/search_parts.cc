#include "planner/search/search_parts.h"

#include <algorithm>
#include <limits>
#include <map>
#include <span>
#include <tuple>

#include "planner/search/ranking.h"
#include "planner/search/train_points.h"

namespace hotbunk {
namespace {

template <class Part>
void sort_by_point(std::vector<Part>& parts) {
  std::ranges::sort(parts, {}, &Part::point);
  const auto same = [](const Part& a, const Part& b) { return a.point == b.point; };
  parts.erase(std::unique(parts.begin(), parts.end(), same), parts.end());
}

/// Whether `a` is in no combination worse than `b`, and comes first where they are equal: what an engine, a sync and
/// the shifts mind is the same, and nothing takes more seconds or bytes.
bool beats(const Trained& a, const Trained& b) {
  const TrainSide &x = a.side, &y = b.side;
  const auto held = [](const Trained& t) {
    const TrainSide& s = t.side;
    return std::tie(t.point.optimizer_on_host, s.overhead_bytes, s.communicators, s.params, s.optimizer, s.reference,
                    s.critic, s.swapped_reference, s.streamed_source);
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

/// Of points in their order drops what another variant beats. Variants are neighbours: what they differ in is compared
/// last.
void drop_beaten(std::vector<Trained>& all) {
  std::vector<Trained> out;
  std::size_t layout = 0;  // where the present one's begin in `out`
  for (const Trained& t : all) {
    if (layout < out.size() && !are_variants(out[layout], t)) layout = out.size();
    const auto variants = out.begin() + static_cast<std::ptrdiff_t>(layout);
    if (std::none_of(variants, out.end(), [&](const Trained& o) { return beats(o, t); })) out.push_back(t);
  }
  all = std::move(out);
}

/// The training points of some keys, with all variants of their layouts, and how many there were with and without
/// state on the host.
struct Share {
  std::vector<Trained> points;
  std::int64_t trained = 0, on_host = 0, rejected = 0;
};

Share price_share(const RlModel& model, const TrainSpace& space, std::span<const LayerKey> keys, bool planned,
                  bool drop) {
  const TrainModel& train = model.train();
  Share out;
  for (const LayerKey& key : keys)
    out.rejected += visit_points(train, space, key, [&](const TrainPoint& p, const auto& layers) {
      if (planned) return out.points.push_back({p, {}});
      const TrainSide side = model.train_side(p, train.price(p, layers), layers);
      const double brought = side.swapped_reference > 0 ? train.cost().host_copy_seconds(side.swapped_reference) : 0.0;
      out.points.push_back({p, side, side.train_seconds + side.scoring_seconds() + brought});
    });
  // Where a rank has few sequences, several keys come to the same micro-batch.
  sort_by_point(out.points);
  out.trained = std::ssize(out.points);
  out.on_host = std::ranges::count_if(out.points, [](const Trained& t) { return t.point.optimizer_on_host; });
  if (drop) drop_beaten(out.points);
  return out;
}

void add_training(const RlModel& model, TrainSpace space, const SearchOptions& options, Workers& workers,
                  SearchSegment& s) {
  space.ranks = s.placement.train_ranks;
  const std::vector<LayerKey> keys = layer_keys(space);
  std::vector<std::span<const LayerKey>> shares;
  for (auto from = keys.begin(); from != keys.end();) {
    const auto to = std::find_if_not(from, keys.end(), [&](const LayerKey& k) { return k.same_layouts(*from); });
    shares.emplace_back(from, to);
    from = to;
  }
  // Estimates say nothing about plans.
  const bool planned = static_cast<bool>(options.plan_prices), drop = options.prune && !planned;
  std::vector<Share> priced(shares.size());
  workers.each(shares.size(),
               [&](std::size_t i, int) { priced[i] = price_share(model, space, shares[i], planned, drop); });
  std::map<SyncSource, std::uint32_t> known;
  for (Share& share : priced) {
    s.trained += share.trained, s.on_host += share.on_host, s.rejected += share.rejected;
    for (Trained& t : share.points) {
      const auto [at, is_new] =
          known.try_emplace(model.sync_source(t.point), static_cast<std::uint32_t>(s.sources.size()));
      if (is_new) s.sources.push_back(at->first);
      t.source = at->second;
      s.training.push_back(t);
    }
    share.points = {};
  }
  if (options.plan_prices.training)
    workers.each(s.training.size(), [&](std::size_t i, int) {
      s.training[i].seconds = options.plan_prices.training(s.training[i].point);
    });
}

/// Every engine of one shape that divides.
void add_engines(const RlModel& model, const RlSpace& space, const RolloutPoint& shape,
                 std::vector<RolloutPoint>& out) {
  for (std::int64_t groups : space.attention_dp)
    for (std::int64_t ep : space.expert_groups(model.setting().engine, shape.tp, shape.cp))
      for (bool strided : space.strided)
        for (double fraction : space.memory_fraction) {
          RolloutPoint p = shape;
          p.strided = strided, p.memory_fraction = fraction, p.attention_dp = groups;
          p.ep = ep;
          if (model.divides(p)) out.push_back(p);
        }
}

void add_rollouts(const RlModel& model, const RlSpace& space, const SearchOptions& options, Workers& workers,
                  SearchSegment& s) {
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
  workers.each(engines.size(), [&](std::size_t i, int) { prices[i] = model.price_rollout(engines[i]); });
  for (std::size_t i = 0; i < engines.size(); ++i)
    if (const RolloutPoint& p = engines[i]; prices[i].fits)
      s.rollouts.push_back(
          {p, prices[i], options.plan_prices ? 0.0 : prices[i].seconds(),
           apart ? model.apart_bytes(p, prices[i]) : model.least_rollout_bytes(p, prices[i], 0.0, overhead)});
  if (options.plan_prices.rollout)
    workers.each(s.rollouts.size(),
                 [&](std::size_t i, int) { s.rollouts[i].seconds = options.plan_prices.rollout(s.rollouts[i].point); });
  const bool memory = options.objective == Objective::memory;
  sort_by_point(s.rollouts);
  std::ranges::stable_sort(s.rollouts, {}, [&](const Rolled& r) { return memory ? r.least_bytes : r.seconds; });
  double least = std::numeric_limits<double>::infinity();
  for (auto r = s.rollouts.rbegin(); r != s.rollouts.rend(); ++r)
    r->least_later_bytes = least = std::min(least, r->least_bytes);
}

}  // namespace

std::vector<Trained> estimated_training(const RlModel& model, const TrainSpace& space) {
  return price_share(model, space, layer_keys(space), false, false).points;
}

std::int64_t SearchSegment::points() const {
  const auto shifted =
      (trained - on_host) * static_cast<std::int64_t>(orders.size()) + on_host * static_cast<std::int64_t>(num_awake);
  return shifted * static_cast<std::int64_t>(rollouts.size() * num_syncs());
}

SyncPrices sync_prices(const RlModel& model, const SearchSegment& s, const SyncSource& source, const Rolled& r) {
  SyncPrices out{.each = {}, .least_seconds = std::numeric_limits<double>::infinity()};
  out.each.reserve(s.num_syncs());
  SyncJob job = model.sync_job(source, r.point, s.placement.mode, 0.0);
  for (SyncMechanism sync : s.sync)
    for (double bucket : s.bucket_bytes) {
      job.bucket_bytes = bucket;
      out.each.push_back(price_sync(sync, job, model.train().cost()));
      out.least_seconds = std::min(out.least_seconds, out.each.back().seconds());
    }
  return out;
}

const SyncPrices& SyncsBetween::price(const RlModel& model, const SearchSegment& s, const Trained& t, const Rolled& r) {
  if (held_ >= most) known_.clear(), held_ = 0;
  const SyncSource& source = s.sources[t.source];
  const auto [at, is_new] = known_.try_emplace({&source, &r});
  if (is_new) at->second = sync_prices(model, s, source, r), held_ += s.num_syncs();
  return at->second;
}

SearchSegment segment_of(RlModel& model, const RlSpace& space, const SearchOptions& options,
                         const PlacementChoice& choice, Workers& workers) {
  SearchSegment s;
  s.placement = choice;
  const bool shared = choice.mode == PlacementMode::colocated;
  s.gpus = static_cast<double>(shared ? choice.train_ranks : choice.train_ranks + choice.rollout_ranks);
  s.bucket_bytes = space.bucket_bytes;
  add_training(model, space.train, options, workers, s);
  add_rollouts(model, space, options, workers, s);
  if (shared) {
    s.sync = space.sync;
    const auto awake = [](const TransitionOrder& o) {
      return !o.has(TransitionStep::sleep_optimizer) && !o.has(TransitionStep::sleep_train);
    };
    s.orders = space.transition;
    s.num_awake = static_cast<std::size_t>(
        std::distance(s.orders.begin(), std::stable_partition(s.orders.begin(), s.orders.end(), awake)));
  } else {
    s.orders.emplace_back();
    s.num_awake = 1;
    s.sync = space.sync_apart;
  }
  for (const TransitionOrder& o : s.orders) s.shifts.emplace_back(o);
  s.sync_seconds.resize(s.sources.size());
  if (options.plan_prices) return s;
  workers.each(s.sources.size(), [&](std::size_t i, int) {
    double& least = s.sync_seconds[i] = std::numeric_limits<double>::infinity();
    for (const Rolled& r : s.rollouts) least = std::min(least, sync_prices(model, s, s.sources[i], r).least_seconds);
  });
  return s;
}

}  // namespace hotbunk
