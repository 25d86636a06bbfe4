// What becomes one op in a decode step on a CPU.
#include "lowering/fuse.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <catch2/catch.hpp>
#include <set>

#include "graph/catalogue.h"
#include "tests/graph/programs.h"
#include "tiny.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

/// The products of a rank's steps, each with what stands beside it: "o_proj residual, qkv_proj norm".
std::string products(const Plan& plan, Rank rank, std::string_view of_block = "decode") {
  const Program& program = plan.program(rank);
  std::set<std::string> all;
  for (const auto& blocks : program.phases)
    for (const Block& block : blocks) {
      if (block.name != of_block) continue;
      each_op(program, block, [&](const BoundOp& op) {
        if (!is_linear(op->kind)) return;
        const ProductSides s = op->kind == OpKind::fused_linear ? product_sides(*op) : ProductSides{};
        const std::string name = op.name();
        std::string said = name.substr(name.rfind('.') + 1);
        for (const auto& [is, word] : {std::pair{s.norm >= 0, " norm"},
                                       {s.delta >= 0, " sum"},
                                       {s.gate, " gate"},
                                       {s.residual >= 0, " residual"}})
          if (is) said += word;
        all.insert(said);
      });
    }
  return fmt::format("{}", fmt::join(all, ", "));
}

/// Of ops one behind the other: the kinds that they become.
std::string fused(std::vector<Op> ops, const std::vector<Tensor>& kept = {}) {
  fuse_linears(ops, kept);
  std::vector<std::string> out;
  for (const Op& op : ops) {
    CHECK_THAT(check_op(op), Catch::Equals(""));
    out.emplace_back(name_of(op.kind));
  }
  return fmt::format("{}", fmt::join(out, " "));
}

}  // namespace

TEST_CASE("A decode step's products have what stands beside them in one op; where ranks share them, less") {
  // A first layer's stream has one part: nothing is added in front of its product.
  CHECK(products(lowered(tiny(1, 1)), 0) ==
        "down_proj, gate_up_proj norm gate, lm_head norm sum, o_proj residual, qkv_proj norm, qkv_proj norm sum");
  // What ranks add up among them is no product's own.
  CHECK(products(lowered(tiny(2, 2)), 0) ==
        "down_proj, gate_up_proj norm sum gate, lm_head norm sum, o_proj, qkv_proj norm, qkv_proj norm sum");
  CHECK(products(lowered(tiny(1, 1)), 0, "prefill") == "down_proj, gate_up_proj, lm_head, o_proj, qkv_proj");
  const Plan gpus = lowered(tiny(1, 1, {"cluster={gpu: h100-sxm-80gb, nodes: 1, gpus_per_node: 1}"}));
  CHECK(products(gpus, 0) == "down_proj, gate_up_proj, lm_head, o_proj, qkv_proj");
}

TEST_CASE("What something else reads as well stays an op: rows that routers and experts take") {
  const Plan plan = lowered(
      tiny(1, 1,
           {"model={model_type: qwen3_moe, hidden_size: 24, intermediate_size: 40, num_hidden_layers: 2, "
            "num_attention_heads: 4, num_key_value_heads: 2, head_dim: 6, moe_intermediate_size: 12, num_experts: 4, "
            "num_experts_per_tok: 2, decoder_sparse_step: 1, mlp_only_layers: [], vocab_size: 33, "
            "max_position_embeddings: 256}"}));
  CHECK(products(plan, 0) == "lm_head norm sum, o_proj residual, qkv_proj norm, qkv_proj norm sum, router");
}

