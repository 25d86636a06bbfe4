// Adapters: what is resident and what travels, by the closed forms of docs/lora.md.
#include <fmt/format.h>

#include <catch2/catch.hpp>

#include "graph/catalogue.h"
#include "lowering/lower.h"
#include "lowering/model_shapes.h"
#include "tiny.h"
#include "trace/static_memory.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

/// Bytes of the buffers of a category that persist on a rank's device.
std::int64_t persistent(const Plan& plan, Category category) {
  std::int64_t bytes = 0;
  for (const Buffer& b : plan.program(0).buffers)
    if (b.category == category && b.name.starts_with("train.") && b.section != transient_section) bytes += b.bytes();
  return bytes;
}
std::int64_t gradients_of(const Plan& plan) {
  std::int64_t bytes = 0;
  for (const Buffer& b : plan.program(0).buffers)
    if (b.category == Category::grads && b.name.ends_with(".grad")) bytes += b.bytes();
  return bytes;
}

/// Payload of one micro-batch's collectives of a kind over the data ranks.
std::int64_t payload(const Plan& plan, OpKind kind) {
  std::int64_t bytes = 0;
  const Program& program = plan.program(0);
  for (const Block& block : program.phases[static_cast<std::size_t>(plan.phase_index("train"))])
    if (block.name == "micro")
      each_op(program, block, [&](const BoundOp& op) {
        if (op->kind == kind && op->group == 0) bytes += payload_bytes(*op, Sizes{}, places_of(plan, 0));
      });
  return bytes;
}

std::int64_t count(const Plan& plan, OpKind kind) {
  std::int64_t n = 0;
  const Program& program = plan.program(0);
  for (const Block& block : program.phases[static_cast<std::size_t>(plan.phase_index("train"))])
    each_op(program, block, [&](const BoundOp& op) { n += op->kind == kind ? 1 : 0; });
  return n;
}

// tiny(): L = 3 layers, H = 24, I = 40, query heads 4 of 6, KV heads 2 of 6, V = 33; all rows of matrices and vectors
// but V and the rank 3 divide by 2.
constexpr std::int64_t L = layers, H = 24, I = 40, A = 4 * 6, K = 2 * 6, V = 33, R = 3, W = 2;
constexpr std::int64_t of_layer = H * A + 2 * H * K + A * H + 3 * H * I + 2 * H;
// What W ranks hold of A (R rows, in): ceil(3 / 2) = 2 rows of 2 ranks; B (out, R) divides.
constexpr std::int64_t ins = 3 * H + A + 2 * H + I, outs = A + 2 * K + H + 2 * I + H;
constexpr std::int64_t adapter_shard = 2 * ins + outs * R / W, adapter_whole = R * (ins + outs);
constexpr std::int64_t root_whole = 2 * V * H + H, root_shard = 2 * ((V + 1) / W) * H + H / W;

}  // namespace

TEST_CASE("Adapters: what is frozen has no gradient, no moments and no master copy beside it") {
  for (const char* params : {"fp32", "bf16"}) {
    const std::int64_t b = std::string(params) == "bf16" ? 2 : 4;
    const auto with = [&](std::vector<std::string> sets) {
      sets.push_back(fmt::format("train.precision.params={}", params));
      return lowered(tiny(2, 1, sets));
    };
    const Plan all = with({}), lora = with({"train.lora={rank: 3}"});
    const std::int64_t frozen = root_shard + L * of_layer / W;
    CHECK(persistent(all, Category::params) == 4 * frozen);  // the optimizer's shards, gathered in params
    CHECK(persistent(all, Category::optimizer) == 8 * frozen);
    CHECK(gradients_of(all) == 4 * frozen);
    CHECK(persistent(lora, Category::params) == b * frozen + 4 * L * adapter_shard);
    CHECK(persistent(lora, Category::optimizer) == 8 * L * adapter_shard);
    CHECK(gradients_of(lora) == 4 * L * adapter_shard);
    // Gathered twice a layer and the root once, reduced as wide as gradients are: what is frozen is not.
    const std::int64_t twice = 2 * L * of_layer + root_whole;
    CHECK(payload(all, OpKind::all_gather) == b * twice);
    CHECK(payload(lora, OpKind::all_gather) == b * (twice + 2 * L * adapter_whole));
    CHECK(payload(all, OpKind::reduce_scatter) == 4 * (L * of_layer + root_whole));
    CHECK(payload(lora, OpKind::reduce_scatter) == 4 * L * adapter_whole);
  }
  const Plan whole = lowered(tiny(2, 1, {"train.lora={rank: 3}", "train.engine=zero1", "train.precision.params=bf16"}));
  CHECK(persistent(whole, Category::params) == 2 * (root_whole + L * (of_layer + adapter_whole)));
  CHECK(persistent(whole, Category::optimizer) == 12 * L * adapter_shard);  // master and two moments
  CHECK(gradients_of(whole) == 4 * L * adapter_whole);
}

