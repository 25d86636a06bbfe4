#include "interop/shell_script.h"

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <optional>

#include "base/file.h"
#include "interop/shell_expansion.h"
#include "interop/shell_lexer.h"

namespace hotbunk {
namespace fs = std::filesystem;
namespace {

constexpr std::int64_t most_script_bytes = 4 << 20;
constexpr std::size_t most_sourced = 32, most_loops = 256, most_commands = 100'000;

bool is_name(const std::string& text) {
  return !text.empty() && std::isdigit(static_cast<unsigned char>(text[0])) == 0 &&
         std::ranges::all_of(text, [](unsigned char c) { return std::isalnum(c) != 0 || c == '_'; });
}

/// Walks the tokens of a script, and of those that it sources, in the order in which bash would run them.
class Interpreter {
 public:
  Interpreter(const std::string& file, const std::map<std::string, std::string>& variables)
      : variables_(folder_of(file)) {
    for (const auto& [name, value] : variables) {
      variables_.set(name, {{value}, {}, {}});
      fixed_.insert(name);
    }
  }

  Status run(const std::string& text, const std::string& file) {
    auto tokens = lex_shell(text, file);
    if (!tokens) return fail(tokens.error());
    Walk walk{std::move(*tokens), 0, folder_of(file)};
    while (!at_end(walk)) {
      list(walk, {}, true);
      if (!at_end(walk)) ++walk.at;  // a stray `fi`, `)` or `done`
    }
    return {};
  }

  ShellScript script;

 private:
  struct Walk {
    std::vector<ShellToken> tokens;
    std::size_t at = 0;
    std::string folder;
  };
  using Kind = ShellToken::Kind;
  using Known = std::optional<bool>;  // a command's success; none: only running it would tell

  static std::string folder_of(const std::string& file) {
    const std::string folder = fs::path(file).parent_path().string();
    return folder.empty() ? "." : folder;
  }

  static bool at_end(const Walk& w) { return w.tokens[w.at].kind == Kind::end; }
  static bool is(const Walk& w, Kind kind, std::string_view text) {
    return w.tokens[w.at].kind == kind && w.tokens[w.at].text == text;
  }
  static bool is_word(const Walk& w, std::string_view text) { return is(w, Kind::word, text); }
  static bool is_op(const Walk& w, std::string_view text) { return is(w, Kind::operation, text); }
  static void skip_separators(Walk& w) {
    while (is_op(w, "\n") || is_op(w, ";") || is_op(w, "&")) ++w.at;
  }
  void note(std::string text) {
    if (std::ranges::find(script.notes, text) == script.notes.end()) script.notes.push_back(std::move(text));
  }

  /// Commands up to one of `ends`, which stays. The last one's success.
  Known list(Walk& w, const std::vector<std::string>& ends, bool active) {
    Known last = true;
    bool runs = active;
    for (;;) {
      skip_separators(w);
      if (at_end(w) || is_op(w, ")") || is_op(w, ";;")) return last;
      const ShellToken& token = w.tokens[w.at];
      if (token.kind == Kind::word && std::ranges::find(ends, token.text) != ends.end()) return last;
      const std::size_t before = w.at;
      const Known done = command(w, runs);
      if (runs) last = done;
      runs = active;
      if (is_op(w, "&&")) runs = active && last.value_or(true), ++w.at;
      else if (is_op(w, "||")) runs = active && !last.value_or(true), ++w.at;
      else if (is_op(w, "|")) ++w.at;
      if (w.at == before) ++w.at;  // nothing that we know
    }
  }

  Known command(Walk& w, bool active) {
    while (is_op(w, "\n")) ++w.at;
    if (is_word(w, "!")) {
      ++w.at;
      const Known inner = command(w, active);
      return inner ? Known(!*inner) : inner;
    }
    if (is_word(w, "if")) return if_command(w, active);
    if (is_word(w, "for")) return for_command(w, active);
    if (is_word(w, "while") || is_word(w, "until")) return while_command(w);
    if (is_word(w, "case")) return case_command(w, active);
    if (is_word(w, "{")) return group(w, "}", active);
    if (is_op(w, "(")) return group(w, "", active);
    if (is_word(w, "function") ||
        (w.tokens[w.at].kind == Kind::word && is_name(w.tokens[w.at].text) && w.at + 2 < w.tokens.size() &&
         w.tokens[w.at + 1].text == "(" && w.tokens[w.at + 2].text == ")"))
      return function(w);
    return simple(w, active);
  }

  Known group(Walk& w, const std::string& closing, bool active) {
    ++w.at;
    const Known out = list(w, closing.empty() ? std::vector<std::string>{} : std::vector<std::string>{closing}, active);
    if (!at_end(w)) ++w.at;
    return out;
  }

