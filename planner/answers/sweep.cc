// Sweeps and sensitivity: many scenarios, each priced; where a scenario is lowered its bytes are its plan's.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/file.h"
#include "base/format.h"
#include "base/json.h"
#include "planner/answers/answers.h"
#include "planner/answers/plan_answer.h"
#include "spec/loader.h"

namespace hotbunk {
namespace {

/// The command line or the file is wrong, whatever the point: it cannot be read, or has unknown keys, words or types.
bool is_misspelt(const Diagnostic& d) {
  constexpr std::string_view codes[] = {"E201", "E202", "E204", "E205", "E207", "E208", "E209", "E210"};
  return d.code.starts_with("E1") || std::find(std::begin(codes), std::end(codes), d.code) != std::end(codes);
}

/// The message with its arithmetic.
std::string why_not(const Diagnostic& d) {
  return d.notes.empty() ? d.message : fmt::format("{}: {}", d.message, fmt::join(d.notes, "; "));
}

/// RFC 4180: a value with commas or quotes stands in quotes ("[8, 12]").
std::string csv_field(const std::string& value) {
  if (value.find_first_of(",\"\n") == std::string::npos) return value;
  std::string out = "\"";
  for (const char c : value) out += c == '"' ? std::string("\"\"") : std::string(1, c);
  return out + "\"";
}

}  // namespace

Result<std::vector<SweepRow>> sweep(const std::filesystem::path& scenario, const std::vector<std::string>& overrides,
                                    const std::vector<SweepAxis>& axes, const std::filesystem::path& catalogue) {
  std::set<std::string> varied;
  for (const SweepAxis& axis : axes)
    for (const std::string& key : axis.keys)
      if (!varied.insert(key).second)
        return fail(Diagnostic{.code = "E261",
                               .message = fmt::format("{} is varied twice", key),
                               .where = {},
                               .notes = {},
                               .help = fmt::format("give all its values in one --vary {}=a,b,c", key)});
  double points = 1;
  for (const SweepAxis& a : axes) points *= static_cast<double>(a.points.size());
  if (points > 100'000)
    return fail(Diagnostic{.code = "E261",
                           .message = fmt::format("the sweep has {:.0f} points, at most 100,000 are priced", points),
                           .where = {},
                           .notes = {},
                           .help = "give fewer values per axis"});
  const auto text = read_scenario(scenario);
  if (!text) return fail(text.error());
  std::vector<SweepRow> rows;
  std::vector<std::size_t> at(axes.size(), 0);
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(points); ++i) {
    SweepRow row;
    std::vector<std::string> sets = overrides;
    for (std::size_t a = 0; a < axes.size(); ++a)
      for (std::size_t k = 0; k < axes[a].keys.size(); ++k) {
        row.values.push_back(axes[a].points[at[a]][k]);
        sets.push_back(axes[a].keys[k] + "=" + row.values.back());
      }
    if (auto loaded = load_scenario_text(*text, name_of_input(scenario), sets); !loaded) {
      // A file that cannot be read and a word that is none are one error, not a table of them.
      if (is_misspelt(loaded.error()[0])) return fail(loaded.error());
      row.why = why_not(loaded.error()[0]);
    } else if (auto pricer = ScenarioPricer::make(*loaded, catalogue); !pricer) {
      row.why = why_not(pricer.error()[0]);
    } else if (const RlPoint p = (*pricer)->point(); const auto unpriced = (*pricer)->why_unpriced(p)) {
      row.why = why_not(*unpriced);
    } else {
      RlPrice price = (*pricer)->price(p);
      use_plan(*loaded, (*pricer)->train().cost(), price);
      row.valid = true;
      row.fits = price.fits;
      row.iteration_seconds = price.iteration_seconds;
      row.peak_bytes = price.peak_bytes();
      row.capacity_bytes = (*pricer)->rl().setting().device_bytes;
      const Standing standing = standing_of(**pricer);
      row.gpu = loaded->cluster.gpu.name, row.hardware = standing.hardware, row.calibrated = standing.calibrated;
      row.host_bytes = price.host_bytes;
      row.tokens_per_second = (*pricer)->tokens() / price.iteration_seconds;
    }
    rows.push_back(std::move(row));
    for (std::size_t a = axes.size(); a-- > 0;) {
      if (++at[a] < axes[a].points.size()) break;
      at[a] = 0;
    }
  }
  return rows;
}

std::string standing_note(const std::vector<SweepRow>& rows) {
  std::map<std::string, const SweepRow*> gpus;
  for (const SweepRow& r : rows)
    if (r.valid) gpus.try_emplace(r.gpu, &r);
  const auto fitted = std::count_if(gpus.begin(), gpus.end(), [](const auto& gpu) { return gpu.second->calibrated; });
  if (fitted == static_cast<std::ptrdiff_t>(gpus.size()) || gpus.size() < 2) return {};
  std::string out = "these rows compare GPUs, and not all of their efficiencies were fitted\n";
  for (const auto& [name, row] : gpus) out += fmt::format("  {}: {}\n", name, row->hardware);
  return out;
}

std::string to_csv(const std::vector<SweepAxis>& axes, const std::vector<SweepRow>& rows) {
  std::string out;
  for (const SweepAxis& axis : axes)
    for (const std::string& key : axis.keys) out += key + ",";
  out += "fits,iteration_seconds,tokens_per_second,peak_gib,host_gib,why_not\n";
  for (const SweepRow& r : rows) {
    for (const std::string& v : r.values) out += csv_field(v) + ",";
    std::string why = r.why;
    std::replace(why.begin(), why.end(), ',', ';');
    out += r.valid ? fmt::format("{},{:.6g},{:.6g},{:.6g},{:.6g},\n", r.fits ? "yes" : "no", r.iteration_seconds,
                                 r.tokens_per_second, r.peak_bytes / gib, r.host_bytes / gib)
                   : fmt::format("invalid,,,,,{}\n", why);
  }
  return out;
}

std::string to_json(const std::vector<SweepAxis>& axes, const std::vector<SweepRow>& rows) {
  nlohmann::ordered_json doc = {{"schema", "hotbunk.sweep/1"},
                                {"axes", nlohmann::ordered_json::array()},
                                {"rows", nlohmann::ordered_json::array()}};
  for (const SweepAxis& axis : axes)
    for (const std::string& key : axis.keys) doc["axes"].push_back(key);
  for (const SweepRow& r : rows) {
    nlohmann::ordered_json row = {{"values", r.values}, {"valid", r.valid}};
    if (r.valid)
      row.update({{"fits", r.fits},
                  {"iteration_seconds", r.iteration_seconds},
                  {"tokens_per_second", r.tokens_per_second},
                  {"peak_bytes", r.peak_bytes},
                  {"host_bytes", r.host_bytes},
                  {"calibrated", r.calibrated}});
    else row["why"] = r.why;
    doc["rows"].push_back(std::move(row));
  }
  return json_text(doc, 2);
}

namespace {

/// Prices the scenario's layout with its hardware or its workload changed. Effects are those of the formulas: a
/// measured size would stand still while the rate behind it moves, so measurements are left out on both sides.
class Perturbed {
 public:
  Perturbed(const Scenario& s, Hardware h, FrameworkProfile f, const RlPoint& point)
      : scenario_(s), hardware_(std::move(h)), frame_(std::move(f)), point_(point) {
    hardware_.measurements.clear();
    base_ = price(hardware_, scenario_).iteration_seconds;
  }

