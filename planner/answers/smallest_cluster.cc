// The fewest GPUs on which some layout fits: every count in turn, those that provably cannot hold it skipped.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/format.h"
#include "base/json.h"
#include "lowering/lower.h"
#include "planner/answers/answers.h"
#include "planner/answers/lowered_space.h"
#include "planner/train/optimizer_cost.h"
#include "spec/pipeline_split.h"

namespace hotbunk {
namespace {

struct Size {
  std::int64_t nodes = 1, per_node = 1;
  std::int64_t gpus() const { return nodes * per_node; }
};

/// Parts of one node, then whole nodes; ascending in GPUs.
std::vector<Size> sizes_up_to(std::int64_t per_node, std::int64_t most_nodes) {
  std::vector<Size> out;
  for (std::int64_t gpus = 1; gpus < per_node; ++gpus) out.push_back({1, gpus});
  for (std::int64_t nodes = 1; nodes <= most_nodes; ++nodes) out.push_back({nodes, per_node});
  return out;
}

/// A part of a peak: what depends on the tokens of a rank, or what does not.
double part_of(const PeakBytes& bytes, bool of_tokens) {
  constexpr PeakTensor tokens[] = {PeakTensor::kept,    PeakTensor::ends_kept, PeakTensor::logits,
                                   PeakTensor::rebuilt, PeakTensor::transient, PeakTensor::pipeline,
                                   PeakTensor::sequence};
  double out = 0.0;
  for (std::size_t i = 0; i < num_peak_tensors; ++i)
    if ((std::find(std::begin(tokens), std::end(tokens), static_cast<PeakTensor>(i)) != std::end(tokens)) == of_tokens)
      out += bytes[i];
  return out;
}

/// What no training layout of the space needs less than on a device; looks no further once that is `enough`. Of every
/// split of the weights its states on all ranks that remain, and beside them one sequence in flight, cut as often as
/// the space allows, at the same stage: a sum of two minima, so no layout is below it.
double least_training_bytes(const TrainModel& model, const TrainSpace& s, double enough) {
  const std::int64_t cuts =
      *std::max_element(s.cp.begin(), s.cp.end()) * *std::max_element(s.ulysses.begin(), s.ulysses.end());
  constexpr double none = std::numeric_limits<double>::max();
  double least = none;
  const auto at_stages = [&](TrainPoint p) {
    double fullest = 0.0;
    TrainPoint cut = p;
    cut.cp = cuts, cut.sp = p.tp > 1, cut.dp = 1;
    const TrainModel::Layers whole = model.layers(p), parts = model.layers(cut);
    for (const std::int64_t stage : {std::int64_t{0}, p.pp - 1}) {
      double states = none, tokens = none;
      for (const bool on_host : s.optimizer_on_host) {
        p.optimizer_on_host = on_host;
        states = std::min(states, part_of(model.peak_bytes(p, whole, stage), false));
      }
      for (const Recompute r : s.recompute) {
        cut.recompute = r;
        tokens = std::min(tokens, part_of(model.peak_bytes(cut, parts, stage), true));
      }
      fullest = std::max(fullest, states + tokens);
    }
    return fullest;
  };
  for (const std::int64_t tp : s.tp)
    for (const std::int64_t pp : s.pp)
      for (const std::int64_t ep : s.ep)
        for (const std::int64_t etp : s.etp)
          for (const Sharding sharding : s.sharding) {
            const TrainPoint p{.dp = s.ranks / (tp * pp),
                               .tp = tp,
                               .pp = pp,
                               .ep = ep,
                               .etp = etp,
                               .sharding = sharding,
                               .optimizer = s.optimizer};
            if (s.ranks % (tp * pp) != 0 || !model.divides(p)) continue;
            least = std::min(least, at_stages(p));
            if (least <= enough) return least;
          }
  return least;
}

/// Searches a scenario on clusters of other sizes.
class ResizedSearch {
 public:
  ResizedSearch(const Scenario& s, std::filesystem::path catalogue, SearchOptions options, bool executes)
      : scenario_(s), catalogue_(std::move(catalogue)), options_(std::move(options)), executes_(executes) {}

  /// Nothing where the size provably cannot hold it; `always` searches it all the same, and what nearly fits too.
  Result<std::optional<RlSearch>> search(const Size& size, bool always) const {
    Scenario s = scenario_;
    s.cluster.nodes = size.nodes;
    s.cluster.gpus_per_node = size.per_node;
    if (s.placement == PlacementMode::colocated) cover(s);
    auto pricer = ScenarioPricer::make(s, catalogue_);
    if (!pricer) return fail(pricer.error());
    const RlSetting& set = (*pricer)->rl().setting();
    SearchOptions o = options_;
    o.device_bytes = set.device_bytes, o.host_bytes = set.host_bytes, o.nearest = o.front = always;
    RlSpace space = default_rl_space(s, (*pricer)->train().framework());
    if (!always && hopeless(**pricer, space, o)) return std::optional<RlSearch>();
    if (executes_) {
      o.plan_prices = plan_prices(s, (*pricer)->train().cost());
      keep_what_executes(space, s, (*pricer)->point().sync);
    }
    return std::optional<RlSearch>(search_layouts(**pricer, space, o));
  }

