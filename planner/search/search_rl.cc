// Joint search: training x rollout x sync x shifts. The parts are priced once each; pairs of them are taken with the
// smallest lower bound first, and all variants of a pair are priced. What is skipped can change neither the kept ones
// nor the Pareto front nor the nearest infeasible ones.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <queue>
#include <set>
#include <tuple>
#include <utility>

#include "base/format.h"
#include "planner/search/found.h"

namespace hotbunk {
namespace {

/// Lower bounds are sums of the same terms in another order: this much covers their rounding.
constexpr double below = 1.0 - 1e-12;
constexpr std::size_t most_nearest = 3;  // infeasible ones in an answer

/// One pair, the next of its training point.
struct Pair {
  double least = 0;  // of what its queue is ordered by, for this pair and for all that follow it
  std::uint32_t segment = 0, training = 0, rollout = 0;
  bool alone = false;  // the training point's later pairs are queued elsewhere
  bool operator>(const Pair& o) const {
    return std::tie(least, segment, training, rollout) > std::tie(o.least, o.segment, o.training, o.rollout);
  }
};

class JointSearch {
 public:
  JointSearch(const RlModel& given, const RlSpace& space, const SearchOptions& options)
      : model_(given), space_(space), options_(options), workers_(threads_of(options.threads)), found_(options.keep) {
    parts_.resize(static_cast<std::size_t>(workers_.threads()), Found(options.keep));
    for (const PlacementChoice& p : space.placement)
      segments_.push_back(segment_of(model_, space_, options_, p, workers_));
    std::vector<Pair> first;  // of every training point
    for (std::uint32_t i = 0; i < segments_.size(); ++i) {
      const SearchSegment& s = segments_[i];
      for (std::uint32_t t = 0; t < s.training.size() && !s.rollouts.empty(); ++t)
        first.push_back({bound(s, s.training[t], s.rollouts[0]).first, i, t, 0, false});
    }
    queue_ = Queue(std::greater<>(), std::move(first));
  }

  RlSearch run() {
    // What a batch finds spares the next ones; with plans, of whose bytes nothing is known before, it spares none of a
    // front, and the largest batches keep all threads at work.
    const bool spares = !options_.plan_prices || !options_.front;
    // A plan is lowered for more than a look at what was found since costs.
    const std::size_t most = !spares ? 1 << 16 : options_.plan_prices ? 64 : 256;
    std::size_t size = spares ? 64 : most;
    std::vector<Pair> batch;
    while (take(batch, size), !batch.empty()) {
      prepare(batch);
      price(batch);
      size = std::min(size * 2, most);
    }
    return finish();
  }

 private:
  /// What no point of the pair is below.
  Value bound(const SearchSegment&, const Trained&, const Rolled&) const;
  double best_value() const { return found_.best.empty() ? worst_value.first : found_.best.best().first; }
  double computing_bound(const SearchSegment&, const Trained&, double rollout) const;
  double seconds_bound(const SearchSegment&, const Trained&, const Rolled&) const;
  double bytes_bound(const Trained&) const;
  double bytes_bound(const Trained&, const Rolled&) const;
  double later_bytes(const SearchSegment&, const Trained&, std::uint32_t rollout) const;
  /// What an order of shifts adds at least to a pair's seconds, and the bytes of its moments.
  struct LeastShift {
    double seconds = 0, bytes = 0;
  };
  LeastShift least_shift(const SearchSegment&, const Trained&, const Rolled&, const ShiftShape&) const;
  void take(std::vector<Pair>& batch, std::size_t size);
  bool wanted(const Value& entry, double gpus, double seconds, double bytes) const;
  bool pair_wanted(const SearchSegment&, const Trained&, const Rolled&) const;
  bool later_wanted(const SearchSegment&, const Trained&, std::uint32_t rollout) const;
  std::uint32_t next_wanted(const Pair&) const;
  void prepare(std::vector<Pair>& batch);
  void price(const std::vector<Pair>& batch);
  void price_pair(const Pair&, Found&) const;
  bool is_spared(const Pair&, double seconds) const;
  template <class Visit>
  void each_plan(const Pair&, Visit) const;
  void consider(RlCandidate, Found&) const;
  RlSearch finish();
  std::string reason() const;

