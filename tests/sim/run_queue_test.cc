#include "sim/run_queue.h"

#include <catch2/catch.hpp>

#include "tests/sim/toy.h"

using namespace hotbunk;
using namespace hotbunk::toy;

namespace {

/// Prices by name, on threads.
struct Threads final : OpCost {
  Prices prices;
  ThreadModel model;
  std::int64_t decision_ns = 0;
  Threads(Prices p, ThreadModel m) : prices(std::move(p)), model(m) {}
  std::int64_t nanoseconds(const Plan& plan, Rank r, const Op& o, const Args& args) const override {
    return prices.nanoseconds(plan, r, o, args);
  }
  ThreadModel threads() const override { return model; }
  std::int64_t decision_nanoseconds() const override { return decision_ns; }
};

ClusterSpec shared_by(std::int64_t ranks) {
  ClusterSpec cluster;
  cluster.ranks_per_device = ranks;
  return cluster;
}

}  // namespace

TEST_CASE("first come, first served: jobs do not share a core, they queue for it") {
  // Three jobs of 100 on two cores, all at 0: two are done at 100, the third runs 100-200. Sharing would end all at
  // 150.
  RunQueue q({.cores = 2});
  for (std::uint32_t thread : {1u, 2u, 3u}) q.join(0, thread, 100);
  q.dispatch(0);
  CHECK(q.next_ns() == 100);
  CHECK(q.take_done(100) == 1);
  CHECK(q.take_done(100) == 2);
  CHECK_FALSE(q.take_done(100));
  q.dispatch(100);
  CHECK(q.next_ns() == 200);
  CHECK(q.take_done(200) == 3);
  q.dispatch(200);
  CHECK_FALSE(q.next_ns());
}

TEST_CASE("a thread that goes on at the instant keeps its core, for nothing") {
  // 1 does 100 and at once 50 more, before 2, which came earlier: 1 until 150, then 2, which pays the switch: 150+5+30.
  RunQueue q({.cores = 1, .wake_ns = 20, .switch_ns = 5});
  q.join(0, 1, 100);
  q.dispatch(0);
  CHECK(q.next_ns() == 120);  // the core was idle: a wake-up
  q.join(60, 2, 30);
  CHECK(q.take_done(120) == 1);
  q.join(120, 1, 50);
  q.dispatch(120);
  CHECK(q.take_done(170) == 1);
  q.dispatch(170);
  CHECK(q.next_ns() == 170 + 5 + 30);
}

TEST_CASE("a slice that is over puts a thread behind those who wait, and only then") {
  // Slices of 40. Alone, 1 runs on through 40. At 50 comes 2: at 80 the slice is over, 2 runs 80-110, then the last 20.
  RunQueue q({.cores = 1, .slice_ns = 40});
  q.join(0, 1, 100);
  q.dispatch(0);
  CHECK(q.next_ns() == 40);
  CHECK_FALSE(q.take_done(40));
  CHECK(q.next_ns() == 80);
  q.join(50, 2, 30);
  q.dispatch(50);
  CHECK_FALSE(q.take_done(80));
  q.dispatch(80);
  CHECK(q.next_ns() == 110);
  CHECK(q.take_done(110) == 2);
  q.dispatch(110);
  CHECK(q.take_done(130) == 1);
}

TEST_CASE("hand-over between streams costs a wake-up for every wait that was not yet satisfied") {
  // One core each for host and streams is free (3 cores, 1 rank): a wakes (10), runs 100: done at 110. b slept on the
  // event: 10 more, [120, 170). c comes from an event that has fired by then: no cost, [170, 171).
  Plan plan = plan_of({{kernel("a"), record(0, streams::compute), wait(0, streams::gather),
                        kernel("b", streams::gather), wait(0, streams::gather), kernel("c", streams::gather)}});
  const Threads cost({{"a", 100}, {"b", 50}, {"c", 1}}, {.cores = 3, .wake_ns = 10});
  const auto trace = simulate(plan, cost);
  REQUIRE(trace);
  CHECK(times(*trace, "a").at(0).second == 110);
  CHECK(times(*trace, "b").at(0).second == 170);
  CHECK(times(*trace, "c") == Times{{170, 171}});
}

TEST_CASE("a host's calls take its time: an op cannot start before it was issued") {
  // Calls of 7, no wake-up worth grouping them for: enter 7, x issued at 14, y at 21. x [14,16), y [21,23).
  Plan plan = plan_of({{kernel("x"), kernel("y")}});
  Threads cost({{"x", 2}, {"y", 2}}, {.cores = 4, .call_ns = 7});
  CHECK(times(*simulate(plan, cost), "x") == Times{{14, 16}});
  CHECK(times(*simulate(plan, cost), "y") == Times{{21, 23}});
  cost.decision_ns = 100;  // the driver's, before the block's first op
  CHECK(times(*simulate(plan, cost), "x") == Times{{107 + 7, 107 + 9}});
}

