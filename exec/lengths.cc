#include "exec/lengths.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/rng.h"
#include "lowering/sample_rows.h"
#include "spec/json_read.h"

namespace hotbunk {
namespace {

Diagnostic bad_line(const std::string& file, int line, std::string message) {
  return {.code = "E120",
          .message = std::move(message),
          .where = {file, line, 0},
          .notes = {},
          .help = "each line is {\"step\": 1, \"prompt_tokens\": [...], \"response_tokens\": [...]}"};
}

Result<std::vector<std::int64_t>> read_counts(const nlohmann::json& object, const char* key, const std::string& file,
                                              int line) {
  if (!object.is_object() || !object.contains(key) || !object[key].is_array())
    return fail(bad_line(file, line, fmt::format("no array '{}'", key)));
  std::vector<std::int64_t> counts;
  for (const auto& value : object[key]) {
    if (!value.is_number_integer() || value.get<std::int64_t>() < 1)
      return fail(
          bad_line(file, line, fmt::format("'{}' holds {}, not a number of tokens", key, describe_json(value))));
    counts.push_back(value.get<std::int64_t>());
  }
  return counts;
}

/// `step`: of the line, where it says so and it can be.
Result<SampleLengths> read_line(const std::string& text, const std::string& file, int line, std::int64_t& step) {
  const auto json = parse_json(text, file, {}, "E120", false);
  if (!json) return fail(bad_line(file, line, json.error().front().message));
  auto prompts = read_counts(*json, "prompt_tokens", file, line);
  if (!prompts) return fail(std::move(prompts.error()));
  auto responses = read_counts(*json, "response_tokens", file, line);
  if (!responses) return fail(std::move(responses.error()));
  if (prompts->size() != responses->size())
    return fail(bad_line(file, line, fmt::format("{} prompts but {} responses", prompts->size(), responses->size())));
  constexpr std::int64_t most_steps = 100'000'000;
  if (json->contains("step") && (*json)["step"].is_number_unsigned() &&
      (*json)["step"].get<std::uint64_t>() <= most_steps)
    step = (*json)["step"].get<std::int64_t>();
  return SampleLengths{std::move(*prompts), std::move(*responses)};
}

}  // namespace

std::int64_t draw_length(const LengthSpec& spec, std::int64_t seed, std::int32_t step, LengthOf what,
                         std::int64_t index) {
  const auto key = static_cast<std::uint64_t>(seed);
  const std::uint64_t a = (static_cast<std::uint64_t>(step) << 32) | static_cast<std::uint64_t>(index);
  const auto b = static_cast<std::uint64_t>(what);
  const double max = std::max(1.0, std::floor(spec.max));
  double length = spec.mean;
  if (spec.distribution == LengthDistribution::uniform) {
    const Philox4 words = random_words(key, RngPurpose::lengths, a, b);
    length = 1.0 + std::floor(uniform53(words[0], words[1]) * std::max(1.0, 2.0 * spec.mean - 1.0));
  } else if (spec.distribution == LengthDistribution::lognormal) {
    const double variance = std::log1p(spec.cv * spec.cv);  // of the logarithm
    length = std::exp(std::log(spec.mean) - 0.5 * variance +
                      std::sqrt(variance) * normal2(key, RngPurpose::lengths, a, b)[0]);
  }
  return static_cast<std::int64_t>(std::clamp(std::round(length), 1.0, max));
}

SampleLengths draw_lengths(const Scenario& s, std::int32_t step) {
  const std::int64_t samples = num_samples(s);
  const std::int64_t per_prompt = samples / s.algorithm.prompts;
  SampleLengths lengths;
  for (std::int64_t i = 0; i < samples; ++i) {
    lengths.prompt_tokens.push_back(
        draw_length(s.workload.prompt_tokens, s.seed, step, LengthOf::prompt, i / per_prompt));
    lengths.response_tokens.push_back(draw_length(s.workload.response_tokens, s.seed, step, LengthOf::response, i));
  }
  return lengths;
}

std::string lengths_line(std::int32_t step, const SampleLengths& lengths) {
  return fmt::format("{{\"step\": {}, \"prompt_tokens\": [{}], \"response_tokens\": [{}]}}\n", step,
                     fmt::join(lengths.prompt_tokens, ", "), fmt::join(lengths.response_tokens, ", "));
}

Status write_lengths(const std::filesystem::path& path, const std::vector<SampleLengths>& lengths) {
  std::string text;
  for (std::size_t i = 0; i < lengths.size(); ++i)
    if (!lengths[i].prompt_tokens.empty()) text += lengths_line(static_cast<std::int32_t>(i + 1), lengths[i]);
  return write_file_atomic(path, text);
}

Result<std::vector<SampleLengths>> read_lengths(const std::filesystem::path& path) {
  const auto text = read_file(path);
  if (!text) return fail(text.error());
  std::vector<SampleLengths> lengths;
  std::size_t begin = 0;
  for (int line = 1; begin < text->size(); ++line) {
    const std::size_t end = std::min(text->find('\n', begin), text->size());
    std::int64_t step = 0;
    auto one = read_line(text->substr(begin, end - begin), path.string(), line, step);
    if (!one) return fail(std::move(one.error()));
    if (lengths.empty() && step > 1) lengths.resize(static_cast<std::size_t>(step) - 1);
    lengths.push_back(std::move(*one));
    begin = end + 1;
  }
  return lengths;
}

Status check_recorded(const Scenario& s, const std::vector<SampleLengths>& lengths, std::int32_t first_step) {
  const auto bad = [](std::string message) {
    return fail({.code = "E121",
                 .message = "recorded lengths are not of this scenario: " + std::move(message),
                 .where = {},
                 .notes = {},
                 .help = "replay lengths.jsonl with the scenario of the run that wrote it"});
  };
  if (static_cast<std::int64_t>(lengths.size()) < s.steps)
    return bad(fmt::format("{} iterations recorded, {} asked for", lengths.size(), s.steps));
  const std::int64_t samples = num_samples(s);
  const std::int64_t per_prompt = samples / s.algorithm.prompts;
  for (auto step = static_cast<std::size_t>(first_step - 1); step < lengths.size(); ++step) {
    const auto& [prompts, responses] = lengths[step];
    if (static_cast<std::int64_t>(prompts.size()) != samples)
      return bad(fmt::format("iteration {} has {} samples, not {}", step + 1, prompts.size(), samples));
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      const std::size_t first = i - i % static_cast<std::size_t>(per_prompt);
      // What SFT reads from a file is as long as it is; only sampled responses have the workload's caps.
      if (s.algorithm.name != AlgorithmName::sft &&
          (prompts[i] > max_prompt_tokens(s) || responses[i] > max_response_tokens(s)))
        return bad(fmt::format("sample {} of iteration {} has {} + {} tokens, the maxima are {} and {}", i, step + 1,
                               prompts[i], responses[i], max_prompt_tokens(s), max_response_tokens(s)));
      if (prompts[i] != prompts[first])
        return bad(fmt::format("samples {} and {} of iteration {} have one prompt but lengths {} and {}", first, i,
                               step + 1, prompts[first], prompts[i]));
    }
  }
  return {};
}

}  // namespace hotbunk
