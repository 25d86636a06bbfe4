// ModelSpec: a decoder-only architecture, as a Hugging Face config.json or the catalogue states it.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/rounding.h"

namespace hotbunk {

struct FamilySpec;  // spec/family.h

/// What a parameter is for. What follows from that is in parameter_roles.h.
enum class ParamRole : std::uint8_t {
  embedding,
  lm_head,
  final_norm,
  final_norm_bias,
  position_embedding,
  input_norm,
  post_norm,
  input_norm_bias,
  post_norm_bias,
  q_proj,
  k_proj,
  v_proj,
  o_proj,
  q_bias,
  k_bias,
  v_bias,
  o_bias,
  q_norm,
  k_norm,
  gate_proj,
  up_proj,
  down_proj,
  up_bias,
  down_bias,
  router,
  router_bias,
  expert_gate,
  expert_up,
  expert_down,
  shared_gate,
  shared_up,
  shared_down,
  q_a_proj,
  q_a_norm,
  q_b_proj,
  kv_a_proj,
  kv_a_norm,
  kv_b_proj,  // multi-head latent attention
  attention_out_norm,
  mlp_out_norm,  // of what goes back into the residual stream (Gemma)
  sinks,         // a score of each query head that no key has (gpt-oss)
  router_linear_bias,
  expert_gate_bias,
  expert_up_bias,
  expert_down_bias,
  // linear attention (LinearAttentionSpec): q, k and v before their convolution; the output's gate, what a token writes
  // of itself and how fast the state decays; the convolution; decay's offset and rate; the norm of what is read
  linear_qkv,
  linear_gate,
  linear_write,
  linear_decay,
  linear_conv,
  linear_offset,
  linear_rate,
  linear_norm,
  linear_out,
  // LoRA's adapters (LoraSpec): of each matrix that has one, A (rank, in) and B (out, rank)
  q_lora_a,
  k_lora_a,
  v_lora_a,
  o_lora_a,
  gate_lora_a,
  up_lora_a,
  down_lora_a,
  q_lora_b,
  k_lora_b,
  v_lora_b,
  o_lora_b,
  gate_lora_b,
  up_lora_b,
  down_lora_b,
  q_a_lora_a,
  q_b_lora_a,
  kv_a_lora_a,
  kv_b_lora_a,
  q_a_lora_b,
  q_b_lora_b,
  kv_a_lora_b,
  kv_b_lora_b,
  expert_gate_lora_a,
  expert_gate_lora_b,
  expert_up_lora_a,
  expert_up_lora_b,
  expert_down_lora_a,
  expert_down_lora_b,
  shared_gate_lora_a,
  shared_gate_lora_b,
  shared_up_lora_a,
  shared_up_lora_b,
  shared_down_lora_a,
  shared_down_lora_b,
};
inline constexpr std::size_t num_param_roles = static_cast<std::size_t>(ParamRole::shared_down_lora_b) + 1;

/// One parameter under its Hugging Face name. Linear weights are (out, in); embeddings (vocab, hidden); norms (n).
struct ParamSpec {
  std::string name;
  std::vector<std::int64_t> shape;
  ParamRole role;
  int layer = -1;       // -1: embedding, final norm, head
  int expert = -1;      // routed expert, else -1
  bool frozen = false;  // it does not train (ModelSpec::frozen)