  bool valid() const { return base_ > 0.0; }
  std::vector<Sensitivity> all() {
    std::vector<Sensitivity> out;
    for (std::size_t i = 0; i < numbers_of(hardware_).size(); ++i)
      out.push_back(
          machine(numbers_of(hardware_)[i].key, [i](Hardware& h, double f) { numbers_of(h)[i].at->value *= f; }));
    out.push_back(machine("peak FLOP/s", [](Hardware& h, double f) {
      for (auto& [name, peak] : h.peak) peak *= f;
    }));
    out.push_back(machine("memory bandwidth", [](Hardware& h, double f) { h.memory_bandwidth *= f; }));
    // Each returns what it really multiplied by.
    const auto scale = [](double& x, double f) { return x *= f, f; };
    const auto bytes = [](std::int64_t& b, double f) {
      b = static_cast<std::int64_t>(static_cast<double>(b) * f);
      return f;
    };
    const auto count = [](std::int64_t& n, double f) {
      const auto before = static_cast<double>(n);
      const std::int64_t near = std::llround(before * f);
      n = std::max<std::int64_t>(1, f < 1.0 ? std::min(near, n - 1) : std::max(near, n + 1));
      return static_cast<double>(n) / before;
    };
    const auto fraction = [](double& x, double f) {
      const double before = x;
      x = std::min(x * f, 1.0);
      return x / before;
    };
    using S = Scenario;
    out.push_back(
        work("cluster.device_memory", [&](S& s, double f) { return bytes(s.cluster.device_memory_bytes, f); }));
    out.push_back(work("cluster.host_memory", [&](S& s, double f) { return bytes(s.cluster.host_memory_bytes, f); }));
    out.push_back(work("algorithm.prompts", [&](S& s, double f) { return count(s.algorithm.prompts, f); }));
    out.push_back(
        work("algorithm.samples_per_prompt", [&](S& s, double f) { return count(s.algorithm.samples_per_prompt, f); }));
    out.push_back(
        work("rollout.max_running_requests", [&](S& s, double f) { return count(s.rollout.max_running_requests, f); }));
    out.push_back(
        work("rollout.memory_fraction", [&](S& s, double f) { return fraction(s.rollout.memory_fraction, f); }));
    out.push_back(
        work("workload.prompt_tokens.mean", [&](S& s, double f) { return scale(s.workload.prompt_tokens.mean, f); }));
    out.push_back(
        work("workload.prompt_tokens.max", [&](S& s, double f) { return scale(s.workload.prompt_tokens.max, f); }));
    out.push_back(work("workload.response_tokens.mean",
                       [&](S& s, double f) { return scale(s.workload.response_tokens.mean, f); }));
    out.push_back(
        work("workload.response_tokens.max", [&](S& s, double f) { return scale(s.workload.response_tokens.max, f); }));
    return out;
  }

