#include <catch2/catch.hpp>

#include "tests/moves.h"
#include "tests/sim/toy.h"
#include "trace/traffic_rules.h"

using namespace hotbunk;
using namespace hotbunk::toy;

namespace {

Buffer buffer(std::string name, std::int64_t bytes, Category category, Section section, std::int64_t offset) {
  return {std::move(name), DType::u8, bytes, category, section, offset};
}

}  // namespace

TEST_CASE("memory: peaks by category, by phase, over steps, on both sides; mapped in chunks") {
  // Sizes in bytes. Phase one: params 1000 stay; phase two: activations 3000 and workspace 500 come and go, one after
  // the other; on the host 100 stays from phase two of step 1 on.
  const auto map = [](Section s, std::int64_t end) { return mapping(OpKind::map, s, 0, end); };
  const auto unmap = [](Section s, std::int64_t end) { return mapping(OpKind::unmap, s, 0, end); };
  Plan plan = plan_of({"load", "train"},
                      {{{map(Section::train_params, 4096), memory(OpKind::alloc, 0, "p")},
                        {map(Section::transient, 8192), memory(OpKind::alloc, 1, "a"), memory(OpKind::free, 1, "a"),
                         memory(OpKind::alloc, 2, "w"), memory(OpKind::free, 2, "w"), unmap(Section::transient, 8192),
                         map(Section::host_params, 4096), memory(OpKind::alloc, 3, "h"), memory(OpKind::free, 3, "h"),
                         unmap(Section::host_params, 4096)}}});
  plan.phases[0].when = When::prologue;
  plan.programs[0].buffers = {buffer("p", 1000, Category::params, Section::train_params, 0),
                              buffer("a", 3000, Category::activations, Section::transient, 0),
                              buffer("w", 500, Category::workspace, Section::transient, 0),
                              buffer("h", 100, Category::optimizer, Section::host_params, 64)};
  const auto trace = simulate(plan, Prices{}, 1, 3);
  REQUIRE(trace);
  REQUIRE(trace->memory.size() == 1);
  const SpaceMemory& device = trace->memory[0].device;
  CHECK(device.peak_bytes == 4000);
  CHECK(device.mapped_peak_bytes == 4096 + 8192);
  CHECK(device.peak_step == 1);
  CHECK(device.peak_phase == 1);
  CategoryBytes at_peak{};
  at_peak[static_cast<std::size_t>(Category::params)] = 1000;
  at_peak[static_cast<std::size_t>(Category::activations)] = 3000;
  CHECK(device.at_peak == at_peak);
  CategoryBytes peaks = at_peak;
  peaks[static_cast<std::size_t>(Category::workspace)] = 500;
  CHECK(device.category_peaks == peaks);
  REQUIRE(device.phase_peaks.size() == 2);
  CHECK(device.phase_peaks.at(0).peak_bytes == 1000);
  CHECK(device.phase_peaks.at(0).mapped_peak_bytes == 4096);
  CHECK(device.phase_peaks.at(1).peak_bytes == 4000);
  CHECK(device.phase_peaks.at(1).by_category == at_peak);
  CHECK(device.end_live_bytes == 1000);
  CHECK(device.end_mapped_bytes == 4096);
  const SpaceMemory& host = trace->memory[0].host;
  CHECK(host.peak_bytes == 100);
  CHECK(host.mapped_peak_bytes == 4096);
  CHECK(host.end_live_bytes == 0);
}

TEST_CASE("memory events come in program order, with the time at which their stream reached them") {
  Plan plan = plan_of({{mapping(OpKind::map, Section::transient, 0, 4096), memory(OpKind::alloc, 0, "x"), kernel("a"),
                        memory(OpKind::free, 0, "x"), mapping(OpKind::unmap, Section::transient, 0, 4096)}});
  plan.programs[0].buffers = {buffer("x", 64, Category::activations, Section::transient, 0)};
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

TEST_CASE("traffic: calls, payload, padding and wire by step, phase, family and kind") {
  // Gather of 12 fp32 over 2 ranks, 2 of them padding: 48 B, 40 payload, 8 padding, 24 on the wire.
  // All-reduce of as many fp32 as tokens, 6 and 6: 24 B each, 24 on the wire (2 * 1/2 * 24).
  Op gather = all_gather("g", {6}, {12});
  gather.attrs = {{Attr::padding_bytes, std::int64_t{8}}};
  const std::vector<Op> ops = {gather, all_reduce("r", {100, Sym::tokens})};
  Plan plan = plan_of({"train", "idle"}, {{ops, {}}, {ops, {}}});
  Sizes sizes;
  sizes.tokens = 6;
  const auto trace = simulate(plan, Prices{}, 3, 2, {}, {}, sizes);
  REQUIRE(trace);
  REQUIRE(trace->traffic.size() == 2);
  CHECK(trace->traffic[0] == trace->traffic[1]);
  const RankTraffic expected = {{{1, 0, 0, OpKind::all_gather}, {3, 120, 24, 72}},
                                {{1, 0, 0, OpKind::all_reduce}, {3, 72, 0, 72}},
                                {{2, 0, 0, OpKind::all_gather}, {3, 120, 24, 72}},
                                {{2, 0, 0, OpKind::all_reduce}, {3, 72, 0, 72}}};
  CHECK(trace->traffic[0] == expected);
}

TEST_CASE("traffic rules, each kind by hand") {
  const auto count = [](const Op& o, std::int64_t ranks, std::int64_t index) {
    Op of_group = o;
    of_group.group = 0;
    return traffic_of(of_group, {}, ranks, {static_cast<std::int32_t>(index)});
  };
  Op o = op(OpKind::reduce_scatter, StreamId::reduce, "rs");
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
  Op barrier = op(OpKind::barrier, StreamId::control, "b");
  CHECK(count(barrier, 4, 0) == TrafficCount{1, 0, 0, 0});

  // Reads 2x3 of rank 1 and 1x4 of itself, bf16: 12 B from others.
  Op p = op(OpKind::peer_copy, StreamId::control, "p");
  p.inputs = {tensor(0, {100}, DType::bf16)};
  p.outputs = {tensor(1, {100})};
  Box other, own;
  other.rows = 2, other.cols = 3, other.peer = 1;
  own.rows = 1, own.cols = 4, own.peer = 0;
  p.moves = test::moves_of({other, own});
  CHECK(count(p, 2, 0) == TrafficCount{1, 12, 0, 0});
}
