#include "planner/answers/plan_time_tree.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/format.h"
#include "graph/clock.h"
#include "planner/answers/nodes.h"

namespace hotbunk {
namespace {

/// The leading stream's ops by kind, the longest first; what is short together.
CostNode computed_node(const StreamSeconds& s) {
  constexpr double shown = 0.01;  // of the whole
  CostNode out = seconds_of("compute", s.busy[at(lead_stream)], "the leading stream's ops, each at its price");
  double rest = 0.0;
  for (std::size_t k = 0; k < s.kinds.size(); ++k) {
    if (s.kinds[k] < shown * out.seconds) rest += s.kinds[k];
    else if (s.kinds[k] > 0.0)
      out.children.push_back(seconds_of(std::string(name_of(static_cast<OpKind>(k))), s.kinds[k]));
  }
  std::ranges::stable_sort(out.children, std::ranges::greater(), &CostNode::seconds);
  if (rest > 0.0) out.children.push_back(seconds_of("other ops", rest));
  return out;
}

/// Sums to what elapses, and what the host's pace adds.
std::vector<CostNode> stream_nodes(const Plan& plan, const StreamSeconds& s) {
  std::vector<CostNode> out = {computed_node(s)};
  for (std::size_t i = 0; i < plan.streams.size(); ++i)
    out.push_back(seconds_of("waits for " + plan.streams[i].name, s.waited[i]));
  out.push_back(seconds_of("host", s.paced, "launches that the device waits for"));
  const double slowed = s.slowed();
  if (slowed > 1e-6 * s.elapsed)
    out.push_back(
        seconds_of("shared", slowed, "kernels of other streams on the device, and collectives beside its own"));
  return out;
}

/// Of a phase: launches go on beside all of it.
std::vector<CostNode> phase_nodes(const Plan& plan, const StreamSeconds& s) {
  std::vector<CostNode> out = stream_nodes(plan, s);
  out.push_back(seconds_of("launches", s.seconds() - s.elapsed - s.paced, "of the host, longer than all of it"));
  return out;
}

std::string steps_of(const RolloutSeconds::Part& part, bool decodes, double context) {
  const double steps = std::max(part.steps, 1e-300);
  const std::string count =
      fmt::format("{} step{}", format_count(std::llround(part.steps)), std::llround(part.steps) == 1 ? "" : "s");
  if (!decodes) return fmt::format("{} of {:.4g} tokens", count, part.tokens / steps);
  return fmt::format("{} of {:.4g} sequences, {} tokens of context each", count, part.sequences / steps,
                     format_count(std::llround(context)));
}

std::vector<CostNode> rollout_nodes_of(const Plan& plan, const RolloutSeconds& r) {
  std::vector<CostNode> out;
  const auto part = [&](const char* name, const RolloutSeconds::Part& of) {
    out.push_back(node_of(name, of.steps > 0 ? steps_of(of, of.tokens == of.sequences, r.context) : "", 0,
                          of.seconds.elapsed + of.seconds.paced, stream_nodes(plan, of.seconds)));
  };
  part("prefill", r.prefill), part("decode", r.decode), part("tail", r.tail);
  out.push_back(seconds_of("exchange", r.exchange.seconds(), "every rank learns every sample"));
  return out;
}

std::vector<CostNode> shift_nodes(const ShiftSeconds& s, bool down) {
  return {seconds_of("copies", s.copies, down ? "to the host" : "from the host"),
          seconds_of("device memory", s.device, down ? "given back" : "taken"),
          seconds_of("host memory", s.host, down ? "taken" : "given back")};
}

}  // namespace

CostNode plan_time_tree(const Scenario& s, const TrainPoint& p, const Plan& plan, const PlanSeconds& seconds,
                        const ShiftsSeconds& shifts, const RlPrice& price) {
  CostNode root{"iteration", "", 0, price.iteration_seconds, {}};
  const auto add = [&](RlPhase phase, std::string why, std::vector<CostNode> parts) {
    const double taken = price.seconds[static_cast<std::size_t>(phase)];
    if (taken > 0)
      root.children.push_back(node_of(std::string(name_of(phase)), std::move(why), 0, taken, std::move(parts)));
  };
  const double every = static_cast<double>(std::max<std::int64_t>(s.sync.every, 1));
  StreamSeconds sync;
  sync.add(seconds.sync, 1.0 / every);
  std::vector<CostNode> synced = phase_nodes(plan, sync);
  synced.push_back(seconds_of("device memory", shifts.staging, "taken for buckets"));
  const std::string passes = fmt::format(
      "{} of {} sequence{}", p.micro_batches == 1 ? "a micro-batch" : fmt::format("{} micro-batches", p.micro_batches),
      p.micro_batch, p.micro_batch == 1 ? "" : "s");
  add(RlPhase::rollout, "", rollout_nodes_of(plan, seconds.rollout));
  add(RlPhase::sync, every > 1 ? fmt::format("every {:.0f} iterations", every) : "", std::move(synced));
  add(RlPhase::sleep, "", shift_nodes(shifts.sleep, true));
  add(RlPhase::wake, "", shift_nodes(shifts.wake, false));
  add(RlPhase::reference, passes, phase_nodes(plan, seconds.training.reference));
  add(RlPhase::old_logprobs, passes, phase_nodes(plan, seconds.training.old_logprobs));
  add(RlPhase::train, passes, phase_nodes(plan, seconds.training.train));
  return root;
}

}  // namespace hotbunk
