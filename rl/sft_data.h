// Token ids from JSONL files: supervised data, sequences to score, prompts to continue.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "base/diagnostic.h"
#include "rl/passes.h"

namespace hotbunk {

/// One sequence per line: [1, 5, 9, 2], all of whose tokens but the first are learnt, or
/// {"tokens": [1, 5, 9, 2], "prompt_length": 2}, of which the tokens after the prompt are. Blank lines are skipped.
/// Errors, all of them collected (at most 20): E208 no path, E101 unreadable, E122 not of that form, E123 a token
/// outside the vocabulary, E124 fewer than 2 tokens, more than max_tokens, or a prompt length outside [1, tokens - 1];
/// E125 no line. `limit`: where max_tokens comes from, for messages.
Result<std::vector<TokenSequence>> read_sft_data(const std::filesystem::path&, std::int64_t vocab,
                                                 std::int64_t max_tokens,
                                                 std::string_view limit = "train.micro_batch_tokens");

/// What the lines of a token file must be.
struct TokenLines {
  std::int64_t vocab = 0;
  std::int64_t max_tokens = 0;
  std::string limit;  // where max_tokens comes from, for messages
};

/// One array of at least one token id per line, nothing else; blank lines are skipped. The whole line is the prompt.
/// "-" is standard input. Errors as above.
Result<std::vector<TokenSequence>> read_token_lines(const std::filesystem::path&, const TokenLines&);

}  // namespace hotbunk
