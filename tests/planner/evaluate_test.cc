// What is read from plans over bodies and calls, or put together of parts of plans, against walks over all ops: random
// scenarios of everything that lowers, memory, shifts and traffic equal to the byte. Long for the walks, the slow
// obvious version of what evaluate answers, which its cases share.
#include "planner/price/evaluate.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <rapidcheck.h>

#include <array>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <map>
#include <set>
#include <utility>

#include "graph/access.h"
#include "graph/section_states.h"
#include "layout/flat_units.h"
#include "layout/pipeline_turns.h"
#include "layout/train_mesh.h"
#include "lowering/lower.h"
#include "lowering/phases.h"
#include "lowering/sample_rows.h"
#include "planner/answers/choices.h"
#include "planner/answers/lowered_space.h"
#include "planner/answers/plan_answer.h"
#include "planner/answers/plan_shifts.h"
#include "spec/catalog.h"
#include "spec/family.h"
#include "spec/loader.h"
#include "spec/names.h"
#include "tests/blocks.h"
#include "tests/drawn_scenario.h"
#include "tests/paths.h"
#include "trace/static_memory.h"
#include "trace/traffic_rules.h"

using namespace hotbunk;
using namespace hotbunk::testing;

namespace {

Scenario scenario_from(const std::string& text, const std::vector<std::string>& sets = {}) {
  auto s = load_scenario_text(text, "drawn.yaml", sets);
  if (!s) throw std::runtime_error(render(s.error()) + text);
  return *s;
}

/// Vocabulary 33, heads 4 over 2 KV heads of 6, as small as counting by hand wants.
Scenario tiny(int world, int tp, const std::vector<std::string>& sets = {}) {
  return scenario_from(
      fmt::format("name: tiny\n"
                  "model: {{model_type: llama, architectures: [LlamaForCausalLM], hidden_size: 24, "
                  "intermediate_size: 40, num_hidden_layers: 3, num_attention_heads: 4, num_key_value_heads: 2, "
                  "head_dim: 6, vocab_size: 33, max_position_embeddings: 64, tie_word_embeddings: false}}\n"
                  "cluster: {{gpu: local-cpu, nodes: 1, gpus_per_node: 1, ranks_per_device: {0}, "
                  "device_memory_mib: 16}}\n"
                  "train: {{layout: {{dp: {0}}}, micro_batch_tokens: 64, precision: {{params: fp32}}}}\n"
                  "rollout: {{engine: hotbunk, layout: {{tp: {1}, dp: {2}}}, max_running_requests: 6, "
                  "max_prefill_tokens: 24, block_tokens: 4, kv_cache_tokens: 40}}\n"
                  "sync: {{bucket_mib: 0.008}}\n"
                  "algorithm: {{name: grpo, prompts: 5, samples_per_prompt: 4}}\n"
                  "workload: {{prompt_tokens: {{mean: 5, max: 5}}, response_tokens: {{mean: 4, max: 6}}}}\n",
                  world, tp, world / tp),
      sets);
}

/// Every knob that a plan's bytes depend on, and the value that was drawn for it where those are few.
void note_knobs(const Scenario& s, std::set<std::string>& seen) {
  const auto note = [&](const char* knob, const auto& value) { seen.insert(fmt::format("{}={}", knob, value)); };
  const bool sft = s.algorithm.name == AlgorithmName::sft;
  note("algorithm", sft ? "sft" : "grpo");
  note("family", family_of(s.model).model_type), note("tied", s.model.tie_embeddings);
  note("cpu", s.cluster.gpu.is_cpu), note("nodes", s.cluster.nodes);
  const ShardMesh mesh = shard_mesh(s);
  note("engine", name_of(s.train.engine)), note("copies", mesh.shards > 1 && mesh.replicas > 1);
  note("over", s.train.layout.shard_over.empty() ? "all" : "some");
  note("recompute", static_cast<int>(s.train.recompute)), note("reshard", s.train.reshard_after_forward),
      note("few", s.train.reshard_ranks > 0);
  note("prefetch", s.train.prefetch), note("chunked", s.train.loss_chunk_tokens > 0);
  note("clipped", s.optimizer.max_grad_norm > 0);
  const Precision& p = s.train.precision;
  note("params", name_of(p.params)), note("grads", name_of(p.grads));
  note("master", name_of(p.master)), note("moments", name_of(p.moments));
  note("mini-batches", s.algorithm.mini_batches > 1);
  if (sft) return;
  note("host", s.train.offload == Offload::layerwise ? "layers" : s.optimizer.cpu_fraction > 0 ? "optimizer" : "none");
  note("offload", s.train.offload == Offload::sleep), note("sleep", s.rollout.sleep ? s.rollout.sleep_level : 0);
  note("ulysses", s.train.layout.ulysses > 1);
  note("cp", s.train.layout.cp > 1 ? name_of(s.train.context_exchange) : "none");
  note("pp", s.train.layout.pp > 1 ? s.train.pipeline_schedule : "none"), note("vpp", s.train.layout.vpp > 1);
  if (s.train.engine == TrainEngine::fsdp1) note("wrap", name_of(s.train.wrap.policy));
  note("tp", s.rollout.layout.tp), note("engines", s.rollout.layout.dp > 1);
  note("strided", s.rollout.layout.order == RankOrder::strided), note("rollout", name_of(s.rollout.dtype));
  note("pool", s.rollout.kv_cache_tokens > 0), note("ipc", s.sync.transport == SyncTransport::ipc);
  const JobPhases phases(s);
  note("order", s.transition == "hotbunk" ? "default" : "drawn");
  note("from host", phases.find(PlanPhase::sync)->from_host), note("periodic", s.sync.every > 1);
  note("verify", s.sync.verify), note("reference", s.algorithm.reference), note("old", s.algorithm.old_logprobs);
}

/// Every block once, filled to its capacity.
PlanRuns one_run_each(const Scenario& s) {
  const std::int64_t slots = s.rollout.max_running_requests, prefill = s.rollout.max_prefill_tokens;
  return {.prefill = {1, prefill, std::min(slots, prefill)},
          .decode = {1, slots, slots},
          .reference = 1,
          .old_logprobs = 1,
          .micro_batches = 1,
          .optimizer_steps = 1,
          .checkpoints = 1,
          .exports = 1};
}

/// One draw of how often the blocks run, and with which sizes: the lengths of a run that nobody makes.
struct Visits {
  std::vector<Sizes> prefill, decode;
  PlanRuns runs;
};

Visits draw_visits(const Scenario& s) {
  Visits v;
  v.runs = one_run_each(s);
  const auto draw = [&](std::vector<Sizes>& sizes, BlockRuns& sum, BlockRuns most) {
    sum = {in(0, 3), 0, 0};
    for (std::int64_t i = 0; i < sum.runs; ++i) {
      sizes.push_back({.tokens = in(0, most.tokens), .seqs = in(0, most.seqs), .attention_pairs = 0});
      sum.tokens += sizes.back().tokens, sum.seqs += sizes.back().seqs;
    }
  };
  draw(v.prefill, v.runs.prefill, one_run_each(s).prefill);
  draw(v.decode, v.runs.decode, one_run_each(s).decode);
  for (std::int64_t PlanRuns::*n : {&PlanRuns::reference, &PlanRuns::old_logprobs, &PlanRuns::micro_batches,
                                    &PlanRuns::optimizer_steps, &PlanRuns::checkpoints, &PlanRuns::exports})
    v.runs.*n = in(0, 3);
  const std::int64_t parts = s.train.layout.sp ? s.train.layout.tp : 1, whole = s.train.micro_batch_tokens / parts;
  v.runs.trained_tokens = in(0, whole) * parts * (s.train.layout.pp > 1 ? v.runs.micro_batches : 1);
  // The tokens of a pipeline's micro-batches have room in as many of a scoring pass.
  if (s.train.layout.pp > 1)
    for (std::int64_t PlanRuns::*n : {&PlanRuns::reference, &PlanRuns::old_logprobs})
      if (v.runs.*n > 0) v.runs.*n = std::max(v.runs.*n, v.runs.micro_batches);
  return v;
}

using TrafficTable = std::map<std::tuple<std::string, std::string, OpKind>, std::array<std::int64_t, 3>>;

/// What a meter would count on one rank if the driver chose the blocks of `v` (sim/, backends/: traffic_of).
TrafficTable traffic_of_plan(const Scenario& s, const Plan& plan, Rank rank, const Visits& v) {
  TrafficTable out;
  const Places places = places_of(plan, rank);
  const std::int64_t parts = s.train.layout.sp ? s.train.layout.tp : 1;
  const auto packed = [&](std::int64_t tokens) {
    Sizes sizes{.tokens = tokens};
    sizes[sequence_extent] = sizes[returned_extent] = tokens / parts;
    sizes[gathered_extent] = tokens * s.train.layout.ulysses;
    return sizes;
  };
  std::map<std::string, std::int64_t> turns;  // of a pipeline's stage
  const std::int64_t stage = train_mesh(s.train.layout).coordinate(rank, "pp"), steps = v.runs.optimizer_steps;
  const Pipeline pipeline = pipeline_of(s);
  const std::vector<std::int64_t> slots =
      pipeline_room(pipeline, most_micro_batches(s))[static_cast<std::size_t>(stage)].slots;
  for (std::int64_t i = 0; pipeline.stages > 1 && i < steps; ++i) {
    const auto of_step =
        pipeline_turns(pipeline, v.runs.micro_batches * (i + 1) / steps - v.runs.micro_batches * i / steps);
    for (const StageTurn& t : of_step[static_cast<std::size_t>(stage)])
      ++turns[t.is_pass()
                  ? pass_name(t.step, pipeline.chunks, t.chunk, t.micro % slots[static_cast<std::size_t>(t.chunk)])
                  : block_name(t.step, t.edge >= 0 ? t.edge : t.place)];
  }
  const auto visits = [&](const std::string& phase, const std::string& block) -> std::vector<Sizes> {
    const auto times = [](std::int64_t n) { return std::vector<Sizes>(static_cast<std::size_t>(n)); };
    if (block == "prefill") return v.prefill;
    if (block == "decode") return v.decode;
    const auto pass = [&](std::int64_t n) {  // its first micro-batches are full
      std::vector<Sizes> all;
      for (std::int64_t i = 0, left = v.runs.trained_tokens; i < n; ++i) {
        const std::int64_t taken = std::min(left, s.train.micro_batch_tokens);
        all.push_back(packed(taken)), left -= taken;
      }
      return all;
    };
    if (phase == "reference") return pass(v.runs.reference);
    if (phase == "old_logprobs") return pass(v.runs.old_logprobs);
    if (phase == "checkpoint") return times(v.runs.checkpoints);
    if (phase == "export") return times(v.runs.exports);
    if (phase == "train" && pipeline.stages > 1 && block != "begin" && block != "step")
      return std::vector<Sizes>(static_cast<std::size_t>(turns[block]),
                                packed(v.runs.trained_tokens / std::max<std::int64_t>(1, v.runs.micro_batches)));
    if (phase == "train") return block == "micro" ? pass(v.runs.micro_batches) : times(v.runs.optimizer_steps);
    return times(1);
  };
  for (std::size_t p = 0; p < plan.phases.size(); ++p)
    for (const Block& block : plan.program(rank).phases[p])
      for (const Sizes& sizes : visits(plan.phases[p].name, block.name))
        each_op(plan.program(rank), block, [&](const BoundOp& op) {
          if (!is_communication(op->kind)) return;
          const auto& members = plan.group_of(op->group, rank);
          const TrafficCount c = traffic_of(*op, sizes, static_cast<std::int64_t>(members.size()), places);
          if (c.calls == 0) return;
          auto& line = out[{plan.phases[p].name, plan.groups[static_cast<std::size_t>(op->group)].name, op->kind}];
          line[0] += c.calls, line[1] += c.payload_bytes, line[2] += c.padding_bytes;
        });
  return out;
}

TrafficTable table_of(const std::vector<PlanTraffic>& lines) {
  TrafficTable out;
  for (const PlanTraffic& t : lines)
    out[{std::string(name_of(t.phase)), t.group, t.op}] = {t.calls, t.payload_bytes, t.padding_bytes};
  return out;
}

std::string text_of(const TrafficTable& table) {
  std::string out;
  for (const auto& [key, n] : table)
    out += fmt::format("  {} {} {}: {} calls, {} B, padding {} B\n", std::get<0>(key), std::get<1>(key),
                       name_of(std::get<2>(key)), n[0], n[1], n[2]);
  return out;
}

std::string text_of(const CategoryBytes& bytes) { return fmt::format("{}", fmt::join(bytes, " ")); }

/// Peaks of one space, summed up anew from what is alive and mapped behind every op.
struct SlowSpace {
  struct Peak {
    std::int64_t bytes = 0, mapped = 0;
    CategoryBytes by_category{};
  };
  std::map<std::string, std::pair<Category, std::int64_t>> alive;     // by name
  std::map<std::pair<SectionId, std::int64_t>, std::int64_t> mapped;  // ranges: begin -> end
  std::map<std::int16_t, Peak> phases;
  Peak whole;
  std::int16_t peak_phase = -1;

