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

namespace {

/// What takes as many ns as its block has tokens, and other things as said.
struct ByTokens final : OpCost {
  Prices fixed;
  explicit ByTokens(Prices others) : fixed(std::move(others)) {}
  std::int64_t nanoseconds(const Plan& plan, Rank r, const Op& o, const Args& args) const override {
    return o.name == "rollout" || o.name == "train" ? args.sizes.tokens : fixed.nanoseconds(plan, r, o, args);
  }
};

/// Of each step its own number of tokens, on the engine (rank 1) and on the trainer.
struct StepTokens final : Fixed {
  std::vector<std::int64_t> rollout, train;
  std::optional<Args> next(Rank r, std::int32_t step, std::int16_t phase) override {
    std::optional<Args> args = Fixed::next(r, step, phase);
    if (args) args->sizes.tokens = (r == engine ? rollout : train).at(static_cast<std::size_t>(step - 1));
    return args;
  }
};

Op barrier(const std::string& name, bool gives) {
  Op o = op(OpKind::barrier, streams::control, name);
  o.group = 0;
  o.attrs = {{Attr::gives, std::int64_t{gives}}};
  return o;
}

/// Rank 1 rolls out and gives its samples; rank 0 takes them, sends its weights (7 ns), gives them and trains. The
/// engine takes and loads (5 ns) those of `ahead` trainings ago.
Plan handing_over(std::int32_t ahead) {
  const auto timed = [](const char* name) {
    Op o = kernel(name, streams::control);
    o.outputs = {tensor(0, {512, tokens_extent})};
    return o;
  };
  const std::vector<std::string> phases = {"rollout", "samples", "sync", "train"};
  Plan plan = plan_of(phases, {{{},
                                {barrier("take samples", false)},
                                {kernel("send", streams::control), barrier("give weights", true)},
                                {timed("train")}},
                               {{timed("rollout")},
                                {barrier("give samples", true)},
                                {barrier("take weights", false), kernel("load", streams::control)},
                                {}}});
  plan.roles = {"trainer", "engine"};
  for (Program& p : plan.programs) {
    p.num_events = 0;
    p.buffers = {{"buffer", DType::f32, 512, Category::workspace, sections::train_params, 0}};
    p.section(sections::train_params).bytes = 4096;
  }
  plan.programs[1].role = engine;
  plan.programs[0].phases[0].clear(), plan.programs[1].phases[3].clear();
  plan.phases[0].players = {{engine, 0}};
  plan.phases[1].players = {{trainer, 0}, {engine, 0}};
  plan.phases[2].players = {{trainer, 0}, {engine, ahead - 1}};
  plan.phases[3].players = {{trainer, 0}};
  return plan;
}

std::string faults_of_roles(const Plan& plan) {
  Faults faults(16);
  check_roles(plan, faults);
  return fmt::format("{}", fmt::join(faults.take(), "; "));
}

/// When each step's training ends.
std::vector<std::int64_t> training_ends(std::int32_t ahead, const std::vector<std::int64_t>& rollout,
                                        const std::vector<std::int64_t>& train) {
  Plan plan = handing_over(ahead);
  CHECK(faults_of_roles(plan).empty());
  for (PhaseInfo& phase : plan.phases) phase.driven = true;
  const ByTokens cost(Prices{{"send", 7}, {"load", 5}});
  SimOptions options;
  options.timeline.last_step = static_cast<std::int32_t>(rollout.size());
  SimBackend backend(one_rank_per_device(), cost, options);
  StepTokens driver;
  driver.rollout = rollout, driver.train = train;
  const auto trace =
      execute(plan, backend, driver, {.steps = static_cast<std::int32_t>(rollout.size()), .local_ranks = {0, 1}});
  if (!trace) FAIL(render(trace.error()));
  std::vector<std::int64_t> out;
  for (const auto& [start, end] : times(*trace, "train")) out.push_back(end);
  return out;
}

}  // namespace

TEST_CASE("what is handed over lets an engine be ahead, and neither waits for more than it takes") {
  using Ends = std::vector<std::int64_t>;
  // Rollouts of 30 beside trainings of 60: the first samples come at 30, and from then on the trainer never waits: 7
  // for its weights and 60, whether the engine is two ahead or four.
  for (const std::int32_t ahead : {1, 2, 4})
    CHECK(training_ends(ahead, Ends(5, 30), Ends(5, 60)) == Ends{97, 164, 231, 298, 365});
  // Rollouts of 100 beside trainings of 60: the engine never waits. The first `ahead` take no weights, from then on it
  // is 5 + 100; one ahead it waits for the sending as well.
  CHECK(training_ends(1, Ends(4, 100), Ends(4, 60)) == Ends{167, 279, 391, 503});
  CHECK(training_ends(2, Ends(4, 100), Ends(4, 60)) == Ends{167, 267, 372, 477});
  CHECK(training_ends(4, Ends(6, 100), Ends(6, 60)) == Ends{167, 267, 367, 467, 572, 677});
  // Rollouts of 100 and 20 by turns, trainings of 70, which is more than the mean of 60 + 5: one ahead the long ones
  // show, two ahead they do not.
  const Ends uneven = {100, 20, 100, 20, 100, 20, 100, 20}, seventy(8, 70);
  const Ends one = training_ends(1, uneven, seventy), two = training_ends(2, uneven, seventy);
  CHECK(two.back() - two.front() == 7 * 77);
  CHECK(one.back() - one.front() > 7 * 77 + 3 * 20);
}

