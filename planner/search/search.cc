#include "planner/search/search.h"

#include <fmt/format.h>

#include <atomic>

#include "base/format.h"
#include "base/parallel.h"
#include "planner/search/ranking.h"
#include "planner/search/train_points.h"

namespace hotbunk {

namespace {

struct AllDiffer {
  bool operator()(const TrainPoint&, const TrainPoint&) const { return false; }
};

struct Partial {
  TopList<TrainCandidate, AllDiffer> best;
  Front<TrainCandidate> front, lacking;  // lacking: objective against the bytes that are too many
  std::int64_t priced = 0, rejected = 0, feasible = 0;
  double least_bytes = worst_value.first;
  explicit Partial(std::size_t keep) : best(keep, {}) {}
};

void consider(const TrainPoint& p, const TrainPrice& price, const SearchOptions& options, Partial& out) {
  const double bytes = price.total_bytes(), seconds = price.step_seconds;
  const Value value = options.objective == Objective::memory ? Value{bytes, seconds} : Value{seconds, bytes};
  out.least_bytes = std::min(out.least_bytes, bytes);
  const double over =
      std::max(0.0, bytes - options.limit_bytes()) + std::max(0.0, price.host_bytes - options.host_bytes);
  if (over > 0.0) {
    if (!out.lacking.beats(value.first, over)) out.lacking.offer(value.first, over, {p, price});
    return;
  }
  ++out.feasible;
  if (value <= out.best.bound()) out.best.offer(value, {p, price});
  if (!out.front.beats(seconds, bytes)) out.front.offer(seconds, bytes, {p, price});
}

}  // namespace

TrainSearch search_train(const TrainModel& model, const TrainSpace& space, const SearchOptions& options) {
  const std::vector<LayerKey> keys = layer_keys(space);
  Workers workers(std::min(threads_of(options.threads), static_cast<int>(keys.size())));
  std::vector<Partial> partials(static_cast<std::size_t>(workers.threads()), Partial(options.keep));
  std::atomic<std::int64_t> priced{0};
  std::atomic<bool> stopped{false};
  workers.each(keys.size(), [&](std::size_t k, int thread) {
    if (options.most_points > 0 && priced >= options.most_points) {
      stopped = true;
      return;
    }
    Partial& out = partials[static_cast<std::size_t>(thread)];
    const std::int64_t before = out.priced;
    out.rejected += visit_points(model, space, keys[k], [&](const TrainPoint& p, const TrainModel::Layers& layers) {
      ++out.priced;
      consider(p, model.price(p, layers), options, out);
    });
    priced += out.priced - before;
  });
  Partial all(options.keep);
  for (const Partial& p : partials) {
    all.best.merge(p.best);
    all.lacking.merge(p.lacking);
    all.front.merge(p.front);
    all.priced += p.priced;
    all.rejected += p.rejected;
    all.feasible += p.feasible;
    all.least_bytes = std::min(all.least_bytes, p.least_bytes);
  }
  TrainSearch out;
  out.best = all.best.take();
  const double bound = all.best.empty() ? worst_value.first : all.best.best().first;
  // Sorted by value, so the bytes that are too many fall: the nearest to fitting come last.
  for (const TrainCandidate& c : all.lacking.take())
    if ((options.objective == Objective::memory ? c.price.total_bytes() : c.price.step_seconds) < bound)
      out.infeasible.insert(out.infeasible.begin(), c);
  if (out.infeasible.size() > 3) out.infeasible.resize(3);
  out.pareto = all.front.take();
  out.priced = all.priced;
  out.rejected = all.rejected;
  out.feasible = all.feasible;
  out.complete = !stopped;
  if (out.best.empty())
    out.reason = all.priced == 0
                     ? fmt::format("no layout of {} ranks divides {} heads, {} layers and a batch of {}", space.ranks,
                                   model.model().heads, model.model().layers, space.batch)
                     : fmt::format("none of {} layouts fits: the smallest needs {}, a device has {}", all.priced,
                                   format_bytes(all.least_bytes), format_bytes(options.limit_bytes()));
  return out;
}

}  // namespace hotbunk