  void note(std::int16_t phase) {
    Peak now;
    for (const auto& [name, held] : alive) {
      now.bytes += held.second;
      now.by_category[static_cast<std::size_t>(held.first)] += held.second;
    }
    for (const auto& [range, end] : mapped) now.mapped += end - range.second;
    Peak& peak = phases[phase];
    if (now.bytes > peak.bytes) peak.bytes = now.bytes, peak.by_category = now.by_category;
    peak.mapped = std::max(peak.mapped, now.mapped);
    if (now.bytes > whole.bytes) whole.bytes = now.bytes, whole.by_category = now.by_category, peak_phase = phase;
    whole.mapped = std::max(whole.mapped, now.mapped);
  }
  /// Maps come in whole ranges; an unmap takes from the end of one, or all of it.
  void unmap(SectionId section, std::int64_t begin, std::int64_t end) {
    for (auto at = mapped.begin(); at != mapped.end(); ++at)
      if (at->first.first == section && at->first.second <= begin && at->second == end) {
        if (at->first.second == begin) mapped.erase(at);
        else at->second = begin;
        return;
      }
    throw std::runtime_error("what is unmapped was not mapped");
  }
};
struct SlowMemory {
  SlowSpace device, host;
};

SlowMemory memory_by_ops(const Plan& plan, Rank rank) {
  const Program& program = plan.program(rank);
  SlowMemory out;
  SectionStates states(program);
  for (const WalkTurn& turn : walk_turns(plan, program))
    for (const BlockVisit& visit : block_visits(plan, program, turn)) {
      for (SlowSpace* space : {&out.device, &out.host}) space->note(visit.phase);
      const Block& block = block_at(program, visit);
      if (states.skips(block)) continue;
      states.ran(block);
      each_op(program, block, [&](const BoundOp& op) {
        const bool memory = op->kind == OpKind::alloc || op->kind == OpKind::free;
        if (!memory && op->kind != OpKind::map && op->kind != OpKind::unmap) return;
        const SectionId section = memory ? op.allocated().section() : op->section;
        SlowSpace& space = program.section(section).space == Space::device ? out.device : out.host;
        if (op->kind == OpKind::alloc)
          space.alive[op.allocated().name()] = {op.allocated().category(), op.allocated().bytes()};
        if (op->kind == OpKind::free) space.alive.erase(op.allocated().name());
        if (op->kind == OpKind::map) {
          // What goes on where a range ends is that range.
          const auto before = std::ranges::find_if(
              space.mapped, [&](const auto& m) { return m.first.first == section && m.second == op->map_begin; });
          if (before != space.mapped.end()) before->second = op->map_end;
          else space.mapped[{section, op->map_begin}] = op->map_end;
        }
        if (op->kind == OpKind::unmap) space.unmap(section, op->map_begin, op->map_end);
        space.note(visit.phase);
      });
    }
  return out;
}

/// "" or the first difference of one space.
std::string difference(const Plan& plan, const JobPhases& phases, const PlanSpace& space, const SlowSpace& by_ops) {
  const auto differ = [](const PlanPeak& a, const SlowSpace::Peak& b) {
    return a.bytes != b.bytes || a.by_category != b.by_category || a.mapped_bytes != b.mapped;
  };
  const auto text = [](std::string_view what, const PlanPeak& a, const SlowSpace::Peak& b) {
    return fmt::format("{}: {} = {}, {} mapped; op by op {} = {}, {} mapped", what, a.bytes, text_of(a.by_category),
                       a.mapped_bytes, b.bytes, text_of(b.by_category), b.mapped);
  };
  for (const JobPhase& phase : phases) {
    const PlanPeak& peak = space.phases[static_cast<std::size_t>(phase.phase)];
    const auto& expected = by_ops.phases.at(static_cast<std::int16_t>(plan.phase_index(name_of(phase.phase))));
    if (differ(peak, expected)) return text(name_of(phase.phase), peak, expected);
  }
  if (differ(space.whole, by_ops.whole)) return text("the whole", space.whole, by_ops.whole);
  if (by_ops.whole.bytes > 0 &&
      name_of(space.peak_phase) != plan.phases[static_cast<std::size_t>(by_ops.peak_phase)].name)
    return fmt::format("peaks in {}", name_of(space.peak_phase));
  return "";
}

/// "" or where a plan put together of parts, as the search does it, differs from the whole one.
std::string difference_of_parts(const Scenario& s, const Plan& plan) {
  const auto pricer = ScenarioPricer::make(s, catalog_root());
  if (!pricer) return "no price: " + render(pricer.error());
  ModelShapes shapes(s.model);
  const std::vector<PhaseBytes> whole = lower_phases(s, nullptr, shapes).value().transients;
  for (const PhaseInfo& phase : plan.phases) {
    const PlanPhase p = phase_named(phase.name);
    const std::vector<PhaseBytes> alone = write_phases(
                                              s, [&](PlanPhase at) { return at == p; }, shapes)
                                              .value()
                                              .transients;
    std::vector<PhaseBytes> expected(whole.size(), PhaseBytes{});
    for (std::size_t stage = 0; stage < whole.size(); ++stage)
      expected[stage][static_cast<std::size_t>(p)] = whole[stage][static_cast<std::size_t>(p)];
    if (alone != expected) return fmt::format("{} alone needs other transients", phase.name);
  }
  const CostModel& cost = (*pricer)->train().cost();
  const RlPoint point = rl_point_of(s);
  const Scenario there = with_point(s, point);
  RlPrice parts, expected;
  const auto answer = plan_answer_of(there);
  const bool fits_a_sample = micro_batch_capacity(there) >= max_sample_tokens(there);
  if (plan_prices(s, cost)(point, parts) != (answer && fits_a_sample)) return "parts: lowered, or not";
  if (!answer || !fits_a_sample) return "";
  use_mapped_bytes(mapped_bytes(answer->memory), expected);
  use_plan_seconds(ComputedSeconds::of(there, plan_seconds(there, point.train, answer->plan, cost)),
                   shifts_seconds(answer->shifts, cost), expected);
  const auto bytes = [](const RlPrice& p) {
    return std::array{p.train_bytes, p.rollout_bytes, p.sync_bytes, p.wake_bytes, p.host_bytes};
  };
  if (bytes(parts) != bytes(expected))
    return fmt::format("parts map {}, the plan {}", fmt::join(bytes(parts), " "), fmt::join(bytes(expected), " "));
  if (parts.seconds != expected.seconds)
    return fmt::format("parts take {}, the plan {}", fmt::join(parts.seconds, " "), fmt::join(expected.seconds, " "));
  return "";
}

/// Bytes that the plan maps, unmaps and copies between device and host, in order, op by op; what training copies with
/// its state on the host is part of its work.
std::vector<ShiftOp> shifts_by_ops(const Plan& plan, std::size_t of_program, const JobPhases& phases) {
  std::vector<ShiftOp> out;
  const Program& program = plan.programs[of_program];
  for (const JobPhase& phase : phases)
    for (const Block& block : program.phases[static_cast<std::size_t>(plan.phase_index(name_of(phase.phase)))])
      for (const Op& op : test::ops_of(program, block)) {
        ShiftOp shift{.phase = phase.phase, .kind = op.kind, .every = phase.every};
        if (op.kind == OpKind::map || op.kind == OpKind::unmap)
          shift.section = program.section(op.section).name, shift.space = program.section(op.section).space,
          shift.bytes = op.map_end - op.map_begin;
        else if (op.kind == OpKind::copy && !is_training(phase.phase) &&
                 (op.stream == streams::h2d || op.stream == streams::d2h))
          shift.bytes = op.outputs[0].bytes({});
        else continue;
        out.push_back(shift);
      }
  return out;
}
std::vector<ShiftOp> one_by_one(const std::vector<ShiftOp>& shifts) {
  std::vector<ShiftOp> out;
  for (ShiftOp op : shifts)
    for (std::int64_t n = std::exchange(op.count, 1); n > 0; --n) out.push_back(op);
  return out;
}

/// "" or where what `explain` says of the iteration (live bytes), or the search (mapped ones), is not what the ops
/// take.
std::string answer_difference(const Scenario& s, const Plan& plan, const PlanMemory& memory, const SlowMemory& by_ops) {
  RlPrice live, mapped;
  use_plan_bytes(s, memory, live), use_mapped_bytes(mapped_bytes(memory), mapped);
  const std::array answers = {live.peak_bytes(), mapped.peak_bytes(), live.host_bytes, mapped.host_bytes};
  const std::array<std::int64_t, 4> expected = {by_ops.device.whole.bytes, by_ops.device.whole.mapped,
                                                by_ops.host.whole.bytes, by_ops.host.whole.mapped};
  for (std::size_t i = 0; i < answers.size(); ++i)
    if (answers[i] != static_cast<double>(expected[i]))
      return fmt::format("the iteration takes {} of {}, op by op {}", answers[i], i, expected[i]);
  return live.fits == check_fit(plan).fits ? "" : "what fits";
}

/// "" or where what is read from the plan of `s` differs from its ops. Every rank is compared.
std::string difference(const Scenario& s, const Visits& visits) {
  const auto plan = lower(s);
  const std::string why = why_not_lowered(s);
  if (!plan) return why.empty() ? "accepted, and not lowered: " + render(plan.error()) : "";
  if (!why.empty()) return "refused: " + why;
  const PlanMemory memory = memory_of(s, *plan);
  // Where engines have stages as well, one for each pair of stages that some rank is.
  const bool staged = s.algorithm.name != AlgorithmName::sft && s.rollout.layout.pp > 1;
  if (!staged && std::ssize(plan->programs) != s.train.layout.pp) return "programs";
  SlowMemory most;  // of any rank, all of a stage having one program
  for (std::size_t stage = 0; stage < plan->programs.size(); ++stage) {
    const auto rank = static_cast<Rank>(std::ranges::find(plan->program_of_rank, static_cast<std::int32_t>(stage)) -
                                        plan->program_of_rank.begin());
    const SlowMemory by_ops = memory_by_ops(*plan, rank);
    const PlanMemory own = memory_of(s, *plan, rank);
    if (auto d = difference(*plan, own.phases, own.device, by_ops.device); !d.empty()) return "device " + d;
    if (auto d = difference(*plan, own.phases, own.host, by_ops.host); !d.empty()) return "host " + d;
    for (auto [to, of] : {std::pair{&most.device, &by_ops.device}, {&most.host, &by_ops.host}}) {
      to->whole.bytes = std::max(to->whole.bytes, of->whole.bytes);
      to->whole.mapped = std::max(to->whole.mapped, of->whole.mapped);
    }
    if (one_by_one(shifts_of(s, *plan, stage)) != shifts_by_ops(*plan, stage, own.phases))
      return "what the phases take, give back and copy";
  }
  if (auto d = answer_difference(s, *plan, memory, most); !d.empty()) return d;
  if (!staged)  // the search puts no such plan together
    if (auto d = difference_of_parts(s, *plan); !d.empty()) return d;
  for (Rank r = 0; r < plan->num_ranks(); ++r) {
    const TrafficTable expected = traffic_of_plan(s, *plan, r, visits),
                       found = table_of(traffic_of(*plan, r, visits.runs));
    if (expected != found)
      return fmt::format("traffic of rank {}:\n{}op by op\n{}", r, text_of(found), text_of(expected));
  }
  return "";
}

std::string difference(const Scenario& s) {
  const PlanRuns once = one_run_each(s);
  const auto sizes = [](const BlockRuns& r) { return std::vector<Sizes>{{.tokens = r.tokens, .seqs = r.seqs}}; };
  return difference(s, {sizes(once.prefill), sizes(once.decode), once});
}

/// Scenarios of each of rapidcheck's hundred draws (its seed is fixed: another check would draw the same); more for a
/// campaign: docs/testing.md.
int rounds() {
  const char* asked = std::getenv("HOTBUNK_EVALUATE_ROUNDS");
  return asked ? std::max(1, std::atoi(asked)) : 1;
}

}  // namespace