 private:
  /// The scenario's own training takes as many ranks as there are: plans of its engine's parts are written for all of
  /// its ranks, and an engine of fewer has no seat for the others. Degrees that the ranks do not divide into are given
  /// up, with what only they had: a pipeline's split and schedule, experts over more ranks than a stage has left.
  static void cover(Scenario& s) {
    TrainLayout& t = s.train.layout;
    const std::int64_t ranks = s.cluster.ranks(), others = t.tp * t.pp * t.cp * t.ulysses;
    if (ranks % others == 0) {
      t.dp = ranks / others;
    } else {
      t = {.dp = ranks, .ep = t.ep, .etp = 1, .order = t.order};
      set_split(s.train, {});
      s.train.pipeline_schedule = TrainSpec().pipeline_schedule;
    }
    // Of a stage the mesh of experts, ep x etp x copies, lies over the same ranks (E213).
    const std::int64_t stage = ranks / t.pp;
    if (stage % t.etp != 0) t.etp = 1;
    const bool spread = t.ep > 1;
    t.ep = std::gcd(t.ep, stage / t.etp);
    if (spread && t.ep == 1) {  // nothing travels between experts (E235)
      s.train.expert_capacity = TrainSpec().expert_capacity;
      s.train.expert_dispatch = TrainSpec().expert_dispatch;
    }
    if (t.fsdp > 0 && t.shardable() % t.fsdp != 0) t.fsdp = -1, t.shard_over.clear();
  }

  /// Whether some engine of the shape holds its weights and one sequence, however many there are.
  static bool holds(const ScenarioPricer& s, const RlSpace& space, RolloutPoint r) {
    r.engines = s.point().rollout.engines;
    for (const std::int64_t apart : space.attention_dp)
      for (const std::int64_t ep : space.expert_groups(s.scenario().rollout.engine, r.tp, r.cp))
        for (const double fraction : space.memory_fraction) {
          r.attention_dp = apart, r.ep = ep, r.memory_fraction = fraction;
          if (s.rl().divides(r) && s.rl().price_rollout(r).fits) return true;
        }
    return false;
  }

  bool hopeless(const ScenarioPricer& s, const RlSpace& space, const SearchOptions& o) const {
    // Master copies, moments and gradients of the whole model, over all devices together; beside adapters it has none.
    const Scenario& at = s.scenario();
    const StateBytes b = train_setting_of(at).state;
    const double each = b.master + moment_bytes_each(at.optimizer.name, b.moments, at.optimizer.momentum > 0) + b.grads;
    const bool on_host = std::ranges::count(space.train.optimizer_on_host, true) > 0 || at.optimizer.cpu_fraction > 0;
    if (!on_host && !at.model.trains_in_part() &&
        static_cast<double>(parameter_count(at.model)) * each >
            static_cast<double>(at.cluster.ranks()) * o.limit_bytes())
      return true;
    if (executes_) return false;  // the closed form of training bounds no plan
    if (at.algorithm.name != AlgorithmName::sft) {
      bool any = false;
      for (const std::int64_t tp : space.rollout_tp)
        for (const std::int64_t cp : space.rollout_cp)
          for (const std::int64_t pp : space.rollout_pp)
            any = any || (space.has_engine(tp, cp, pp) && holds(s, space, {.tp = tp, .cp = cp, .pp = pp}));
      any = any || s.rl().price_rollout(s.point().rollout).fits;
      if (!any) return true;
    }
    TrainSpace train = space.train;
    double least = std::numeric_limits<double>::max();
    for (const PlacementChoice& p : space.placement) {
      train.ranks = p.train_ranks;
      least = std::min(least, least_training_bytes(s.train(), train, o.limit_bytes()));
      if (least <= o.limit_bytes()) return false;
    }
    return true;
  }

