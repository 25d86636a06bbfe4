// How many steps of which sizes an engine is expected to take for an iteration's sequences: what both prices of a
// rollout multiply, the closed form of an engine's step and the replay of a plan's blocks.
#pragma once
#include <algorithm>
#include <vector>

#include "spec/scenario.h"

namespace hotbunk {

/// Of one of `engines` engines.
struct EngineLoad {
  double sequences = 1, slots = 1, engines = 1;
  double micro_batches = 1;  // in flight: pipeline stages that have one each
  double prompt_tokens = 1;  // of a sequence, without what another one's prefix gives it
  double max_prefill_tokens = 1;
  LengthSpec responses;
};

struct EngineSchedule {
  /// So many steps, each of so much.
  struct Prefill {
    double steps = 0, tokens = 0, sequences = 0;
  };
  struct Decode {
    double steps = 0, sequences = 0;
  };
  std::vector<Prefill> first, later;  // prompts that fill the slots; that are admitted as others end
  Decode full;                        // with all slots
  std::vector<Decode> tail;           // from the last admission to the end
  double steps = 0, last = 0;         // of decode; last: sequences that run in the tail, on average
};
EngineSchedule engine_schedule(const EngineLoad&);

/// Tokens of a running sequence: its prompt and the age of its response, E[L^2] / (2 E[L]) at a random moment.
inline double held_tokens(double prompt, double response, double response_square) {
  return prompt + response_square / (2.0 * std::max(response, 1.0));
}

}  // namespace hotbunk
