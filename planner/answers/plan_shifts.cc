#include "planner/answers/plan_shifts.h"

#include <algorithm>

namespace hotbunk {

ShiftsSeconds shifts_seconds(std::span<const ShiftOp> ops, const CostModel& cost) {
  ShiftsSeconds out;
  for (const ShiftOp& op : ops) {
    if (is_prologue(op.phase)) continue;
    const auto bytes = static_cast<double>(op.bytes), count = static_cast<double>(op.count);
    const bool copies = op.kind == OpKind::copy;
    const double seconds =
        (copies ? count * cost.host_copy_seconds(bytes) : cost.map_seconds(bytes, op.kind, op.space)) /
        static_cast<double>(op.every);
    if (op.phase == PlanPhase::sync) {
      (copies ? out.uploads : out.staging) += seconds;
      continue;
    }
    ShiftSeconds& of = is_sleep(op.phase) ? out.sleep : out.wake;
    (copies ? of.copies : op.space == Space::device ? of.device : of.host) += seconds;
  }
  return out;
}

ComputedSeconds ComputedSeconds::of(const Scenario& s, const PlanSeconds& p) {
  return {.rollout = p.rollout.total(),
          .sync = p.sync.seconds() / static_cast<double>(std::max<std::int64_t>(s.sync.every, 1)),
          .reference = p.training.reference.seconds(),
          .old_logprobs = p.training.old_logprobs.seconds(),
          .train = p.training.train.seconds()};
}

void use_plan_seconds(const ComputedSeconds& computed, const ShiftsSeconds& shifts, RlPrice& price) {
  const auto at = [&](RlPhase p) -> double& { return price.seconds[static_cast<std::size_t>(p)]; };
  price.seconds = {}, price.overlapped = 0.0;
  at(RlPhase::rollout) = computed.rollout;
  at(RlPhase::sync) = computed.sync + shifts.staging;  // its copies run on streams of their own, beside the buckets
  at(RlPhase::sleep) = shifts.sleep.total();
  at(RlPhase::wake) = shifts.wake.total();
  at(RlPhase::reference) = computed.reference;
  at(RlPhase::old_logprobs) = computed.old_logprobs;
  at(RlPhase::train) = computed.train;
  price.iteration_seconds = 0.0;
  for (const double s : price.seconds) price.iteration_seconds += s;
}

}  // namespace hotbunk
