// What `sweep --vary` takes: a key and its values, or several keys that move together.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "planner/answers/answers.h"

namespace hotbunk {
namespace {

Diagnostic bad_axis(const std::string& text, std::vector<std::string> notes = {}) {
  return {.code = "E261",
          .message = fmt::format("'{}' is no axis of a sweep", text),
          .where = {},
          .notes = std::move(notes),
          .help =
              "write key=a,b,c or key=first..last or key=first..last:step, whole or decimal, at most 10,000 "
              "values; keys that move together: key,key=a:b,c:d"};
}

/// A decimal number as digits and the places after its point: 0.15 is {15, 2}, so that steps add up exactly.
struct Decimal {
  std::int64_t digits = 0;
  int places = 0;
};

bool decimal(std::string_view text, Decimal& out) {
  const std::size_t point = text.find('.');
  std::string digits(text.substr(0, point));
  if (point != std::string_view::npos) {
    out.places = static_cast<int>(text.size() - point - 1);
    if (digits.empty() || digits == "-" || out.places < 1 || out.places > 9) return false;
    digits += text.substr(point + 1);
  }
  const auto [stop, error] = std::from_chars(digits.data(), digits.data() + digits.size(), out.digits);
  return error == std::errc{} && stop == digits.data() + digits.size() && !digits.empty();
}

/// In units of 10^-places; false: beyond 10^17.
bool scale(Decimal& d, int places) {
  constexpr std::int64_t most = 100'000'000'000'000'000;
  for (; d.places < places; ++d.places) {
    if (std::abs(d.digits) > most / 10) return false;
    d.digits *= 10;
  }
  return std::abs(d.digits) <= most;
}

std::string text_of(std::int64_t digits, int places) {
  if (places == 0) return fmt::format("{}", digits);
  std::int64_t unit = 1;
  for (int i = 0; i < places; ++i) unit *= 10;
  return fmt::format("{}{}.{:0{}}", digits < 0 ? "-" : "", std::abs(digits) / unit, std::abs(digits) % unit, places);
}

/// "8..64:8", "0.1..0.9:0.1"
bool parse_range(std::string_view text, std::vector<std::string>& values) {
  const std::size_t dots = text.find(".."), colon = text.find(':', dots);
  Decimal first, last, step{1, 0};
  const std::size_t end = std::min(colon, text.size());
  if (!decimal(text.substr(0, dots), first) || !decimal(text.substr(dots + 2, end - dots - 2), last)) return false;
  if (colon != std::string_view::npos && !decimal(text.substr(colon + 1), step)) return false;
  const int places = std::max({first.places, last.places, step.places});
  for (Decimal* d : {&first, &last, &step})
    if (!scale(*d, places)) return false;
  if (step.digits < 1 || last.digits < first.digits || (last.digits - first.digits) / step.digits >= 10'000)
    return false;
  for (std::int64_t v = first.digits; v <= last.digits; v += step.digits) values.push_back(text_of(v, places));
  return true;
}

/// At each `separator` outside of brackets, braces and quotes: values may be lists and maps.
std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  int depth = 0;
  char quote = 0;
  for (const char c : text) {
    if (quote != 0) quote = c == quote ? 0 : quote;
    else if (c == '"' || c == '\'') quote = c;
    else if (c == '[' || c == '{') ++depth;
    else if (c == ']' || c == '}') --depth;
    if (c == separator && depth == 0 && quote == 0) parts.emplace_back();
    else parts.back() += c;
  }
  return parts;
}

}  // namespace

std::string SweepAxis::name() const { return fmt::format("{}", fmt::join(keys, ", ")); }

std::string SweepAxis::label(std::size_t point) const { return fmt::format("{}", fmt::join(points[point], ":")); }

Result<SweepAxis> parse_axis(const std::string& text) {
  const std::size_t equals = text.find('=');
  if (equals == std::string::npos || equals + 1 == text.size()) return fail(bad_axis(text));
  SweepAxis out{split(text.substr(0, equals), ','), {}};
  const std::string rest = text.substr(equals + 1);
  std::vector<std::string> values = split(rest, ',');
  const auto empty = [](const std::string& s) { return s.empty(); };
  if (std::any_of(out.keys.begin(), out.keys.end(), empty) || std::any_of(values.begin(), values.end(), empty))
    return fail(bad_axis(text));
  if (out.keys.size() == 1 && values.size() == 1 && rest.find("..") != std::string::npos) {
    values.clear();
    if (!parse_range(rest, values)) return fail(bad_axis(text));
  }
  for (const std::string& value : values) {
    // One key has no use for a separator: "0:30" stays a value.
    out.points.push_back(out.keys.size() == 1 ? std::vector{value} : split(value, ':'));
    const std::vector<std::string>& point = out.points.back();
    if (point.size() != out.keys.size() || std::any_of(point.begin(), point.end(), empty))
      return fail(bad_axis(text, {fmt::format("{} keys move together, '{}' has {} value{} for them", out.keys.size(),
                                              value, point.size(), point.size() == 1 ? "" : "s")}));
  }
  return out;
}

}  // namespace hotbunk
