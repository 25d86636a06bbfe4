// The layouts of both trainers that a system has, in one ranking.
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <string_view>
#include <utility>

#include "planner/answers/choices.h"
#include "spec/catalog.h"
#include "spec/pipeline_split.h"
#include "spec/validate.h"

namespace hotbunk {
namespace {

/// "verl-megatron" of "verl-fsdp", and back; "": the catalogue has no such profile.
std::string other_profile(const std::string& profile) {
  for (const auto& [one, other] :
       {std::pair<std::string_view, std::string_view>{"-fsdp", "-megatron"}, {"-megatron", "-fsdp"}})
    if (profile.ends_with(one)) {
      std::string out = profile.substr(0, profile.size() - one.size()) + std::string(other);
      return catalog_file("frameworks", out).empty() ? "" : out;
    }
  return "";
}

/// A row with what orders it: less is better.
using Scored = std::pair<double, ChoiceRow>;

std::vector<Scored> scored(const ScenarioPricer& s, Objective objective, std::vector<ChoiceRow> rows) {
  std::vector<Scored> out;
  for (ChoiceRow& r : rows) {
    const double score = objective_of(objective, s.rl(), r.point, r.price);
    out.emplace_back(score, std::move(r));
  }
  return out;
}

/// Those of the other trainer are its profile's, and their flags begin at the scenario.
std::vector<ChoiceRow> of_other(const Scenario& own, const Scenario& other, std::vector<ChoiceRow> rows) {
  std::erase_if(rows, [](const ChoiceRow& r) { return r.own && !r.price.fits; });
  for (ChoiceRow& r : rows) {
    r.own = false;
    r.profile = other.profile;
    r.flags = flags_between(own, with_point(other, r.point));
  }
  return rows;
}

/// Both, best first; what does not fit stands last, as it did.
std::vector<ChoiceRow> merged(std::vector<Scored> a, std::vector<Scored> b) {
  a.insert(a.end(), std::make_move_iterator(b.begin()), std::make_move_iterator(b.end()));
  std::ranges::stable_sort(a, {}, [](const Scored& r) { return std::pair(!r.second.price.fits, r.first); });
  std::vector<ChoiceRow> out;
  for (Scored& r : a) out.push_back(std::move(r.second));
  return out;
}

}  // namespace

std::optional<Scenario> with_other_trainer(const Scenario& s) {
  const std::string profile = other_profile(s.profile);
  if (profile.empty()) return std::nullopt;
  Scenario out = s;
  out.profile = profile;
  const bool megatron = profile.ends_with("-megatron");
  out.train.engine = megatron ? TrainEngine::megatron : TrainEngine::fsdp2;
  const TrainLayout plain;
  TrainLayout& t = out.train.layout;
  t.dp = s.train.layout.ranks();
  t.cp = t.ulysses = t.tp = t.pp = t.vpp = t.ep = t.etp = 1;
  t.sp = false, t.fsdp = plain.fsdp, t.shard_over = plain.shard_over;
  set_split(out.train, {});
  out.train.pipeline_schedule = TrainSpec().pipeline_schedule;
  out.train.reshard_after_forward = TrainSpec().reshard_after_forward;
  if (megatron && out.train.offload == Offload::layerwise) out.train.offload = Offload::sleep;
  if (!megatron) out.optimizer.cpu_fraction = 0;
  if (!validate(out, [](std::string_view) { return SourceLocation{}; }).empty()) return std::nullopt;
  return out;
}

Result<Choices> choose_trainer(const ScenarioPricer& s, const ChoiceOptions& options) {
  auto own = choose(s, options);
  if (!own || own->lowered) return own;
  const auto scenario = with_other_trainer(s.scenario());
  if (!scenario) return own;
  const auto pricer = ScenarioPricer::make(*scenario, catalog_root());
  if (!pricer) return own;
  auto other = choose(**pricer, options);
  if (!other) return own;
  Choices out = std::move(*own);
  out.other_trainer = scenario->profile;
  const Objective objective = options.objective;
  const auto both = [&](std::vector<ChoiceRow> mine, std::vector<ChoiceRow> theirs) {
    return merged(scored(s, objective, std::move(mine)),
                  scored(**pricer, objective, of_other(s.scenario(), *scenario, std::move(theirs))));
  };
  out.rows = both(std::move(out.rows), std::move(other->rows));
  // The best of each trainer stays, wherever it ranks.
  std::size_t kept = 0;
  bool mine_shown = false, other_shown = false;
  std::erase_if(out.rows, [&](const ChoiceRow& r) {
    if (r.own) return false;
    const bool is_first = !std::exchange(r.profile.empty() ? mine_shown : other_shown, true);
    return kept++ >= options.top && !is_first;
  });
  const auto best = [&]() {
    if (out.rows.empty() || !out.rows.front().price.fits) return std::numeric_limits<double>::infinity();
    const ChoiceRow& r = out.rows.front();
    return objective_of(objective, (r.profile.empty() ? s : **pricer).rl(), r.point, r.price);
  }();
  out.infeasible = both(std::move(out.infeasible), std::move(other->infeasible));
  std::erase_if(out.infeasible, [&](const ChoiceRow& r) {
    return objective_of(objective, (r.profile.empty() ? s : **pricer).rl(), r.point, r.price) >= best;
  });
  std::vector<ChoiceRow> front = both(std::move(out.pareto), std::move(other->pareto));
  out.pareto.clear();
  for (const ChoiceRow& r : front)
    if (std::ranges::none_of(front, [&](const ChoiceRow& b) {
          const auto key = [](const ChoiceRow& x) {
            return std::pair(x.price.iteration_seconds, x.price.peak_bytes());
          };
          const auto [seconds, bytes] = key(b);
          const auto [mine, held] = key(r);
          return seconds <= mine && bytes <= held && (seconds < mine || bytes < held);
        }))
      out.pareto.push_back(r);
  out.points += other->points, out.priced += other->priced, out.feasible += other->feasible;
  out.complete &= other->complete, out.gap = std::max(out.gap, other->gap);
  if (!out.rows.empty() && out.rows.front().price.fits) out.reason.clear();
  return out;
}

}  // namespace hotbunk
