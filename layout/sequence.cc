#include "layout/sequence.h"

#include <fmt/format.h>

#include "base/check.h"

namespace hotbunk {

std::string why_not_ulysses(std::int64_t heads, std::int64_t kv_heads, std::int64_t ranks) {
  if (heads % ranks) return fmt::format("{} attention heads do not divide over {} sequence ranks", heads, ranks);
  if (kv_heads % ranks && ranks % kv_heads) {
    return fmt::format("{} key/value heads neither divide over {} sequence ranks nor divide them", kv_heads, ranks);
  }
  return "";
}

std::array<Range, 2> zigzag_chunks(std::int64_t tokens, std::int64_t ranks, std::int64_t rank) {
  HB_CHECK(tokens % (2 * ranks) == 0, "{} tokens in {} zigzag chunks", tokens, 2 * ranks);
  return {even_range(tokens, 2 * ranks, rank), even_range(tokens, 2 * ranks, 2 * ranks - 1 - rank)};
}

}  // namespace hotbunk
