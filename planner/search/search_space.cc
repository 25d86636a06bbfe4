// Which values the knobs of a search take by default.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "lowering/sample_rows.h"
#include "planner/search/search.h"
#include "planner/search/train_points.h"
#include "spec/engine_experts.h"
#include "spec/names.h"

namespace hotbunk {

std::string_view name_of(Objective o) {
  constexpr std::string_view names[num_objectives] = {"seconds", "tokens-per-gpu", "gpu-hours",
                                                      "money",   "memory",         "gpus"};
  return names[static_cast<std::size_t>(o)];
}

std::string describe(const TrainCut& c) {
  std::string out;
  const std::pair<const char*, std::int64_t> degrees[] = {{"tp", c.tp},           {"pp", c.pp}, {"cp", c.cp},
                                                          {"ulysses", c.ulysses}, {"ep", c.ep}, {"etp", c.etp}};
  for (const auto& [name, n] : degrees)
    if (n > 1) out += fmt::format("{}{} {}", out.empty() ? "" : " ", name, n);
  return out.empty() ? "data" : out + (c.sp ? " sp" : "");
}

std::vector<std::int64_t> divisors(std::int64_t n) {
  std::vector<std::int64_t> out;
  for (std::int64_t d = 1; d <= n / d; ++d)
    if (n % d == 0) {
      out.push_back(d);
      if (d != n / d) out.push_back(n / d);
    }
  std::sort(out.begin(), out.end());
  return out;
}

namespace {

/// `own` beside the usual values, each once.
template <class T>
void include(std::vector<T>& values, const T& own) {
  if (std::find(values.begin(), values.end(), own) == values.end()) values.push_back(own);
}

std::vector<std::int64_t> expert_tp(const TrainSpace& s, std::int64_t tp) {
  std::vector<std::int64_t> out = s.etp;
  if (s.etp_as_tp) include(out, tp);
  return out;
}

}  // namespace

std::vector<std::int64_t> RlSpace::expert_groups(RolloutEngine engine, std::int64_t tp, std::int64_t cp) const {
  std::vector<std::int64_t> out{1};
  if (!spreads_experts) return out;
  const std::int64_t whole = engine == RolloutEngine::hotbunk ? tp : tp * cp;
  for (const std::int64_t ep : divisors(tp))
    if (ep < whole && may_spread_experts(engine, ep, tp * cp)) include(out, ep);
  include(out, whole);
  return out;
}

std::vector<LayerKey> layer_keys(const TrainSpace& s) {
  std::vector<LayerKey> keys;
  for (auto tp : s.tp)
    for (auto cp : s.cp)
      for (auto ulysses : s.ulysses)
        for (auto ep : s.ep)
          for (auto etp : expert_tp(s, tp))
            for (bool sp : s.sp)
              for (auto b : s.micro_batch)
                if (s.ranks % (tp * cp * ulysses) == 0 && (tp > 1 || !sp))
                  keys.push_back({tp, cp, ulysses, ep, etp, sp, b});
  std::ranges::sort(keys);
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  return keys;
}

namespace {

std::vector<std::int64_t> at_most(std::vector<std::int64_t> values, std::int64_t limit) {
  std::erase_if(values, [&](std::int64_t v) { return v > limit; });
  return values;
}

std::vector<PlacementChoice> placements(const Scenario& s, bool apart) {
  const std::int64_t ranks = s.cluster.ranks(), node = s.cluster.ranks_per_node();
  std::vector<PlacementChoice> out = {{PlacementMode::colocated, ranks, ranks}};
  if (!apart && s.placement == PlacementMode::colocated) return out;
  // Eighths of the cluster, in whole nodes where it has several.
  const std::int64_t unit = ranks > node ? node : 1;
  std::set<std::int64_t> parts;
  for (std::int64_t eighth = 1; eighth < 8; ++eighth)
    parts.insert(std::max<std::int64_t>(1, ranks * eighth / 8 / unit) * unit);
  if (s.placement == PlacementMode::disaggregated) parts.insert(s.train.layout.ranks());
  for (std::int64_t train : parts)
    if (train > 0 && train < ranks) out.push_back({PlacementMode::disaggregated, train, ranks - train});
  return out;
}

std::vector<TransitionOrder> transitions(const Scenario& s, const Capabilities& can) {
  std::vector<TransitionOrder> all;
  for (const bool params : {false, true})
    for (const bool optimizer : {false, true})
      for (const TransitionOrder& o : transition_choices(s, can, params, optimizer)) include(all, o);
  if (can.transitions.empty()) all = undominated(std::move(all), s.rollout.sleep && s.rollout.sleep_level == 1);
  // Disaggregated, a scenario has no order of its own.
  if (const TransitionOrder own = rl_point_of(s).transition; own.size() > 0) include(all, own);
  return all;
}

/// Degrees that groups of neighbours on equal nodes can have: they share a node evenly, or cover whole ones.
std::vector<std::int64_t> filling_nodes(std::vector<std::int64_t> degrees, std::int64_t per_node) {
  std::erase_if(degrees, [&](std::int64_t d) { return per_node % d != 0 && d % per_node != 0; });
  return degrees;
}

/// Above so many ranks the space takes coarser steps: every knob has more divisors there, and its points multiply. Best
/// rows of the worked scenarios are the same with and without the steps.
constexpr std::int64_t many_ranks = 64;

/// One node, or four: within the fastest links, and a step towards all ranks.
bool is_node_group(std::int64_t ranks, std::int64_t per_node) { return ranks == per_node || ranks == 4 * per_node; }

/// Pipeline stages of engines that have them, up to four nodes; on many ranks each stage is one node, or as large as
/// the scenario's own. Context parallelism is the scenario's own.
void add_stages(const Scenario& s, const RolloutPoint& own, const Capabilities& can, RlSpace& out) {
  const std::int64_t ranks = s.cluster.ranks(), node = s.cluster.ranks_per_node();
  out.most_engine_ranks = 4 * node;
  // An engine is cut into stages where tensor parallelism, on faster links, can go no further.
  std::int64_t widest = 1;
  for (const std::int64_t tp : divisors(std::min(node, ranks)))
    if (s.model.heads % tp == 0) widest = tp;
  out.stage_ranks = own.pp > 1 ? own.tp * own.cp : widest;
  if (s.rollout.engine != RolloutEngine::hotbunk && can.rollout_pipeline)
    out.rollout_pp = at_most(divisors(ranks), std::min<std::int64_t>(8, s.model.layers));
  include(out.rollout_pp, own.pp);
  include(out.rollout_cp, own.cp);
  out.most_engine_ranks = std::max(out.most_engine_ranks, own.tp * own.cp * own.pp);
}

/// What the framework's launches can say; a scenario, whose layout this is, may ask for more.
void keep_to(const Capabilities& can, const TrainLayout& layout, TrainSpace& s) {
  if (!can.tensor) s.tp = {1};
  if (!can.pipeline) s.pp = s.vpp = {1};
  if (!can.expert) s.ep = s.etp = {1}, s.etp_as_tp = false;
  if (!can.ring) s.cp = {1};
  if (!can.ulysses) s.ulysses = {1};
  if (!can.shard_groups) s.shard = {-1};
  if (!can.shards_over.empty()) s.own_group = shard_group_of(can, layout);
  if (can.gpipe) include(s.schedule, PipelineSchedule::gpipe);
  if (can.zero_bubble) include(s.schedule, PipelineSchedule::zero_bubble);
  if (!can.reshard_choice) s.reshard = {true};
  std::erase_if(s.recompute, [&](Recompute r) { return !can.has(can.recomputes, name_of(r)); });
}

/// The scenario's own layout is a point of its space.
void keep_own(TrainSpace& s, const TrainPoint& own) {
  include(s.tp, own.tp), include(s.pp, own.pp), include(s.vpp, own.vpp);
  include(s.cp, own.cp), include(s.ulysses, own.ulysses), include(s.ep, own.ep), include(s.etp, own.etp);
  include(s.shard, own.fsdp), include(s.schedule, own.schedule);
  include(s.reshard_ranks, own.reshard_ranks);
}

/// Cuts of one sequence: all up to 8, then powers of two while every rank has a thousand tokens of the longest one.
std::vector<std::int64_t> sequence_cuts(std::int64_t ranks, std::int64_t per_node, double longest) {
  std::vector<std::int64_t> out = at_most(filling_nodes(divisors(ranks), per_node), 8);
  for (const std::int64_t cut : {16, 32, 64})
    if (ranks % cut == 0 && longest >= 1000.0 * static_cast<double>(cut)) out.push_back(cut);
  return out;
}

}  // namespace

std::vector<TransitionOrder> transition_choices(const Scenario& s, const Capabilities& can, bool params,
                                                bool optimizer) {
  if (can.transitions.empty()) return legal_transitions(params, optimizer, s.rollout.sleep, true);
  std::vector<TransitionOrder> out;
  if ((!params && !optimizer && !can.awake) || (params != optimizer && !can.sleeps_apart)) return out;
  for (const std::string& name : can.transitions) include(out, order_where(name, params, optimizer, s.rollout.sleep));
  return out;
}

TrainSpace default_train_space(const ModelSpec& m, std::int64_t ranks, std::int64_t per_node, std::int64_t batch,
                               TrainEngine engine) {
  TrainSpace s;
  s.ranks = ranks;
  s.batch = std::max<std::int64_t>(batch, 1);
  s.tp = at_most(divisors(ranks), std::min<std::int64_t>(std::max<std::int64_t>(per_node, 1), m.heads));
  const bool megatron = engine == TrainEngine::megatron;
  // What gathers parameters in every pass makes no pipelines (visit_shardings).
  const bool has_stages = megatron || engine == TrainEngine::zero1 || engine == TrainEngine::ddp;
  s.pp = has_stages ? at_most(divisors(ranks), m.layers) : std::vector<std::int64_t>{1};
  s.vpp = megatron ? std::vector<std::int64_t>{1, 2, 3, 4, 6, 8} : std::vector<std::int64_t>{1};
  if (has_stages && !megatron) s.vpp.push_back(2);
  // Deep stages are interleaved layer by layer: chunks of equal size beyond those.
  if (megatron)
    for (const std::int64_t stages : s.pp)
      if (stages > 1 && m.layers % stages == 0)
        for (const std::int64_t chunks : divisors(m.layers / stages)) include(s.vpp, chunks);
  std::ranges::sort(s.vpp);
  s.cp = s.ulysses = at_most(filling_nodes(divisors(ranks), std::max<std::int64_t>(per_node, 1)), 8);
  const bool several_nodes = ranks > std::max<std::int64_t>(per_node, 1);
  const bool many = megatron ? several_nodes : ranks > many_ranks;
  // Pipelines and tensor parallelism leave several nodes layouts enough: there Megatron's ring attention stands for
  // both ways to split sequences.
  if (has_stages && several_nodes) s.ulysses = {1};
  for (const std::int64_t group : divisors(ranks))
    if (group > 1 && group < ranks && (!many || is_node_group(group, per_node))) s.shard.push_back(group);
  s.micro_batch = at_most(divisors(s.batch), 16);
  if (m.moe && m.moe->experts > 0) s.ep = at_most(divisors(m.moe->experts), ranks);
  if (m.moe && m.moe->experts > 0 && megatron) {
    if (many) s.etp_as_tp = true;  // Megatron-core's default
    else s.etp = s.tp;
  }
  switch (engine) {
    case TrainEngine::ddp:
      s.sharding = {Sharding::replicated};
      s.shard = {-1};
      break;
    case TrainEngine::zero2:
      s.sharding = {Sharding::zero2};
      break;
    case TrainEngine::fsdp1:
    case TrainEngine::fsdp2:
      s.sharding = {Sharding::fsdp};
      s.reshard = {false, true};
      break;
    default:
      s.sharding = {Sharding::zero1};
  }
  return s;
}

RlSpace default_rl_space(const Scenario& s, const FrameworkProfile& frame) {
  RlSpace out;
  const std::int64_t ranks = s.cluster.ranks(), node = s.cluster.ranks_per_node();
  const RlPoint own = rl_point_of(s);
  const std::int64_t batch =
      std::max<std::int64_t>(1, num_samples(s) / std::max<std::int64_t>(1, s.algorithm.mini_batches));
  out.train = default_train_space(s.model, ranks, node, batch, s.train.engine);
  out.train.ragged = true;
  out.train.optimizer = own.train.optimizer;
  // A micro-batch holds the longest sequence (E217), so in sequences of mean length at least so many.
  const double mean = static_cast<double>(train_setting_of(s).sequence);
  const auto least = static_cast<std::int64_t>(std::ceil(s.workload.longest() / std::max(mean, 1.0)));
  out.train.micro_batch.clear();
  for (std::int64_t times : {1, 2, 4, 8, 16}) include(out.train.micro_batch, std::max<std::int64_t>(1, least) * times);
  if (own.train.micro_batch >= least) include(out.train.micro_batch, own.train.micro_batch);
  out.train.cp = sequence_cuts(ranks, node, s.workload.longest());
  if (out.train.ulysses.size() > 1) out.train.ulysses = out.train.cp;
  keep_to(frame.can, s.train.layout, out.train);
  keep_own(out.train, own.train);
  // FSDP alone has it, and the CPU orthogonalizes no matrices (E214). PyTorch's FSDP1 adds no gradients up there: its
  // documentation calls what accumulates with CPU offload incorrect.
  const bool fsdp = s.train.engine == TrainEngine::fsdp1 || s.train.engine == TrainEngine::fsdp2;
  if (fsdp && frame.can.layerwise_offload && s.optimizer.name != OptimizerName::muon)
    out.train.optimizer_on_host = {false, true};
  out.train.accumulates_on_host = s.train.engine != TrainEngine::fsdp1 || own.train.optimizer_on_host;
  out.placement = placements(s, frame.can.apart);
  out.rollout_tp.clear();
  for (std::int64_t tp : divisors(ranks))
    if (tp <= 4 * node) out.rollout_tp.push_back(tp);
  if (s.model.moe && s.model.moe->experts > 0) {
    if (frame.can.attention_dp) out.attention_dp = {1, 2, 4, 8};
    if (frame.can.rollout_experts) out.spreads_experts = true;
  }
  include(out.rollout_tp, own.rollout.tp);
  add_stages(s, own.rollout, frame.can, out);
  include(out.attention_dp, own.rollout.attention_dp);
  out.memory_fraction = {0.5, 0.6, 0.7, 0.8, 0.9};
  if (ranks <= many_ranks) out.memory_fraction.insert(out.memory_fraction.begin(), {0.1, 0.2, 0.3, 0.4});
  include(out.memory_fraction, s.rollout.memory_fraction);
  out.transition = transitions(s, frame.can);
  if (!frame.can.strided_engines) out.strided = {own.rollout.strided};
  std::erase_if(out.sync, [&](SyncMechanism m) { return !frame.can.has(frame.can.syncs, name_of(mode_of(m))); });
  std::erase_if(out.sync_apart,
                [&](SyncMechanism m) { return !frame.can.has(frame.can.syncs_apart, name_of(mode_of(m))); });
  include(own.placement == PlacementMode::colocated ? out.sync : out.sync_apart, own.sync);
  if (!frame.can.bucket_choice) out.bucket_bytes.clear();
  include(out.bucket_bytes, own.bucket_bytes);
  return out;
}

}  // namespace hotbunk
