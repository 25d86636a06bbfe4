#include "layout/expert_copies.h"

#include <algorithm>
#include <vector>

#include "layout/train_mesh.h"
#include "spec/expert_rounds.h"

namespace hotbunk {
namespace {

/// n over k, 0 where k is not in 0..n.
double choose(double n, double k) {
  if (k < 0.0 || k > n) return 0.0;
  double out = 1.0;
  for (double i = 0.0; i < k; i += 1.0) out *= (n - i) / (k - i);
  return out;
}

/// Whether every group of ranks with other experts each lies on one node.
bool on_one_node(const Scenario& s, const ExpertMesh& mesh) {
  const std::int64_t of_node = std::max<std::int64_t>(1, s.cluster.ranks_per_node());
  for (std::int64_t stage = 0; stage < s.train.layout.pp; ++stage)
    for (const std::vector<std::int64_t>& blocks : block_ranks(s.train.layout, mesh, stage))
      for (std::size_t b = 0; b < blocks.size(); ++b) {
        const std::size_t first = b - b % static_cast<std::size_t>(mesh.spread);
        if (blocks[b] / of_node != blocks[first] / of_node) return false;
      }
  return true;
}

}  // namespace

double expected_parts(const MoeSpec& m, std::int64_t parts) {
  const auto experts = static_cast<double>(m.experts), top = static_cast<double>(m.experts_per_token);
  const auto n = static_cast<double>(std::max<std::int64_t>(parts, 1));
  const double groups = static_cast<double>(std::max<std::int64_t>(m.groups, 1));
  const double open = std::clamp(static_cast<double>(m.topk_groups), 1.0, groups);  // groups that a token may choose in
  const double pool = experts * open / groups;
  const auto missed = [&](double own) { return choose(pool - own, top) / choose(pool, top); };
  double touched = 0.0;  // probability for one part
  if (n >= groups) {
    touched = open / groups * (1.0 - missed(experts / n));
  } else {
    const double own = groups / n;  // groups of a part, of which some are open: hypergeometric
    for (double j = 1.0; j <= own; j += 1.0)
      touched +=
          choose(own, j) * choose(groups - own, open - j) / choose(groups, open) * (1.0 - missed(j * experts / groups));
  }
  return n * touched;
}

double expected_copies(const MoeSpec& m, const ExpertMesh& mesh) {
  return static_cast<double>(mesh.parts) * expected_parts(m, mesh.spread / mesh.parts);
}

DispatchSeconds dispatch_seconds(const Scenario& s) {
  const ClusterSpec& c = s.cluster;
  const ExpertMesh mesh = expert_mesh(s);
  const std::int64_t ranks = mesh.spread;
  const bool near = on_one_node(s, mesh);
  const double inside = c.gpu.nvlink_bandwidth.value > 0.0 ? c.gpu.nvlink_bandwidth.value
                        : c.gpu.is_cpu                     ? c.gpu.memory_bandwidth.value
                                                           : c.gpu.pcie_bandwidth.value;
  const double bandwidth = near ? inside : c.network_bandwidth.value,
               latency = near ? c.nvlink_latency.value : c.network_latency.value;
  if (bandwidth <= 0.0) return {};
  const auto tokens = static_cast<double>(s.train.micro_batch_tokens / mesh.blocks), w = static_cast<double>(ranks),
             choices = static_cast<double>(s.model.moe->experts_per_token * mesh.parts);
  const double row = static_cast<double>(s.model.hidden) * static_cast<double>(size_of(s.train.precision.params)),
               number = static_cast<double>(size_of(DType::i32));
  const auto seconds = [&](double bytes) { return latency + bytes * (w - 1.0) / w / bandwidth; };
  return {.per_expert = 2.0 * seconds(row * tokens * choices),
          .per_rank = 2.0 * seconds(row * tokens * expected_copies(*s.model.moe, mesh)) +
                      seconds(number * tokens * choices) + seconds(number * w * (w + 1.0))};
}

ExpertDispatch chosen_dispatch(const Scenario& s) {
  if (s.train.expert_dispatch != ExpertDispatch::automatic) return s.train.expert_dispatch;
  const ExpertRounds rows = expert_rounds(s);
  if (rows.most == 0 || rows.rounds > 1 || !expert_mesh(s).may_send_copies()) return ExpertDispatch::per_expert;
  const DispatchSeconds cost = dispatch_seconds(s);
  return cost.per_rank < cost.per_expert ? ExpertDispatch::per_rank : ExpertDispatch::per_expert;
}

ExpertCopies expert_copies(const Scenario& s) {
  if (expert_rounds(s).most == 0 || chosen_dispatch(s) != ExpertDispatch::per_rank) return {};
  const ExpertMesh mesh = expert_mesh(s);
  const std::int64_t ranks = mesh.spread, tokens = s.train.micro_batch_tokens / mesh.blocks;
  return {tokens * std::min(ranks, s.model.moe->experts_per_token * mesh.parts), ranks * tokens,
          expected_copies(*s.model.moe, mesh)};
}

}  // namespace hotbunk
