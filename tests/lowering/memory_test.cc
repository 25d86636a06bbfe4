// What is resident when: the KV pool's size, what sleep gives back, what recomputation and prefetch cost.
#include <fmt/format.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <map>

#include "lowering/lower.h"
#include "tiny.h"
#include "trace/static_memory.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

/// Live device bytes of one category when the named op of a block runs, counting what the block allocates.
std::int64_t live_at(const Plan& plan, std::string_view phase, std::string_view op_name, Category category) {
  std::int64_t live = 0;
  bool found = false;
  const Program& program = plan.program(0);
  for (const Block& block : program.phases[static_cast<std::size_t>(plan.phase_index(phase))]) {
    if (block.name != "micro") continue;
    each_op(program, block, [&](const BoundOp& op) {
      const bool memory = op->kind == OpKind::alloc || op->kind == OpKind::free;
      if (!memory && op.name() == op_name) found = true;
      if (!found && memory && op.allocated().category() == category)
        live += op->kind == OpKind::alloc ? op.allocated().bytes() : -op.allocated().bytes();
    });
  }
  INFO("op " << op_name);
  REQUIRE(found);
  return live;
}

std::int64_t phase_peak(const Plan& plan, std::string_view phase) {
  return static_memory(plan, 0).device.phase_peaks.at(static_cast<std::int16_t>(plan.phase_index(phase))).peak_bytes;
}

/// Mapped bytes of every section at the end of every phase of the second iteration.
std::map<std::string, std::map<SectionId, std::int64_t>> mapped_after(const Plan& plan) {
  std::map<std::string, std::map<SectionId, std::int64_t>> out;
  std::map<SectionId, std::int64_t> now;
  const Program& program = plan.program(0);
  for (When when : {When::prologue, When::iteration, When::iteration})
    for (std::size_t p = 0; p < plan.phases.size(); ++p) {
      if (plan.phases[p].when != when) continue;
      for (const Block& block : program.phases[p])
        for (const Op& op : ops_of(program, block)) {
          if (op.kind == OpKind::map) now[op.section] += op.map_end - op.map_begin;
          if (op.kind == OpKind::unmap) now[op.section] -= op.map_end - op.map_begin;
        }
      out[plan.phases[p].name] = now;
    }
  return out;
}

}  // namespace

TEST_CASE("The KV pool: as asked, as memory allows, as much as can be used") {
  // A block of 4 tokens: K and V of 2 heads of 6 in 3 layers, fp32: 2*4*2*6*3*4 = 1152 B; weights 15576*4 = 62304 B.
  CHECK(kv_pool_blocks(tiny(1, 1)).value() == 10);                                  // 40 tokens
  CHECK(kv_pool_blocks(tiny(1, 1, {"rollout.kv_cache_tokens=43"})).value() == 10);  // whole blocks
  const auto with = [](int tp, const char* fraction) {
    return kv_pool_blocks(
        tiny(tp, tp, {"rollout.kv_cache_tokens=0", fmt::format("rollout.memory_fraction={}", fraction)}));
  };
  // 0.07 of 1 MiB = 73400; less 62304 = 11096; 9.6 blocks.
  CHECK(with(1, "0.07").value() == 9);
  // 6 running requests of at most 5 + 6 = 11 tokens, 3 blocks each, can use 18.
  CHECK(with(1, "0.9").value() == 18);
  // tp 2: vocabulary 17 rows twice, norm, layers of half the matrices and whole norms: (840 + 3*2352)*4 = 31584 B;
  // a block of one KV head has 576 B: (0.04 MiB = 41943 - 31584) / 576 = 17.98.
  CHECK(with(2, "0.04").value() == 17);
  // 0.0627 of 1 MiB = 65745; less 62304 = 3441: 2 blocks, but one sequence needs 3.
  const auto none = with(1, "0.0627");
  REQUIRE_FALSE(none.has_value());
  CHECK(none.error()[0].code == "E302");
  CHECK_THAT(none.error()[0].notes[0], Catch::Matchers::Contains("11 tokens need 3 blocks x 1.1 KiB = 3.4 KiB"));
  CHECK(with(1, "0.0628").value() == 3);  // 65850 - 62304 = 3546 = 3.08 blocks
  // Without a known capacity: what can be used.
  Scenario unlimited = tiny(1, 1, {"rollout.kv_cache_tokens=0"});
  unlimited.cluster.device_memory_bytes = 0;
  CHECK(kv_pool_blocks(unlimited).value() == 18);
}

TEST_CASE("Recomputation keeps exactly less") {
  const auto kept = [](const char* mode) {
    return live_at(lowered(tiny(2, 1, {fmt::format("train.recompute={}", mode)})), "train", "train.head.lm_head",
                   Category::activations);
  };
  const std::int64_t T = 64, H = 24, I = 40, Q = (4 + 2 * 2) * 6, heads = 4;
  // selective drops two norms' outputs and rstds and the activation, full also everything else but the layer's input.
  CHECK(kept("none") - kept("selective") == layers * T * (2 * H + 2 + I) * 4);
  CHECK(kept("selective") - kept("full") == layers * T * (Q + 4 * 6 + heads + H + 2 * I) * 4);
  // Left with full: x of each layer; the final x, normed and rstd; the logits.
  CHECK(kept("full") == (layers * T * H + T * (2 * H + 1) + T * 33) * 4);
}

