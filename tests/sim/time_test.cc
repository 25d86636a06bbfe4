#include <catch2/catch.hpp>
#include <map>

#include "base/hash.h"
#include "tests/sim/toy.h"
#include "trace/trace_json.h"

using namespace hotbunk;
using namespace hotbunk::toy;

TEST_CASE("a gather overlaps with compute, and compute waits for what it needs") {
  // gather: g1 [0,30), g2 [30,60). compute: a [0,50) needs nothing; b needs g2: [60,70).
  Plan plan = plan_of({{all_gather("g1", {4}, {4}), all_gather("g2", {4}, {4}), record(0, streams::gather), kernel("a"),
                        wait(0, streams::compute), kernel("b")}});
  const Prices cost{{"g1", 30}, {"g2", 30}, {"a", 50}, {"b", 10}};
  const auto trace = simulate(plan, cost);
  REQUIRE(trace);
  CHECK(times(*trace, "g1") == Times{{0, 30}});
  CHECK(times(*trace, "g2") == Times{{30, 60}});
  CHECK(times(*trace, "a") == Times{{0, 50}});
  CHECK(times(*trace, "b") == Times{{60, 70}});
  REQUIRE(trace->phases.size() == 1);
  CHECK(trace->phases[0].end_ns == 70);
  CHECK(trace->phases[0].blocks == 1);
}

TEST_CASE("waits chain over three streams") {
  // a [0,10) -> d2h copy [10,15) -> h2d copy [15,22) -> c [22,23); b runs on compute meanwhile, [10,16).
  Plan plan = plan_of({{kernel("a"), record(0, streams::compute), wait(0, streams::d2h), kernel("out", streams::d2h),
                        record(1, streams::d2h), wait(1, streams::h2d), kernel("in", streams::h2d),
                        record(2, streams::h2d), kernel("b"), wait(2, streams::compute), kernel("c")}});
  const auto trace = simulate(plan, Prices{{"a", 10}, {"out", 5}, {"in", 7}, {"b", 6}, {"c", 1}});
  REQUIRE(trace);
  CHECK(times(*trace, "out") == Times{{10, 15}});
  CHECK(times(*trace, "in") == Times{{15, 22}});
  CHECK(times(*trace, "b") == Times{{10, 16}});
  CHECK(times(*trace, "c") == Times{{22, 23}});
}

TEST_CASE("a collective starts with its last participant and lasts as long as its slowest one says") {
  // Rank 1 comes at 40. The price is asked of both: 5 and 9 -> [40,49) on both.
  struct Uneven final : OpCost {
    std::int64_t nanoseconds(const Plan&, Rank r, const Op& o, const Args&) const override {
      if (o.kind == OpKind::all_reduce) return r == 0 ? 9 : 5;
      return o.name == "slow" ? 40 : 10;
    }
  };
  Plan plan = plan_of({{kernel("fast", streams::reduce), all_reduce("r", {8}), kernel("after", streams::reduce)},
                       {kernel("slow", streams::reduce), all_reduce("r", {8})}});
  const auto trace = simulate(plan, Uneven{});
  REQUIRE(trace);
  CHECK(times(*trace, "r") == Times{{40, 49}, {40, 49}});
  CHECK(times(*trace, "after") == Times{{49, 59}});
}

TEST_CASE("the same family on two streams meets apart") {
  // On rank 0 the gather comes first, on rank 1 the reduce: no deadlock, since the streams do not mix.
  Plan plan =
      plan_of({{all_gather("g", {4}, {8}), all_reduce("r", {8})}, {all_reduce("r", {8}), all_gather("g", {4}, {8})}});
  const auto trace = simulate(plan, Prices{{"g", 3}, {"r", 4}});
  REQUIRE(trace);
  CHECK(times(*trace, "g") == Times{{0, 3}, {0, 3}});
  CHECK(times(*trace, "r") == Times{{0, 4}, {0, 4}});
}

