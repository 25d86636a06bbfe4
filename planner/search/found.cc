#include "planner/search/found.h"

#include <algorithm>
#include <utility>

namespace hotbunk {

bool same_layout(const RlPoint& a, const RlPoint& b) {
  const auto dimensions = [](const RlPoint& p) {
    TrainPoint t = p.train;
    t.schedule = PipelineSchedule::one_f_one_b;
    t.recompute = Recompute::none;
    t.micro_batch = t.micro_batches = 1, t.last_micro_batch = 0;
    t.optimizer_on_host = false;
    t.reshard_after_forward = true, t.reshard_ranks = 0;
    RolloutPoint r = p.rollout;
    r.strided = false;
    r.ep = 1;
    r.memory_fraction = 1.0;
    return std::pair(t, r);
  };
  return a.placement == b.placement && dimensions(a) == dimensions(b);
}

Value value_of(Objective o, const RlSetting& s, double gpus, double seconds, double bytes) {
  const auto hours = [&] { return gpus * seconds / 3600.0 / std::max(s.prompts * s.samples, 1.0) * 1e6; };
  switch (o) {
    case Objective::seconds:
      return {seconds, bytes};
    case Objective::tokens_per_gpu:  // GPU-seconds per token
      return {gpus * seconds / std::max(s.prompts * s.samples * (s.prompt_tokens + s.response_tokens), 1.0), bytes};
    case Objective::gpu_hours:
      return {hours(), bytes};
    case Objective::money:
      return {hours() * s.price_per_gpu_hour, bytes};
    case Objective::memory:
      return {bytes, seconds};
    case Objective::gpus:
      return {gpus, seconds};
  }
  return worst_value;
}

Judged judge(const RlModel& model, const SearchOptions& options, const RlPoint& p, RlPrice& price) {
  Judged out{.value = {}, .bytes = price.peak_bytes()};
  out.over = std::max(0.0, out.bytes - options.limit_bytes()) + std::max(0.0, price.host_bytes - options.host_bytes);
  price.fits = out.over <= 0.0;
  out.value = value_of(options.objective, model.setting(), static_cast<double>(model.gpus(p)), price.iteration_seconds,
                       out.bytes);
  return out;
}

double objective_of(Objective o, const RlModel& model, const RlPoint& p, const RlPrice& price) {
  return value_of(o, model.setting(), static_cast<double>(model.gpus(p)), price.iteration_seconds, price.peak_bytes())
      .first;
}

void Found::offer(const RlCandidate& c, const Judged& is) {
  if (!c.price.fits) {
    if (!lacking.beats(is.value.first, is.over)) lacking.offer(is.value.first, is.over, c);
    return;
  }
  ++feasible;
  const double seconds = c.price.iteration_seconds;
  if (!(is.value > best.bound())) best.offer(is.value, c);
  if (!front.beats(seconds, is.bytes)) front.offer(seconds, is.bytes, c);
}

void Found::take(Found& o) {
  best.merge(o.best);
  front.merge(o.front);
  lacking.merge(o.lacking);
  priced += std::exchange(o.priced, 0);
  feasible += std::exchange(o.feasible, 0);
}

}  // namespace hotbunk