TEST_CASE("random hand-overs: every training ends when the recurrence says") {
  std::uint64_t draw = 0;
  const auto below = [&](std::int64_t n) {
    return static_cast<std::int64_t>(random_words(7, RngPurpose::test, draw++, 0)[0] % static_cast<std::uint32_t>(n));
  };
  for (int round = 0; round < 60; ++round) {
    const auto ahead = static_cast<std::int32_t>(1 + below(6));
    const auto steps = static_cast<std::size_t>(1 + below(10));
    std::vector<std::int64_t> rollout, train, expected;
    for (std::size_t s = 0; s < steps; ++s) rollout.push_back(1 + below(200)), train.push_back(1 + below(100));
    // By step from 1: when its samples and its weights were given. Weights are given behind the samples of their step
    // and the training before; a rollout begins when the weights of `ahead` trainings ago are loaded.
    std::vector<std::int64_t> weights(steps + 1, 0);
    std::int64_t engine_at = 0, trainer_at = 0;
    for (std::size_t s = 1; s <= steps; ++s) {
      engine_at += rollout[s - 1];
      weights[s] = std::max(engine_at, trainer_at) + 7;
      trainer_at = weights[s] + train[s - 1];
      expected.push_back(trainer_at);
      const auto taken = static_cast<std::int64_t>(s) - ahead + 1;
      if (taken >= 1) engine_at = std::max(engine_at, weights[static_cast<std::size_t>(taken)]) + 5;
    }
    CAPTURE(ahead, rollout, train);
    CHECK(training_ends(ahead, rollout, train) == expected);
  }
}

TEST_CASE("the verifier finds hand-overs that cannot be") {
  const auto faults = [](auto&& change) {
    Plan plan = handing_over(2);
    change(plan);
    return faults_of_roles(plan);
  };
  const auto attr_of = [](Plan& plan, std::size_t program, std::size_t phase) -> AttrValue& {
    Program& p = plan.programs[program];
    for (Op& o : p.bodies.at(static_cast<std::size_t>(p.phases[phase][0].calls.at(0).body)).ops)
      if (o.hands_over()) return o.attrs[0].second;
    throw std::logic_error("no hand-over");
  };
  CHECK(faults([](Plan&) {}).empty());
  CHECK_THAT(faults([&](Plan& p) { attr_of(p, 0, 1) = std::int64_t{1}; }), Catch::Contains("none takes"));
  CHECK_THAT(faults([&](Plan& p) { attr_of(p, 1, 1) = std::int64_t{0}; }), Catch::Contains("none gives"));
  CHECK_THAT(faults([&](Plan& p) { attr_of(p, 1, 1) = std::int64_t{2}; }), Catch::Contains("gives is 0 or 1"));
  CHECK_THAT(faults([&](Plan& p) { p.programs[0].phases[1].clear(); }), Catch::Contains("trainer does neither"));
  CHECK_THAT(faults([&](Plan& p) {
               p.phases.push_back(p.phases[1]);
               p.phases.back().name = "more samples";
               for (Program& program : p.programs) program.phases.push_back(program.phases[1]);
             }),
             Catch::Contains("so does phase samples, over the same group and stream"));
  // The weights of a training that waits for the samples of the rollout that waits for them.
  CHECK_THAT(faults([&](Plan& p) { std::swap(p.phases[2].players[0].steps_back, p.phases[2].players[1].steps_back); }),
             Catch::Contains("roles wait for one another for ever"));
}

TEST_CASE("who takes what is never given is named") {
  Plan plan = handing_over(2);
  Program& gives_nothing = plan.programs[1];
  gives_nothing.phases[1] = {test::block_of(gives_nothing, "only", {kernel("nothing", streams::control)})};
  const auto trace = simulate(plan, prices, 1, 2);
  REQUIRE(!trace);
  CHECK_THAT(render(trace.error()), Catch::Contains("E611") && Catch::Contains("takes what rank 1 has not given"));
}

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
