#include "planner/answers/lowered_space.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "lowering/sample_rows.h"
#include "planner/answers/choices.h"
#include "planner/answers/plan_answer.h"
#include "planner/answers/plan_shifts.h"
#include "spec/validate.h"

namespace hotbunk {
namespace {

/// Bytes and shifts of the plans of a lowered scenario's points. Each plan is asked once, by whichever thread comes
/// first, and the slow part of it, transients, once for all plans that train alike and once for all that roll out and
/// synchronise alike, however large the KV pool is. So all answers are exact.
class PlanAnswers {
 public:
  PlanAnswers(const Scenario& s, const CostModel& cost) : scenario_(s), cost_(cost), form_(s.model) {}

  bool operator()(const RlPoint& p, RlPrice& price) {
    RlPoint key = p;
    key.rollout.strided = false;  // the order of an engine's ranks changes who sends to whom, and no buffer
    const std::optional<Answer> answer = known_or(answers_, key, [&] { return ask(key); });
    if (!answer) return false;
    const RlPrice& bytes = answer->bytes;
    price.train_bytes = bytes.train_bytes, price.rollout_bytes = bytes.rollout_bytes;
    price.sync_bytes = bytes.sync_bytes, price.wake_bytes = bytes.wake_bytes;
    price.host_bytes = bytes.host_bytes;
    use_plan_shifts(answer->shifts, price);
    return true;
  }

 private:
  struct Answer {
    RlPrice bytes;  // nothing else of it
    ShiftsSeconds shifts;
  };
  template <class Value>
  using Known = std::map<RlPoint, Value>;

  /// Asked outside of the lock: two threads may ask the same, and both get the answer of the first.
  template <class Value, class Ask>
  Value known_or(Known<Value>& known, const RlPoint& key, Ask&& value_of) {
    {
      const std::scoped_lock lock(mutex_);
      if (const auto at = known.find(key); at != known.end()) return at->second;
    }
    Value value = value_of();
    const std::scoped_lock lock(mutex_);
    return known.emplace(key, std::move(value)).first->second;
  }

  /// None where nothing lowers the point.
  std::optional<Answer> ask(const RlPoint& p) {
    const Scenario there = with_point(scenario_, p);
    if (there.train.micro_batch_tokens < max_sample_tokens(there)) return std::nullopt;  // E217
    if (!unsupported_to_execute(there).empty()) return std::nullopt;
    if (there.algorithm.name != AlgorithmName::sft && !form_.kv_blocks(there)) return std::nullopt;
    PhaseBytes transients = of_training(p, there);
    const PhaseBytes others = of_others(p, there);
    for (std::size_t i = 0; i < num_plan_phases; ++i) transients[i] = std::max(transients[i], others[i]);
    Answer out{.bytes = {}, .shifts = shifts_seconds(form_.shifts(there, transients), cost_)};
    use_mapped_bytes(form_.mapped(there, transients), out.bytes);
    return out;
  }

  PhaseBytes of_training(const RlPoint& p, const Scenario& there) {
    RlPoint key;
    key.train = p.train;
    return known_or(training_, key, [&] { return form_.transients(there, Placed::each, phases(there, true)); });
  }
  PhaseBytes of_others(const RlPoint& p, const Scenario& there) {
    RlPoint key;
    key.train.dp = p.train.ranks(), key.rollout.tp = p.rollout.tp, key.bucket_bytes = p.bucket_bytes;
    key.transition = p.transition;  // a sync from the host stages more
    return known_or(others_, key, [&] { return form_.transients(there, Placed::each, phases(there, false)); });
  }
  static PlanPhases phases(const Scenario& s, bool of_training) {
    PlanPhases out = plan_phases_of(s);
    for (std::size_t i = 0; i < num_plan_phases; ++i)
      out[i] = out[i] && is_training(static_cast<PlanPhase>(i)) == of_training;
    return out;
  }

  const Scenario& scenario_;
  const CostModel& cost_;
  PlanForm form_;
  std::mutex mutex_;
  Known<std::optional<Answer>> answers_;
  Known<PhaseBytes> training_, others_;
};

}  // namespace

PlanBytes plan_bytes(const Scenario& s, const CostModel& cost) {
  return [answers = std::make_shared<PlanAnswers>(s, cost)](const RlPoint& p, RlPrice& price) {
    return (*answers)(p, price);
  };
}

void keep_what_executes(RlSpace& space, const Scenario& s, SyncMechanism bucketed) {
  TrainSpace& t = space.train;
  t.tp = t.pp = t.vpp = t.cp = t.ulysses = t.ep = t.etp = {1};
  t.sp = t.optimizer_on_host = {false};
  t.schedule = {PipelineSchedule::one_f_one_b};
  t.shard = {-1};
  t.sharding = {Sharding::fsdp};
  std::erase_if(space.placement, [](const PlacementChoice& p) { return p.mode != PlacementMode::colocated; });
  space.rollout_pp = space.rollout_cp = {1};
  space.attention_dp = {1};
  space.whole_experts = {false};
  space.sync = {bucketed};
  // Any legal order executes; tried are ours, in which each part sleeps as soon as the sync allows, and the scenario's.
  const TransitionOrder own = rl_point_of(s).transition;
  std::erase_if(space.transition, [&](const TransitionOrder& o) {
    const auto ours = transition_from("hotbunk", training_sleeps(o), s.rollout.sleep);
    return o != own && (!ours || *ours != o);
  });
}

}  // namespace hotbunk
