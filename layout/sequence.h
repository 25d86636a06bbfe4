// The sequence dimension: how many tokens and heads a rank of a sequence- or context-parallel group holds.
#pragma once
#include <array>
#include <cstdint>
#include <string>

#include "layout/shard.h"

namespace hotbunk {

/// Tokens after padding for Megatron sequence parallelism, where each rank of the TP group holds an equal part.
constexpr std::int64_t sequence_padded_tokens(std::int64_t tokens, std::int64_t tp) { return round_up(tokens, tp); }

/// How often Ulysses repeats each KV head before its all-to-all, so that every one of `ranks` gets a whole one.
constexpr std::int64_t ulysses_kv_repeat(std::int64_t kv_heads, std::int64_t ranks) {
  return kv_heads < ranks ? ranks / kv_heads : 1;
}

/// Whether Ulysses can split these heads over `ranks`: "" or the reason, ready for a diagnostic's note.
///   heads % ranks == 0, and kv_heads % ranks == 0 or ranks % kv_heads == 0.
std::string why_not_ulysses(std::int64_t heads, std::int64_t kv_heads, std::int64_t ranks);

/// The two parts of a sequence that rank r of a causal context-parallel group holds ("zigzag"): of 2 * ranks equal
/// chunks, r and 2 * ranks - 1 - r, so that all ranks do the same attention work. tokens % (2 * ranks) == 0.
std::array<Range, 2> zigzag_chunks(std::int64_t tokens, std::int64_t ranks, std::int64_t rank);

}  // namespace hotbunk
