// Qwen2 and 2.5: biases of q, k and v; a window in the layers behind the first ones, where it is used.
#include "model/families/parts.h"

namespace hotbunk {
namespace {

constexpr LlamaConfig qwen2_config = {.max_position = 32768,
                                      .qkv_bias = true,
                                      .o_bias = false,
                                      .writes_attention_bias = false,
                                      .windows = {.any = true, .if_used = true, .by_layer = true}};

}  // namespace

extern const FamilySpec qwen2_family = {
    .class_name = "Qwen2ForCausalLM",
    .model_type = "qwen2",
    .read = [](ConfigReader& c, ModelSpec& m) { read_llama_config(c, qwen2_config, m); },
    .write = [](const ModelSpec& m, nlohmann::json& c) { write_llama_config(m, qwen2_config, c); },
    .layer = put_llama_layer};

}  // namespace hotbunk