TEST_CASE("Evaluation = walk over ops: traffic, shifts, live and mapped peaks of random scenarios, to the byte") {
  int lowered = 0, refused = 0;
  std::set<std::string> seen;
  REQUIRE(rc::check("evaluation = walk over ops", [&] {
    for (int round = 0; round < rounds(); ++round) {
      const std::string text = draw_scenario();
      RC_LOG(text);
      Scenario s = scenario_from(text);
      // From a bucket that holds one row, smaller than a file may ask for, to one that holds the model.
      s.sync.bucket_bytes = one_of<std::int64_t>({1, 50, 200, 1000, 4000, 20'000, 100'000, 1 << 26});
      RC_LOG(fmt::format("sync.bucket_bytes {}", s.sync.bucket_bytes));
      const bool lowers = why_not_lowered(s).empty();
      (lowers ? lowered : refused) += 1;
      if (lowers) note_knobs(s, seen);
      const std::string d = difference(s, lowers ? draw_visits(s) : Visits{});
      if (!d.empty()) RC_FAIL(d);
    }
  }));
  WARN(fmt::format("{} scenarios compared, {} refused by both", lowered, refused));
  CHECK(lowered > refused);
  // Everything that unsupported_to_execute (spec/validate.h) leaves.
  CHECK_THAT(
      fmt::format("{}", fmt::join(seen, " ")),
      Catch::Equals(
          "algorithm=grpo algorithm=sft chunked=false chunked=true clipped=false clipped=true copies=false "
          "copies=true cp=all-gather cp=auto cp=none cp=ring cpu=false cpu=true engine=ddp engine=fsdp1 engine=fsdp2 "
          "engine=zero1 "
          "engine=zero2 engines=false engines=true "
          "family=llama family=mixtral family=qwen2 family=qwen3 family=qwen3_moe few=false few=true from host=false "
          "from host=true "
          "grads=bf16 grads=fp32 host=layers host=none host=optimizer "
          "ipc=false ipc=true master=fp32 mini-batches=false mini-batches=true moments=fp32 nodes=1 "
          "nodes=2 offload=false offload=true old=false old=true order=default order=drawn over=all over=some "
          "params=bf16 params=fp32 "
          "periodic=false periodic=true pool=false "
          "pool=true pp=1f1b pp=gpipe pp=interleaved pp=none pp=zero-bubble prefetch=0 prefetch=1 recompute=0 "
          "recompute=1 recompute=2 "
          "reference=false "
          "reference=true reshard=false reshard=true rollout=bf16 rollout=fp32 sleep=0 sleep=1 sleep=2 "
          "strided=false strided=true tied=false tied=true tp=1 tp=2 tp=3 tp=4 tp=8 ulysses=false ulysses=true "
          "verify=false verify=true vpp=false vpp=true wrap=layer wrap=names wrap=size"));
}

