// What the kernels do not compute is refused op by op, before anything runs; of the families that are executed, nothing
// is.
#include <catch2/catch.hpp>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "backends/cuda/op_launches.h"
#include "lowering/lower.h"
#include "spec/loader.h"
#include "tests/paths.h"
#include "tests/toy_plan.h"

using namespace hotbunk;

namespace {

/// Kinds of ops of the plan that no kernel computes as they are.
std::set<OpKind> refused(const std::string& file, const std::vector<std::string>& model) {
  std::vector<std::string> sets = {"sync.transport=collective"};
  sets.insert(sets.end(), model.begin(), model.end());
  const auto scenario = load_scenario(std::string(source_folder) + "/scenarios/" + file, sets);
  REQUIRE(scenario);
  const auto plan = lower(*scenario);
  REQUIRE(plan);
  std::set<OpKind> out;
  for (const Program& program : plan->programs)
    for (const Body& body : program.bodies)
      for (const Op& op : body.ops)
        if (cuda::op_launch(op.kind) != nullptr ? !cuda::why_unsupported(op).empty() : is_compute(op.kind))
          out.insert(op.kind);
  return out;
}

Tensor tensor(DType dtype, std::vector<std::int64_t> shape) {
  Tensor t;
  t.dtype = dtype, t.rank = static_cast<int>(shape.size());
  for (std::size_t i = 0; i < shape.size(); ++i) t.shape[i] = Dim{shape[i]};
  return t;
}

Op attention(DType x, std::int64_t head_dim, std::int64_t value_dim) {
  Op op = toy::op(OpKind::attention, streams::compute, "attention");
  op.inputs = {tensor(x, {4, 2 * head_dim + value_dim}), tensor(DType::i32, {2})};
  op.outputs = {tensor(x, {4, value_dim}), tensor(DType::f32, {4, 1})};
  with(with(with(with(op, Attr::heads, std::int64_t{1}), Attr::kv_heads, std::int64_t{1}), Attr::head_dim, head_dim),
       Attr::value_dim, value_dim);
  return op;
}

}  // namespace

TEST_CASE("of every family that is executed, all ops have kernels") {
  using Kinds = std::set<OpKind>;
  CHECK(refused("demo.yaml", {}) == Kinds{});
  CHECK(refused("demo.yaml", {"model.model_type=mistral", "model.architectures=[MistralForCausalLM]",
                              "model.sliding_window=5"}) == Kinds{});
  CHECK(refused("demo.yaml",
                {"model.rope_scaling={rope_type: yarn, factor: 2.0, original_max_position_embeddings: 32}"}) ==
        Kinds{});
  CHECK(refused("deepseek-cpu.yaml", {"rollout.layout={tp: 1, cp: 2, dp: 2}"}) == Kinds{});
  CHECK(refused("moe-cpu.yaml", {"train.router_aux_loss_coef=0.1", "train.router_z_loss_coef=0.01"}) == Kinds{});
  std::size_t seen = 0;
  for (const auto& entry : std::filesystem::directory_iterator(std::string(source_folder) + "/scenarios")) {
    const std::string file = entry.path().filename();
    if (!file.ends_with("-cpu.yaml")) continue;
    ++seen;
    INFO(file);
    CHECK(refused(file, {}) == Kinds{});
  }
  CHECK(seen > 30);
  CHECK(refused("expert-columns-cpu.yaml", {"train.layout.ep=1"}) == Kinds{});  // in blocks
  CHECK(refused("expert-parallel-cpu.yaml", {"train.lora={rank: 3, alpha: 6, targets: all-linear}"}) == Kinds{});
  CHECK(refused("demo.yaml", {"rollout.kv_cache_dtype=bf16"}) == Kinds{OpKind::kv_write, OpKind::paged_attention});
}

TEST_CASE("heads wider than a warp holds and tensors of several dtypes are refused, not computed otherwise") {
  CHECK(cuda::why_unsupported(attention(DType::bf16, 256, 64)).empty());
  CHECK_THAT(cuda::why_unsupported(attention(DType::bf16, 64, 264)),
             Catch::Contains("heads of 256 numbers at most, not 264"));
  Op norm = attention(DType::bf16, 264, 64);
  norm.kind = OpKind::qk_norm_backward, norm.inputs[1] = norm.inputs[0];
  CHECK_THAT(cuda::why_unsupported(norm), Catch::Contains("heads of 256 numbers at most, not 264"));
  CHECK_THAT(cuda::why_unsupported(attention(DType::f16, 64, 64)), Catch::Contains("fp32 and bf16, not fp16"));
  Op mixed = attention(DType::bf16, 64, 64);
  mixed.outputs[0].dtype = DType::f32;
  CHECK_THAT(cuda::why_unsupported(mixed), Catch::Contains("several dtypes, its kernels of one (bf16)"));
}
