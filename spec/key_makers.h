// How rows of the table of scenario keys are made; for scenario_keys*.cc only.
#pragma once
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/format.h"
#include "spec/names.h"
#include "spec/scenario_keys.h"

namespace hotbunk {

/// The rows of `cluster` (scenario_keys_cluster.cc).
void add_cluster_keys(std::vector<ScenarioKey>& keys);

namespace key_makers {

using std::int64_t;

// Limits of plausibility: far above any cluster or job, far below what overflows 64-bit byte counts.
inline constexpr double max_ranks = 1 << 20, max_tokens = 1LL << 32, max_gib = 1 << 24, max_rate = 1e9;
/// The least that a rate keeps of its unit. Zero is none: what is not known is left out.
inline constexpr double least_rate = 1e-6;

/// An accessor that serves const and non-const scenarios alike.
#define HB_FIELD(member) ([](auto& s) -> auto& { return s.member; })

struct Text {
  std::string unit, doc, derived = {};
};

template <class Get, class Set>
// NOLINTNEXTLINE(performance-unnecessary-value-param): both are moved from, which the check does not see
ScenarioKey make(std::string path, KeyType type, double low, double high, Text text, Get get, Set set) {
  return {.path = std::move(path),
          .type = type,
          .unit = std::move(text.unit),
          .doc = std::move(text.doc),
          .low = low,
          .high = high,
          .choices = {},
          .fields = {},
          .derived = std::move(text.derived),
          .in_resolved = true,
          .only_when_set = false,
          .may_be_count = false,
          .may_be_auto = false,
          .get = std::move(get),
          .set = std::move(set)};
}

template <class F>
ScenarioKey integer(std::string path, F field, double low, double high, Text text) {
  return make(
      std::move(path), KeyType::integer, low, high, std::move(text),
      [field](const Scenario& s) -> KeyValue { return static_cast<int64_t>(field(s)); },
      [field](Scenario& s, const KeyValue& v) { field(s) = std::get<int64_t>(v); });
}

template <class F>
ScenarioKey integer_or_auto(std::string path, F field, double low, double high, Text text) {
  ScenarioKey key = integer(std::move(path), field, low, high, std::move(text));
  key.may_be_auto = true;
  return key;
}

template <class F>
ScenarioKey real(std::string path, F field, double low, double high, Text text) {
  return make(
      std::move(path), KeyType::real, low, high, std::move(text),
      [field](const Scenario& s) -> KeyValue { return field(s); },
      [field](Scenario& s, const KeyValue& v) { field(s) = std::get<double>(v); });
}

template <class F>
ScenarioKey boolean(std::string path, F field, Text text) {
  return make(
      std::move(path), KeyType::boolean, 0, 1, std::move(text),
      [field](const Scenario& s) -> KeyValue { return field(s); },
      [field](Scenario& s, const KeyValue& v) { field(s) = std::get<bool>(v); });
}

/// true, false, or a count, which is also true and has a field of its own: 0 where it was not said.
template <class F, class G>
ScenarioKey boolean_or_count(std::string path, F field, G count, double low, double high, Text text) {
  ScenarioKey key = make(
      std::move(path), KeyType::boolean, low, high, std::move(text),
      [field, count](const Scenario& s) -> KeyValue {
        if (count(s) > 0) return static_cast<int64_t>(count(s));
        return field(s);
      },
      [field, count](Scenario& s, const KeyValue& v) {
        const auto* const number = std::get_if<int64_t>(&v);
        field(s) = number != nullptr || std::get<bool>(v);
        count(s) = number != nullptr ? *number : 0;
      });
  key.may_be_count = true;
  return key;
}

template <class F>
ScenarioKey string(std::string path, F field, Text text) {
  return make(
      std::move(path), KeyType::text, 0, 0, std::move(text),
      [field](const Scenario& s) -> KeyValue { return field(s); },
      [field](Scenario& s, const KeyValue& v) { field(s) = std::get<std::string>(v); });
}

/// Words in an order, kept as one text: "a-b-c".
template <class F>
ScenarioKey steps(std::string path, F field, Text text) {
  ScenarioKey key = string(std::move(path), field, std::move(text));
  key.type = KeyType::steps;
  return key;
}

/// A list of maps with these fields; the range is the factor's.
template <class F>
ScenarioKey slowdowns(std::string path, F field, std::vector<std::string> fields, Text text) {
  ScenarioKey key = make(
      std::move(path), KeyType::slowdowns, 0.01, 1000, std::move(text),
      [field](const Scenario& s) -> KeyValue { return field(s); },
      [field](Scenario& s, const KeyValue& v) { field(s) = std::get<std::vector<Slowdown>>(v); });
  key.fields = std::move(fields);
  return key;
}

template <class F>
ScenarioKey choice(std::string path, F field, Text text) {
  using E = std::remove_reference_t<decltype(field(std::declval<Scenario&>()))>;
  ScenarioKey key = make(
      std::move(path), KeyType::choice, 0, 0, std::move(text),
      [field](const Scenario& s) -> KeyValue { return std::string(name_of(field(s))); },
      [field](Scenario& s, const KeyValue& v) {
        const auto& names = EnumNames<E>::names;
        field(s) = static_cast<E>(std::find(names.begin(), names.end(), std::get<std::string>(v)) - names.begin());
      });
  for (const auto name : EnumNames<E>::names) key.choices.emplace_back(name);
  return key;
}

/// A word that the scenario keeps as text.
template <class F>
ScenarioKey word(std::string path, F field, std::vector<std::string> choices, Text text) {
  ScenarioKey key = string(std::move(path), field, std::move(text));
  key.type = KeyType::choice;
  key.choices = std::move(choices);
  return key;
}

template <class F>
ScenarioKey floating_type(std::string path, F field, Text text) {
  ScenarioKey key = make(
      std::move(path), KeyType::choice, 0, 0, std::move(text),
      [field](const Scenario& s) -> KeyValue { return std::string(name_of(field(s))); },
      [field](Scenario& s, const KeyValue& v) { field(s) = *dtype_from(std::get<std::string>(v)); });
  for (const DType t : {DType::f32, DType::bf16, DType::f16}) key.choices.emplace_back(name_of(t));
  return key;
}

/// A size in bytes that files give in a binary unit; fractions are fine ("0.25").
template <class F>
ScenarioKey bytes(std::string path, F field, double unit_bytes, double low, double high, Text text) {
  return make(
      std::move(path), KeyType::real, low, high, std::move(text),
      [field, unit_bytes](const Scenario& s) -> KeyValue { return static_cast<double>(field(s)) / unit_bytes; },
      [field, unit_bytes](Scenario& s, const KeyValue& v) {
        field(s) = std::llround(std::get<double>(v) * unit_bytes);
      });
}

/// A rate or time with its source. Files give it in `unit` (GB/s = 1e9 bytes/s), kept to a millionth of it: so the same
/// double comes back from what was printed.
template <class F>
ScenarioKey sourced(std::string path, F field, double unit, double low, double high, Text text) {
  return make(
      std::move(path), KeyType::sourced, low, high, std::move(text),
      [field, unit](const Scenario& s) -> KeyValue {
        const Sourced& value = field(s);
        if (!value.known()) return std::monostate{};
        return Sourced{std::round(value.value / unit * 1e6) / 1e6, value.source};
      },
      [field, unit](Scenario& s, const KeyValue& v) {
        const auto& given = std::get<Sourced>(v);
        const double millionths = std::round(given.value * 1e6);
        field(s) = Sourced{unit >= 1 ? millionths * (unit / 1e6) : millionths / (1e6 / unit), given.source};
      });
}

}  // namespace key_makers
}  // namespace hotbunk
