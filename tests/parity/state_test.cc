// P4: sleep loses nothing and really gives memory back. P5: after a sync the rollout holds the training weights, bit
// for bit.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <catch2/catch.hpp>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>

#include "base/dtype.h"
#include "base/hash.h"
#include "graph/verify.h"
#include "layout/rollout_weights.h"
#include "layout/scenario_layout.h"
#include "layout/train_weights.h"
#include "lowering/lower.h"
#include "lowering/rollout.h"
#include "tests/blocks.h"
#include "tests/parity/harness.h"

using namespace hotbunk;
using namespace hotbunk::testing;

namespace {

std::string hash_of(const CpuBackend& backend, const std::vector<std::string>& names) {
  Hasher h;
  for (const std::string& name : names) h.add(backend.peek(name));
  return h.hex();
}

std::vector<std::string> state_names(const ModelSpec& model, int world) {
  std::vector<std::string> out;
  for (const ShardedUnit& u : train_units(model, 1, world, 0))
    for (const char* what : {"shard", "exp_avg", "exp_avg_sq"}) out.push_back(fmt::format("train.{}.{}", u.name, what));
  return out;
}

/// Remembers a hash before a sleep and compares it after the wake.
struct SleepWitness {
  std::vector<std::string> names;
  std::string asleep_from, awake_at;  // phases
  std::string before;
  int compared = 0, changed = 0;
  std::string last;

  std::string operator()(const CpuBackend& backend, std::int32_t, const std::string& phase) {
    if (phase == asleep_from) {
      before = hash_of(backend, names);
      if (!last.empty() && before != last) ++changed;
      last = before;
    }
    if (phase == awake_at && !before.empty()) {
      ++compared;
      if (hash_of(backend, names) != before)
        return fmt::format("what woke up before {} is not what went to sleep", phase);
    }
    // Between steps training changed the state, or the witness would watch nothing.
    if (phase == "export" && (compared < 2 || changed < 1))
      return fmt::format("compared {} times, changed {} times", compared, changed);
    return "";
  }
};

Case watched(const char* name, Scenario s, SleepWitness witness) {
  auto shared = std::make_shared<SleepWitness>(std::move(witness));
  return {name, std::move(s), {}, [shared](const CpuBackend& b, std::int32_t step, const std::string& phase) {
            return (*shared)(b, step, phase);
          }};
}

std::string nothing(const Outcome&) { return ""; }

}  // namespace

TEST_CASE("what wakes up is what went to sleep, and asleep it is not resident") {
  CpuOptions options;
  options.check_resident = true;  // after every phase: resident bytes of the device arena = mapped bytes, to one chunk
  for (int world : {1, 2, 4}) {
    const Scenario s = tiny_scenario(world, 1, {"steps=3"});
    CHECK(run_cases(world,
                    {watched("train state", s,
                             {.names = state_names(s.model, world),
                              .asleep_from = "sleep_optimizer",
                              .awake_at = "old_logprobs",
                              .before = {},
                              .last = {}})},
                    nothing, options) == "");
  }
}