  const Scenario& scenario_;
  std::filesystem::path catalogue_;
  SearchOptions options_;
  bool executes_;
};

/// The first size that fits and is as fast as asked, if any.
struct FirstFit {
  std::optional<std::pair<Size, RlSearch>> found, fastest;  // fastest: else, of those that fit
  bool complete = true;                                     // false: a budget ended the search of a smaller one
};
Result<FirstFit> first_fit(const ResizedSearch& resized, const std::vector<Size>& all, double within) {
  FirstFit out;
  const auto seconds = [](const RlSearch& s) { return s.best[0].price.iteration_seconds; };
  for (const Size& size : all) {
    auto found = resized.search(size, false);
    if (!found) return fail(found.error());
    if (!*found) continue;
    if (!(*found)->best.empty()) {
      if (seconds(**found) <= within) {
        out.found = std::pair(size, std::move(**found));
        return out;
      }
      if (!out.fastest || seconds(**found) < seconds(out.fastest->second))
        out.fastest = std::pair(size, std::move(**found));
      continue;
    }
    out.complete = out.complete && (*found)->complete;
  }
  return out;
}

}  // namespace

Result<SmallestCluster> smallest_cluster(const Scenario& scenario, const std::filesystem::path& catalogue,
                                         const SearchOptions& options, std::int64_t most, double within) {
  if (const Status known = price_known(scenario, options.objective); !known) return fail(known.error());
  SmallestCluster out;
  out.most_nodes = most;
  out.within = within;
  out.executes = why_not_lowered(scenario).empty();
  const ResizedSearch resized(scenario, catalogue, options, out.executes);
  std::vector<Size> all = sizes_up_to(scenario.cluster.gpus_per_node, most);
  auto fits = first_fit(resized, all, within);
  if (!fits) return fail(fits.error());
  out.exact = fits->complete;
  if (fits->found) {
    out.nodes = fits->found->first.nodes, out.gpus = fits->found->first.gpus();
    out.search = std::move(fits->found->second);
  } else if (fits->fastest) {
    out.fastest_gpus = fits->fastest->first.gpus();
    out.search = std::move(fits->fastest->second);
  } else {
    auto largest = resized.search(all.back(), true);  // for the reason
    if (!largest) return fail(largest.error());
    out.search = std::move(**largest);
  }
  if (!out.executes) return out;
  // Layouts that are only priced may do with fewer.
  std::erase_if(all, [&](const Size& s) { return out.gpus > 0 && s.gpus() >= out.gpus; });
  auto priced = first_fit(ResizedSearch(scenario, catalogue, options, false), all, within);
  if (!priced) return fail(priced.error());
  if (priced->found) out.priced_gpus = priced->found->first.gpus(), out.priced = std::move(priced->found->second);
  return out;
}

std::string render(const SmallestCluster& s) {
  const auto count = [](std::int64_t n, const char* what) {
    return fmt::format("{} {}{}", n, what, n == 1 ? "" : "s");
  };
  std::string out;
  const std::string limit =
      std::isinf(s.within) ? "" : fmt::format(" with iterations of at most {}", format_seconds(s.within));
  if (s.gpus == 0 && s.fastest_gpus > 0)
    out = fmt::format("No layout that was searched{} on up to {}{}; the fastest, on {}:\n{}",
                      s.executes ? " executes and fits" : " fits", count(s.most_nodes, "such node"), limit,
                      count(s.fastest_gpus, "GPU"), render(s.search));
  else if (s.gpus == 0)
    out = fmt::format(
        "No layout that was searched {} on up to {}: {}\nSearched: every training layout of docs/planner.md's space, "
        "engines of at most four nodes; a scenario with a larger rollout.layout.tp has engines of that size too\n",
        s.executes ? "executes and fits" : "fits", count(s.most_nodes, "such node"), s.search.reason);
  else
    out = fmt::format("{}{}{}: {} on {}\n{}", s.exact ? "Smallest cluster" : "Smallest cluster found",
                      s.executes ? " that executes it"
                      : s.exact  ? ""
                                 : " (the budget ended searches of smaller ones)",
                      limit, count(s.gpus, "GPU"), count(s.nodes, "node"), render(s.search));
  if (s.priced_gpus > 0 && !s.priced.best.empty())
    out += fmt::format("Layouts that are only priced fit on {} by estimate: {} in {}\n", count(s.priced_gpus, "GPU"),
                       format_seconds(s.priced.best[0].price.iteration_seconds), describe(s.priced.best[0].point));
  return out;
}

std::string to_json(const SmallestCluster& s) {
  nlohmann::ordered_json doc = {
      {"nodes", s.nodes},           {"gpus", s.gpus},
      {"exact", s.exact},           {"executes", s.executes},
      {"most_nodes", s.most_nodes}, {"search", json_from<nlohmann::ordered_json>(to_json(s.search))}};
  if (!std::isinf(s.within)) doc["within_seconds"] = s.within;
  if (s.fastest_gpus > 0) doc["fastest_gpus"] = s.fastest_gpus;
  if (s.priced_gpus > 0) doc["only_priced_gpus"] = s.priced_gpus;
  return json_text(doc, 2);
}

}  // namespace hotbunk
