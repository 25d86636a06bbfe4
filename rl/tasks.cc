#include "rl/tasks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <optional>
#include <utility>

#include "base/rng.h"
#include "lowering/sample_rows.h"

namespace hotbunk {
namespace {

constexpr std::array<std::pair<std::string_view, TaskName>, 5> names{{{"digit_sum", TaskName::digit_sum},
                                                                      {"sort", TaskName::sort},
                                                                      {"reverse", TaskName::reverse},
                                                                      {"add", TaskName::add},
                                                                      {"parity", TaskName::parity}}};
constexpr std::int64_t max_digits = 9;  // a sum of ten-digit numbers is of no use to so small a model
constexpr double partial_credit = 0.8;  // the rest is for an exact response

std::optional<TaskName> task_from(std::string_view name) {
  for (const auto& [spelling, task] : names)
    if (spelling == name) return task;
  return std::nullopt;
}

std::int64_t decimal_digits(std::int64_t value) {
  std::int64_t digits = 1;
  while (value >= 10) value /= 10, ++digits;
  return digits;
}

using Digits = std::vector<std::int32_t>;

/// Least significant digit first on both sides.
Digits sum_of(const Digits& a, const Digits& b) {
  Digits sum;
  std::int32_t carry = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const std::int32_t place = a[i] + b[i] + carry;
    sum.push_back(place % 10);
    carry = place / 10;
  }
  sum.push_back(carry);
  return sum;
}

/// Most significant digit first.
Digits digits_of(std::int64_t value, std::int64_t width) {
  Digits digits(static_cast<std::size_t>(width));
  for (auto d = digits.rbegin(); d != digits.rend(); ++d, value /= 10) *d = static_cast<std::int32_t>(value % 10);
  return digits;
}

void append(std::vector<std::int32_t>& tokens, const Digits& digits) {
  for (std::int32_t d : digits) tokens.push_back(token::digit0 + d);
}

void check_room(Diagnostics& problems, const char* key, std::int64_t has, std::int64_t needs, const Scenario& s) {
  if (has < needs)
    problems.push_back(
        {.code = "E222",
         .message = fmt::format("task {} with {} digits does not fit {}", s.task.name, s.task.digits, key),
         .where = {},
         .notes = {fmt::format("it needs {}, the scenario has {}", needs, has)},
         .help = fmt::format("set {} to at least {}", key, needs)});
}

}  // namespace

std::string_view name_of(TaskName task) {
  for (const auto& [spelling, value] : names)
    if (value == task) return spelling;
  return "?";
}

std::vector<std::string> task_names() {
  std::vector<std::string> all;
  for (const auto& [spelling, task] : names) all.emplace_back(spelling);
  return all;
}

Result<Task> Task::create(const Scenario& s) {
  const auto name = task_from(s.task.name);
  if (!name) {
    const std::string nearest = nearest_name(s.task.name, task_names());
    return fail(
        {.code = "E220",
         .message = fmt::format("there is no task '{}'", s.task.name),
         .where = {},
         .notes = {fmt::format("tasks: {}", fmt::join(task_names(), ", "))},
         .help = nearest.empty() ? "set task.name to one of them" : fmt::format("did you mean '{}'?", nearest)});
  }
  if (s.task.digits < 1 || s.task.digits > max_digits)
    return fail({.code = "E221",
                 .message = fmt::format("task.digits is {}; it must be in [1, {}]", s.task.digits, max_digits),
                 .where = {},
                 .notes = {},
                 .help = {}});
  const Task task(*name, s.task.digits);
  Diagnostics problems;
  check_room(problems, "model.vocab_size", s.model.vocab, token::count, s);
  check_room(problems, "workload.prompt_tokens.max", max_prompt_tokens(s), task.prompt_tokens(), s);
  check_room(problems, "workload.response_tokens.max", max_response_tokens(s), task.answer_tokens(), s);
  if (!problems.empty()) return fail(std::move(problems));
  return task;
}

std::int64_t Task::prompt_tokens() const { return name_ == TaskName::add ? 2 * digits_ + 3 : digits_ + 2; }

