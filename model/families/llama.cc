// Llama, 1 to 3.
#include "model/families/parts.h"

namespace hotbunk {
namespace {

constexpr LlamaConfig llama_config = {};

}  // namespace

extern const FamilySpec llama_family = {
    .class_name = "LlamaForCausalLM",
    .model_type = "llama",
    .read = [](ConfigReader& c, ModelSpec& m) { read_llama_config(c, llama_config, m); },
    .write = [](const ModelSpec& m, nlohmann::json& c) { write_llama_config(m, llama_config, c); },
    .layer = put_llama_layer};

}  // namespace hotbunk
