#include "planner/answers/promising.h"

#include <algorithm>
#include <limits>
#include <span>
#include <tuple>

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
    if (t.seconds <= seconds_slack * enough_seconds || (front && bytes * bytes_slack < least_bytes)) {
      out.push_back(t.point);
      least_bytes = std::min(least_bytes, bytes);
    }
    if (bytes_slack * bytes <= limit_bytes) enough_seconds = std::min(enough_seconds, t.seconds);
  }
  if (least_bytes > bytes_slack * limit_bytes && leanest != nullptr) out.push_back(leanest->point);
}

}  // namespace

std::vector<TrainCut> promising_cuts(const ScenarioPricer& s, const RlPoint& own, const RlSpace& space,
                                     SearchOptions options) {
  constexpr std::size_t kinds = 4, most = 6;
  options.keep = 32 * most;
  options.nearest = options.front = false;
  const RlSearch estimated = search_layouts(s, space, options);
  if (estimated.best.empty()) return {};
  std::vector<TrainCut> out = {TrainCut::of(own.train)};
  const auto add = [&](const TrainCut& cut) {
    if (std::ranges::find(out, cut) == out.end()) out.push_back(cut);
  };
  add({});
  std::vector<TrainCut> executed;
  for (const RlCandidate& c : estimated.best)
    if (unsupported_to_execute(with_point(s.scenario(), c.point)).empty())
      executed.push_back(TrainCut::of(c.point.train));
  const std::size_t enough = out.size() + most, of_kinds = out.size() + kinds;
  for (const TrainCut& cut : executed)
    if (out.size() < of_kinds && std::ranges::find(out, kind_of(cut), kind_of) == out.end()) add(cut);
  for (const TrainCut& cut : executed)
    if (out.size() < enough) add(cut);
  return out;
}

std::vector<TrainPoint> promising_points(const ScenarioPricer& s, const RlPoint& own, TrainSpace space,
                                         const SearchOptions& options) {
  space.ranks = own.train.ranks();
  std::vector<Trained> all = estimated_training(s.rl(), space);
  const auto kind = [](const Trained& t) {
    const TrainPoint& p = t.point;
    return std::tuple(TrainCut::of(p), p.sharding, p.fsdp, p.optimizer_on_host);
  };
  std::ranges::sort(all, {}, [&](const Trained& t) { return std::tuple(kind(t), t.seconds, t.point); });
  std::vector<TrainPoint> out = {own.train};
  for (auto first = all.begin(); first != all.end();) {
    const auto last = std::find_if(first, all.end(), [&](const Trained& t) { return kind(t) != kind(*first); });
    add_promising({first, last}, options.limit_bytes(), options.front, out);
    first = last;
  }
  std::ranges::sort(out);
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

}  // namespace hotbunk