namespace {

bool transition(const Block& block) { return block.enters != Enters::nothing; }

/// Puts a phase that holds another one's sleeping and waking blocks, and nothing else, at `at`.
void insert_transitions(Plan& plan, std::size_t of, std::size_t at, const std::string& name) {
  const PhaseInfo info{name, When::iteration, false};
  plan.phases.insert(plan.phases.begin() + static_cast<std::ptrdiff_t>(at), info);
  for (Program& program : plan.programs) {
    std::vector<Block> blocks;
    std::ranges::copy_if(program.phases[of], std::back_inserter(blocks), transition);
    program.phases.insert(program.phases.begin() + static_cast<std::ptrdiff_t>(at), std::move(blocks));
  }
}

/// Every sleep and every wake of an iteration happens twice; and before all of them train wakes and rollout sleeps,
/// though in the first iteration nothing has slept and nothing has been awake.
void twice(Plan& plan) {
  for (std::size_t p = plan.phases.size(); p-- > 0;)
    if (plan.phases[p].when == When::iteration && std::ranges::any_of(plan.programs[0].phases[p], transition))
      insert_transitions(plan, p, p + 1, plan.phases[p].name + ".again");
  for (const char* name : {"wake_train", "sleep_rollout"}) {
    const auto at = static_cast<std::size_t>(plan.phase_index("sleep_optimizer"));
    const auto of = static_cast<std::size_t>(plan.phase_index(name));
    insert_transitions(plan, of, at, std::string(name) + ".again");
  }
}

/// In the phases that `twice` added nothing runs, nothing moves and no memory changes; elsewhere blocks do run.
std::string again_is_nothing(const Plan& plan, const Trace& trace) {
  const auto again = [&](std::int16_t phase) {
    return plan.phases[static_cast<std::size_t>(phase)].name.ends_with(".again");
  };
  int seen = 0;
  for (const PhaseSpan& s : trace.phases) {
    const std::string& name = plan.phases[static_cast<std::size_t>(s.phase)].name;
    seen += again(s.phase) ? 1 : 0;
    if (again(s.phase) && s.blocks != 0) return fmt::format("{} ran {} blocks", name, s.blocks);
    if (name == "sleep_train" && s.blocks == 0) return "the first sleep ran no block";
  }
  for (const Span& s : trace.spans)
    if (again(s.phase)) return fmt::format("{} took {} bytes", name_of(s.kind), s.bytes);
  for (const MemoryEvent& e : trace.memory_events)
    if (again(e.phase)) return fmt::format("{} bytes changed", e.delta_bytes);
  const int expected = 8 * 3 * plan.num_ranks();  // 6 transitions and two more, 3 steps
  return seen == expected ? "" : fmt::format("{} repeated phases, expected {}", seen, expected);
}

std::string twice_is_once(const Outcome& o) {
  if (auto bad = complaint(o, o.plan); !bad.empty()) return bad;
  if (auto bad = again_is_nothing(o.plan, o.measured); !bad.empty()) return "measured: " + bad;
  const auto simulated = simulate(o, o.plan);
  return simulated ? again_is_nothing(o.plan, *simulated) : render(simulated.error());
}

}  // namespace

TEST_CASE("sleeping twice and waking twice is sleeping and waking once") {
  CpuOptions options;
  options.check_resident = true;
  options.span_steps = 3;
  for (int world : {2, 4})
    for (const char* level : {"1", "2"}) {
      const Scenario s = tiny_scenario(
          world, 2, {"steps=3", fmt::format("rollout.sleep_level={}", level), "algorithm.reference=true"});
      Case job = watched("train state", s,
                         {.names = state_names(s.model, world),
                          .asleep_from = "wake_train.again",
                          .awake_at = "old_logprobs",
                          .before = {},
                          .last = {}});
      job.mutate = twice;
      CHECK(run_cases(world, {job}, twice_is_once, options) == "");
    }
}

TEST_CASE("rollout weights survive a second sleep and a second wake at level 1") {
  const Scenario s = tiny_scenario(2, 2, {"steps=4", "rollout.sleep_level=1"});
  std::vector<std::string> names;
  for (const LocalWeight& w : rollout_weights(s.model, 2, 0)) names.push_back("rollout." + w.name);
  Case job = watched("rollout weights", s,
                     {.names = names, .asleep_from = "sleep_rollout", .awake_at = "sync", .before = {}, .last = {}});
  job.mutate = twice;
  CHECK(run_cases(2, {job}, nothing) == "");
}

TEST_CASE("sleeping before the first optimizer step keeps parameters as loaded and moments zero") {
  const Scenario s = tiny_scenario(2, 1, {"steps=1"});
  const std::vector<std::string> names = state_names(s.model, 2);
  const auto loaded = std::make_shared<std::string>();
  Case job{"first step", s, twice, [=](const CpuBackend& b, std::int32_t, const std::string& phase) {
             if (phase == "sleep_optimizer") *loaded = hash_of(b, names);
             if (phase != "old_logprobs") return std::string();
             if (loaded->empty() || hash_of(b, names) != *loaded) return std::string("another state woke up");
             for (const std::string& name : names)
               if (name.find("exp_avg") != name.npos)
                 for (std::byte byte : b.peek(name))
                   if (byte != std::byte{0}) return name + " is not zero";
             return std::string();
           }};
  CHECK(run_cases(2, {job}, nothing) == "");
}

