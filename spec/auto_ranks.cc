#include "spec/auto_ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <string_view>
#include <vector>

#include "spec/scenario_keys.h"

namespace hotbunk {
namespace {

/// 2^63 - 1 where it is more: files may hold any number.
std::int64_t saturated_product(std::initializer_list<std::int64_t> factors) {
  std::int64_t n = 1;
  for (const std::int64_t f : factors)
    if (__builtin_mul_overflow(n, f, &n)) return std::numeric_limits<std::int64_t>::max();
  return n;
}

Diagnostic undivided(const SourceLocation& where, const char* key, const std::string& names, std::int64_t left,
                     std::int64_t others) {
  return {.code = "E203",
          .message = fmt::format("{} is auto, and the other dimensions do not divide the ranks", key),
          .where = where,
          .notes = {left > 0 ? fmt::format("{} ranks % ({} = {}) = {}", left, names, others, left % others)
                             : fmt::format("no ranks are left of the cluster's")},
          .help = "change them, or the cluster's nodes"};
}

/// A dimension that may be open.
struct Dimension {
  const char* key;
  std::int64_t* at;
};

std::vector<Dimension> dimensions(TrainLayout& t) {
  return {{"train.layout.dp", &t.dp},
          {"train.layout.tp", &t.tp},
          {"train.layout.pp", &t.pp},
          {"train.layout.cp", &t.cp},
          {"train.layout.ulysses", &t.ulysses}};
}
std::vector<Dimension> dimensions(RolloutLayout& r) {
  return {{"rollout.layout.dp", &r.dp},
          {"rollout.layout.tp", &r.tp},
          {"rollout.layout.pp", &r.pp},
          {"rollout.layout.cp", &r.cp}};
}

bool is_open(const Scenario& s, std::string_view key) { return std::ranges::count(s.open.keys, key) > 0; }

/// The one that takes what the others leave; none: all are given.
const Dimension* taker(const Scenario& s, const std::vector<Dimension>& all) {
  const auto at = std::ranges::find_if(all, [&](const Dimension& d) { return is_open(s, d.key); });
  return at == all.end() ? nullptr : &*at;
}

std::int64_t product_without(const std::vector<Dimension>& all, const Dimension* but) {
  std::int64_t n = 1;
  for (const Dimension& d : all)
    if (&d != but) n = saturated_product({n, *d.at});
  return n;
}

/// Fewest ranks of an engine, on one node, on which half of its share of the memory holds the weights; else the most.
std::int64_t least_rollout_tp(const Scenario& s) {
  const std::int64_t node = std::min(s.cluster.ranks(), s.cluster.ranks_per_node());
  const double weights = static_cast<double>(parameter_count(s.model)) * static_cast<double>(size_of(s.rollout.dtype));
  const double room = 0.5 * s.rollout.memory_fraction * static_cast<double>(s.cluster.device_memory_bytes);
  std::int64_t most = 1;
  for (std::int64_t tp = 1; tp <= node; ++tp) {
    if (node % tp != 0 || s.model.heads % tp != 0) continue;
    most = tp;
    if (room <= 0.0 || weights / static_cast<double>(tp) <= room) break;
  }
  return most;
}

}  // namespace

Diagnostics fill_auto(Scenario& s, const ScenarioLocator& locate) {
  if (s.open.keys.empty()) return {};
  const auto train = dimensions(s.train.layout), rollout = dimensions(s.rollout.layout);
  const bool rolls = s.algorithm.name != AlgorithmName::sft;
  const bool apart = rolls && s.placement == PlacementMode::disaggregated;
  const Dimension *const trains = taker(s, train), *const samples = rolls ? taker(s, rollout) : nullptr;
  if (apart && trains && samples)
    return {{.code = "E203",
             .message = fmt::format("{} and {} are both auto, and share no ranks", trains->key, samples->key),
             .where = locate(samples->key),
             .notes = {"disaggregated: the ranks of both add up to the cluster's"},
             .help = "give one of the two"}};
  if (rolls && is_open(s, "rollout.layout.tp") && samples->at != &s.rollout.layout.tp)
    s.rollout.layout.tp = least_rollout_tp(s);
  Diagnostics out;
  const auto fill = [&](const std::vector<Dimension>& all, const Dimension* open, std::int64_t left) {
    if (!open) return;
    const std::int64_t others = product_without(all, open);
    if (left > 0 && left % others == 0) {
      *open->at = left / others;
      return;
    }
    std::string names;
    for (const Dimension& d : all)
      if (&d != open)
        names += (names.empty() ? "" : " x ") + std::string(d.key).substr(std::string(d.key).rfind('.') + 1);
    out.push_back(undivided(locate(open->key), open->key, names, left, others));
  };
  const std::int64_t ranks = s.cluster.ranks();
  const std::int64_t sampling = apart ? product_without(rollout, nullptr) : 0;
  const std::int64_t training = apart ? product_without(train, nullptr) : 0;
  fill(train, trains, ranks - sampling);
  fill(rollout, samples, ranks - training);
  if (is_open(s, "train.micro_batch_tokens") && out.empty()) {
    s.train.micro_batch_tokens = s.train.layout.share_of(static_cast<std::int64_t>(std::ceil(s.workload.longest())));
  }
  return out;
}

std::string auto_choices(const Scenario& s) {
  std::string out;
  for (const ScenarioKey& key : scenario_keys())
    if (is_open(s, key.path) && !key.path.ends_with(".dp"))
      out += fmt::format("{}{} {}", out.empty() ? "" : ", ", key.path, std::get<std::int64_t>(key.get(s)));
  return out;
}

}  // namespace hotbunk
