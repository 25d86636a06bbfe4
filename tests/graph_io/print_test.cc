#include "graph/print.h"

#include <rapidcheck.h>

#include <catch2/catch.hpp>

#include "tests/blocks.h"
#include "tests/graph_io/random_plan.h"

namespace hotbunk {
namespace {

Plan printed_plan() {
  Plan p = test::empty_plan();
  p.scenario = "demo";
  p.device_capacity_bytes = std::int64_t{2} << 30;
  p.groups = {{"fsdp", {{0, 1, 2}, {3}}}};
  p.phases = {{"load", When::prologue, false}, {"train", When::iteration, true}};
  p.program_of_rank = {0, 0, 0, 0};
  Program program = test::empty_program();
  program.section(sections::transient).bytes = 8192;
  program.num_events = 1;
  program.buffers = {{"shard", DType::bf16, 512, Category::params, sections::train_params, 0},
                     {"x", DType::f32, 2048, Category::activations, sections::transient, 64}};
  Op alloc;
  alloc.buffer = 2;
  Op gather;
  gather.kind = OpKind::all_gather, gather.stream = streams::gather, gather.name = "all_gather", gather.group = 0;
  gather.inputs = {{0, 0, DType::bf16, 1, {Dim{512}}}};
  gather.outputs = {{1, 64, DType::bf16, 2, {Dim{16, tokens_extent}, Dim{64}}}};
  gather.attrs = {{Attr::padding_bytes, std::int64_t{8}}};
  Body body;
  body.name = "gather", body.num_ports = 2;
  body.locals = {{"y", DType::f32, 16, Category::communication, sections::transient, 0}};
  body.ops = {alloc, gather};
  Call call;
  call.body = 1, call.name = "layers.0.", call.ports = {{0, 0}, {1, 128}}, call.locals = {64};
  call.marks = {{1, OpKind::wait, streams::gather, 0}, {2, OpKind::record, streams::gather, 0}};
  Op map;
  map.kind = OpKind::map, map.map_end = 4096;
  Body mapping;
  mapping.ops = {map};
  program.bodies = {mapping, body};
  Block load, begin, micro;
  load.calls.emplace_back();
  begin.name = "begin", micro.name = "micro", micro.calls = {call, call};
  micro.calls[1].name = "layers.1.", micro.calls[1].ports[1].offset_bytes = 0, micro.calls[1].marks.clear();
  program.phases = {{load}, {begin, micro}};
  p.programs = {program};
  return p;
}

}  // namespace

TEST_CASE("a plan as text") {
  const Plan plan = printed_plan();
  CHECK(print_plan(plan) == "plan " + plan_hash(plan) + R"(
  scenario demo: 4 ranks, 1 program
  per rank: device 2.00 GiB, host unlimited, overhead 0 B, chunks of 4.0 KiB
  group fsdp: [0-2] [3]
program 0 (ranks 0-3): 2 buffers, 2 bodies, 1 events
    section transient             8.0 KiB  device
  body -: 0 ports, 1 op, 1 call
      compute  map                  transient [0, 4096)
  body gather: 2 ports, 1 local, 2 ops, 2 calls
      compute  alloc                y  64 B communication
      gather   all_gather         all_gather  over fsdp  port0 bf16[512] -> port1+64 bf16[tokens<=16, 64]  padding_bytes=8
  phase load (prologue)
    block -: 1 call, 1 ops
      -  -
  phase train (iteration, driven)
    block begin: 0 calls, 0 ops
    block micro: 2 calls, 4 ops
      gather  layers.0.  (shard, x+128)  locals at 64  |  1 gather waits 0  2 gather records 0
      gather  layers.1.  (shard, x)  locals at 64
)");
  const std::string filtered = print_plan(plan, {.phase = "train", .ops = false, .buffers = true});
  CHECK(filtered.find("phase load") == std::string::npos);
  CHECK(filtered.find("all_gather") == std::string::npos);
  CHECK(filtered.find("block micro: 2 calls, 4 ops") != std::string::npos);
  CHECK(
      filtered.find("    buffer shard                                         1.0 KiB  params        train_params+0") !=
      std::string::npos);
}

TEST_CASE("what changed between two plans") {
  const Plan a = printed_plan();
  CHECK(diff_plans(a, a).empty());
  Plan b = a;
  b.device_capacity_bytes = 5;
  b.programs[0].buffers[1].elements = 1024;
  b.programs[0].buffers.push_back({"y", DType::f32, 1, Category::grads, sections::transient, 0});
  b.programs[0].bodies[1].ops[1].attrs[0].second = std::int64_t{16};
  auto& calls = b.programs[0].phases[1][1].calls;
  calls[0].ports[1].offset_bytes = 0;
  calls.pop_back();
  CHECK(diff_plans(a, b) == R"(~ device_capacity_bytes: 2147483648 -> 5
~ program 0: buffer x: 8.0 KiB fp32 activations at transient+64 -> 4.0 KiB fp32 activations at transient+64
+ program 0: buffer y: 4 B fp32 grads at transient+0
- program 0: body gather: gather   all_gather         all_gather  over fsdp  port0 bf16[512] -> port1+64 bf16[tokens<=16, 64]  padding_bytes=8
+ program 0: body gather: gather   all_gather         all_gather  over fsdp  port0 bf16[512] -> port1+64 bf16[tokens<=16, 64]  padding_bytes=16
- program 0: train[1] gather  layers.0.  (shard, x+128)  |  1 gather waits  2 gather records
+ program 0: train[1] gather  layers.0.  (shard, x)  |  1 gather waits  2 gather records
- program 0: train[1] gather  layers.1.  (shard, x)
)");
}

TEST_CASE("locals elsewhere and other events are one line") {
  const Plan a = printed_plan();
  Plan b = a;
  for (Call& call : b.programs[0].phases[1][1].calls) call.locals[0] += 64;
  CHECK(diff_plans(a, b) == "~ program 0: train[1] 2 calls with locals elsewhere, or other events\n");
}

TEST_CASE("order alone is a change") {
  const Plan a = printed_plan();
  Plan b = a;
  std::swap(b.programs[0].phases[1][1].calls[0], b.programs[0].phases[1][1].calls[1]);
  CHECK(diff_plans(a, b) == "~ program 0: train[1] order of calls from number 0: 'layers.0.' -> 'layers.1.'\n");
  Plan in_body = a;
  std::swap(in_body.programs[0].bodies[1].ops[0], in_body.programs[0].bodies[1].ops[1]);
  CHECK(diff_plans(a, in_body) ==
        "~ program 0: body gather: order of ops from number 0: alloc '' -> all_gather 'all_gather'\n");
  Plan c = a;
  std::swap(c.phases[0], c.phases[1]);
  std::swap(c.programs[0].phases[0], c.programs[0].phases[1]);
  CHECK(diff_plans(a, c) == "~ order of phases\n");
}

TEST_CASE("a phase of every third iteration is another plan, and says so") {
  const Plan a = printed_plan();
  Plan b = a;
  b.phases[1].every = 3;
  CHECK(plan_hash(a) != plan_hash(b));
  CHECK(diff_plans(a, b) == "~ phase train: when it runs, who drives it or who plays it\n");
  CHECK(print_plan(b).find("  phase train (every 3 iterations, driven)\n") != std::string::npos);
}

TEST_CASE("who plays what is printed, and part of the plan") {
  const Plan a = printed_plan();
  Plan b = a;
  b.roles = {"trainer", "engines"};
  b.phases[1].players = {{0, 0}, {1, 1}};
  CHECK(plan_hash(a) != plan_hash(b));
  CHECK(diff_plans(a, b) ==
        "~ roles: job -> trainer, engines\n~ phase train: when it runs, who drives it or who plays it\n");
  const std::string printed = print_plan(b);
  CHECK_THAT(printed, Catch::Contains("program 0 (trainer, ranks 0-3): "));
  CHECK_THAT(printed, Catch::Contains("  phase train (iteration, driven; trainer, engines 1 iteration back)\n"));
  Plan c = b;
  c.programs[0].role = 1;
  CHECK(plan_hash(b) != plan_hash(c));
  CHECK(diff_plans(b, c) == "~ program 0: role: 0 -> 1\n");
  CHECK_THAT(print_plan(c), Catch::Contains("  phase load (prologue; trainer)\n"));  // it has blocks all the same
  c.programs[0].phases[0].clear();
  CHECK(print_plan(c).find("  phase load") == std::string::npos);
}

TEST_CASE("extents beyond tokens and sequences are printed, and part of the plan") {
  const Plan a = printed_plan();
  Plan b = a;
  b.extents.push_back({"routed", 8, CountedBy::device});
  b.programs[0].bodies[1].ops[1].outputs[0].shape[0].extent = ExtentId{2};
  const std::string printed = print_plan(b);
  CHECK_THAT(printed, Catch::Contains("  extent routed: at most 8, counted by the device\n  group fsdp: "));
  CHECK_THAT(printed, Catch::Contains("-> port1+64 bf16[routed<=16, 64]"));
  CHECK_THAT(diff_plans(a, b), Catch::StartsWith("~ extents: tokens (counted by the driver), seqs (counted by the "
                                                 "driver) -> tokens (counted by the driver), seqs (counted by the "
                                                 "driver), routed (at most 8, counted by the device)\n- program 0: "));
}

TEST_CASE("the difference is empty exactly for equal plans") {
  CHECK(rc::check("diff of random plans", [](std::uint64_t seed, bool same) {
    const Plan a = test::random_plan(seed), b = test::random_plan(same ? seed : seed + 1);
    RC_ASSERT(diff_plans(a, b).empty() == (a == b));
    RC_ASSERT(!print_plan(a).empty());
  }));
}

}  // namespace hotbunk
