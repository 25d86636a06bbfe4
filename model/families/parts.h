// What families share: a config.json with Llama's keys, read and written; experts and latent attention as DeepSeek has
// them, which others took over; a decoder layer's parameters by Llama's names.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string_view>

#include "spec/family.h"

namespace hotbunk {

/// Sliding windows: whether a config may name one, and the layers without it.
struct Windows {
  bool any = false;
  bool if_used = false;        // only where use_sliding_window is true (Qwen)
  std::int64_t absent = 4096;  // where the config does not name sliding_window; null is none
  /// Layers may differ. Those without a window: as layer_types says; else of so many layers that follow one another the
  /// last one (`period`, or what `period_key` says), or the first ones, up to max_window_layers (where that is 0).
  bool by_layer = false;
  std::int64_t period = 0;
  std::string_view period_key = {};
};

struct Rotation {
  double theta = 10000.0;
  bool by_layer_type = false;          // layers with the window turn by their own base (rope_local_base_freq), unscaled
  RopeScaling (*scaling)() = nullptr;  // where the config says nothing of it
  double part = 0.0;  // of a head, unless partial_rotary_factor says another; 0: all of it, whatever is said
};

/// What is meant by a config with Llama's keys where one is absent, and which of them mean something.
struct LlamaConfig {
  std::int64_t kv_heads = 0;  // 0: as many as query heads
  std::int64_t max_position = 2048;
  double norm_eps = 1e-6;
  bool tie_embeddings = false;
  std::int64_t head_dim = 0;    // 0: hidden size / heads
  bool latent = false;          // latent attention says itself what a head has
  bool attention_bias = false;  // of q, k, v and o
  bool qkv_bias = false;        // of q, k and v whatever attention_bias says
  bool o_bias = true;           // as attention_bias says; else none
  bool writes_attention_bias = true;
  bool qk_norm = false, asks_qk_norm = false;  // asks: as use_qk_norm says
  bool geglu = false;                          // gelu_pytorch_tanh under hidden_activation, in the place of silu
  Windows windows = {};
  Rotation rotation = {};
};
/// All but vocabulary, tokens and what model_config.cc reads.
void read_llama_config(ConfigReader&, const LlamaConfig&, ModelSpec&);
void write_llama_config(const ModelSpec&, const LlamaConfig&, nlohmann::json&);

/// Which part of a head turns: rope_parameters say it (transformers 5), or the config itself (4).
void read_partial_rotation(ConfigReader&, const Rotation&, ModelSpec&);
/// The load-balancing loss; transformers adds it where router logits are asked for.
void read_balance(ConfigReader&, MoeSpec&);
void write_balance(const MoeSpec&, nlohmann::json&);

// Parameters of a layer.
void put_attention(const LayerParameters&);
void put_mlp(const LayerParameters&);
/// The router, and each expert's gate_proj, up_proj, down_proj; those that every token takes. `block`: in front of all.
struct ExpertNames {
  std::string_view block = "mlp.", gate = "gate_proj", up = "up_proj", down = "down_proj";
};
void put_experts(const LayerParameters&, const ExpertNames& = {});
void put_norms(const LayerParameters&);
/// All of these: attention, an MLP or experts, norms.
void put_llama_layer(const LayerParameters&);

}  // namespace hotbunk
