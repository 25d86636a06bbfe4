// What one block of an engine's KV cache stands for.
#pragma once
#include <cstdint>

#include "spec/scenario.h"

namespace hotbunk {

/// Tokens of a sequence that one block number stands for. The context-parallel ranks of an engine of ours have a block
/// of `rollout.block_tokens` each under it, so that together they hold cp times as many; other engines' pools are
/// counted as if whole.
inline std::int64_t block_span(const RolloutSpec& r) {
  return r.engine == RolloutEngine::hotbunk ? r.block_tokens * r.layout.cp : r.block_tokens;
}

/// Of `rollout.kv_cache_tokens` the pool of each group of ranks that has all of attention for sequences of its own.
inline std::int64_t pool_share(const RolloutSpec& r) {
  return r.engine == RolloutEngine::hotbunk ? r.kv_cache_tokens / r.layout.attention_dp : r.kv_cache_tokens;
}

}  // namespace hotbunk
