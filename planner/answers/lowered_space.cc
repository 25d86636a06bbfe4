#include "planner/answers/lowered_space.h"

#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "lowering/sample_rows.h"
#include "planner/answers/choices.h"
#include "planner/answers/plan_answer.h"
#include "spec/validate.h"

namespace hotbunk {
namespace {

/// Bytes of the plans of a lowered scenario's points. Each plan is asked once, and of those that differ in nothing but
/// what sleeps and how large the KV pool is, the transients are walked once, by whichever thread comes first.
class PlanAnswers {
 public:
  explicit PlanAnswers(const Scenario& s) : scenario_(s), form_(s.model) {}

  bool operator()(const RlPoint& p, bool exact, RlPrice& price) {
    RlPoint key = p;
    key.rollout.strided = false;  // the order of an engine's ranks changes who sends to whom, and no buffer
    const Placed placed = exact ? Placed::each : Placed::gapless;
    const std::optional<RlPrice> answer = known_or(exact ? exact_ : least_, key, [&] { return ask(key, placed); });
    if (!answer) return false;
    price.train_bytes = answer->train_bytes, price.rollout_bytes = answer->rollout_bytes;
    price.sync_bytes = answer->sync_bytes, price.wake_bytes = answer->wake_bytes;
    price.host_bytes = answer->host_bytes;
    return true;
  }

 private:
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

  /// None where nothing lowers the point; of a price only the bytes.
  std::optional<RlPrice> ask(const RlPoint& p, Placed placed) {
    const Scenario there = with_point(scenario_, p);
    if (there.train.micro_batch_tokens < max_sample_tokens(there)) return std::nullopt;  // E217
    if (!unsupported_to_execute(there).empty()) return std::nullopt;
    if (there.algorithm.name != AlgorithmName::sft && !form_.kv_blocks(there)) return std::nullopt;
    RlPoint key = p;
    key.rollout.memory_fraction = 0.0, key.transition = {};
    const PhaseBytes transients =
        known_or(placed == Placed::each ? placed_ : gapless_, key, [&] { return form_.transients(there, placed); });
    RlPrice answer;
    use_mapped_bytes(form_.mapped(there, transients), answer);
    return answer;
  }

  const Scenario& scenario_;
  PlanForm form_;
  std::mutex mutex_;
  Known<std::optional<RlPrice>> least_, exact_;
  Known<PhaseBytes> gapless_, placed_;
};

}  // namespace

PlanBytes plan_bytes(const Scenario& s) {
  return [answers = std::make_shared<PlanAnswers>(s)](const RlPoint& p, bool exact, RlPrice& price) {
    return (*answers)(p, exact, price);
  };
}

void keep_what_executes(RlSpace& space, const Scenario& s, SyncMechanism bucketed) {
  TrainSpace& t = space.train;
  t.tp = t.pp = t.vpp = t.cp = t.ulysses = t.ep = t.etp = {1};
  t.sp = t.optimizer_on_host = {false};
  t.shard = {-1};
  t.sharding = {Sharding::fsdp};
  std::erase_if(space.placement, [](const PlacementChoice& p) { return p.mode != PlacementMode::colocated; });
  space.rollout_pp = space.rollout_cp = {1};
  space.attention_dp = {1};
  space.whole_experts = {false};
  space.sync = {bucketed};
  std::erase_if(space.transition, [&](const TransitionOrder& o) {
    RlPoint p;
    p.transition = o;
    return transition_from("hotbunk", p.sleeps(), s.rollout.sleep) != o;
  });
}

}  // namespace hotbunk