TEST_CASE("send and recv of a pair match in order; both take the slower side's time") {
  // Rank 0 sends x at 0 and y after it; rank 1 receives from 20 on: x [20,25), y [25,32).
  Plan plan = plan_of(
      {{transfer(OpKind::send, "x", {4}, 1), transfer(OpKind::send, "y", {6}, 1)},
       {kernel("busy", streams::control), transfer(OpKind::recv, "x", {4}, 0), transfer(OpKind::recv, "y", {6}, 0)}});
  const auto trace = simulate(plan, Prices{{"x", 5}, {"y", 7}, {"busy", 20}});
  REQUIRE(trace);
  CHECK(times(*trace, "x") == Times{{20, 25}, {20, 25}});
  CHECK(times(*trace, "y") == Times{{25, 32}, {25, 32}});
}

TEST_CASE("messages of one pair over two streams do not mix") {
  // Rank 0 sends x at 0 and y, on a stream of its own, at 3; rank 1 is ready for y before x: y [3,10), x [20,25).
  Plan plan = plan_of({{transfer(OpKind::send, "x", {4}, 1), kernel("late", streams::gather),
                        transfer(OpKind::send, "y", {6}, 1, streams::gather)},
                       {kernel("busy", streams::control), transfer(OpKind::recv, "x", {4}, 0),
                        transfer(OpKind::recv, "y", {6}, 0, streams::gather)}});
  const auto trace = simulate(plan, Prices{{"x", 5}, {"y", 7}, {"busy", 20}, {"late", 3}});
  REQUIRE(trace);
  CHECK(times(*trace, "x") == Times{{20, 25}, {20, 25}});
  CHECK(times(*trace, "y") == Times{{3, 10}, {3, 10}});
}

TEST_CASE("a ring of send_recvs: each half when both of its ends have come, the op when both of its halves are over") {
  // Ranks come at 0, 5, 20 and 0. Each half takes 10 from the later of its two ends:
  //   0 to 1 [5,15)   1 to 2 [20,30)   2 to 3 [20,30)   3 to 0 [0,10)
  // A rank's op is from the first of its halves to the end of the last.
  const Op x = exchange("x", {4}, {4}, 1, -1);
  Plan late = plan_of({{x}, {kernel("b", streams::control), x}, {kernel("c", streams::control), x}, {x}});
  const auto trace = simulate(late, Prices{{"x", 10}, {"b", 5}, {"c", 20}});
  REQUIRE(trace);
  CHECK(times(*trace, "x") == Times{{0, 15}, {5, 30}, {20, 30}, {0, 30}});
  // All at the same time, round after round, in rings of any size: one price a round. A ring of one copies.
  for (const std::size_t ranks : {1, 2, 3, 5}) {
    Plan plan = plan_of(std::vector<std::vector<Op>>(ranks, {x, x, x}));
    const auto rounds = simulate(plan, Prices{{"x", 10}});
    REQUIRE(rounds);
    Times expected;
    for (std::size_t r = 0; r < ranks; ++r) expected.insert(expected.end(), {{0, 10}, {10, 20}, {20, 30}});
    CHECK(times(*rounds, "x") == expected);
  }
}

TEST_CASE("the halves of a send_recv meet a send and a recv") {
  // Rank 0 sends to rank 1, which sends to rank 2, which receives from 20 on. 0 to 1: the slower side's 6, [0,6);
  // 1 to 2: 9, [20,29).
  Plan plan = plan_of({{transfer(OpKind::send, "first", {4}, 1)},
                       {exchange("middle", {7}, {4}, 2, 0, false)},
                       {kernel("busy", streams::control), transfer(OpKind::recv, "last", {7}, 1)}});
  const auto trace = simulate(plan, Prices{{"first", 4}, {"middle", 6}, {"last", 9}, {"busy", 20}});
  REQUIRE(trace);
  CHECK(times(*trace, "first") == Times{{0, 6}});
  CHECK(times(*trace, "middle") == Times{{0, 29}});
  CHECK(times(*trace, "last") == Times{{20, 29}});
}

TEST_CASE("ranks on one device share its compute; ranks on another do not") {
  // Ranks 0 and 1 on device 0, rank 2 alone on device 1. a: work 100, b: work 30, on one slot.
  // Both at half rate until b has had its 30 at t = 60; a has had 30 then, its last 70 run alone: done at 130.
  Plan plan = plan_of({{kernel("a")}, {kernel("b")}, {kernel("a")}});
  ClusterSpec cluster;
  cluster.ranks_per_device = 2;
  SimOptions options;
  options.device_slots = 1;
  const Prices cost{{"a", 100}, {"b", 30}};
  const auto trace = simulate(plan, cost, 1, 1, options, cluster);
  REQUIRE(trace);
  CHECK(times(*trace, "a") == Times{{0, 130}, {0, 100}});
  CHECK(times(*trace, "b") == Times{{0, 60}});
  // By default prices are those of a rank's share: as many ops as ranks run at their price.
  const auto shares = simulate(plan, cost, 1, 1, {}, cluster);
  CHECK(times(*shares, "a") == Times{{0, 100}, {0, 100}});
}