TEST_CASE("A rewrite fuses neighbours alone, of which nothing else is read") {
  const Dim T = test::tokens(8);
  const auto rows = [&](BufferId id, std::int64_t width, DType dtype = DType::f32) {
    return tensor(id, dtype, {T, test::fixed(width)});
  };
  const Tensor x = rows(0, 6), r = rows(1, 6), w = tensor(2, DType::f32, {test::fixed(6), test::fixed(6)}),
               norm = tensor(3, DType::f32, {test::fixed(6)}), normed = rows(4, 6), y = rows(5, 6), sum = rows(6, 6),
               act = rows(7, 3), after = rows(8, 6), rstd = tensor(9, DType::f32, {T}),
               other_rstd = tensor(10, DType::f32, {T});
  const auto norm_of = [&](std::vector<Tensor> in, std::vector<Tensor> out) {
    Op norms = op(OpKind::rms_norm, std::move(in), std::move(out));
    return with(norms, Attr::eps, 1e-5);
  };
  const Op plain = norm_of({x, norm}, {normed, rstd}), product = op(OpKind::linear, {normed, w}, {y}),
           gate = op(OpKind::swiglu, {y}, {act}), next = norm_of({y, norm, r}, {after, other_rstd, sum}),
           reads = op(OpKind::add, {normed, r}, {after});
  CHECK(fused({plain, product, gate}) == "fused_linear");
  CHECK(fused({plain, product, next}) == "fused_linear rms_norm");
  // The stream's part may be the first of the two that are added.
  CHECK(fused({product, norm_of({r, norm, y}, {after, other_rstd, sum})}) == "fused_linear rms_norm");
  // Read elsewhere, here or behind.
  CHECK(fused({plain, product, reads}) == "rms_norm linear add");
  CHECK(fused({plain, product, gate}, {normed}) == "rms_norm fused_linear");
  CHECK(fused({plain, product, gate}, {rstd}) == "rms_norm fused_linear");
  CHECK(fused({plain, product, gate}, {y}) == "fused_linear swiglu");
  CHECK(fused({product, next}, {y}) == "linear rms_norm");
  CHECK(fused({product, next}, {sum}) == "fused_linear rms_norm");
  // Not next to it; of another stream.
  CHECK(fused({plain, op(OpKind::add, {x, r}, {after}), product}) == "rms_norm add linear");
  Op elsewhere = plain;
  elsewhere.stream = streams::tensor;
  CHECK(fused({elsewhere, product}) == "rms_norm linear");
  // Logits in fp32 are no rows of the stream's type.
  const Tensor wide = rows(5, 6, DType::bf16), narrow = rows(6, 6, DType::bf16);
  CHECK(fused({op(OpKind::linear, {normed, w}, {wide}),
               norm_of({wide, norm, rows(1, 6, DType::bf16)}, {after, other_rstd, narrow})}) == "linear rms_norm");
  // A sum in front of a product and one behind it: that in front.
  CHECK(fused({norm_of({x, norm, r}, {normed, rstd, after}), product, norm_of({y, norm, r}, {x, other_rstd, sum})}) ==
        "fused_linear rms_norm");
}

TEST_CASE("A fused product reads and writes what its parts did, in the order of the catalogue") {
  const Dim T = test::tokens(8);
  const auto rows = [&](BufferId id, std::int64_t width) { return tensor(id, DType::bf16, {T, test::fixed(width)}); };
  const Tensor x = rows(0, 6), r = rows(1, 6), w = tensor(2, DType::bf16, {test::fixed(8), test::fixed(6)}),
               b = tensor(3, DType::bf16, {test::fixed(8)}), norm = tensor(4, DType::bf16, {test::fixed(6)}),
               normed = rows(5, 6), y = rows(6, 8), sum = rows(7, 6), act = rows(8, 4),
               rstd = tensor(9, DType::f32, {T});
  Op first = op(OpKind::rms_norm, {x, norm, r}, {normed, rstd, sum}), product = op(OpKind::linear, {normed, w, b}, {y});
  with(with(first, Attr::eps, 1e-5), Attr::offset, 1.0);
  with(product, Attr::prepacked, std::int64_t{1}), product.name = "up";
  std::vector<Op> ops = {first, product, op(OpKind::swiglu, {y}, {act})};
  fuse_linears(ops, {});
  REQUIRE(ops.size() == 1);
  const Op& all = ops.front();
  CHECK(all.name == "up");
  CHECK(all.inputs == std::vector<Tensor>{x, w, b, norm, r});
  CHECK(all.outputs == std::vector<Tensor>{act, sum});
  CHECK((all.real(Attr::eps) == 1e-5 && all.real(Attr::offset) == 1.0 && all.has(Attr::prepacked)));
  CHECK(all.has(Attr::gate));
}