TEST_CASE("ranks meet in turn where they outnumber the cores") {
  // Four ranks, two cores, no other cost. Kernels of 100: two ranks arrive at 100, two at 200. Then each rank's own
  // part of the meeting, 30: the last two, who have the cores, [200, 230), the others behind them [230, 260).
  const std::vector<Op> ops = {kernel("k", streams::reduce), all_reduce("r", {8})};
  Plan plan = plan_of({ops, ops, ops, ops});
  const Threads cost({{"k", 100}, {"r", 30}}, {.cores = 2});
  const auto trace = simulate(plan, cost, 1, 1, {}, shared_by(4));
  REQUIRE(trace);
  std::vector<std::int64_t> ends;
  for (const auto& span : times(*trace, "r")) ends.push_back(span.second);
  std::sort(ends.begin(), ends.end());
  CHECK(ends == std::vector<std::int64_t>{230, 230, 260, 260});
  // On two devices of two cores nobody waits: all meet at 100, together, as no core does a network's work.
  for (const auto& span : times(*simulate(plan, cost, 1, 1, {}, shared_by(2)), "r"))
    CHECK(span == std::pair<std::int64_t, std::int64_t>{100, 130});
}

TEST_CASE("map and unmap are the host's: they hold its next calls up, unmap when all is done") {
  // m: 50 on the host, then k is issued and runs [50, 60). unmap waits for k: [60, 90), then l [90, 95).
  Plan plan = plan_of({{mapping(OpKind::map, sections::transient, 0, 4096, "m"), kernel("k"),
                        mapping(OpKind::unmap, sections::transient, 0, 4096, "u"), kernel("l")}});
  const Threads cost({{"m", 50}, {"k", 10}, {"u", 30}, {"l", 5}}, {.cores = 2});
  const auto trace = simulate(plan, cost);
  REQUIRE(trace);
  CHECK(times(*trace, "m") == Times{{0, 50}});
  CHECK(times(*trace, "k") == Times{{50, 60}});
  CHECK(times(*trace, "u") == Times{{60, 90}});
  CHECK(times(*trace, "l") == Times{{90, 95}});
}

TEST_CASE("a phase lasts until its rank's host has a core again") {
  // Two ranks on one core. Phase one: kernels of 100, one after the other; both ranks' hosts then enter phase two at a
  // call of 10 each. Rank 0's kernel is done at 100 + its calls; its host waits for rank 1's kernel all the same.
  Plan plan = plan_of({"one", "two"}, {{{kernel("a")}, {kernel("b")}}, {{kernel("a")}, {kernel("b")}}});
  const Threads cost({{"a", 100}, {"b", 100}}, {.cores = 1, .call_ns = 10});
  const auto trace = simulate(plan, cost, 1, 1, {}, shared_by(2));
  REQUIRE(trace);
  const auto end_of_one = [&](Rank r) {
    for (const PhaseSpan& p : trace->phases)
      if (p.rank == r && p.phase == 0) return p.end_ns;
    return std::int64_t{-1};
  };
  CHECK(times(*trace, "a").at(0).second < times(*trace, "a").at(1).second);
  CHECK(end_of_one(0) >= times(*trace, "a").at(1).second);
}

TEST_CASE("what a rank's first op of a size takes more is paid once per size and rank") {
  struct Cost final : OpCost {
    std::int64_t nanoseconds(const Plan&, Rank, const Op&, const Args&) const override { return 10; }
    FirstUse first_use(const Op& op, const Args&) const override { return {{op.name[0]}, 100}; }
  };
  Plan plan = plan_of({{kernel("a"), kernel("a2"), kernel("b")}, {kernel("a")}});
  const auto trace = simulate(plan, Cost{}, 2);
  REQUIRE(trace);
  CHECK(times(*trace, "a") == Times{{0, 110}, {230, 240}, {0, 110}, {110, 120}});
  CHECK(times(*trace, "a2") == Times{{110, 120}, {240, 250}});
  CHECK(times(*trace, "b") == Times{{120, 230}, {250, 260}});
}

TEST_CASE("threads: a trace does not depend on how far the walk is ahead, and is the same twice") {
  const std::vector<Op> ops = {kernel("a"), record(0, streams::compute), wait(0, streams::reduce), all_reduce("r", {8}),
                               kernel("c", streams::gather)};
  Plan plan = plan_of({ops, ops, ops, ops});
  const Threads cost({{"a", 31}, {"r", 11}, {"c", 17}}, {.cores = 2, .wake_ns = 5, .switch_ns = 2, .call_ns = 3});
  std::vector<Times> seen;
  for (const std::int64_t depth : {8, 8, 1 << 14}) {
    SimOptions options;
    options.queue_depth = depth;
    options.timeline.last_step = 9;
    const auto trace = simulate(plan, cost, 1, 9, options, shared_by(4));
    REQUIRE(trace);
    Times all;
    for (const Span& s : trace->spans) all.emplace_back(s.start_ns, s.end_ns);
    CHECK(all.size() == 4 * 9 * 3);
    seen.push_back(std::move(all));
  }
  CHECK(seen[0] == seen[1]);
  CHECK(seen[0] == seen[2]);
}
