// Seconds of the shifts: what is mapped for the steps between them, by hand; a lowered scenario's from its plan, the
// same in every answer.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <random>

#include "lowering/lower.h"
#include "planner/answers/choices.h"
#include "planner/answers/lowered_space.h"
#include "planner/answers/plan_answer.h"
#include "planner/answers/plan_shifts.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "spec/validate.h"
#include "tests/paths.h"
#include "tests/planner/pricers.h"

using namespace hotbunk;

namespace {

WorkMoves moves(const char* order, const WorkBytes& work, bool train_sleeps = true, bool rollout_sleeps = true) {
  return ShiftShape(*transition_from(order, train_sleeps, rollout_sleeps)).moves(work);
}

double total(const WorkMoves& m) {
  double out = 0.0;
  for (const auto& of : {m.sync, m.sleep, m.wake}) out += of.mapped + of.unmapped;
  return out;
}

Scenario shifting(const std::string& name, const std::vector<std::string>& sets = {}) {
  auto s = load_scenario(std::string(source_folder) + "/scenarios/" + name, sets);
  if (!s) FAIL(render(s.error()));
  return *s;
}

}  // namespace

TEST_CASE("what steps work in is mapped for the step itself and for what is driven behind it") {
  const WorkBytes work{.sync = 7, .rollout = 3, .train = 20};
  // sleep_optimizer 20 -> 0, wake_rollout, sync -> 7, sleep_train -> 0, wake_kv -> 3 (the rollout), sleep_rollout -> 0,
  // wake_train -> 20.
  const WorkMoves both = moves("hotbunk", work);
  CHECK((both.sync.mapped == 7 && both.sync.unmapped == 0));
  CHECK((both.sleep.mapped == 0 && both.sleep.unmapped == 20 + 7 + 3));
  CHECK((both.wake.mapped == 3 + 20 && both.wake.unmapped == 0));
  // The rollout awake: sleep_optimizer -> 0, sync -> 7, sleep_train -> 3, wake_train -> 20.
  const WorkMoves train = moves("hotbunk", work, true, false);
  CHECK((train.sync.mapped == 7 && train.sleep.unmapped == 20 + 4 && train.wake.mapped == 17));
  CHECK((train.sleep.mapped == 0 && train.wake.unmapped == 0 && train.sync.unmapped == 0));
  // Training awake: wake_rollout -> 0, sync -> 7, wake_kv -> 3, sleep_rollout -> 20.
  const WorkMoves rollout = moves("hotbunk", work, false, true);
  CHECK((rollout.sync.mapped == 7 && rollout.sleep.mapped == 17 && rollout.sleep.unmapped == 0));
  CHECK((rollout.wake.mapped == 0 && rollout.wake.unmapped == 20 + 4));
  CHECK(total(moves("hotbunk", work, false, false)) == 0);  // one section for all of them, for ever
}

TEST_CASE("less work of training never moves more memory, in any order") {
  std::mt19937_64 random(5);
  const auto draw = [&] { return static_cast<double>(random() % 100); };
  for (bool train : {false, true})
    for (bool rollout : {false, true})
      for (const TransitionOrder& o : legal_transitions(train, train, rollout, true)) {
        const ShiftShape shape(o);
        for (int i = 0; i < 4; ++i) {
          const WorkBytes more{draw(), draw(), draw()};
          WorkBytes less = more;
          less.train = std::min(less.train, draw());
          const WorkMoves a = shape.moves(less), b = shape.moves(more);
          INFO(to_text(o) << ": " << more.sync << " " << more.rollout << " " << less.train << " of " << more.train);
          CHECK(total(a) <= total(b));
          CHECK(a.sync.mapped + a.sleep.mapped + a.wake.mapped == a.sync.unmapped + a.sleep.unmapped + a.wake.unmapped);
        }
      }
}

