#include "rl/sft_data.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "spec/json_read.h"

namespace hotbunk {
namespace {

constexpr std::size_t max_problems = 20;  // a file that is wrong in every line is told of once, not a million times

/// One line of the file, judged; problems are appended.
class LineReader {
 public:
  /// `plain`: bare arrays, with nothing to learn in them.
  LineReader(SourceLocation where, const TokenLines& rules, bool plain, Diagnostics& problems)
      : where_(std::move(where)), rules_(rules), plain_(plain), problems_(problems) {}

  bool read(const std::string& text, TokenSequence& sequence) {
    const auto json = parse_json(text, where_.file, {}, "E122", false);
    if (!json) return problem("E122", json.error().front().message);
    const nlohmann::json* tokens = &*json;
    sequence.prompt_tokens = 1;
    if (json->is_object() && !plain_) {
      if (!json->contains("tokens")) return problem("E122", "an object without \"tokens\"");
      tokens = &(*json)["tokens"];
      if (json->contains("prompt_length")) {
        const auto& length = (*json)["prompt_length"];
        if (!length.is_number_integer())
          return problem("E122", fmt::format("\"prompt_length\" is {}, not an integer", describe_json(length)));
        sequence.prompt_tokens = length.get<std::int64_t>();
      }
    }
    if (!read_tokens(*tokens, sequence)) return false;
    if (plain_) sequence.prompt_tokens = static_cast<std::int64_t>(sequence.tokens.size());
    return check_lengths(sequence);
  }

 private:
  bool problem(const char* code, std::string message) {
    problems_.push_back({.code = code,
                         .message = std::move(message),
                         .where = where_,
                         .notes = {},
                         .help = plain_ ? "each line is [ids...]"
                                        : "each line is [ids...] or {\"tokens\": [ids...], \"prompt_length\": n}"});
    return false;
  }

  bool read_tokens(const nlohmann::json& tokens, TokenSequence& sequence) {
    if (!tokens.is_array())
      return problem("E122", fmt::format("found {}, not an array of token ids", describe_json(tokens)));
    for (const auto& id : tokens) {
      if (!id.is_number_integer()) return problem("E122", fmt::format("{} is no token id", describe_json(id)));
      const auto value = id.get<std::int64_t>();
      if (value < 0 || value >= rules_.vocab)
        return problem("E123", fmt::format("token {} is outside the vocabulary [0, {})", value, rules_.vocab));
      sequence.tokens.push_back(static_cast<std::int32_t>(value));
    }
    return true;
  }

  bool check_lengths(const TokenSequence& s) {
    const auto count = static_cast<std::int64_t>(s.tokens.size());
    if (count < (plain_ ? 1 : 2)) return problem("E124", fmt::format("{} tokens: there is nothing to predict", count));
    if (count > rules_.max_tokens)
      return problem("E124", fmt::format("{} tokens do not fit {} = {}", count, rules_.limit, rules_.max_tokens));
    if (plain_) return true;
    if (s.prompt_tokens < 1 || s.prompt_tokens >= count)
      return problem("E124", fmt::format("a prompt of {} of {} tokens", s.prompt_tokens, count));
    return true;
  }

  SourceLocation where_;
  const TokenLines& rules_;
  bool plain_;
  Diagnostics& problems_;
};

Result<std::vector<TokenSequence>> read_lines(const std::string& text, const std::string& file, const TokenLines& rules,
                                              bool plain) {
  std::vector<TokenSequence> sequences;
  Diagnostics problems;
  std::size_t begin = 0;
  for (int line = 1; begin < text.size() && problems.size() < max_problems; ++line) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string content = text.substr(begin, end - begin);
    begin = end + 1;
    if (content.find_first_not_of(" \t\r") == std::string::npos) continue;
    TokenSequence sequence;
    if (LineReader({file, line, 0}, rules, plain, problems).read(content, sequence))
      sequences.push_back(std::move(sequence));
  }
  if (!problems.empty()) return fail(std::move(problems));
  if (sequences.empty())
    return fail(
        {.code = "E125", .message = "no line holds a sequence", .where = {file, 0, 0}, .notes = {}, .help = {}});
  return sequences;
}

}  // namespace

Result<std::vector<TokenSequence>> read_sft_data(const std::filesystem::path& path, std::int64_t vocab,
                                                 std::int64_t max_tokens, std::string_view limit) {
  if (path.empty())
    return fail({.code = "E208",
                 .message = "algorithm.name is sft, but task.data names no file to learn from",
                 .where = {},
                 .notes = {},
                 .help = "set task.data to a JSONL file: one array of token ids per line"});
  auto text = read_file(path);
  if (!text) {
    text.error().front().notes.emplace_back("task.data names it");
    return fail(std::move(text.error()));
  }
  return read_lines(*text, path.string(), {vocab, max_tokens, std::string(limit)}, false);
}

Result<std::vector<TokenSequence>> read_token_lines(const std::filesystem::path& path, const TokenLines& rules) {
  auto text = read_file_or_stdin(path, most_file_bytes);
  if (!text) {
    text.error().front().notes.emplace_back("--tokens names it");
    return fail(std::move(text.error()));
  }
  return read_lines(*text, name_of_input(path), rules, true);
}

}  // namespace hotbunk