  std::int64_t numel() const {
    std::int64_t n = 1;
    for (std::int64_t extent : shape) n *= extent;
    return n;
  }
};

/// Rotary scaling. `type` is Hugging Face's rope_type: "llama3", "linear" and "yarn" are executed; "dynamic" and
/// "longrope" plan only.
struct RopeScaling {
  std::string type = "llama3";
  double factor = 1.0, low_freq_factor = 1.0, high_freq_factor = 4.0;
  std::int64_t original_max_position = 8192;
  // of yarn: rotations over the original positions, above which a pair keeps its frequency and below which it is
  // divided
  double beta_fast = 32.0, beta_slow = 1.0;
  bool truncate = true;           // the pairs between the two begin and end at whole ones
  double attention_factor = 1.0;  // of cosines and sines
  double mscale_all_dim = 0.0;    // of yarn in DeepSeek: scores of attention are scaled by it; 0: they are not
  /// Of scores, beside 1/sqrt(head_dim): (0.1 mscale_all_dim ln factor + 1)^2. Source: transformers,
  /// DeepseekV3Attention.
  double score_scale() const;
  bool operator==(const RopeScaling&) const = default;
};

struct MoeSpec {
  std::int64_t experts = 0;            // routed experts; 0 = dense
  std::int64_t experts_per_token = 0;  // top-k
  std::int64_t expert_intermediate = 0;
  std::int64_t shared_experts = 0;                // each of expert_intermediate width
  std::int64_t first_dense_layers = 0;            // layers before the first MoE layer (DeepSeek-V3: 3)
  std::int64_t groups = 1, topk_groups = 1;       // experts come from the best topk_groups of so many equal groups
  bool sigmoid_scores = false, norm_topk = true;  // scores: sigmoid of logits, else their softmax over all experts
  bool router_bias = false;     // added to scores where experts are chosen, and nowhere else; no gradient reaches it
  double routed_scaling = 1.0;  // of what routed experts make
  double balance_loss = 0.0;    // coefficient of the load-balancing loss that training adds
  double router_jitter = 0.0;   // noise on what a router sees in training
  bool biases = false;          // of the router's product and of experts'
  /// of experts' MLP: gates are at most this, ups in ± this; their product is (up + 1) gate sigmoid(alpha gate). 0:
  /// none
  double swiglu_limit = 0.0, swiglu_alpha = 1.0;
  bool operator==(const MoeSpec&) const = default;
};

struct MlaSpec {
  std::int64_t q_lora_rank = 0;  // 0: q is a plain projection
  std::int64_t kv_lora_rank = 0, qk_nope_head_dim = 0, qk_rope_head_dim = 0, v_head_dim = 0;
  /// What a layer keeps of a token: its latent and the rotated part of its key, which all heads share.
  std::int64_t kept_dim() const { return kv_lora_rank + qk_rope_head_dim; }
  bool operator==(const MlaSpec&) const = default;
};

/// Gated delta nets in the place of attention in some layers (Qwen3.5): a causal convolution over q, k and v, then a
/// state of key_dim x value_dim numbers for each value head, which every token decays and writes to. What a sequence
/// leaves behind is of one size however long it is.
/// Source: transformers' Qwen3_5GatedDeltaNet; Yang et al., Gated Delta Networks (arXiv 2412.06464).
struct LinearAttentionSpec {
  std::int64_t key_heads = 16, value_heads = 32, key_dim = 128, value_dim = 128;
  std::int64_t kernel = 4;   // tokens that the convolution sees
  std::vector<bool> layers;  // [layer] that is one of these; the others attend to all tokens
  std::int64_t keys() const { return key_heads * key_dim; }
  std::int64_t values() const { return value_heads * value_dim; }
  std::int64_t convolved() const { return 2 * keys() + values(); }
  /// Numbers that a sequence leaves in a layer: of the state, kept in fp32 (mamba_ssm_dtype), and of the convolution.
  std::int64_t state() const { return values() * key_dim; }
  std::int64_t tail() const { return convolved() * (kernel - 1); }
  bool operator==(const LinearAttentionSpec&) const = default;
};

/// Low-rank adapters beside matrices of a model that is frozen itself: y = x W^T + alpha/rank (x A^T) B^T. They alone
/// are trained. Source: Hu et al., LoRA (2021); names and initial values as PEFT has them (peft.LoraConfig).
struct LoraSpec {
  std::int64_t rank = 0;  // 0: none, all of the model is trained
  double alpha = 8.0;
  std::string targets = "all-linear";  // the matrices' names joined by -: "q_proj-v_proj"; all-linear: every one
  std::string adapter;                 // folder of PEFT's that training begins with; empty: A at random, B zero
  bool on() const { return rank > 0; }
  double factor() const { return alpha / static_cast<double>(rank); }
  bool operator==(const LoraSpec&) const = default;
};

/// A matrix that may have an adapter, by the name of its module in the family's files, and the roles of the two. Of
/// matrices that are one module (GPT-2's c_attn) all have one A, and B has the rows of each. `op`: what its ops are
/// called.
struct LoraTarget {
  std::string_view module;
  ParamRole base, a, b;
  std::string_view op = module;
};
/// Those of most families; lora_targets_of() has each one's.
inline constexpr std::array lora_targets = {
    LoraTarget{"q_proj", ParamRole::q_proj, ParamRole::q_lora_a, ParamRole::q_lora_b},
    LoraTarget{"k_proj", ParamRole::k_proj, ParamRole::k_lora_a, ParamRole::k_lora_b},
    LoraTarget{"v_proj", ParamRole::v_proj, ParamRole::v_lora_a, ParamRole::v_lora_b},
    LoraTarget{"o_proj", ParamRole::o_proj, ParamRole::o_lora_a, ParamRole::o_lora_b},
    LoraTarget{"gate_proj", ParamRole::gate_proj, ParamRole::gate_lora_a, ParamRole::gate_lora_b},
    LoraTarget{"up_proj", ParamRole::up_proj, ParamRole::up_lora_a, ParamRole::up_lora_b},
    LoraTarget{"down_proj", ParamRole::down_proj, ParamRole::down_lora_a, ParamRole::down_lora_b}};
bool is_adapter(ParamRole);

struct ModelSpec {
  std::string name;
  const FamilySpec* family = nullptr;  // one of families(); what a model computes does not depend on it
  std::int64_t hidden = 0, intermediate = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0, vocab = 0;
  std::int64_t max_position = 0;
  double rope_theta = 10000.0;
  std::optional<RopeScaling> rope_scaling;
  std::int64_t rotary_dim = 0;     // only so many numbers of a head turn, its first ones; 0: all of them
  double window_rope_theta = 0.0;  // of layers with the window, without scaling; 0: these turn as the others do
  double norm_eps = 1e-6;
  double init_range = 0.02;  // standard deviation of random initialisation
  bool tie_embeddings = false, qkv_bias = false, o_bias = false, mlp_bias = false, qk_norm = false;
  bool gated_mlp = true;                                // SwiGLU (gate, up, down); GPT: up, down with GELU
  bool learned_positions = false, layer_norm = false;   // GPT family
  std::int64_t sliding_window = 0;                      // 0: full attention
  std::vector<bool> full_layers;                        // [layer] without the window; empty: none
  bool attention_sinks = false;                         // softmax over keys counts a score of the head's own besides
  bool geglu = false;                                   // the gated MLP's activation is GELU by tanh, not SiLU
  bool output_norms = false;                            // of what attention and MLP add to the residual stream
  double norm_offset = 0.0;                             // norms multiply by weight + this
  bool scaled_embedding = false;                        // by sqrt(hidden)
  double attention_softcap = 0.0, logit_softcap = 0.0;  // x becomes cap tanh(x / cap); 0: not
  double query_scalar = 0.0;                            // scores are divided by its root; 0: by head_dim's
  std::optional<MoeSpec> moe;
  std::optional<MlaSpec> mla;
  std::optional<LinearAttentionSpec> linear;
  bool gated_attention = false;  // q's projection has a gate of attention's output beside it
  LoraSpec lora;
  std::string frozen;  // patterns of parameters that do not train, joined by -; empty: none
  /// A tensor-parallel rank of training has a multiple of so many rows of the vocabulary; 0: as the framework does it
  /// (ours: 1).
  std::int64_t vocab_multiple = 0;
  std::int64_t eos_token = -1, bos_token = -1;  // -1: none
  std::string weights_path;                     // folder with safetensors; empty: random initialisation
  std::string hub_name;  // as the scenario names it on the Hugging Face hub: weights are meant, and are not here

