// LengthDriver: drives a plan by lengths alone, drawn or recorded. What the simulator runs with.
#pragma once
#include <limits>
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

  /// From now on a decision stands for all decode steps up to the next event of the engine's scheduler. Only for
  /// devices that play a block several times together (Args::times).
  void take_steps_together() { most_decode_steps_ = std::numeric_limits<std::int64_t>::max(); }

  /// By rank, a number that is the same for those that get the same decisions in all iterations [first, last].
  std::vector<std::int32_t> rank_classes(std::int32_t first, std::int32_t last);

  void feed(Rank, const BoundOp&, const Args&, std::span<std::byte> destination) override;  // zeros
  void fetch(Rank, const BoundOp&, const Args&, std::span<const std::byte>) override {}
  /// It knows the lengths, but a run's host waits for them, and so must a simulated one.
  bool wants_results() const override { return true; }

 private:
  LengthDriver(const Plan&, const Scenario&, StepLengths);
  const SampleLengths& lengths(std::int32_t step);
  std::int64_t most_decode_steps() const override { return most_decode_steps_; }
  std::vector<std::int64_t> prompt_tokens(std::int32_t step) override;
  std::vector<std::int64_t> response_caps(std::int32_t step) override { return lengths(step).response_tokens; }
  SampleLengths sample_lengths(std::int32_t step) override { return lengths(step); }

  const StepLengths source_;
  std::int64_t most_decode_steps_ = 1;
  std::int32_t step_ = -1;  // what lengths_ is of
  SampleLengths lengths_;
};

}  // namespace hotbunk
