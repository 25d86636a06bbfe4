// The architectures that config.json may name, and the family each one is. Of two with one family the first is written.
#pragma once
#include <algorithm>
#include <string_view>

#include "spec/model.h"

namespace hotbunk {

struct Architecture {
  std::string_view class_name, model_type;
  ModelFamily family;
};
inline constexpr Architecture architectures[] = {
    {"LlamaForCausalLM", "llama", ModelFamily::llama},
    {"Qwen2ForCausalLM", "qwen2", ModelFamily::qwen2},
    {"Qwen3ForCausalLM", "qwen3", ModelFamily::qwen3},
    {"MistralForCausalLM", "mistral", ModelFamily::mistral},
    {"MixtralForCausalLM", "mixtral", ModelFamily::mixtral},
    {"Qwen3MoeForCausalLM", "qwen3_moe", ModelFamily::qwen3_moe},
    {"DeepseekV3ForCausalLM", "deepseek_v3", ModelFamily::deepseek_v3},
    {"DeepseekV2ForCausalLM", "deepseek_v2", ModelFamily::deepseek_v2},
    {"GPT2LMHeadModel", "gpt2", ModelFamily::gpt2},
    {"Gemma2ForCausalLM", "gemma2", ModelFamily::gemma2},
    {"Gemma3ForCausalLM", "gemma3_text", ModelFamily::gemma3},
    {"Glm4MoeForCausalLM", "glm4_moe", ModelFamily::glm4_moe},
    {"GptOssForCausalLM", "gpt_oss", ModelFamily::gpt_oss},
    {"Qwen3_5ForCausalLM", "qwen3_5_text", ModelFamily::qwen3_5},
};
/// The one that is written.
inline const Architecture& architecture_of(ModelFamily family) {
  return *std::ranges::find(architectures, family, &Architecture::family);
}

inline bool is_gemma(ModelFamily f) { return f == ModelFamily::gemma2 || f == ModelFamily::gemma3; }

/// Whether the layers of a family may differ in whether they have the sliding window.
inline bool has_layer_types(ModelFamily f) {
  return f == ModelFamily::qwen2 || f == ModelFamily::qwen3 || f == ModelFamily::gpt_oss || is_gemma(f);
}

}  // namespace hotbunk
