#include "lowering/lower.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/check.h"
#include "base/format.h"
#include "graph/verify.h"
#include "layout/expert_copies.h"
#include "layout/scenario_layout.h"
#include "layout/train_mesh.h"
#include "lowering/phases.h"
#include "lowering/rollout.h"
#include "lowering/sample_rows.h"
#include "spec/validate.h"

namespace hotbunk {
namespace {

/// The phases of a plan, in order: all of a job's, or those that a model needs which is only asked.
std::vector<PhaseInfo> phases_of(const Scenario& s, Purpose purpose, const PhaseFilter& wanted) {
  const auto asked = [&](PlanPhase p) {
    if (purpose == Purpose::job) return !wanted || wanted(p);
    if (purpose == Purpose::score) return p == PlanPhase::load || p == PlanPhase::old_logprobs;
    return p == PlanPhase::load || p == PlanPhase::start_rollout || p == PlanPhase::sync || p == PlanPhase::rollout;
  };
  std::vector<PhaseInfo> out;
  for (const JobPhase& p : JobPhases(s))
    if (asked(p.phase)) out.push_back(p.info());
  return out;
}

/// The scenario with what a model that is only asked does not have.
Scenario for_purpose(Scenario s, Purpose purpose) {
  if (purpose == Purpose::job) return s;
  s.train.offload = Offload::none;
  s.rollout.sleep = false;
  s.algorithm.name = AlgorithmName::grpo;
  s.transition = "hotbunk";
  s.sync.verify = false, s.sync.every = 1;
  s.algorithm.reference = false, s.algorithm.old_logprobs = true;
  return s;
}

template <class Member>
std::vector<Rank> members(std::int64_t count, Member&& member) {
  std::vector<Rank> out;
  for (std::int64_t i = 0; i < count; ++i) out.push_back(member(i));
  return out;
}

/// The families within a pipeline stage, by Family; without groups where the plan does without.
using Families = std::array<GroupFamily, num_families>;
GroupFamily& at(Families& all, Family f) { return all[static_cast<std::size_t>(f)]; }

/// Of a stage whose blocks (spec/expert_mesh.h) spread experts, or are several of a tensor-parallel group; its ranks by
/// place and block.
void add_expert_groups(Families& all, const std::vector<std::vector<std::int64_t>>& ranks, const ShardMesh& mesh) {
  const std::int64_t places = mesh.experts.places, blocks = mesh.experts.blocks, holders = mesh.experts.spread,
                     of_stage = mesh.data() * blocks, copies = of_stage / holders,
                     shards = mesh.expert_shards(mesh.shards);
  const auto in_block = [&](std::int64_t place, std::int64_t block) {
    return static_cast<Rank>(ranks[static_cast<std::size_t>(place)][static_cast<std::size_t>(block)]);
  };
  const auto rank = [&](std::int64_t place, std::int64_t holder, std::int64_t copy) {
    return in_block(place, copy * holders + holder);
  };
  const auto add = [&](Family f, std::int64_t count, auto&& member) {
    at(all, f).groups.push_back(members(count, member));
  };
  for (std::int64_t copy = 0; copy < copies; ++copy)
    add(Family::expert_places, holders * places, [&](auto m) { return rank(m % places, m / places, copy); });
  for (std::int64_t p = 0; p < places; ++p) {
    for (std::int64_t copy = 0; copy < copies; ++copy)
      add(Family::experts, holders, [&](auto h) { return rank(p, h, copy); });
    for (std::int64_t h = 0; h < holders; ++h) {
      for (std::int64_t first = 0; first < copies; first += shards)
        add(Family::expert_shards, shards, [&](auto i) { return rank(p, h, first + i); });
      for (std::int64_t i = 0; i < shards; ++i)
        add(Family::expert_replicas, copies / shards, [&](auto g) { return rank(p, h, g * shards + i); });
    }
  }
  if (blocks == 1) return;
  for (std::int64_t b = 0; b < of_stage; ++b) add(Family::expert_block, places, [&](auto p) { return in_block(p, b); });
  for (std::int64_t first = 0; first < of_stage; first += holders * blocks)
    add(Family::expert_holders, holders * mesh.tensor,
        [&](auto m) { return in_block(m % places, first + m / places); });
  for (std::int64_t first = 0; first < of_stage; first += blocks)
    for (std::int64_t p = 0; p < places; ++p)
      add(Family::expert_peers, blocks, [&](auto b) { return in_block(p, first + b); });
}

/// Where adapters of experts lie on ranks that share each; of a stage's ranks by place and block.
void add_expert_sharers(Families& all, const std::vector<std::vector<std::int64_t>>& ranks, const ShardMesh& mesh) {
  const std::int64_t places = mesh.experts.places, columns = mesh.experts.columns(),
                     of_stage = mesh.data() * mesh.tensor, of_copy = mesh.expert_columns_ranks() * columns;
  const auto add = [&](Family f, std::int64_t count, std::int64_t first, std::int64_t step) {
    at(all, f).groups.push_back(members(count, [&](auto i) {
      const std::int64_t n = first + i * step;
      return static_cast<Rank>(ranks[static_cast<std::size_t>(n % places)][static_cast<std::size_t>(n / places)]);
    }));
  };
  for (std::int64_t first = 0; first < of_stage; first += columns) add(Family::expert_sharers, columns, first, 1);
  for (std::int64_t copy = 0; copy < of_stage; copy += of_copy)
    for (std::int64_t c = 0; c < columns; ++c)
      add(Family::expert_columns, mesh.expert_columns_ranks(), copy + c, columns);
}

void add_stage(Families& all, const Scenario& s, const ShardMesh& mesh, std::int64_t stage) {
  const std::vector<std::vector<std::int64_t>> data = data_ranks(s.train.layout, stage);  // by tensor-parallel place
  const auto rank = [&](std::int64_t place, std::int64_t d) {
    return static_cast<Rank>(data[static_cast<std::size_t>(place)][static_cast<std::size_t>(d)]);
  };
  const auto add = [&](Family f, std::int64_t count, auto&& member) {
    at(all, f).groups.push_back(members(count, member));
  };
  for (std::int64_t t = 0; t < mesh.tensor; ++t) {
    for (std::int64_t g = 0; g < mesh.replicas; ++g)
      add(Family::fsdp, mesh.shards, [&](auto i) { return rank(t, g * mesh.shards + i); });
    // Of neighbours that have other experts each, those with the same: a unit is the same on all of a group.
    if (const std::int64_t few = s.train.reshard_ranks, apart = mesh.experts.spread; few > 0)
      for (std::int64_t d = 0; d < mesh.data(); d += few * apart)
        for (std::int64_t h = 0; h < apart; ++h)
          add(Family::reshard, few, [&](auto i) { return rank(t, d + h + i * apart); });
    for (std::int64_t i = 0; i < mesh.shards; ++i)
      add(Family::replicas, mesh.replicas, [&](auto g) { return rank(t, g * mesh.shards + i); });
    add(Family::data, mesh.data(), [&](auto d) { return rank(t, d); });
  }
  for (std::int64_t d = 0; d < mesh.data(); ++d) add(Family::train_tp, mesh.tensor, [&](auto t) { return rank(t, d); });
  for (std::int64_t g = 0; g < mesh.replicas; ++g)
    add(Family::holders, mesh.shards * mesh.tensor,
        [&](auto m) { return rank(m % mesh.tensor, g * mesh.shards + m / mesh.tensor); });
  if (mesh.experts.lies_apart()) add_expert_groups(all, block_ranks(s.train.layout, mesh.experts, stage), mesh);
  if (mesh.experts.columns() > 1 && s.model.adapts_experts())
    add_expert_sharers(all, block_ranks(s.train.layout, mesh.experts, stage), mesh);
  const std::int64_t heads = s.model.kv_heads;
  if (heads >= mesh.tensor) return;
  const std::int64_t repeat = mesh.tensor / heads;
  for (std::int64_t d = 0; d < mesh.data(); ++d) {
    for (std::int64_t h = 0; h < heads; ++h)
      add(Family::kv_sharers, repeat, [&](auto i) { return rank(h * repeat + i, d); });
    for (std::int64_t i = 0; i < repeat; ++i)
      add(Family::kv_parts, heads, [&](auto h) { return rank(h * repeat + i, d); });
  }
}

void add_engines(Families& all, const RolloutLayout& l) {
  for (std::int64_t e = 0; e < l.dp; ++e) {
    const auto add = [&](Family f, std::int64_t count, std::int64_t first, std::int64_t step) {
      at(all, f).groups.push_back(members(count, [&](auto i) {
        return static_cast<Rank>(rank_of_seat(l, {e, first + i * step}));
      }));
    };
    const std::int64_t of_stage = l.tp * l.cp;
    for (std::int64_t first = 0; first < of_stage * l.pp; first += l.tp) add(Family::tp, l.tp, first, 1);
    if (of_stage * l.pp > l.tp) add(Family::engines, of_stage * l.pp, 0, 1);
    for (std::int64_t place = 0; l.pp > 1 && place < of_stage; ++place)
      add(Family::engine_stages, l.pp, place, of_stage);
    for (std::int64_t stage = 0; l.cp > 1 && stage < l.pp; ++stage)
      for (std::int64_t t = 0; t < l.tp; ++t) add(Family::engine_context, l.cp, stage * of_stage + t, l.tp);
    if (!has_attention_groups(l)) continue;
    const std::int64_t sharers = l.tp / l.attention_dp;
    for (std::int64_t first = 0; first < of_stage * l.pp; first += sharers)
      add(Family::engine_attention, sharers, first, 1);
    for (std::int64_t first = 0; first < of_stage * l.pp; first += l.tp)
      for (std::int64_t place = 0; place < sharers; ++place)
        add(Family::engine_peers, l.attention_dp, first + place, sharers);
  }
}

std::vector<GroupFamily> group_families(const Scenario& s, const ShardMesh& mesh, bool engines) {
  Families all;
  constexpr std::array names = {"fsdp",
                                "tp",
                                "world",
                                "replicas",
                                "train_tp",
                                "holders",
                                "data",
                                "kv_sharers",
                                "kv_parts",
                                "train_pp",
                                "tied",
                                "ulysses",
                                "context",
                                "experts",
                                "expert_places",
                                "expert_shards",
                                "expert_replicas",
                                "engine_stages",
                                "engines",
                                "reshard",
                                "engine_context",
                                "expert_copies",
                                "expert_block",
                                "expert_holders",
                                "expert_peers",
                                "engine_attention",
                                "engine_peers",
                                "expert_sharers",
                                "expert_columns"};
  static_assert(names.size() == std::tuple_size_v<Families>);
  for (std::size_t f = 0; f < all.size(); ++f) all[f].name = names[f];
  for (std::int64_t stage = 0; stage < mesh.stages; ++stage) add_stage(all, s, mesh, stage);
  at(all, Family::world).groups = {members(mesh.ranks(), [](auto r) { return static_cast<Rank>(r); })};
  if (engines) add_engines(all, s.rollout.layout);
  const bool copies = expert_copies(s).sent_most > 0;
  if (copies) at(all, Family::expert_copies).groups = at(all, Family::experts).groups;
  const Mesh train = train_mesh(s.train.layout);
  for (const auto& [family, axis] : {std::pair(Family::ulysses, "ulysses"), {Family::context, "cp"}})
    if (train.extent(axis) > 1)
      for (const std::vector<std::int64_t>& sharers : train.groups({axis}))
        at(all, family).groups.emplace_back(sharers.begin(), sharers.end());
  for (std::int64_t r = 0; mesh.stages > 1 && r < train.size(); ++r) {
    if (train.coordinate(r, "pp") != 0) continue;
    const std::vector<std::int64_t> stages = train.group_of(r, {"pp"});
    at(all, Family::train_pp).groups.emplace_back(stages.begin(), stages.end());
    if (s.model.tie_embeddings)
      at(all, Family::tied).groups.push_back({static_cast<Rank>(stages.front()), static_cast<Rank>(stages.back())});
  }
  // A plan has all families up to the last that it may use.
  const RolloutLayout& r = s.rollout.layout;
  const Family last = mesh.experts.columns() > 1 && s.model.adapts_experts() ? Family::expert_columns
                      : engines && has_attention_groups(r)                   ? Family::engine_peers
                      : mesh.experts.blocks > 1                              ? Family::expert_peers
                      : copies                                               ? Family::expert_copies
                      : engines && r.cp > 1                                  ? Family::engine_context
                      : s.train.reshard_ranks > 0                            ? Family::reshard
                      : engines && r.pp > 1                                  ? Family::engines
                      : mesh.experts.spread > 1                              ? Family::expert_replicas
                      : s.train.layout.cp > 1                                ? Family::context
                      : s.train.layout.ulysses > 1                           ? Family::ulysses
                      : mesh.stages > 1                                      ? Family::tied
                      : mesh.tensor > s.model.kv_heads                       ? Family::kv_parts
                      : mesh.tensor > 1                                      ? Family::data
                      : mesh.replicas > 1                                    ? Family::replicas
                                                                             : Family::world;
  return {all.begin(), all.begin() + static_cast<std::ptrdiff_t>(last) + 1};
}

/// Whether ranks serve rollout engines.
bool rolls_out(const Scenario& s, Purpose purpose) {
  return purpose == Purpose::generate || (purpose == Purpose::job && s.algorithm.name != AlgorithmName::sft);
}

/// Whether a phase may touch what engines hold.
bool serves_in(std::string_view phase) {
  const PlanPhase at = phase_named(phase);
  return at != PlanPhase::load && !is_training(at);
}

/// Which stage of the trainer's pipeline a rank is, and which of an engine's.
struct Stages {
  std::int64_t train = 0, engine = 0;
  friend bool operator==(const Stages&, const Stages&) = default;
};

/// What every rank of such stages does, as it is written: the parts of its own follow from its places (graph/move.h).
/// `serves`: the plan has phases that touch what engines hold; then with so many blocks of KV cache.
Draft draft_of(const Scenario& s, const Plan& plan, Purpose purpose, Stages stages, bool serves, std::int64_t kv_blocks,
               ModelShapes& shapes, bool shares) {
  ProgramBuilder b(plan.phases, shares);
  const auto on = [&](std::string_view name, auto&& emit) {
    if (const std::int32_t phase = plan.phase_index(name); phase >= 0) emit(phase);
  };
  const ShardMesh mesh = shard_mesh(s);
  const TrainState train(s, b, mesh, shapes, stages.train, purpose == Purpose::job);
  on("load", [&](auto p) { lower_load(b, train, p); });
  on("train", [&](auto p) { lower_train(s, b, train, p); });
  on("reference", [&](auto p) { lower_log_probs(s, b, train, p, Weights::reference, "reference."); });
  on("old_logprobs", [&](auto p) { lower_log_probs(s, b, train, p, Weights::trained, "old."); });
  on("checkpoint", [&](auto p) { lower_export(b, train, p, "checkpoint.", false); });
  on("export", [&](auto p) { lower_export(b, train, p, "export.", true); });
  const JobPhases phases(s);
  const auto transitions = [&](const RolloutState* rollout) {
    const ShiftBuffers buffers = shift_buffers(train, rollout);
    for (const JobPhase& p : phases)
      if (is_transition(p.phase)) on(name_of(p.phase), [&](auto i) { lower_transition(b, buffers, p, i); });
  };
  if (serves) {
    const RolloutState rollout(s, b, shapes.weights(engine_cuts(s)[static_cast<std::size_t>(stages.engine)]),
                               stages.engine, kv_blocks);
    transitions(&rollout);
    on("sync", [&](auto p) { lower_sync(s, b, train, rollout, phases.find(PlanPhase::sync)->from_host, p); });
    on("rollout", [&](auto p) { lower_rollout(s, b, rollout, p); });
    on("exchange", [&](auto p) { lower_exchange(s, b, mesh.ranks(), p); });
  } else {
    transitions(nullptr);
  }
  return std::move(b.draft());
}

std::int64_t weight_bytes_of(const Scenario& s, const std::vector<LocalWeight>& weights) {
  std::int64_t bytes = 0;
  for (const LocalWeight& w : weights) bytes += w.elements() * size_of(s.rollout.dtype);
  return bytes;
}

}  // namespace

std::optional<std::int64_t> kv_pool_blocks(const Scenario& s, std::int64_t weight_bytes, std::int64_t layers) {
  const std::int64_t longest = max_blocks_per_seq(s);
  const std::int64_t useful = slots_of_group(s) * longest;
  if (s.rollout.kv_cache_tokens > 0) return pool_share(s.rollout) / block_span(s.rollout);
  if (s.cluster.device_memory_bytes <= 0) return useful;
  const auto pool =
      static_cast<std::int64_t>(s.rollout.memory_fraction * static_cast<double>(s.cluster.device_memory_bytes)) -
      weight_bytes;
  const std::int64_t blocks = std::min(useful, pool / kv_block_bytes(s, layers));
  if (pool > 0 && blocks >= longest) return blocks;
  return std::nullopt;
}

namespace {

/// The stages of an engine have as many blocks each, of their layers.
Result<std::int64_t> kv_pool_blocks(const Scenario& s, ModelShapes& shapes) {
  std::optional<std::int64_t> least;
  const std::vector<EngineCut> cuts = engine_cuts(s);
  for (std::size_t stage = 0; stage < cuts.size(); ++stage) {
    const std::int64_t weights = weight_bytes_of(s, *shapes.weights(cuts[stage])),
                       layers = engine_stage_layers(s, static_cast<std::int64_t>(stage)).size();
    const auto blocks = kv_pool_blocks(s, weights, layers);
    if (blocks) {
      least = std::min(least.value_or(*blocks), *blocks);
      continue;
    }
    const auto device = static_cast<double>(s.cluster.device_memory_bytes);
    const std::int64_t longest = max_blocks_per_seq(s), block_bytes = kv_block_bytes(s, layers);
    const auto pool = static_cast<std::int64_t>(s.rollout.memory_fraction * device) - weights;
    return fail(Diagnostic{
        .code = "E302",
        .message = "rollout.memory_fraction leaves no room for one sequence's KV cache",
        .where = {},
        .notes = {fmt::format("memory_fraction {} x {} - weights {} = {}, but {} tokens need {} blocks x {} = {}",
                              s.rollout.memory_fraction, format_bytes(device),
                              format_bytes(static_cast<double>(weights)), format_bytes(static_cast<double>(pool)),
                              max_sample_tokens(s), longest, format_bytes(static_cast<double>(block_bytes)),
                              format_bytes(static_cast<double>(longest * block_bytes)))},
        .help = "raise rollout.layout.tp or rollout.memory_fraction, or lower workload.response_tokens.max"});
  }
  return *least;
}

}  // namespace

Result<std::int64_t> kv_pool_blocks(const Scenario& s) {
  ModelShapes shapes(s.model);
  return kv_pool_blocks(s, shapes);
}

bool nothing_sleeps(const Scenario& s) { return s.train.offload != Offload::sleep && !s.rollout.sleep; }

std::string why_not_lowered(const Scenario& s) {
  if (const auto reasons = unsupported_to_execute(s); !reasons.empty()) return reasons.front();
  if (s.algorithm.name == AlgorithmName::sft) return "";
  if (std::string why = why_not_rollout_tp(s.model, engine_cuts(s).front()); !why.empty()) return why;
  return kv_pool_blocks(s) ? "" : "rollout.memory_fraction leaves no room for one sequence's KV cache";
}

namespace {

/// A plan whose programs are still to be made of what was written.
struct Written {
  Plan plan;
  std::vector<Draft> drafts;  // of each pipeline stage
  bool keep_mapped = false;
};

/// `wanted`: the job's phases that are lowered; empty: all.
Result<Written> write(const Scenario& scenario, Purpose purpose, const PhaseFilter& wanted, ModelShapes& shapes,
                      bool shares = true) {
  const Scenario s = for_purpose(scenario, purpose);
  if (const auto reasons = unsupported_to_execute(s); !reasons.empty()) {
    Diagnostics all;
    const bool job = purpose == Purpose::job;
    for (const std::string& why : reasons)
      all.push_back(
          {.code = "E250",
           .message = (job ? "this scenario is not run yet: " : "a model of this kind is not executed yet: ") + why,
           .where = {},
           .notes = {},
           .help =
               job ? "change the setting named; `hotbunk plan`, `hotbunk explain` and `hotbunk simulate` answer for it "
                     "as it is, where that has a price"
                   : "Llama, Qwen2, Qwen3, Mixtral and Qwen3-MoE are executed"});
    return fail(std::move(all));
  }
  const std::int64_t world = s.train.layout.ranks();
  Plan plan;
  plan.scenario = s.name;
  plan.chunk_bytes = s.cluster.gpu.is_cpu ? std::int64_t{4} << 10 : std::int64_t{2} << 20;
  plan.device_capacity_bytes = s.cluster.device_memory_bytes;
  plan.host_capacity_bytes = s.cluster.host_memory_bytes / std::max<std::int64_t>(1, s.cluster.ranks_per_node());
  const bool engines = rolls_out(s, purpose);
  const ShardMesh mesh = shard_mesh(s);
  plan.streams = plan_streams(mesh.replicas > 1 || mesh.expert_replicas() > 1, mesh.stages > 1, s.train.layout.cp > 1);
  plan.groups = group_families(s, mesh, engines);
  // All up to the last that the plan may use.
  const bool experts = mesh.experts.spread > 1 || mesh.experts.counts_tokens(),
             ulysses = s.train.layout.ulysses > 1 || experts;
  const bool apart = engines && attention_groups(s) > 1;
  if (s.train.layout.sp || mesh.stages > 1 || ulysses || s.train.layout.sharers() > 1 || apart)
    plan.extents.push_back({"sequence"});
  if (mesh.stages > 1 || ulysses) plan.extents.push_back({"returned"});
  if (ulysses) plan.extents.push_back({"gathered"});
  if (mesh.experts.spread > 1) plan.extents.push_back({"routed", most_rows_received(s), CountedBy::device});
  else if (experts) plan.extents.push_back({"routed"});
  if (const ExpertCopies copies = expert_copies(s); copies.sent_most > 0) {
    plan.extents.push_back({"copies_sent", copies.sent_most, CountedBy::device});
    plan.extents.push_back({"copies_came", copies.came_most, CountedBy::device});
  } else if (mesh.experts.counts_tokens()) {
    plan.extents.push_back({"block"});
  }
  plan.phases = phases_of(s, purpose, wanted);
  const bool serves = engines && std::ranges::any_of(plan.phases, [](const PhaseInfo& p) { return serves_in(p.name); });
  std::int64_t kv_blocks = 0;
  if (serves) {
    const auto blocks = kv_pool_blocks(s, shapes);
    if (!blocks) return tl::unexpected(blocks.error());
    kv_blocks = *blocks;
  }
  const Mesh train = train_mesh(s.train.layout);
  std::vector<Stages> programs;  // one for each stage of the trainer's pipeline that some stage of an engine's meets
  for (std::int64_t r = 0; r < world; ++r) {
    const std::int64_t place = serves ? engine_stage(s.rollout.layout, r) : 0;
    programs.push_back({train.coordinate(r, "pp"), place});
  }
  std::vector<Stages> distinct = programs;
  std::ranges::sort(distinct, {}, [](const Stages& at) { return std::pair(at.train, at.engine); });
  distinct.erase(std::ranges::unique(distinct).begin(), distinct.end());
  for (const Stages& of_rank : programs)
    plan.program_of_rank.push_back(static_cast<std::int32_t>(std::ranges::find(distinct, of_rank) - distinct.begin()));
  std::vector<Draft> drafts;
  for (const Stages& stages : distinct)
    drafts.push_back(draft_of(s, plan, purpose, stages, serves, kv_blocks, shapes, shares));
  return Written{std::move(plan), std::move(drafts), nothing_sleeps(s)};
}

Result<Plan> finished(Result<Written> written) {
  if (!written) return tl::unexpected(written.error());
  Plan& plan = written->plan;
  for (Draft& draft : written->drafts) {
    run_passes(plan, draft);
    plan.programs.push_back(finish(plan, std::move(draft), written->keep_mapped));
  }
  return std::move(plan);
}

}  // namespace

Result<Plan> lower(const Scenario& scenario, Purpose purpose) {
  ModelShapes shapes(scenario.model);
  Result<Plan> plan = finished(write(scenario, purpose, nullptr, shapes));
  if (!plan) return plan;
  const std::vector<std::string> faults = verify(*plan);
  HB_CHECK(faults.empty(), "the lowering wrote a plan that does not verify: {}", fmt::join(faults, "; "));
  return plan;
}

Result<Plan> lower_call_by_call(const Scenario& scenario, Purpose purpose) {
  ModelShapes shapes(scenario.model);
  return finished(write(scenario, purpose, nullptr, shapes, false));
}

namespace {

PhaseBytes transients_of(const Plan& plan, const Draft& draft) {
  PhaseBytes out{};
  for (std::size_t p = 0; p < plan.phases.size(); ++p)
    out[static_cast<std::size_t>(phase_named(plan.phases[p].name))] = draft.transient_bytes[p];
  return out;
}

}  // namespace

Result<PartOfPlan> lower_phases(const Scenario& scenario, const PhaseFilter& wanted, ModelShapes& shapes) {
  Result<Written> written = write(scenario, Purpose::job, wanted, shapes);
  if (!written) return tl::unexpected(written.error());
  PartOfPlan out;
  for (Draft& draft : written->drafts) {
    run_passes(written->plan, draft);
    out.transients.push_back(transients_of(written->plan, draft));
    written->plan.programs.push_back(finish(written->plan, std::move(draft), nothing_sleeps(scenario)));
  }
  out.plan = std::move(written->plan);
  return out;
}

Result<WrittenPart> write_phases(const Scenario& scenario, const PhaseFilter& wanted, ModelShapes& shapes) {
  Result<Written> written = write(scenario, Purpose::job, wanted, shapes);
  if (!written) return tl::unexpected(written.error());
  for (Draft& draft : written->drafts) run_passes(written->plan, draft);
  WrittenPart out{std::move(written->plan), std::move(written->drafts), {}};
  for (const Draft& draft : out.drafts) out.transients.push_back(transients_of(out.plan, draft));
  return out;
}

}  // namespace hotbunk
