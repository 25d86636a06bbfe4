#include "planner/answers/plan_answer.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"
#include "layout/pipeline_turns.h"
#include "lowering/builder.h"
#include "lowering/lower.h"
#include "lowering/sample_rows.h"
#include "planner/answers/choices.h"
#include "planner/answers/plan_shifts.h"
#include "spec/validate.h"

namespace hotbunk {
namespace {

constexpr std::string_view why_of(PlanPhase p) {
  switch (p) {
    case PlanPhase::load:
      return "shards and moments of training";
    case PlanPhase::sync:
      return "rollout weights beside the parameters' shards and a bucket";
    case PlanPhase::rollout:
      return "the engine's slice of the weights, its KV pool and one step";
    case PlanPhase::exchange:
      return "finished samples of all ranks";
    case PlanPhase::reference:
    case PlanPhase::old_logprobs:
      return "a forward pass that keeps nothing";
    case PlanPhase::train:
      return "a micro-batch at the loss or in backward, beside gradient shards and moments";
    case PlanPhase::checkpoint:
    case PlanPhase::export_:
      return "one unit gathered at a time";
    default:
      return "";
  }
}

enum class Moment : std::uint8_t { train, rollout, sync };

/// `sampled`: the phase comes after the rollout.
constexpr Moment moment_of(PlanPhase p, bool sampled) {
  switch (p) {
    case PlanPhase::wake_rollout:
    case PlanPhase::wake_params:
    case PlanPhase::sync:
    case PlanPhase::sleep_train:
    case PlanPhase::sleep_train_again:
      return sampled ? Moment::train : Moment::sync;
    case PlanPhase::start_rollout:
    case PlanPhase::flush:
    case PlanPhase::wake_kv:
    case PlanPhase::rollout:
    case PlanPhase::sleep_rollout:
    case PlanPhase::sleep_kv:
    case PlanPhase::sleep_weights:
    case PlanPhase::exchange:
      return Moment::rollout;
    default:
      return Moment::train;
  }
}

/// The phase of the time table that a phase of the plan belongs to; nullopt: it has no time of its own there.
constexpr std::optional<RlPhase> rl_phase_of(PlanPhase p) {
  switch (p) {
    case PlanPhase::sync:
      return RlPhase::sync;
    case PlanPhase::rollout:
    case PlanPhase::exchange:
      return RlPhase::rollout;
    case PlanPhase::reference:
      return RlPhase::reference;
    case PlanPhase::old_logprobs:
      return RlPhase::old_logprobs;
    case PlanPhase::train:
      return RlPhase::train;
    default:
      return std::nullopt;
  }
}

std::string_view what_of(const PlanTraffic& t) {
  if (t.phase == PlanPhase::exchange) return "samples";
  if (t.group == "tp") return "tp";
  if (t.group == "world") return t.phase == PlanPhase::sync ? "hashes" : "step";
  if (t.group == "replicas") return "gradients";
  if (t.group == "ulysses") return "ulysses";
  if (t.group == "context") return "context";
  return t.phase == PlanPhase::sync ? "weights" : t.op == OpKind::reduce_scatter ? "gradients" : "parameters";
}

}  // namespace

std::optional<PlanAnswer> plan_answer_of(const Scenario& s) {
  if (!why_not_lowered(s).empty()) return std::nullopt;
  ModelShapes shapes(s.model);
  Result<PartOfPlan> all = lower_phases(s, nullptr, shapes);
  if (!all) return std::nullopt;
  const PlanMemory memory = memory_of(s, all->plan);
  std::vector<std::vector<ShiftOp>> shifts;
  for (std::size_t stage = 0; stage < all->plan.programs.size(); ++stage)
    shifts.push_back(shifts_of(s, all->plan, stage));
  return PlanAnswer{std::move(all->plan), memory, std::move(shifts[most_shifted(shifts)])};
}

namespace {

/// The highest of the phases around training, rollout and sync.
void set_moments(const JobPhases& phases, const PhaseBytes& peaks, RlPrice& price) {
  price.train_bytes = price.rollout_bytes = price.sync_bytes = price.wake_bytes = 0.0;
  bool sampled = false;  // the rollout lies behind
  for (const JobPhase& phase : phases) {
    const Moment moment = moment_of(phase.phase, sampled);
    sampled = sampled || phase.phase == PlanPhase::rollout;
    double& bytes = moment == Moment::sync      ? price.sync_bytes
                    : moment == Moment::rollout ? price.rollout_bytes
                                                : price.train_bytes;
    bytes = std::max(bytes, static_cast<double>(peaks[static_cast<std::size_t>(phase.phase)]));
  }
}

}  // namespace

void use_mapped_bytes(const MappedBytes& mapped, RlPrice& price) {
  set_moments(mapped.phases, mapped.device, price);
  price.host_bytes = static_cast<double>(mapped.host_peak);
}

void use_plan_bytes(const Scenario& s, const PlanMemory& m, RlPrice& price) {
  PhaseBytes live{};
  for (std::size_t p = 0; p < num_plan_phases; ++p) live[p] = m.device.phases[p].bytes;
  set_moments(m.phases, live, price);
  price.host_bytes = static_cast<double>(m.host.whole.bytes);
  // As check_fit (trace/static_memory.h) judges the plan: 0 is unlimited.
  const std::int64_t device = s.cluster.device_memory_bytes;
  const std::int64_t host = s.cluster.host_memory_bytes / std::max<std::int64_t>(1, s.cluster.ranks_per_node());
  price.fits =
      (device <= 0 || m.device.whole.mapped_bytes <= device) && (host <= 0 || m.host.whole.mapped_bytes <= host);
}

CostNode plan_memory_tree(const PlanMemory& m) {
  CostNode root{"device memory of every rank",
                "the highest of the phases below, live bytes of the plan",
                static_cast<double>(m.device.whole.bytes),
                0,
                {}};
  for (const JobPhase& at : m.phases) {
    const PlanPhase phase = at.phase;
    const auto p = static_cast<std::size_t>(phase);
    const PlanPeak& peak = m.device.phases[p];
    CostNode node{std::string(name_of(phase)), std::string(why_of(phase)), static_cast<double>(peak.bytes), 0, {}};
    const bool open = phase == m.device.peak_phase || phase == PlanPhase::train || phase == PlanPhase::rollout ||
                      phase == PlanPhase::sync;
    for (int c = 0; open && c < num_categories; ++c)
      if (const std::int64_t bytes = peak.by_category[static_cast<std::size_t>(c)]; bytes > 0)
        node.children.push_back(
            {std::string(name_of(static_cast<Category>(c))), "", static_cast<double>(bytes), 0, {}});
    root.children.push_back(std::move(node));
  }
  return root;
}

std::optional<Scenario> scenario_at(const Scenario& s, const RlPoint& p) {
  Scenario out = with_point(s, p);
  if (micro_batch_capacity(out) < max_sample_tokens(out)) return std::nullopt;  // E217
  if (!unsupported_to_execute(out).empty()) return std::nullopt;
  return out;
}

namespace {

void use_seconds_of(const Scenario& s, const PlanAnswer& plan, const CostModel& cost, RlPrice& price) {
  use_plan_seconds(ComputedSeconds::of(s, plan_seconds(s, train_point_of(s), plan.plan, cost)),
                   shifts_seconds(plan.shifts, cost), price);
}

}  // namespace

bool use_plan(const Scenario& s, const CostModel& cost, RlPrice& price) {
  const auto plan = plan_answer_of(s);
  if (!plan) return false;
  use_plan_bytes(s, plan->memory, price);
  use_seconds_of(s, *plan, cost, price);
  return true;
}

bool use_mapped_plan(const Scenario& s, const CostModel& cost, RlPrice& price) {
  const auto plan = plan_answer_of(s);
  if (!plan) return false;
  use_mapped_bytes(mapped_bytes(plan->memory), price);
  use_seconds_of(s, *plan, cost, price);
  return true;
}

bool use_plan_at(const Scenario& s, const RlPoint& p, const CostModel& cost, RlPrice& price) {
  const auto there = scenario_at(s, p);
  return there && use_plan(*there, cost, price);
}

PlanRuns expected_runs(const Scenario& s, const RlPoint& p) {
  const auto tokens = [](double sequences, double each) { return static_cast<std::int64_t>(sequences * each); };
  const auto blocks = [](std::int64_t all, std::int64_t at_once) {
    return ceil_div(all, std::max<std::int64_t>(1, at_once));
  };
  // Groups of an engine pass theirs at the same time; what they share counts all of them.
  const std::int64_t groups = attention_groups(s);
  const auto sequences = static_cast<double>(samples_per_group(s));
  const std::int64_t prefill = tokens(sequences, s.workload.prompt_tokens.mean);
  // The prompt's pass samples the first token of a response.
  const std::int64_t decode = tokens(sequences, std::max(0.0, s.workload.response_tokens.mean - 1.0));
  PlanRuns runs;
  runs.prefill = {blocks(prefill, prefill_of_group(s)), groups * prefill, samples_per_group(s)};
  runs.decode = {blocks(decode, slots_of_group(s)), groups * decode, decode};
  runs.optimizer_steps = s.algorithm.mini_batches;
  runs.micro_batches = runs.reference = runs.old_logprobs = s.algorithm.mini_batches * p.train.micro_batches;
  runs.trained_tokens =
      tokens(static_cast<double>(num_samples(s)) / static_cast<double>(std::max<std::int64_t>(1, p.train.dp)) /
                 static_cast<double>(p.train.cp * p.train.ulysses),
             mean_padded_tokens(s));
  return runs;
}

MicroBatchStreams micro_batch_streams(const Scenario& s, const RlPoint& p, const PlanAnswer& answer,
                                      const CostModel& cost) {
  const Sizes sizes = micro_batch_sizes(s, static_cast<double>(p.train.micro_batch));
  const RankPlace place = cost.place_of(answer.plan, 0);
  MicroBatchStreams out{
      .sequences = p.train.micro_batch, .tokens = sizes.tokens, .streams = answer.plan.streams, .seconds = {}};
  const PlanBlocks blocks(answer.plan);
  std::vector<std::string> passes;  // of the first stage
  const Pipeline pipeline = pipeline_of(s);
  for (std::int64_t c = 0; pipeline.stages > 1 && c < pipeline.chunks; ++c)
    for (const StageStep step : {StageStep::forward, StageStep::backward, StageStep::weights})
      if (step != StageStep::weights || pipeline.defers_weights())
        passes.push_back(pass_name(step, pipeline.chunks, c, 0));
  if (passes.empty()) passes = {"micro"};
  for (const std::string& block : passes)
    out.seconds.add(
        blocks.block(PlanPhase::train, block).seconds(cost, device_sharing(cost, s.cluster), {&place, 1}, sizes), 1.0);
  return out;
}

std::vector<LinkUse> plan_link_bytes(const Scenario& s, const PlanAnswer& plan, const PlanRuns& runs,
                                     const CostModel& cost) {
  std::vector<LinkUse> out;
  const RankPlace place = cost.place_of(plan.plan, 0);
  // What a rank lacks of its engine's slice differs: of the sync, those of the rank that reads most.
  std::vector<PlanTraffic> traffic = traffic_of(plan.plan, 0, runs);
  const auto synced = [](const std::vector<PlanTraffic>& of) {
    std::int64_t bytes = 0;
    for (const PlanTraffic& t : of) bytes += t.phase == PlanPhase::sync ? t.payload_bytes : 0;
    return bytes;
  };
  constexpr Rank most_ranks = 64;  // that are looked at
  for (Rank r = 1; r < std::min<Rank>(plan.plan.num_ranks(), most_ranks); ++r)
    if (auto other = traffic_of(plan.plan, r, runs); synced(other) > synced(traffic)) {
      std::erase_if(traffic, [](const PlanTraffic& t) { return t.phase == PlanPhase::sync; });
      for (PlanTraffic& t : other)
        if (t.phase == PlanPhase::sync) traffic.push_back(std::move(t));
    }
  for (const PlanTraffic& t : traffic) {
    const auto phase = rl_phase_of(t.phase);
    if (!phase || t.payload_bytes == 0) continue;
    const GroupShape& g = place.groups[static_cast<std::size_t>(plan.plan.family_index(t.group))];
    const double shared = t.phase == PlanPhase::sync ? static_cast<double>(s.sync.every) : 1.0;  // by iterations
    const double payload = static_cast<double>(t.payload_bytes + t.padding_bytes) / shared;
    // A peer reads as much as it is read from, on average; that needs one host.
    const bool peers = t.op == OpKind::peer_copy;
    const RingBytes sent = peers ? RingBytes{payload, 0.0} : ring_bytes(t.op, g, payload);
    out.push_back({*phase, fmt::format("{} {}", what_of(t), name_of(t.op)), sent.node, sent.network, 0.0});
  }
  double down = 0.0, up = 0.0, weights_down = 0.0, weights_up = 0.0, read = 0.0;
  for (const ShiftOp& op : plan.shifts) {
    if (op.kind != OpKind::copy) continue;
    const bool weights = op.phase == PlanPhase::sleep_rollout || op.phase == PlanPhase::sleep_weights ||
                         op.phase == PlanPhase::wake_rollout;
    double& bytes = op.phase == PlanPhase::sync ? read
                    : is_sleep(op.phase)        ? (weights ? weights_down : down)
                                                : (weights ? weights_up : up);
    bytes += static_cast<double>(op.count * op.bytes) / static_cast<double>(op.every);
  }
  const auto host = [&](RlPhase phase, const char* what, double bytes) {
    if (bytes > 0.0) out.push_back({phase, what, 0.0, 0.0, bytes});
  };
  host(RlPhase::sleep, "training's state to the host", down);
  host(RlPhase::sleep, "rollout's weights to the host", weights_down);
  host(RlPhase::wake, "and back", up);
  host(RlPhase::wake, "rollout's weights back", weights_up);
  host(RlPhase::sync, "parameters from their host copy", read);
  return out;
}

}  // namespace hotbunk
