// Sums of element hashes by rank, from the boxes of a lowered plan and values of our own, without a backend.
#include "rl/sync_hashes.h"

#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <functional>

#include "base/hash.h"
#include "graph/boxes.h"
#include "lowering/lower.h"
#include "spec/loader.h"
#include "tests/blocks.h"

using namespace hotbunk;
using Catch::Matchers::Contains;

namespace {

/// Two key/value heads: with tp 4 each is held by two ranks. Vocabulary 33: uneven shards.
Plan verified_plan(int world, int tp) {
  const auto s = load_scenario_text(fmt::format(R"(
name: tiny
model: {{model_type: llama, architectures: [LlamaForCausalLM], hidden_size: 24, intermediate_size: 40, num_hidden_layers: 1,
  num_attention_heads: 4, num_key_value_heads: 2, head_dim: 6, vocab_size: 33, max_position_embeddings: 64,
  rms_norm_eps: 1.0e-5, rope_theta: 10000.0, tie_word_embeddings: false, bos_token_id: 1, eos_token_id: 2}}
cluster: {{gpu: local-cpu, nodes: 1, gpus_per_node: 1, ranks_per_device: {0}, device_memory_mib: 16}}
train: {{layout: {{dp: {0}}}, micro_batch_tokens: 64, precision: {{params: fp32}}}}
rollout: {{engine: hotbunk, layout: {{tp: {1}, dp: {2}}}, max_running_requests: 6, block_tokens: 4, kv_cache_tokens: 40}}
sync: {{verify: true}}
algorithm: {{name: grpo, prompts: 5, samples_per_prompt: 4}}
workload: {{prompt_tokens: {{mean: 5, max: 5}}, response_tokens: {{mean: 4, max: 6}}}}
task: {{name: reverse, digits: 3}}
)",
                                                world, tp, world / tp),
                                    "tiny.yaml", {});
  REQUIRE(s);
  const auto plan = lower(*s);
  REQUIRE(plan);
  return *plan;
}

/// The element's bits: any function of the tensor's name and the index.
std::uint64_t bits_of(const std::string& name, std::int64_t index) {
  return static_cast<std::uint32_t>(name.size() * 7919 + static_cast<std::size_t>(index) * 31 + 5);
}

struct Sums {
  std::vector<std::uint64_t> all;
  std::size_t per_rank = 0;
};

/// What the ranks would compute; `wrong(rank, name, rollout)` spoils one part's elements.
Sums sums_of(const Plan& plan, const std::function<bool(Rank, const std::string&, bool)>& wrong = {}) {
  Sums out;
  for (Rank r = 0; r < plan.num_ranks(); ++r) {
    const Program& p = plan.program(r);
    for (const Op& op : test::ops_of(p, p.phases[static_cast<std::size_t>(plan.phase_index("sync"))][0])) {
      if (op.kind != OpKind::hash_boxes) continue;
      out.per_rank = static_cast<std::size_t>(p.buffers[static_cast<std::size_t>(op.outputs[0].buffer)].elements);
      out.all.resize(static_cast<std::size_t>(plan.num_ranks()) * out.per_rank);
      const bool rollout =
          op.inputs[0].buffer >= 0 &&
          p.buffers[static_cast<std::size_t>(op.inputs[0].buffer)].section == sections::rollout_weights;
      auto& sum = out.all[static_cast<std::size_t>(r) * out.per_rank +
                          static_cast<std::size_t>(op.outputs[0].offset_bytes) / 8];
      for (const Box& b : boxes_of(op, places_of(plan, r)))
        for (std::int64_t i = 0; i < b.rows; ++i)
          for (std::int64_t j = 0; j < b.cols; ++j) {
            const std::int64_t index = b.dst_offset + i * b.dst_pitch + j;
            const std::uint64_t flip = wrong && i == 0 && j == 0 && wrong(r, op.name, rollout) ? 1 : 0;
            sum += element_hash(static_cast<std::uint64_t>(index), bits_of(op.name, index) ^ flip);
          }
    }
  }
  return out;
}

}  // namespace

TEST_CASE("a tensor's hash is the sum over its elements, whatever the layouts of either side") {
  const TensorHashes one = SyncHashes(verified_plan(1, 1)).judge(sums_of(verified_plan(1, 1)).all).trained;
  CHECK(one.size() == 12);  // embedding, norm, head; 2 norms and 7 matrices of the layer
  std::uint64_t down = 0;   // 24 x 40
  for (std::int64_t i = 0; i < 24 * 40; ++i)
    down += element_hash(static_cast<std::uint64_t>(i), bits_of("model.layers.0.mlp.down_proj.weight", i));
  CHECK(one.at("model.layers.0.mlp.down_proj.weight") == down);
  for (const auto& [world, tp] : std::vector<std::pair<int, int>>{{2, 1}, {2, 2}, {3, 1}, {4, 2}, {4, 4}}) {
    const Plan plan = verified_plan(world, tp);
    const auto verdict = SyncHashes(plan).judge(sums_of(plan).all);
    INFO(world << " ranks, tp " << tp);
    CHECK(verdict.differences == std::vector<std::string>{});
    CHECK(verdict.trained == one);
  }
}

TEST_CASE("a corrupted rollout weight is named with its ranks and both hashes") {
  const Plan plan = verified_plan(4, 2);
  const SyncHashes hashes(plan);
  const std::string name = "model.layers.0.mlp.up_proj.weight";
  const auto found = hashes.judge(sums_of(plan, [&](Rank r, const std::string& tensor, bool rollout) {
                                    return r == 3 && rollout && tensor == name;
                                  }).all);
  REQUIRE(found.differences.size() == 1);
  CHECK_THAT(found.differences[0], Contains("'" + name + "' on ranks 2, 3: trained ") && Contains(", rollout "));
  const auto trained = hashes.judge(sums_of(plan).all).trained;
  CHECK_THAT(found.differences[0], Contains(fmt::format("trained {:016x}", trained.at(name))));
  // A shard that is not what its rollout was made of is found in both engines.
  const auto shard = hashes.judge(sums_of(plan, [&](Rank r, const std::string& tensor, bool rollout) {
                                    return r == 0 && !rollout && tensor == name;
                                  }).all);
  CHECK(shard.differences.size() == 2);
}

TEST_CASE("a corrupted copy of what several ranks hold is named too") {
  const Plan plan = verified_plan(4, 4);
  const SyncHashes hashes(plan);
  const auto with = [&](Rank bad, const std::string& name) {
    return hashes
        .judge(sums_of(plan, [&](Rank r, const std::string& tensor,
                                 bool rollout) { return r == bad && rollout && tensor == name; })
                   .all)
        .differences;
  };
  // Every rank has the whole norm; ranks 0 and 1 have the first key head, 2 and 3 the second.
  const auto norm = with(2, "model.norm.weight"), key = with(3, "model.layers.0.self_attn.k_proj.weight");
  REQUIRE(norm.size() == 1);
  CHECK_THAT(norm[0], Contains("'model.norm.weight': rank 2 holds the same part as rank 0"));
  REQUIRE(key.size() == 1);
  CHECK_THAT(key[0], Contains("k_proj.weight': rank 3 holds the same part as rank 2"));
  // The first holder: its engine's sum is wrong, and the others disagree with it.
  CHECK(with(0, "model.norm.weight").size() == 4);
}