TEST_CASE("Evaluation = walk over ops: what the random scenarios could miss, by name") {
  const auto same = [](int world, int tp, const std::vector<std::string>& sets) {
    INFO(fmt::format("world {}, tp {}, {}", world, tp, fmt::join(sets, " ")));
    CHECK_THAT(difference(tiny(world, tp, sets)), Catch::Equals(""));
  };
  // Two KV heads over four ranks and eight; of 33 rows of the vocabulary the last of 4 ranks has 6, of 8 ranks none:
  // with small buckets it wants nothing of some.
  for (std::int64_t bucket : {1, 100, 900, 8000, 1 << 20})
    for (SyncTransport transport : {SyncTransport::ipc, SyncTransport::collective})
      for (Scenario s : {tiny(4, 4), tiny(8, 4), tiny(8, 8, {"model.num_attention_heads=8"})}) {
        s.sync.bucket_bytes = bucket, s.sync.transport = transport;
        INFO(bucket << " B, tp " << s.rollout.layout.tp << " of " << s.train.layout.dp);
        CHECK_THAT(difference(s), Catch::Equals(""));
      }
  // One rank: no buffers of gathering, but a cast where the shard is not in the compute dtype.
  same(1, 1, {});
  same(1, 1, {"train.precision.params=bf16", "algorithm.reference=true", "sync.verify=true"});
  // More ranks than rows: the last ranks hold nothing but padding.
  same(8, 1, {"model.vocab_size=5", "model.hidden_size=3"});
  // Chunks of the loss: one, two, many, the last one short, longer than the micro-batch.
  for (const char* chunk : {"64", "32", "7", "1", "100"})
    same(2, 1, {fmt::format("train.loss_chunk_tokens={}", chunk)});
  // Few layers: no body is called twice; many: most calls are of one.
  for (const char* layers : {"1", "2", "3", "4", "5", "6", "17"})
    for (const char* recompute : {"none", "selective", "full"})
      for (const char* reshard : {"true", "false"})
        same(2, 2,
             {fmt::format("model.num_hidden_layers={}", layers), fmt::format("train.recompute={}", recompute),
              fmt::format("train.reshard_after_forward={}", reshard)});
  // Whole parameters, whole gradients, copies of the shards; parameters that need no copy of their own.
  for (const char* engine : {"ddp", "zero1", "zero2", "fsdp1", "fsdp2"})
    for (const char* group : {"-1", "2", "1"})
      for (const char* dtype : {"fp32", "bf16"})
        same(4, 2,
             {fmt::format("train.engine={}", engine), fmt::format("train.layout.fsdp={}", group),
              fmt::format("train.precision.params={}", dtype), "algorithm.reference=true", "sync.verify=true"});
  // Flat units: all in one, parts of layers, everything by itself, layers beside a root that has others.
  for (const std::array<std::string, 2>& wrap : {std::array<std::string, 2>{"size", "min_parameters=1000000"},
                                                 {"size", "min_parameters=1500"},
                                                 {"size", "min_parameters=1"},
                                                 {"names", "names=[model.layers.1, '*.mlp']"}})
    for (const char* transport : {"ipc", "collective"})
      for (const char* bucket : {"0.001", "0.008", "1"})
        same(3, 1,
             {"train.engine=fsdp1", "train.wrap.policy=" + wrap[0], "train.wrap." + wrap[1],
              fmt::format("sync.transport={}", transport), fmt::format("sync.bucket_mib={}", bucket),
              "algorithm.reference=true", "sync.verify=true"});
  // Attention, not the MLP, is where memory peaks; a phase of rollout that exceeds training.
  same(2, 1, {"model.intermediate_size=2", "train.precision.params=bf16"});
  same(2, 1, {"rollout.max_prefill_tokens=5000", "train.offload=none"});
  // The rollout peaks where it samples: more slots than prefill tokens, rows of 6 B beside ids and log-probs of 8 B.
  same(2, 1, {"model.vocab_size=500", "model.hidden_size=3", "rollout.dtype=bf16", "rollout.max_running_requests=60"});
  // A cache of another type than the engine's.
  same(2, 1, {"rollout.kv_cache_dtype=bf16"});
  same(2, 2, {"rollout.dtype=bf16", "rollout.kv_cache_dtype=fp32", "rollout.kv_cache_tokens=0"});
}