TEST_CASE("kernels on two streams of one rank share the device; copies share only their own direction") {
  Plan plan = plan_of({{kernel("a"), kernel("b", streams::gather), kernel("in", streams::h2d),
                        kernel("out", streams::d2h), kernel("h", streams::host)}});
  const auto trace = simulate(plan, Prices{{"a", 10}, {"b", 10}, {"in", 10}, {"out", 10}, {"h", 10}});
  REQUIRE(trace);
  CHECK(times(*trace, "a") == Times{{0, 20}});
  CHECK(times(*trace, "b") == Times{{0, 20}});
  for (const char* copy : {"in", "out", "h"}) CHECK(times(*trace, copy) == Times{{0, 10}});
}

TEST_CASE("a wait is for the record before it, not for the next run's") {
  // Each run: compute waits for the event of the *previous* run (none in the first), then the gather is recorded.
  // run 1: x [0,5) (no wait), g [0,20). run 2: x waits for g#1: [20,25), g [20,40). run 3: x [40,45).
  Plan plan =
      plan_of({{wait(0, streams::compute), kernel("x"), all_gather("g", {4}, {4}), record(0, streams::gather)}});
  const auto trace = simulate(plan, Prices{{"x", 5}, {"g", 20}}, 3);
  REQUIRE(trace);
  CHECK(times(*trace, "x") == Times{{0, 5}, {20, 25}, {40, 45}});
  CHECK(trace->phases[0].blocks == 3);
}

TEST_CASE("an event recorded twice before it fires: the wait is for the second") {
  Plan plan = plan_of({{kernel("a"), record(0, streams::compute), kernel("b"), record(0, streams::compute),
                        wait(0, streams::h2d), kernel("c", streams::h2d)}});
  const auto trace = simulate(plan, Prices{{"a", 10}, {"b", 10}, {"c", 1}});
  REQUIRE(trace);
  CHECK(times(*trace, "c") == Times{{20, 21}});
}

TEST_CASE("phases follow each other on a rank; waiting belongs to the phase that waits") {
  // Phase one: rank 0 10, rank 1 30. Phase two meets: [30,34) on both; rank 0's stay in it began at 10.
  Plan plan =
      plan_of({"one", "two"}, {{{kernel("a")}, {all_reduce("r", {8})}}, {{kernel("b")}, {all_reduce("r", {8})}}});
  const auto trace = simulate(plan, Prices{{"a", 10}, {"b", 30}, {"r", 4}}, 1, 2);
  REQUIRE(trace);
  std::vector<std::array<std::int64_t, 5>> seen;
  for (const PhaseSpan& p : trace->phases) seen.push_back({p.rank, p.step, p.phase, p.start_ns, p.end_ns});
  CHECK(seen == std::vector<std::array<std::int64_t, 5>>{{0, 1, 0, 0, 10},
                                                         {0, 1, 1, 10, 34},
                                                         {0, 2, 0, 34, 44},
                                                         {0, 2, 1, 44, 68},
                                                         {1, 1, 0, 0, 30},
                                                         {1, 1, 1, 30, 34},
                                                         {1, 2, 0, 34, 64},
                                                         {1, 2, 1, 64, 68}});
}

TEST_CASE("what follows a sync starts when all streams are done") {
  Plan plan = plan_of({"one", "two"}, {{{kernel("a"), kernel("in", streams::h2d)}, {kernel("b")}}});
  const auto trace = simulate(plan, Prices{{"a", 10}, {"in", 25}, {"b", 1}});
  REQUIRE(trace);
  CHECK(times(*trace, "b") == Times{{25, 26}});
}

