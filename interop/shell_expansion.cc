#include "interop/shell_expansion.h"

#include <fmt/format.h>
#include <fnmatch.h>

#include <cctype>
#include <charconv>
#include <string_view>
#include <utility>

#include "interop/shell_lexer.h"

namespace hotbunk {
namespace {

using std::size_t;

bool is_name_char(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

size_t end_of_name(const std::string& text, size_t at) {
  while (at < text.size() && is_name_char(text[at])) ++at;
  return at;
}

/// Integer arithmetic of $(( … )): + - * / % ( ) and names. Precedence climbing over the text.
class Arithmetic {
 public:
  Arithmetic(const ShellVariables& variables, std::string text) : variables_(variables), text_(std::move(text)) {}
  std::optional<std::int64_t> value() {
    const auto out = sum();
    skip();
    return at_ == text_.size() && known_ ? std::optional(out) : std::nullopt;
  }

 private:
  void skip() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_])) != 0) ++at_;
  }
  char peek() {
    skip();
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  std::int64_t sum() {
    std::int64_t left = term();
    for (char c = peek(); c == '+' || c == '-'; c = peek()) {
      ++at_;
      const std::int64_t right = term();
      known_ = known_ &&
               !(c == '+' ? __builtin_add_overflow(left, right, &left) : __builtin_sub_overflow(left, right, &left));
    }
    return left;
  }
  std::int64_t term() {
    std::int64_t left = factor();
    for (char c = peek(); c == '*' || c == '/' || c == '%'; c = peek()) {
      ++at_;
      const std::int64_t right = factor();
      if (c == '*') known_ = known_ && !__builtin_mul_overflow(left, right, &left);
      else if (right == 0 || right == -1) known_ = known_ && right == -1, left = c == '/' ? -left : 0;
      else left = c == '/' ? left / right : left % right;
    }
    return left;
  }
  std::int64_t factor() {
    const char c = peek();
    if (c == '-' || c == '+') {
      ++at_;
      const std::int64_t inner = factor();
      return c == '-' ? -inner : inner;
    }
    if (c == '(') {
      if (++depth_ > 100) return unknown();
      ++at_;
      const std::int64_t inner = sum();
      if (peek() != ')') return unknown();
      ++at_;
      return inner;
    }
    const size_t end = end_of_name(text_, at_);
    const std::string name = text_.substr(at_, end - at_);
    at_ = end;
    if (name.empty()) return unknown();
    const ShellValue* const variable = variables_.find(name);
    const bool number = std::isdigit(static_cast<unsigned char>(name[0])) != 0;
    const std::string digits = number                                                ? name
                               : variable == nullptr || variable->values.size() != 1 ? ""
                                                                                     : variable->values[0];
    std::int64_t out = 0;
    const auto [stop, error] = std::from_chars(digits.data(), digits.data() + digits.size(), out);
    return error == std::errc() && stop == digits.data() + digits.size() ? out : unknown();
  }
  std::int64_t unknown() {
    known_ = false;
    at_ = text_.size();
    return 0;
  }

  const ShellVariables& variables_;
  std::string text_;
  size_t at_ = 0;
  int depth_ = 0;
  bool known_ = true;
};

std::string dollar(const std::string& name) { return fmt::format("${}", name); }

std::string without_quotes(const std::string& text) {
  std::string out;
  for (const char c : text)
    if (c != '"' && c != '\'') out += c;
  return out;
}

/// ${NAME%pattern} and ${NAME#pattern}, the longest match where doubled.
std::string trimmed(const std::string& value, std::string_view operation, const std::string& pattern) {
  const bool longest = operation.size() == 2, back = operation[0] == '%';
  for (size_t i = 0; i <= value.size(); ++i) {
    const size_t taken = longest ? value.size() - i : i;
    const std::string part = back ? value.substr(value.size() - taken) : value.substr(0, taken);
    if (fnmatch(pattern.c_str(), part.c_str(), 0) == 0)
      return back ? value.substr(0, value.size() - taken) : value.substr(taken);
  }
  return value;
}

}  // namespace

/// The fields so far: the last one is being written.
struct ShellVariables::Field {
  ShellValue out;
  std::string text;
  bool open = false;     // `text` is a field, though it may be empty
  bool nothing = false;  // "$@" or "${A[@]}" of no values: no field, though there are quotes
  SourceLocation place;

