// Roles that walk one plan at their own pace and meet in phases: who waits for whom, and when.
#include <fmt/format.h>

#include <catch2/catch.hpp>

#include "base/rng.h"
#include "graph/verify.h"
#include "graph/verify_parts.h"
#include "tests/sim/toy.h"

using namespace hotbunk;
using namespace hotbunk::toy;

namespace {

constexpr std::int32_t trainer = 0, engine = 1;

/// Rank 0 trains, rank 1 rolls out: in each iteration the engine generates (100 ns) and sends its samples (5), the
/// trainer trains on them (60) and sends its weights (7). `steps_back`: of the sync; how far the engine is ahead.
Plan two_roles(std::int32_t steps_back) {
  const std::vector<std::string> phases = {"rollout", "sync", "samples", "train"};
  Plan plan = plan_of(phases, {{{},
                                {transfer(OpKind::send, "weights", {64}, 1)},
                                {transfer(OpKind::recv, "samples", {8}, 1)},
                                {kernel("train", streams::control)}},
                               {{kernel("rollout", streams::control)},
                                {transfer(OpKind::recv, "weights", {64}, 0)},
                                {transfer(OpKind::send, "samples", {8}, 0)},
                                {}}});
  plan.roles = {"trainer", "engine"};
  for (Program& p : plan.programs) {
    p.num_events = 0;
    p.buffers = {{"buffer", DType::f32, 64, Category::workspace, sections::train_params, 0}};
    p.section(sections::train_params).bytes = 4096;
  }
  plan.programs[1].role = engine;
  plan.programs[0].phases[0].clear(), plan.programs[1].phases[3].clear();
  plan.phases[0].players = {{engine, 0}};
  plan.phases[1].players = {{trainer, steps_back}, {engine, steps_back}};
  plan.phases[2].players = {{trainer, 0}, {engine, 0}};
  plan.phases[3].players = {{trainer, 0}};
  if (steps_back == 0) {  // on policy: what was trained is sent at the iteration's end
    const auto last = [](auto& list) { std::rotate(list.begin() + 1, list.begin() + 2, list.end()); };
    last(plan.phases);
    for (Program& p : plan.programs) last(p.phases);
  }
  return plan;
}

const Prices prices{{"rollout", 100}, {"samples", 5}, {"train", 60}, {"weights", 7}};

}  // namespace

TEST_CASE("on policy roles work in turn") {
  Plan plan = two_roles(0);
  const auto trace = simulate(plan, prices, 1, 2);
  REQUIRE(trace);
  // 100 + 5 + 60 + 7 an iteration.
  CHECK(times(*trace, "rollout") == Times{{0, 100}, {172, 272}});
  CHECK(times(*trace, "train") == Times{{105, 165}, {277, 337}});
  CHECK(times(*trace, "weights") == Times{{165, 172}, {337, 344}, {165, 172}, {337, 344}});
}

TEST_CASE("one step off policy the engine generates while the trainer trains, and both end with the last sync") {
  Plan plan = two_roles(1);
  SimOptions options;
  options.timeline.last_step = 3;
  const auto trace = simulate(plan, prices, 1, 3, options);
  REQUIRE(trace);
  // The second rollout begins behind the first samples, at 105, with the weights of before; the first weights come when
  // it is done: 100 + 7 + 5 an iteration. Behind the third iteration only its sync is left.
  CHECK(times(*trace, "rollout") == Times{{0, 100}, {105, 205}, {217, 317}});
  CHECK(times(*trace, "train") == Times{{105, 165}, {217, 277}, {329, 389}});
  const Times weights{{205, 212}, {317, 324}, {389, 396}};
  Times both = weights;
  both.insert(both.end(), weights.begin(), weights.end());
  CHECK(times(*trace, "weights") == both);
  // A phase is of the iteration whose data it moves, whenever it is played.
  std::map<std::string, std::vector<std::int32_t>> steps;
  for (const PhaseSpan& p : trace->phases)
    if (p.rank == 1) steps[plan.phases.at(static_cast<std::size_t>(p.phase)).name].push_back(p.step);
  for (const char* phase : {"rollout", "sync", "samples"})
    CHECK_THAT(steps[phase], Catch::UnorderedEquals(std::vector<std::int32_t>{1, 2, 3}));
  CHECK(steps["train"].empty());
}