  /// A function's body is read where it is called, not where it stands: none of the scripts that launch hides the
  /// launch in one that takes arguments.
  Known function(Walk& w) {
    if (is_word(w, "function")) ++w.at;
    const std::string name = w.tokens[w.at++].text;
    while (is_op(w, "(") || is_op(w, ")") || is_op(w, "\n")) ++w.at;
    const std::size_t body = w.at;
    command(w, false);
    functions_[name] = {
        {w.tokens.begin() + static_cast<std::ptrdiff_t>(body), w.tokens.begin() + static_cast<std::ptrdiff_t>(w.at)},
        0,
        w.folder};
    functions_[name].tokens.emplace_back();
    return true;
  }

  Known if_command(Walk& w, bool active) {
    bool taken = false;
    for (;;) {  // at if or elif
      const SourceLocation where = w.tokens[w.at].where;
      ++w.at;
      const bool asks = active && !taken;
      const Known condition = list(w, {"then"}, asks);
      if (asks && !condition)
        note(fmt::format("{}:{}: a condition that only running it would decide is taken as true", where.file,
                         where.line));
      const bool runs = asks && condition.value_or(true);
      taken = taken || runs;
      if (!at_end(w)) ++w.at;  // then
      list(w, {"elif", "else", "fi"}, runs);
      if (is_word(w, "elif")) continue;
      if (is_word(w, "else")) {
        ++w.at;
        list(w, {"fi"}, active && !taken);
      }
      if (!at_end(w)) ++w.at;  // fi
      return true;
    }
  }

  void body(Walk& w, bool active) {
    skip_separators(w);
    if (is_word(w, "do")) ++w.at;
    list(w, {"done"}, active);
  }

  Known for_command(Walk& w, bool active) {
    const SourceLocation where = w.tokens[w.at++].where;
    const std::string name = at_end(w) ? "" : w.tokens[w.at++].text;
    std::vector<std::string> values;
    if (is_word(w, "in")) {
      ++w.at;
      while (w.tokens[w.at].kind == Kind::word) {
        const ShellValue more = variables_.expand(w.tokens[w.at++].text);
        values.insert(values.end(), more.values.begin(), more.values.end());
      }
    } else if (active && name.starts_with("((")) {
      note(fmt::format("{}:{}: a loop that counts is not followed", where.file, where.line));
    }
    const std::size_t start = w.at;
    if (!active || values.empty()) {
      body(w, false);
    } else {
      for (std::size_t i = 0; i < std::min(values.size(), most_loops); ++i) {
        w.at = start;
        variables_.set(name, {{values[i]}, {}, {}});
        body(w, true);
      }
    }
    if (!at_end(w)) ++w.at;  // done
    return true;
  }

  Known while_command(Walk& w) {
    ++w.at;
    list(w, {"do"}, false);
    body(w, false);
    if (!at_end(w)) ++w.at;
    return true;
  }

  Known case_command(Walk& w, bool active) {
    ++w.at;
    const std::string value = at_end(w) ? "" : variables_.expand_text(w.tokens[w.at++].text).values[0];
    skip_separators(w);
    if (is_word(w, "in")) ++w.at;
    bool taken = false;
    for (;;) {
      skip_separators(w);
      if (at_end(w) || is_word(w, "esac")) break;
      bool matches = false;
      while (!at_end(w) && !is_op(w, ")")) {
        if (w.tokens[w.at].kind == Kind::word) {
          const std::string pattern = variables_.expand_text(w.tokens[w.at].text).values[0];
          matches = matches || fnmatch(pattern.c_str(), value.c_str(), 0) == 0;
        }
        ++w.at;
      }
      if (!at_end(w)) ++w.at;  // )
      list(w, {"esac"}, active && matches && !taken);
      taken = taken || matches;
      if (is_op(w, ";;")) ++w.at;
    }
    if (!at_end(w)) ++w.at;
    return true;
  }

  // ---- simple commands ---------------------------------------------------------------------------------------------

  void assign(const std::string& name, bool appends, ShellValue value) {
    if (fixed_.contains(name)) return;
    if (const ShellValue* const old = appends ? variables_.find(name) : nullptr) {
      value.values.insert(value.values.begin(), old->values.begin(), old->values.end());
      value.places.insert(value.places.begin(), old->places.begin(), old->places.end());
      value.undefined.insert(old->undefined.begin(), old->undefined.end());
    }
    variables_.set(name, std::move(value));
  }

