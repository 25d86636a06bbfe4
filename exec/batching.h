// Training batches: samples -> mini-batches -> ranks -> micro-batches, packed without padding under a token budget.
// A pure function of lengths, so that every rank and the simulator cut the same batches.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "base/diagnostic.h"
#include "graph/tensor.h"

namespace hotbunk {

struct BatchConfig {
  std::int64_t ranks = 1;         // that train different samples
  std::int64_t mini_batches = 1;  // optimizer steps
  std::int64_t micro_batch_tokens = 1, max_seqs = 1;
};

/// Samples that one rank packs into one pass; empty where only other ranks have work left: FSDP's collectives must
/// match in number on all ranks.
struct MicroBatch {
  std::vector<std::int64_t> samples;  // ascending
  Sizes sizes;                        // tokens, seqs, causal attention pairs; all 0 when empty
};

struct MiniBatch {
  std::int64_t first_sample = 0, end_sample = 0;
  std::vector<std::vector<MicroBatch>> ranks;  // [rank][micro-batch], the same number for every rank
  std::int64_t micro_batches() const { return ranks.empty() ? 0 : static_cast<std::int64_t>(ranks.front().size()); }
};

/// Mini-batches are consecutive samples (a prompt's group stays together where sizes divide). Inside one, the longest
/// sample goes to the rank with the fewest tokens (ties: lower sample, lower rank); a rank packs its samples longest
/// first into the first micro-batch with room. tokens: one per sample.
/// E312: a sample longer than a micro-batch, or a setting below 1; more mini-batches than samples.
Result<std::vector<MiniBatch>> make_mini_batches(std::span<const std::int64_t> tokens, const BatchConfig&);

}  // namespace hotbunk
