// How finished samples travel between ranks: fixed-capacity rows, so that the exchange is one all-gather of a size the
// plan knows. The lowering sizes the buffers of the `exchange` phase with these functions and the Driver fills them.
#pragma once
#include <cstdint>

#include "layout/shard.h"
#include "spec/kv_blocks.h"
#include "spec/scenario.h"

namespace hotbunk {

/// Longest prompt and response of the scenario, in tokens: the capacities of a row.
inline std::int64_t max_prompt_tokens(const Scenario& s) {
  return static_cast<std::int64_t>(s.workload.prompt_tokens.max);
}
inline std::int64_t max_response_tokens(const Scenario& s) {
  return static_cast<std::int64_t>(s.workload.response_tokens.max);
}
inline std::int64_t max_sample_tokens(const Scenario& s) { return static_cast<std::int64_t>(s.workload.longest()); }

/// Tokens of a training micro-batch on all the ranks that share its sequences, which have as much of it each.
inline std::int64_t micro_batch_capacity(const Scenario& s) {
  return s.train.layout.held_by(s.train.micro_batch_tokens);
}

/// Samples of one iteration. SFT has one per prompt.
inline std::int64_t num_samples(const Scenario& s) {
  return s.algorithm.prompts * (s.algorithm.name == AlgorithmName::sft ? 1 : s.algorithm.samples_per_prompt);
}

/// A row of Slot::sample_rows: [sample index or -1, prompt tokens, response tokens, the tokens…], int32.
inline constexpr std::int64_t row_header_ints = 3;
inline std::int64_t row_ints(const Scenario& s) { return row_header_ints + max_sample_tokens(s); }

/// Groups of ranks of an engine that is lowered, each with sequences of its own (rollout.layout.attention_dp): a
/// scheduler, a pool and its share of slots and prefills. Of others one.
std::int64_t attention_groups(const Scenario&);
/// Sequences that a group decodes together, and tokens of its prefill step.
inline std::int64_t slots_of_group(const Scenario& s) {
  return ceil_div(s.rollout.max_running_requests, attention_groups(s));
}
inline std::int64_t prefill_of_group(const Scenario& s) {
  return ceil_div(s.rollout.max_prefill_tokens, attention_groups(s));
}

/// Samples that the router gives one group at most, and rows that one rank contributes at most: the finished samples of
/// a group are dealt round-robin over its ranks.
inline std::int64_t samples_per_group(const Scenario& s) {
  return ceil_div(num_samples(s), s.rollout.layout.dp * attention_groups(s));
}
inline std::int64_t rows_per_rank(const Scenario& s) {
  const RolloutLayout& l = s.rollout.layout;
  return ceil_div(samples_per_group(s), l.tp * l.cp * l.pp / attention_groups(s));
}

/// Sequences that one training micro-batch holds at most: the capacity of its cu_seqlens.
inline std::int64_t max_micro_batch_seqs(const Scenario& s) {
  const std::int64_t most = std::min(s.train.micro_batch_tokens, num_samples(s));
  return s.train.micro_batch_sequences > 0 ? std::min(most, s.train.micro_batch_sequences) : most;
}

/// The same samples in the micro-batches of the passes that only score: a scenario whose training micro-batches these
/// are. Its own where it has no others.
inline Scenario as_scored(Scenario s) {
  TrainSpec& t = s.train;
  if (!t.scores_apart()) return s;
  t.micro_batch_sequences = t.logprob_micro_batch_sequences;
  t.micro_batch_tokens = t.logprob_micro_batch_tokens > 0
                             ? t.logprob_micro_batch_tokens
                             : t.layout.share_of(t.logprob_micro_batch_sequences * max_sample_tokens(s));
  return s;
}

/// With those that only fill it up.
inline std::int64_t packed_seqs(const Scenario& s) {
  return max_micro_batch_seqs(s) + (s.train.layout.token_multiple() > 1 ? 1 : 0);
}

/// Micro-batches of one mini-batch on one rank at most. Samples go to the rank with the least tokens, and there into
/// the first micro-batch with room (exec/batching.h): no rank has more than an even share and one sample, and of its
/// micro-batches any two are more than one holds.
std::int64_t most_micro_batches(const Scenario&);

/// Blocks of one sequence's block table: its longest context.
inline std::int64_t max_blocks_per_seq(const Scenario& s) {
  return ceil_div(max_sample_tokens(s), block_span(s.rollout));
}

/// Tokens of one prefill step as the engine's scheduler counts them. It knows no prefixes: where an engine shares them,
/// all samples of a prompt take what one does (planner/priced prices them so), and as many times the tokens fit.
inline std::int64_t prefill_budget(const Scenario& s) {
  const bool shares = s.rollout.engine != RolloutEngine::hotbunk;
  return s.rollout.max_prefill_tokens * (shares ? s.algorithm.samples_per_prompt : 1);
}

}  // namespace hotbunk