 private:
  RlPrice price(const Hardware& h, const Scenario& s) const {
    const TrainModel train(s.model, train_setting_of(s), CostModel(h, s.cluster), frame_);
    const RlModel rl(train, rl_setting_of(s));
    RlPoint p = point_;
    // More samples are more micro-batches of the same size.
    if (s.algorithm != scenario_.algorithm) p.train.set_sequences(rl_point_of(s).train.sequences());
    p.rollout.memory_fraction = s.rollout.memory_fraction;
    RlPrice out;
    if (s.algorithm.name != AlgorithmName::sft) {
      out = rl.price(p);
      if (out.iteration_seconds > 0.0) use_plan(s, train.cost(), out);
      return out;
    }
    const TrainPrice t = train.price(p.train);
    out.iteration_seconds = t.valid ? t.step_seconds : 0.0;
    out.fits = t.valid && t.total_bytes() <= rl.setting().device_bytes;
    return out;
  }
  Sensitivity effect(std::string name, const RlPrice& minus, const RlPrice& plus) const {
    return {.number = std::move(name),
            .minus = minus.iteration_seconds / base_ - 1.0,
            .plus = plus.iteration_seconds / base_ - 1.0,
            .minus_fits = minus.fits,
            .plus_fits = plus.fits};
  }
  Sensitivity machine(std::string name, const std::function<void(Hardware&, double)>& change) const {
    Hardware less = hardware_, more = hardware_;
    change(less, 0.9), change(more, 1.1);
    return effect(std::move(name), price(less, scenario_), price(more, scenario_));
  }
  Sensitivity work(std::string name, const std::function<double(Scenario&, double)>& change) const {
    Scenario less = scenario_, more = scenario_;
    const double down = change(less, 0.9), up = change(more, 1.1);
    Sensitivity out = effect(std::move(name), price(hardware_, less), price(hardware_, more));
    out.minus_change = down - 1.0, out.plus_change = up - 1.0;
    return out;
  }

  Scenario scenario_;
  Hardware hardware_;
  FrameworkProfile frame_;
  RlPoint point_;
  double base_ = 0;
};

}  // namespace

Result<std::vector<Sensitivity>> sensitivity(const Scenario& scenario, const std::filesystem::path& catalogue) {
  const auto pricer = ScenarioPricer::make(scenario, catalogue);
  if (!pricer) return fail(pricer.error());
  const TrainModel& train = (*pricer)->train();
  Perturbed perturbed(scenario, train.cost().hardware(), train.framework(), (*pricer)->point());
  std::vector<Sensitivity> out;
  if (!perturbed.valid()) return out;
  out = perturbed.all();
  std::stable_sort(out.begin(), out.end(), [](const Sensitivity& a, const Sensitivity& b) {
    return std::max(std::abs(a.minus), std::abs(a.plus)) > std::max(std::abs(b.minus), std::abs(b.plus));
  });
  return out;
}

std::string render(const std::vector<Sensitivity>& all) {
  std::string out = "Iteration seconds when one number is 10 % lower or higher\n", none;
  const auto ten = [](double change) { return std::abs(std::abs(change) - 0.1) < 5e-4; };
  for (const Sensitivity& s : all) {
    const bool fits = s.minus_fits && s.plus_fits;
    if (fits && std::max(std::abs(s.minus), std::abs(s.plus)) < 5e-5) {  // what two decimals show as nothing
      none += fmt::format("{}{}", none.empty() ? "" : ", ", s.number);
      continue;
    }
    out +=
        fmt::format("  {:<30} {:>+7.2f} %  {:>+7.2f} %{}{}\n", s.number, 100 * s.minus, 100 * s.plus,
                    ten(s.minus_change) && ten(s.plus_change)
                        ? ""
                        : fmt::format("  changed by {:+.1f} and {:+.1f} %", 100 * s.minus_change, 100 * s.plus_change),
                    fits          ? ""
                    : s.plus_fits ? "  lower: does not fit"
                                  : "  higher: does not fit");
  }
  if (!none.empty()) out += fmt::format("  no effect: {}\n", none);
  return out;
}

std::string to_json(const std::vector<Sensitivity>& all) {
  auto doc = nlohmann::ordered_json::array();
  for (const Sensitivity& s : all)
    doc.push_back({{"number", s.number},
                   {"minus", s.minus},
                   {"plus", s.plus},
                   {"minus_change", s.minus_change},
                   {"plus_change", s.plus_change},
                   {"minus_fits", s.minus_fits},
                   {"plus_fits", s.plus_fits}});
  return json_text(doc, 2);
}

}  // namespace hotbunk