TEST_CASE("rollout weights come back from the host at level 1") {
  const Scenario s = tiny_scenario(2, 2, {"steps=4", "rollout.sleep_level=1"});
  std::vector<std::string> names;
  for (const LocalWeight& w : rollout_weights(s.model, 2, 0)) names.push_back("rollout." + w.name);
  CHECK(run_cases(
            2,
            {watched("rollout weights", s,
                     {.names = names, .asleep_from = "sleep_rollout", .awake_at = "sync", .before = {}, .last = {}})},
            nothing) == "");
}

TEST_CASE("what sleeps cannot be peeked at, on the device and on the host") {
  // Every byte of what peek returns is read: a range that is not mapped would end the process.
  struct Seen {
    std::vector<std::string> device, host;
    std::map<std::string, std::pair<int, int>> times;  // asleep, awake
  };
  const auto seen = std::make_shared<Seen>();
  Case job{"peek", tiny_scenario(2, 1, {"steps=2"}), {}};
  job.mutate = [=](Plan& plan) {
    const Program& program = plan.programs[0];
    for (const Buffer& b : program.buffers)
      if (b.bytes() > 0)
        (program.section(b.section).space == Space::device ? seen->device : seen->host).push_back(b.name);
  };
  job.before_phase = [=](const CpuBackend& backend, std::int32_t, const std::string& phase) -> std::string {
    for (const auto* names : {&seen->device, &seen->host})
      for (const std::string& name : *names) {
        const auto bytes = backend.peek(name);
        auto& [asleep, awake] = seen->times[name];
        ++(bytes.empty() ? asleep : awake);
        Hasher().add(bytes);
      }
    if (phase != "export") return "";
    for (const auto* names : {&seen->device, &seen->host})
      if (std::none_of(names->begin(), names->end(), [&](const std::string& name) {
            return seen->times[name].first > 0 && seen->times[name].second > 0;
          }))
        return fmt::format("of {} buffers none was now asleep, now awake", names->size());
    return "";
  };
  CHECK(run_cases(2, {job}, nothing) == "");
}

TEST_CASE("a witness that looks at other bytes complains") {
  const Scenario s = tiny_scenario(1, 1, {"steps=3"});
  // Gradients' place in the arena is reused all the time: it does not survive.
  CHECK(run_cases(1,
                  {watched("transients", s,
                           {.names = {"train.root.shard"},
                            .asleep_from = "old_logprobs",
                            .awake_at = "checkpoint",
                            .before = {},
                            .last = {}})},
                  nothing) != "");
}

namespace {

std::vector<float> values(std::span<const std::byte> bytes, DType dtype) {
  std::vector<float> out(bytes.size() / static_cast<std::size_t>(size_of(dtype)));
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (dtype == DType::f32) std::memcpy(&out[i], bytes.data() + 4 * i, 4);
    else {
      bf16 b;
      std::memcpy(&b, bytes.data() + 2 * i, 2);
      out[i] = to_f32(b);
    }
  }
  return out;
}

/// Element by element, by the layout's own words: rollout buffer = pieces of the training parameters, of which this
/// rank has the whole, cast. `moved`: how many buffers were in an order of their own.
std::string compare_weights(const CpuBackend& backend, const Scenario& s, const Plan& plan, int& moved) {
  const bool master = s.train.engine != TrainEngine::ddp;  // the one rank's shard; else what every rank computes with
  std::map<std::string, std::pair<std::vector<float>, UnitParam>> trained;
  for (const ShardedUnit& u : train_units(s.model, 1, 1, 0)) {
    const std::vector<float> whole =
        values(backend.peek(fmt::format("train.{}.{}", u.name, master ? "shard" : "params")),
               master ? DType::f32 : s.train.precision.params);
    for (const UnitParam& p : u.params)
      trained[p.parameter] = {
          std::vector<float>(whole.begin() + p.shard_offset, whole.begin() + p.shard_offset + p.elements()), p};
  }
  const RolloutLayout& layout = s.rollout.layout;
  const std::vector<EngineCut> cuts = engine_cuts(s);
  const EngineCut& cut = cuts[static_cast<std::size_t>(engine_stage(layout, backend.rank()))];
  std::int64_t compared = 0;
  for (const LocalWeight& w : rollout_weights(s.model, cut, engine_seat(layout, backend.rank()).place % layout.tp)) {
    const Rows rows = rows_of(backend, plan, "rollout." + w.name);
    moved += rows.moved ? 1 : 0;
    const std::vector<float> local = values(rows.bytes, s.rollout.dtype);
    for (const auto& source : w.sources) {
      const auto& [from, param] = trained.at(source.parameter);
      const Piece& p = source.piece;
      for (std::int64_t r = p.row_begin; r < p.row_end; ++r)
        for (std::int64_t c = p.col_begin; c < p.col_end; ++c, ++compared) {
          const float expected = s.rollout.dtype == DType::f32
                                     ? from[static_cast<std::size_t>(r * param.cols + c)]
                                     : to_f32(to_bf16(from[static_cast<std::size_t>(r * param.cols + c)]));
          const float found = local[static_cast<std::size_t>(p.offset + (r - p.row_begin) * p.pitch + c - p.col_begin)];
          if (std::bit_cast<std::uint32_t>(found) != std::bit_cast<std::uint32_t>(expected))
            return fmt::format("{}: element ({}, {}) of {} is {}, trained {}", w.name, r, c, source.parameter, found,
                               expected);
        }
    }
  }
  const bool whole = layout.tp == 1 && cuts.size() == 1;
  return (whole ? compared == parameter_count(s.model) : compared > 0)
             ? ""
             : fmt::format("compared {} of {} elements", compared, parameter_count(s.model));
}

