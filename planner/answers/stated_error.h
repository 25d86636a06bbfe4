// How far a printed second may be off: what validation found, or that nothing was measured.
#pragma once
#include <optional>
#include <string>

#include "planner/rl/rl_model.h"
#include "spec/scenario.h"

namespace hotbunk {

/// Of the iteration under a framework profile; nullopt: no measured iteration stands behind it.
std::optional<Sourced> iteration_error(const std::string& framework);
/// Of a scenario's: of one that only trains it is the optimizer step's, on its GPU.
std::optional<Sourced> iteration_error(const Scenario&);
/// Of a phase on a GPU, under a framework profile; nullopt: nothing measured stands behind it.
std::optional<Sourced> phase_error(RlPhase, const std::string& gpu, const std::string& framework, SyncMechanism);
/// "± 17 %" or "unvalidated".
std::string error_text(const std::optional<Sourced>&);

}  // namespace hotbunk
