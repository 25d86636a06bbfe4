// The data that a Driver exchanges with a plan: Attr::slot of feed and fetch ops.
#pragma once
#include <cstdint>
#include <string_view>

namespace hotbunk {

enum class Slot : std::int64_t {
  // feeds of every pass over tokens
  token_ids,   // i32 [tokens]
  positions,   // i32 [tokens]
  cu_seqlens,  // i32 [seqs + 1] (capacity + 1; the rest repeats the last)
  // feeds of the rollout
  kv_slots,         // i32 [tokens]: where each token's K and V go: block * block_tokens + offset
  block_tables,     // i32 [seqs, max_blocks]
  context_lengths,  // i32 [seqs]: keys visible to the sequence's last token of this step
  last_rows,        // i32 [seqs]: row of each sequence's last token
  uniforms,         // f32 [seqs]: one uniform of the counter-based generator per sampled token
  // fetches of the rollout
  sampled_ids,    // i32 [seqs]
  sampled_logps,  // f32 [seqs]
  // exchange of finished samples
  sample_rows,   // i32 [rows, row_ints] of this rank
  sample_logps,  // f32 [rows, max_response] of this rank
  all_sample_rows,
  all_sample_logps,  // the same of all ranks, gathered
  // training and log-prob passes
  targets,        // i32 [tokens], -1 = not predicted
  old_logps,      // f32 [tokens]
  ref_logps,      // f32 [tokens]
  advantages,     // f32 [tokens]
  loss_weights,   // f32 [tokens], already divided by the mini-batch's tokens over all ranks
  logps,          // f32 [tokens] fetched
  learning_rate,  // f32 [2]: lr, optimizer step (from 1)
  metrics,        // f32 [16] fetched after an optimizer step, summed over ranks
  // weights in and out
  parameter,      // f32 elements that the op's boxes name, of the logical tensor op.name
  exported,       // f32 likewise, out
  sync_hashes,    // i64 [ranks, 2 parameters] fetched after a verified sync: each rank's sums, trained then rollout
  first_metrics,  // f32 [16] that a mini-batch's metrics start from
  // as parameter and exported, of what else a checkpoint holds
  reference_parameter,     // the frozen copy of the initial policy
  first_moment,            // AdamW's exp_avg and exp_avg_sq
  second_moment,           //
  exported_first_moment,   //
  exported_second_moment,  //
  stop_request,            // f32 [1]: 1 when this rank has been asked to stop, read as late in the step as can be
  // training passes with losses of routers
  sequence_ids,      // i32 [tokens]: which of the micro-batch's sequences a token is of, -1: filling
  sequence_weights,  // f32 [tokens]: the sum of its sequence's loss weights over the square of the sequence's length
  count
};

/// Indices into Slot::metrics: sums over ranks of per-token sums, maxima where the name says so.
enum class Metric : std::int32_t {
  loss,
  policy_loss,
  kl_ref,
  kl_old,
  clipped,
  tokens,
  entropy,
  sum_logp_gap,  // |new - old| log-prob of the loss
  max_logp_gap,
  max_rollout_gap,  // |old - rollout| log-prob, of the whole iteration, with its first mini-batch
  sum_rollout_gap,
  rollout_gap_tokens,
  grad_norm,
  clip_coefficient,
  stop_requests,  // ranks that have been asked to stop: all know it at the same step
  router_loss,    // what routers add to the loss, which has it
  count = 16
};

/// max_logp_gap and max_rollout_gap, side by side: what is reduced by maximum.
inline constexpr std::int64_t num_max_metrics = 2;

}  // namespace hotbunk
