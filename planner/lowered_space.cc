#include "planner/lowered_space.h"

#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "lowering/sample_rows.h"
#include "planner/choices.h"
#include "planner/plan_answer.h"
#include "spec/validate.h"

namespace hotbunk {
namespace {

/// Bytes of the plans of a lowered scenario's points; each plan is asked once, by whichever thread comes first.
class PlanAnswers {
 public:
  explicit PlanAnswers(const Scenario& s) : scenario_(s), form_(s.model) {}

  bool operator()(const RlPoint& p, bool exact, RlPrice& price) {
    const Scenario there = with_point(scenario_, p);
    if (there.train.micro_batch_tokens < max_sample_tokens(there)) return false;  // E217
    if (!unsupported_to_execute(there).empty()) return false;
    if (there.algorithm.name != AlgorithmName::sft && !form_.kv_blocks(there)) return false;
    if (!exact) {
      use_mapped_bytes(form_.memory(there, Placed::gapless), price);
      return true;
    }
    // The order of an engine's ranks changes who sends to whom, and no buffer.
    const Key key{there.train.micro_batch_tokens, there.train.recompute,         p.sleeps(),
                  there.rollout.layout.tp,        there.rollout.memory_fraction, there.sync.bucket_bytes};
    {
      const std::scoped_lock lock(mutex_);
      if (const auto known = exact_.find(key); known != exact_.end()) {
        use_mapped_bytes(known->second, price);
        return true;
      }
    }
    const FormMemory memory = form_.memory(there, Placed::each);
    use_mapped_bytes(memory, price);
    const std::scoped_lock lock(mutex_);
    exact_.emplace(key, memory);
    return true;
  }

 private:
  using Key = std::tuple<std::int64_t, Recompute, bool, std::int64_t, double, std::int64_t>;
  const Scenario& scenario_;
  PlanForm form_;
  std::mutex mutex_;
  std::map<Key, FormMemory> exact_;
};

}  // namespace

PlanBytes plan_bytes(const Scenario& s) {
  return [answers = std::make_shared<PlanAnswers>(s)](const RlPoint& p, bool exact, RlPrice& price) {
    return (*answers)(p, exact, price);
  };
}

void keep_what_executes(RlSpace& space, SyncMechanism bucketed) {
  TrainSpace& t = space.train;
  t.tp = t.pp = t.vpp = t.cp = t.ulysses = t.ep = t.etp = {1};
  t.sp = t.optimizer_on_host = {false};
  t.sharding = {Sharding::fsdp};
  std::erase_if(space.placement, [](const PlacementChoice& p) { return p.mode != PlacementMode::colocated; });
  space.attention_dp = {1};
  space.whole_experts = {false};
  space.sync = {bucketed};
}

}  // namespace hotbunk
