// Models whose layers differ in whether they attend to all tokens or keep a state (Qwen3.5).
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include "spec/catalog.h"
#include "spec/loader.h"
#include "spec/model_config.h"
#include "spec/validate.h"

using namespace hotbunk;

TEST_CASE("Qwen3.5: three of four layers have linear attention; parameters are transformers'") {
  const auto model = load_model(catalog_file("models", "qwen3.5-9b"));
  REQUIRE(model.has_value());
  REQUIRE(model->linear.has_value());
  CHECK(model->linear_layers() == 24);
  CHECK(model->is_linear_layer(0));
  CHECK_FALSE(model->is_linear_layer(3));
  CHECK(model->rotary_dim == 64);
  // transformers 5.23, Qwen3_5ForCausalLM of this config: of a layer with linear attention 8192 x 4096 (q, k, v) + 4096
  // x 4096 (gate) + 2 x 32 x 4096 + 8192 x 4 (convolution) + 2 x 32 + 128 + 4096 x 4096 (output), of one without 8192 x
  // 4096 (queries and their gate) + 2 x 1024 x 4096 + 4096 x 4096 + 2 x 256; 3 x 12288 x 4096 and two norms in each.
  constexpr std::int64_t linear = 8192LL * 4096 + 4096 * 4096 + 2 * 32 * 4096 + 8192 * 4 + 2 * 32 + 128 + 4096 * 4096,
                         full = 8192LL * 4096 + 2 * 1024 * 4096 + 4096 * 4096 + 2 * 256,
                         others = 3LL * 12288 * 4096 + 2 * 4096, ends = 2LL * 248320 * 4096 + 4096;
  CHECK(parameter_count(*model) == 24 * (linear + others) + 8 * (full + others) + ends);
  std::int64_t sum = 0;
  for (const ParamSpec& p : parameters_of(*model)) sum += p.numel();
  CHECK(sum == parameter_count(*model));
}

TEST_CASE("Qwen3.5: a config with a vision tower is that of the language model in it; it comes back as it was") {
  const auto model = model_from_text(
      R"({"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": true,
          "vision_config": {"depth": 2}, "text_config": {"model_type": "qwen3_5_text", "hidden_size": 64,
          "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
          "vocab_size": 100, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
          "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16}})",
      "config.json", "small");
  if (!model) FAIL(render(model.error()));
  CHECK(model->tie_embeddings);
  CHECK(model->linear_layers() == 2);
  CHECK(model->linear->convolved() == 2 * 2 * 8 + 4 * 16);
  const auto back = model_from_text(config_of(*model, DType::bf16).dump(), "back.json", "small");
  if (!back) FAIL(render(back.error()));
  CHECK(*back == *model);
  const auto wrong = model_from_text(
      R"({"model_type": "qwen3_5_text", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
          "num_attention_heads": 2, "vocab_size": 100, "layer_types": ["linear_attention"]})",
      "wrong.json", "wrong");
  REQUIRE_FALSE(wrong.has_value());
  CHECK(wrong.error()[0].code == "E411");
}

TEST_CASE("Qwen3.5 is planned, not executed, and that is said") {
  const auto s = load_scenario_text(
      "model: qwen3.5-9b\ncluster: {gpu: h100-sxm-80gb}\n"
      "train: {engine: fsdp2, layout: {dp: 8}}\nrollout: {engine: hotbunk, layout: {dp: 8}}\n",
      "qwen.yaml");
  if (!s) FAIL(render(s.error()));
  const auto reasons = unsupported_to_execute(*s);
  REQUIRE_FALSE(reasons.empty());
  CHECK_THAT(reasons[0], Catch::Contains("linear attention") && Catch::Contains("24 of 32 layers"));
}
