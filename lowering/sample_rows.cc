#include "lowering/sample_rows.h"

#include <algorithm>

#include "spec/validate.h"

namespace hotbunk {

std::int64_t attention_groups(const Scenario& s) {
  const std::int64_t groups = s.rollout.layout.attention_dp;
  return groups > 1 && unsupported_to_execute(s).empty() ? groups : 1;
}

std::int64_t most_micro_batches(const Scenario& s) {
  const TrainLayout& l = s.train.layout;
  const std::int64_t capacity = micro_batch_capacity(s), longest = l.padded(max_sample_tokens(s));
  const std::int64_t samples = ceil_div(num_samples(s), s.algorithm.mini_batches), seqs = max_micro_batch_seqs(s);
  const std::int64_t held = std::clamp<std::int64_t>(capacity / std::max<std::int64_t>(1, longest), 1, seqs);
  const std::int64_t load = samples * longest / l.dp + longest;
  // A sample begins a micro-batch only where it fits into none: all others are at least that full.
  const std::int64_t full = std::max(capacity / 2, capacity - longest) + 1;
  const std::int64_t by_tokens = load / full + 1 + (seqs < samples ? samples / seqs : 0);
  return std::max<std::int64_t>(1, std::min(ceil_div(samples, held), by_tokens));
}

}  // namespace hotbunk
