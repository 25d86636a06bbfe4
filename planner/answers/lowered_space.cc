#include "planner/answers/lowered_space.h"

#include <algorithm>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "base/check.h"
#include "layout/rollout_weights.h"
#include "lowering/lower.h"
#include "lowering/rollout.h"
#include "lowering/sample_rows.h"
#include "planner/answers/choices.h"
#include "planner/answers/plan_answer.h"
#include "planner/answers/plan_shifts.h"
#include "spec/validate.h"

namespace hotbunk {
namespace {

/// Bytes and shifts of the plans of a lowered scenario's points. A plan is put together of parts, each lowered once, by
/// whichever thread comes first: its training phase for all plans that train alike, its log-prob passes, what saves,
/// and all else for those that roll out and synchronise alike, however large the KV pool is. Parts meet in nothing but
/// the map of the transient section, so all answers are exact.
class PlanAnswers {
 public:
  PlanAnswers(const Scenario& s, const CostModel& cost) : scenario_(s), cost_(cost), shapes_(s.model) {}

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
  using Known = std::map<RlPoint, std::shared_future<Value>>;

  /// Asked outside of the lock, by whoever comes first; others wait for the answer.
  template <class Value, class Ask>
  Value known_or(Known<Value>& known, const RlPoint& key, Ask&& value_of) {
    std::optional<std::promise<Value>> mine;
    std::shared_future<Value> answer;
    {
      const std::scoped_lock lock(mutex_);
      const auto [at, added] = known.try_emplace(key);
      if (added) at->second = mine.emplace().get_future().share();
      answer = at->second;
    }
    if (!mine) return answer.get();
    try {
      mine->set_value(value_of());
    } catch (...) {  // a fault is everybody's who asks
      mine->set_exception(std::current_exception());
    }
    return answer.get();
  }

  /// None where nothing lowers the point.
  std::optional<Answer> ask(const RlPoint& p) {
    const Scenario there = with_point(scenario_, p);
    if (there.train.micro_batch_tokens < max_sample_tokens(there)) return std::nullopt;  // E217
    if (!unsupported_to_execute(there).empty()) return std::nullopt;
    const bool samples = there.algorithm.name != AlgorithmName::sft;
    if (samples && !why_not_rollout_tp(there.model, there.rollout.layout.tp).empty()) return std::nullopt;
    const Others others = of_others(p, there);
    std::int64_t pool = 0;
    if (samples) {
      const auto blocks = kv_pool_blocks(there, others.weight_bytes);
      if (!blocks) return std::nullopt;
      pool = *blocks * kv_block_bytes(there);
    }
    PhaseBytes transients = others.transients;
    for (const PhaseBytes& more : {of_training(p, there), of_passes(p, there), of_saves(p, there)})
      for (std::size_t i = 0; i < num_plan_phases; ++i) transients[i] = std::max(transients[i], more[i]);
    const JobMaps maps(there, others.chunk_bytes, *others.shifts, pool, transients);
    Answer out{.bytes = {}, .shifts = shifts_seconds(maps.shifts(), cost_)};
    use_mapped_bytes(maps.mapped(), out.bytes);
    return out;
  }

  /// What the phases that are not training's take, with the least pool that there may be.
  struct Others {
    PhaseBytes transients{};
    std::shared_ptr<const std::vector<ShiftOp>> shifts;
    std::int64_t chunk_bytes = 0, weight_bytes = 0;
  };
  Others of_others(const RlPoint& p, const Scenario& there) {
    RlPoint key;
    key.train.dp = p.train.ranks(), key.rollout.tp = p.rollout.tp, key.bucket_bytes = p.bucket_bytes;
    key.transition = p.transition;  // a sync from the host stages more
    return known_or(others_, key, [&] {
      Scenario small = there;
      small.rollout.kv_cache_tokens = max_blocks_per_seq(there) * there.rollout.block_tokens;
      const PartOfPlan part = lowered(lower_phases(
          small, [](PlanPhase at) { return !is_training(at); }, shapes_));
      Others out{.transients = part.transients,
                 .shifts = std::make_shared<const std::vector<ShiftOp>>(shifts_of(small, part.plan)),
                 .chunk_bytes = part.plan.chunk_bytes};
      for (const Buffer& b : part.plan.programs[0].buffers)
        if (b.section == sections::rollout_weights) out.weight_bytes += b.bytes();
      return out;
    });
  }
  PhaseBytes of_training(const RlPoint& p, const Scenario& there) {
    RlPoint key;
    key.train = p.train;
    return transients(training_, key, there, [](PlanPhase at) { return at == PlanPhase::train; });
  }
  /// Of log-probs: nothing is kept for a backward pass that is not there.
  PhaseBytes of_passes(const RlPoint& p, const Scenario& there) {
    RlPoint key;
    key.train = p.train;
    key.train.recompute = {}, key.train.reshard_after_forward = true;
    return transients(passes_, key, there,
                      [](PlanPhase at) { return at == PlanPhase::reference || at == PlanPhase::old_logprobs; });
  }
  PhaseBytes of_saves(const RlPoint& p, const Scenario& there) {
    RlPoint key;
    key.train.dp = p.train.ranks();
    return transients(saves_, key, there,
                      [](PlanPhase at) { return at == PlanPhase::checkpoint || at == PlanPhase::export_; });
  }
  PhaseBytes transients(Known<PhaseBytes>& known, const RlPoint& key, const Scenario& there,
                        const PhaseFilter& wanted) {
    return known_or(known, key, [&] { return lowered(lower_transients(there, wanted, shapes_)); });
  }
  /// What nothing refused before is lowered.
  template <class Part>
  static Part lowered(Result<Part> part) {
    HB_CHECK(part, "a part of a plan is not lowered: {}", render(part.error()));
    return std::move(*part);
  }

  const Scenario& scenario_;
  const CostModel& cost_;
  ModelShapes shapes_;
  std::mutex mutex_;
  Known<std::optional<Answer>> answers_;
  Known<Others> others_;
  Known<PhaseBytes> training_, passes_, saves_;
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
