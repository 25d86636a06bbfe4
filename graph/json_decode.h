// Reading plans and traces back: every access is checked, and a fault knows the path of the value
// ("programs[0].ops[17]"). Only the *.cc files of plan_json and trace_json include this.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/diagnostic.h"

namespace hotbunk::decode {

/// Thrown inside a reader, caught where it returns its Result.
struct Fault {
  Diagnostic diagnostic;
};

/// The codes that the faults of one kind of file carry.
struct Codes {
  const char* wrong_type;
  const char* out_of_range;
};

/// A JSON value and the way to it. Cheap: the path is only spelled out when there is a fault.
class Value {
 public:
  Value(const nlohmann::json& json, const std::string& file, const Codes& codes)
      : json_(&json), file_(&file), codes_(&codes) {}

  std::size_t size() const { return json_->size(); }
  bool is_string() const { return json_->is_string(); }
  bool is_integer() const { return json_->is_number_integer(); }
  bool is_array() const { return json_->is_array(); }
  bool is_null() const { return json_->is_null(); }

  Value operator[](std::string_view key) const;  // of an object; fault when absent
  bool has(std::string_view key) const;          // fault when not an object
  std::vector<std::string> keys() const;         // of an object
  Value at(std::size_t index) const;             // of an array; fault when absent
  /// The size of an array, between the bounds.
  std::size_t array(std::size_t least = 0, std::size_t most = SIZE_MAX) const;

  std::int64_t integer(std::int64_t least, std::int64_t most) const;
  std::int32_t int32(std::int64_t least, std::int64_t most) const {
    return static_cast<std::int32_t>(integer(least, most));
  }
  double real() const;  // a number, or "inf", "-inf", "nan"
  bool boolean() const;
  const std::string& text() const;

  /// The enumerator among the first `count` whose name_of is this text.
  template <class Enum>
  Enum name(int count) const {
    const std::string& found = text();
    for (int i = 0; i < count; ++i)
      if (found == name_of(static_cast<Enum>(i))) return static_cast<Enum>(i);
    unknown_name(found);
  }

  [[noreturn]] void wrong_type(std::string_view expected) const;
  [[noreturn]] void out_of_range(const std::string& what) const;
  [[noreturn]] void unknown_name(const std::string& found) const;
  std::string path() const;

 private:
  Value(const nlohmann::json& json, const Value& parent, std::string_view key, std::size_t index)
      : json_(&json), file_(parent.file_), codes_(parent.codes_), parent_(&parent), key_(key), index_(index) {}

  const nlohmann::json* json_;
  const std::string* file_;
  const Codes* codes_;
  const Value* parent_ = nullptr;  // alive while this is: values are read by descent
  std::string_view key_;           // of a literal
  std::size_t index_ = 0;
};

}  // namespace hotbunk::decode