  RlModel model_;  // learns exact reshard volumes of the space
  const RlSpace& space_;
  const SearchOptions& options_;
  Workers workers_;
  std::vector<SearchSegment> segments_;
  using Queue = std::priority_queue<Pair, std::vector<Pair>, std::greater<>>;
  Queue queue_;  // by the objective
  Queue late_;   // by bytes: pairs that cannot fit, wanted only for what is nearest to fitting once the best is known
  double nearest_over_ = worst_value.first;  // bytes that the last of the nearest infeasible ones has too many
  Found found_;
  std::vector<Found> parts_;  // one a thread
  bool stopped_ = false;
};

/// Without sync and shifts.
double JointSearch::computing_bound(const SearchSegment& s, const Trained& t, double rollout) const {
  const bool side_by_side = s.placement.mode == PlacementMode::disaggregated && model_.setting().overlaps;
  return below * (side_by_side ? std::max(t.seconds, rollout) : t.seconds + rollout);
}

double JointSearch::seconds_bound(const SearchSegment& s, const Trained& t, const Rolled& r) const {
  return computing_bound(s, t, r.seconds) + below * s.sync_seconds[t.source];
}

/// What every point of the training layout needs; estimates bound nothing where plans are asked.
double JointSearch::bytes_bound(const Trained& t) const {
  return options_.plan_prices ? 0.0 : below * t.side.total_bytes;
}

double JointSearch::bytes_bound(const Trained& t, const Rolled& r) const {
  if (options_.plan_prices) return 0.0;
  return below * std::max(t.side.total_bytes, r.least_bytes);
}

Value JointSearch::bound(const SearchSegment& s, const Trained& t, const Rolled& r) const {
  return value_of(options_.objective, model_.setting(), s.gpus, seconds_bound(s, t, r), bytes_bound(t, r));
}

/// Whether a point of at least so many seconds and bytes could change the answer. Entry: what it must not exceed to be
/// kept among the best.
bool JointSearch::wanted(const Value& entry, double gpus, double seconds, double bytes) const {
  const double limit = options_.limit_bytes();
  const Value least = value_of(options_.objective, model_.setting(), gpus, seconds, bytes);
  if (bytes <= limit) return !(least > entry) || (options_.front && !found_.front.beats(seconds, bytes));
  // It cannot fit: only where it is better than the best, and nearer to fitting than what is known.
  if (!options_.nearest || least.first >= best_value() || bytes - limit > nearest_over_) return false;
  return !found_.lacking.beats(least.first, bytes - limit);
}

/// Of this pair and those of its training point that follow: none needs fewer.
double JointSearch::later_bytes(const SearchSegment& s, const Trained& t, std::uint32_t r) const {
  return std::max(bytes_bound(t), options_.plan_prices ? 0.0 : below * s.rollouts[r].least_later_bytes);
}

bool JointSearch::pair_wanted(const SearchSegment& s, const Trained& t, const Rolled& r) const {
  return !options_.prune || wanted(found_.best.bound(), s.gpus, seconds_bound(s, t, r), bytes_bound(t, r));
}

/// Whether one of the training point's pairs from this rollout on could change the answer. In the objective each is no
/// better than the one before; in seconds, too, but for memory.
bool JointSearch::later_wanted(const SearchSegment& s, const Trained& t, std::uint32_t r) const {
  const double bytes = later_bytes(s, t, r), limit = options_.limit_bytes();
  const Value least = bound(s, t, s.rollouts[r]);
  if (bytes > limit) return options_.nearest && least.first < best_value() && bytes - limit <= nearest_over_;
  const double seconds =
      options_.objective == Objective::memory ? below * t.seconds : seconds_bound(s, t, s.rollouts[r]);
  return least.first <= found_.best.bound().first || (options_.front && !found_.front.beats(seconds, bytes));
}

/// The next rollout that could change the answer with the pair's training point; none: as many as there are.
std::uint32_t JointSearch::next_wanted(const Pair& p) const {
  const SearchSegment& s = segments_[p.segment];
  const Trained& t = s.training[p.training];
  const auto end = static_cast<std::uint32_t>(s.rollouts.size());
  std::uint32_t r = p.rollout + 1;
  while (r < end && !pair_wanted(s, t, s.rollouts[r])) r = later_wanted(s, t, r) ? r + 1 : end;
  return r;
}

/// By what the order copies and by its moments without staging.
JointSearch::LeastShift JointSearch::least_shift(const SearchSegment& s, const Trained& t, const Rolled& r,
                                                 const ShiftShape& shape) const {
  if (s.placement.mode != PlacementMode::colocated || options_.plan_prices) return {};
  const CostModel& cost = model_.train().cost();
  const auto copy = [&](double moved) { return moved > 0.0 ? cost.host_copy_seconds(moved) : 0.0; };
  const ShiftBytes held{.params = t.side.params,
                        .optimizer = t.side.optimizer + t.side.critic + t.side.reference,
                        .weights = r.price.weight_bytes,
                        .communicators = t.side.communicators};
  const ShiftPrice shift = shape.price(held);
  const double overhead = t.side.overhead_bytes;
  const double rollout = model_.least_rollout_bytes(r.point, r.price, shift.rollout_rest, overhead);
  return {below * (copy(shift.down) + copy(shift.up) + (shift.sync_from_host ? copy(held.params) : 0.0)),
          below * std::max({t.side.total_bytes + shift.train_rest, shift.sync_bytes + overhead, rollout,
                            shift.wake_bytes + overhead})};
}

/// The next pairs to price; fewer when the budget ends, none when all is done.
void JointSearch::take(std::vector<Pair>& batch, std::size_t size) {
  batch.clear();
  const double limit = options_.limit_bytes();
  std::int64_t left = options_.most_points > 0 ? options_.most_points - found_.priced : 0;
  while (batch.size() < size && !(queue_.empty() && late_.empty())) {
    if (options_.most_points > 0 && left <= 0) {
      stopped_ = batch.empty();
      return;
    }
    const bool early = !queue_.empty();
    Queue& queue = early ? queue_ : late_;
    const Pair p = queue.top();
    queue.pop();
    const SearchSegment& s = segments_[p.segment];
    const Trained& t = s.training[p.training];
    const Rolled& r = s.rollouts[p.rollout];
    if (early && bytes_bound(t) > limit) {
      late_.push({later_bytes(s, t, p.rollout), p.segment, p.training, p.rollout, false});
      continue;
    }
    if (!p.alone)
      if (const std::uint32_t next = next_wanted(p); next < s.rollouts.size()) {
        const double least = early ? bound(s, t, s.rollouts[next]).first : later_bytes(s, t, next);
        queue.push({least, p.segment, p.training, next, false});
      }
    if (!pair_wanted(s, t, r)) continue;
    const double bytes = bytes_bound(t, r);
    if (early && bytes > limit) {
      late_.push({bytes, p.segment, p.training, p.rollout, true});
      continue;
    }
    batch.push_back(p);
    left -= static_cast<std::int64_t>(s.num_orders(t) * s.num_syncs());
  }
}

/// Whether a plan of the pair, of so many seconds at least, changes nothing. Its bytes are not known before.
bool JointSearch::is_spared(const Pair& pair, double seconds) const {
  const SearchSegment& s = segments_[pair.segment];
  const RlPoint p{.train = s.training[pair.training].point,
                  .rollout = s.rollouts[pair.rollout].point,
                  .placement = s.placement.mode};
  return options_.prune && !wanted(found_.best.entry(p), s.gpus, below * seconds, 0.0);
}

/// visit(point) for each of the pair's points that could change the answer.
template <class Visit>
void JointSearch::each_plan(const Pair& pair, Visit visit) const {
  const SearchSegment& s = segments_[pair.segment];
  const Trained& t = s.training[pair.training];
  RlPoint p{.train = t.point, .rollout = s.rollouts[pair.rollout].point, .placement = s.placement.mode};
  for (std::size_t order = 0; order < s.num_orders(t); ++order) {
    p.transition = s.orders[order];
    for (std::size_t i = 0; i < s.num_syncs(); ++i) {
      s.set_sync(i, p);
      const auto& of_plan = options_.plan_prices.least_seconds;
      const double least = of_plan ? of_plan(p) : 0.0;
      if (std::isfinite(least) && !is_spared(pair, least)) visit(p);
    }
  }
}

/// Points with every training point and every source of a sync beside every rollout of the batch, each once: plans are
/// put together of what depends on one of the two, and who prices waits for nobody. Pairs that change nothing, by what
/// was found before, are none of it.
void JointSearch::prepare(std::vector<Pair>& batch) {
  if (!options_.plan_prices.prepare) return;
  std::erase_if(batch, [&](const Pair& pair) {
    const SearchSegment& s = segments_[pair.segment];
    return is_spared(pair, seconds_bound(s, s.training[pair.training], s.rollouts[pair.rollout]));
  });
  std::vector<RlPoint> points;
  std::set<const Trained*> trained;
  std::set<std::tuple<const Rolled*, std::uint32_t, bool>> synced;
  for (const Pair& pair : batch) {
    const SearchSegment& s = segments_[pair.segment];
    const Trained& t = s.training[pair.training];
    const Rolled& r = s.rollouts[pair.rollout];
    RlPoint p{.train = t.point, .rollout = r.point, .placement = s.placement.mode};
    const bool new_training = trained.insert(&t).second;
    const bool new_sync = synced.emplace(&r, t.source, t.point.optimizer_on_host).second;
    for (std::size_t order = 0; order < (new_sync ? s.num_orders(t) : new_training ? 1 : 0); ++order)
      for (std::size_t i = 0; i < (new_sync ? s.num_syncs() : 1); ++i) {
        p.transition = s.orders[order];
        s.set_sync(i, p);
        points.push_back(p);
      }
  }
  options_.plan_prices.prepare(points, workers_);
}

/// Each thread prunes by what was found before the batch: what is priced does not depend on their number.
void JointSearch::price(const std::vector<Pair>& batch) {
  workers_.each(batch.size(),
                [&](std::size_t i, int thread) { price_pair(batch[i], parts_[static_cast<std::size_t>(thread)]); });
  for (Found& part : parts_) found_.take(part);
  // What fits has been seen: the best stays, and what is nearest below it only comes nearer.
  if (queue_.empty()) nearest_over_ = found_.lacking.last_but(most_nearest - 1, best_value());
}

void JointSearch::price_pair(const Pair& pair, Found& out) const {
  if (options_.plan_prices) {
    each_plan(pair, [&](const RlPoint& p) {
      if (RlPrice price; options_.plan_prices(p, price)) consider({p, price}, out);
    });
    return;
  }
  const SearchSegment& s = segments_[pair.segment];
  const Trained& t = s.training[pair.training];
  const Rolled& r = s.rollouts[pair.rollout];
  RlPoint p{.train = t.point, .rollout = r.point, .placement = s.placement.mode};
  const Value entry = found_.best.entry(p);
  const auto skipped = [&](double seconds, double bytes) {
    return options_.prune && !wanted(entry, s.gpus, seconds, bytes);
  };
  const SyncPrices& syncs = out.syncs.price(model_, s, t, r);
  const double seconds = computing_bound(s, t, r.seconds), bytes = bytes_bound(t, r);
  if (skipped(seconds + below * syncs.least_seconds, bytes)) return;
  for (std::size_t order = 0; order < s.num_orders(t); ++order) {
    const ShiftShape& shape = s.shifts[order];
    const LeastShift shift = least_shift(s, t, r, shape);
    const double least = std::max(bytes, shift.bytes);
    if (skipped(seconds + shift.seconds + below * syncs.least_seconds, least)) continue;
    p.transition = s.orders[order];
    const RolloutPrice& rollout = out.beside.price(model_, r, model_.leftovers(p, shape, t.side));
    const double beside = computing_bound(s, t, rollout.seconds()) + shift.seconds;
    for (std::size_t i = 0; i < syncs.each.size(); ++i) {
      if (skipped(beside + below * syncs.each[i].seconds(), least)) continue;
      s.set_sync(i, p);
      consider({p, model_.combine(p, shape, t.side, rollout, syncs.each[i])}, out);
    }
  }
}

void JointSearch::consider(RlCandidate c, Found& out) const {
  ++out.priced;
  out.offer(c, judge(model_, options_, c.point, c.price));
}

RlSearch JointSearch::finish() {
  RlSearch out;
  for (const SearchSegment& s : segments_) {
    out.rejected += s.rejected;
    out.points += s.points();
  }
  out.priced = found_.priced;
  out.feasible = found_.feasible;
  out.limit_bytes = options_.limit_bytes();
  out.best = found_.best.take();
  if (options_.front) out.pareto = found_.front.take();
  out.complete = !stopped_;
  const double best = best_value();
  if (stopped_ && !queue_.empty()) {
    // No point that was not looked at and could fit is below the first in the queue.
    const double least = queue_.top().least;
    if (found_.best.empty()) out.gap = 1.0;
    else if (least < best && best > 0.0) out.gap = 1.0 - least / best;
  }
  // Sorted by value, so the bytes that are too many fall: the nearest to fitting come last.
  for (const RlCandidate& c : found_.lacking.take())
    if (objective_of(options_.objective, model_, c.point, c.price) < best)
      out.infeasible.insert(out.infeasible.begin(), c);
  if (out.infeasible.size() > most_nearest) out.infeasible.resize(most_nearest);
  if (out.best.empty()) out.reason = reason();
  return out;
}

std::string JointSearch::reason() const {
  bool trains = false, rolls = false;
  for (const SearchSegment& s : segments_) trains |= !s.training.empty(), rolls |= !s.rollouts.empty();
  const ModelSpec& m = model_.train().model();
  if (!trains)
    return fmt::format("no training layout of {} ranks divides {} heads, {} layers and a batch of {}",
                       segments_.empty() ? 0.0 : segments_.front().gpus, m.heads, m.layers, space_.train.batch);
  if (!rolls)
    return fmt::format("no rollout layout holds the weights and one sequence of the longest length in {}",
                       format_bytes(model_.setting().device_bytes));
  const std::vector<RlCandidate> lacking = found_.lacking.take();
  if (lacking.empty()) return "nothing was priced: the budget ended before the first combination";
  const RlPrice& nearest = lacking.back().price;
  if (nearest.host_bytes > options_.host_bytes)
    return fmt::format("none of {} combinations fits: the nearest needs {} of host memory for a rank, which has {}",
                       format_count(found_.priced), format_bytes(nearest.host_bytes),
                       format_bytes(options_.host_bytes));
  return fmt::format("none of {} combinations fits: the nearest needs {}, a device has {}", format_count(found_.priced),
                     format_bytes(nearest.peak_bytes()), format_bytes(options_.limit_bytes()));
}

}  // namespace

RlSearch search_rl(const RlModel& model, const RlSpace& space, const SearchOptions& options) {
  return JointSearch(model, space, options).run();
}

}  // namespace hotbunk