  ShellValue array_of(const ShellToken& token) const {
    ShellValue out;
    for (const ShellToken& element : token.elements) {
      ShellValue more = variables_.expand(element.text);
      for (const SourceLocation& place : more.places) out.places.push_back(place.line > 0 ? place : element.where);
      out.values.insert(out.values.end(), more.values.begin(), more.values.end());
      out.undefined.insert(more.undefined.begin(), more.undefined.end());
    }
    return out;
  }

  /// NAME=value of a word, NAME+=value too.
  bool assigns(const std::string& word) {
    const auto equals = word.find('=');
    if (equals == std::string::npos || equals == 0) return false;
    const bool appends = word[equals - 1] == '+';
    const std::string name = word.substr(0, equals - (appends ? 1 : 0));
    if (!is_name(name)) return false;
    ShellValue value = variables_.expand_text(word.substr(equals + 1));
    if (const ShellValue* const old = appends ? variables_.find(name) : nullptr; old != nullptr && !old->values.empty())
      value.values[0] = old->values[0] + value.values[0];
    assign(name, false, std::move(value));
    return true;
  }

  void noted(const ShellToken& assignment) { script.assignments.push_back({assignment.text, assignment.where, {}}); }

  Known simple(Walk& w, bool active) {
    std::vector<ShellToken> words;
    bool in_test = is_word(w, "[[");
    for (; !at_end(w); ++w.at) {
      const ShellToken& token = w.tokens[w.at];
      if (token.kind == Kind::operation) {
        const bool redirects =
            token.text[0] == '<' || token.text[0] == '>' || token.text == "&>" || token.text == "&>>";
        if (in_test && token.text != "\n" && token.text != ";") {
          words.push_back(token);
          continue;
        }
        if (!redirects) break;
        if (!words.empty() && words.back().text.find_first_not_of("0123456789") == std::string::npos) words.pop_back();
        ++w.at;  // where to
        if (at_end(w)) break;
        continue;
      }
      words.push_back(token);
      if (token.text == "]]") in_test = false;
    }
    return active ? run_simple(words, w.folder) : Known(true);
  }

  Known run_simple(std::vector<ShellToken>& tokens, const std::string& folder) {
    if (script.commands.size() >= most_commands) return true;
    std::size_t first = 0;
    const auto declares = [](const std::string& word) {
      return word == "export" || word == "local" || word == "declare" || word == "readonly" || word == "typeset";
    };
    if (!tokens.empty() && declares(tokens[0].text)) {
      for (++first; first < tokens.size(); ++first)
        if (tokens[first].kind == Kind::array)
          assign(tokens[first].text, tokens[first].appends, array_of(tokens[first]));
        else if (assigns(tokens[first].text)) noted(tokens[first]);
      return true;
    }
    for (; first < tokens.size(); ++first)
      if (tokens[first].kind == Kind::array) assign(tokens[first].text, tokens[first].appends, array_of(tokens[first]));
      else if (assigns(tokens[first].text)) noted(tokens[first]);
      else break;
    if (first == tokens.size()) return true;
    tokens.erase(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(first));
    const std::string& name = tokens[0].text;
    if (name == "[" || name == "[[" || name == "test") return test(tokens);
    if (const auto f = functions_.find(name); f != functions_.end() && depth_ < most_sourced) {
      Walk call = f->second;
      ++depth_;
      const Known out = list(call, {}, true);
      --depth_;
      return out;
    }
    return spoken(tokens, folder);
  }

  /// A command of other programs: its words as bash would hand them over.
  Known spoken(const std::vector<ShellToken>& tokens, const std::string& folder) {
    ShellCommand words;
    for (const ShellToken& token : tokens) {
      const ShellValue value = token.kind == Kind::array ? array_of(token) : variables_.expand(token.text);
      for (std::size_t i = 0; i < value.values.size(); ++i) {
        const std::string& text = value.values[i];
        ShellWord word{text, i < value.places.size() && value.places[i].line > 0 ? value.places[i] : token.where, {}};
        for (const std::string& name : value.undefined)
          if (text.find(name) != std::string::npos) word.undefined.push_back(name);
        words.push_back(std::move(word));
      }
    }
    if (words.empty()) return true;
    const std::string& name = words[0].text;
    if ((name == "source" || name == ".") && words.size() > 1) return source(words[1], folder);
    if (name == "true" || name == ":") return true;
    if (name == "false") return false;
    const bool silent =
        name == "set" || name == "echo" || name == "cd" || name == "sleep" || name == "exit" || name == "return";
    if (!silent) script.commands.push_back(std::move(words));
    return silent ? Known(true) : std::nullopt;
  }