TEST_CASE("the verifier finds the ring of waits that a run would stop in") {
  const auto ring_of = [](const Plan& plan) {
    for (const std::string& fault : verify(plan))
      if (fault.find("roles wait") != std::string::npos) return fault;
    return std::string();
  };
  const auto with_sync = [](std::int32_t trainer_back, std::int32_t engine_back) {
    Plan plan = two_roles(1);
    plan.phases[1].players = {{trainer, trainer_back}, {engine, engine_back}};
    return plan;
  };
  struct Case {
    std::int32_t trainer_back, engine_back;
    const char* ring;
  };
  // The sync stands in front of the samples. Of the same iteration on both sides it sends what was not trained yet, and
  // whoever is asked for the one before has it only when the other is not waiting for the next one's samples.
  for (const Case& c : {Case{1, 1, ""}, Case{0, 0, ""}, Case{2, 2, ""}, Case{2, 1, "roles wait"},
                        Case{0, 1,
                             "roles wait for one another for ever: engine plays rollout before sync of the iteration "
                             "before, trainer plays "
                             "sync before samples, engine plays samples before rollout of the next iteration"},
                        Case{1, 2, "roles wait"}, Case{1, 0, "roles wait"}}) {
    INFO(c.trainer_back << ' ' << c.engine_back);
    Plan plan = with_sync(c.trainer_back, c.engine_back);
    const std::string ring = ring_of(plan);
    CHECK_THAT(ring, Catch::StartsWith(c.ring));
    CHECK(ring.empty() == (std::string_view(c.ring).empty()));
    const auto trace = simulate(plan, prices, 1, 4);
    CHECK(ring.empty() == trace.has_value());
    if (!trace) CHECK_THAT(render(trace.error()), Catch::Contains("E611"));
  }
}

namespace {

/// One rank for each of two or three roles; each phase is played by some of them, who meet in one collective on one
/// stream, up to two steps back.
Plan random_roles(std::uint64_t seed) {
  std::uint64_t draw = 0;
  const auto below = [&](std::int32_t n) {
    return static_cast<std::int32_t>(random_words(seed, RngPurpose::test, draw++, 0)[0] %
                                     static_cast<std::uint32_t>(n));
  };
  const Rank ranks = 2 + below(2);
  const int phases = 2 + below(4);
  std::vector<std::string> names;
  for (int p = 0; p < phases; ++p) names.push_back(fmt::format("p{}", p));
  Plan plan = plan_of(names, std::vector(static_cast<std::size_t>(ranks),
                                         std::vector<std::vector<Op>>(static_cast<std::size_t>(phases))));
  plan.roles.clear();
  for (Rank r = 0; r < ranks; ++r) {
    plan.roles.push_back(fmt::format("r{}", r));
    plan.programs[static_cast<std::size_t>(r)].role = r;
    for (auto& blocks : plan.programs[static_cast<std::size_t>(r)].phases) blocks.clear();
  }
  for (std::size_t p = 0; p < names.size(); ++p) {
    GroupFamily family{names[p], {{}}};
    plan.phases[p].players.clear();
    const Rank always = below(ranks);
    for (Rank r = 0; r < ranks; ++r)
      if (r == always || below(3) > 0) {
        plan.phases[p].players.push_back({r, below(3)});
        family.groups[0].push_back(r);
      }
    for (const Rank r : family.groups[0]) {
      Program& program = plan.programs[static_cast<std::size_t>(r)];
      program.phases[p] = {
          test::block_of(program, "only", {all_reduce("meet", {1}, static_cast<GroupId>(plan.groups.size()))})};
    }
    plan.groups.push_back(std::move(family));
  }
  return plan;
}

}  // namespace

TEST_CASE("random roles: a ring of waits in the plan is a deadlock in the run, and nothing else is") {
  int rings = 0, whole = 0;
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    Plan plan = random_roles(seed);
    Faults faults(16);
    check_roles(plan, faults);
    const auto found = faults.take();
    if (!found.empty() && found[0].find("plays no phase") != std::string::npos) continue;
    INFO(seed << (found.empty() ? "" : " " + found[0]));
    const auto trace = simulate(plan, Prices{{"meet", 1}}, 1, 8);
    CHECK(found.empty() == trace.has_value());
    ++(found.empty() ? whole : rings);
  }
  CHECK(rings > 50);
  CHECK(whole > 50);
}
