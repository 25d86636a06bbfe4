// Searches of a scenario's layouts, SFT's included.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/format.h"
#include "base/json.h"
#include "base/parallel.h"
#include "planner/answers/answers.h"
#include "planner/search/found.h"
#include "planner/search/train_points.h"

namespace hotbunk {
namespace {

/// One answer per layout: the first of each, of sorted candidates.
std::vector<RlCandidate> distinct(const std::vector<RlCandidate>& all, std::size_t most) {
  std::vector<RlCandidate> out;
  for (const RlCandidate& c : all)
    if (out.size() < most &&
        std::none_of(out.begin(), out.end(), [&](const auto& o) { return same_layout(o.point, c.point); }))
      out.push_back(c);
  return out;
}

std::vector<RlCandidate> as_points(const ScenarioPricer& s, const std::vector<TrainCandidate>& all,
                                   const SearchOptions& o) {
  std::vector<RlCandidate> out;
  RlPoint p = s.point();
  for (const TrainCandidate& c : all) {
    p.train = c.point;
    RlPrice price = s.price(p);
    price.fits = price.peak_bytes() <= o.limit_bytes() && price.host_bytes <= o.host_bytes;
    out.push_back({p, price});
  }
  return out;
}

/// SFT has training alone: the rollout's knobs stay the scenario's.
RlSearch search_sft(const ScenarioPricer& s, const RlSpace& space, const SearchOptions& options) {
  SearchOptions wide = options;
  // A layout has fewer variants than this: micro-batches, recomputation, sequence parallelism, sharding.
  wide.keep = 128 * options.keep;
  const TrainSearch found = search_train(s.train(), space.train, wide);
  RlSearch out;
  out.points = out.priced = found.priced;
  out.feasible = found.feasible;
  out.rejected = found.rejected;
  out.complete = found.complete;
  out.gap = found.complete ? 0.0 : 1.0;
  out.limit_bytes = options.limit_bytes();
  out.reason = found.reason;
  out.best = distinct(as_points(s, found.best, options), options.keep);
  out.infeasible = distinct(as_points(s, found.infeasible, options), 3);
  out.pareto = as_points(s, found.pareto, options);
  return out;
}

/// The same of what is lowered: every layout has a plan, and every plan is asked.
RlSearch search_sft_plans(const ScenarioPricer& s, const RlSpace& space, const SearchOptions& options) {
  RlSearch out;
  std::vector<RlPoint> points;
  for (const LayerKey& key : layer_keys(space.train))
    out.rejected += visit_points(s.train(), space.train, key, [&](const TrainPoint& p, const TrainModel::Layers&) {
      points.push_back(s.point()), points.back().train = p;
    });
  std::ranges::sort(points);
  points.erase(std::unique(points.begin(), points.end()), points.end());
  Workers workers(threads_of(options.threads));
  std::vector<std::optional<RlPrice>> prices(points.size());
  workers.each(points.size(), [&](std::size_t i, int) {
    if (RlPrice price; options.plan_prices(points[i], price)) prices[i] = price;
  });
  Found found(options.keep);
  double least = worst_value.first;
  for (std::size_t i = 0; i < points.size(); ++i) {
    if (!prices[i]) continue;
    ++found.priced;
    const Judged judged = judge(s.rl(), options, points[i], *prices[i]);
    least = std::min(least, judged.bytes);
    found.offer({points[i], *prices[i]}, judged);
  }
  out.points = out.priced = found.priced;
  out.feasible = found.feasible;
  out.limit_bytes = options.limit_bytes();
  out.best = found.best.take();
  out.pareto = found.front.take();
  const double best = found.best.empty() ? worst_value.first : found.best.best().first;
  std::vector<RlCandidate> lacking = found.lacking.take();
  std::erase_if(
      lacking, [&](const RlCandidate& c) { return objective_of(options.objective, s.rl(), c.point, c.price) >= best; });
  std::ranges::reverse(lacking);  // the nearest to fitting first
  out.infeasible = distinct(lacking, 3);
  if (out.best.empty())
    out.reason = found.priced == 0
                     ? "no layout executes"
                     : fmt::format("none of {} layouts fits: the smallest needs {}, a device has {}", found.priced,
                                   format_bytes(least), format_bytes(options.limit_bytes()));
  return out;
}

}  // namespace

RlSearch search_layouts(const ScenarioPricer& s, const RlSpace& space, const SearchOptions& options) {
  if (s.scenario().algorithm.name != AlgorithmName::sft) return search_rl(s.rl(), space, options);
  return options.plan_prices ? search_sft_plans(s, space, options) : search_sft(s, space, options);
}

Status price_known(const Scenario& s, Objective o) {
  if (o != Objective::money || s.cluster.gpu.price_per_hour.value > 0) return {};
  return fail(Diagnostic{.code = "E262",
                         .message = fmt::format("no price of a {} is known", s.cluster.gpu.name),
                         .where = {},
                         .notes = {},
                         .help = "prices are no fact of a GPU: --set cluster.gpu.price_per_hour=PRICE of one GPU and "
                                 "hour, or choose the objective gpu-hours"});
}

std::string render(const RlSearch& s) {
  std::string out = fmt::format("{} of {} combinations priced, the others are provably no better; {} fit{}\n",
                                format_count(s.priced), format_count(s.points), format_count(s.feasible),
                                s.complete ? "" : fmt::format(" (stopped early, gap {:.2f} %)", 100 * s.gap));
  if (s.best.empty()) return out + s.reason + "\n";
  for (std::size_t i = 0; i < s.best.size(); ++i)
    out += fmt::format("{:>3}. {:>10}  {:>10}  {}\n", i + 1, format_seconds(s.best[i].price.iteration_seconds),
                       format_bytes(s.best[i].price.peak_bytes()), describe(s.best[i].point));
  for (const RlCandidate& c : s.infeasible)
    out += fmt::format("faster, but does not fit: {} in {}, lacks {}\n", format_seconds(c.price.iteration_seconds),
                       describe(c.point), format_bytes(std::max(0.0, c.price.peak_bytes() - s.limit_bytes)));
  return out;
}

std::string to_json(const RlSearch& s) {
  nlohmann::ordered_json doc = {{"points", s.points},           {"priced", s.priced},     {"feasible", s.feasible},
                                {"limit_bytes", s.limit_bytes}, {"complete", s.complete}, {"gap", s.gap}};
  if (!s.reason.empty()) doc["reason"] = s.reason;
  const std::pair<const char*, const std::vector<RlCandidate>*> lists[] = {
      {"best", &s.best}, {"infeasible", &s.infeasible}, {"pareto", &s.pareto}};
  for (const auto& [name, candidates] : lists) {
    doc[name] = nlohmann::ordered_json::array();
    for (const RlCandidate& c : *candidates)
      doc[name].push_back({{"layout", describe(c.point)},
                           {"iteration_seconds", c.price.iteration_seconds},
                           {"peak_bytes", c.price.peak_bytes()},
                           {"host_bytes", c.price.host_bytes}});
  }
  return json_text(doc, 2);
}

}  // namespace hotbunk
