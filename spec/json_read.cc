#include "spec/json_read.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/json.h"

namespace hotbunk {
namespace {

using nlohmann::json;

SourceLocation position_of(std::string_view text, const std::string& file, std::size_t offset) {
  offset = std::min(offset, text.size());
  const std::string_view before = text.substr(0, offset);
  const auto newline = before.rfind('\n');
  return {file, static_cast<int>(std::count(before.begin(), before.end(), '\n')) + 1,
          static_cast<int>(newline == std::string_view::npos ? offset : offset - newline - 1) + 1};
}

/// Builds the document while it is read, so that limits hold before memory is spent. nlohmann's SAX parser keeps its
/// own stack on the heap: nesting cannot overflow ours.
class Builder final : public nlohmann::json_sax<json> {
 public:
  explicit Builder(const JsonLimits& limits) : limits_(limits) {}

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t&) override { return add(value); }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t&) override { return refuse("binary data"); }
  bool start_object(std::size_t) override { return open(json::object()); }
  bool start_array(std::size_t) override { return open(json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    auto& object = *stack_.back();
    if (object.contains(name)) return refuse(fmt::format("key \"{}\" appears twice in one object", name));
    key_ = std::move(name);
    return true;
  }

  bool parse_error(std::size_t position, const std::string& token, const nlohmann::detail::exception& error) override {
    position_ = position;
    problem_ = error.what();
    // "[json.exception.parse_error.101] parse error at line 1, column 2: …": the position is said elsewhere.
    if (const auto colon = problem_.find(": "); colon != std::string::npos) problem_ = problem_.substr(colon + 2);
    if (problem_.size() > 200) problem_ = fmt::format("unexpected token of {} characters", token.size());
    return false;
  }

  json root;
  const std::string& problem() const { return problem_; }
  std::size_t position() const { return position_; }

 private:
  json* place(json&& value) {
    if (stack_.empty()) return &(root = std::move(value));
    json& parent = *stack_.back();
    if (parent.is_array()) return &parent.emplace_back(std::move(value));
    return &(parent[key_] = std::move(value));
  }
  bool add(json&& value) {
    if (++values_ > limits_.max_values) return refuse("too many values");
    place(std::move(value));
    return true;
  }
  bool open(json&& value) {
    if (++values_ > limits_.max_values) return refuse("too many values");
    if (static_cast<int>(stack_.size()) >= limits_.max_depth)
      return refuse(fmt::format("nested deeper than {} levels", limits_.max_depth));
    stack_.push_back(place(std::move(value)));
    return true;
  }
  bool close() {
    stack_.pop_back();
    return true;
  }
  bool refuse(std::string why) {
    problem_ = std::move(why);
    return false;
  }

  JsonLimits limits_;
  std::int64_t values_ = 0;
  std::vector<json*> stack_;  // parents are not moved while their children are open
  std::string key_, problem_;
  std::size_t position_ = 0;
};

}  // namespace

Result<json> parse_json(std::string_view text, const std::string& file, const JsonLimits& limits, const char* code,
                        bool with_position) {
  Builder builder(limits);
  bool ok = false;
  try {
    ok = json::sax_parse(text.begin(), text.end(), &builder);
  } catch (const std::exception& e) {  // bad_alloc and what nlohmann throws in spite of the SAX interface
    return fail(Diagnostic{
        .code = code, .message = fmt::format("invalid JSON: {}", e.what()), .where = {file}, .notes = {}, .help = {}});
  }
  if (ok) return std::move(builder.root);
  SourceLocation where{file};
  if (with_position && builder.position() > 0) where = position_of(text, file, builder.position() - 1);
  return fail(Diagnostic{.code = code,
                         .message = fmt::format("invalid JSON: {}", builder.problem()),
                         .where = where,
                         .notes = {},
                         .help = {}});
}

SourceLocation locate_json_key(std::string_view text, const std::string& file, std::string_view key) {
  const std::string quoted = fmt::format("\"{}\"", key);
  for (std::size_t at = text.find(quoted); at != std::string_view::npos; at = text.find(quoted, at + 1)) {
    const auto after = text.find_first_not_of(" \t\r\n", at + quoted.size());
    if (after != std::string_view::npos && text[after] == ':') return position_of(text, file, at);
  }
  return {file};
}

std::string describe_json(const json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "an array";
  if (value.is_string()) return fmt::format("the string \"{}\"", value.get<std::string>().substr(0, 40));
  if (value.is_boolean()) return value.get<bool>() ? "true" : "false";
  if (value.is_null()) return "null";
  return fmt::format("the number {}", json_text(value));
}

}  // namespace hotbunk
