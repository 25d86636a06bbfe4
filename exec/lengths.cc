#include "exec/lengths.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/file.h"
#include "base/lines.h"
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
    const std::int64_t room = std::max<std::int64_t>(1, max_sample_tokens(s) - lengths.prompt_tokens.back());
    lengths.response_tokens.push_back(
        std::min(room, draw_length(s.workload.response_tokens, s.seed, step, LengthOf::response, i)));
  }
  return lengths;
}

std::optional<LongestResponses> longest_responses(const Scenario& s) {
  constexpr std::int64_t most_lengths = 500'000;  // drawn in all: some hundredths of a second
  const LengthSpec& spec = s.workload.response_tokens;
  if (s.algorithm.name == AlgorithmName::sft || spec.distribution == LengthDistribution::fixed) return {};
  const std::int64_t samples = s.algorithm.prompts * s.algorithm.samples_per_prompt;
  const std::int64_t draws = std::clamp<std::int64_t>(most_lengths / std::max<std::int64_t>(samples, 1), 4, 32);
  double sum = 0.0, squares = 0.0;
  Scenario other = s;
  for (std::int64_t draw = 0; draw < draws; ++draw) {
    ++other.seed;
    const auto longest = static_cast<double>(std::ranges::max(draw_lengths(other, 1).response_tokens));
    sum += longest, squares += longest * longest;
  }
  const auto n = static_cast<double>(draws);
  const double mean = sum / n;
  return LongestResponses{draws, mean, std::sqrt(std::max(0.0, squares - n * mean * mean) / (n - 1.0))};
}

std::string lengths_line(std::int32_t step, const SampleLengths& lengths) {
  return fmt::format("{{\"step\": {}, \"prompt_tokens\": [{}], \"response_tokens\": [{}]}}", step,
                     fmt::join(lengths.prompt_tokens, ", "), fmt::join(lengths.response_tokens, ", "));
}

Result<LengthsReader> LengthsReader::open(const std::filesystem::path& path) {
  auto regular = open_regular_file(path);  // before a stream opens it, which waits at a pipe
  if (!regular) {
    regular.error().front().help = "give the lengths.jsonl of a run folder";
    return fail(std::move(regular.error()));
  }
  return LengthsReader(path);
}

Result<std::optional<SampleLengths>> LengthsReader::next() {
  std::string text;
  const LineRead read = next_line(file_, text);
  if (read == LineRead::none) return std::optional<SampleLengths>();
  if (read == LineRead::too_long || read == LineRead::failed)
    return fail(Diagnostic{.code = read == LineRead::failed ? "E101" : "E102",
                           .message = read == LineRead::failed
                                          ? "cannot read the file to its end"
                                          : fmt::format("a line has more than {} B", most_line_bytes),
                           .where = {path_.string(), line_ + 1, 0},
                           .notes = {},
                           .help = "give the lengths.jsonl of a run folder"});
  ++step_;
  auto one = read_line(text, path_.string(), ++line_, step_);
  if (!one) return fail(std::move(one.error()));
  return std::optional(std::move(*one));
}

namespace {

Status bad_record(std::string message) {
  return fail({.code = "E121",
               .message = "recorded lengths are not of this scenario: " + std::move(message),
               .where = {},
               .notes = {},
               .help = "replay lengths.jsonl with the scenario of the run that wrote it"});
}

Status check_count(const Scenario& s, std::int64_t recorded) {
  if (recorded >= s.steps) return {};
  return bad_record(fmt::format("{} iterations recorded, {} asked for", recorded, s.steps));
}

Status check_first(std::int64_t first, std::int32_t asked) {
  if (first <= asked) return {};
  return bad_record(fmt::format("the first iteration recorded is {}, {} is asked for", first, asked));
}

Status check_iteration(const Scenario& s, std::int64_t step, const SampleLengths& lengths) {
  const std::int64_t samples = num_samples(s), per_prompt = samples / s.algorithm.prompts;
  const auto& [prompts, responses] = lengths;
  if (static_cast<std::int64_t>(prompts.size()) != samples)
    return bad_record(fmt::format("iteration {} has {} samples, not {}", step, prompts.size(), samples));
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    const std::size_t first = i - i % static_cast<std::size_t>(per_prompt);
    // What SFT reads from a file is as long as it is; only sampled responses have the workload's caps.
    if (s.algorithm.name != AlgorithmName::sft &&
        (prompts[i] > max_prompt_tokens(s) || responses[i] > max_response_tokens(s)))
      return bad_record(fmt::format("sample {} of iteration {} has {} + {} tokens, the maxima are {} and {}", i, step,
                                    prompts[i], responses[i], max_prompt_tokens(s), max_response_tokens(s)));
    if (prompts[i] != prompts[first])
      return bad_record(fmt::format("samples {} and {} of iteration {} have one prompt but lengths {} and {}", first, i,
                                    step, prompts[first], prompts[i]));
  }
  return {};
}

