#include "planner/rl/engine_schedule.h"

#include <cmath>

#include "planner/rl/length_moments.h"

namespace hotbunk {
namespace {

/// Responses of one length end together: prompts and decode steps come in waves.
EngineSchedule waves(const EngineLoad& load, double decoded) {
  EngineSchedule out;
  const double slots = std::max(1.0, std::floor(load.slots)), count = std::ceil(load.sequences / slots),
               last = load.sequences - (count - 1.0) * slots;
  // The last step of a wave has what is left.
  const auto prefill = [&](double sequences, double times, std::vector<EngineSchedule::Prefill>& to) {
    const double tokens = sequences * load.prompt_tokens, whole = std::floor(tokens / load.max_prefill_tokens),
                 rest = tokens - whole * load.max_prefill_tokens;
    if (whole > 0.0 && times > 0.0)
      to.push_back({times * whole, load.max_prefill_tokens, load.max_prefill_tokens / load.prompt_tokens});
    if (rest > 0.0 && times > 0.0) to.push_back({times, rest, rest / load.prompt_tokens});
  };
  prefill(count > 1.0 ? slots : last, 1.0, out.first);
  if (count > 1.0) prefill(slots, count - 2.0, out.later), prefill(last, 1.0, out.later);
  if (count > 1.0) out.full = {decoded * (count - 1.0), slots};
  if (decoded > 0.0) out.tail = {{decoded, last}};
  out.steps = decoded * count, out.last = last;
  return out;
}

}  // namespace

/// Prompts fill the slots in steps of at most max_prefill_tokens. Then a sequence is admitted whenever one has ended:
/// of n ends over w decode steps w (1 - e^(-n / w)) steps see at least one, and each of them is followed by a prefill.
/// With several micro-batches in flight each of them has its own first step, and its own w.
EngineSchedule engine_schedule(const EngineLoad& load) {
  // A prompt's pass samples the first token of its response.
  LengthSpec decoded = load.responses;
  decoded.mean = std::max(decoded.mean - 1.0, 0.0), decoded.max = std::max(decoded.max - 1.0, decoded.mean);
  const double mean = std::max(load.responses.mean, 1.0),
               spread = std::sqrt(std::max(0.0, mean_square(load.responses) / (mean * mean) - 1.0));
  if (spread <= 0.0 && load.micro_batches <= 1.0 && load.prompt_tokens > 0.0) return waves(load, decoded.mean);
  EngineSchedule out;
  const DrainSteps drain = drain_steps(decoded, load.sequences, load.slots, load.engines);
  const double tail = drain.all - drain.full;
  out.steps = drain.all;
  out.last = std::max(0.0, load.sequences * decoded.mean - drain.full * load.slots) / std::max(tail, 1.0);
  const auto prefill = [&](double n, double least_steps, std::vector<EngineSchedule::Prefill>& to) {
    if (n <= 0.0) return;
    const double steps = std::max({1.0, least_steps, std::ceil(n * load.prompt_tokens / load.max_prefill_tokens)});
    to.push_back({steps, n * load.prompt_tokens / steps, n / steps});
  };
  const double first = std::min(load.sequences, load.slots);
  const double over = drain.full * std::min(1.0, spread / 0.3) * load.micro_batches;
  const double later = load.sequences - first;
  prefill(first, load.micro_batches > 1.0 ? std::min(load.micro_batches, first) : 0.0, out.first);
  prefill(later, over > 0.0 ? over * -std::expm1(-later / over) : 0.0, out.later);
  if (drain.full > 0.0) out.full = {drain.full, load.slots};
  double sum = 0.0;
  for (const double n : drain.running) sum += n;
  // Quarter by quarter: few sequences take simpler protocols and smaller tiles.
  for (const double n : drain.running)
    if (tail > 0.0 && sum > 0.0)
      out.tail.push_back({tail / 4.0, std::clamp(4.0 * n / sum * out.last, 1.0, load.slots)});
  return out;
}

}  // namespace hotbunk