TEST_CASE(
    "Traffic of data parallelism: what each way moves of parameters and gradients in a step of three micro-batches") {
  // BACKGROUND A1 to A4, before the factor (W - 1) / W of a ring. Units are padded to a multiple of the shards; what
  // is gathered in bf16 has 2 B, what is reduced 4.
  struct Way {
    const char* engine;
    std::int64_t group;
  };
  for (const Way way : {Way{"fsdp2", -1},
                        {"fsdp2", 2},
                        {"fsdp1", -1},
                        {"fsdp1", 2},
                        {"zero2", -1},
                        {"zero2", 2},
                        {"zero1", -1},
                        {"zero1", 2},
                        {"ddp", -1}}) {
    CAPTURE(way.engine, way.group);
    const Scenario s = tiny(4, 2,
                            {fmt::format("train.engine={}", way.engine), "train.precision.params=bf16",
                             fmt::format("train.layout.fsdp={}", way.group)});
    const std::string engine = way.engine;
    const std::int64_t shards = engine == "ddp" ? 1 : way.group > 0 ? way.group : 4, micro_batches = 3;
    std::int64_t root = 0, layers = 0, padding = 0;
    const bool flat = engine == "fsdp1", streams = flat || engine == "fsdp2";
    for (const ShardedUnit& u : flat ? flat_units(s.model, s.train.wrap, shards) : train_units(s.model, 1, shards, 0)) {
      (u.layer < 0 ? root : layers) += shards * u.shard_elements;
      padding += u.padding_elements();
    }
    const std::int64_t all = root + layers, backwards = streams || engine == "zero2" ? micro_batches : 1;
    std::map<std::pair<std::string, OpKind>, std::int64_t> moved;  // with padding
    PlanRuns runs;
    runs.micro_batches = micro_batches, runs.optimizer_steps = 1;
    for (const PlanTraffic& t : traffic_of(lower(s).value(), 0, runs))
      if (t.phase == PlanPhase::train && t.group != "world")
        moved[{t.group, t.op}] += t.payload_bytes + t.padding_bytes;
    // Layers once for forward and once for backward, the root stays; else what the step changed, once.
    const std::int64_t gathered = streams ? micro_batches * (2 * layers + root) : all;
    CHECK(moved[{"fsdp", OpKind::all_gather}] == (shards > 1 ? 2 * gathered : 0));
    CHECK(moved[{"fsdp", OpKind::reduce_scatter}] == (shards > 1 ? 4 * backwards * all : 0));
    CHECK(moved[{"replicas", OpKind::all_reduce}] == (shards < 4 ? 4 * backwards * all / shards : 0));
    if (flat) CHECK(padding < (shards > 1 ? 4 * shards : 1));  // less than a shard of each of 4 units
    else CHECK((shards == 1) == (padding == 0));
  }
}

