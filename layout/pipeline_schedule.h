// In which order the stages of a pipeline pass a mini-batch on, and the blocks that a priced plan has for it; those of
// a plan that executes are in pipeline_turns.h.
//
// Stages meet in what they send, so all of them play the same row of blocks that send, and what is sent in one is
// received in it. With M passes of w warm-up passes on a stage, and w most on the first one:
//
//   fill.0 … fill.(w-1)       receives, runs forward k, sends; stages of fewer warm-up passes receive what comes early,
//                             and run their first `forward` before they receive the second of these
//   forward, backward         as often as M - w says: the next forward; sends it and receives a gradient, runs
//                             the backward of its oldest, sends that and receives the next input
//   drain.(w-1) … drain.0     the last backward passes; stages of fewer warm-up passes still have forwards beside them
//
// `forward` sends nothing: each stage plays it where it is due. A pass is a micro-batch or, interleaved, one through
// 1/chunks of a stage's layers. Source: Megatron-LM, core/pipeline_parallel/schedules.py.
//
// Zero-bubble H1 (Qi et al., 2401.10241): stage s leaves weight gradients behind by s passes. `backward` and `drain`
// have a second form, which computes those of an earlier pass while its messages are under way; what is left at the end
// are `weights`.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "layout/pipeline.h"
#include "spec/scenario.h"

namespace hotbunk {

/// Order of micro-batches in the pipeline; several chunks interleave 1F1B.
enum class PipelineSchedule : std::uint8_t { one_f_one_b, gpipe, zero_bubble };
std::string_view name_of(PipelineSchedule);
/// By the scenario's word: "interleaved" is 1F1B with a vpp above 1.
PipelineSchedule schedule_named(std::string_view word);

struct Pipeline {
  std::int64_t stages = 1, chunks = 1;  // chunks: of a stage, interleaved
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;

  /// Forward passes of a stage before its first backward pass, if there are as many. GPipe counts none: it has all of
  /// them first, in one block of each kind.
  std::int64_t warm_up(std::int64_t stage) const {
    if (schedule == PipelineSchedule::gpipe) return 0;
    return chunks == 1 ? stages - 1 - stage : 2 * (stages - 1 - stage) + (chunks - 1) * stages;
  }
  /// Warm-up passes that have a block of their own where a mini-batch has at most so many passes.
  std::int64_t fills(std::int64_t passes) const { return std::min(warm_up(0), passes); }
  bool defers_weights() const { return schedule == PipelineSchedule::zero_bubble; }
};
Pipeline pipeline_of(const Scenario&);

/// One block of a mini-batch on a stage, and the micro-batch whose sizes it has.
enum class PipelineBlock : std::uint8_t { begin, fill, forward, backward, drain, weights, step };
std::string_view name_of(PipelineBlock);
struct PipelineStep {
  PipelineBlock block{};
  std::int64_t number = 0;  // of a fill or drain
  std::int64_t micro = 0;
  bool weights = false;  // of backward and drain: weight gradients of an earlier pass in it, too
  friend bool operator==(const PipelineStep&, const PipelineStep&) = default;
};
/// The blocks between begin and step. `fills`: those that the plan has.
std::vector<PipelineStep> pipeline_steps(const Pipeline&, std::int64_t stage, std::int64_t micro_batches,
                                         std::int64_t fills);

/// The blocks of the plan's phase, in its order: begin, fill.0 …, forward, backward, drain.(fills - 1) …, step. Where
/// the schedule defers weight gradients, each backward and drain is followed by its second form, and weights come
/// before the step.
std::vector<PipelineStep> pipeline_blocks(const Pipeline&, std::int64_t fills);
std::string name_of(const PipelineStep&);  // "fill.2", "backward.weights"
/// Index among them.
std::int32_t pipeline_block_index(const Pipeline&, const PipelineStep&, std::int64_t fills);

}  // namespace hotbunk