TEST_CASE("Adapters: the reference is the model without them, and takes no second copy") {
  const auto copy_of = [](const Plan& plan) {
    std::int64_t bytes = 0;
    for (const Buffer& b : plan.program(0).buffers)
      bytes += b.name.starts_with("reference.") && b.section != transient_section ? b.bytes() : 0;
    return bytes;
  };
  const auto ops_in = [](const Plan& plan, const char* phase, OpKind kind) {
    std::int64_t n = 0;
    const Program& program = plan.program(0);
    for (const Block& block : program.phases[static_cast<std::size_t>(plan.phase_index(phase))])
      each_op(program, block, [&](const BoundOp& op) { n += op->kind == kind ? 1 : 0; });
    return n;
  };
  const Plan all = lowered(tiny(2, 1, {"algorithm.reference=true"})),
             lora = lowered(tiny(2, 1, {"algorithm.reference=true", "train.lora={rank: 3}"}));
  CHECK(copy_of(all) == 4 * (root_shard + L * of_layer / W));
  CHECK(copy_of(lora) == 0);
  CHECK(ops_in(lora, "reference", OpKind::lora_up) == 0);
  CHECK(ops_in(lora, "old_logprobs", OpKind::lora_up) == 7 * L);
  CHECK(ops_in(lora, "rollout", OpKind::lora_up) == 0);  // its matrices have them
}

TEST_CASE("Adapters: backward makes no gradient of a frozen matrix, and keeps no input for one") {
  const Plan all = lowered(tiny(1, 1)), lora = lowered(tiny(1, 1, {"train.lora={rank: 3}"})),
             two = lowered(tiny(1, 1, {"train.lora={rank: 3, targets: [q_proj, v_proj]}"}));
  CHECK(count(all, OpKind::linear_wgrad) == 4 * L + 1);
  CHECK(count(lora, OpKind::linear_wgrad) == 7 * L);  // of each A
  CHECK(count(lora, OpKind::lora_up_wgrad) == 7 * L);
  CHECK(count(two, OpKind::linear_wgrad) == 2 * L);
  CHECK(count(two, OpKind::embedding_backward) == 0);
  // Of o_proj's input attention's backward keeps its own; gate_up_proj's and down_proj's are let go of: the second
  // norm's output and the activation, T rows of each layer.
  const auto activations = [](const Plan& plan) {
    std::int64_t live = 0, most = 0;
    const Program& program = plan.program(0);
    bool counted = true;
    for (const Block& block : program.phases[static_cast<std::size_t>(plan.phase_index("train"))])
      each_op(program, block, [&](const BoundOp& op) {
        if (op.name() == "train.head.lm_head") counted = false;
        const bool memory = op->kind == OpKind::alloc || op->kind == OpKind::free;
        if (!counted || !memory || op.allocated().category() != Category::activations) return;
        live += op->kind == OpKind::alloc ? op.allocated().bytes() : -op.allocated().bytes();
        most = live;
      });
    return most;
  };
  CHECK(activations(all) == activations(lora));
  CHECK(activations(lora) - activations(two) == 4 * L * 64 * (H + I));
}

TEST_CASE("Adapters of experts alone: nothing of nothing is sent, and a place is merged once for all that share it") {
  // 4 experts of a layer, 2 of them on each data rank, of which both shards of a copy have the same: the unit of a
  // layer's adapters has nothing that all ranks share.
  for (const char* engine : {"fsdp2", "zero2", "ddp"}) {
    CAPTURE(engine);
    const Plan plan = lowered(tiny(
        4, 1,
        {fmt::format("train.engine={}", engine), "train.layout.ep=2", "train.lora={rank: 3, targets: [w1, w2, w3]}",
         "sync.verify=true", "sync.bucket_mib=1", "cluster.device_memory_mib=4", "model.model_type=mixtral",
         "model.num_local_experts=4", "model.num_experts_per_tok=2", "model.architectures=[MixtralForCausalLM]"}));
    std::int64_t collectives = 0, empty = 0;
    const Program& program = plan.program(0);
    for (const auto& phase : program.phases)
      for (const Block& block : phase)
        each_op(program, block, [&](const BoundOp& op) {
          if (op->kind != OpKind::all_gather && op->kind != OpKind::reduce_scatter && op->kind != OpKind::all_reduce)
            return;
          ++collectives;
          empty += payload_bytes(*op, Sizes{}, places_of(plan, 0)) == 0 ? 1 : 0;
        });
    CHECK(collectives > 0);
    CHECK(empty == 0);
    // Once for what is sent and once for the sums of sync.verify: w1, w2 and w3 of 2 places in each of 3 layers.
    std::int64_t sent = 0, again = 0;
    for (const Op& op : ops_of(plan, 0, "sync", "sync"))
      if (op.kind == OpKind::lora_merge) (op.name.starts_with("sync.merged.") ? again : sent) += 1;
    CHECK(sent == 3 * 2 * L);
    CHECK(again == 3 * 2 * L);
  }
}

TEST_CASE("A merged model comes up from the host one unit at a time, however many there are") {
  const auto exported = [](int layers, const char* offload) {
    const Scenario s = tiny(2, 1,
                            {"train.lora={rank: 3}", fmt::format("train.offload={}", offload),
                             fmt::format("model.num_hidden_layers={}", layers)});
    ModelShapes shapes(s.model);
    const auto part = lower_phases(s, nullptr, shapes);
    REQUIRE(part.has_value());
    return part->transients.front()[static_cast<std::size_t>(PlanPhase::export_)];
  };
  CHECK(exported(3, "none") > 0);
  for (const char* offload : {"none", "layerwise"}) {
    INFO(offload);
    CHECK(exported(9, offload) == exported(3, offload));
  }
}
