// The dense decoder (Llama, Mistral, Qwen2, Qwen3) over one micro-batch of packed sequences, forward and explicit
// backward. Shape legend (graph/catalogue.h): T tokens, H hidden, a heads, k KV heads, d head dim, Q = (a + 2k) d, I
// intermediate.
//
// The residual stream of a layer's input is the sum x = h + z of the layer before (h: after attention, z: MLP output);
// the first norm of the next layer forms it, fused.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "lowering/train_state.h"

namespace hotbunk {

/// Adds heads, kv_heads, head_dim (of this rank) to an attention-like op.
Op& with_heads(Op&, std::int64_t heads, std::int64_t kv_heads, std::int64_t head_dim);
/// Adds the rotary table's parameters.
Op& with_rope(Op&, const ModelSpec&);

/// What arrives with every micro-batch.
struct TokenFeeds {
  Tensor ids, positions, cu_seqlens;
};

/// What one layer keeps from forward for backward; which of them are kept depends on train.recompute:
///   none       all of them
///   selective  not normed1, normed2, activated (elementwise, recomputed in backward)
///   full       x only; the layer's forward runs again in backward
struct LayerActivations {
  Tensor x;                   // [T,H] input (sum)
  Tensor normed1, rstd1;      // [T,H], [T]
  Tensor qkv_raw, qk_rstd;    // [T,Q], [T,a+k]; Qwen3 only (else qkv_raw is qkv)
  Tensor qkv;                 // [T,Q] after norm and rope
  Tensor attended, lse;       // [T,ad], [T,a]
  Tensor h;                   // [T,H] x + attention output
  Tensor normed2, rstd2;      // [T,H], [T]
  Tensor gate_up, activated;  // [T,2I], [T,I]
};

template <class F>
void each_tensor(LayerActivations& a, F&& visit) {
  for (Tensor* t : {&a.x, &a.normed1, &a.rstd1, &a.qkv_raw, &a.qk_rstd, &a.qkv, &a.attended, &a.lse, &a.h, &a.normed2,
                    &a.rstd2, &a.gate_up, &a.activated})
    visit(*t);
}

class Decoder {
 public:
  Decoder(const Scenario&, ProgramBuilder&, std::string prefix, TokenFeeds);

  /// The stream entering a layer: x itself, or the two parts whose sum it is.
  struct Stream {
    Tensor h;
    std::optional<Tensor> z;
  };

  Tensor embed(const WholeUnit& root);
  Stream layer_forward(const WholeUnit&, int layer, const Stream& in, LayerActivations&);
  /// Runs the layer again from `kept.x`, up to the activations that backward needs.
  void recompute_layer(const WholeUnit&, int layer, LayerActivations& kept);
  /// Recomputes only the elementwise activations (recompute: selective).
  void recompute_selective(const WholeUnit&, int layer, LayerActivations& kept);
  /// `g` [T,H] holds the gradient of the layer's output and then of its input. Writes the unit's gradients.
  void layer_backward(const WholeUnit&, const WholeUnit& gradients, int layer, const LayerActivations&, const Tensor& g,
                      bool accumulate);

  struct FinalNorm {
    Tensor x, normed, rstd;  // [T,H], [T,H], [T]
  };
  FinalNorm final_norm(const WholeUnit& root, const Stream&);

  const Tensor& ids() const { return feeds_.ids; }
  Dim T() const { return tokens(scenario_.train.micro_batch_tokens); }

 private:
  Tensor activation(const std::string& name, std::initializer_list<Dim> shape, DType);
  Tensor activation(const std::string& name, std::initializer_list<Dim> shape) {
    return activation(name, shape, compute_);
  }
  /// A layer as it goes forward.
  struct Forward {
    Stream out;
    LayerActivations kept;
    template <class F>
    friend void each_tensor(Forward& f, F&& visit) {
      visit(f.out.h);
      if (f.out.z) visit(*f.out.z);
      each_tensor(f.kept, visit);
    }
  };
  Forward forward(const WholeUnit&, int layer, const Stream& in, bool again);
  /// The same, spelled out; `suffix` tells a recomputed run's buffers from the first one's.
  Forward write_forward(const WholeUnit&, int layer, const Stream& in, const std::string& suffix);
  void write_backward(const WholeUnit&, const WholeUnit& gradients, int layer, const LayerActivations&, const Tensor& g,
                      bool accumulate);
  std::string layer_name(int layer, const char* what, const std::string& suffix = "") const;
  void attention_forward(const WholeUnit&, int layer, LayerActivations&, const std::string& suffix);
  void attention_backward(const WholeUnit&, const WholeUnit& gradients, int layer, const LayerActivations&,
                          const Tensor& g, bool accumulate);
  Op& op(OpKind, std::string name, std::vector<Tensor> inputs, std::vector<Tensor> outputs);

  const Scenario& scenario_;
  const ModelSpec& model_;
  ProgramBuilder& b_;
  std::string prefix_;
  TokenFeeds feeds_;
  DType compute_;
};

}  // namespace hotbunk
