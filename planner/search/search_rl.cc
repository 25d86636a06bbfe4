// Joint search: training x rollout x sync x shifts. The parts are priced once each; pairs of them are taken with the
// smallest lower bound first, and all variants of a pair are priced. A pair is skipped only when neither the kept ones
// nor the Pareto front nor the nearest infeasible ones can change by it.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <queue>
#include <utility>

#include "base/format.h"
#include "planner/search/ranking.h"
#include "planner/search/search_parts.h"

namespace hotbunk {

bool same_layout(const RlPoint& a, const RlPoint& b) {
  const auto dimensions = [](const RlPoint& p) {
    TrainPoint t = p.train;
    t.recompute = Recompute::none;
    t.micro_batch = t.micro_batches = 1, t.last_micro_batch = 0;
    t.optimizer_on_host = false;
    t.reshard_after_forward = true;
    RolloutPoint r = p.rollout;
    r.strided = false;
    r.memory_fraction = 1.0;
    return std::pair(t, r);
  };
  return a.placement == b.placement && dimensions(a) == dimensions(b);
}

namespace {

struct SameLayout {
  bool operator()(const RlPoint& a, const RlPoint& b) const { return same_layout(a, b); }
};

/// Lower bounds are sums of the same terms in another order: this much covers their rounding.
constexpr double below = 1.0 - 1e-12;

Value value_of(Objective o, const RlSetting& s, double gpus, double seconds, double bytes) {
  const double hours = gpus * seconds / 3600.0 / std::max(s.prompts * s.samples, 1.0) * 1e6;
  switch (o) {
    case Objective::seconds:
      return {seconds, bytes};
    case Objective::tokens_per_gpu:  // GPU-seconds per token
      return {gpus * seconds / std::max(s.prompts * s.samples * (s.prompt_tokens + s.response_tokens), 1.0), bytes};
    case Objective::gpu_hours:
      return {hours, bytes};
    case Objective::money:
      return {hours * s.price_per_gpu_hour, bytes};
    case Objective::memory:
      return {bytes, seconds};
    case Objective::gpus:
      return {gpus, seconds};
  }
  return worst_value;
}

/// One pair, the next of its training point.
struct Pair {
  double bound = 0;
  std::uint32_t segment = 0, training = 0, rollout = 0;
  bool alone = false;        // the training point's later pairs are queued elsewhere
  std::uint64_t orders = 0;  // a bit for each of the segment's that is to be priced
  bool operator>(const Pair& o) const {
    return std::tie(bound, segment, training, rollout) > std::tie(o.bound, o.segment, o.training, o.rollout);
  }
};

struct Found {
  TopList<RlCandidate, SameLayout> best;
  Front<RlCandidate> front, lacking;  // lacking: objective against the bytes that are too many
  std::vector<RlCandidate> waiting;   // known by the least bytes of their plans
  std::int64_t priced = 0, feasible = 0;
  RolloutsBeside beside;
  std::vector<SyncPrice> moved;  // of the pair at hand
  explicit Found(std::size_t keep) : best(keep, {}) {}
  /// What another found moves here; what it knows of rollouts stays for its next batch.
  void take(Found& o) {
    best.merge(o.best);
    front.merge(o.front);
    lacking.merge(o.lacking);
    waiting.insert(waiting.end(), o.waiting.begin(), o.waiting.end());
    o.waiting.clear();
    priced += std::exchange(o.priced, 0);
    feasible += std::exchange(o.feasible, 0);
  }
};

class JointSearch {
 public:
  JointSearch(const RlModel& given, const RlSpace& space, const SearchOptions& options)
      : model_(given), space_(space), options_(options), found_(options.keep) {
    for (const PlacementChoice& p : space.placement) segments_.push_back(segment_of(model_, space_, options_, p));
    for (std::uint32_t s = 0; s < segments_.size(); ++s)
      for (std::uint32_t t = 0; t < segments_[s].training.size(); ++t)
        if (!segments_[s].rollouts.empty()) queue_.push({bound(s, t, 0).first, s, t, 0, false});
  }

