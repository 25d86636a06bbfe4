// Lengths of an iteration's samples: drawn from the scenario's distributions, or recorded by a run and replayed, so
// that a simulation of a finished run makes the very same decisions.
#pragma once
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
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

/// How far an iteration's longest response lies from that of other draws: an engine decodes until its longest is done.
struct LongestResponses {
  std::int64_t draws = 0;            // looked at, of one iteration each
  double mean = 0.0, deviation = 0;  // of the longest response of an iteration, tokens
};
/// Of draws with other seeds than the scenario's; none where responses are of one length or nothing is drawn.
std::optional<LongestResponses> longest_responses(const Scenario&);

/// A line of lengths.jsonl, without its end: {"step": 1, "prompt_tokens": [...], "response_tokens": [...]}, the arrays
/// by sample index.
std::string lengths_line(std::int32_t step, const SampleLengths&);

/// Reads such a file line by line: a long run's lengths are larger than what one wants in memory.
class LengthsReader {
 public:
  /// E101 unreadable.
  static Result<LengthsReader> open(const std::filesystem::path&);
  /// The next iteration's; nothing at the end. E120 a line that is not of that form, with its line.
  Result<std::optional<SampleLengths>> next();
  /// Of the last one; 0 before the first. A run resumed without the files of its earlier part begins later than 1.
  std::int64_t step() const { return step_; }

 private:
  explicit LengthsReader(std::filesystem::path path) : path_(std::move(path)), file_(path_) {}
  std::filesystem::path path_;
  std::ifstream file_;
  int line_ = 0;
  std::int64_t step_ = 0;
};

/// The whole file, for a short one, by step; those before the first line's are empty. E101, E120.
Result<std::vector<SampleLengths>> read_lengths(const std::filesystem::path&);

/// Lengths of iteration `step`, from 1 on; asked for in ascending order, several times each.
using StepLengths = std::function<SampleLengths(std::int32_t step)>;

/// Those of a file, read as they are asked for. The whole file is checked first: E101, E120, E121 as below.
Result<StepLengths> recorded_lengths(const std::filesystem::path&, const Scenario&, std::int32_t first_step = 1);

/// Responses by length, of any number of iterations: as many entries as there are different lengths.
using LengthCounts = std::map<std::int64_t, std::int64_t>;
void count_responses(const SampleLengths&, LengthCounts&);
/// Of a whole file: E101, E120.
Result<LengthCounts> read_length_counts(const std::filesystem::path&);

/// E121 when recorded lengths are not of this scenario: an iteration from `first_step` on is missing, another number of
/// samples, longer ones than its maxima, or a prompt whose samples differ.
Status check_recorded(const Scenario&, const std::vector<SampleLengths>&, std::int32_t first_step = 1);

}  // namespace hotbunk
