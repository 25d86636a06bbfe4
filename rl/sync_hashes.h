// P5 at run time: after a verified weight sync, every rollout tensor is the training tensor in the rollout dtype. Ranks
// hash what they hold (lowering/sync.cc: verify); a tensor's hash is the sum over its elements, however they are cut
// (base/hash.h: element_hash), so both sides are compared by Hugging Face name and nobody needs to know a layout.
#pragma once
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/diagnostic.h"
#include "graph/boxes.h"
#include "graph/plan.h"
#include "rl/passes.h"

namespace hotbunk {

/// One step's: the training tensors cast to the rollout dtype, by Hugging Face name.
using TensorHashes = std::map<std::string, std::uint64_t>;

/// What a sync phase fetches: each rank's sums.
struct SyncPayload final : SlotPayload {
  std::vector<std::uint64_t> sums;  // [ranks, sums of one rank]
  bool feed(Slot, std::span<std::byte>) const override { return false; }
  bool fetch(Slot slot, std::span<const std::byte> source) override;
};

/// Who hashes which part of what, read from the plan's hash_boxes ops.
class SyncHashes {
 public:
  explicit SyncHashes(const Plan&);

  struct Verdict {
    TensorHashes trained;
    /// "'NAME' on ranks 0, 1: trained 0123456789abcdef, rollout …", one for each tensor and engine that differs, and
    /// for each rank whose part of a tensor is not what another one has of it.
    std::vector<std::string> differences;
  };
  /// `sums`: of all ranks (SyncPayload::sums).
  Verdict judge(std::span<const std::uint64_t> sums) const;

 private:
  /// One rank's hash of its part of a tensor.
  struct Part {
    Rank rank = 0;
    std::size_t sum = 0;      // index into the rank's sums
    std::vector<Box> extent;  // the elements of the tensor that it covers
  };
  struct Tensor {
    std::vector<Part> trained;               // covers the tensor, some parts more than once
    std::vector<std::vector<Part>> engines;  // by engine, likewise
  };
  std::uint64_t at(const Part& p, std::span<const std::uint64_t> sums) const {
    return sums[static_cast<std::size_t>(p.rank) * sums_per_rank_ + p.sum];
  }
  /// The tensor's hash, and the ranks whose parts make it up. Ranks hold disjoint parts, or the same one: the first of
  /// each kind add up to the tensor, the others must equal the first.
  std::pair<std::uint64_t, std::vector<Rank>> hash_of(const std::string& name, const std::vector<Part>&,
                                                      std::span<const std::uint64_t> sums,
                                                      std::vector<std::string>& differences) const;

  std::size_t num_ranks_ = 0, sums_per_rank_ = 0;
  std::map<std::string, Tensor> tensors_;
};

/// A hash over all tensors' names and hashes of this step, and of all steps before it through theirs.
std::string chained_digest(const std::string& before, const TensorHashes&);

/// A line of sync_hashes.jsonl, without its end: {"step": 1, "dtype": "bf16", "digest": "…", "tensors":
/// {"lm_head.weight": "0123456789abcdef"}}; `tensors` only where it is asked for.
std::string sync_line(std::int32_t step, DType, const std::string& digest, const TensorHashes&, bool with_tensors);

}  // namespace hotbunk
