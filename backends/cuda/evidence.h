// What of this backend ran on hardware, and when: hardware_evidence.json, compiled in.
#pragma once
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backends/cuda/dnn_attention.h"
#include "backends/cuda/products.h"
#include "graph/plan.h"
#include "trace/trace.h"

namespace hotbunk::cuda {

/// The last run of something on a GPU.
struct HardwareRun {
  std::string date, machine, command, commit;
};
struct Evidence {
  std::string claim;  // "conformance suite", "kernels/norm.cu"
  std::optional<HardwareRun> last_run;
};

std::vector<Evidence> hardware_evidence();
/// A kind of body: what plans call so, of whatever layer, micro-batch or size. "train.layer.backward" is one of a dense
/// layer and of one with experts: which ops ran in it on hardware says `ops`, each with its last run there. A kind that
/// is not listed never did.
struct BodyEvidence {
  std::string body;                        // body_kind()
  std::map<std::string, HardwareRun> ops;  // by what RunBody calls them
};
std::vector<BodyEvidence> body_evidence();
/// "train.layer.backward" of "train.layer.backward/3", "train.backward" of "train.backward.0.12".
std::string body_kind(std::string_view name);

/// What an op is made of beside its kernels: who carries between ranks, which products cuBLASLt forms, and whether
/// cuDNN forms attention's gradients.
struct RanBy {
  std::string transport = "local";  // or "nccl"
  ProductPolicy products = ProductPolicy::own;
  AttentionPolicy attention = AttentionPolicy::own;
};
/// Bodies of a kind as a run executed them.
struct RunBody {
  std::string body;
  /// "linear_wgrad bf16/fp32 cublasLt" (or own), "all_gather bf16 nccl", "attention bf16 tiles" (or rows): kind, the
  /// dtypes of its numbers, and by what where there is a choice; of all of them, ascending.
  std::vector<std::string> ops;
};
/// By kind: the bodies that are called in phases of which some rank ran a block, and that ask something of a device. Of
/// a phase whose blocks are picked, all that may be.
std::vector<RunBody> bodies_that_ran(const Plan&, std::span<const PhaseTotal>, const RanBy&);
/// The oldest of the last runs of this body's ops in one of its kind; none: at least one of them never ran there.
std::optional<HardwareRun> ran_on_hardware(const RunBody&, const std::vector<BodyEvidence>&);

/// "3 kinds of bodies ran on hardware", or "never ran on hardware".
std::string bodies_text(const std::vector<BodyEvidence>&);

/// "2 of 13 claims ran on hardware, the last on 2026-12-01", or "never ran on hardware".
std::string evidence_text();

}  // namespace hotbunk::cuda
