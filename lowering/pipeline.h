// Training's micro-batches on one stage of a pipeline. Its forward and backward passes are blocks of their own, one for
// each micro-batch that can be under way at once; so are the messages between neighbours, in which the two meet:
//
//   forward.J      of the micro-batch in slot J: what its backward reads is kept
//   backward.J     of the same
//   output.S       stage S sends stage S + 1 what left its last layer
//   gradient.S     stage S + 1 sends stage S the gradient of that
//   exchange.S     both at once, of two micro-batches
//
// Which comes when is the Driver's (layout/pipeline_schedule.h). What a stage sends and receives lies in three tensors
// [T,H] of its own: input, output, gradient.
#pragma once
#include <string>
#include <vector>

#include "layout/pipeline_schedule.h"
#include "lowering/train_passes.h"

namespace hotbunk {

class StageTraining {
 public:
  /// Emits into the phase's first block: what its passes share is allocated.
  StageTraining(const Scenario&, ProgramBuilder&, const TrainState&, const Tensor& metrics);
  /// The blocks between the first and the step.
  void lower_passes(std::int32_t phase);
  /// In the step: its passes are over.
  void free();

 private:
  void forward(std::int64_t slot);
  void backward(std::int64_t slot);
  void message(std::int32_t phase, StageStep, std::int64_t edge);
  Tensor keep(const Tensor&);

  const Scenario& s_;
  ProgramBuilder& b_;
  const TrainState& state_;
  std::vector<BufferId> allocated_;
  MicroFeeds feeds_;
  TrainPasses passes_;
  Tensor input_, output_, gradient_;  // without a buffer: an end of the model
  struct Slot {
    TrainPasses::Kept kept;
    PackedModel::Stream left;  // the last layer, on the last stage
  };
  std::vector<Slot> slots_;
};

/// In a block that has nothing else of its micro-batch: what the stage before sends, and what this one sends on.
PackedModel::Stream receive_stream(ProgramBuilder&, const TrainState&, const PackedModel&, const std::string& prefix);
void send_stream(ProgramBuilder&, const TrainState&, const PackedModel&, const std::string& prefix,
                 const PackedModel::Stream&);

}  // namespace hotbunk
