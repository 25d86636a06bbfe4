#include "planner/priced/priced_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/format.h"
#include "graph/verify.h"
#include "layout/shard.h"
#include "layout/train_mesh.h"
#include "lowering/lower.h"
#include "lowering/rollout.h"
#include "lowering/sample_rows.h"
#include "planner/answers/remedies.h"
#include "planner/priced/writer.h"

namespace hotbunk {
namespace {

/// Groups of a family cut into parts of `each` neighbours, and those of the same place in their parts.
std::pair<GroupFamily, GroupFamily> cut(const GroupFamily& whole, std::int64_t each, std::string parts,
                                        std::string across) {
  std::pair<GroupFamily, GroupFamily> out{{std::move(parts), {}}, {std::move(across), {}}};
  for (const std::vector<Rank>& members : whole.groups) {
    for (auto first = members.begin(); first < members.end(); first += each)
      out.first.groups.emplace_back(first, first + each);
    for (std::int64_t place = 0; place < each; ++place) {
      auto& same = out.second.groups.emplace_back();
      for (auto at = place; at < std::ssize(members); at += each) same.push_back(members[static_cast<std::size_t>(at)]);
    }
  }
  return out;
}

}  // namespace

void PricedPlanWriter::add_families() {
  const TrainLayout& l = scenario_.train.layout;
  const std::int64_t world = point_.gpus();
  std::vector<Rank> all;
  for (std::int64_t r = 0; r < world; ++r) all.push_back(static_cast<Rank>(r));
  const auto add = [&](std::pair<GroupFamily, GroupFamily> both) {
    plan_.groups.push_back(std::move(both.first)), plan_.groups.push_back(std::move(both.second));
  };
  const auto along = [&](const Mesh& mesh, const char* name, const std::vector<std::string>& axes) {
    GroupFamily f{name, {}};
    for (const auto& group : mesh.groups(axes)) f.groups.emplace_back(group.begin(), group.end());
    return f;
  };
  const TrainPoint& p = point_.train;
  plan_.groups.push_back({"world", {all}});
  const Mesh mesh = train_mesh(l);
  plan_.groups.push_back(along(mesh, "train_tp", {"tp"}));
  plan_.groups.push_back(along(mesh, "train_cp", {"cp", "ulysses"}));
  plan_.groups.push_back(along(mesh, "train_pp", {"pp"}));
  const GroupFamily data = along(mesh, "train_data", {"cp", "ulysses", "dp"});
  plan_.groups.push_back(data);
  GroupFamily shardable{"train_data", {}};  // the same ranks, shard group by shard group
  for (std::int64_t stage = 0; stage < l.pp; ++stage)
    for (const std::vector<std::int64_t>& ranks : data_ranks(l, stage))
      shardable.groups.emplace_back(ranks.begin(), ranks.end());
  if (p.replicas() > 1) add(cut(shardable, p.shard_ranks(), "train_shard", "train_replicas"));
  if (p.reshard_ranks > 0) plan_.groups.push_back(cut(shardable, p.reshard_ranks, "train_reshard", "").first);
  if (scenario_.model
          .moe) {  // the experts' mesh has no context parallelism: those ranks hold other experts, or the same
    const auto experts =
        mesh_from_order(l.order, {{"tp", p.etp}, {"ep", p.ep}, {"dp", p.expert_ranks()}, {"pp", p.pp}});
    HB_CHECK(experts.has_value(), "an order that the loader let pass: {}", l.order);
    plan_.groups.push_back(along(*experts, "train_experts", {"ep"}));
    const GroupFamily same = along(*experts, "train_expert_replicas", {"dp"});
    add(cut(same, p.expert_shard_ranks(), "train_expert_shard", "train_expert_replicas"));
  }
  if (point_.samples()) add_engine_families();
  if (hands_over()) plan_.groups.push_back({"trainer", {{all.begin(), all.begin() + mesh.size()}}});
}

/// How many iterations the engines may be ahead of the trainer.
std::int32_t PricedPlanWriter::iterations_ahead() const {
  if (!apart() || !setting().overlaps) return 0;
  if (scenario_.sync.every > 1) return 1;  // what skips iterations is played in the walk's own
  return static_cast<std::int32_t>(std::min<std::int64_t>(scenario_.algorithm.max_staleness, max_steps_back + 1));
}

/// Of the ranks of each engine, tensor-parallel ones nearest, then context-parallel ones, then stages. Experts are
/// spread over neighbours.
void PricedPlanWriter::add_engine_families() {
  const RolloutPoint& r = point_.rollout;
  const std::int64_t first = point_.gpus() - (apart() ? r.ranks() : point_.gpus()), each = r.tp * r.cp * r.pp;
  const auto add = [&](const char* name, std::int64_t members, std::int64_t stride) {
    GroupFamily f{name, {}};
    for (std::int64_t e = 0; e < r.engines; ++e)
      for (std::int64_t place = 0; place < each; ++place) {
        if (place / stride % members != 0) continue;  // not a group's first
        auto& group = f.groups.emplace_back();
        for (std::int64_t i = 0; i < members; ++i)
          group.push_back(static_cast<Rank>(first + rank_of_seat(scenario_.rollout.layout, {e, place + i * stride})));
      }
    plan_.groups.push_back(std::move(f));
  };
  add("engine_tp", r.tp, 1);
  add("engine_attention", r.attention_tp(), 1);
  add("engine_cp", r.cp, r.tp);
  add("engine_tp_cp", r.tp * r.cp, 1);
  add("engine_experts", r.ep, 1);
  add("engine_pp", r.pp, r.tp * r.cp);
  if (hands_over()) add("engine", each, 1);  // which takes weights by itself
}

GroupId PricedPlanWriter::family(std::string_view name) const {
  const auto found = std::ranges::find(plan_.groups, name, &GroupFamily::name);
  HB_CHECK(found != plan_.groups.end(), "no family '{}'", name);
  return static_cast<GroupId>(found - plan_.groups.begin());
}

/// Of the job's phases those that have a price; PPO's critic beside them. Where nothing of training wakes, what it
/// works in is taken in a phase of its own, when the rollout has given back what it had.
void PricedPlanWriter::add_phases() {
  bool rolled_out = false, wakes = false;
  for (const JobPhase& p : JobPhases(scenario_)) {
    if (rolled_out && !wakes && is_training(p.phase))
      plan_.phases.push_back(JobPhase{PlanPhase::wake_work}.info()), wakes = true;
    rolled_out |= p.phase == PlanPhase::rollout;
    wakes |= rolled_out && p.wakes.any();
    if (p.phase == PlanPhase::checkpoint || p.phase == PlanPhase::export_) continue;
    if (p.phase == PlanPhase::exchange && !setting().own_engine) continue;
    if (p.phase == PlanPhase::train && setting().critic)
      for (const PlanPhase of_critic : {PlanPhase::values, PlanPhase::critic}) {
        plan_.phases.push_back(JobPhase{of_critic}.info());
        if (setting().critic_apart) plan_.phases.back().driven = false;  // one wait, whatever is trained meanwhile
      }
    plan_.phases.push_back(p.info());
    if (p.phase == PlanPhase::reference && setting().reference_apart) plan_.phases.back().driven = false;
  }
  if (framework_seconds() > 0.0) plan_.phases.push_back(JobPhase{PlanPhase::framework}.info());
}

/// Trainer and engines meet in the samples and in the weights. On policy the engines wait for the weights of each
/// training; where their weights may be older, they roll out what comes next beside it. Where they may be older by more
/// than one training, samples and weights are handed over: before their next rollout the engines take the weights of as
/// many trainings ago as they may be ahead, and the trainer waits for nothing but samples.
void PricedPlanWriter::add_phases_apart() {
  plan_.roles = {"trainer", "engines"};
  const std::vector<Player> trainer = {{.role = 0}}, engines = {{.role = 1}}, both = {{.role = 0}, {.role = 1}};
  const auto add = [&](PlanPhase p, const std::vector<Player>& players) {
    plan_.phases.push_back({std::string(name_of(p)), when_of(p), is_driven(p), 1, players});
  };
  add(PlanPhase::load, trainer);
  add(PlanPhase::start_rollout, engines);
  const auto sync = [&] {
    add(PlanPhase::sync, both);
    plan_.phases.back().every = static_cast<std::int32_t>(scenario_.sync.every);
    plan_.phases.back().players.back().steps_back = std::max(iterations_ahead() - 1, 0);
  };
  if (!setting().overlaps) sync();
  add(PlanPhase::rollout, engines);
  add(PlanPhase::samples, both);
  if (setting().overlaps) sync();
  if (setting().reference) add(PlanPhase::reference, trainer);
  if (setting().reference_apart) plan_.phases.back().driven = false;
  if (setting().old_logprobs) add(PlanPhase::old_logprobs, trainer);
  if (setting().critic)
    for (const PlanPhase of_critic : {PlanPhase::values, PlanPhase::critic}) {
      add(of_critic, trainer);
      if (setting().critic_apart) plan_.phases.back().driven = false;
    }
  add(PlanPhase::train, trainer);
  if (framework_seconds() > 0.0) add(PlanPhase::framework, both);
}

Op& PricedPlanWriter::priced(OpKind kind, StreamId stream, std::string name, const std::vector<BufferId>& work,
                             std::vector<PricePoint> prices) {
  std::vector<Tensor> touched;
  for (BufferId id : work)
    if (id >= 0) touched.push_back(b().whole(id));
  Op& op = b().emit(kind, stream, std::move(name), {}, std::move(touched));
  op.prices = std::move(prices);
  return op;
}

void PricedPlanWriter::communicate(OpKind kind, StreamId stream, std::string_view group, std::string name,
                                   const std::vector<BufferId>& work, std::vector<PricePoint> prices) {
  if (std::ranges::all_of(prices, [](const PricePoint& p) { return p.seconds <= 0.0 && p.payload_bytes <= 0.0; }))
    return;
  priced(kind, stream, std::move(name), work, std::move(prices)).group = family(group);
}

/// A part of training or of the rollout; with a copy on the host where it sleeps there.
void PricedPlanWriter::keep(std::vector<Backup>& to, const char* name, double size, Category category, SectionId device,
                            std::optional<SectionId> host) {
  if (size <= 0.0) return;
  const BufferId buffer = bytes(name, size, category, device);
  to.push_back({buffer, host ? bytes(fmt::format("host.{}", name), size, category, *host) : -1});
}

void PricedPlanWriter::add_train_buffers(const SleepParts& sleepers) {
  const auto host = [](bool sleeps, SectionId section) { return sleeps ? std::optional(section) : std::nullopt; };
  keep(shifts_.params, "train.params", train_.params, Category::params, sections::train_params,
       host(sleepers.params, sections::host_params));
  for (const auto& [name, size] :
       {std::pair("train.optimizer", train_.optimizer), std::pair("train.critic", train_.critic)})
    keep(shifts_.moments, name, size, Category::optimizer, sections::train_optimizer,
         host(sleepers.moments, sections::host_optimizer));
  keep(shifts_.reference, "train.reference", train_.reference, Category::params, sections::train_reference,
       host(sleepers.reference, sections::host_reference));
  if (train_.swapped_reference > 0.0)
    host_reference_ = bytes("host.reference", train_.swapped_reference, Category::params, sections::host_resident);
  const double gradients = sleepers.params || sleepers.moments ? train_.slept_gradients : 0.0;
  if (const double rest = train_.host_bytes - train_.swapped_reference + gradients; rest >= 1.0)
    host_state_ = bytes("host.train", rest, Category::optimizer, sections::host_resident);
}

/// What a trainer's process holds beside its context, where the plan's overhead is of both roles or where it goes when
/// the parameters do.
void PricedPlanWriter::add_communicators() {
  const double bytes_beside =
      apart() ? step_.overhead_bytes - model_.framework().context_bytes.value : train_.communicators;
  if (bytes_beside >= 1.0)
    shifts_.communicators =
        bytes("train.communicators", bytes_beside, Category::overhead, priced_sections::train_communicators);
}

void PricedPlanWriter::add_rollout_buffers(const SleepParts& sleepers) {
  const bool backed_up = sleepers.weights && scenario_.rollout.sleep_level == 1;
  keep(shifts_.weights, "rollout.weights", rollout_.weight_bytes, Category::params, sections::rollout_weights,
       backed_up ? std::optional(sections::host_weights) : std::nullopt);
  shifts_.kv = bytes("rollout.kv_cache", rollout_.pool_bytes, Category::kv_cache, sections::kv_cache);
  if (const double graphs = rl_.sleeping_graphs(); graphs >= 1.0)
    shifts_.graphs = bytes("rollout.graphs", graphs, Category::overhead, priced_sections::graphs);
}

void PricedPlanWriter::load(std::int32_t phase) {
  b().begin_block(phase, "load");
  for (SectionId s : {sections::train_params, sections::train_optimizer, sections::train_reference,
                      priced_sections::train_communicators, sections::host_resident})
    b().map(s);
  if (shifts_.keeps_host)
    for (SectionId s :
         {sections::host_params, sections::host_optimizer, sections::host_reference, sections::host_weights})
      b().map(s);
  for (const auto* part : {&shifts_.params, &shifts_.moments, &shifts_.reference})
    for (const Backup& m : *part) b().alloc(m.device);
  for (BufferId id : {host_state_, host_reference_})
    if (id >= 0) b().alloc(id, streams::host);
  if (shifts_.communicators >= 0) b().alloc(shifts_.communicators);
  priced(OpKind::priced, streams::compute, "load", {}, always(0.0)).outputs = state();
}

/// Engines on GPUs of their own: what they hold never sleeps.
void PricedPlanWriter::start(std::int32_t phase) {
  b().begin_block(phase, "start");
  b().map(sections::rollout_weights);
  b().map(sections::kv_cache);
  b().map(priced_sections::graphs);
  for (const Backup& m : shifts_.weights) b().alloc(m.device);
  b().alloc(shifts_.kv);
  if (shifts_.graphs >= 0) b().alloc(shifts_.graphs);
  priced(OpKind::priced, streams::compute, "start", {}, always(0.0)).outputs = all_of(shifts_.weights, &Backup::device);
}

/// Finished samples reach the trainer.
void PricedPlanWriter::samples(std::int32_t phase, Part part) {
  b().begin_block(phase, "samples");
  if (hands_over()) return hand_over("samples", {}, part.serves);
  b().emit(OpKind::barrier, streams::control, "samples", {}, {}).group = family("world");
}

/// Behind all that touched `work`, and before what touches it next.
void PricedPlanWriter::hand_over(const std::string& name, const std::vector<BufferId>& work, bool gives) {
  std::vector<Tensor> touched;
  for (const BufferId id : work) touched.push_back(b().whole(id));
  Op& op = b().emit(OpKind::barrier, streams::control, name, touched, touched);
  op.group = family("world");
  with(op, Attr::gives, std::int64_t{gives});
}

/// What an iteration takes beside all passes: of the host's, no kernel runs.
void PricedPlanWriter::framework(std::int32_t phase) {
  b().begin_block(phase, "framework");
  priced(OpKind::priced, streams::host, "framework", {}, always(framework_seconds()));
}

/// Training's persistent buffers on the device.
std::vector<Tensor> PricedPlanWriter::state() {
  std::vector<Tensor> out;
  for (const auto* part : {&shifts_.params, &shifts_.moments, &shifts_.reference})
    for (const Backup& m : *part) out.push_back(b().whole(m.device));
  return out;
}

std::vector<Tensor> PricedPlanWriter::all_of(const std::vector<Backup>& part, BufferId Backup::*side) {
  std::vector<Tensor> out;
  for (const Backup& m : part) out.push_back(b().whole(m.*side));
  return out;
}

/// Of a role, or of both in one.
Program PricedPlanWriter::program(Part part, std::int64_t stage) {
  builder_.emplace(plan_.phases);
  for (const char* name : {"train_communicators", "graphs"})
    builder_->draft().sections.push_back({name, Space::device});
  stage_ = stage;
  if (pipelined()) train_ = rl_.stage_side(point_.train, layers_, stage, step_);
  shifts_ = {.params = {}, .moments = {}, .reference = {}, .weights = {}, .keeps_host = !setting().own_engine};
  host_state_ = host_reference_ = -1;
  if (part.trains) add_communicators();
  const JobPhases phases = apart() ? JobPhases() : JobPhases(scenario_);
  if (part.trains) add_train_buffers(phases.sleepers());
  if (part.serves && point_.samples()) add_rollout_buffers(phases.sleepers());
  for (std::size_t i = 0; i < plan_.phases.size(); ++i) {
    const PlanPhase name = phase_named(plan_.phases[i].name);
    const auto phase = static_cast<std::int32_t>(i);
    const JobPhase* const shift = phases.find(name);
    if (part.trains && name == PlanPhase::load) load(phase);
    else if (name == PlanPhase::sync) sync(phase, shift && shift->from_host, part);
    else if (part.serves && name == PlanPhase::rollout) rollout(phase);
    else if (part.serves && apart() && name == PlanPhase::start_rollout) start(phase);
    else if (name == PlanPhase::samples) samples(phase, part);
    else if (name == PlanPhase::wake_work) b().begin_block(phase, "work");
    else if (name == PlanPhase::framework) framework(phase);
    else if (name == PlanPhase::exchange) exchange(phase);
    else if (shift && is_transition(name)) lower_transition(b(), shifts_, *shift, phase);
    else if (part.trains) train_phase(name, phase);
  }
  Draft draft = std::move(b().draft());
  run_passes(plan_, draft);
  return finish(plan_, std::move(draft), apart() || nothing_sleeps(scenario_));
}

PricedJob PricedPlanWriter::write() {
  plan_.scenario = scenario_.name;
  plan_.chunk_bytes = scenario_.cluster.gpu.is_cpu ? std::int64_t{4} << 10 : std::int64_t{2} << 20;
  plan_.device_capacity_bytes = std::llround(setting().device_bytes);
  plan_.host_capacity_bytes =
      scenario_.cluster.host_memory_bytes / std::max<std::int64_t>(1, scenario_.cluster.ranks_per_node());
  plan_.overhead_bytes = whole_bytes(apart() ? model_.framework().context_bytes.value : train_.overhead_bytes);
  plan_.streams = plan_streams();
  if (pipelined()) plan_.streams.push_back({"pipeline", StreamKind::communication});
  add_families();
  // One program for each stage of training's pipeline; engines on ranks of their own have one more.
  const std::int64_t stages = point_.train.pp;
  plan_.program_of_rank.assign(static_cast<std::size_t>(point_.gpus()), static_cast<std::int32_t>(stages));
  const Mesh mesh = train_mesh(scenario_.train.layout);
  for (std::int64_t r = 0; r < mesh.size(); ++r)
    plan_.program_of_rank[static_cast<std::size_t>(r)] = static_cast<std::int32_t>(mesh.coordinate(r, "pp"));
  apart() ? add_phases_apart() : add_phases();
  for (std::int64_t stage = 0; stage < stages; ++stage)
    plan_.programs.push_back(program({.trains = true, .serves = !apart()}, stage));
  if (apart()) {
    plan_.programs.push_back(program({.trains = false, .serves = true}));
    plan_.programs.back().role = 1;
  }
  return {std::move(scenario_), std::move(plan_)};
}

namespace {

PricedJob verified(PricedJob job) {
  const std::vector<std::string> faults = verify(job.plan);
  HB_CHECK(faults.empty(), "a priced plan does not verify: {}", fmt::join(faults, "; "));
  return job;
}

}  // namespace

Result<PricedJob> priced_job(const ScenarioPricer& pricer) {
  const RlPoint point = pricer.point();
  if (auto why = pricer.why_unpriced(point)) {
    if (why->help.empty()) why->help = remedy_text(pricer, point);
    return fail(std::move(*why));
  }
  if (point.samples())
    if (const RolloutPrice rollout = pricer.rl().parts(point).rollout; !rollout.fits)
      return fail(Diagnostic{
          .code = "E302",
          .message = "the rollout has no room for its weights and one sequence's KV cache",
          .where = {},
          .notes = {fmt::format("weights of a rank take {}, {} more are needed than rollout.memory_fraction {} leaves",
                                format_bytes(rollout.weight_bytes), format_bytes(rollout.lacking_bytes),
                                pricer.scenario().rollout.memory_fraction)},
          .help = "raise rollout.layout.tp or rollout.memory_fraction, or lower workload.response_tokens.max"});
  return verified(PricedPlanWriter(pricer.scenario(), pricer.rl(), point).write());
}

PricedJob priced_training(const TrainModel& model, const TrainPoint& p, const ClusterSpec& cluster) {
  const std::int64_t sequence = model.setting().sequence;
  Scenario s;
  s.name = "training";
  s.model = model.model();
  s.cluster = cluster;
  s.train.engine = p.sharding == Sharding::replicated ? TrainEngine::ddp
                   : p.gathers_units()                ? TrainEngine::fsdp2
                                                      : TrainEngine::zero1;
  TrainLayout& l = s.train.layout;
  l.dp = p.dp, l.cp = p.cp, l.ulysses = p.ulysses, l.tp = p.tp, l.pp = p.pp, l.vpp = p.vpp;
  l.ep = p.ep, l.etp = p.etp, l.fsdp = p.fsdp, l.sp = p.sp;
  l.shard_over = text_of(p.shard_over);
  s.train.pipeline_schedule = p.vpp > 1 ? "interleaved" : std::string(name_of(p.schedule));
  s.train.pipeline_split = model.setting().pipeline_split;
  s.train.micro_batch_tokens = TrainLayout{.cp = p.cp, .ulysses = p.ulysses}.share_of(p.micro_batch * sequence);
  s.train.micro_batch_sequences = p.micro_batch;
  s.train.recompute = p.recompute;
  s.algorithm.name = AlgorithmName::sft;
  s.algorithm.prompts = p.sequences() * p.dp;
  s.algorithm.samples_per_prompt = s.algorithm.mini_batches = 1;
  const auto fixed_length = [](std::int64_t tokens) {
    const auto n = static_cast<double>(tokens);
    return LengthSpec{.mean = n, .max = n, .distribution = LengthDistribution::fixed};
  };
  s.workload.prompt_tokens = fixed_length(sequence - 1), s.workload.response_tokens = fixed_length(1);
  s.steps = 1;
  const RlModel rl(model, rl_setting_of(s));
  return verified(PricedPlanWriter(s, rl, {.train = p, .rollout = {.engines = 0}}).write());
}

}  // namespace hotbunk
