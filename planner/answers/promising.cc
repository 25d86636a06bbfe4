#include "planner/answers/promising.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <span>
#include <tuple>
#include <utility>

#include "planner/answers/choices.h"
#include "planner/search/search_parts.h"
#include "spec/validate.h"

namespace hotbunk {
namespace {

/// Which axes a cut has.
auto kind_of(const TrainCut& c) {
  return std::tuple(c.tp > 1, c.pp > 1, c.cp > 1, c.ulysses > 1, c.ep > 1, c.etp > 1, c.sp);
}

/// What a plan may have more or fewer than its estimate, bytes and seconds, beside others that cut and share alike.
constexpr double bytes_slack = 1.1, seconds_slack = 1.05;

/// What the best alone may be apart: estimates of one kind err alike, but by what steps of a few milliseconds are made
/// of, launches and waits for the first message. Of a front more is shown than the best.
double with_slack(double seconds, bool front) { return front ? seconds_slack * seconds : 1.02 * seconds + 1e-3; }

/// Of points that cut training and share its state alike, fastest first by estimate: those that may fit, up to the
/// fastest that surely does and what is as fast. A slower one leaves the other phases no more room. With a front also
/// those that take less memory than all that are faster. At least the leanest.
void add_promising(std::span<const Trained> alike, double limit_bytes, bool front, std::vector<TrainPoint>& out) {
  double enough_seconds = std::numeric_limits<double>::infinity(), least_bytes = enough_seconds;
  const Trained* leanest = nullptr;
  for (const Trained& t : alike) {
    const double bytes = t.side.total_bytes;
    if (leanest == nullptr || bytes < leanest->side.total_bytes) leanest = &t;
    if (bytes > bytes_slack * limit_bytes) continue;
    if (t.seconds <= with_slack(enough_seconds, front) || (front && bytes * bytes_slack < least_bytes)) {
      out.push_back(t.point);
      least_bytes = std::min(least_bytes, bytes);
    }
    if (bytes_slack * bytes <= limit_bytes) enough_seconds = std::min(enough_seconds, t.seconds);
  }
  if (least_bytes > bytes_slack * limit_bytes && leanest != nullptr) out.push_back(leanest->point);
}

/// How the space's cuts rank, the best first: by the objective of their best point that may fit.
std::vector<TrainCut> ranked_cuts(std::span<const Trained> all, const SearchOptions& options) {
  const bool memory = options.objective == Objective::memory;
  std::map<TrainCut, double> best;
  for (const Trained& t : all) {
    if (t.side.total_bytes > options.limit_bytes()) continue;
    const double value = memory ? t.side.total_bytes : t.seconds;
    const auto [at, added] = best.try_emplace(TrainCut::of(t.point), value);
    at->second = std::min(at->second, value);
  }
  std::vector<std::pair<double, TrainCut>> ranked;
  for (const auto& [cut, value] : best) ranked.emplace_back(value, cut);
  std::ranges::sort(ranked);
  std::vector<TrainCut> out;
  for (const auto& [value, cut] : ranked) out.push_back(cut);
  return out;
}

/// Of cuts, the best first: those that execute.
std::vector<TrainCut> promising_cuts(const ScenarioPricer& s, const RlPoint& own, std::span<const Trained> all,
                                     const std::vector<TrainCut>& ranked) {
  constexpr std::size_t kinds = 4, most = 6;
  std::vector<TrainCut> out = {TrainCut::of(own.train)};
  const auto add = [&](const TrainCut& cut) {
    if (std::ranges::find(out, cut) == out.end()) out.push_back(cut);
  };
  add({});
  std::map<TrainCut, const TrainPoint*> first;  // of the points of each cut
  for (const Trained& t : all) first.try_emplace(TrainCut::of(t.point), &t.point);
  const auto executes = [&](const TrainCut& cut) {
    RlPoint p = own;
    p.train = *first.at(cut);
    return unsupported_to_execute(with_point(s.scenario(), p)).empty();
  };
  std::vector<TrainCut> executed;
  std::ranges::copy_if(ranked, std::back_inserter(executed), executes);
  const std::size_t enough = out.size() + most, of_kinds = out.size() + kinds;
  for (const TrainCut& cut : executed)
    if (out.size() < of_kinds && std::ranges::find(out, kind_of(cut), kind_of) == out.end()) add(cut);
  for (const TrainCut& cut : executed)
    if (out.size() < enough) add(cut);
  return out;
}

/// Of points with their state on the host those leave that gain less than they lose: what their cut's fastest that
/// surely fits takes, with all of its state put to sleep and brought back.
void drop_slow_on_host(std::vector<Trained>& all, const CostModel& cost, double limit_bytes) {
  std::map<TrainCut, double> enough;
  for (const Trained& t : all) {
    if (t.point.optimizer_on_host || bytes_slack * t.side.total_bytes > limit_bytes) continue;
    const double seconds = t.seconds + 2.0 * cost.host_copy_seconds(t.side.params + t.side.optimizer);
    const auto [at, added] = enough.try_emplace(TrainCut::of(t.point), seconds);
    at->second = std::min(at->second, seconds);
  }
  std::erase_if(all, [&](const Trained& t) {
    const auto at = enough.find(TrainCut::of(t.point));
    return t.point.optimizer_on_host && at != enough.end() && t.seconds > seconds_slack * at->second;
  });
}

}  // namespace

Promising promising_training(const ScenarioPricer& s, const RlPoint& own, TrainSpace space,
                             const SearchOptions& options) {
  space.ranks = own.train.ranks();
  std::vector<Trained> all = estimated_training(s.rl(), space);
  const std::vector<TrainCut> ranked = ranked_cuts(all, options);
  if (ranked.empty()) return {};
  Promising out{.cuts = promising_cuts(s, own, all, ranked), .points = {}};
  if (options.objective == Objective::memory || s.scenario().model.trains_in_part()) return out;
  std::erase_if(all,
                [&](const Trained& t) { return std::ranges::find(out.cuts, TrainCut::of(t.point)) == out.cuts.end(); });
  drop_slow_on_host(all, s.train().cost(), options.limit_bytes());
  const auto kind = [](const Trained& t) {
    const TrainPoint& p = t.point;
    return std::tuple(TrainCut::of(p), p.sharding, p.fsdp, p.shard_over, p.optimizer_on_host);
  };
  std::ranges::sort(all, {}, [&](const Trained& t) { return std::tuple(kind(t), t.seconds, t.point); });
  out.points = {own.train};
  for (auto first = all.begin(); first != all.end();) {
    const auto last = std::find_if(first, all.end(), [&](const Trained& t) { return kind(t) != kind(*first); });
    add_promising({first, last}, options.limit_bytes(), options.front, out.points);
    first = last;
  }
  std::ranges::sort(out.points);
  out.points.erase(std::unique(out.points.begin(), out.points.end()), out.points.end());
  return out;
}

}  // namespace hotbunk
