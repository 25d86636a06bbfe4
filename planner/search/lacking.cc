#include "planner/search/lacking.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "spec/names.h"

namespace hotbunk {
namespace {

/// Of training alone.
void add_training(const Scenario& s, const TrainPoint& t, const Capabilities& can, std::vector<Lack>& out) {
  const auto cut = [&](bool has, const char* axis, const char* name, std::int64_t degree) {
    if (!has && degree > 1)
      out.push_back({fmt::format("train.layout.{}", axis), fmt::format("{} ({} {})", name, axis, degree)});
  };
  cut(can.tensor, "tp", "tensor parallel training", t.tp);
  cut(can.pipeline, "pp", "pipeline stages", t.pp);
  cut(can.expert, "ep", "expert parallel training", t.ep);
  cut(can.ring, "cp", "ring attention", t.cp);
  cut(can.ulysses, "ulysses", "Ulysses' attention", t.ulysses);
  const bool other = (t.schedule == PipelineSchedule::gpipe && !can.gpipe) ||
                     (t.schedule == PipelineSchedule::zero_bubble && !can.zero_bubble);
  if (t.pp > 1 && other)
    out.push_back({"train.pipeline_schedule", fmt::format("the schedule {}", name_of(t.schedule))});
  TrainPoint own = t;
  take_shard_group(can, s.train.layout, own);
  if (!(own == t))
    out.push_back(
        {"train.layout.shard_over",
         fmt::format("shards over {} of {} data ranks: its one group is over {}, of {} ranks", t.shard_ranks(),
                     t.data_ranks(), fmt::join(can.shards_over, " and "), own.shard_ranks())});
  if (!can.shard_groups && can.shards_over.empty() && t.fsdp > 0)
    out.push_back({"train.layout.fsdp", fmt::format("shards over {} of {} data ranks", t.fsdp, t.data_ranks())});
  if (!can.padding && s.train.padding != Padding::none)
    out.push_back({"train.padding", "micro-batches padded to their longest sample"});
  if (!can.layerwise_offload && t.optimizer_on_host) out.push_back({"train.offload", "layer-wise offload"});
  if (!can.reshard_choice && t.sharding == Sharding::fsdp && !t.reshard_after_forward)
    out.push_back({"train.reshard_after_forward", "units that stay gathered"});
  if (!can.has(can.optimizers, name_of(t.optimizer)))
    out.push_back({"optimizer.name", fmt::format("the optimizer {}", name_of(t.optimizer))});
  if (!can.has(can.recomputes, name_of(t.recompute)))
    out.push_back({"train.recompute", fmt::format("{} recomputation", name_of(t.recompute))});
}

void add_rollout(const RolloutPoint& r, const Capabilities& can, std::vector<Lack>& out) {
  const auto has = [&](bool it, bool asked, const char* key, std::string what) {
    if (!it && asked) out.push_back({key, std::move(what)});
  };
  has(can.strided_engines, r.strided, "rollout.layout.order", "engines of ranks that are no neighbours");
  has(can.rollout_pipeline, r.pp > 1, "rollout.layout.pp", fmt::format("engines in stages (pp {})", r.pp));
  has(can.rollout_context, r.cp > 1, "rollout.layout.cp",
      fmt::format("engines with context parallelism (cp {})", r.cp));
  has(can.rollout_experts, r.ep > 1, "rollout.layout.ep", fmt::format("engines with whole experts (ep {})", r.ep));
  has(can.attention_dp, r.attention_dp > 1, "rollout.layout.attention_dp",
      fmt::format("engines with attention dp {}", r.attention_dp));
}

bool knows_order(const Scenario& s, const TransitionOrder& order, const Capabilities& can) {
  for (const bool params : {false, true})
    for (const bool optimizer : {false, true})
      if (const auto all = transition_choices(s, can, params, optimizer); std::ranges::find(all, order) != all.end())
        return true;
  return false;
}

/// Of the model itself: what no layout changes.
void add_model(const ModelSpec& m, const Capabilities& can, std::vector<Lack>& out) {
  if (!can.padded_vocabulary && m.vocab_multiple > 1)  // as many whole rows on every rank is what all of them have
    out.push_back({"train.make_vocab_size_divisible_by",
                   fmt::format("vocabulary padded to {} rows on each rank", m.vocab_multiple)});
}

}  // namespace

std::vector<Lack> lacking(const Scenario& s, const RlPoint& p, const Capabilities& can) {
  std::vector<Lack> out;
  add_model(s.model, can, out);
  add_training(s, p.train, can, out);
  if (!p.samples()) return out;
  add_rollout(p.rollout, can, out);
  if (!can.critic_apart && s.algorithm.name == AlgorithmName::ppo &&
      s.algorithm.critic_placement == PlacementMode::disaggregated)
    out.push_back({"algorithm.critic_placement", "critics on GPUs of their own"});
  if (!can.reference_apart && s.algorithm.reference && s.algorithm.reference_placement == PlacementMode::disaggregated)
    out.push_back({"algorithm.reference_placement", "reference models on GPUs of their own"});
  const bool shared = p.placement == PlacementMode::colocated;
  if (!can.apart && !shared) out.push_back({"placement", "training and rollout apart"});
  const std::string_view sync = name_of(mode_of(p.sync));
  if (!can.has(shared ? can.syncs : can.syncs_apart, sync))
    out.push_back({"sync.mode", fmt::format("{} weight update{}", sync, shared ? "" : " between two sets of GPUs")});
  if (shared && !can.transitions.empty() && !p.train.optimizer_on_host && !knows_order(s, p.transition, can))
    out.push_back({"transition", p.sleeps() ? fmt::format("the order {}", to_text(p.transition))
                                            : "training that stays awake while the engine runs"});
  return out;
}

bool lacks_no_more(const Scenario& s, const RlPoint& own, const RlPoint& p, const Capabilities& can) {
  const std::vector<Lack> known = lacking(s, own, can);
  return std::ranges::all_of(lacking(s, p, can), [&](const Lack& l) {
    return std::ranges::any_of(known, [&](const Lack& k) { return k.key == l.key; });
  });
}

}  // namespace hotbunk
