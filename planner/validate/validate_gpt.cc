#include "planner/validate/validate_gpt.h"

#include <algorithm>

namespace hotbunk {

double megatron_flops(const ModelSpec& m, double sequences, double s, double passes) {
  const auto h = static_cast<double>(m.hidden), l = static_cast<double>(m.layers), v = static_cast<double>(m.vocab);
  return passes * 24.0 * sequences * s * l * h * h * (1.0 + s / (6.0 * h)) + 6.0 * sequences * s * h * v;
}

Choice fastest(const CellReader& cells, const TrainModel& model, TrainPoint p, std::int64_t sequences_per_replica,
               double capacity, bool any_micro_batch, bool any_interleave) {
  Choice best;
  best.price.step_seconds = 1e30;
  if (!cells.usable()) return best;
  const std::int64_t asked = p.micro_batch, chunks = p.vpp, most_chunks = any_interleave && p.pp > 1 ? 8 : 1;
  for (std::int64_t b = any_micro_batch ? 1 : asked; b <= (any_micro_batch ? 16 : asked); b *= 2)
    for (std::int64_t v = any_interleave ? 1 : chunks; v <= std::max(most_chunks, chunks); ++v) {
      if (sequences_per_replica % b != 0) continue;
      p.micro_batch = b;
      p.micro_batches = sequences_per_replica / b;
      p.vpp = v;
      if (!model.divides(p)) continue;
      const TrainPrice price = model.price(p);
      if (price.total_bytes() <= capacity && price.step_seconds < best.price.step_seconds) best = {p, price, ""};
    }
  if (best.price.step_seconds < 1e30) return best;
  p.micro_batch = asked, p.micro_batches = sequences_per_replica / asked, p.vpp = chunks;
  best.why = model.why_invalid(p);
  if (best.why.empty()) best.why = "no micro-batch divides and fits";
  return best;
}

ModelSpec gpt_of(CellReader& cells, const GptColumns& names, std::int64_t vocab) {
  const std::int64_t layers = cells.count(names.layers, 1, 4096), hidden = cells.count(names.hidden),
                     heads = cells.count(names.heads);
  cells.share(names.hidden, hidden, {heads});
  return gpt_model(layers, hidden, heads, vocab, cells.count(names.sequence));
}

TrainSetting mixed_precision(std::int64_t sequence) { return {.sequence = sequence, .state = {2, 4, 4, 8}}; }

}  // namespace hotbunk