TEST_CASE("Traffic of tensor parallelism: what a pass of N tokens moves between the ranks that share a layer") {
  // docs/layouts.md. H 24, 3 layers, bf16: one pass of a tensor [N,H] is 48 N bytes. Embedding's sum, a layer's two
  // sums forward and two backward, the gradient of the head's input; 16 N from each rank for the log-probs.
  const std::int64_t N = 60, hidden = 2 * 24 * N, layers = 3;
  for (const bool sequence : {false, true}) {
    CAPTURE(sequence);
    const Scenario s = tiny(4, 2,
                            {"train.layout.dp=2", "train.layout.tp=2", fmt::format("train.layout.sp={}", sequence),
                             "train.precision.params=bf16"});
    PlanRuns runs;
    runs.micro_batches = runs.old_logprobs = 1, runs.optimizer_steps = 1, runs.trained_tokens = N;
    std::map<std::pair<PlanPhase, OpKind>, std::int64_t> moved;
    for (const PlanTraffic& t : traffic_of(lower(s).value(), 0, runs))
      if (t.group == "train_tp") moved[{t.phase, t.op}] += t.payload_bytes;
    const std::int64_t stats = 2 * 16 * N;
    if (!sequence) {
      CHECK(moved[{PlanPhase::old_logprobs, OpKind::all_reduce}] == (1 + 2 * layers) * hidden);
      CHECK(moved[{PlanPhase::old_logprobs, OpKind::all_gather}] == stats);
      // With the sums of squares, and the request to stop: 4 B each.
      CHECK(moved[{PlanPhase::train, OpKind::all_reduce}] == (1 + 4 * layers + 1) * hidden + 8);
      CHECK(moved[{PlanPhase::train, OpKind::all_gather}] == stats);
    } else {
      CHECK(moved[{PlanPhase::old_logprobs, OpKind::reduce_scatter}] == (1 + 2 * layers) * hidden);
      CHECK(moved[{PlanPhase::old_logprobs, OpKind::all_gather}] == (2 * layers + 1) * hidden + stats);
      // Backward: a layer sums two gradients, and gathers two, and two inputs again; around the layers the head's
      // gradient is summed, the embedding's gathered.
      CHECK(moved[{PlanPhase::train, OpKind::reduce_scatter}] == (1 + 2 * layers + 2 * layers + 1) * hidden);
      CHECK(moved[{PlanPhase::train, OpKind::all_gather}] == (2 * layers + 1 + 4 * layers + 1) * hidden + stats);
    }
  }
}