TEST_CASE("Chunks of the loss hold fewer logits") {
  const auto peak = [](int chunk) {
    return live_at(lowered(tiny(2, 1, {fmt::format("train.loss_chunk_tokens={}", chunk)})), "train",
                   chunk ? "train.head.0.lm_head" : "train.head.lm_head", Category::activations);
  };
  CHECK(peak(0) - peak(24) == (64 - 24) * 33 * 4);
}

TEST_CASE("Prefetch adds one layer's parameters to the peak") {
  for (int world : {2, 3}) {
    const auto plan = [&](int prefetch) {
      return lowered(tiny(world, 1, {fmt::format("train.prefetch={}", prefetch), "train.micro_batch_tokens=256"}));
    };
    CHECK(phase_peak(plan(1), "old_logprobs") - phase_peak(plan(0), "old_logprobs") == layer_elements * 4);
    // While a layer computes: this layer, with prefetch also the next, at the end the head; the embedding is read.
    const auto params = [&](int prefetch, const char* op) {
      return live_at(plan(prefetch), "old_logprobs", op, Category::params);
    };
    CHECK(params(0, "old.layers.1.swiglu") == layer_elements * 4);
    CHECK(params(1, "old.layers.1.swiglu") == 2 * layer_elements * 4);
    CHECK(params(1, "old.layers.2.swiglu") == (layer_elements + head_elements) * 4);
  }
}

TEST_CASE("Asleep means unmapped: section by section, phase by phase") {
  using namespace sections;
  for (int level : {1, 2}) {
    const Plan plan = lowered(tiny(2, 2, {"algorithm.reference=true", fmt::format("rollout.sleep_level={}", level)}));
    const Program& program = plan.program(0);
    const auto bytes = [&](SectionId s) { return program.section(s).bytes; };
    // Half of the model in fp32, padding included, in chunks of 4 KiB; twice that for the moments. 33 rows over 2
    // ranks: 17 of the embedding and of the head. Buffers are 64-byte aligned.
    const std::int64_t root_shard = (17 * 2 * 24 + 12) * 4, layer_shard = layer_elements / 2 * 4;
    const auto up = [](std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; };
    const std::int64_t shard = up(root_shard, 64) + layers * up(layer_shard, 64);
    CHECK(bytes(train_params) == up(shard, 4096));
    CHECK(bytes(train_optimizer) == up(2 * shard, 4096));
    CHECK(bytes(train_reference) == up(shard, 4096));

    auto mapped = mapped_after(plan);
    const auto check = [&](const char* phase, const std::vector<SectionId>& awake,
                           const std::vector<SectionId>& asleep) {
      INFO("level " << level << ", after " << phase);
      for (SectionId s : awake) CHECK(mapped[phase][s] == bytes(s));
      for (SectionId s : asleep) CHECK(mapped[phase][s] == 0);
    };
    check("sleep_optimizer", {train_params, host_optimizer, host_reference},
          {train_optimizer, train_reference, sections::rollout_weights, kv_cache});
    check("sync", {train_params, sections::rollout_weights},
          {train_optimizer, train_reference, kv_cache, host_weights});
    check("rollout", {sections::rollout_weights, kv_cache, host_params, host_optimizer, host_reference},
          {train_params, train_optimizer, train_reference, host_weights});
    check("train", {train_params, train_optimizer, train_reference},
          {sections::rollout_weights, kv_cache, host_params, host_optimizer, host_reference});
    CHECK(mapped["train"][host_weights] == (level == 1 ? bytes(sections::rollout_weights) : 0));

    // What trace/static_memory counts: in rollout nothing of training is resident.
    const auto memory = static_memory(plan, 0);
    const auto peak = [&](const char* phase) {
      return memory.device.phase_peaks.at(static_cast<std::int16_t>(plan.phase_index(phase))).mapped_peak_bytes;
    };
    CHECK(peak("rollout") == bytes(sections::rollout_weights) + bytes(kv_cache) + mapped["rollout"][transient]);
    CHECK(peak("train") ==
          bytes(train_params) + bytes(train_optimizer) + bytes(train_reference) + mapped["train"][transient]);
  }
}

TEST_CASE("Without sleep everything stays") {
  const Plan plan = lowered(tiny(2, 1, {"rollout.sleep=false", "train.offload=none"}));
  auto mapped = mapped_after(plan);
  using namespace sections;
  for (const char* phase : {"sync", "rollout", "train"})
    for (SectionId s : {train_params, train_optimizer, sections::rollout_weights, kv_cache, transient}) {
      INFO(phase << " " << plan.program(0).section(s).name);
      CHECK(mapped[phase][s] == plan.program(0).section(s).bytes);
    }
}
