#include "planner/answers/solve.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/format.h"
#include "base/json.h"
#include "spec/loader.h"
#include "spec/scenario_keys.h"

namespace hotbunk {
namespace {

class Solver {
 public:
  Solver(std::filesystem::path scenario, std::vector<std::string> overrides, const ScenarioKey& key,
         std::filesystem::path catalogue)
      : scenario_(std::move(scenario)), overrides_(std::move(overrides)), key_(key), catalogue_(std::move(catalogue)) {}

  Result<Solved> run(double own) {
    out_.key = key_.path, out_.unit = key_.unit;
    bool fits = false;
    if (auto known = try_at(own, fits); !known) return fail(known.error());
    double low = fits ? own : 0.0, high = fits ? 0.0 : own;  // fits, does not
    bool has_low = fits, has_high = !fits;
    for (int i = 0; i < 24 && !(has_low && has_high); ++i) {
      const double next = clamp(fits ? 2.0 * low : high / 2.0);
      if (next == (fits ? low : high)) break;  // the key's end
      bool good = false;
      if (auto known = try_at(next, good); !known) return fail(known.error());
      if (good) low = next, has_low = true;
      else high = next, has_high = true;
    }
    while (has_low && has_high) {
      const double middle = clamp(0.5 * (low + high));
      if (middle <= low || middle >= high || high - low <= 0.005 * high) break;
      bool good = false;
      if (auto known = try_at(middle, good); !known) return fail(known.error());
      (good ? low : high) = middle;
    }
    return std::move(out_);
  }

 private:
  double clamp(double v) const {
    const double bounded = std::clamp(v, key_.low, key_.high);
    return key_.type == KeyType::integer ? std::floor(bounded) : bounded;
  }
  std::string text(double v) const {
    return key_.type == KeyType::integer || v >= 1000 ? fmt::format("{:.0f}", v) : fmt::format("{:.4g}", v);
  }

  /// A micro-batch that goes by sequences has room for as many of the longest: its tokens follow a longer sample.
  std::string tokens_beside(double v) const {
    if (!key_.path.starts_with("workload.") || !key_.path.ends_with(".max")) return "";
    const auto own = load_scenario(scenario_, overrides_);
    const auto room = [](const Scenario& s) {
      const double all = s.workload.longest() * static_cast<double>(s.train.micro_batch_sequences);
      return s.train.layout.share_of(static_cast<std::int64_t>(std::ceil(all)));
    };
    if (!own || own->train.micro_batch_sequences <= 0 || own->train.micro_batch_tokens != room(*own)) return "";
    Scenario longer = *own;
    (key_.path == "workload.prompt_tokens.max" ? longer.workload.prompt_tokens : longer.workload.response_tokens).max =
        v;
    return fmt::format("train.micro_batch_tokens={}", room(longer));
  }

  Status try_at(double v, bool& fits) {
    const std::string value = text(v), beside = tokens_beside(v);
    std::vector<std::string> sets = overrides_;
    if (!beside.empty()) sets.push_back(beside);
    auto rows = sweep(scenario_, sets, {{{key_.path}, {{value}}}}, catalogue_);
    if (!rows) return fail(rows.error());
    const SweepRow& row = rows->front();
    fits = row.valid && row.fits;
    out_.tried.push_back(value);
    if (fits) out_.value = value, out_.at = row, out_.beside = beside;
    else out_.beyond = value, out_.why = row;
    return {};
  }

  std::filesystem::path scenario_;
  std::vector<std::string> overrides_;
  const ScenarioKey& key_;
  std::filesystem::path catalogue_;
  Solved out_;
};

}  // namespace

Result<Solved> solve(const std::filesystem::path& scenario, const std::vector<std::string>& overrides,
                     const std::string& key, const std::filesystem::path& catalogue) {
  const auto loaded = load_scenario(scenario, overrides);
  if (!loaded) return fail(loaded.error());
  const ScenarioKey* const found = find_scenario_key(key);
  if (found == nullptr || (found->type != KeyType::integer && found->type != KeyType::real))
    return fail(Diagnostic{.code = "E261",
                           .message = fmt::format("{} is no key of one number", key),
                           .where = {},
                           .notes = {},
                           .help = "for example workload.response_tokens.max, rollout.memory_fraction, "
                                   "train.micro_batch_tokens"});
  const bool of_a_part = key == "workload.prompt_tokens.max" || key == "workload.response_tokens.max";
  if (const std::int64_t cap = loaded->workload.max_tokens; of_a_part && cap > 0)
    return fail(Diagnostic{.code = "E261",
                           .message = fmt::format("{} ends where prompt and response together do", key),
                           .where = {},
                           .notes = {fmt::format("workload.max_tokens {} is one cap on both", cap)},
                           .help = "--set workload.max_tokens=0 takes that cap away"});
  const KeyValue own = found->get(*loaded);
  const double at = std::holds_alternative<std::int64_t>(own) ? static_cast<double>(std::get<std::int64_t>(own))
                    : std::holds_alternative<double>(own)     ? std::get<double>(own)
                                                              : found->low;
  return Solver(scenario, overrides, *found, catalogue).run(std::max(at, std::max(found->low, 1e-3)));
}

std::string render(const Solved& s) {
  const auto said = [&](const std::string& value) { return s.unit.empty() ? value : value + " " + s.unit; };
  const std::string beyond = s.beyond.empty() ? "the key's own end"
                             : s.why.valid
                                 ? fmt::format("at {} it does not: {} of {}", said(s.beyond),
                                               format_bytes(s.why.peak_bytes), format_bytes(s.why.capacity_bytes))
                                 : fmt::format("at {} it does not: {}", said(s.beyond), s.why.why);
  if (s.value.empty()) return fmt::format("No {} that was tried fits; {}\n", s.key, beyond);
  return fmt::format("{} can be {}: {} of {} at the fullest moment, {} an iteration; {}\n  --set {}={}{}\n", s.key,
                     said(s.value), format_bytes(s.at.peak_bytes), format_bytes(s.at.capacity_bytes),
                     format_seconds(s.at.iteration_seconds), beyond, s.key, s.value,
                     s.beside.empty() ? "" : " --set " + s.beside);
}

std::string to_json(const Solved& s) {
  nlohmann::ordered_json doc = {
      {"schema", "hotbunk.solve/1"}, {"key", s.key},     {"unit", s.unit},  {"value", s.value},
      {"beyond", s.beyond},          {"why", s.why.why}, {"tried", s.tried}};
  if (!s.beside.empty()) doc["beside"] = s.beside;
  if (!s.value.empty())
    doc.update(nlohmann::ordered_json{{"iteration_seconds", s.at.iteration_seconds},
                                      {"peak_bytes", s.at.peak_bytes},
                                      {"capacity_bytes", s.at.capacity_bytes},
                                      {"host_bytes", s.at.host_bytes}});
  return json_text(doc, 1);
}

}  // namespace hotbunk