  void add(std::string_view more) { text.append(more), open = true; }
  void add(char c) { text.push_back(c), open = true; }
  void close() {
    if (open) {
      out.values.push_back(std::exchange(text, {}));
      out.places.push_back(std::exchange(place, {}));
    }
    open = false;
  }
  void undefined(const std::string& written) {
    out.undefined.insert(written);
    add(written);
  }
  /// What an expansion gives: split at blanks outside of quotes.
  void give(const std::string& value, bool splits) {
    if (!splits) return add(value);
    for (const char c : value) {
      if (std::isspace(static_cast<unsigned char>(c)) != 0) close();
      else add(c);
    }
  }
};

void ShellVariables::variable(Field& to, const std::string& name, bool splits) const {
  if (name == "@" || name == "*") return void(to.nothing = true);  // the script's own arguments: none
  if (const ShellValue* const known = find(name)) {
    to.out.undefined.insert(known->undefined.begin(), known->undefined.end());
    if (!known->values.empty()) to.give(known->values.front(), splits);
    return;
  }
  to.undefined(dollar(name));
}

void ShellVariables::braces(Field& to, const std::string& inside, const std::string& whole, bool splits) const {
  const bool length = inside.starts_with('#') && inside.size() > 1;
  const size_t begin = length ? 1 : 0, end = end_of_name(inside, begin);
  const std::string name = inside.substr(begin, end - begin);
  std::string rest = inside.substr(end);
  const ShellValue* const known = find(name);
  const bool all = rest == "[@]" || rest == "[*]";
  if (length) {
    if (known == nullptr) return to.undefined(whole);
    return to.add(fmt::format("{}", all ? known->values.size() : known->values.empty() ? 0 : known->values[0].size()));
  }
  if (all) {  // each value a field of its own; of none, nothing
    if (known == nullptr) return to.undefined(whole);
    to.out.undefined.insert(known->undefined.begin(), known->undefined.end());
    to.nothing = known->values.empty();
    for (size_t i = 0; i < known->values.size(); ++i) {
      if (i > 0) to.close();
      if (i < known->places.size()) to.place = known->places[i];
      to.give(known->values[i], splits);
    }
    return;
  }
  if (name.empty()) return inside == "@" || inside == "*" ? variable(to, inside, splits) : to.undefined(whole);
  if (rest.empty()) return variable(to, name, splits);
  const bool empty = known == nullptr || known->values.empty() || known->values.front().empty();
  for (const std::string_view operation : {":-", "-", ":=", "=", ":+", "+", ":?", "?"}) {
    if (!rest.starts_with(operation)) continue;
    const std::string other = rest.substr(operation.size());
    const bool missing = operation[0] == ':' ? empty : known == nullptr;
    const char kind = rest[operation[0] == ':' ? 1 : 0];
    if (kind == '+') return missing ? void() : expand_into(to, other, splits);
    if (!missing) return variable(to, name, splits);
    if (kind == '?') return to.undefined(dollar(name));
    return expand_into(to, other, splits);
  }
  for (const std::string_view operation : {"%%", "%", "##", "#"})
    if (rest.starts_with(operation) && known != nullptr && !known->values.empty()) {
      to.out.undefined.insert(known->undefined.begin(), known->undefined.end());
      const std::string pattern = without_quotes(rest.substr(operation.size()));
      return to.give(trimmed(known->values.front(), operation, pattern), splits);
    }
  if (rest.starts_with('[') && rest.ends_with(']') && known != nullptr)
    if (const auto index = arithmetic(rest.substr(1, rest.size() - 2));
        index && *index >= 0 && *index < static_cast<std::int64_t>(known->values.size()))
      return to.give(known->values[static_cast<size_t>(*index)], splits);
  to.undefined(whole);
}