TEST_CASE("what an op costs follows every extent: as the driver says, else the capacity") {
  struct Rows final : OpCost {
    std::int64_t nanoseconds(const Plan&, Rank, const Op& op, const Args& args) const override {
      return op.outputs[0].elements(args.sizes);
    }
  };
  struct Rising final : Fixed {
    std::optional<Args> next(Rank r, std::int32_t step, std::int16_t phase) override {
      auto args = Fixed::next(r, step, phase);
      if (args && step < 3) args->sizes[ExtentId{2}] = 2 * step;
      return args;
    }
  };
  Op clear = op(OpKind::zero, streams::compute, "clear");
  clear.outputs = {tensor(0, {8, ExtentId{2}})};
  Plan plan = plan_of({{clear}});
  plan.phases[0].driven = true;
  plan.extents.push_back({"routed", 8});
  const Rows cost;
  SimBackend backend(one_rank_per_device(), cost, SimOptions{.timeline = {.last_step = 3}});
  Rising driver;
  const auto trace = execute(plan, backend, driver, {.steps = 3, .local_ranks = {0}});
  REQUIRE(trace);
  CHECK(times(*trace, "clear") == Times{{0, 2}, {2, 6}, {6, 14}});
}

TEST_CASE("spans carry bytes, FLOPs and step; only the steps asked for") {
  Op linear = op(OpKind::linear, streams::compute, "mm");
  Tensor x = tensor(0, {8, tokens_extent}), w = tensor(0, {4}), y = x;
  x.rank = w.rank = y.rank = 2;
  x.shape[1] = {16};
  w.shape[1] = {16};
  y.shape[1] = {4};
  linear.inputs = {x, w};
  linear.outputs = {y};
  Plan plan = plan_of({{linear}});
  Sizes sizes;
  sizes.tokens = 3;
  SimOptions options;
  options.timeline.first_step = 2;
  options.timeline.last_step = 3;
  const auto trace = simulate(plan, Prices{{"mm", 7}}, 1, 4, options, {}, sizes);
  REQUIRE(trace);
  REQUIRE(trace->spans.size() == 2);
  CHECK(trace->spans[0].step == 2);
  CHECK(trace->spans[0].start_ns == 7);
  CHECK(trace->spans[0].flops == 2.0 * 3 * 16 * 4);
  CHECK(trace->spans[0].bytes == 4 * (3 * 16 + 4 * 16 + 3 * 4));
}

TEST_CASE("what a stay has no room for is kept together, and nothing is left out") {
  // 400 runs of 3 kernels of 7 ns, on one stream, in the one driven phase: room for 256 spans, so 85 runs one by one.
  // Then a span for each run, each taken for 2, until those are 512: 129 runs. The other 186 are one.
  const auto buffer = [](OpKind kind) { return memory(kind, 0, "buffer"); };
  Plan plan = plan_of({{buffer(OpKind::alloc), kernel("a"), kernel("b"), kernel("c"), buffer(OpKind::free)}});
  plan.programs[0].buffers = {{"buffer", DType::f32, 16, Category::workspace, sections::train_params, 0}};
  plan.programs[0].section(sections::train_params).bytes = 4096;
  plan.phases.insert(plan.phases.begin(), {"map", When::prologue, false});
  plan.programs[0].phases.insert(
      plan.programs[0].phases.begin(),
      {test::block_of(plan.programs[0], "map", {mapping(OpKind::map, sections::train_params, 0, 4096)})});
  for (const Granularity granularity : {Granularity::ops, Granularity::calls}) {
    SimOptions options;
    options.timeline.room = 1;
    options.granularity = granularity;
    const Prices seven_each{{"a", 7}, {"b", 7}, {"c", 7}};
    SimBackend backend(one_rank_per_device(), seven_each, options);
    plan.phases[1].driven = true;
    Fixed driver;
    driver.runs = 400;
    const auto trace = execute(plan, backend, driver, {.steps = 1, .local_ranks = {0}});
    REQUIRE(trace);
    const bool by_op = granularity == Granularity::ops;
    const std::size_t one_by_one = by_op ? 85 * 3 : 256, runs = by_op ? 129 : 128;
    REQUIRE(trace->spans.size() == one_by_one + runs + 1);
    std::int64_t spans_ns = 0, live = 0, highest = 0;
    for (const Span& s : trace->spans) spans_ns += s.end_ns - s.start_ns;
    CHECK(spans_ns == 400 * 3 * 7);
    CHECK(trace->names[static_cast<std::size_t>(trace->spans.back().name)] == "work: further blocks");
    for (const MemoryEvent& e : trace->memory_events) live += e.delta_bytes, highest = std::max(highest, live);
    CHECK(live == 0);
    CHECK(highest == 64);
    CHECK(trace->memory[0].device.peak_bytes == 64);
  }
}

