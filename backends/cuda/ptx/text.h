// Words, operands, literals and declarations of PTX text.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "backends/cuda/ptx/module.h"

namespace hotbunk::ptx {

bool is_space(char);
std::string_view trim(std::string_view);
/// The first word of a statement, cut off it.
std::string_view take_word(std::string_view&);
/// Comments become blanks: lines keep their numbers.
std::string without_comments(std::string_view text);
/// "a, {b, c}, [d+4]" as three.
std::vector<std::string_view> split_operands(std::string_view);
std::optional<std::int64_t> integer(std::string_view);
/// A literal as the bits of a slot. Integers are sign-extended; 0f and 0d are the bits of a float and a double.
std::optional<std::uint64_t> literal(std::string_view);
std::int64_t aligned(std::int64_t bytes, std::int64_t to);

/// One variable's declaration: ".align 4 .b8 name[128] = {…}" behind its state space.
struct Declaration {
  std::string name;
  std::int64_t bytes = 0, alignment = 1;
  std::vector<std::uint8_t> initial;
};
Declaration parse_declaration(std::string_view);

}  // namespace hotbunk::ptx