void ShellVariables::command(Field& to, const std::string& inside, const std::string& whole, bool splits) const {
  if (inside.starts_with('(') && inside.ends_with(')')) {
    const std::string expression = inside.substr(1, inside.size() - 2);
    const ShellValue expanded = expand_text(expression);
    to.out.undefined.insert(expanded.undefined.begin(), expanded.undefined.end());
    if (const auto value = arithmetic(expanded.values.empty() ? "" : expanded.values[0]))
      return to.add(fmt::format("{}", *value));
    return to.undefined(whole);
  }
  if (inside.find("dirname") != std::string::npos || inside.find("BASH_SOURCE") != std::string::npos)
    return to.add(folder_);
  ShellValue words;
  const auto tokens = lex_shell(inside, "");
  for (std::size_t i = 0; tokens && i < tokens->size(); ++i) {
    if ((*tokens)[i].kind == ShellToken::Kind::operation) words.undefined.insert(whole);  // a pipe, a redirection
    if ((*tokens)[i].kind != ShellToken::Kind::word) continue;
    const ShellValue more = expand((*tokens)[i].text);
    words.values.insert(words.values.end(), more.values.begin(), more.values.end());
    words.undefined.insert(more.undefined.begin(), more.undefined.end());
  }
  const auto& w = words.values;
  if (!w.empty() && w[0] == "echo" && words.undefined.empty()) {
    std::string text;
    for (size_t i = 1; i < w.size(); ++i) text.append(i > 1 ? " " : "").append(w[i]);
    return to.give(text, splits);
  }
  if (w.size() >= 2 && w.size() <= 4 && w[0] == "seq" && words.undefined.empty()) {
    const auto first = w.size() > 2 ? arithmetic(w[1]) : 1, last = arithmetic(w.back());
    const auto step = w.size() > 3 ? arithmetic(w[2]) : 1;
    if (first && last && step && *step > 0 && *first >= 0 && (*last - *first) / *step < 10'000) {
      std::string text;
      for (std::int64_t i = *first; i <= *last; i += *step) text += fmt::format("{}{}", text.empty() ? "" : " ", i);
      return to.give(text, splits);
    }
  }
  to.undefined(whole.size() > 60 ? fmt::format("{}…)", whole.substr(0, 60)) : whole);
}

void ShellVariables::expand_into(Field& to, const std::string& word, bool splits) const {
  bool quoted = false;
  for (size_t at = 0; at < word.size();) {
    const char c = word[at];
    if (c == '"') {
      quoted = !quoted;
      to.open = quoted || !to.nothing || !to.text.empty();
      to.nothing = false;
      ++at;
    } else if (c == '\\' && at + 1 < word.size()) {
      const char next = word[at + 1];
      const bool stays = quoted && next != '"' && next != '\\' && next != '$' && next != '`' && next != '\n';
      if (stays) to.add(c);
      if (next != '\n') to.add(next);
      at += 2;
    } else if (c == '\'' && !quoted) {
      const size_t end = end_of_quoted(word, at);
      if (end == std::string::npos) return to.add(word.substr(at));
      to.add(word.substr(at + 1, end - at - 2));
      at = end;
    } else if (c == '`' || (c == '$' && at + 1 < word.size() && (word[at + 1] == '{' || word[at + 1] == '('))) {
      const size_t end = end_of_quoted(word, at), head = c == '`' ? 1 : 2;
      if (end == std::string::npos) return to.add(word.substr(at));
      const std::string whole = word.substr(at, end - at), inside = whole.substr(head, whole.size() - head - 1);
      if (c == '$' && word[at + 1] == '{') braces(to, inside, whole, splits && !quoted);
      else command(to, inside, whole, splits && !quoted);
      at = end;
    } else if (c == '$' && at + 1 < word.size() &&
               (is_name_char(word[at + 1]) || word[at + 1] == '@' || word[at + 1] == '*')) {
      const bool named = is_name_char(word[at + 1]);
      const size_t end = named ? end_of_name(word, at + 1) : at + 2;
      variable(to, word.substr(at + 1, end - at - 1), splits && !quoted);
      at = end;
    } else {
      to.add(c);
      ++at;
    }
  }
}

ShellValue ShellVariables::expand(const std::string& word) const {
  Field to;
  expand_into(to, word, true);
  to.close();
  return std::move(to.out);
}

ShellValue ShellVariables::expand_text(const std::string& word) const {
  Field to;
  expand_into(to, word, false);
  to.open = true;
  to.close();
  std::string joined;
  for (const auto& value : to.out.values) joined.append(joined.empty() ? "" : " ").append(value);
  return {{joined}, std::move(to.out.undefined), {}};
}

std::optional<std::int64_t> ShellVariables::arithmetic(const std::string& text) const {
  return Arithmetic(*this, text).value();
}

}  // namespace hotbunk