TEST_CASE("a plan's shifts, worked: Qwen2.5-7B over 8 ranks, two engines of TP4") {
  const Scenario s = shifting("qwen2.5-7b-fsdp8.yaml");
  const auto pricer = pricer_for(s);
  const CostModel& cost = pricer->train().cost();
  // fp32 shards of a rank: embedding 19008 x 3584 elements, head as many and the norm's 448, 28 layers of
  // 233,057,792 / 8.
  const double root = 4.0 * 19008 * 3584, head = root + 4.0 * 448, layer = 4.0 * 233'057'792 / 8;
  const auto copied = [&](double bytes) { return cost.host_copy_seconds(bytes); };
  // Parameters and both moments; the reference in bf16.
  const double copies = 3 * (copied(root) + copied(head) + 28 * copied(layer)) + copied(root / 2) + copied(head / 2) +
                        28 * copied(layer / 2);
  // Sections in chunks of 2 MiB: parameters 3,807,808,256 B, the reference half, moments double; rollout weights are a
  // quarter of 15.23 GB, the pool 256 slots of 576 blocks: 2 x 16 tokens x 1 head of 128 x 28 layers x 2 B each, as far
  // as 0.8 of the device holds them.
  const double chunk = 2 << 20, params = 1816 * chunk, reference = 908 * chunk, moments = 3632 * chunk,
               weights = 1816 * chunk;
  const double kv = std::ceil(static_cast<double>(*kv_pool_blocks(s)) * 2 * 16 * 128 * 28 * 2 / chunk) * chunk;
  // What steps work in is placed as place_transients knows.
  const PlanAnswer answer = *plan_answer_of(s);
  ModelShapes shapes(s.model);
  const PhaseBytes need = write_phases(s, nullptr, shapes).value().transients.front();
  const auto work = [&](PlanPhase p) {
    return std::ceil(static_cast<double>(need[static_cast<std::size_t>(p)]) / chunk) * chunk;
  };
  const double sync = work(PlanPhase::sync), engine = work(PlanPhase::rollout), exchange = work(PlanPhase::exchange),
               training = work(PlanPhase::train);
  REQUIRE(sync == 64.0 * (1 << 20));  // a rank's part of 512 MiB
  const auto map = [&](double bytes) { return cost.map_seconds(bytes); };
  const double asleep = map(params) + map(reference) + map(moments), awake = map(weights) + map(kv);
  const ShiftsSeconds plan = shifts_seconds(answer.shifts, cost);
  CHECK(plan.staging == Approx(map(sync)));
  CHECK(plan.sleep.copies == Approx(copies));
  CHECK(plan.wake.copies == Approx(copies));
  CHECK(plan.sleep.host == Approx(asleep));
  CHECK(plan.wake.host == Approx(asleep));
  CHECK(plan.sleep.device == Approx(asleep + awake + map(training) + map(sync) + map(engine - exchange)));
  CHECK(plan.wake.device == Approx(asleep + awake + map(engine) + map(training - exchange)));
}

TEST_CASE("a plan's shifts cost what its ops cost, and every answer says the same") {
  for (const std::vector<std::string>& sets :
       {std::vector<std::string>{}, {"rollout.sleep_level=1"}, {"train.offload=none"}, {"rollout.sleep=false"}}) {
    const Scenario s = shifting("demo.yaml", sets);
    const auto pricer = pricer_for(s);
    const CostModel& cost = pricer->train().cost();
    const ShiftsSeconds plan = shifts_seconds(plan_answer_of(s)->shifts, cost);
    const Explanation e = explain(*pricer);
    const auto at = [](const RlPrice& p, RlPhase phase) { return p.seconds[static_cast<std::size_t>(phase)]; };
    CHECK(at(e.price, RlPhase::sleep) == plan.sleep.total());
    CHECK(at(e.price, RlPhase::wake) == plan.wake.total());
    const PlanSeconds seconds = plan_seconds(s, e.point.train, plan_answer_of(s)->plan, cost);
    CHECK(at(e.price, RlPhase::sync) == Approx(seconds.sync.seconds() + plan.staging));
    CHECK(at(e.price, RlPhase::rollout) == seconds.rollout.total());
    const auto choices = choose(*pricer, {.top = 3});
    REQUIRE(choices.has_value());
    const auto own = std::find_if(choices->rows.begin(), choices->rows.end(), [](const auto& r) { return r.own; });
    REQUIRE(own != choices->rows.end());
    CHECK(own->price.iteration_seconds == Approx(e.price.iteration_seconds).epsilon(1e-12));
    RlPrice swept = pricer->price(e.point);
    REQUIRE(use_plan(s, cost, swept));
    CHECK(swept.iteration_seconds == e.price.iteration_seconds);
    use_plan_seconds(ComputedSeconds::of(s, seconds), plan, swept);  // twice is once
    CHECK(swept.iteration_seconds == e.price.iteration_seconds);
    for (const ChoiceRow& r : choices->beyond) CHECK_FALSE(why_not_lowered(with_point(s, r.point)).empty());
    // Rows that were found by searching are what `explain` says of them.
    for (const ChoiceRow& r : choices->rows) {
      const Explanation there = explain(*pricer_for(shifting("demo.yaml", [&] {
        std::vector<std::string> all = sets;
        for (const std::string& flag : flags_of(s, r.point)) all.push_back(flag);
        return all;
      }())));
      CHECK(there.price.iteration_seconds == Approx(r.price.iteration_seconds).epsilon(1e-12));
    }
  }
}

