// A model asked without training: log-probs of given sequences (Purpose::score), and continuations of prompts
// (Purpose::generate) by the rollout engine. Behind `hotbunk logprobs` and `hotbunk generate`.
#pragma once
#include <memory>
#include <span>
#include <vector>

#include "exec/iteration_driver.h"
#include "rl/passes.h"
#include "rl/weights.h"

namespace hotbunk {

/// One rank; `sequences` are packed into micro-batches of at least 2048 tokens, logits are formed 64 MiB at a time.
Scenario score_scenario(const ModelSpec&, std::span<const TokenSequence> sequences, DType);

struct GenerateOptions {
  std::int64_t max_new_tokens = 16;  // per prompt
  double temperature = 1.0;          // 0: greedy
  std::int64_t seed = 0;
  std::int64_t tp = 1;  // ranks
  DType dtype = DType::f32;
};
/// One engine over all ranks, with room for 64 running requests and prefills of 2048 tokens.
Scenario generate_scenario(const ModelSpec&, std::span<const TokenSequence> prompts, const GenerateOptions&);

class InferenceDriver final : public IterationDriver {
 public:
  /// The plan (of either purpose, for one iteration) must outlive it. Lengths must be those that the scenario was made
  /// for. E310, E312: a sequence that fits nowhere; E40x: the weights.
  static Result<std::unique_ptr<InferenceDriver>> create(const Plan&, const Scenario&,
                                                         std::vector<TokenSequence> sequences);

  /// In the order given. score: `rollout_logps` holds the log-prob of every token after the prompt. generate: tokens
  /// and log-probs of the continuation are appended; the model's end-of-sequence token ends it early and is its last
  /// token.
  const std::vector<TokenSequence>& sequences() const { return sequences_; }

  void feed(Rank, const BoundOp&, const Args&, std::span<std::byte> destination) override;
  void fetch(Rank, const BoundOp&, const Args&, std::span<const std::byte> source) override;
  void completed(Rank, const Args&, std::int16_t phase) override;
  bool wants_results() const override { return true; }
  /// Of the rollout; all zero when nothing was generated.
  SchedulerStatistics statistics() const { return statistics_; }

 private:
  InferenceDriver(const Plan&, const Scenario&, ParameterSource, std::vector<TokenSequence>);
  std::vector<std::int64_t> prompt_tokens(std::int32_t) override;
  std::vector<std::int64_t> response_caps(std::int32_t) override;
  SampleLengths sample_lengths(std::int32_t) override;
  std::shared_ptr<Payload> rollout_payload(Iteration&, std::int64_t engine, const ScheduledStep&) override;
  std::shared_ptr<Payload> joint_payload(const std::vector<std::shared_ptr<Payload>>& all, std::size_t own,
                                         std::int64_t seqs) override {
    return joined(all, own, seqs);
  }
  std::vector<std::uint8_t> ended(Iteration&, std::int64_t engine, const ScheduledStep&, const Args&) override;
  std::shared_ptr<Payload> micro_payload(Iteration&, const MicroId&, const MicroBatch&) override;

  const ParameterSource source_;
  std::vector<TokenSequence> sequences_;
  SchedulerStatistics statistics_;
};

}  // namespace hotbunk