/// The file once more, line after line.
class Replay {
 public:
  explicit Replay(std::filesystem::path path) : path_(std::move(path)) {}
  SampleLengths at(std::int32_t step) {
    if (!reader_ || step < reader_->step()) reader_.emplace(checked(LengthsReader::open(path_)));
    while (reader_->step() < step) {
      auto next = checked(reader_->next());
      HB_CHECK(next, "{} has no iteration {} any more", path_.string(), step);
      current_ = std::move(*next);
    }
    return current_;
  }

 private:
  template <class T>
  T checked(Result<T> result) const {  // the file was whole when the replay began
    if (!result) throw RuntimeFailure(fmt::format("{} changed while it was read", path_.string()));
    return std::move(*result);
  }
  const std::filesystem::path path_;
  std::optional<LengthsReader> reader_;
  SampleLengths current_;  // of the reader's step
};

template <class Each>
Status for_each_line(const std::filesystem::path& path, Each each) {
  auto reader = LengthsReader::open(path);
  if (!reader) return fail(std::move(reader.error()));
  while (true) {
    auto lengths = reader->next();
    if (!lengths) return fail(std::move(lengths.error()));
    if (!*lengths) return {};
    if (Status ok = each(reader->step(), **lengths); !ok) return ok;
  }
}

}  // namespace

Result<std::vector<SampleLengths>> read_lengths(const std::filesystem::path& path) {
  std::vector<SampleLengths> all;
  Status ok = for_each_line(path, [&](std::int64_t step, const SampleLengths& lengths) {
    if (all.empty()) all.resize(static_cast<std::size_t>(step) - 1);
    all.push_back(lengths);
    return Status();
  });
  if (!ok) return fail(std::move(ok.error()));
  return all;
}

Result<StepLengths> recorded_lengths(const std::filesystem::path& path, const Scenario& s, std::int32_t first_step) {
  std::int64_t first = 0, last = 0;
  Status ok = for_each_line(path, [&](std::int64_t step, const SampleLengths& lengths) {
    if (first == 0) first = step;
    last = step;
    return step < first_step ? Status() : check_iteration(s, step, lengths);
  });
  if (ok) ok = check_count(s, last);
  if (ok) ok = check_first(first, first_step);
  if (!ok) return fail(std::move(ok.error()));
  return StepLengths([replay = std::make_shared<Replay>(path)](std::int32_t asked) { return replay->at(asked); });
}

Status check_recorded(const Scenario& s, const std::vector<SampleLengths>& lengths, std::int32_t first_step) {
  if (Status ok = check_count(s, static_cast<std::int64_t>(lengths.size())); !ok) return ok;
  for (auto step = static_cast<std::size_t>(first_step - 1); step < lengths.size(); ++step)
    if (Status ok = check_iteration(s, static_cast<std::int64_t>(step) + 1, lengths[step]); !ok) return ok;
  return {};
}

void count_responses(const SampleLengths& lengths, LengthCounts& counts) {
  for (const std::int64_t length : lengths.response_tokens) ++counts[length];
}

Result<LengthCounts> read_length_counts(const std::filesystem::path& path) {
  LengthCounts counts;
  Status ok = for_each_line(path, [&](std::int64_t, const SampleLengths& lengths) {
    count_responses(lengths, counts);
    return Status();
  });
  if (!ok) return fail(std::move(ok.error()));
  return counts;
}

}  // namespace hotbunk