  RlSearch run() {
    std::size_t size = 64;
    std::vector<Pair> batch;
    while (take(batch, size), !batch.empty()) {
      price(batch);
      size = std::min<std::size_t>(size * 2, 4096);
    }
    return finish();
  }

 private:
  /// What no point of the pair is below.
  Value bound(std::uint32_t s, std::uint32_t t, std::uint32_t r) const;
  double least_sync(const Segment&, const Trained&, const Rolled&) const;
  double seconds_bound(const Segment&, const Trained&, const Rolled&) const;
  double bytes_bound(const Trained&) const;
  double bytes_bound(const Trained&, const Rolled&) const;
  std::size_t num_orders(const Segment&, const Trained&) const;
  std::int64_t variants(const Segment&, std::int64_t orders) const;
  void take(std::vector<Pair>& batch, std::size_t size);
  bool wanted(double gpus, double seconds, double bytes) const;
  bool later_wanted(const Pair&) const;
  std::uint64_t wanted_orders(const Pair&) const;
  void price(const std::vector<Pair>& batch);
  void price_pair(const Pair&, Found&) const;
  /// What of a price decides; sets whether it fits.
  struct Judged {
    Value value;
    double bytes = 0, over = 0;
  };
  Judged judge(const RlPoint&, RlPrice&) const;
  void consider(const RlCandidate&, Found&) const;
  void offer(const RlCandidate&, const Judged&, Found&) const;
  bool matters(const RlCandidate&, const Judged&) const;
  void settle();
  RlSearch finish();
  std::string reason() const;

