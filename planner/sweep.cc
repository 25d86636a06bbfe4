// Sweeps, sensitivity and the smallest cluster: many scenarios, each priced by the closed form.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>

#include "base/format.h"
#include "planner/answers.h"
#include "planner/plan_answer.h"
#include "spec/loader.h"

namespace hotbunk {
namespace {

Diagnostic bad_axis(const std::string& text) {
  return {.code = "E261",
          .message = fmt::format("'{}' is no axis of a sweep", text),
          .where = {},
          .notes = {},
          .help = "write key=a,b,c or key=first..last or key=first..last:step, at most 10,000 values"};
}

bool integer(std::string_view text, std::int64_t& value) {
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc{} && stop == text.data() + text.size();
}

}  // namespace

Result<SweepAxis> parse_axis(const std::string& text) {
  const std::size_t equals = text.find('=');
  if (equals == std::string::npos || equals == 0 || equals + 1 == text.size()) return fail(bad_axis(text));
  SweepAxis out{text.substr(0, equals), {}};
  const std::string values = text.substr(equals + 1);
  const std::size_t dots = values.find("..");
  if (dots != std::string::npos) {
    const std::size_t colon = values.find(':', dots);
    std::int64_t first = 0, last = 0, step = 1;
    const std::string_view all = values;
    const std::size_t end = colon == std::string::npos ? values.size() : colon;
    if (!integer(all.substr(0, dots), first) || !integer(all.substr(dots + 2, end - dots - 2), last) ||
        (colon != std::string::npos && !integer(all.substr(colon + 1), step)) || step < 1 || last < first ||
        (last - first) / step >= 10'000)
      return fail(bad_axis(text));
    for (std::int64_t v = first; v <= last; v += step) out.values.push_back(fmt::format("{}", v));
    return out;
  }
  std::size_t begin = 0;
  while (begin <= values.size()) {
    const std::size_t end = std::min(values.find(',', begin), values.size());
    if (end == begin) return fail(bad_axis(text));
    out.values.push_back(values.substr(begin, end - begin));
    begin = end + 1;
  }
  return out;
}

Result<std::vector<SweepRow>> sweep(const std::filesystem::path& scenario, const std::vector<std::string>& overrides,
                                    const std::vector<SweepAxis>& axes, const std::filesystem::path& catalogue) {
  double points = 1;
  for (const SweepAxis& a : axes) points *= static_cast<double>(a.values.size());
  if (points > 100'000)
    return fail(Diagnostic{.code = "E261",
                           .message = fmt::format("the sweep has {:.0f} points, at most 100,000 are priced", points),
                           .where = {},
                           .notes = {},
                           .help = "give fewer values per axis"});
  std::vector<SweepRow> rows;
  std::vector<std::size_t> at(axes.size(), 0);
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(points); ++i) {
    SweepRow row;
    std::vector<std::string> sets = overrides;
    for (std::size_t a = 0; a < axes.size(); ++a) {
      row.values.push_back(axes[a].values[at[a]]);
      sets.push_back(axes[a].key + "=" + row.values.back());
    }
    if (auto loaded = load_scenario(scenario, sets); !loaded) {
      // A file that cannot be read is one error, not a table of them.
      if (loaded.error()[0].code.starts_with("E1")) return fail(loaded.error());
      row.why = loaded.error()[0].message;
    } else if (auto pricer = ScenarioPricer::make(*loaded, catalogue); !pricer) {
      row.why = pricer.error()[0].message;
    } else if (const RlPoint p = (*pricer)->point(); !(*pricer)->train().divides(p.train)) {
      row.why = (*pricer)->train().why_invalid(p.train);
    } else {
      RlPrice price = (*pricer)->price(p);
      if (const auto plan = plan_memory_of(*loaded)) use_plan_bytes(*loaded, *plan, price);
      row.valid = price.iteration_seconds > 0;
      row.fits = price.fits;
      row.iteration_seconds = price.iteration_seconds;
      row.peak_bytes = price.peak_bytes();
      row.capacity_bytes = (*pricer)->rl().setting().device_bytes;
      row.host_bytes = price.host_bytes;
      if (row.valid)
        row.tokens_per_second =
            (*pricer)->train().price(p.train).tokens * (*pricer)->rl().setting().mini_batches / price.iteration_seconds;
      if (!row.valid) row.why = "the rollout layout does not hold the weights and one sequence";
    }
    rows.push_back(std::move(row));
    for (std::size_t a = axes.size(); a-- > 0;) {
      if (++at[a] < axes[a].values.size()) break;
      at[a] = 0;
    }
  }
  return rows;
}

std::string to_csv(const std::vector<SweepAxis>& axes, const std::vector<SweepRow>& rows) {
  std::string out;
  for (const SweepAxis& a : axes) out += a.key + ",";
  out += "fits,iteration_seconds,tokens_per_second,peak_gib,host_gib,why_not\n";
  for (const SweepRow& r : rows) {
    for (const std::string& v : r.values) out += v + ",";
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
  for (const SweepAxis& a : axes) doc["axes"].push_back(a.key);
  for (const SweepRow& r : rows) {
    nlohmann::ordered_json row = {{"values", r.values}, {"valid", r.valid}};
    if (r.valid)
      row.update({{"fits", r.fits},
                  {"iteration_seconds", r.iteration_seconds},
                  {"tokens_per_second", r.tokens_per_second},
                  {"peak_bytes", r.peak_bytes},
                  {"host_bytes", r.host_bytes}});
    else row["why"] = r.why;
    doc["rows"].push_back(std::move(row));
  }
  return doc.dump(2);
}

namespace {

/// Prices the scenario's layout with its hardware or its workload changed. Effects are those of the formulas: a
/// measured size would stand still while the rate behind it moves, so measurements are left out on both sides.
class Perturbed {
 public:
  Perturbed(const Scenario& s, Hardware h, FrameworkProfile f)
      : scenario_(s), hardware_(std::move(h)), frame_(std::move(f)), point_(rl_point_of(s)) {
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
    const auto bytes = [](std::int64_t& b, double f) { b = static_cast<std::int64_t>(static_cast<double>(b) * f); };
    const auto count = [](std::int64_t& n, double f) {
      n = std::max<std::int64_t>(1, std::llround(static_cast<double>(n) * f));
    };
    using S = Scenario;
    out.push_back(work("cluster.device_memory", [&](S& s, double f) { bytes(s.cluster.device_memory_bytes, f); }));
    out.push_back(work("cluster.host_memory", [&](S& s, double f) { bytes(s.cluster.host_memory_bytes, f); }));
    out.push_back(work("algorithm.prompts", [&](S& s, double f) { count(s.algorithm.prompts, f); }));
    out.push_back(
        work("algorithm.samples_per_prompt", [&](S& s, double f) { count(s.algorithm.samples_per_prompt, f); }));
    out.push_back(
        work("rollout.max_running_requests", [&](S& s, double f) { count(s.rollout.max_running_requests, f); }));
    out.push_back(work("rollout.memory_fraction", [](S& s, double f) { s.rollout.memory_fraction *= f; }));
    out.push_back(work("workload.prompt_tokens.mean", [](S& s, double f) { s.workload.prompt_tokens.mean *= f; }));
    out.push_back(work("workload.prompt_tokens.max", [](S& s, double f) { s.workload.prompt_tokens.max *= f; }));
    out.push_back(work("workload.response_tokens.mean", [](S& s, double f) { s.workload.response_tokens.mean *= f; }));
    out.push_back(work("workload.response_tokens.max", [](S& s, double f) { s.workload.response_tokens.max *= f; }));
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
    if (s.algorithm.name != AlgorithmName::sft) return rl.price(p);
    const TrainPrice t = train.price(p.train);
    RlPrice out;
    out.iteration_seconds = t.valid ? t.step_seconds : 0.0;
    out.fits = t.valid && t.total_bytes() <= rl.setting().device_bytes;
    return out;
  }
  Sensitivity effect(std::string name, const RlPrice& minus, const RlPrice& plus) const {
    return {std::move(name), minus.iteration_seconds / base_ - 1.0, plus.iteration_seconds / base_ - 1.0, minus.fits,
            plus.fits};
  }
  Sensitivity machine(std::string name, const std::function<void(Hardware&, double)>& change) const {
    Hardware less = hardware_, more = hardware_;
    change(less, 0.9), change(more, 1.1);
    return effect(std::move(name), price(less, scenario_), price(more, scenario_));
  }
  Sensitivity work(std::string name, const std::function<void(Scenario&, double)>& change) const {
    Scenario less = scenario_, more = scenario_;
    change(less, 0.9), change(more, 1.1);
    return effect(std::move(name), price(hardware_, less), price(hardware_, more));
  }

  Scenario scenario_;
  Hardware hardware_;
  FrameworkProfile frame_;
  RlPoint point_;
  double base_ = 0;
};

}  // namespace

Result<std::vector<Sensitivity>> sensitivity(const Scenario& scenario, const std::filesystem::path& catalogue) {
  auto hardware = hardware_for(scenario.cluster, catalogue);
  if (!hardware) return fail(hardware.error());
  auto frame = framework_named(scenario.profile, catalogue);
  if (!frame) return fail(frame.error());
  Perturbed perturbed(scenario, std::move(*hardware), std::move(*frame));
  std::vector<Sensitivity> out;
  if (!perturbed.valid()) return out;
  out = perturbed.all();
  std::stable_sort(out.begin(), out.end(), [](const Sensitivity& a, const Sensitivity& b) {
    return std::max(std::abs(a.minus), std::abs(a.plus)) > std::max(std::abs(b.minus), std::abs(b.plus));
  });
  return out;
}

std::string render(const std::vector<Sensitivity>& all) {
  std::string out = "Iteration seconds when one number is 10 % lower or higher\n";
  for (const Sensitivity& s : all)
    out += fmt::format("  {:<30} {:>+7.2f} %  {:>+7.2f} %{}\n", s.number, 100 * s.minus, 100 * s.plus,
                       s.minus_fits && s.plus_fits ? ""
                       : s.plus_fits               ? "  lower: does not fit"
                                                   : "  higher: does not fit");
  return out;
}

namespace {

/// Searches the scenario on a cluster of that size; `whole`: what nearly fits is of interest too.
Result<RlSearch> search_on(Scenario s, std::int64_t nodes, std::int64_t per_node, bool whole,
                           const std::filesystem::path& catalogue) {
  s.cluster.nodes = nodes;
  s.cluster.gpus_per_node = per_node;
  auto pricer = ScenarioPricer::make(s, catalogue);
  if (!pricer) return fail(pricer.error());
  const RlSetting& set = (*pricer)->rl().setting();
  return search_rl((*pricer)->rl(), default_rl_space(s),
                   {.keep = 3, .device_bytes = set.device_bytes, .host_bytes = set.host_bytes, .nearest = whole});
}

/// Ranks below which master copies, moments and gradients of the whole model do not even fit all devices together.
double least_ranks(const Scenario& s) {
  if (s.train.offload == Offload::layerwise) return 1.0;
  const StateBytes b = train_setting_of(s).state;
  return static_cast<double>(parameter_count(s.model)) * (b.master + b.moments + b.grads) /
         rl_setting_of(s).device_bytes;
}

}  // namespace

Result<SmallestCluster> smallest_cluster(const Scenario& scenario, const std::filesystem::path& catalogue,
                                         std::int64_t most) {
  SmallestCluster out;
  const std::int64_t per_node = scenario.cluster.gpus_per_node;
  const double least = least_ranks(scenario) / static_cast<double>(scenario.cluster.ranks_per_device);
  // Doubling first: most impossible scenarios are impossible on any number of nodes.
  std::int64_t enough = 0;
  for (std::int64_t nodes = 1; nodes <= most && enough == 0; nodes *= 2) {
    if (static_cast<double>(nodes * per_node) < least && nodes * 2 <= most) continue;
    auto found = search_on(scenario, nodes, per_node, true, catalogue);
    if (!found) return fail(found.error());
    out.search = std::move(*found);
    if (!out.search.best.empty()) enough = nodes;
  }
  if (enough == 0) return out;
  out.nodes = enough, out.gpus = enough * per_node;
  const auto try_size = [&](std::int64_t nodes, std::int64_t each) -> Result<bool> {
    if (static_cast<double>(nodes * each) < least) return false;
    auto found = search_on(scenario, nodes, each, false, catalogue);
    if (!found) return fail(found.error());
    if (found->best.empty()) return false;
    out.nodes = nodes, out.gpus = nodes * each;
    out.search = std::move(*found);
    return true;
  };
  for (std::int64_t each = 1; each < per_node && enough == 1; ++each) {
    const auto fits = try_size(1, each);
    if (!fits) return fail(fits.error());
    if (*fits) return out;
  }
  for (std::int64_t nodes = enough / 2 + 1; nodes < enough; ++nodes) {
    const auto fits = try_size(nodes, per_node);
    if (!fits) return fail(fits.error());
    if (*fits) return out;
  }
  return out;
}

std::string render(const SmallestCluster& s) {
  if (s.gpus == 0) return fmt::format("No cluster of such nodes holds it: {}\n", s.search.reason);
  return fmt::format("Smallest cluster: {} GPU{} on {} node{}\n{}", s.gpus, s.gpus == 1 ? "" : "s", s.nodes,
                     s.nodes == 1 ? "" : "s", render(s.search));
}

}  // namespace hotbunk
