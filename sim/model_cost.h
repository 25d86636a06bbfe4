// The planner's cost model as the simulator's prices.
#pragma once
#include "planner/cost_model.h"
#include "sim/op_cost.h"

namespace hotbunk {

class ModelCost final : public OpCost {
 public:
  /// The model outlives this.
  explicit ModelCost(const CostModel& model) : model_(model) {}
  std::int64_t nanoseconds(const Plan& plan, Rank rank, const Op& op, const Args& args) const override {
    return model_.op_nanoseconds(plan, rank, op, args.sizes);
  }

 private:
  const CostModel& model_;
};

}  // namespace hotbunk
