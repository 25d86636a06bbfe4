// LengthDriver: drives a plan by lengths alone, drawn or recorded. What the simulator runs with.
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "exec/iteration_driver.h"

namespace hotbunk {

class LengthDriver final : public IterationDriver {
 public:
  /// The plan must outlive it. E310, E312: a longest sample fits nowhere; E121: `recorded` is of another scenario,
  /// or lacks an iteration from `first_step` on.
  static Result<std::unique_ptr<LengthDriver>> create(const Plan&, const Scenario&,
                                                      std::optional<std::vector<SampleLengths>> recorded = {},
                                                      std::int32_t first_step = 1);
  /// `recorded` has been checked (recorded_lengths).
  static Result<std::unique_ptr<LengthDriver>> create(const Plan&, const Scenario&, StepLengths recorded);
  /// The driver keeps a reference to the plan.
  static Result<std::unique_ptr<LengthDriver>> create(Plan&&, const Scenario&,
                                                      std::optional<std::vector<SampleLengths>> recorded = {}) = delete;

  void feed(Rank, const BoundOp&, const Args&, std::span<std::byte> destination) override;  // zeros
  void fetch(Rank, const BoundOp&, const Args&, std::span<const std::byte>) override {}
  /// It knows the lengths, but a run's host waits for them, and so must a simulated one.
  bool wants_results() const override { return true; }

 private:
  LengthDriver(const Plan&, const Scenario&, StepLengths);
  const SampleLengths& lengths(std::int32_t step);
  std::vector<std::int64_t> prompt_tokens(std::int32_t step) override;
  std::vector<std::int64_t> response_caps(std::int32_t step) override { return lengths(step).response_tokens; }
  SampleLengths sample_lengths(std::int32_t step) override { return lengths(step); }

  const StepLengths source_;
  std::int32_t step_ = -1;  // what lengths_ is of
  SampleLengths lengths_;
};

}  // namespace hotbunk
