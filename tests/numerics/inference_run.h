// Scores and continues sequences of a golden's model on CPU ranks, as `hotbunk logprobs` and `hotbunk generate` do.
#pragma once
#include <vector>

#include "rl/inference_driver.h"
#include "tests/numerics/golden.h"

namespace hotbunk::test {

struct Generated {
  std::vector<TokenSequence> sequences;
  std::int64_t preemptions = 0, prefill_steps = 0;  // one rank only
  /// Log-probs of all sampled tokens, one sequence after the other.
  std::vector<float> logps() const;
  std::vector<std::vector<std::int32_t>> new_tokens() const;
};

std::vector<TokenSequence> prompts_of(const std::vector<std::vector<std::int32_t>>&);

/// Throws std::runtime_error with what went wrong. Tensor parallel scenarios run on forked ranks.
Generated generate(const Scenario&, const std::vector<TokenSequence>& prompts);

/// The log-probs of everything behind the prompts by a full forward pass, one sequence after the other.
std::vector<float> score(const ModelSpec&, std::vector<TokenSequence> sequences);

}  // namespace hotbunk::test