  std::int64_t q_rows() const { return heads * head_dim; }
  /// What a head's values have: head_dim, but for latent attention.
  std::int64_t value_dim() const { return mla ? mla->v_head_dim : head_dim; }
  std::int64_t kv_rows() const { return kv_heads * head_dim; }
  /// Rows of the embedding, and of the head, on each of so many tensor-parallel ranks of training: those past the
  /// vocabulary are padding, of the last ranks.
  std::int64_t vocab_rows(std::int64_t tp) const {
    return round_up(ceil_div(vocab, tp), vocab_multiple > 0 ? vocab_multiple : 1);
  }
  /// Tokens that a query of the layer sees, itself the last; 0: all before it.
  std::int64_t window_of(int layer) const;
  bool is_linear_layer(int layer) const {
    return linear && layer < static_cast<int>(linear->layers.size()) && linear->layers[static_cast<std::size_t>(layer)];
  }
  /// Layers with linear attention, of all.
  std::int64_t linear_layers() const {
    std::int64_t out = 0;
    for (int layer = 0; linear && layer < layers; ++layer) out += is_linear_layer(layer) ? 1 : 0;
    return out;
  }
  /// The share of layers that keep keys and values of every token.
  double attending_share() const {
    return layers > 0 ? 1.0 - static_cast<double>(linear_layers()) / static_cast<double>(layers) : 1.0;
  }
  bool is_moe_layer(int layer) const { return moe && moe->experts > 0 && layer >= moe->first_dense_layers; }
  /// Whether the matrix has an adapter.
  bool adapts(ParamRole base) const;
  /// Whether experts' matrices have adapters, each expert its own.
  bool adapts_experts() const;
  /// Whether something of it is trained and something not.
  bool trains_in_part() const { return lora.on() || !frozen.empty(); }
  /// Whether parameters of the role are trained, but for those that are frozen by name: with adapters, these alone are.
  bool trains(ParamRole role) const { return !lora.on() || is_adapter(role); }
  bool operator==(const ModelSpec&) const = default;
};

/// The model without its adapters.
ModelSpec base_of(ModelSpec);
/// Of the matrices of its layers those that may have adapters, in their order; nullptr: not this one.
std::vector<LoraTarget> lora_targets_of(const ModelSpec&);
const LoraTarget* lora_target(const ModelSpec&, ParamRole base);
/// Whether q, k and v are one module, whose adapter has one A (GPT-2's c_attn).
bool one_adapter_of_qkv(const ModelSpec&);
/// Which layers of a model are asked for; empty: all. A pipeline stage has few, and a mixture of experts some thousand
/// parameters in each.
using LayerFilter = std::function<bool(int layer)>;

/// Its adapters' parameters, layer by layer in the order of their matrices: NAME.lora_A.weight, NAME.lora_B.weight;
/// where matrices are one module, its A, and B by matrix.
std::vector<ParamSpec> adapters_of(const ModelSpec&, const LayerFilter& wanted = {});

/// Every parameter but adapters' in Hugging Face order (embedding, layers, final norm, head). Tied heads have no entry
/// of their own.
std::vector<ParamSpec> parameters_of(const ModelSpec&, const LayerFilter& wanted = {});

/// Sum over parameters_of, without building the list (any size of model).
std::int64_t parameter_count(const ModelSpec&);
/// The same sum in floating point (exact below 2^63): judges sizes read from a file before integers overflow.
long double approximate_parameter_count(const ModelSpec&);
/// Parameters that one token touches (routed experts counted experts_per_token times).
std::int64_t active_parameter_count(const ModelSpec&);

}  // namespace hotbunk
