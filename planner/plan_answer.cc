#include "planner/plan_answer.h"

#include <algorithm>

namespace hotbunk {
namespace {

constexpr std::string_view why_of(PlanPhase p) {
  switch (p) {
    case PlanPhase::load:
      return "shards and moments of training";
    case PlanPhase::sync:
      return "rollout weights beside the parameters' shards and a bucket";
    case PlanPhase::rollout:
      return "the engine's slice of the weights, its KV pool and one step";
    case PlanPhase::exchange:
      return "finished samples of all ranks";
    case PlanPhase::reference:
    case PlanPhase::old_logprobs:
      return "a forward pass that keeps nothing";
    case PlanPhase::train:
      return "a micro-batch at the loss or in backward, beside gradient shards and moments";
    case PlanPhase::checkpoint:
    case PlanPhase::export_:
      return "one unit gathered at a time";
    default:
      return "";
  }
}

enum class Moment : std::uint8_t { train, rollout, sync };

constexpr Moment moment_of(PlanPhase p) {
  switch (p) {
    case PlanPhase::wake_rollout:
    case PlanPhase::sync:
    case PlanPhase::sleep_train:
      return Moment::sync;
    case PlanPhase::start_rollout:
    case PlanPhase::wake_kv:
    case PlanPhase::rollout:
    case PlanPhase::sleep_rollout:
    case PlanPhase::exchange:
      return Moment::rollout;
    default:
      return Moment::train;
  }
}

}  // namespace

std::optional<FormMemory> plan_memory_of(const Scenario& s) {
  if (!PlanForm::why_not(s).empty()) return std::nullopt;
  return PlanForm(s.model).memory(s);
}

void use_plan_bytes(const Scenario& s, const FormMemory& m, RlPrice& price) {
  price.train_bytes = price.rollout_bytes = price.sync_bytes = 0.0;
  for (std::size_t p = 0; p < num_plan_phases; ++p) {
    if (!m.present[p]) continue;
    const Moment moment = moment_of(static_cast<PlanPhase>(p));
    double& bytes = moment == Moment::sync      ? price.sync_bytes
                    : moment == Moment::rollout ? price.rollout_bytes
                                                : price.train_bytes;
    bytes = std::max(bytes, static_cast<double>(m.device.phases[p].bytes));
  }
  price.host_bytes = static_cast<double>(m.host.whole.bytes);
  // As check_fit (trace/static_memory.h) judges the plan: 0 is unlimited.
  const std::int64_t device = s.cluster.device_memory_bytes;
  const std::int64_t host = s.cluster.host_memory_bytes / std::max<std::int64_t>(1, s.cluster.ranks_per_node());
  price.fits =
      (device <= 0 || m.device.whole.mapped_bytes <= device) && (host <= 0 || m.host.whole.mapped_bytes <= host);
}

CostNode plan_memory_tree(const FormMemory& m) {
  CostNode root{"device memory of every rank",
                "the highest of the phases below, live bytes of the plan",
                static_cast<double>(m.device.whole.bytes),
                0,
                {}};
  for (std::size_t p = 0; p < num_plan_phases; ++p) {
    if (!m.present[p]) continue;
    const auto phase = static_cast<PlanPhase>(p);
    const FormPeak& peak = m.device.phases[p];
    CostNode node{std::string(name_of(phase)), std::string(why_of(phase)), static_cast<double>(peak.bytes), 0, {}};
    const bool open = phase == m.device.peak_phase || phase == PlanPhase::train || phase == PlanPhase::rollout ||
                      phase == PlanPhase::sync;
    for (int c = 0; open && c < num_categories; ++c)
      if (const std::int64_t bytes = peak.by_category[static_cast<std::size_t>(c)]; bytes > 0)
        node.children.push_back(
            {std::string(name_of(static_cast<Category>(c))), "", static_cast<double>(bytes), 0, {}});
    root.children.push_back(std::move(node));
  }
  return root;
}

}  // namespace hotbunk
