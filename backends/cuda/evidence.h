// What of this backend ran on hardware, and when: hardware_evidence.json, compiled in.
#pragma once
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "graph/plan.h"
#include "trace/trace.h"

namespace hotbunk::cuda {

/// The last run of what a claim is about, on a GPU.
struct HardwareRun {
  std::string date, machine, command;
};
struct Evidence {
  std::string claim;  // "conformance suite", "kernels/norm.cu"
  std::optional<HardwareRun> last_run;
};

std::vector<Evidence> hardware_evidence();
/// A kind of body: what plans call so, of whatever layer, micro-batch or size. "train.layer.backward" is one of a dense
/// layer and of one with experts: which ops it was of says `ops`.
struct BodyEvidence {
  std::string body;  // body_kind()
  std::vector<std::string>
      ops;  // "attention_backward bf16": what ran in it on hardware, in that run or before; ascending
  std::optional<HardwareRun> last_run;
};
std::vector<BodyEvidence> body_evidence();
/// "train.layer.backward" of "train.layer.backward/3", "train.backward" of "train.backward.0.12".
std::string body_kind(std::string_view name);

/// Bodies of a kind as a run executed them.
struct RunBody {
  std::string body;
  std::vector<std::string> ops;  // of all of them; ascending
};
/// By kind: the bodies that are called in phases of which some rank ran a block. Of a phase whose blocks are picked,
/// all that may be.
std::vector<RunBody> bodies_that_ran(const Plan&, std::span<const PhaseTotal>);
/// Where all ops of this body ran in one of its kind; none: at least one of them never did.
std::optional<HardwareRun> ran_on_hardware(const RunBody&, const std::vector<BodyEvidence>&);

/// "2 of 13 claims ran on hardware, the last on 2026-12-01", or "never ran on hardware".
std::string evidence_text();

}  // namespace hotbunk::cuda
