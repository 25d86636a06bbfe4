// Mistral: Llama with a window.
#include "model/families/parts.h"

namespace hotbunk {
namespace {

constexpr LlamaConfig mistral_config = {
    .max_position = 131072, .writes_attention_bias = false, .windows = {.any = true}};

}  // namespace

extern const FamilySpec mistral_family = {
    .class_name = "MistralForCausalLM",
    .model_type = "mistral",
    .read = [](ConfigReader& c, ModelSpec& m) { read_llama_config(c, mistral_config, m); },
    .write = [](const ModelSpec& m, nlohmann::json& c) { write_llama_config(m, mistral_config, c); },
    .layer = put_llama_layer};

}  // namespace hotbunk
