#include "planner/answers/verdict.h"

#include <algorithm>

#include "planner/answers/answers.h"

namespace hotbunk {
namespace {

/// Training's bytes grow with the tokens of a micro-batch: the most that the device holds beside the rest.
double fitting_tokens(const TrainModel& model, const TrainPoint& p, double charged, double spare_bytes) {
  const double bytes = model.price(p).total_bytes();
  const auto holds = [&](double tokens) {
    return model.with_load(tokens).price(p).total_bytes() - bytes <= spare_bytes;
  };
  double low = model.mean_tokens(p), high = charged;
  if (!holds(low)) return 0.0;
  for (int i = 0; holds(high) && i < 12; ++i) low = high, high *= 2.0;
  while (high - low > 1.0) {
    const double middle = 0.5 * (low + high);
    (holds(middle) ? low : high) = middle;
  }
  return low;
}

}  // namespace

std::string_view name_of(Verdict v) {
  constexpr std::string_view names[] = {"fits", "tight", "no"};
  return names[static_cast<std::size_t>(v)];
}

FitVerdict verdict_of(const ScenarioPricer& s, const RlPoint& p, const RlPrice& price, const ReservedMemory& torch,
                      bool by_plan) {
  const TrainModel& model = s.train();
  const double capacity = s.rl().setting().device_bytes;
  FitVerdict out;
  out.error = by_plan ? 0.0 : model.framework().memory_error.value;
  const double unused = static_cast<double>(torch.reserved - torch.allocated);
  out.reserved_bytes = std::max(price.peak_bytes(), price.train_bytes + unused);
  if (const double kept = model.framework().asleep_reserved_bytes.value; kept > 0.0 && !by_plan && p.sleeps())
    out.asleep_bytes = price.rollout_bytes + kept;
  if (const FrameworkProfile& f = model.framework();
      f.host_node_bytes.value > 0.0 && !by_plan && s.scenario().cluster.host_memory_bytes > 0) {
    const auto ranks = static_cast<double>(std::max<std::int64_t>(s.scenario().cluster.ranks_per_node(), 1));
    out.host_bytes = price.host_bytes * (1.0 + out.error) + f.host_node_bytes.value / ranks;
    out.host_limit_bytes = f.host_share.value * s.rl().setting().host_bytes;
  }
  const bool host_tight = out.host_bytes > out.host_limit_bytes;
  const double most = std::max(out.reserved_bytes * (1.0 + out.error), out.asleep_bytes);
  out.verdict = !price.fits ? Verdict::no : most > capacity || host_tight ? Verdict::tight : Verdict::fits;
  out.random = model.load_follows_batch() && price.iteration_seconds > 0.0;
  if (!out.random) return out;
  out.load.mean = model.mean_tokens(p.train);
  out.load.charged = model.fullest_tokens(p.train);
  out.load.fitting = fitting_tokens(model, p.train, out.load.charged, capacity - price.train_bytes);
  out.load.overflows = 1000.0 * model.overflow_chance(p.train, out.load.fitting);
  return out;
}

}  // namespace hotbunk
