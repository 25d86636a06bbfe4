// What is printed reads back as what it was: every numeric key in its unit, integers, and the figures of reports.
#include <fmt/format.h>
#include <rapidcheck.h>

#include <catch2/catch.hpp>
#include <charconv>
#include <cmath>
#include <set>

#include "base/format.h"
#include "base/parse.h"
#include "spec/scenario_keys.h"
#include "spec/yaml_tree.h"

namespace hotbunk {
namespace {

double number(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  RC_ASSERT(error == std::errc());
  RC_ASSERT(end == text.data() + text.size());
  return value;
}

/// Any double of a range, all magnitudes alike; 0 now and then where it is allowed.
rc::Gen<double> between(double low, double high) {
  return rc::gen::exec([low, high] {
    const double least = std::max(low, 1e-6), fraction = *rc::gen::inRange(0, 1'000'000) / 1e6;
    if (low <= 0 && *rc::gen::inRange(0, 10) == 0) return 0.0;
    return std::min(high, std::exp(std::log(least) + fraction * (std::log(std::max(high, least)) - std::log(least))));
  });
}

/// What a file's text for the key becomes, as the loader hands it over.
KeyValue parsed(const ScenarioKey& key, const std::string& text) {
  const auto tree = parse_yaml(text, "unit.yaml");
  RC_ASSERT(tree.has_value());
  if (key.type == KeyType::sourced) return Sourced{number(tree->find("value")->text), tree->find("source")->text};
  if (key.type == KeyType::real) return number(tree->text);
  const auto whole = parse_integer(tree->text);
  RC_ASSERT(whole.has_value());
  return *whole;
}

/// "12.30 ms" as a number of the smallest unit, and half of what its last digit stands for.
struct Shown {
  double value = 0, half = 0;
};
Shown read_shown(const std::string& text, const std::vector<std::pair<std::string, double>>& units) {
  const std::size_t space = text.find(' ');
  RC_ASSERT(space != std::string::npos);
  for (const auto& [unit, size] : units)
    if (text.substr(space + 1) == unit) {
      const std::string digits = text.substr(0, space);
      const std::size_t dot = digits.find('.');
      const double places = dot == std::string::npos ? 0.0 : static_cast<double>(digits.size() - dot - 1);
      return {number(digits) * size, 0.5 * size * std::pow(10.0, -places)};
    }
  RC_FAIL("unknown unit in " + text);
}

}  // namespace

TEST_CASE("property: a key's number is read back from what is printed of it, in its unit") {
  std::size_t keys = 0;
  std::set<std::string> units;
  for (const ScenarioKey& key : scenario_keys()) {
    if (key.type != KeyType::integer && key.type != KeyType::real && key.type != KeyType::sourced) continue;
    ++keys;
    units.insert(key.unit);
    INFO(key.path);
    CHECK(rc::check(key.path, [&] {
      Scenario first;
      const double value = *between(key.low, key.high);
      if (key.type == KeyType::integer) key.set(first, static_cast<std::int64_t>(std::floor(value)));
      else if (key.type == KeyType::real) key.set(first, value);
      else key.set(first, Sourced{value, "test, \"quoted\""});
      Scenario second;
      key.set(second, parsed(key, yaml_of(key.get(first))));
      // To the bit: bytes, rates, times and counts are the same in the scenario, and print the same again.
      RC_ASSERT(second == first);
      RC_ASSERT(yaml_of(key.get(second)) == yaml_of(key.get(first)));
      // A file's own number is kept to a millionth of its unit, of sizes in bytes to a byte.
      if (key.type == KeyType::real && key.unit != "GiB" && key.unit != "MiB")
        RC_ASSERT(std::get<double>(key.get(first)) == value);
      if (key.type == KeyType::sourced)
        RC_ASSERT(std::abs(std::get<Sourced>(key.get(first)).value - value) <= 0.5000001e-6 + 1e-15 * value);
    }));
  }
  CHECK(keys > 60);
  for (const char* unit : {"GiB", "MiB", "GB/s", "TFLOP/s", "us", "tokens", "ranks", "money/h"})
    CHECK(units.contains(unit));
}

TEST_CASE("property: integers and counts read back, what is none does not") {
  CHECK(rc::check("integers", [](std::int64_t n) {
    RC_ASSERT(parse_integer(fmt::format("{}", n)) == n);
    std::string text = format_count(n);
    // Groups of three digits from the right.
    for (std::size_t at = text.size(); at > 4; at -= 4)
      if (text[at - 4] != '-') RC_ASSERT(text[at - 4] == ',');
    std::erase(text, ',');
    RC_ASSERT(parse_integer(text) == n);
    RC_ASSERT(!parse_integer(text + "x"));
    RC_ASSERT(!parse_integer(" " + text));
    RC_ASSERT(!parse_integer(text + "9999999999999999999"));
  }));
}

TEST_CASE("property: bytes and seconds of reports are right to the last digit shown") {
  const std::vector<std::pair<std::string, double>> bytes = {{"GiB", gib}, {"MiB", mib}, {"KiB", kib}, {"B", 1}},
                                                    seconds = {{"s", 1}, {"ms", 1e-3}, {"us", 1e-6}};
  const auto holds = [](double x, const std::string& text, const auto& units, auto&& format) {
    const Shown shown = read_shown(text, units);
    RC_ASSERT(std::abs(shown.value - x) <= shown.half * (1 + 1e-9) + 1e-12 * std::abs(x));
    // Read again and printed again it is the same figure: at the edge of two units it may be the larger's.
    const Shown again = read_shown(format(shown.value), units);
    RC_ASSERT(std::abs(again.value - shown.value) <= again.half * (1 + 1e-9));
  };
  CHECK(rc::check("bytes", [&] {
    const double x = std::round(*between(0, 1e18)) * (*rc::gen::arbitrary<bool>() ? 1 : -1);
    holds(x, format_bytes(x), bytes, format_bytes);
  }));
  CHECK(rc::check("seconds", [&] {
    const double x = *between(1e-6, 1e9);
    holds(x, format_seconds(x), seconds, format_seconds);
  }));
}

}  // namespace hotbunk
