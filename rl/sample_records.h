// What was sampled, for people: some samples of some steps, as samples.jsonl and the report show them. Which ones is a
// pure function of the step, the rewards and the run's length.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "rl/passes.h"

namespace hotbunk {

/// One sample of a step.
struct SampleRecord {
  std::int64_t sample = 0;  // index in the step
  TokenSequence sequence;
  std::vector<float> training_logps;        // [response tokens], before the update; empty where not computed here
  std::optional<double> reward, advantage;  // none in supervised fine-tuning
  std::string prompt_text, response_text;   // "" where the tokens are no built-in task's
};

/// At most `most` of `count` samples, ascending: the best and the worst reward (the first of equals; none without
/// rewards), then evenly spread ones.
std::vector<std::size_t> chosen_samples(std::span<const double> rewards, std::size_t count, std::size_t most);

/// Whether a run of `steps` writes samples of `step`: `every` n > 0: the first, each n-th and the last; 0: never;
/// without: the first, the last and about twenty evenly between.
bool writes_samples(std::int32_t step, std::int64_t steps, std::optional<std::int32_t> every);

/// A line of samples.jsonl, without its end:
///   {"step": 1, "sample": 3, "prompt_tokens": 5, "response_tokens": 4, "tokens": {"prompt": [...], "response": [...]},
///    "text": {"prompt": "123=", "response": "321<eos>"}, "logprobs": {"rollout": [...], "training": [...]},
///    "reward": 1.0, "advantage": 0.7}
/// Keys that the sample has nothing for are left out. Of a prompt or response the first `most_sample_tokens` are shown.
inline constexpr std::size_t most_sample_tokens = 1024;
std::string sample_line(std::int32_t step, const SampleRecord&);

}  // namespace hotbunk
