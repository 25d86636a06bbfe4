// Megatron's packed weights: how one tensor-parallel rank holds QKV and gate-up, and what it contributes on export.
#pragma once
#include <cstdint>

#include "layout/rollout_weights.h"

namespace hotbunk {

/// linear_qkv of one rank, packed by query group: for each of its KV heads [its query heads; key head; value head].
/// kv_heads >= tp: kv_heads / tp whole groups. kv_heads < tp: the rank's heads / tp query heads and the KV head that it
/// shares with tp / kv_heads - 1 neighbours. Shape: ((heads + 2 max(kv_heads, tp)) / tp * head_dim, hidden).
LocalWeight megatron_qkv(const ModelSpec&, int layer, std::int64_t tp, std::int64_t tp_rank);

/// linear_fc1 of one rank: [gate rows; up rows] of this rank, (2 intermediate / tp, hidden). Concatenated over ranks it
/// is interleaved, which is why the pieces, not a reshape, lead back to gate_proj and up_proj.
LocalWeight megatron_gate_up(const ModelSpec&, int layer, std::int64_t tp, std::int64_t tp_rank);

/// Whether the rank contributes its keys and values when weights are exported: of the ranks that hold the same KV head
/// the first one, (tp_rank * kv_heads) mod tp == 0.
constexpr bool exports_key_value(std::int64_t kv_heads, std::int64_t tp, std::int64_t tp_rank) {
  return kv_heads >= tp || tp_rank * kv_heads % tp == 0;
}

}  // namespace hotbunk