/// `packable`: some weights must come to lie in another order than rows; in bf16 where this machine knows one.
Case after_sync(const std::string& name, Scenario s, bool packable = false) {
  const auto plan = std::make_shared<const Plan>(lower(s).value());
  if (packable && s.rollout.dtype == DType::f32) REQUIRE(packs(*plan));
  const auto moved = std::make_shared<int>(0);
  return {name, s, {}, [=](const CpuBackend& b, std::int32_t, const std::string& phase) -> std::string {
            if (phase == "sleep_train") return compare_weights(b, s, *plan, *moved);
            return phase == "export" && packs(*plan) != (*moved > 0) ? fmt::format("{} weights are packed", *moved)
                                                                     : "";
          }};
}

}  // namespace

TEST_CASE("after a sync every rollout tensor is the training tensor in the rollout dtype, bit for bit") {
  std::vector<Case> of_one, of_two;
  for (const char* dtype : {"fp32", "bf16"}) {
    const std::string params = fmt::format("train.precision.params={}", dtype);
    of_one.push_back(after_sync(dtype, tiny_scenario(1, 1, {"steps=3", params})));
    for (const bool tied : {false, true})
      of_one.push_back(
          after_sync(fmt::format("{}, packed{}", dtype, tied ? ", tied" : ""),
                     tiny_scenario(1, 1, {packable_model(tied), "steps=3", params, "rollout.sleep_level=1"}), true));
    const std::vector<std::string> whole = {packable_model(true), params, "train.engine=ddp"};
    of_two.push_back(after_sync(fmt::format("{}, packed parts", dtype), tiny_scenario(2, 2, whole), true));
    std::vector<std::string> stages = whole;
    stages.insert(stages.end(), {"rollout.layout.pp=2", "rollout.layout.dp=1"});
    of_two.push_back(after_sync(fmt::format("{}, packed stages, tied", dtype), tiny_scenario(2, 1, stages), true));
  }
  CHECK(run_cases(1, of_one, nothing) == "");
  CHECK(run_cases(2, of_two, nothing) == "");
}

TEST_CASE("a verified sync finds a slice that was not delivered") {
  const auto drop_a_move = [](Plan& plan) {
    for (Program& program : plan.programs)
      for (Body& body : program.bodies)
        for (Op& op : body.ops)
          if (op.kind == OpKind::peer_copy && op.moves.size() > 1) {
            op.moves.pop_back();
            return;
          }
  };
  const Scenario s = tiny_scenario(2, 2, {"sync.verify=true"});
  CHECK(run_cases(2, {{"whole", s, {}, {}, {}}}, nothing) == "");
  CHECK(run_cases(2, {{"a move less", s, drop_a_move, {}, "does not hold the training weights in fp32"}}, nothing) ==
        "");
}

