// Which weights a sync leaves in the order in which products read them.
#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <set>

#include "tiny.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

using Matrices = std::set<std::string>;

/// Buffers that a rank's program prepacks, without "rollout."; checks that a sync does it, once each, and that the
/// rollout's linears read these and no others so.
Matrices prepacked(const Plan& plan, Rank rank) {
  const Program& program = plan.program(rank);
  Matrices packed, read, read_as_rows;
  for (std::size_t phase = 0; phase < program.phases.size(); ++phase)
    for (const Block& block : program.phases[phase])
      each_op(program, block, [&](const BoundOp& op) {
        const auto name = [&](const Tensor& t) { return op.buffer(t).name(); };
        if (op->kind == OpKind::prepack) {
          CHECK(plan.phases[phase].name == "sync");
          CHECK(packed.insert(name(op->outputs[0])).second);
        }
        if (op->has(Attr::prepacked)) CHECK(plan.phases[phase].name == "rollout");
        if (op->kind == OpKind::linear && name(op->inputs[1]).starts_with("rollout."))
          (op->has(Attr::prepacked) ? read : read_as_rows).insert(name(op->inputs[1]));
      });
  CHECK(read == packed);
  for (const std::string& name : read_as_rows) CHECK_FALSE(packed.contains(name));
  Matrices out;
  for (const std::string& name : packed) out.insert(name.substr(std::string("rollout.").size()));
  return out;
}

/// Each of `names` in layers [begin, end), and `more`.
Matrices of_layers(int begin, int end, const std::vector<std::string>& names, Matrices more = {}) {
  for (int l = begin; l < end; ++l)
    for (const std::string& m : names) more.insert(fmt::format("layers.{}.{}", l, m));
  return more;
}

const std::vector<std::string> of_dense_layer = {"qkv", "o", "gate_up", "down"};

}  // namespace

TEST_CASE("Matrices that linears alone read are prepacked; an embedding that is the head too is not") {
  using Sets = std::vector<std::string>;
  for (const Sets& sets :
       {Sets{}, {"sync.verify=true"}, {"sync.transport=collective"}, {"transition=slime"}, {"train.lora={rank: 3}"}})
    CHECK(prepacked(lowered(tiny(2, 2, sets)), 0) == of_layers(0, 3, of_dense_layer, {"lm_head"}));
  CHECK(prepacked(lowered(tiny(1, 1, {"model.tie_word_embeddings=true"})), 0) == of_layers(0, 3, of_dense_layer));
  // On the last of two stages the table is the head alone, on the first it is looked up.
  const Plan stages = lowered(tiny(
      2, 1,
      {"model.tie_word_embeddings=true", "model.num_hidden_layers=4", "rollout.layout.pp=2", "rollout.layout.dp=1"}));
  CHECK(prepacked(stages, 0) == of_layers(0, 2, of_dense_layer));
  CHECK(prepacked(stages, 1) == of_layers(2, 4, of_dense_layer, {"embedding"}));
}

TEST_CASE("The expansion of latents and the matrices of experts are not prepacked, shared experts and routers are") {
  const Plan plan = lowered(
      tiny(1, 1,
           {"cluster.device_memory_mib=16",
            "model={model_type: deepseek_v3, hidden_size: 24, intermediate_size: 40, num_hidden_layers: 2, "
            "num_attention_heads: 4, first_k_dense_replace: 1, kv_lora_rank: 10, qk_nope_head_dim: 6, "
            "qk_rope_head_dim: 4, v_head_dim: 5, q_lora_rank: 9, moe_intermediate_size: 12, n_routed_experts: 6, "
            "num_experts_per_tok: 2, n_shared_experts: 1, n_group: 3, topk_group: 2, vocab_size: 33, "
            "max_position_embeddings: 256}"}));
  const Matrices attention = of_layers(0, 2, {"q_a", "q_b", "kv_a", "o"}, {"lm_head"});
  const Matrices of_first = of_layers(0, 1, {"gate_up", "down"}, attention);
  CHECK(prepacked(plan, 0) == of_layers(1, 2, {"router", "shared_gate_up", "shared_down"}, of_first));
}

TEST_CASE("A plan for GPUs prepacks nothing") {
  const Plan plan = lowered(tiny(1, 1, {"cluster={gpu: h100-sxm-80gb, nodes: 1, gpus_per_node: 1}"}));
  CHECK(prepacked(plan, 0).empty());
}
