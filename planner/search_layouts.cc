// Searches of a scenario's layouts, SFT's included, on its cluster and on smaller ones.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/format.h"
#include "planner/answers.h"
#include "planner/train_points.h"

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
    if (o.plan_bytes && !o.plan_bytes(p, true, price)) continue;
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
  // Estimates decide nothing where plans do.
  if (options.plan_bytes) wide.device_bytes = wide.host_bytes = std::numeric_limits<double>::max();
  const TrainSearch found = search_train(s.train(), space.train, wide);
  RlSearch out;
  out.points = out.priced = found.priced;
  out.feasible = found.feasible;
  out.rejected = found.rejected;
  out.complete = found.complete;
  out.gap = found.complete ? 0.0 : 1.0;
  out.limit_bytes = options.limit_bytes();
  out.reason = found.reason;
  std::vector<RlCandidate> best = as_points(s, found.best, options), lacking = as_points(s, found.infeasible, options);
  out.pareto = as_points(s, found.pareto, options);
  if (options.plan_bytes) {
    const auto fits = [](const RlCandidate& c) { return c.price.fits; };
    const auto first_lacking = std::stable_partition(best.begin(), best.end(), fits);
    lacking.assign(first_lacking, best.end());
    best.erase(first_lacking, best.end());
    out.priced = out.points = static_cast<std::int64_t>(best.size() + lacking.size());
    out.feasible = static_cast<std::int64_t>(best.size());
    std::erase_if(out.pareto, [&](const RlCandidate& c) { return !fits(c); });
    std::stable_sort(lacking.begin(), lacking.end(), [](const RlCandidate& a, const RlCandidate& b) {
      return a.price.peak_bytes() < b.price.peak_bytes();
    });
    if (best.empty())
      out.reason = lacking.empty() ? "no layout executes"
                                   : fmt::format("none of {} layouts fits: the smallest needs {}, a device has {}",
                                                 lacking.size(), format_bytes(lacking.front().price.peak_bytes()),
                                                 format_bytes(options.limit_bytes()));
    else
      std::erase_if(lacking, [&](const RlCandidate& c) {
        return c.price.iteration_seconds >= best.front().price.iteration_seconds;
      });
  }
  out.best = distinct(best, options.keep);
  out.infeasible = distinct(lacking, 3);
  return out;
}

}  // namespace

RlSearch search_layouts(const ScenarioPricer& s, const RlSpace& space, const SearchOptions& options) {
  return s.scenario().algorithm.name == AlgorithmName::sft ? search_sft(s, space, options)
                                                           : search_rl(s.rl(), space, options);
}

Status price_known(const Scenario& s, Objective o) {
  if (o != Objective::money || s.cluster.gpu.price_per_hour.value > 0) return {};
  return fail(Diagnostic{.code = "E262",
                         .message = fmt::format("no price of a {} is known", s.cluster.gpu.name),
                         .where = {},
                         .notes = {},
                         .help = "give cluster.gpu.price_per_hour, or choose gpu-hours"});
}

namespace {

/// The scenario's layouts on a cluster of that size; `nearest`: what nearly fits is of interest too.
Result<RlSearch> search_on(Scenario s, std::int64_t nodes, std::int64_t per_node, bool nearest,
                           const std::filesystem::path& catalogue, SearchOptions options) {
  s.cluster.nodes = nodes;
  s.cluster.gpus_per_node = per_node;
  auto pricer = ScenarioPricer::make(s, catalogue);
  if (!pricer) return fail(pricer.error());
  const RlSetting& set = (*pricer)->rl().setting();
  options.device_bytes = set.device_bytes, options.host_bytes = set.host_bytes, options.nearest = nearest;
  return search_layouts(**pricer, default_rl_space(s), options);
}

/// Ranks below which master copies, moments and gradients of the whole model do not even fit all devices together.
double least_ranks(const Scenario& s, const SearchOptions& o) {
  if (s.train.offload == Offload::layerwise) return 1.0;
  const StateBytes b = train_setting_of(s).state;
  return static_cast<double>(parameter_count(s.model)) * (b.master + b.moments + b.grads) /
         (rl_setting_of(s).device_bytes * (1.0 - o.headroom));
}

}  // namespace

Result<SmallestCluster> smallest_cluster(const Scenario& scenario, const std::filesystem::path& catalogue,
                                         const SearchOptions& options, std::int64_t most) {
  if (const Status known = price_known(scenario, options.objective); !known) return fail(known.error());
  SmallestCluster out;
  const std::int64_t per_node = scenario.cluster.gpus_per_node;
  const double least = least_ranks(scenario, options) / static_cast<double>(scenario.cluster.ranks_per_device);
  bool complete = true;  // of the searches that found nothing
  const auto try_size = [&](std::int64_t nodes, std::int64_t each, bool nearest) -> Result<bool> {
    auto found = search_on(scenario, nodes, each, nearest, catalogue, options);
    if (!found) return fail(found.error());
    const bool fits = !found->best.empty();
    if (fits) out.nodes = nodes, out.gpus = nodes * each;
    else complete = complete && found->complete;
    if (fits || nearest) out.search = std::move(*found);
    return fits;
  };
  // Doubling first: most impossible scenarios are impossible on any number of nodes.
  std::int64_t enough = 0;
  std::vector<std::int64_t> too_few;
  for (std::int64_t nodes = 1; nodes <= most && enough == 0; nodes *= 2) {
    if (static_cast<double>(nodes * per_node) < least && nodes * 2 <= most) continue;
    const auto fits = try_size(nodes, per_node, true);
    if (!fits) return fail(fits.error());
    if (*fits) enough = nodes;
    else too_few.push_back(nodes);
  }
  // Then every smaller size, ascending: what fits on n GPUs need not fit on a few more, which divide other things.
  const auto smaller = [&]() -> Status {
    for (std::int64_t gpus = 1; gpus < enough * per_node; gpus += gpus < per_node ? 1 : per_node) {
      const std::int64_t nodes = std::max<std::int64_t>(1, gpus / per_node);
      if (static_cast<double>(gpus) < least) continue;
      if (gpus >= per_node && std::find(too_few.begin(), too_few.end(), nodes) != too_few.end()) continue;
      const auto fits = try_size(nodes, std::min(gpus, per_node), false);
      if (!fits) return fail(fits.error());
      if (*fits) break;
    }
    return {};
  };
  if (const Status searched = smaller(); !searched) return fail(searched.error());
  out.exact = complete;
  return out;
}

std::string render(const SmallestCluster& s) {
  if (s.gpus == 0) return fmt::format("No cluster of such nodes holds it: {}\n", s.search.reason);
  return fmt::format(
      "{}: {} GPU{} on {} node{}\n{}",
      s.exact ? "Smallest cluster" : "Smallest cluster found (the budget ended searches of smaller ones)", s.gpus,
      s.gpus == 1 ? "" : "s", s.nodes, s.nodes == 1 ? "" : "s", render(s.search));
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
  return doc.dump(2);
}

std::string to_json(const SmallestCluster& s) {
  return nlohmann::ordered_json{{"nodes", s.nodes},
                                {"gpus", s.gpus},
                                {"exact", s.exact},
                                {"search", nlohmann::ordered_json::parse(to_json(s.search))}}
      .dump(2);
}

}  // namespace hotbunk
