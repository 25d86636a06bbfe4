#include "rl/sample_records.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>

#include "base/json.h"

namespace hotbunk {
namespace {

constexpr std::int64_t even_steps = 20;  // between the first and the last, unless asked otherwise

/// Shortest text that is the same float; null for what JSON has no number for.
std::string float_list(std::span<const float> values) {
  std::string out = "[";
  for (const float v : values.first(std::min(values.size(), most_sample_tokens))) {
    if (out.size() > 1) out += ",";
    out += std::isfinite(v) ? fmt::format("{}", v) : "null";
  }
  return out + "]";
}

std::string token_list(std::span<const std::int32_t> tokens) {
  return fmt::format("[{}]", fmt::join(tokens.first(std::min(tokens.size(), most_sample_tokens)), ","));
}

/// A text of the shown tokens at most; built-in tasks write one character or a short name per token.
std::string quoted(const std::string& text) { return json_text(nlohmann::json(text)); }

}  // namespace

std::vector<std::size_t> chosen_samples(std::span<const double> rewards, std::size_t count, std::size_t most) {
  std::set<std::size_t> chosen;
  if (most == 0 || count == 0) return {};
  if (!rewards.empty()) {
    chosen.insert(static_cast<std::size_t>(std::ranges::max_element(rewards) - rewards.begin()));
    if (most > 1) chosen.insert(static_cast<std::size_t>(std::ranges::min_element(rewards) - rewards.begin()));
  }
  const std::size_t even = std::min(most, count);
  for (std::size_t i = 0; i < even && chosen.size() < even; ++i)
    chosen.insert(even == 1 ? 0 : i * (count - 1) / (even - 1));
  return {chosen.begin(), chosen.end()};
}

bool writes_samples(std::int32_t step, std::int64_t steps, std::optional<std::int32_t> every) {
  if (every == 0) return false;
  const std::int64_t distance = every ? *every : std::max<std::int64_t>(1, (steps + even_steps - 1) / even_steps);
  return step == 1 || step == steps || step % distance == 0;
}

std::string sample_line(std::int32_t step, const SampleRecord& r) {
  const auto all = std::span<const std::int32_t>(r.sequence.tokens);
  const auto prompt = all.first(static_cast<std::size_t>(r.sequence.prompt_tokens));
  const auto response = all.subspan(prompt.size());
  std::string out = fmt::format(
      "{{\"step\":{},\"sample\":{},\"prompt_tokens\":{},\"response_tokens\":{},\"tokens\":{{\"prompt\":{},\"response\":"
      "{}}}",
      step, r.sample, prompt.size(), response.size(), token_list(prompt), token_list(response));
  if (!r.prompt_text.empty())
    out += fmt::format(",\"text\":{{\"prompt\":{},\"response\":{}}}", quoted(r.prompt_text), quoted(r.response_text));
  std::string logps;
  if (!r.sequence.rollout_logps.empty()) logps += "\"rollout\":" + float_list(r.sequence.rollout_logps);
  if (!r.training_logps.empty())
    logps += std::string(logps.empty() ? "" : ",") + "\"training\":" + float_list(r.training_logps);
  if (!logps.empty()) out += ",\"logprobs\":{" + logps + "}";
  if (r.reward) out += fmt::format(",\"reward\":{}", *r.reward);
  if (r.advantage) out += fmt::format(",\"advantage\":{}", static_cast<float>(*r.advantage));
  return out + "}";
}

}  // namespace hotbunk
