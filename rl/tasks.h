// Built-in verifiable tasks: prompts drawn from a counter-based generator and rewards computed by a rule. Small enough
// that a model of a few hundred thousand parameters learns them from random initialisation by GRPO alone.
//
// Vocabulary (15 ids): 0 PAD, 1 BOS, 2 EOS, 3 '=', 4 '+', 5 … 14 the digits 0 … 9.
// A prompt is BOS, the problem, '='; the response is the answer's digits and EOS.
//   digit_sum  d digits                -> their sum in decimal, as many digits as 9 d has, leading zeros
//   sort       d digits                -> the same digits, ascending
//   reverse    d digits                -> the same digits, last first
//   add        d digits '+' d digits   -> the sum, d + 1 digits. Numbers are written least significant digit first, so
//                                         that the carry runs in the direction of generation.
//   parity     d digits                -> any tokens whose ids are all even, or all odd, as the digits' sum is. Half of
//                                         all tokens are right by chance in any vocabulary: rewards that differ, and so
//                                         gradients, even from a large model with random weights.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/diagnostic.h"
#include "spec/scenario.h"

namespace hotbunk {

namespace token {
inline constexpr std::int32_t pad = 0, bos = 1, eos = 2, equals = 3, plus = 4, digit0 = 5, count = 15;
}  // namespace token

enum class TaskName : std::uint8_t { digit_sum, sort, reverse, add, parity };
std::string_view name_of(TaskName);
std::vector<std::string> task_names();

/// A prompt and the right response (EOS included); of `parity` the shortest of them.
struct Problem {
  std::vector<std::int32_t> prompt, answer;
};

class Task {
 public:
  /// E220 unknown name (with the nearest), E221 digits outside [1, 9], E222 the model's vocabulary or the scenario's
  /// longest prompt or response is too small.
  static Result<Task> create(const Scenario&);

  /// Problem `index` of iteration `step`: a pure function of (seed, step, index).
  Problem problem(std::int64_t seed, std::int32_t step, std::int64_t index) const;
  std::int64_t prompt_tokens() const;
  std::int64_t answer_tokens() const;  // EOS included
  TaskName name() const { return name_; }
  /// For people: digits and signs as themselves, BOS not at all, "<eos>", "<pad>", and "<17>" for what is no id of
  /// ours.
  static std::string text(std::span<const std::int32_t> tokens);

  /// In [0, 1]: 0.8 * fraction of the answer's tokens (EOS included) that stand at their place, + 0.2 when the response
  /// is exactly the answer. The partial credit gives a gradient from the first step, the bonus makes exactness worth
  /// its last token. `parity`: the share of the response's tokens before EOS whose id has the answer's parity; 0 if
  /// none.
  double reward(std::span<const std::int32_t> response, std::span<const std::int32_t> answer) const;

  /// Expected reward of tokens drawn uniformly from `vocab` ids until EOS, for an answer of n tokens with one EOS at
  /// its end. The place i is reached, and right, with probability ((V-1)/V)^i / V; all n are with V^-n.
  /// `parity`: over both parities the V - 1 ids beside EOS are right once, so (V-1)/2V.
  double chance_reward(std::int64_t vocab) const;

 private:
  Task(TaskName name, std::int64_t digits) : name_(name), digits_(digits) {}
  TaskName name_;
  std::int64_t digits_;
};

}  // namespace hotbunk
