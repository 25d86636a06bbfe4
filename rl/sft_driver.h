// Supervised fine-tuning on token ids: iteration s trains the next algorithm.prompts sequences of the file, in order
// and round again.
#pragma once
#include <map>
#include <memory>
#include <vector>

#include "rl/training_driver.h"

namespace hotbunk {

class SftDriver final : public TrainingDriver {
 public:
  /// The plan must outlive it. E12x: scenario.task.data; E40x: the weights.
  static Result<std::unique_ptr<SftDriver>> create(const Plan&, const Scenario&, DriverOptions);

 private:
  SftDriver(const Plan&, const Scenario&, LoadSources, DriverOptions, std::vector<TokenSequence>);
  const Samples& samples(std::int32_t step) override;
  std::vector<std::int64_t> prompt_tokens(std::int32_t) override { return {}; }  // nothing is rolled out
  std::vector<std::int64_t> response_caps(std::int32_t) override { return {}; }

  const std::vector<TokenSequence> data_;
  std::int32_t step_ = -1;  // what samples_ is of
  Samples samples_;
};

/// RlDriver or SftDriver, as the scenario's algorithm says.
Result<std::unique_ptr<TrainingDriver>> make_training_driver(const Plan&, const Scenario&, DriverOptions);

}  // namespace hotbunk
