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

Result<std::vector<Sensitivity>> sensitivity(const Scenario& scenario, const std::filesystem::path& catalogue) {
  auto hardware = hardware_for(scenario.cluster, catalogue);
  if (!hardware) return fail(hardware.error());
  auto frame = framework_named(scenario.profile, catalogue);
  if (!frame) return fail(frame.error());
  const RlPoint point = rl_point_of(scenario);
  const auto seconds = [&](const Hardware& h, const Scenario& s) {
    const TrainModel train(s.model, train_setting_of(s), CostModel(h, s.cluster), *frame);
    const RlModel rl(train, rl_setting_of(s));
    return scenario.algorithm.name == AlgorithmName::sft ? train.price(point.train).step_seconds
                                                         : rl.price(point).iteration_seconds;
  };
  const double base = seconds(*hardware, scenario);
  std::vector<Sensitivity> out;
  if (base <= 0.0) return out;
  const auto machine = [&](const char* name, const std::function<void(Hardware&, double)>& change) {
    const auto at = [&](double factor) {
      Hardware h = *hardware;
      change(h, factor);
      return seconds(h, scenario) / base - 1.0;
    };
    out.push_back({name, at(0.9), at(1.1)});
  };
  machine("peak FLOP/s", [](Hardware& h, double f) {
    for (auto& [name, peak] : h.peak) peak *= f;
  });
  machine("memory bandwidth", [](Hardware& h, double f) { h.memory_bandwidth *= f; });
  machine("bandwidth inside a node", [](Hardware& h, double f) { h.intra.bandwidth.value *= f; });
  machine("bandwidth between nodes", [](Hardware& h, double f) { h.inter.bandwidth.value *= f; });
  machine("host link bandwidth", [](Hardware& h, double f) { h.host_bandwidth.value *= f; });
  machine("attention efficiency",
          [](Hardware& h, double f) { h.attention.forward.value *= f, h.attention.backward.value *= f; });
  machine("kernel overhead", [](Hardware& h, double f) { h.kernel_overhead.value *= f; });
  machine("launch time", [](Hardware& h, double f) { h.launch.value *= f; });
  const auto work = [&](const char* name, const std::function<void(Scenario&, double)>& change) {
    const auto at = [&](double factor) {
      Scenario s = scenario;
      change(s, factor);
      return seconds(*hardware, s) / base - 1.0;
    };
    out.push_back({name, at(0.9), at(1.1)});
  };
  work("mean response", [](Scenario& s, double f) { s.workload.response_tokens.mean *= f; });
  work("longest response", [](Scenario& s, double f) { s.workload.response_tokens.max *= f; });
  work("mean prompt", [](Scenario& s, double f) { s.workload.prompt_tokens.mean *= f; });
  std::stable_sort(out.begin(), out.end(), [](const Sensitivity& a, const Sensitivity& b) {
    return std::max(std::abs(a.minus), std::abs(a.plus)) > std::max(std::abs(b.minus), std::abs(b.plus));
  });
  return out;
}

std::string render(const std::vector<Sensitivity>& all) {
  std::string out = "Iteration seconds when one number is 10 % lower or higher\n";
  for (const Sensitivity& s : all)
    out += fmt::format("  {:<28} {:>+7.2f} %  {:>+7.2f} %\n", s.number, 100 * s.minus, 100 * s.plus);
  return out;
}

Result<SmallestCluster> smallest_cluster(const Scenario& scenario, const std::filesystem::path& catalogue,
                                         std::int64_t most) {
  SmallestCluster out;
  for (std::int64_t nodes = 1; nodes <= most; nodes *= 2) {
    Scenario s = scenario;
    s.cluster.nodes = nodes;
    auto pricer = ScenarioPricer::make(s, catalogue);
    if (!pricer) return fail(pricer.error());
    SearchOptions options{.keep = 3,
                          .device_bytes = (*pricer)->rl().setting().device_bytes,
                          .host_bytes = (*pricer)->rl().setting().host_bytes};
    out.search = search_rl((*pricer)->rl(), default_rl_space(s), options);
    if (!out.search.best.empty()) {
      out.nodes = nodes;
      return out;
    }
  }
  return out;
}

}  // namespace hotbunk
