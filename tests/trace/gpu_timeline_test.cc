// How trainer and engine take turns: a small plan walked by hand.
#include "trace/gpu_timeline.h"

#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include "tests/blocks.h"
#include "trace/static_memory.h"

using namespace hotbunk;

namespace {

Op memory_op(OpKind kind, BufferId buffer) {
  Op o;
  o.kind = kind;
  o.buffer = buffer;
  return o;
}
Op mapping(OpKind kind, SectionId section, std::int64_t bytes) {
  Op o;
  o.kind = kind;
  o.section = section, o.map_end = bytes;
  return o;
}
Block moving(Program& program, const char* name, const std::vector<Op>& ops, Enters enters, SectionId section) {
  Block block = test::block_of(program, name, ops);
  block.enters = enters, block.section = section;
  return block;
}

/// Training's 400 B of parameters sleep, the engine's 200 B of weights and 100 B of KV cache wake, all goes back. The
/// update stages 64 B.
Plan plan_of_turns() {
  Plan plan = test::empty_plan();
  plan.phases = {{"load", When::prologue, false},           {"sleep_train", When::iteration, false},
                 {"wake_rollout", When::iteration, false},  {"sync", When::iteration, false},
                 {"sleep_rollout", When::iteration, false}, {"wake_train", When::iteration, false}};
  Program p = test::empty_program();
  p.buffers = {{"params", DType::f32, 100, Category::params, sections::train_params, 0},
               {"weights", DType::f32, 50, Category::params, sections::rollout_weights, 0},
               {"kv", DType::f32, 25, Category::kv_cache, sections::kv_cache, 0},
               {"host.params", DType::f32, 100, Category::params, sections::host_params, 0},
               {"bucket.0", DType::f32, 8, Category::communication, sections::transient, 0},
               {"bucket.1", DType::f32, 8, Category::communication, sections::transient, 64}};
  using enum OpKind;
  const auto map_train = mapping(map, sections::train_params, 4096),
             unmap_train = mapping(unmap, sections::train_params, 4096);
  p.phases.resize(6);
  p.phases[0] = {test::block_of(p, "load", {map_train, memory_op(alloc, 0)})};
  p.phases[1] = {moving(p, "params", {memory_op(alloc, 3), memory_op(free, 0), unmap_train}, Enters::asleep,
                        sections::train_params)};
  p.phases[2] = {moving(p, "weights", {mapping(map, sections::rollout_weights, 4096), memory_op(alloc, 1)},
                        Enters::awake, sections::rollout_weights),
                 moving(p, "kv", {mapping(map, sections::kv_cache, 4096), memory_op(alloc, 2)}, Enters::awake,
                        sections::kv_cache)};
  p.phases[3] = {
      test::block_of(p, "sync", {memory_op(alloc, 4), memory_op(alloc, 5), memory_op(free, 4), memory_op(free, 5)})};
  p.phases[4] = {moving(p, "kv", {memory_op(free, 2), mapping(unmap, sections::kv_cache, 4096)}, Enters::asleep,
                        sections::kv_cache),
                 moving(p, "weights", {memory_op(free, 1), mapping(unmap, sections::rollout_weights, 4096)},
                        Enters::asleep, sections::rollout_weights)};
  p.phases[5] = {
      moving(p, "params", {map_train, memory_op(alloc, 0), memory_op(free, 3)}, Enters::awake, sections::train_params)};
  plan.programs = {p};
  plan.program_of_rank = {0};
  return plan;
}

/// Each phase 10 ns; in wake_rollout the weights are mapped until 3, the KV cache until 10.
Trace trace_of_turns() {
  Trace t;
  t.phases.push_back({0, 0, 0, 0, 10, 1});
  for (std::int16_t p = 1; p < 6; ++p) t.phases.push_back({0, 1, p, 10 * p, 10 * (p + 1), 1});
  t.names = {"map rollout_weights", "map kv_cache"};
  for (std::int32_t i : {0, 1}) {
    Span s;
    s.kind = OpKind::map, s.phase = 2, s.step = 1, s.name = i;
    s.start_ns = i == 0 ? 20 : 23, s.end_ns = i == 0 ? 23 : 30;
    t.spans.push_back(s);
  }
  return t;
}

}  // namespace

TEST_CASE("a GPU's timeline: each step, whose it is, and what both processes hold behind it") {
  const Plan plan = plan_of_turns();
  const GpuTimeline timeline = gpu_timeline(plan, trace_of_turns(), 0);
  struct Row {
    std::string phase, process, tag, action;
    std::int64_t trainer, engine, peak, mapped, host, ns;
  };
  const std::vector<Row> expected = {{"sleep_train", "trainer", "parameters", "dropped", 0, 0, 400, 0, 400, 10},
                                     {"wake_rollout", "engine", "weights", "mapped empty", 0, 200, 200, 4096, 400, 3},
                                     {"wake_rollout", "engine", "kv_cache", "mapped empty", 0, 300, 300, 8192, 400, 7},
                                     {"sync", "both", "sync", "works", 0, 300, 364, 8192, 400, 10},
                                     {"sleep_rollout", "engine", "kv_cache", "dropped", 0, 200, 300, 4096, 400, 0},
                                     {"sleep_rollout", "engine", "weights", "dropped", 0, 0, 200, 0, 400, 10},
                                     {"wake_train", "trainer", "parameters", "mapped empty", 400, 0, 400, 4096, 0, 10}};
  REQUIRE(timeline.steps.size() == expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const TimelineStep& step = timeline.steps[i];
    INFO(i);
    CHECK(plan.phases[static_cast<std::size_t>(step.phase)].name == expected[i].phase);
    CHECK(name_of(step.process) == expected[i].process);
    CHECK(step.tag == expected[i].tag);
    CHECK(step.action == expected[i].action);
    CHECK(step.device == HeldBytes{expected[i].trainer, expected[i].engine, 0});
    CHECK(step.peak_device_bytes == expected[i].peak);
    CHECK(step.mapped_device_bytes == expected[i].mapped);
    CHECK(step.host.trainer == expected[i].host);
    CHECK(step.duration_ns == expected[i].ns);
  }
  // The steps' peaks are the phases', as every interpreter counts them.
  const RankMemory memory = static_memory(plan, 0);
  CHECK(memory.device.phase_peaks.at(3).peak_bytes == 364);
}

TEST_CASE("tensors that are alive at a phase's peak add up to it; those that differ in a number are one") {
  const auto tensors = live_tensors_at_peak(plan_of_turns(), 0, 3);
  REQUIRE(tensors.size() == 3);
  CHECK(tensors[0].name == "weights");
  CHECK(tensors[0].bytes == 200);
  CHECK(tensors[1].name == "kv");
  CHECK(tensors[2].name == "bucket.*");
  CHECK(tensors[2].buffers == 2);
  std::int64_t sum = 0;
  for (const LiveTensors& t : tensors) sum += t.bytes;
  CHECK(sum == static_memory(plan_of_turns(), 0).device.phase_peaks.at(3).peak_bytes);
}
