// Lengths of an iteration's samples: drawn from the scenario's distributions, or recorded by a run and replayed, so
// that a simulation of a finished run makes the very same decisions.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "base/diagnostic.h"
#include "spec/scenario.h"

namespace hotbunk {

/// Lengths of all samples of one iteration, by sample index.
struct SampleLengths {
  std::vector<std::int64_t> prompt_tokens, response_tokens;
  friend bool operator==(const SampleLengths&, const SampleLengths&) = default;
};

/// Tokens of prompt or response `index` of iteration `step`, in [1, max]; a pure function of (seed, step, index).
///   fixed      mean, rounded
///   uniform    integers of [1, 2 mean - 1], whose mean is `mean`
///   lognormal  of the given mean and coefficient of variation
/// What would be longer than max ends there, as a response does at its cap.
enum class LengthOf : std::uint8_t { prompt = 0, response = 1 };
std::int64_t draw_length(const LengthSpec&, std::int64_t seed, std::int32_t step, LengthOf, std::int64_t index);

/// All samples of one iteration; the samples of one prompt share its length.
SampleLengths draw_lengths(const Scenario&, std::int32_t step);

/// {"step": 1, "prompt_tokens": [...], "response_tokens": [...]} and a newline.
std::string lengths_line(std::int32_t step, const SampleLengths&);

/// One line per iteration: {"step": 1, "prompt_tokens": [...], "response_tokens": [...]}, the arrays by sample index.
/// E103 when it cannot be written.
Status write_lengths(const std::filesystem::path&, const std::vector<SampleLengths>&);
/// By step: those before the first line's are empty (a run resumed without the files of its earlier part). E101
/// unreadable, E120 a line that is not of that form, with its line.
Result<std::vector<SampleLengths>> read_lengths(const std::filesystem::path&);

/// E121 when recorded lengths are not of this scenario: an iteration from `first_step` on is missing, another number of
/// samples, longer ones than its maxima, or a prompt whose samples differ.
Status check_recorded(const Scenario&, const std::vector<SampleLengths>&, std::int32_t first_step = 1);

}  // namespace hotbunk