TEST_CASE("one rank's sync copies once and gathers nothing") {
  const std::vector<std::string> one = {"cluster.ranks_per_device=1", "train.layout.dp=1", "rollout.layout.tp=1",
                                        "rollout.layout.dp=1"};
  std::vector<std::string> gathers = one;
  gathers.emplace_back("sync.transport=collective");
  const auto a = pricer_for(shifting("demo.yaml", one)), b = pricer_for(shifting("demo.yaml", gathers));
  const SyncPrice x = a->rl().sync_price(a->point()), y = b->rl().sync_price(b->point());
  CHECK(x.moving == 0.0);
  CHECK(y.seconds() == x.seconds());
}

TEST_CASE("what a rank has of a model decides its parts: ranks with other experts move other bytes") {
  const Scenario s = shifting("expert-parallel-cpu.yaml", {"train.engine=zero1"});
  const auto pricer = pricer_for(s);
  const PlanPrices together = plan_prices(s, pricer->train().cost());
  std::vector<double> sleeps;
  for (const std::int64_t ep : {1, 2, 4}) {
    CAPTURE(ep);
    RlPoint p = rl_point_of(s);
    p.train.ep = ep;
    RlPrice of_all, alone;
    REQUIRE(together(p, of_all));
    REQUIRE(plan_prices(s, pricer->train().cost())(p, alone));
    CHECK(of_all.seconds == alone.seconds);
    CHECK(of_all.peak_bytes() == alone.peak_bytes());
    CHECK(of_all.host_bytes == alone.host_bytes);
    sleeps.push_back(alone.host_bytes);
  }
  CHECK(sleeps[0] > sleeps[2]);
}

TEST_CASE("micro-batches that sequence parallelism does not divide are no rows, and end no search") {
  // Samples of at most 11 tokens, 66 of them to a micro-batch: half of the candidates are odd.
  const Scenario s = shifting("tensor-parallel-cpu.yaml",
                              {"algorithm.samples_per_prompt=3", "algorithm.prompts=6", "train.micro_batch_tokens=66"});
  const auto choices = choose(*pricer_for(s), {.top = 8});
  REQUIRE(choices.has_value());
  REQUIRE(choices->rows.size() > 4);
  for (const ChoiceRow& r : choices->rows) {
    const TrainSpec train = with_point(s, r.point).train;
    CHECK((!train.layout.sp || train.micro_batch_tokens % train.layout.tp == 0));
  }
}

TEST_CASE(
    "an engine in stages is lowered whole: yours takes what explain says, and what executes is not called priced") {
  const Scenario s = shifting("expert-mesh-cpu.yaml");
  const auto pricer = pricer_for(s);
  const auto choices = choose(*pricer, {.top = 1, .budget = 2000});
  REQUIRE(choices.has_value());
  const auto own = std::ranges::find(choices->rows, true, &ChoiceRow::own);
  REQUIRE(own != choices->rows.end());
  CHECK(own->price.iteration_seconds == Approx(explain(*pricer).price.iteration_seconds).epsilon(1e-12));
  for (const ChoiceRow& r : choices->beyond) CHECK_FALSE(unsupported_to_execute(with_point(s, r.point)).empty());
}
