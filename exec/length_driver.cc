#include "exec/length_driver.h"

#include <algorithm>

namespace hotbunk {

Result<std::unique_ptr<LengthDriver>> LengthDriver::create(const Plan& plan, const Scenario& scenario,
                                                           std::optional<std::vector<SampleLengths>> recorded,
                                                           std::int32_t first_step) {
  if (!recorded) return create(plan, scenario, [scenario](std::int32_t step) { return draw_lengths(scenario, step); });
  if (Status ok = check_recorded(scenario, *recorded, first_step); !ok) return fail(std::move(ok.error()));
  return create(plan, scenario,
                [all = std::move(*recorded)](std::int32_t step) { return all[static_cast<std::size_t>(step - 1)]; });
}

Result<std::unique_ptr<LengthDriver>> LengthDriver::create(const Plan& plan, const Scenario& scenario,
                                                           StepLengths recorded) {
  if (Diagnostics problems = check_lengths(scenario, kv_blocks_of(plan)); !problems.empty())
    return fail(std::move(problems));
  return std::unique_ptr<LengthDriver>(new LengthDriver(plan, scenario, std::move(recorded)));
}

LengthDriver::LengthDriver(const Plan& plan, const Scenario& scenario, StepLengths source)
    : IterationDriver(plan, scenario), source_(std::move(source)) {}

const SampleLengths& LengthDriver::lengths(std::int32_t step) {
  if (step_ != step) lengths_ = source_(step), step_ = step;
  return lengths_;
}

std::vector<std::int64_t> LengthDriver::prompt_tokens(std::int32_t step) {
  const auto& by_sample = lengths(step).prompt_tokens;
  const auto per_prompt = by_sample.size() / static_cast<std::size_t>(scenario().algorithm.prompts);
  std::vector<std::int64_t> by_prompt;
  for (std::size_t i = 0; i < by_sample.size(); i += per_prompt) by_prompt.push_back(by_sample[i]);
  return by_prompt;
}

void LengthDriver::feed(Rank, const BoundOp&, const Args&, std::span<std::byte> destination) {
  std::ranges::fill(destination, std::byte{0});
}

}  // namespace hotbunk
