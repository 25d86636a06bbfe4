// GRPO on a built-in task: prompts, sampling, end of sequence, exchange of finished samples, rewards, advantages.
#pragma once
#include <map>
#include <memory>
#include <vector>

#include "rl/tasks.h"
#include "rl/training_driver.h"

namespace hotbunk {

class RlDriver final : public TrainingDriver {
 public:
  /// The plan must outlive it. E22x: the task; E310, E312: lengths; E40x: the weights.
  static Result<std::unique_ptr<RlDriver>> create(const Plan&, const Scenario&, DriverOptions);

  const Task& task() const { return task_; }
  void completed(Rank, const Args&, std::int16_t phase) override;

 private:
  /// One iteration: what this process's engines have sampled so far, then everybody's samples.
  struct Rollout {
    std::vector<Problem> problems;         // per prompt
    std::vector<TokenSequence> sequences;  // per sample; other engines' stay at the prompt until the exchange
    Samples samples;                       // after the exchange
    bool exchanged = false;
  };
  RlDriver(const Plan&, const Scenario&, LoadSources, DriverOptions, Task);
  Rollout& rollout(std::int32_t step);
  void judge(std::int32_t step, Rollout&);

  std::string text(std::span<const std::int32_t> tokens) const override { return Task::text(tokens); }
  std::vector<std::int64_t> prompt_tokens(std::int32_t step) override;
  std::vector<std::int64_t> response_caps(std::int32_t step) override;
  const Samples& samples(std::int32_t step) override;
  std::shared_ptr<Payload> rollout_payload(Iteration&, std::int64_t engine, const ScheduledStep&) override;
  std::shared_ptr<Payload> joint_payload(const std::vector<std::shared_ptr<Payload>>& all, std::size_t own,
                                         std::int64_t seqs) override {
    return joined(all, own, seqs);
  }
  std::vector<std::uint8_t> ended(Iteration&, std::int64_t engine, const ScheduledStep&, const Args&) override;
  std::shared_ptr<Payload> exchange_payload(Iteration&, Rank) override;

  const Task task_;
  std::map<std::int32_t, Rollout> rollouts_;
};

}  // namespace hotbunk