  RlModel model_;  // learns exact reshard volumes of the space
  const RlSpace& space_;
  const SearchOptions& options_;
  std::vector<Segment> segments_;
  using Queue = std::priority_queue<Pair, std::vector<Pair>, std::greater<>>;
  /// `late_`: pairs that cannot fit, wanted only for what is nearest to fitting once the best is known.
  Queue queue_, late_;
  Found found_;
  std::vector<Found> parts_;  // one a thread
  std::int64_t taken_ = 0;    // taken: points of the pairs that left the queues to be priced
  bool stopped_ = false;
};

/// Of the ways to move the weights the fastest.
double JointSearch::least_sync(const Segment& s, const Trained& t, const Rolled& r) const {
  SyncJob job = model_.sync_job({.train = t.point, .rollout = r.point, .placement = s.placement.mode});
  double least = worst_value.first;
  for (SyncMechanism sync : s.sync)
    for (double bucket : space_.bucket_bytes) {
      job.bucket_bytes = bucket;
      least = std::min(least, price_sync(sync, job, model_.train().cost()).seconds());
    }
  return least;
}

double JointSearch::seconds_bound(const Segment& s, const Trained& t, const Rolled& r) const {
  const bool side_by_side = s.placement.mode == PlacementMode::disaggregated && model_.setting().overlaps;
  const double rollout = r.price.seconds();
  return below * (side_by_side ? std::max(t.seconds, rollout) : t.seconds + rollout);
}

/// What every point of the training layout needs; estimates bound nothing where plans are asked.
double JointSearch::bytes_bound(const Trained& t) const {
  return options_.plan_bytes ? 0.0 : below * t.side.total_bytes;
}

double JointSearch::bytes_bound(const Trained& t, const Rolled& r) const {
  if (options_.plan_bytes) return 0.0;
  return below * std::max(t.side.total_bytes, r.least_bytes);
}

Value JointSearch::bound(std::uint32_t s, std::uint32_t t, std::uint32_t r) const {
  const Segment& at = segments_[s];
  return value_of(options_.objective, model_.setting(), at.gpus, seconds_bound(at, at.training[t], at.rollouts[r]),
                  bytes_bound(at.training[t], at.rollouts[r]));
}

/// Layer-wise offload keeps the state on the host for ever: nothing is left to sleep.
std::size_t JointSearch::num_orders(const Segment& s, const Trained& t) const {
  return t.point.optimizer_on_host ? s.num_awake : s.orders.size();
}

std::int64_t JointSearch::variants(const Segment& s, std::int64_t orders) const {
  return orders * static_cast<std::int64_t>(s.sync.size() * space_.bucket_bytes.size());
}

/// Whether a point of at least so many seconds and bytes could change the answer.
bool JointSearch::wanted(double gpus, double seconds, double bytes) const {
  const double limit = options_.limit_bytes();
  const Value least = value_of(options_.objective, model_.setting(), gpus, seconds, bytes);
  if (bytes <= limit) return !(least > found_.best.bound()) || !found_.front.beats(seconds, bytes);
  // It cannot fit: only where it is better than the best, and nearer to fitting than what is known.
  if (!options_.nearest || (!found_.best.empty() && least.first >= found_.best.best().first)) return false;
  return !found_.lacking.beats(least.first, bytes - limit);
}

/// Whether one of the training point's pairs from this one on could change the answer. In the objective each is no
/// better than the one before; in seconds, too, but for memory.
bool JointSearch::later_wanted(const Pair& p) const {
  const Segment& s = segments_[p.segment];
  const Trained& t = s.training[p.training];
  const double seconds =
      options_.objective == Objective::memory ? below * t.seconds : seconds_bound(s, t, s.rollouts[p.rollout]);
  const double later = options_.plan_bytes ? 0.0 : below * s.rollouts[p.rollout].least_later_bytes;
  const double bytes = std::max(bytes_bound(t), later),
               best = found_.best.empty() ? worst_value.first : found_.best.best().first;
  if (bytes > options_.limit_bytes()) return options_.nearest && p.bound < best;
  return p.bound <= found_.best.bound().first || !found_.front.beats(seconds, bytes);
}

/// The orders of the pair that could change the answer, by what each copies and by its moments without staging.
std::uint64_t JointSearch::wanted_orders(const Pair& p) const {
  const Segment& s = segments_[p.segment];
  const Trained& t = s.training[p.training];
  const Rolled& r = s.rollouts[p.rollout];
  const std::uint64_t all = (std::uint64_t{1} << num_orders(s, t)) - 1;
  if (!options_.prune) return all;
  const double seconds = seconds_bound(s, t, r) + below * least_sync(s, t, r), bytes = bytes_bound(t, r);
  if (!wanted(s.gpus, seconds, bytes)) return 0;
  if (s.placement.mode != PlacementMode::colocated || options_.plan_bytes) return all;
  const CostModel& cost = model_.train().cost();
  const auto copy = [&](double moved) { return moved > 0.0 ? cost.host_copy_seconds(moved) : 0.0; };
  const ShiftBytes held{
      .params = t.side.params, .optimizer = t.side.optimizer + t.side.reference, .weights = r.price.weight_bytes};
  std::uint64_t out = 0;
  for (std::size_t i = 0; i < num_orders(s, t); ++i) {
    const ShiftPrice shift = s.shifts[i].price(held);
    const double copied = copy(shift.down) + copy(shift.up) + (shift.sync_from_host ? copy(held.params) : 0.0);
    const double overhead = t.side.overhead_bytes;
    const double moments = std::max({t.side.total_bytes + shift.train_rest, shift.sync_bytes + overhead,
                                     model_.least_rollout_bytes(r.point, r.price, shift.rollout_rest, overhead),
                                     shift.wake_bytes + overhead});
    if (wanted(s.gpus, seconds + below * copied, std::max(bytes, below * moments))) out |= std::uint64_t{1} << i;
  }
  return out;
}

/// The next pairs to price; fewer when the budget ends, none when all is done.
void JointSearch::take(std::vector<Pair>& batch, std::size_t size) {
  batch.clear();
  Pair p;
  while (batch.size() < size && !(queue_.empty() && late_.empty())) {
    if (options_.most_points > 0 && taken_ >= options_.most_points) {
      stopped_ = true;
      return;
    }
    const bool early = !queue_.empty();
    p = early ? queue_.top() : late_.top();
    (early ? queue_ : late_).pop();
    const Segment& s = segments_[p.segment];
    const Trained& t = s.training[p.training];
    const bool hopeless = bytes_bound(t) > options_.limit_bytes();
    const bool too_large = hopeless || bytes_bound(t, s.rollouts[p.rollout]) > options_.limit_bytes();
    if (early && hopeless) {
      late_.push(p);
      continue;
    }
    const bool more = !options_.prune || later_wanted(p);
    if (more && !p.alone && p.rollout + 1 < s.rollouts.size())
      (early ? queue_ : late_)
          .push({bound(p.segment, p.training, p.rollout + 1).first, p.segment, p.training, p.rollout + 1, false});
    if (!more) continue;
    p.orders = wanted_orders(p);
    if (p.orders == 0) continue;
    if (early && too_large) {
      late_.push({p.bound, p.segment, p.training, p.rollout, true});
      continue;
    }
    batch.push_back(p);
    taken_ += variants(s, std::popcount(p.orders));
  }
}

void JointSearch::price(const std::vector<Pair>& batch) {
  const std::size_t worth_threads = options_.plan_bytes ? 16 : 256;  // bytes of plans take longer than estimates
  const int threads = batch.size() < worth_threads ? 1 : threads_of(options_.threads);
  if (threads == 1) {
    for (const Pair& p : batch) price_pair(p, found_);
    return settle();
  }
  parts_.resize(static_cast<std::size_t>(threads), Found(options_.keep));
  on_threads(threads, [&](int i) {
    for (auto k = static_cast<std::size_t>(i); k < batch.size(); k += static_cast<std::size_t>(threads))
      price_pair(batch[k], parts_[static_cast<std::size_t>(i)]);
  });
  for (Found& part : parts_) found_.take(part);
  settle();
}

void JointSearch::price_pair(const Pair& pair, Found& out) const {
  const Segment& s = segments_[pair.segment];
  const Trained& t = s.training[pair.training];
  const Rolled& r = s.rollouts[pair.rollout];
  RlPoint p{.train = t.point, .rollout = r.point, .placement = s.placement.mode};
  const auto each_sync = [&](auto visit) {
    for (SyncMechanism sync : s.sync)
      for (double bucket : space_.bucket_bytes) p.sync = sync, p.bucket_bytes = bucket, visit();
  };
  std::vector<SyncPrice>& moved = out.moved;  // as each_sync goes
  moved.clear();
  SyncJob job = model_.sync_job(p);
  each_sync([&] {
    job.bucket_bytes = p.bucket_bytes;
    moved.push_back(price_sync(p.sync, job, model_.train().cost()));
  });
  for (std::uint64_t left = pair.orders; left != 0; left &= left - 1) {
    const auto order = static_cast<std::size_t>(std::countr_zero(left));
    const ShiftShape& shift = s.shifts[order];
    p.transition = s.orders[order];
    const RolloutPrice& rollout = out.beside.price(model_, r, model_.leftovers(p, shift, t.side));
    auto next = moved.begin();
    each_sync([&] { consider({p, model_.combine(p, shift, t.side, rollout, *next++)}, out); });
  }
}

JointSearch::Judged JointSearch::judge(const RlPoint& p, RlPrice& price) const {
  Judged out{.value = {}, .bytes = price.peak_bytes()};
  out.over = std::max(0.0, out.bytes - options_.limit_bytes()) + std::max(0.0, price.host_bytes - options_.host_bytes);
  price.fits = out.over <= 0.0;
  out.value =
      value_of(options_.objective, model_.setting(), static_cast<double>(p.gpus()), price.iteration_seconds, out.bytes);
  return out;
}

void JointSearch::consider(const RlCandidate& given, Found& out) const {
  RlCandidate c = given;
  if (options_.plan_bytes) {
    if (options_.plan_bytes(c.point, false, c.price)) out.waiting.push_back(c);
    return;
  }
  ++out.priced;
  offer(c, judge(c.point, c.price), out);
}

void JointSearch::offer(const RlCandidate& c, const Judged& is, Found& out) const {
  if (!c.price.fits) {
    if (!out.lacking.beats(is.value.first, is.over)) out.lacking.offer(is.value.first, is.over, c);
    return;
  }
  ++out.feasible;
  const double seconds = c.price.iteration_seconds;
  if (!(is.value > out.best.bound())) out.best.offer(is.value, c);
  if (!out.front.beats(seconds, is.bytes)) out.front.offer(seconds, is.bytes, c);
}

/// Whether a candidate can still change the answer, known by the least that it needs.
bool JointSearch::matters(const RlCandidate& c, const Judged& least) const {
  if (!options_.prune) return true;
  if (c.price.fits)
    return found_.best.takes(least.value, c) || !found_.front.beats(c.price.iteration_seconds, least.bytes);
  const bool better = found_.best.empty() || least.value.first < found_.best.best().first;
  return better && options_.nearest && !found_.lacking.beats(least.value.first, least.over);
}

/// Asks the exact bytes of what still matters: what seems to fit first and the best of it first, since each that is
/// found makes later ones matter less.
void JointSearch::settle() {
  struct Waiting {
    RlCandidate candidate;
    Judged least;
  };
  std::vector<Waiting> all;
  for (RlCandidate& c : found_.waiting) {
    const Judged least = judge(c.point, c.price);
    all.push_back({c, least});
  }
  found_.waiting.clear();
  std::ranges::sort(all, [](const Waiting& a, const Waiting& b) {
    const RlCandidate &x = a.candidate, &y = b.candidate;
    return std::tie(y.price.fits, a.least.value, x.point) < std::tie(x.price.fits, b.least.value, y.point);
  });
  for (Waiting& w : all) {
    RlCandidate& c = w.candidate;
    if (!matters(c, w.least)) continue;
    options_.plan_bytes(c.point, true, c.price);
    ++found_.priced;
    offer(c, judge(c.point, c.price), found_);
  }
}

RlSearch JointSearch::finish() {
  RlSearch out;
  for (const Segment& s : segments_) {
    out.rejected += s.rejected;
    for (const Trained& t : s.training)
      out.points +=
          static_cast<std::int64_t>(s.rollouts.size()) * variants(s, static_cast<std::int64_t>(num_orders(s, t)));
  }
  out.priced = found_.priced;
  out.feasible = found_.feasible;
  out.limit_bytes = options_.limit_bytes();
  out.best = found_.best.take();
  out.pareto = found_.front.take();
  out.complete = !stopped_;
  const double best = found_.best.empty() ? worst_value.first : found_.best.best().first;
  if (stopped_ && !queue_.empty()) {
    // No point that was not looked at and could fit is below the first in the queue.
    const double least = queue_.top().bound;
    if (found_.best.empty()) out.gap = 1.0;
    else if (least < best && best > 0.0) out.gap = 1.0 - least / best;
  }
  // Sorted by value, so the bytes that are too many fall: the nearest to fitting come last.
  for (const RlCandidate& c : found_.lacking.take())
    if (objective_of(options_.objective, model_, c.point, c.price) < best)
      out.infeasible.insert(out.infeasible.begin(), c);
  if (out.infeasible.size() > 3) out.infeasible.resize(3);
  if (out.best.empty()) out.reason = reason();
  return out;
}

std::string JointSearch::reason() const {
  bool trains = false, rolls = false;
  for (const Segment& s : segments_) trains |= !s.training.empty(), rolls |= !s.rollouts.empty();
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

double objective_of(Objective o, const RlModel& model, const RlPoint& p, const RlPrice& price) {
  return value_of(o, model.setting(), static_cast<double>(p.gpus()), price.iteration_seconds, price.peak_bytes()).first;
}

RlSearch search_rl(const RlModel& model, const RlSpace& space, const SearchOptions& options) {
  return JointSearch(model, space, options).run();
}

}  // namespace hotbunk
