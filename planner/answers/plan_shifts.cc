#include "planner/answers/plan_shifts.h"

namespace hotbunk {

ShiftsSeconds shifts_seconds(std::span<const ShiftOp> ops, const CostModel& cost) {
  ShiftsSeconds out;
  for (const ShiftOp& op : ops) {
    if (is_prologue(op.phase)) continue;
    const auto bytes = static_cast<double>(op.bytes), count = static_cast<double>(op.count);
    const bool copies = op.kind == OpKind::copy;
    const double seconds = (copies ? count * cost.host_copy_seconds(bytes) : cost.map_seconds(bytes, op.kind)) /
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

void use_plan_shifts(const ShiftsSeconds& plan, RlPrice& price) {
  const auto at = [&](RlPhase p) -> double& { return price.seconds[static_cast<std::size_t>(p)]; };
  at(RlPhase::sleep) = plan.sleep.total();
  at(RlPhase::wake) = plan.wake.total();
  at(RlPhase::sync) += plan.staging - price.staging_seconds + (plan.uploads - price.upload_seconds);
  price.staging_seconds = plan.staging, price.upload_seconds = plan.uploads;
  price.iteration_seconds = -price.overlapped;
  for (double s : price.seconds) price.iteration_seconds += s;
}

}  // namespace hotbunk
