#include "graph/print.h"

#include <rapidcheck.h>

#include <catch2/catch.hpp>

#include "tests/graph_io/random_plan.h"

namespace hotbunk {
namespace {

Plan small_plan() {
  Plan p;
  p.scenario = "demo";
  p.device_capacity_bytes = std::int64_t{2} << 30;
  p.groups = {{"fsdp", {{0, 1, 2}, {3}}}};
  p.phases = {{"load", When::prologue, false}, {"train", When::iteration, true}};
  p.program_of_rank = {0, 0, 0, 0};
  Program program;
  program.section_bytes[static_cast<std::size_t>(Section::transient)] = 8192;
  program.num_events = 1;
  program.buffers = {{"shard", DType::bf16, 512, Category::params, Section::train_params, 0},
                     {"x", DType::f32, 2048, Category::activations, Section::transient, 64}};
  Op alloc;
  alloc.name = "x", alloc.buffer = 1;
  Op gather;
  gather.kind = OpKind::all_gather, gather.stream = StreamId::gather, gather.name = "layers.0", gather.group = 0;
  gather.inputs = {{0, 0, DType::bf16, 1, {Dim{512}}}};
  gather.outputs = {{1, 128, DType::bf16, 2, {Dim{16, Sym::tokens}, Dim{64}}}};
  gather.attrs = {{Attr::padding_bytes, std::int64_t{8}}};
  Op wait;
  wait.kind = OpKind::wait, wait.name = "w", wait.event = 0;
  Op map;
  map.kind = OpKind::map, map.name = "m", map.map_end = 4096;
  program.phases = {{{"", {map}}}, {{"begin", {}}, {"micro", {alloc, gather, wait}}}};
  p.programs = {program};
  return p;
}

}  // namespace

TEST_CASE("a plan as text") {
  const Plan plan = small_plan();
  CHECK(print_plan(plan) == "plan " + plan_hash(plan) + R"(
  scenario demo: 4 ranks, 1 program
  per rank: device 2.00 GiB, host unlimited, overhead 0 B, chunks of 4.0 KiB
  group fsdp: [0-2] [3]
program 0 (ranks 0-3): 2 buffers, 1 events
    section transient             8.0 KiB  device
  phase load (prologue)
    block -: 1 ops
      compute  map                m  transient [0, 4096)
  phase train (iteration, driven)
    block begin: 0 ops
    block micro: 3 ops
      compute  alloc              x  8.0 KiB activations at transient+64
      gather   all_gather         layers.0  over fsdp  shard bf16[512] -> x+128 bf16[tokens<=16, 64]  padding_bytes=8
      compute  wait               w  event 0
)");
  const std::string filtered = print_plan(plan, {.phase = "train", .ops = false, .buffers = true});
  CHECK(filtered.find("phase load") == std::string::npos);
  CHECK(filtered.find("all_gather") == std::string::npos);
  CHECK(filtered.find("block micro: 3 ops") != std::string::npos);
  CHECK(
      filtered.find("    buffer shard                                         1.0 KiB  params        train_params+0") !=
      std::string::npos);
}

TEST_CASE("what changed between two plans") {
  const Plan a = small_plan();
  CHECK(diff_plans(a, a).empty());
  Plan b = a;
  b.device_capacity_bytes = 5;
  b.programs[0].buffers[1].elements = 1024;
  b.programs[0].buffers.push_back({"y", DType::f32, 1, Category::grads, Section::transient, 0});
  auto& ops = b.programs[0].phases[1][1].ops;
  ops[1].attrs[0].second = std::int64_t{16};
  ops.pop_back();
  CHECK(diff_plans(a, b) == R"(~ device_capacity_bytes: 2147483648 -> 5
~ program 0: buffer x: 8.0 KiB fp32 activations at transient+64 -> 4.0 KiB fp32 activations at transient+64
+ program 0: buffer y: 4 B fp32 grads at transient+0
- program 0: train[1] compute  alloc              x  8.0 KiB activations at transient+64
+ program 0: train[1] compute  alloc              x  4.0 KiB activations at transient+64
- program 0: train[1] gather   all_gather         layers.0  over fsdp  shard bf16[512] -> x+128 bf16[tokens<=16, 64]  padding_bytes=8
+ program 0: train[1] gather   all_gather         layers.0  over fsdp  shard bf16[512] -> x+128 bf16[tokens<=16, 64]  padding_bytes=16
- program 0: train[1] compute  wait               w  event 0
)");
}

TEST_CASE("order alone is a change") {
  const Plan a = small_plan();
  Plan b = a;
  std::swap(b.programs[0].phases[1][1].ops[0], b.programs[0].phases[1][1].ops[2]);
  CHECK(diff_plans(a, b) == "~ program 0: train[1] order of ops from number 0: alloc 'x' -> wait 'w'\n");
  Plan c = a;
  std::swap(c.phases[0], c.phases[1]);
  std::swap(c.programs[0].phases[0], c.programs[0].phases[1]);
  CHECK(diff_plans(a, c) == "~ order of phases\n");
}

TEST_CASE("a phase of every third iteration is another plan, and says so") {
  const Plan a = small_plan();
  Plan b = a;
  b.phases[1].every = 3;
  CHECK(plan_hash(a) != plan_hash(b));
  CHECK(diff_plans(a, b) == "~ phase train: when it runs or who drives it\n");
  CHECK(print_plan(b).find("  phase train (every 3 iterations, driven)\n") != std::string::npos);
}

TEST_CASE("the difference is empty exactly for equal plans") {
  CHECK(rc::check("diff of random plans", [](std::uint64_t seed, bool same) {
    const Plan a = test::random_plan(seed), b = test::random_plan(same ? seed : seed + 1);
    RC_ASSERT(diff_plans(a, b).empty() == (a == b));
    RC_ASSERT(!print_plan(a).empty());
  }));
}

}  // namespace hotbunk