TEST_CASE("driven phases of a step divide its room, the last of them too") {
  Plan plan = plan_of({{kernel("a"), kernel("b"), kernel("c")}});
  plan.phases[0].driven = true;
  const std::vector<Block> blocks = plan.programs[0].phases[0];
  for (int more = 1; more < 6; ++more) {
    plan.phases.push_back(plan.phases[0]);
    plan.phases.back().name = fmt::format("phase {}", more);
    plan.programs[0].phases.push_back(blocks);
  }
  SimOptions options;
  options.timeline.room = 4096;  // spans of the two steps that are kept: 2,048 each, and six stays of 3,000 ops
  const Prices seven_each{{"a", 7}, {"b", 7}, {"c", 7}};
  SimBackend backend(one_rank_per_device(), seven_each, options);
  Fixed driver;
  driver.runs = 1000;
  const auto trace = execute(plan, backend, driver, {.steps = 1, .local_ranks = {0}});
  REQUIRE(trace);
  std::map<std::int16_t, std::int64_t> of_phase, took;
  for (const Span& s : trace->spans) ++of_phase[s.phase], took[s.phase] += s.end_ns - s.start_ns;
  CHECK(std::ssize(trace->spans) <= 2048 + 6);  // what is kept together at a stay's end comes on top
  REQUIRE(of_phase.size() == 6);
  for (const auto& [phase, spans] : of_phase) {
    CAPTURE(phase);
    CHECK(spans > 2048 / 6 / 2);
    CHECK(took[phase] == 1000 * 3 * 7);
  }
}

TEST_CASE("a long run is simulated in little memory, and its times do not depend on how far it is ahead") {
  // 30,000 runs of 4 calls on 2 ranks: 240,000 calls. Held at most: what came since the last advance, and per rank the
  // queue's depth and as much again by which the slower rank may be behind the other.
  Plan plan = plan_of({{kernel("a"), record(0, streams::compute), wait(0, streams::reduce), all_reduce("r", {8})},
                       {kernel("b"), record(0, streams::compute), wait(0, streams::reduce), all_reduce("r", {8})}});
  plan.phases[0].driven = true;
  const Prices cost{{"a", 3}, {"b", 4}, {"r", 2}};
  std::vector<std::int64_t> ends;
  for (std::int64_t depth : {64, 1 << 14}) {
    SimOptions options;
    options.queue_depth = depth;
    SimBackend backend({}, cost, options);
    Fixed driver;
    driver.runs = 30'000;
    const auto trace = execute(plan, backend, driver, {1, {0, 1}});
    REQUIRE(trace);
    ends.push_back(trace->phases[0].end_ns);
    CHECK(backend.engine().num_done() == 240'000);
    CHECK(backend.engine().peak_entries() <= 2 * 2 * depth + (1 << 14) + 8);
  }
  // Rank 1 needs 4 per run, its all-reduces keep up: the last starts at 120,000.
  CHECK(ends == std::vector<std::int64_t>{120'002, 120'002});
}

TEST_CASE("two simulations give the same trace, bit for bit") {
  Plan plan = plan_of({{kernel("a"), kernel("c", streams::gather), all_reduce("r", {8})},
                       {kernel("b"), all_reduce("r", {8}), kernel("in", streams::h2d)}});
  ClusterSpec cluster;
  cluster.ranks_per_device = 2;
  SimOptions options;
  options.device_slots = 1;
  const Prices cost{{"a", 101}, {"b", 37}, {"c", 53}, {"r", 11}, {"in", 5}};
  const auto text = [&](const OpCost& prices) {
    const auto trace = simulate(plan, prices, 5, 2, options, cluster);
    return hash_text(trace_to_json(*trace, "plan"));
  };
  CHECK(text(cost) == text(cost));
  CHECK(text(cost) != text(Prices{{"a", 102}, {"b", 37}, {"c", 53}, {"r", 11}, {"in", 5}}));
}
