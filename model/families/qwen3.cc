// Qwen3: Qwen2 with norms of each head's queries and keys in the place of biases.
#include "model/families/parts.h"

namespace hotbunk {
namespace {

constexpr LlamaConfig qwen3_config = {.max_position = 32768,
                                      .head_dim = 128,
                                      .qk_norm = true,
                                      .windows = {.any = true, .if_used = true, .by_layer = true}};

}  // namespace

extern const FamilySpec qwen3_family = {
    .class_name = "Qwen3ForCausalLM",
    .model_type = "qwen3",
    .read = [](ConfigReader& c, ModelSpec& m) { read_llama_config(c, qwen3_config, m); },
    .write = [](const ModelSpec& m, nlohmann::json& c) { write_llama_config(m, qwen3_config, c); },
    .layer = put_llama_layer};

}  // namespace hotbunk