TEST_CASE("a verified sync names the tensor that was corrupted, in every layout") {
  // After the slices have arrived, one element of layer 1's down projection on the last rank becomes 0.
  const auto corrupt = [](Plan& plan) {
    plan.programs.push_back(plan.programs.front());  // the last rank's own
    plan.program_of_rank.back() = static_cast<std::int32_t>(plan.programs.size()) - 1;
    Program& program = plan.programs.back();
    test::EditedOps ops(program, program.phases[static_cast<std::size_t>(plan.phase_index("sync"))][0]);
    const auto first = std::ranges::find_if(ops, [](const Op& op) { return op.kind == OpKind::hash_boxes; });
    Op zero;
    zero.kind = OpKind::zero;
    zero.name = "corrupt";
    for (std::size_t b = 0; b < program.buffers.size(); ++b)
      if (program.buffers[b].name == "rollout.layers.1.down")
        zero.outputs = {{.buffer = static_cast<BufferId>(b), .dtype = program.buffers[b].dtype, .rank = 1}};
    ops.insert(first, zero);
  };
  const std::string name = "after the weight sync of step 1 the rollout does not hold the training weights in ";
  const auto named = [&](const char* dtype, const char* ranks) {
    return fmt::format("{}{}: 'model.layers.1.mlp.down_proj.weight' on {}: trained ", name, dtype, ranks);
  };
  const auto job = [&](int world, int tp, std::vector<std::string> sets, std::string fails_with) {
    sets.emplace_back("sync.verify=true");
    return std::vector<Case>{{"corrupted", tiny_scenario(world, tp, sets), corrupt, {}, std::move(fails_with)}};
  };
  CHECK(run_cases(1, job(1, 1, {}, named("fp32", "rank 0")), nothing) == "");
  CHECK(run_cases(2, job(2, 2, {}, named("fp32", "ranks 0, 1")), nothing) == "");
  CHECK(run_cases(4, job(4, 2, {"train.precision.params=bf16"}, named("bf16", "ranks 2, 3")), nothing) == "");
  CHECK(run_cases(4, job(4, 4, {"sync.transport=collective"}, named("fp32", "ranks 0, 1, 2, 3")), nothing) == "");
}

TEST_CASE("a sync that leaves a slice of a fresh weight unwritten is an error of the verifier") {
  for (const char* transport : {"sync.transport=ipc", "sync.transport=collective"}) {
    const Plan plan = *lower(tiny_scenario(2, 2, {"rollout.sleep_level=2", transport}));
    REQUIRE(verify(plan).empty());
    const auto sync = static_cast<std::size_t>(plan.phase_index("sync"));
    const std::vector<Op> ops = test::ops_of(plan.programs[0], plan.programs[0].phases[sync][0]);
    int dropped = 0;
    for (std::size_t i = 0; i < ops.size(); ++i)
      for (std::size_t move = 0; move < ops[i].moves.size(); ++move) {
        Plan mutant = plan;
        {
          test::EditedOps edited(mutant.programs[0], mutant.programs[0].phases[sync][0]);
          edited[i].moves.erase(edited[i].moves.begin() + static_cast<std::ptrdiff_t>(move));
        }
        const auto faults = verify(mutant);
        const bool found = !faults.empty() && faults.front().find("that nobody wrote since") != std::string::npos;
        INFO(transport << ", move " << move << " of " << ops[i].name);
        CHECK(found);
        ++dropped;
      }
    CHECK(dropped > 30);
  }
}

TEST_CASE("a step while asleep is an error of the verifier") {
  Plan plan = *lower(tiny_scenario(2, 2));
  REQUIRE(verify(plan).empty());
  // The train phase moves in front of wake_train.
  const auto wake = static_cast<std::size_t>(plan.phase_index("wake_train")),
             train = static_cast<std::size_t>(plan.phase_index("train"));
  std::swap(plan.phases[wake], plan.phases[train]);
  for (Program& p : plan.programs) std::swap(p.phases[wake], p.phases[train]);
  const auto faults = verify(plan);
  REQUIRE(!faults.empty());
  CHECK(faults.front().find("phase train") != std::string::npos);
}

TEST_CASE("a step between a repeated sleep and the wake is an error of the verifier too") {
  Plan plan = *lower(tiny_scenario(2, 2));
  const auto at = static_cast<std::size_t>(plan.phase_index("old_logprobs"));
  insert_transitions(plan, static_cast<std::size_t>(plan.phase_index("sleep_train")), at, "sleep_train.again");
  const auto faults = verify(plan);  // here it is no repetition: train is awake, and goes to sleep before its pass
  REQUIRE(!faults.empty());
  CHECK(faults.front().find("phase old_logprobs") != std::string::npos);
}
