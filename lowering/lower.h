// Scenario -> Plan: the whole RL iteration of a colocated job, or SFT, as phases of ops for every rank.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "base/diagnostic.h"
#include "graph/draft.h"
#include "graph/plan.h"
#include "lowering/model_shapes.h"
#include "lowering/phases.h"
#include "spec/scenario.h"

namespace hotbunk {

/// What a plan is for: the scenario's job, or its model asked without training. Then only the model, the ranks, the
/// capacities, dtypes and temperature of the scenario count; nothing sleeps, and there are neither gradients nor
/// moments.
///   job       the phases that DESIGN lists
///   score     load, old_logprobs
///   generate  load, start_rollout, sync, rollout
enum class Purpose : std::uint8_t { job, score, generate };

/// Errors: E250 what nothing lowers yet (with the reason); E302 no room for a KV pool. The plan returned is verified.
/// It may not fit: see fits() in trace/static_memory.h.
Result<Plan> lower(const Scenario&, Purpose = Purpose::job);

/// Some phases of a scenario's job, by themselves: what they hold and do is what they do in the whole plan, and the
/// transient section has room for them. Not verified: for who asks many variants for their bytes and traffic. Errors:
/// as lower().
using PhaseFilter = std::function<bool(PlanPhase)>;
struct PartOfPlan {
  Plan plan;
  std::vector<PhaseBytes>
      transients;  // by program: how much of its transient section each phase needs, before rounding
};
Result<PartOfPlan> lower_phases(const Scenario&, const PhaseFilter& wanted, ModelShapes&);
/// The same as it is written, all but its places and events left as they are: no program is made of it.
struct WrittenPart {
  Plan plan;  // without programs
  std::vector<Draft> drafts;
  std::vector<PhaseBytes> transients;  // of each
};
Result<WrittenPart> write_phases(const Scenario&, const PhaseFilter& wanted, ModelShapes&);

/// Neither side sleeps: what is mapped stays.
bool nothing_sleeps(const Scenario&);

/// "" or why lower() refuses the scenario's job, without lowering it.
std::string why_not_lowered(const Scenario&);

/// The same plan as lower()'s, of calls each of which is written by itself: the slow way that tests hold the other to.
Result<Plan> lower_call_by_call(const Scenario&, Purpose = Purpose::job);

/// KV blocks of one engine's pool: rollout.kv_cache_tokens, or what rollout.memory_fraction of the device leaves beside
/// the weights, but no more than max_running_requests of the longest sequences can use.
Result<std::int64_t> kv_pool_blocks(const Scenario&);
/// The same where one rank's weights take so many bytes; nullopt: no room for one sequence.
std::optional<std::int64_t> kv_pool_blocks(const Scenario&, std::int64_t weight_bytes, std::int64_t layers);

}  // namespace hotbunk
