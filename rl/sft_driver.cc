#include "rl/sft_driver.h"

#include "lowering/sample_rows.h"
#include "rl/rl_driver.h"
#include "rl/sft_data.h"

namespace hotbunk {

Result<std::unique_ptr<SftDriver>> SftDriver::create(const Plan& plan, const Scenario& s, DriverOptions options) {
  const std::int64_t most = micro_batch_capacity(s);
  auto data = read_sft_data(s.task.data, s.model.vocab, most,
                            most > s.train.micro_batch_tokens ? "train.micro_batch_tokens x the ranks that share them"
                                                              : "train.micro_batch_tokens");
  if (!data) return fail(std::move(data.error()));
  auto sources = LoadSources::open(s, options.resume, options.opens_files);
  if (!sources) return fail(std::move(sources.error()));
  return std::unique_ptr<SftDriver>(new SftDriver(plan, s, std::move(*sources), std::move(options), std::move(*data)));
}

SftDriver::SftDriver(const Plan& plan, const Scenario& s, LoadSources sources, DriverOptions options,
                     std::vector<TokenSequence> data)
    : TrainingDriver(plan, s, std::move(sources), std::move(options)), data_(std::move(data)) {}

const TrainingDriver::Samples& SftDriver::samples(std::int32_t step) {
  if (step_ == step) return samples_;
  const auto count = static_cast<std::size_t>(scenario().algorithm.prompts);
  samples_ = {{}, std::vector<float>(count, 0.0f), {}};
  for (std::size_t i = 0; i < count; ++i)
    samples_.sequences.push_back(data_[(static_cast<std::size_t>(step - 1) * count + i) % data_.size()]);
  step_ = step;
  return samples_;
}

Result<std::unique_ptr<TrainingDriver>> make_training_driver(const Plan& plan, const Scenario& s,
                                                             DriverOptions options) {
  if (s.algorithm.name == AlgorithmName::sft) {
    auto driver = SftDriver::create(plan, s, std::move(options));
    if (!driver) return fail(std::move(driver.error()));
    return std::unique_ptr<TrainingDriver>(std::move(*driver));
  }
  auto driver = RlDriver::create(plan, s, std::move(options));
  if (!driver) return fail(std::move(driver.error()));
  return std::unique_ptr<TrainingDriver>(std::move(*driver));
}

}  // namespace hotbunk
