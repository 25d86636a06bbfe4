// Nothing is claimed of hardware that did not happen: hardware_evidence.json has a row for every kernel file, and the
// README says of it what the file says.
#include "backends/cuda/evidence.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <filesystem>

#include "backends/cuda/context.h"
#include "base/file.h"
#include "tests/paths.h"
#include "tests/toy_plan.h"

using namespace hotbunk;

TEST_CASE("every kernel file has a row of evidence, and the README says whether any of it ran") {
  const auto evidence = cuda::hardware_evidence();
  const auto has = [&](const std::string& claim) {
    return std::ranges::find(evidence, claim, &cuda::Evidence::claim) != evidence.end();
  };
  CHECK(has("conformance suite"));
  std::size_t files = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::filesystem::path(source_folder) / "backends/cuda/kernels")) {
    if (entry.path().extension() != ".cu") continue;
    ++files;
    INFO(entry.path());
    CHECK(has("kernels/" + entry.path().filename().string()));
  }
  CHECK(files == cuda::kernel_file_names().size());

  const bool none = std::ranges::none_of(evidence, [](const cuda::Evidence& e) { return e.last_run.has_value(); });
  const auto readme = read_file(std::filesystem::path(source_folder) / "README.md");
  REQUIRE(readme);
  CHECK((readme->find("never ran on hardware") != std::string::npos) == none);
  CHECK((cuda::evidence_text() == "never ran on hardware") == none);
}

TEST_CASE("a kind of body is its name without layers, micro-batches and which of several it is") {
  CHECK(cuda::body_kind("train.layer.backward") == "train.layer.backward");
  CHECK(cuda::body_kind("train.layer.backward/3") == "train.layer.backward");
  CHECK(cuda::body_kind("train.backward.0.12") == "train.backward");
  CHECK(cuda::body_kind("sleep") == "sleep");
  // Kinds have a row each, in order, and none where nothing ran.
  const auto rows = cuda::body_evidence();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    INFO(rows[i].body);
    CHECK(cuda::body_kind(rows[i].body) == rows[i].body);
    if (i > 0) CHECK(rows[i - 1].body < rows[i].body);
    CHECK(!rows[i].ops.empty());
  }
}

TEST_CASE("a run executed the bodies of the phases that it was in, and they ran on hardware with all of their ops") {
  Plan plan = hotbunk::test::empty_plan();
  plan.phases = {{"train", When::iteration, false}, {"export", When::epilogue, false}};
  Program p = hotbunk::test::empty_program();
  p.buffers = {{"x", DType::f32, 8, Category::activations, sections::transient, 0}};
  const auto named = [&](const std::string& name, const std::vector<Op>& ops) {
    const Block block = hotbunk::test::block_of(p, "block", ops);
    p.bodies.back().name = name;
    return block;
  };
  Op cast = toy::op(OpKind::cast, streams::compute, "cast");
  cast.inputs = {toy::tensor(0, {8})}, cast.outputs = {toy::tensor(0, {8}, DType::bf16)};
  Op zero = toy::op(OpKind::zero, streams::compute, "zero");
  zero.outputs = {toy::tensor(0, {8})};
  Op alloc = toy::op(OpKind::alloc, streams::compute, "alloc");
  Op prepack = toy::op(OpKind::prepack, streams::compute, "prepack");  // launches nothing
  prepack.inputs = {toy::tensor(0, {8})}, prepack.outputs = prepack.inputs;
  p.phases = {{named("train.layer.forward", {cast}), named("train.layer.forward/2", {zero}),
               named("train.zero", {zero}), named("train.takes_memory", {alloc, prepack})},
              {named("export.fetch", {zero})}};
  plan.programs = {p}, plan.program_of_rank = {0, 0};
  PhaseTotal train, nowhere;
  train.rank = 1, train.phase = 0, train.blocks = 3;
  nowhere.rank = 1, nowhere.phase = 1;  // no block of it
  const auto ran = cuda::bodies_that_ran(plan, std::vector{train, nowhere}, {});
  REQUIRE(ran.size() == 2);
  CHECK(ran[0].body == "train.layer.forward");
  CHECK(ran[0].ops == std::vector<std::string>{"cast fp32/bf16", "zero fp32"});
  CHECK(ran[1].body == "train.zero");

  const auto run_of = [](const char* date) {
    return cuda::HardwareRun{.date = date, .machine = "a GPU", .command = "scripts/gpu", .commit = "abc"};
  };
  std::vector<cuda::BodyEvidence> known = {{"train.layer.forward", {{"cast fp32/bf16", run_of("2026-12-03")}}}};
  CHECK(!cuda::ran_on_hardware(ran[0], known));  // its zero never did
  CHECK(!cuda::ran_on_hardware(ran[1], known));  // no row
  known[0].ops.emplace("zero fp32", run_of("2026-12-01"));
  REQUIRE(cuda::ran_on_hardware(ran[0], known));
  CHECK(cuda::ran_on_hardware(ran[0], known)->date == "2026-12-01");  // of the op that ran longest ago
  CHECK(cuda::bodies_text({}) == "never ran on hardware");
  CHECK(cuda::bodies_text(known) == "1 kind of bodies ran on hardware");
}

TEST_CASE("an op is named by what it is made of: who carries, which products, which attention") {
  Plan plan = hotbunk::test::empty_plan();
  plan.phases = {{"train", When::iteration, false}};
  Program p = hotbunk::test::empty_program();
  p.buffers = {{"x", DType::bf16, 64, Category::activations, sections::transient, 0}};
  const auto of = [](OpKind kind) {
    Op op = toy::op(kind, streams::compute, "op");
    op.outputs.push_back(toy::tensor(0, {64}, DType::bf16));
    return op;
  };
  const auto attends = [&](std::int64_t d, OpKind kind = OpKind::attention) {
    Op op = of(kind);
    op.attrs = {{Attr::heads, std::int64_t{1}}, {Attr::kv_heads, std::int64_t{1}}, {Attr::head_dim, d}};
    return op;
  };
  Op gather = of(OpKind::all_gather);
  gather.group = 0;
  p.phases = {{hotbunk::test::block_of(p, "block",
                                       {gather, of(OpKind::linear), of(OpKind::linear_wgrad), attends(16), attends(20),
                                        attends(16, OpKind::attention_backward)})}};
  plan.programs = {p}, plan.program_of_rank = {0, 0};
  PhaseTotal total;
  total.phase = 0, total.blocks = 1;
  const auto ops = [&](const cuda::RanBy& by) { return cuda::bodies_that_ran(plan, std::vector{total}, by).at(0).ops; };
  CHECK(ops({.transport = "nccl", .products = cuda::ProductPolicy::backward}) ==
        std::vector<std::string>{"all_gather bf16 nccl", "attention bf16 rows", "attention bf16 tiles",
                                 "attention_backward bf16 tiles", "linear bf16 own", "linear_wgrad bf16 cublasLt"});
  CHECK(ops({}) == std::vector<std::string>{"all_gather bf16 local", "attention bf16 rows", "attention bf16 tiles",
                                            "attention_backward bf16 tiles", "linear bf16 own",
                                            "linear_wgrad bf16 own"});
  // Gradients alone: what cuDNN takes is known only when it is asked.
  CHECK(ops({.attention = cuda::AttentionPolicy::cudnn}) ==
        std::vector<std::string>{"all_gather bf16 local", "attention bf16 rows", "attention bf16 tiles",
                                 "attention_backward bf16 cudnn or tiles", "linear bf16 own", "linear_wgrad bf16 own"});
}
