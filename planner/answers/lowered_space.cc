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

/// Bytes of the plans of a lowered scenario's points; each plan is asked once, by whichever thread comes first.
class PlanAnswers {
 public:
  explicit PlanAnswers(const Scenario& s) : scenario_(s), form_(s.model) {}

  bool operator()(const RlPoint& p, bool exact, RlPrice& price) {
    RlPoint key = p;
    key.rollout.strided = false;  // the order of an engine's ranks changes who sends to whom, and no buffer
    auto& known = exact ? exact_ : least_;
    {
      const std::scoped_lock lock(mutex_);
      if (const auto at = known.find(key); at != known.end()) return use(at->second, price);
    }
    const std::optional<FormMemory> memory = ask(key, exact ? Placed::each : Placed::gapless);
    std::optional<RlPrice> answer;
    if (memory) use_mapped_bytes(*memory, answer.emplace());
    const std::scoped_lock lock(mutex_);
    return use(known.emplace(key, answer).first->second, price);
  }

 private:
  /// None where nothing lowers the point.
  std::optional<FormMemory> ask(const RlPoint& p, Placed placed) const {
    const Scenario there = with_point(scenario_, p);
    if (there.train.micro_batch_tokens < max_sample_tokens(there)) return std::nullopt;  // E217
    if (!unsupported_to_execute(there).empty()) return std::nullopt;
    if (there.algorithm.name != AlgorithmName::sft && !form_.kv_blocks(there)) return std::nullopt;
    return form_.memory(there, placed);
  }

  static bool use(const std::optional<RlPrice>& bytes, RlPrice& price) {
    if (!bytes) return false;
    price.train_bytes = bytes->train_bytes, price.rollout_bytes = bytes->rollout_bytes;
    price.sync_bytes = bytes->sync_bytes, price.wake_bytes = bytes->wake_bytes;
    price.host_bytes = bytes->host_bytes;
    return true;
  }

  using Answers = std::map<RlPoint, std::optional<RlPrice>>;  // of a price only the bytes
  const Scenario& scenario_;
  PlanForm form_;
  std::mutex mutex_;
  Answers least_, exact_;
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
