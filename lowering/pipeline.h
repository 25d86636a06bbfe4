// Micro-batches on one stage of a pipeline. Its forward and backward passes are blocks of their own, one for each
// micro-batch that can be under way at once; so are the messages between chunks of the model, in which two stages meet:
//
//   forward.J      of the micro-batch in slot J: what its backward reads is kept
//   backward.J     of the same
//   output.K       model chunk K sends chunk K + 1 what left its last layer
//   gradient.K     chunk K + 1 sends chunk K the gradient of that
//   exchange.K     both at once, of two micro-batches
//   weights.J      zero-bubble: gradients of weights that backward.J has left behind, and what they read kept
//
// and where stages have several chunks, forward.C.J and backward.C.J of chunk C, and
//
//   park.output.I, take.output.I, park.gradient.I, take.gradient.I
//
// for what arrives before it is needed. Which comes when is the Driver's (layout/pipeline_turns.h). What a stage sends
// and receives lies in three tensors [T,H] of its own: input, output, gradient; with several chunks, a fourth for the
// gradients that it sends.
#pragma once
#include <string>
#include <vector>

#include "layout/pipeline_turns.h"
#include "lowering/train_passes.h"

namespace hotbunk {

/// What a stage sends and receives, and the blocks in which it does.
class StageMessages {
 public:
  /// Emits into a phase's first block: its tensors are allocated.
  StageMessages(const Scenario&, ProgramBuilder&, const TrainState&, const TensorSharding&, std::string prefix,
                PipelinePasses);

  const Pipeline& pipeline() const { return pipeline_; }
  std::int64_t chunks() const { return pipeline_.chunks; }
  const StageRoom& room() const { return room_; }
  bool is_first(std::int64_t chunk) const { return model_chunk(chunk) == 0; }
  bool is_last(std::int64_t chunk) const { return model_chunk(chunk) + 1 == pipeline_.stages * pipeline_.chunks; }

  const Tensor& input() const { return input_; }
  const Tensor& output() const { return output_; }
  /// That of what left a chunk, and that of what entered it; the same where there is one chunk.
  const Tensor& gradient() const { return gradient_; }
  const Tensor& returned() const { return returned_; }

  /// The blocks in which a chunk receives or sends, in front of its passes and behind them.
  void before_forward(std::int32_t phase, std::int64_t chunk);
  void after_forward(std::int32_t phase, std::int64_t chunk);
  void before_backward(std::int32_t phase, std::int64_t chunk);
  void after_backward(std::int32_t phase, std::int64_t chunk);
  void exchanges(std::int32_t phase);
  /// In the phase's last block.
  void free();

 private:
  std::int64_t model_chunk(std::int64_t chunk) const { return chunk * pipeline_.stages + stage_; }
  Tensor make(const std::string& name, const Dim& rows, const Dim& width, DType);
  void message(std::int32_t phase, StageStep, std::int64_t edge);
  /// Blocks in which the tensor moves to its places and back.
  void park(std::int32_t phase, StageStep to, StageStep back, const Tensor&, std::int64_t places);

  ProgramBuilder& b_;
  std::string prefix_;
  Pipeline pipeline_;
  std::int64_t stage_ = 0;
  StageRoom room_;
  std::vector<BufferId> allocated_;
  Tensor input_, output_, gradient_, returned_;  // without a buffer: an end of the model
  bool parks_outputs_ = false, parks_gradients_ = false;
};

/// Training's passes over the stage's chunks.
class StageTraining {
 public:
  /// Emits into the phase's first block: what its passes share is allocated.
  StageTraining(const Scenario&, ProgramBuilder&, const TrainState&, const Tensor& metrics);
  /// The blocks between the first and the step.
  void lower_passes(std::int32_t phase);
  /// In the step: its passes are over.
  void free();

 private:
  void forward(std::int64_t chunk, std::int64_t slot);
  void backward(std::int64_t chunk, std::int64_t slot);
  void weights(std::int64_t chunk, std::int64_t slot);
  std::string slot_name(std::int64_t chunk, std::int64_t slot) const;
  Tensor keep(const Tensor&);

  const Scenario& s_;
  ProgramBuilder& b_;
  const TrainState& state_;
  std::vector<BufferId> allocated_;
  MicroFeeds feeds_;
  TrainPasses passes_;
  StageMessages messages_;
  struct Slot {
    TrainPasses::Kept kept;
    PackedModel::Stream left;  // the last layer, in the model's last chunk
  };
  std::vector<std::vector<Slot>> slots_;  // by chunk
};

/// Log-probs over the chunks of a stage that has several: forward passes alone.
class StageScoring {
 public:
  StageScoring(const Scenario&, ProgramBuilder&, const TrainState&, std::int32_t phase, Weights, std::string prefix);
  void lower();

 private:
  void forward(std::int64_t chunk);

  const Scenario& s_;
  ProgramBuilder& b_;
  const TrainState& state_;
  std::int32_t phase_;
  Weights which_;
  std::string prefix_;
  std::vector<BufferId> allocated_;
  MicroFeeds feeds_;
  PackedModel model_;
  SlotLimitId layers_;
  StageMessages messages_;
};

/// In a block that has nothing else of its micro-batch: what the stage before sends, and what this one sends on.
PackedModel::Stream receive_stream(ProgramBuilder&, const TrainState&, const PackedModel&, const std::string& prefix);
void send_stream(ProgramBuilder&, const TrainState&, const PackedModel&, const std::string& prefix,
                 const PackedModel::Stream&);

}  // namespace hotbunk
