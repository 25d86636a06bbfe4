#include "spec/expert_rounds.h"

#include <algorithm>
#include <cmath>

namespace hotbunk {

ExpertRounds expert_rounds(const Scenario& s) {
  const TrainLayout& l = s.train.layout;
  const std::int64_t places = l.expert_tensor_ranks(), ranks = std::max<std::int64_t>(1, l.ep / places);
  if (!s.model.moe || ranks == 1) return {};
  const std::int64_t tokens = s.train.micro_batch_tokens, choices = s.model.moe->experts_per_token,
                     of_a_rank = s.model.moe->experts / (ranks * places);
  ExpertRounds out{.sent = tokens * choices / places, .most = ranks * tokens * std::min(choices, of_a_rank)};
  out.capacity = out.most;
  if (const double times = s.train.expert_capacity; times > 0.0) {
    const double rows = std::ceil(times * static_cast<double>(out.sent));
    if (rows < static_cast<double>(out.most)) out.capacity = std::max<std::int64_t>(1, std::llround(rows));
  }
  out.rounds = (out.most + out.capacity - 1) / out.capacity;
  return out;
}

}  // namespace hotbunk
