#include "spec/expert_rounds.h"

#include <algorithm>
#include <cmath>

#include "spec/expert_mesh.h"

namespace hotbunk {

ExpertRounds expert_rounds(const Scenario& s) {
  const ExpertMesh mesh = expert_mesh(s);
  if (!s.model.moe || mesh.spread == 1) return {};
  const std::int64_t tokens = std::max<std::int64_t>(1, s.train.micro_batch_tokens / mesh.blocks),
                     choices = s.model.moe->experts_per_token,
                     of_a_rank = std::max<std::int64_t>(1, s.model.moe->experts / mesh.groups());
  ExpertRounds out{.sent = tokens * choices * mesh.parts / mesh.wholes,
                   .most = mesh.spread * tokens * std::min(choices, of_a_rank)};
  out.capacity = out.most;
  if (const double times = s.train.expert_capacity; times > 0.0) {
    const double rows = std::ceil(times * static_cast<double>(out.sent));
    if (rows < static_cast<double>(out.most)) out.capacity = std::max<std::int64_t>(1, std::llround(rows));
  }
  out.rounds = (out.most + out.capacity - 1) / out.capacity;
  return out;
}

}  // namespace hotbunk