  Known source(const ShellWord& word, const std::string& folder) {
    const fs::path path = word.text;
    std::error_code ignored;
    const fs::path found = fs::is_regular_file(path, ignored) || path.is_absolute() ? path : fs::path(folder) / path;
    const auto text =
        depth_ < most_sourced ? read_file(found, most_script_bytes) : Result<std::string>(fail(Diagnostic{}));
    if (!text) {
      note(
          fmt::format("{}:{}: {} is not here: what it sets is not known", word.where.file, word.where.line, word.text));
      return true;
    }
    ++depth_;
    if (auto done = run(*text, found.string()); !done)
      note(fmt::format("{}:{}: {} is no script: {}", word.where.file, word.where.line, word.text,
                       done.error()[0].message));
    --depth_;
    return true;
  }

  // ---- conditions --------------------------------------------------------------------------------------------------

  Known test(const std::vector<ShellToken>& tokens) {
    std::vector<std::string> words;
    std::vector<bool> known;
    for (std::size_t i = 1; i < tokens.size(); ++i) {
      if (tokens[i].text == "]" || tokens[i].text == "]]") break;
      const ShellValue value = variables_.expand_text(tokens[i].text);
      words.push_back(value.values[0]);
      known.push_back(value.undefined.empty());
    }
    std::size_t at = 0;
    return any_of(words, known, at);
  }

  Known any_of(const std::vector<std::string>& w, const std::vector<bool>& known, std::size_t& at) {
    Known left = all_of(w, known, at);
    while (at < w.size() && (w[at] == "||" || w[at] == "-o")) {
      const Known right = all_of(w, known, ++at);
      if (left == true || right == true) left = true;
      else if (!left || !right) left = std::nullopt;
    }
    return left;
  }
  Known all_of(const std::vector<std::string>& w, const std::vector<bool>& known, std::size_t& at) {
    Known left = one(w, known, at);
    while (at < w.size() && (w[at] == "&&" || w[at] == "-a")) {
      const Known right = one(w, known, ++at);
      if (left == false || right == false) left = false;
      else if (!left || !right) left = std::nullopt;
    }
    return left;
  }
  Known one(const std::vector<std::string>& w, const std::vector<bool>& known, std::size_t& at) {
    if (at >= w.size()) return std::nullopt;
    if (w[at] == "!") {
      const Known inner = one(w, known, ++at);
      return inner ? Known(!*inner) : inner;
    }
    if (at + 1 < w.size() && (w[at] == "-z" || w[at] == "-n")) {
      const bool wants_empty = w[at] == "-z";
      at += 2;  // what nobody set is empty
      return (!known[at - 1] || w[at - 1].empty()) == wants_empty;
    }
    if (w[at].size() == 2 && w[at][0] == '-' && at + 1 < w.size()) {
      at += 2;  // a file's test
      return std::nullopt;
    }
    if (at + 2 < w.size() && w[at + 1] != "&&" && w[at + 1] != "||") {
      at += 3;
      return compared(w[at - 3], w[at - 2], w[at - 1], known[at - 3] && known[at - 1]);
    }
    ++at;
    return known[at - 1] ? Known(!w[at - 1].empty()) : Known(false);
  }
  Known compared(const std::string& a, const std::string& operation, const std::string& b, bool known) const {
    if (!known) return std::nullopt;
    if (operation == "=" || operation == "==") return fnmatch(b.c_str(), a.c_str(), 0) == 0;
    if (operation == "!=") return fnmatch(b.c_str(), a.c_str(), 0) != 0;
    const auto x = variables_.arithmetic(a), y = variables_.arithmetic(b);
    if (!x || !y) return std::nullopt;
    if (operation == "-eq") return *x == *y;
    if (operation == "-ne") return *x != *y;
    if (operation == "-gt" || operation == ">") return *x > *y;
    if (operation == "-ge") return *x >= *y;
    if (operation == "-lt" || operation == "<") return *x < *y;
    if (operation == "-le") return *x <= *y;
    return std::nullopt;
  }

  ShellVariables variables_;
  std::set<std::string> fixed_;  // that the caller set
  std::map<std::string, Walk> functions_;
  std::size_t depth_ = 0;
};

}  // namespace

Result<ShellScript> parse_shell_script(const std::string& text, const std::string& file,
                                       const std::map<std::string, std::string>& variables) {
  Interpreter interpreter(file, variables);
  if (auto done = interpreter.run(text, file); !done) return fail(done.error());
  return std::move(interpreter.script);
}

Result<ShellScript> read_shell_script(const fs::path& path, const std::map<std::string, std::string>& variables) {
  const auto text = read_file(path, most_script_bytes);
  if (!text) return fail(text.error());
  return parse_shell_script(*text, path.string(), variables);
}

}  // namespace hotbunk
