#include "planner/answers/levers.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <functional>

#include "base/format.h"
#include "lowering/sample_rows.h"
#include "planner/answers/choices.h"
#include "planner/search/lacking.h"
#include "planner/train/layer_kinds.h"
#include "spec/names.h"
#include "spec/router_loss.h"
#include "spec/validate.h"

namespace hotbunk {
namespace {

/// And the models price it.
bool legal(const ScenarioPricer& s, const RlPoint& own, const RlPoint& p) {
  return !s.why_unpriced(p) && is_launched(s, own, p);
}

}  // namespace

bool is_launched(const ScenarioPricer& s, const RlPoint& own, const RlPoint& p) {
  if (!lacks_no_more(s.scenario(), own, p, s.train().framework().can)) return false;
  const Scenario there = with_point(s.scenario(), p);
  // Tokens that hold the longest sequence may hold more of the mean ones than the point asks for.
  const TrainPoint meant = train_point_of(there);
  if (meant.micro_batch != p.train.micro_batch || meant.micro_batches != p.train.micro_batches) return false;
  return validate(there, [](std::string_view) { return SourceLocation{}; }).empty();
}

std::optional<Lever> one_step_off(const ScenarioPricer& s, const RlPoint& p) {
  RlSetting ahead = s.rl().setting();
  if (p.placement != PlacementMode::disaggregated || ahead.overlaps ||
      s.scenario().algorithm.name == AlgorithmName::sft)
    return std::nullopt;
  ahead.overlaps = true;
  const RlPrice now = s.rl().price(p), then = RlModel(s.train(), ahead).price(p);
  return Lever{.change = "algorithm.max_staleness = 1",
               .point = p,
               .seconds = then.iteration_seconds - now.iteration_seconds,
               .bytes = then.peak_bytes() - now.peak_bytes(),
               .fits = then.fits,
               .flags = {"algorithm.max_staleness=1"}};
}

std::vector<std::string> without_effect(const Scenario& s, bool lowered) {
  std::vector<std::string> out;
  const bool sft = s.algorithm.name == AlgorithmName::sft;
  if (s.algorithm.max_staleness > 0 && (sft || s.placement == PlacementMode::colocated))
    out.push_back(fmt::format(
        "algorithm.max_staleness = {} changes nothing: {}", s.algorithm.max_staleness,
        sft ? "nothing is sampled"
            : "training and rollout share their GPUs by shifts; with placement = disaggregated they run side by side"));
  const bool streams = s.train.engine == TrainEngine::fsdp1 || s.train.engine == TrainEngine::fsdp2;
  if (!streams && (s.train.prefetch == 0 || !s.train.reshard_after_forward))
    out.push_back(fmt::format("train.{} changes nothing: {} gathers no units",
                              s.train.prefetch == 0 ? "prefetch" : "reshard_after_forward", name_of(s.train.engine)));
  if (!lowered && s.train.expert_capacity > 0.0)
    out.push_back(
        fmt::format("train.expert_capacity = {} changes nothing of this estimate, which keeps all rows that balanced "
                    "routers send to a rank's experts: rounds are counted where there is a plan",
                    s.train.expert_capacity));
  if (s.train.layout.pp == 1 && (s.train.account_for_embedding || s.train.account_for_loss))
    out.push_back(fmt::format("train.account_for_{}_in_pipeline_split changes nothing: one stage has all layers",
                              s.train.account_for_embedding ? "embedding" : "loss"));
  if (!lowered && router_losses(s).any())
    out.emplace_back(
        "losses of routers change nothing of this estimate: their passes, and with cp or ulysses the sum of their "
        "counts, stand where there is a plan");
  if (!lowered && s.train.expert_dispatch != ExpertDispatch::per_expert)
    out.push_back(fmt::format(
        "train.expert_dispatch = {} changes nothing of this estimate: whether a token goes once to each rank "
        "the profile says, and this key where there is a plan",
        name_of(s.train.expert_dispatch)));
  return out;
}

std::string oversized_tensor(const ScenarioPricer& s, const RlPoint& p) {
  const Scenario& scenario = s.scenario();
  if (scenario.algorithm.name == AlgorithmName::sft || p.sync == SyncMechanism::shard_to_shard) return "";
  if (mode_of(p.sync) == SyncMode::stream) return "";  // tensor by tensor: there is no bucket
  if (tensor_count(scenario.model) > 1e6) return "";   // no model that exists
  const double element = s.rl().setting().rollout_element_bytes;
  std::string name;
  double most = 0.0;
  for (const ParamSpec& parameter : parameters_of(scenario.model))
    if (const double bytes = element * static_cast<double>(parameter.numel()); bytes > most)
      most = bytes, name = parameter.name;
  if (most <= p.bucket_bytes) return "";
  const double all = std::ceil(s.rl().sync_job(p).handed() / p.bucket_bytes), own = std::ceil(most / p.bucket_bytes);
  const double seconds = s.rl().sync_price(p).seconds() * std::min(1.0, own / all);
  return fmt::format(
      "{} is {}, larger than the sync's bucket of {}: its rows fill {:.0f} of {:.0f} buckets ({} of the update); in a "
      "bucket of its own it would take {} more staging on every rank",
      name, format_bytes(most), format_bytes(p.bucket_bytes), own, all, format_seconds(seconds),
      format_bytes(most - p.bucket_bytes));
}

std::vector<std::pair<std::string, RlPoint>> neighbours(const ScenarioPricer& s, const RlPoint& p) {
  std::vector<std::pair<std::string, RlPoint>> out;
  const TrainLayout& said = s.scenario().train.layout;
  // All ranks of what shard_over names are other ones where those dimensions are.
  const auto as_said = [&](const TrainPoint& t) {
    TrainPoint named = t;
    fill_shard_group(said, named);
    return named;
  };
  const bool keeps_words = said.fsdp == -1 && !said.shard_over.empty() && as_said(p.train) == p.train;
  const auto add = [&](std::string name, const std::function<void(RlPoint&)>& change) {
    RlPoint q = p;
    change(q);
    const bool same_group = q.train.fsdp == p.train.fsdp && q.train.shard_over == p.train.shard_over;
    if (keeps_words && same_group) q.train = as_said(q.train);
    if (same_group) take_shard_group(s.train().framework().can, said, q.train);
    if (!(q == p) && legal(s, p, q)) out.emplace_back(std::move(name), q);
  };
  for (Recompute r : {Recompute::none, Recompute::selective, Recompute::full})
    add(fmt::format("train.recompute = {}", r == Recompute::none        ? "none"
                                            : r == Recompute::selective ? "selective"
                                                                        : "full"),
        [&](RlPoint& q) { q.train.recompute = r; });
  const std::int64_t halved = s.scenario().train.micro_batch_tokens / 2;
  if (p.train.micro_batch > 1 && p.train.micro_batch % 2 == 0 && halved >= max_sample_tokens(s.scenario()))  // E217
    add("train.micro_batch_tokens halved", [](RlPoint& q) {
      const std::int64_t sequences = q.train.sequences();
      q.train.micro_batch /= 2;
      q.train.set_sequences(sequences);
    });
  if (p.train.micro_batches % 2 == 0)
    add("train.micro_batch_tokens doubled", [](RlPoint& q) {
      const std::int64_t sequences = q.train.sequences();
      q.train.micro_batch *= 2;
      q.train.set_sequences(sequences);
    });
  const auto trade = [&](const char* name, std::int64_t TrainPoint::*axis) {
    if (p.train.dp % 2 == 0)
      add(fmt::format("train.layout.{} doubled, dp halved", name), [&](RlPoint& q) {
        q.train.*axis *= 2, q.train.dp /= 2;
        q.train.set_sequences(2 * q.train.sequences());
      });
    if (p.train.*axis % 2 == 0 && p.train.micro_batches % 2 == 0)
      add(fmt::format("train.layout.{} halved, dp doubled", name), [&](RlPoint& q) {
        q.train.*axis /= 2, q.train.dp *= 2;
        q.train.set_sequences((q.train.sequences() + 1) / 2);
      });
  };
  trade("tp", &TrainPoint::tp);
  trade("pp", &TrainPoint::pp);
  trade("cp", &TrainPoint::cp);
  trade("ulysses", &TrainPoint::ulysses);
  if (const std::int64_t node = s.scenario().cluster.ranks_per_node(); p.train.sharding == Sharding::fsdp) {
    if (p.train.fsdp > 0) {
      RlPoint all = p;
      all.train.fsdp = -1, all.train.shard_over = {};
      const TrainLayout then = with_point(s.scenario(), all).train.layout;
      std::vector<std::string> changes;
      if (then.fsdp != said.fsdp || then.shard_over == said.shard_over) changes.emplace_back("train.layout.fsdp = -1");
      if (then.shard_over != said.shard_over) changes.emplace_back("train.layout.shard_over = \"\"");
      add(fmt::format("{}", fmt::join(changes, ", ")), [&](RlPoint& q) { q = all; });
    } else if (p.train.data_ranks() > node && p.train.data_ranks() % node == 0)
      add(fmt::format("train.layout.fsdp = {}", node),
          [&](RlPoint& q) { q.train.fsdp = node, q.train.shard_over = {}; });
  }
  if (p.train.optimizer == OptimizerName::adamw)
    add("optimizer.name = adamw-8bit", [](RlPoint& q) { q.train.optimizer = OptimizerName::adamw_8bit; });
  if (p.train.tp > 1)
    add(p.train.sp ? "train.layout.sp = false" : "train.layout.sp = true",
        [](RlPoint& q) { q.train.sp = !q.train.sp; });
  if (s.scenario().algorithm.name == AlgorithmName::sft) return out;
  if (p.placement == PlacementMode::colocated) {
    const bool rollout = s.scenario().rollout.sleep;
    if (!p.train.optimizer_on_host)
      add(p.sleeps() ? "train.offload = none" : "train.offload = sleep", [&](RlPoint& q) {
        if (const auto order = transition_from("hotbunk", !p.sleeps(), rollout)) q.transition = *order;
      });
    if (p.sleeps())
      for (const std::string_view name : transition_names())
        add(fmt::format("transition = {}", name), [&](RlPoint& q) {
          if (const auto order = transition_from(name, true, rollout)) q.transition = *order;
        });
  }
  if (p.rollout.engines % 2 == 0)
    add("rollout.layout.tp doubled", [](RlPoint& q) { q.rollout.tp *= 2, q.rollout.engines /= 2; });
  if (p.rollout.tp % 2 == 0)
    add("rollout.layout.tp halved", [](RlPoint& q) { q.rollout.tp /= 2, q.rollout.engines *= 2; });
  // Stages pay where tensor parallelism would leave the node.
  if (p.rollout.tp % 2 == 0 && (p.rollout.pp > 1 || p.rollout.tp > s.scenario().cluster.ranks_per_node()))
    add("rollout.layout.pp doubled, tp halved", [](RlPoint& q) { q.rollout.pp *= 2, q.rollout.tp /= 2; });
  if (p.rollout.pp % 2 == 0) {
    add("rollout.layout.pp halved, tp doubled", [](RlPoint& q) { q.rollout.pp /= 2, q.rollout.tp *= 2; });
    add("rollout.layout.pp halved, dp doubled", [](RlPoint& q) { q.rollout.pp /= 2, q.rollout.engines *= 2; });
  }
  add("rollout.layout.order = strided", [](RlPoint& q) { q.rollout.strided = true; });
  add("sync.mode = direct", [](RlPoint& q) { q.sync = SyncMechanism::shard_to_shard; });
  for (const double step : {-0.1, 0.1}) {
    const double fraction = std::round(1000.0 * (p.rollout.memory_fraction + step)) / 1000.0;
    if (fraction >= 0.01 && fraction < 1.0)
      add(fmt::format("rollout.memory_fraction {} 0.1", step < 0 ? "-" : "+"),
          [&](RlPoint& q) { q.rollout.memory_fraction = fraction; });
  }
  return out;
}

}  // namespace hotbunk
