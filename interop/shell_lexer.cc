#include "interop/shell_lexer.h"

#include <fmt/format.h>

#include <cctype>
#include <utility>

namespace hotbunk {
namespace {

using std::size_t;

bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\r'; }
bool is_operator(char c) { return c == ';' || c == '&' || c == '|' || c == '<' || c == '>' || c == '(' || c == ')'; }

/// Behind the bracket that closes `at`'s, quotes in between skipped; npos: none does.
size_t end_of_bracket(const std::string& text, size_t at, char open, char close) {
  int depth = 0;
  while (at < text.size()) {
    const char c = text[at];
    if (c == '\\') {
      at += 2;
    } else if (c == '\'' || c == '"' || c == '`') {
      at = end_of_quoted(text, at);
      if (at == std::string::npos) return at;
    } else {
      if (c == open) ++depth;
      if (c == close && --depth == 0) return at + 1;
      ++at;
    }
  }
  return std::string::npos;
}

class Lexer {
 public:
  Lexer(const std::string& text, const std::string& file) : text_(text), file_(file) {}

  Result<std::vector<ShellToken>> all() {
    std::vector<ShellToken> tokens;
    for (;;) {
      ShellToken token = next();
      if (!problem_.code.empty()) return fail(problem_);
      if (token.kind == ShellToken::Kind::operation && (token.text == "<<" || token.text == "<<-")) {
        ShellToken mark = next();
        here_documents_.push_back(unquoted(mark.text));
        continue;
      }
      const bool done = token.kind == ShellToken::Kind::end;
      tokens.push_back(std::move(token));
      if (done) return tokens;
    }
  }

 private:
  SourceLocation here() const { return {file_, line_, column_of(at_)}; }
  int column_of(size_t at) const { return static_cast<int>(at - line_start_) + 1; }

  static std::string unquoted(const std::string& word) {
    std::string out;
    for (const char c : word)
      if (c != '\'' && c != '"' && c != '\\') out += c;
    return out;
  }

  void newline(size_t at) {
    ++line_;
    line_start_ = at + 1;
  }
  void advance(size_t to) {
    for (; at_ < to; ++at_)
      if (text_[at_] == '\n') newline(at_);
  }

  void skip_blanks() {
    while (at_ < text_.size()) {
      if (is_blank(text_[at_])) ++at_;
      else if (text_.compare(at_, 2, "\\\n") == 0) advance(at_ + 2);
      else if (text_.compare(at_, 3, "\\\r\n") == 0) advance(at_ + 3);
      else if (text_[at_] == '#') at_ = std::min(text_.find('\n', at_), text_.size());
      else return;
    }
  }

  void skip_here_documents() {
    for (const std::string& mark : here_documents_) {
      while (at_ < text_.size()) {
        const size_t end = std::min(text_.find('\n', at_), text_.size());
        std::string_view line = std::string_view(text_).substr(at_, end - at_);
        while (line.starts_with('\t')) line.remove_prefix(1);
        advance(std::min(end + 1, text_.size()));
        if (line == mark) break;
      }
    }
    here_documents_.clear();
  }

  ShellToken next() {
    skip_blanks();
    ShellToken token;
    token.where = here();
    if (at_ >= text_.size()) return token;
    const char c = text_[at_];
    token.kind = ShellToken::Kind::operation;
    if (c == '\n') {
      advance(at_ + 1);
      skip_here_documents();
      token.text = "\n";
      return token;
    }
    if (text_.compare(at_, 2, "((") == 0) return bracketed(std::move(token), '(', ')');
    if (is_operator(c)) {
      static constexpr std::string_view longer[] = {"<<-", "<<<", "&>>", ">>", "<<", "&&",
                                                    "||",  ";;",  "&>",  ">&", "<&", ">|"};
      for (const std::string_view text : longer)
        if (token.text.empty() && text_.compare(at_, text.size(), text) == 0) token.text.append(text);
      if (token.text.empty()) token.text.push_back(c);
      at_ += token.text.size();
      return token;
    }
    return word(std::move(token));
  }

  /// "(( … ))" of arithmetic as one word.
  ShellToken bracketed(ShellToken token, char open, char close) {
    const size_t end = end_of_bracket(text_, at_, open, close);
    if (end == std::string::npos) return unclosed(std::move(token), "((");
    token.kind = ShellToken::Kind::word;
    token.text.assign(text_, at_, end - at_);
    advance(end);
    return token;
  }

  ShellToken unclosed(ShellToken token, std::string_view mark) {
    problem_ = {.code = "E150",
                .message = fmt::format("the script's {} does not close", mark),
                .where = token.where,
                .notes = {},
                .help = "give the launch's arguments behind --, as the shell expands them"};
    at_ = text_.size();
    return token;
  }

  ShellToken word(ShellToken token) {
    token.kind = ShellToken::Kind::word;
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (is_blank(c) || c == '\n' || (is_operator(c) && c != '(')) break;
      if (c == '(') {
        if (token.text.ends_with("=") && token.text.find_first_of("$\"'") == std::string::npos)
          return array(std::move(token));
        break;
      }
      if (c == '\\') {
        if (text_.compare(at_, 2, "\\\n") == 0) {
          advance(at_ + 2);
          continue;
        }
        token.text.append(text_, at_, 2);
        at_ = std::min(at_ + 2, text_.size());
        continue;
      }
      const bool opens = c == '\'' || c == '"' || c == '`' ||
                         (c == '$' && at_ + 1 < text_.size() && (text_[at_ + 1] == '{' || text_[at_ + 1] == '('));
      const size_t end = opens ? end_of_quoted(text_, at_) : at_ + 1;
      if (end == std::string::npos) return unclosed(std::move(token), std::string_view(&text_[at_], 1));
      token.text.append(text_, at_, end - at_);
      advance(end);
    }
    return token;
  }

  ShellToken array(ShellToken token) {
    token.kind = ShellToken::Kind::array;
    token.text.pop_back();
    token.appends = token.text.ends_with('+');
    if (token.appends) token.text.pop_back();
    ++at_;  // (
    for (;;) {
      ShellToken element = next();
      if (!problem_.code.empty()) return token;
      if (element.kind == ShellToken::Kind::end) return unclosed(std::move(token), "array");
      if (element.kind == ShellToken::Kind::operation && element.text == ")") return token;
      if (element.kind == ShellToken::Kind::word) token.elements.push_back(std::move(element));
    }
  }

  const std::string& text_;
  const std::string& file_;
  size_t at_ = 0, line_start_ = 0;
  int line_ = 1;
  std::vector<std::string> here_documents_;
  Diagnostic problem_;
};

}  // namespace

std::size_t end_of_quoted(const std::string& text, std::size_t at) {
  const char c = text[at];
  if (c == '$') return end_of_bracket(text, at + 1, text[at + 1], text[at + 1] == '{' ? '}' : ')');
  for (++at; at < text.size();) {
    if (text[at] == c) return at + 1;
    if (c == '"' && text[at] == '$' && at + 1 < text.size() && (text[at + 1] == '{' || text[at + 1] == '(')) {
      at = end_of_quoted(text, at);
      if (at == std::string::npos) return at;
      continue;
    }
    at += c != '\'' && text[at] == '\\' ? 2 : 1;
  }
  return std::string::npos;
}

Result<std::vector<ShellToken>> lex_shell(const std::string& text, const std::string& file) {
  return Lexer(text, file).all();
}

}  // namespace hotbunk