TEST_CASE("Traffic of Ulysses: four all-to-alls a layer, of all heads of a rank's own tokens") {
  // BACKGROUND C1. 4 heads and 2 KV heads of 6 elements, 3 layers, bf16. A rank that has T tokens of its own sends, of
  // each, query, key and value heads, then what they attended; backward both again. Over 4 ranks each KV head goes to
  // two of them.
  const std::int64_t T = 20, layers = 3, head = 6 * 2;
  for (const std::int64_t ranks : {2, 4})
    for (const char* recompute : {"none", "selective", "full"}) {
      CAPTURE(ranks, recompute);
      const Scenario s = tiny(4, 2,
                              {fmt::format("train.layout={{dp: {}, ulysses: {}}}", 4 / ranks, ranks),
                               "train.precision.params=bf16", fmt::format("train.recompute={}", recompute)});
      const std::int64_t kv = std::max<std::int64_t>(2, ranks), forward = layers * (4 + 2 * kv + 4) * head * T,
                         again = std::string_view(recompute) == "full" ? forward : 0;
      const Plan plan = lower(s).value();
      PlanRuns runs;
      runs.micro_batches = runs.old_logprobs = 1, runs.optimizer_steps = 1, runs.trained_tokens = T;
      std::map<PlanPhase, PlanTraffic> moved;
      for (const PlanTraffic& t : traffic_of(plan, 0, runs)) {
        CHECK((t.op == OpKind::all_to_all) == (t.group == "ulysses"));
        if (t.group == "ulysses") moved[t.phase] = t;
      }
      CHECK(moved.size() == 2);
      CHECK(moved[PlanPhase::old_logprobs].payload_bytes == forward);
      CHECK(moved[PlanPhase::old_logprobs].calls == 2 * layers);
      CHECK(moved[PlanPhase::train].payload_bytes == 2 * forward + again);
      CHECK(moved[PlanPhase::train].calls == (again > 0 ? 6 : 4) * layers);
      // (N - 1) / N of it leaves the rank.
      for (const Body& body : plan.program(0).bodies)
        for (const Op& op : body.ops)
          if (op.kind == OpKind::all_to_all) {
            Sizes sizes{.tokens = T};
            sizes[gathered_extent] = ranks * T;
            const TrafficCount c = traffic_of(op, sizes, ranks, places_of(plan, 0));
            CHECK(c.wire_bytes * ranks == c.payload_bytes * (ranks - 1));
          }
    }
}

