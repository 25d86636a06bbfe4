#include "tiny.h"

#include <fmt/format.h>

#include "base/check.h"
#include "lowering/lower.h"
#include "spec/loader.h"
#include "tests/blocks.h"

namespace hotbunk::test {

Scenario tiny(int world, int tp, std::vector<std::string> sets) {
  const std::string text = fmt::format(R"(
name: tiny
model: {{model_type: llama, architectures: [LlamaForCausalLM], hidden_size: 24, intermediate_size: 40, num_hidden_layers: 3,
  num_attention_heads: 4, num_key_value_heads: 2, head_dim: 6, vocab_size: 33, max_position_embeddings: 64,
  rms_norm_eps: 1.0e-5, rope_theta: 10000.0, tie_word_embeddings: false}}
cluster: {{gpu: local-cpu, nodes: 1, gpus_per_node: 1, ranks_per_device: {0}, device_memory_mib: 1, host_memory_gib: 24}}
train: {{layout: {{dp: {0}}}, micro_batch_tokens: 64, precision: {{params: fp32}}, offload: sleep}}
rollout: {{engine: hotbunk, layout: {{tp: {1}, dp: {2}}}, max_running_requests: 6, max_prefill_tokens: 24, block_tokens: 4,
  kv_cache_tokens: 40}}
sync: {{bucket_mib: 0.008}}
algorithm: {{name: grpo, prompts: 5, samples_per_prompt: 4}}
workload: {{prompt_tokens: {{mean: 5, max: 5}}, response_tokens: {{mean: 4, max: 6}}}}
task: {{name: reverse, digits: 3}}
)",
                                       world, tp, world / tp);
  auto s = load_scenario_text(text, "tiny.yaml", sets);
  HB_CHECK(s.has_value(), "{}", render(s.error()));
  return *s;
}

Plan lowered(const Scenario& s) {
  auto plan = lower(s);
  HB_CHECK(plan.has_value(), "{}", render(plan.error()));
  return *plan;
}

std::vector<Op> ops_of(const Plan& plan, Rank rank, std::string_view phase, std::string_view block) {
  const std::int32_t index = plan.phase_index(phase);
  HB_CHECK(index >= 0, "no phase {}", phase);
  for (const Block& b : plan.program(rank).phases[static_cast<std::size_t>(index)])
    if (b.name == block) return ops_of(plan.program(rank), b);
  throw InternalError(fmt::format("no block {} in {}", block, phase));
}

}  // namespace hotbunk::test