std::int64_t Task::answer_tokens() const {
  switch (name_) {
    case TaskName::digit_sum:
      return decimal_digits(9 * digits_) + 1;
    case TaskName::add:
      return digits_ + 2;
    case TaskName::parity:
      return 2;
    case TaskName::sort:
    case TaskName::reverse:
      break;
  }
  return digits_ + 1;
}

Problem Task::problem(std::int64_t seed, std::int32_t step, std::int64_t index) const {
  const std::uint64_t a = (static_cast<std::uint64_t>(step) << 32) | static_cast<std::uint64_t>(index);
  const auto draw = [&](std::uint64_t which) {
    Digits digits;
    for (std::int64_t i = 0; i < digits_; ++i) {
      const Philox4 words = random_words(static_cast<std::uint64_t>(seed), RngPurpose::task, a,
                                         (which << 32) | static_cast<std::uint64_t>(i));
      digits.push_back(static_cast<std::int32_t>(std::uint64_t{words[0]} * 10 >> 32));
    }
    return digits;
  };
  const Digits first = draw(0);
  Problem p{{token::bos}, {}};
  append(p.prompt, first);
  Digits answer = first;
  switch (name_) {
    case TaskName::digit_sum:
      answer = digits_of(std::accumulate(first.begin(), first.end(), std::int64_t{0}), answer_tokens() - 1);
      break;
    case TaskName::sort:
      std::ranges::sort(answer);
      break;
    case TaskName::reverse:
      std::ranges::reverse(answer);
      break;
    case TaskName::add: {
      const Digits second = draw(1);
      p.prompt.push_back(token::plus);
      append(p.prompt, second);
      answer = sum_of(first, second);
      break;
    }
    case TaskName::parity: {
      const std::int32_t sum = std::accumulate(first.begin(), first.end(), 0);
      answer = {(token::digit0 + sum) % 2};  // the id digit0 + d has the parity asked for
      break;
    }
  }
  p.prompt.push_back(token::equals);
  append(p.answer, answer);
  p.answer.push_back(token::eos);
  return p;
}

double Task::reward(std::span<const std::int32_t> response, std::span<const std::int32_t> answer) const {
  if (name_ == TaskName::parity) {
    const auto tokens =
        response.first(static_cast<std::size_t>(std::ranges::find(response, token::eos) - response.begin()));
    if (tokens.empty()) return 0.0;
    const auto right = std::ranges::count_if(tokens, [&](std::int32_t t) { return t % 2 == answer[0] % 2; });
    return static_cast<double>(right) / static_cast<double>(tokens.size());
  }
  std::size_t right = 0;
  for (std::size_t i = 0; i < std::min(response.size(), answer.size()); ++i) right += response[i] == answer[i] ? 1 : 0;
  const bool exact = right == answer.size() && response.size() == answer.size();
  return partial_credit * static_cast<double>(right) / static_cast<double>(answer.size()) +
         (exact ? 1.0 - partial_credit : 0.0);
}

double Task::chance_reward(std::int64_t vocab) const {
  const auto v = static_cast<double>(vocab);
  if (name_ == TaskName::parity) return (v - 1.0) / (2.0 * v);
  const auto n = static_cast<double>(answer_tokens());
  const double survives = (v - 1.0) / v;
  double places = 0.0;
  for (std::int64_t i = 0; i < answer_tokens(); ++i) places += std::pow(survives, static_cast<double>(i)) / v;
  return partial_credit * places / n + (1.0 - partial_credit) * std::pow(v, -n);
}

std::string Task::text(std::span<const std::int32_t> tokens) {
  std::string out;
  for (const std::int32_t t : tokens) {
    if (t == token::bos) continue;
    if (t == token::eos) out += "<eos>";
    else if (t == token::pad) out += "<pad>";
    else if (t == token::equals) out += '=';
    else if (t == token::plus) out += '+';
    else if (t >= token::digit0 && t < token::count) out += static_cast<char>('0' + t - token::digit0);
    else out += fmt::format("<{}>", t);
  }
  return out;
}

}  // namespace hotbunk