TEST_CASE("Traffic of context parallelism: keys and values of a rank go around, or to everybody") {
  // 4 heads and 2 KV heads of 6 elements, 3 layers, bf16; T tokens of a rank's own in a micro-batch. K/V of a
  // micro-batch are then W T rows of 2 · 2 heads, of which (W - 1) / W reach a rank, in a pass; their gradients are
  // fp32.
  const std::int64_t T = 20, layers = 3, row = 2 * 2 * 6;
  for (const std::int64_t ranks : {2, 4})
    for (const char* exchange : {"ring", "all-gather"})
      for (const char* recompute : {"none", "selective", "full"}) {
        CAPTURE(ranks, exchange, recompute);
        const bool ring = std::string_view(exchange) == "ring";
        const Scenario s = tiny(4, 2,
                                {fmt::format("train.layout={{dp: {}, cp: {}}}", 4 / ranks, ranks),
                                 fmt::format("train.context_exchange={}", exchange), "train.precision.params=bf16",
                                 fmt::format("train.recompute={}", recompute)});
        const Plan plan = lower(s).value();
        PlanRuns runs;
        runs.micro_batches = runs.old_logprobs = 1, runs.optimizer_steps = 1, runs.trained_tokens = T;
        std::map<std::pair<PlanPhase, OpKind>, PlanTraffic> moved;
        for (const PlanTraffic& t : traffic_of(plan, 0, runs))
          if (t.group == "context") moved[{t.phase, t.op}] = t;
        const std::int64_t kv = ranks * T * row * 2, d_kv = ranks * T * row * 4,
                           passes = std::string_view(recompute) == "full" ? 3 : 2;
        if (ring) {
          CHECK(moved.size() == 2);
          const PlanTraffic &scores = moved[{PlanPhase::old_logprobs, OpKind::send_recv}],
                            &train = moved[{PlanPhase::train, OpKind::send_recv}];
          CHECK(scores.payload_bytes * ranks == layers * kv * (ranks - 1));
          CHECK(scores.calls == layers * (ranks - 1));
          CHECK(train.payload_bytes * ranks == layers * (passes * kv + d_kv) * (ranks - 1));
          CHECK(train.calls == layers * (passes + 1) * (ranks - 1));
        } else {
          CHECK(moved.size() == 3);
          CHECK(moved[{PlanPhase::old_logprobs, OpKind::all_gather}].payload_bytes == layers * kv);
          CHECK(moved[{PlanPhase::train, OpKind::all_gather}].payload_bytes == layers * passes * kv);
          CHECK(moved[{PlanPhase::train, OpKind::reduce_scatter}].payload_bytes == layers * d_kv);
        }
        // On the wire both send the same.
        std::int64_t wire = 0;
        const auto phase = static_cast<std::size_t>(plan.phase_index("old_logprobs"));
        for (const Block& block : plan.program(0).phases[phase])
          each_op(plan.program(0), block, [&](const BoundOp& op) {
            if (is_communication(op->kind) && op->group == static_cast<GroupId>(Family::context))
              wire += traffic_of(*op, Sizes{.tokens = T}, ranks, places_of(plan, 0)).wire_bytes;
          });
        CHECK(wire * ranks == layers * kv * (ranks - 1));
      }
}

TEST_CASE("The demo's peak is the one derived in docs/memory.md") {
  const auto s = load_scenario(std::string(source_folder) + "/scenarios/demo.yaml", {});
  REQUIRE(s.has_value());
  const PlanMemory m = memory_of(*s, lower(*s).value());
  CHECK(m.device.whole.bytes == 5'429'892);
  CHECK(m.device.peak_phase == PlanPhase::train);
  CHECK(m.device.phases[static_cast<std::size_t>(PlanPhase::sync)].bytes == 294'272);
  CHECK_THAT(difference(*s), Catch::Equals(""));
}

TEST_CASE("What is not lowered is refused with the reason") {
  for (const char* layout : {"{dp: 4}", "{dp: 2, tp: 2, sp: true}", "{dp: 2, pp: 2}"})
    CHECK(why_not_lowered(
              tiny(4, 2, {fmt::format("train.layout={}", layout), "model.num_hidden_layers=4", "train.engine=fsdp1"}))
              .empty());
  const std::vector<std::string> mixture = {"model.model_type=mixtral", "model.architectures=[MixtralForCausalLM]",
                                            "model.num_local_experts=4", "model.num_experts_per_tok=2"};
  const auto with_experts = [&](const char* engine, const std::string& layout) {
    std::vector<std::string> sets = mixture;
    sets.insert(sets.end(), {fmt::format("train.engine={}", engine), fmt::format("train.layout={}", layout)});
    return why_not_lowered(tiny(4, 2, sets));
  };
  CHECK(with_experts("fsdp1", "{dp: 4, ep: 2}").empty());
  for (const char* over : {"dp", "cp"})
    CHECK(with_experts("fsdp2", fmt::format("{{dp: 2, cp: 2, shard_over: [{}], ep: 2}}", over)).empty());
  CHECK_THAT(with_experts("fsdp2", "{dp: 2, cp: 2, shard_over: [dp], ep: 4}"),
             Catch::Contains("train.layout.ep 4 with what 2 data ranks shard: 2 % 4 = 2"));
  CHECK(with_experts("fsdp2", "{dp: 2, cp: 2, shard_over: [dp]}").empty());
  // A group of the two of cp, though ulysses between cp and dp were left out of a larger one.
  CHECK(with_experts("fsdp2", "{dp: 1, cp: 2, ulysses: 2, fsdp: 2, shard_over: [cp, dp], ep: 2}").empty());
  CHECK_THAT(why_not_lowered(tiny(2, 1, {"profile=verl-fsdp"})), Catch::Contains("verl-fsdp"));
  // 0.0627 of 1 MiB less 62,304 B of weights holds 2 blocks, one sequence needs 3 (tests/lowering/memory_test.cc).
  const std::vector<std::string> full = {"rollout.kv_cache_tokens=0", "cluster.device_memory_mib=1",
                                         "rollout.memory_fraction=0.0627"};
  CHECK_THAT(why_not_lowered(tiny(1, 1, full)), Catch::Contains("no room"));
  CHECK(why_not_lowered(tiny(1, 1)).empty());
  Scenario uneven = tiny(3, 1);
  uneven.rollout.layout.tp = 3, uneven.rollout.layout.dp = 1;
  CHECK_THAT(why_not_lowered(uneven), Catch::Contains("4 attention heads do not divide over tp 3"));
}
