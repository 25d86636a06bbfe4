#include <catch2/catch.hpp>

#include "tests/moves.h"
#include "tests/sim/toy.h"
#include "trace/traffic_rules.h"

using namespace hotbunk;
using namespace hotbunk::toy;

namespace {

Buffer buffer(std::string name, std::int64_t bytes, Category category, SectionId section, std::int64_t offset) {
  return {std::move(name), DType::u8, bytes, category, section, offset};
}

}  // namespace

TEST_CASE("memory events come in program order, with the time at which their stream reached them") {
  Plan plan = plan_of({{mapping(OpKind::map, sections::transient, 0, 4096), memory(OpKind::alloc, 0, "x"), kernel("a"),
                        memory(OpKind::free, 0, "x"), mapping(OpKind::unmap, sections::transient, 0, 4096)}});
  plan.programs[0].buffers = {buffer("x", 64, Category::activations, sections::transient, 0)};
  SimOptions options;
  options.timeline.last_step = 1;  // of two
  const auto trace = simulate(plan, Prices{{"a", 10}}, 1, 2, options);
  REQUIRE(trace);
  REQUIRE(trace->memory_events.size() == 2);
  CHECK(trace->memory_events[0].time_ns == 0);
  CHECK(trace->memory_events[0].delta_bytes == 64);
  CHECK(trace->memory_events[1].time_ns == 10);
  CHECK(trace->memory_events[1].delta_bytes == -64);
  CHECK(trace->names[static_cast<std::size_t>(trace->memory_events[0].name)] == "x");
}

TEST_CASE("traffic rules, each kind by hand") {
  const auto count = [](const Op& o, std::int64_t ranks, std::int64_t index) {
    Op of_group = o;
    of_group.group = 0;
    return traffic_of(of_group, {}, ranks, {static_cast<std::int32_t>(index)});
  };
  Op o = op(OpKind::reduce_scatter, streams::reduce, "rs");
  o.inputs = {tensor(0, {12})};
  o.outputs = {tensor(0, {3})};
  CHECK(count(o, 4, 2) == TrafficCount{1, 48, 0, 36});  // three parts of four, 12 B each

  // 10 fp32 over 4 ranks: chunks of 3, 3, 3, 1. Rank 0 sends 40 + 2 * 12 = 64, the last one 40 + 2 * 4 = 48.
  Op r = all_reduce("r", {10});
  CHECK(count(r, 4, 0) == TrafficCount{1, 40, 0, 64});
  CHECK(count(r, 4, 3) == TrafficCount{1, 40, 0, 48});
  CHECK(count(r, 1, 0) == TrafficCount{1, 40, 0, 0});
  CHECK(count(all_reduce("r", {8}), 4, 1) == TrafficCount{1, 32, 0, 48});  // 2 * 3/4 * 32

  Op b = all_reduce("b", {10});
  b.kind = OpKind::broadcast;
  b.attrs = {{Attr::src_rank, std::int64_t{1}}};  // chain 1, 2, 0: rank 0 passes nothing on
  CHECK(count(b, 3, 0) == TrafficCount{1, 40, 0, 0});
  CHECK(count(b, 3, 1) == TrafficCount{1, 40, 0, 40});
  CHECK(count(b, 3, 2) == TrafficCount{1, 40, 0, 40});

  CHECK(count(transfer(OpKind::send, "s", {5}, 1), 2, 0) == TrafficCount{1, 20, 0, 20});
  CHECK(count(transfer(OpKind::recv, "s", {5}, 0), 2, 1) == TrafficCount{1, 0, 0, 0});
  CHECK(count(exchange("x", {5}, {7}, 1, -1), 3, 2) == TrafficCount{1, 20, 0, 20});  // what comes is others' to count
  CHECK(count(exchange("x", {5}, {5}, 1, -1), 1, 0) == TrafficCount{1, 20, 0, 0});   // to itself: over no wire
  Op barrier = op(OpKind::barrier, streams::control, "b");
  CHECK(count(barrier, 4, 0) == TrafficCount{1, 0, 0, 0});

  // Reads 2x3 of rank 1 and 1x4 of itself, bf16: 12 B from others.
  Op p = op(OpKind::peer_copy, streams::control, "p");
  p.inputs = {tensor(0, {100}, DType::bf16)};
  p.outputs = {tensor(1, {100})};
  Box other, own;
  other.rows = 2, other.cols = 3, other.peer = 1;
  own.rows = 1, own.cols = 4, own.peer = 0;
  p.moves = test::moves_of({other, own});
  CHECK(count(p, 2, 0) == TrafficCount{1, 12, 0, 0});
}
