// The planner's cost model as the simulator's prices.
#pragma once
#include <cmath>
#include <map>
#include <optional>
#include <vector>

#include "planner/cost/cost_model.h"
#include "sim/op_cost.h"

namespace hotbunk {

/// For one plan at a time, and one thread.
class ModelCost final : public OpCost {
 public:
  /// The model outlives this.
  explicit ModelCost(const CostModel& model) : model_(model) {}
  std::int64_t nanoseconds(const Plan& plan, Rank rank, const Op& op, const Args& args) const override {
    return model_.op_nanoseconds(plan, rank_place(plan, rank), op, args.sizes);
  }
  ThreadModel threads() const override {
    const Hardware& h = model_.hardware();
    const auto ns = [](const Sourced& seconds) { return std::llround(seconds.value * 1e9); };
    return {std::llround(h.cores.value), ns(h.wake), ns(h.thread_switch), ns(h.time_slice), ns(h.call)};
  }
  FirstUse first_use(const Op& op, const Args& args) const override {
    const double seconds = model_.hardware().first_use.value;
    const auto size = seconds > 0.0 ? model_.kernel_size(op, args.sizes) : std::nullopt;
    if (!size) return {};
    return {{static_cast<std::int64_t>(op.kind), static_cast<std::int64_t>(op.inputs[1].dtype),
             std::llround((*size)[0]), std::llround((*size)[1]), std::llround((*size)[2])},
            std::llround(seconds * 1e9)};
  }
  std::int64_t decision_nanoseconds() const override { return std::llround(1e9 * model_.hardware().decision.value); }

 private:
  /// Of the plan that was asked about last.
  const RankPlace& rank_place(const Plan& plan, Rank rank) const {
    if (plan_ != &plan) {
      plan_ = &plan;
      rank_places_.assign(static_cast<std::size_t>(plan.num_ranks()), {});
      places_ = all_places(plan);
      groups_ = all_groups(plan);
      shapes_.clear();
    }
    auto& known = rank_places_[static_cast<std::size_t>(rank)];
    if (known) return *known;
    RankPlace place{places_[static_cast<std::size_t>(rank)], {}, host_sections(plan.program(rank))};
    for (const std::vector<Rank>* members : groups_[static_cast<std::size_t>(rank)]) {
      const auto [at, is_new] = shapes_.try_emplace(members);
      if (is_new) at->second = members ? model_.shape_of(*members) : model_.shape_of({});
      place.groups.push_back(at->second);
    }
    return known.emplace(std::move(place));
  }

  /// A rank's group in each family, by rank; null: none.
  static std::vector<std::vector<const std::vector<Rank>*>> all_groups(const Plan& plan) {
    std::vector<std::vector<const std::vector<Rank>*>> all(
        static_cast<std::size_t>(plan.num_ranks()), std::vector<const std::vector<Rank>*>(plan.groups.size(), nullptr));
    for (std::size_t f = 0; f < plan.groups.size(); ++f)
      for (const std::vector<Rank>& members : plan.groups[f].groups)
        for (const Rank r : members) all[static_cast<std::size_t>(r)][f] = &members;
    return all;
  }

  const CostModel& model_;
  mutable const Plan* plan_ = nullptr;
  mutable std::vector<std::optional<RankPlace>> rank_places_;  // by rank
  mutable std::vector<Places> places_;                         // by rank
  mutable std::vector<std::vector<const std::vector<Rank>*>> groups_;
  mutable std::map<const std::vector<Rank>*, GroupShape> shapes_;
};

}  // namespace hotbunk
