// What the kernels do not compute is refused op by op, before anything runs.
#include <catch2/catch.hpp>
#include <set>
#include <string>
#include <vector>

#include "backends/cuda/op_launches.h"
#include "lowering/lower.h"
#include "spec/loader.h"
#include "tests/paths.h"

using namespace hotbunk;

namespace {

/// Kinds of ops of the plan that no kernel computes as they are.
std::set<OpKind> refused(const std::vector<std::string>& model) {
  std::vector<std::string> sets = {"sync.transport=collective"};
  sets.insert(sets.end(), model.begin(), model.end());
  const auto scenario = load_scenario(std::string(source_folder) + "/scenarios/demo.yaml", sets);
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

}  // namespace

TEST_CASE("windows, caps, norms around 1 and scaled cosines are refused, not computed otherwise") {
  using Kinds = std::set<OpKind>;
  const Kinds attention = {OpKind::attention, OpKind::attention_backward, OpKind::paged_attention};
  CHECK(refused({}) == Kinds{});
  CHECK(refused({"model.model_type=mistral", "model.architectures=[MistralForCausalLM]", "model.sliding_window=5"}) ==
        attention);
  const std::string linear = "model.rope_scaling={rope_type: linear, factor: 2.0}",
                    yarn = "model.rope_scaling={rope_type: yarn, factor: 2.0, original_max_position_embeddings: 32}";
  CHECK(refused({linear}) == Kinds{});  // frequencies are a table
  CHECK(refused({yarn}) == Kinds{OpKind::rope, OpKind::rope_backward});
  Kinds gemma = attention;
  gemma.insert({OpKind::rms_norm, OpKind::rms_norm_backward, OpKind::embedding, OpKind::embedding_backward,
                OpKind::geglu, OpKind::geglu_backward, OpKind::softcap, OpKind::log_prob_backward});
  CHECK(refused({"model.model_type=gemma2", "model.architectures=[Gemma2ForCausalLM]", "model.sliding_window=5"}) ==
        gemma);
  CHECK(refused({"rollout.layout={tp: 1, cp: 2, dp: 2}"}) ==
        Kinds{OpKind::kv_write, OpKind::paged_attention, OpKind::attention_sinks});
  // Its MLP's inner width is n_inner, and its sizes are spelled otherwise than the demo's.
  CHECK(refused({"model={model_type: gpt2, n_embd: 32, n_layer: 2, n_head: 4, n_inner: 64, n_positions: 64, "
                 "vocab_size: 16, bos_token_id: 1, eos_token_id: 2}"}) ==
        Kinds{OpKind::add_bias, OpKind::layer_norm, OpKind::layer_norm_backward, OpKind::gelu, OpKind::gelu_backward});
}
