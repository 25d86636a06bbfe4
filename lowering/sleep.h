// What sleeps and wakes between training and rollout, as buffers, whoever wrote them.
#pragma once
#include <vector>

#include "lowering/builder.h"
#include "lowering/phases.h"

namespace hotbunk {

/// A buffer of the device and its copy on the host; -1: it has none.
struct Backup {
  BufferId device = -1, host = -1;
};

struct ShiftBuffers {
  std::vector<Backup> params, moments, reference;  // of training
  std::vector<Backup> weights;                     // of the rollout; without copies they are dropped and mapped anew
  BufferId kv = -1;                                // -1: nothing is rolled out
  // Come and go with the parameters, with the cache, in sections of their own; -1: none do.
  BufferId communicators = -1, graphs = -1;
  /// The host's sections stay mapped (pinned pools); else they are there only while something sleeps in them.
  bool keeps_host = false;
};

/// What a phase of the transition puts to sleep, wakes or forgets; nothing for phases that work.
void lower_transition(ProgramBuilder&, const ShiftBuffers&, const JobPhase&, std::int32_t phase);

}  // namespace hotbunk
