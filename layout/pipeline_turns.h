// What the stages of a pipeline do in a mini-batch, turn by turn: passes, and messages in which two stages meet.
// Nothing is buffered between them, so each side of a message waits for the other.
//
// The model is cut into stages x chunks, one behind another: chunk c of stage s is model chunk c * stages + s. Edge K
// leads from model chunk K to the next one, and from the last stage back to the first. Each stage has its own order of
// passes; played against each other, with a forward pass of one unit and a backward pass of two, they say when messages
// come. A message waits until the next stage needs it, or until its own stage needs the tensor that it lies in. That
// one play is the order of all stages' turns, so none waits for ever (docs/pipelines.md).
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "layout/pipeline_schedule.h"

namespace hotbunk {

enum class StageStep : std::uint8_t {
  forward,  // passes of a micro-batch through a chunk
  backward,
  weights,      // gradients of weights that a backward pass has left behind
  output,       // messages: what a forward pass left goes to the next chunk
  gradient,     // the gradient of that comes back
  exchange,     // both at once, of two micro-batches
  park_output,  // what has arrived makes way for what arrives before it is needed
  take_output,  // and comes back
  park_gradient,
  take_gradient
};

struct StageTurn {
  StageStep step{};
  std::int64_t micro = 0;
  std::int64_t returned = -1;  // whose gradient goes back; gradient: the same as micro
  std::int64_t edge = -1;      // of a message
  std::int64_t chunk = 0;      // of a pass: of the stage's
  std::int64_t place = -1;     // of what is parked
  bool is_pass() const { return edge < 0 && place < 0; }
  friend bool operator==(const StageTurn&, const StageTurn&) = default;
};

/// What of a mini-batch is played: all of it, or forward passes alone (log-probs).
enum class PipelinePasses : std::uint8_t { both_ways, forward };

/// The passes of one stage in its order. Interleaved, a stage goes with as many micro-batches as there are stages
/// through one chunk after another; where fewer are left, those that would fill the last row up are left out.
std::vector<StageTurn> stage_passes(const Pipeline&, std::int64_t stage, std::int64_t micro_batches,
                                    PipelinePasses = PipelinePasses::both_ways);

/// A turn and when it is, in units of time; a message takes none.
struct PlayedTurn {
  StageTurn turn;
  std::int64_t begin = 0, end = 0;
};
struct PlayedPipeline {
  std::vector<std::vector<PlayedTurn>> stages;
  std::int64_t units = 0;  // from the first pass to the last
  /// Of all stages' time, what they wait: (p - 1) / (m + p - 1) in 1F1B and GPipe.
  double bubble = 0.0;
};
PlayedPipeline play_pipeline(const Pipeline&, std::int64_t micro_batches, PipelinePasses = PipelinePasses::both_ways);

/// The turns of every stage.
std::vector<std::vector<StageTurn>> pipeline_turns(const Pipeline&, std::int64_t micro_batches,
                                                   PipelinePasses = PipelinePasses::both_ways);

/// What a stage needs for mini-batches of at most so many micro-batches.
struct StageRoom {
  std::vector<std::int64_t> slots;  // by chunk: micro-batches of which it keeps activations at once
  std::int64_t parked_outputs = 0, parked_gradients = 0;
};
/// Of every stage.
std::vector<StageRoom> pipeline_room(const Pipeline&, std::int64_t micro_batches,
                                     PipelinePasses = PipelinePasses::both_ways);

/// The block of a pass in a slot, where stages have one chunk or several: "forward.0", "backward.1.0".
std::string pass_name(StageStep, std::int64_t chunks, std::int64_t chunk, std::int64_t slot);
/// Of a message over an edge, or a place for what is parked: "exchange.2", "park.gradient.0".
std::string block_name(StageStep, std::int64_t number);

/// The blocks of a stage's turns, as a plan has them: micro-batch i is in slot i mod (number of slots of its chunk).
class StageBlocks {
 public:
  /// Of blocks by name, with the number of each.
  explicit StageBlocks(const std::map<std::string, std::int32_t>& numbers);
  /// The stages' chunks; 0: these are no blocks of a pipeline's stage.
  std::int64_t chunks() const { return static_cast<std::int64_t>(slots_.size()); }
  std::string name_of(const StageTurn&) const;

 private:
  std::vector<std::int64_t> slots_;  // by chunk
};

}  // namespace hotbunk
