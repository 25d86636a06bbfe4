// The operations of one layer, written once: from each come its seconds in both passes, the kernels launched and the
// bytes that backward keeps. Shapes: T tokens of the rank's micro-batch (after cp and ulysses), h hidden, a heads,
// k KV heads, d head dim, i intermediate, s sequence, e bytes of an activation element.
#pragma once
#include <initializer_list>
#include <string>
#include <vector>

#include "planner/train/train_model.h"

namespace hotbunk {

/// How products in less than 16 bits get their operands: a kernel reads the 16-bit tensor and writes it twice, along
/// rows for one product and along columns for the next (Transformer Engine quantises inputs, gradients and weights so).
struct Quantization {
  double stored_bytes = 0;  // per element of one copy, scales included; 0: nothing is quantised
  double moved_bytes = 0;   // per element by the kernels that make both
};
Quantization quantization_of(const std::string& precision);

/// Collects one layer. Every call is one operation of the framework's forward pass with its backward.
class LayerBuilder {
 public:
  LayerBuilder(const TrainModel&, const TrainPoint&, std::vector<KeptTensor>* kept = nullptr);

  /// Linear layer [rows,k] -> [rows,n] with its weight on this rank. Returns the weight gradient's seconds.
  double linear(double rows, double n, double k) { return grouped_linear(1.0, rows, n, k); }
  /// The same in 16 bits or more whatever the layers' products are in: head and router.
  double wide_linear(double rows, double n, double k) { return products(1.0, rows, n, k, wide_peak_, {}); }
  /// `groups` such layers of equal size, the experts of a rank: they share the SMs four at a time, as Transformer
  /// Engine's streams do, so that small ones leave SMs idle.
  double grouped_linear(double groups, double rows, double n, double k) {
    return products(groups, rows, n, k, peak_, quantization_);
  }
  /// A kernel that streams memory, in as many passes as the framework takes over it.
  void stream(double forward_bytes, double backward_bytes) {
    const double passes = frame_.elementwise_passes.value;
    move(passes * forward_bytes, passes * backward_bytes);
  }
  /// One that moves just these bytes: every pass is counted in them.
  void move(double forward_bytes, double backward_bytes);
  /// Kept for backward; inside a recomputed module only where selective recomputation is off.
  void keep(double mean_bytes);
  void weights(double split, double replicated);
  /// Residual stream -> norm. Its input is kept (the residual), its output too where the framework does that.
  /// `quantized`: nothing but quantised products reads the output, so their copy is what is kept.
  /// `read`: backward reads it for weight gradients of what comes behind.
  void norm(bool quantized = true, bool read = true);
  /// Kept as the input of a product, in the precision that the product reads.
  void keep_input(double elements) {
    keep((quantization_.stored_bytes > 0 ? quantization_.stored_bytes : e_) * elements);
  }
  /// Attention's output, input of its projection: where that is quantised, attention's backward needs it as it was,
  /// too.
  void keep_attended(double elements);
  bool eager() const { return frame_.eager_activations; }
  bool quantizes() const { return quantization_.stored_bytes > 0; }
  /// Bias, dropout and residual behind a row-parallel projection.
  void residual();
  /// The collectives of a tensor-parallel pair (column then row): all-reduces of [T,width] and [T,h], or gather and
  /// reduce-scatter of them under SP. `width`: of what the column side takes in, h but for latent attention.
  /// `hides_behind`: weight gradients that backward's part overlaps.
  void tensor_parallel(double hides_behind, double width);
  void tensor_parallel(double hides_behind) { tensor_parallel(hides_behind, hidden()); }
  /// What low-rank adapters add to a matrix [out,in] that is applied to `rows` rows, nothing where it has none: on this
  /// rank's slice of it, for A is whole beside one that is cut by columns and B beside one that is cut by rows.
  void adapter(ParamRole base, double rows, double out, double in, double groups = 1.0);
  /// Whether backward reads the input of these matrices: of those that train, or have adapters.
  bool reads_input(std::initializer_list<ParamRole>) const;
  /// softmax(q k^T) v over `heads` heads of width `qk` and `v` on this rank, and what it exchanges along the sequence.
  void attention(double heads, double kv_heads, double qk, double v);
  /// The recurrence of a gated delta net over `heads` value heads on this rank.
  void delta_rule(double heads, double key, double value);
  LayerCost finish(double extra_kernels);

  bool lowered() const { return frame_.lowered_ops; }
  bool frozen() const { return model_.frozen(); }

  double hidden() const { return static_cast<double>(model_.model().hidden); }
  double tokens() const { return tokens_; }
  double narrow() const { return narrow_; }
  double e() const { return e_; }
  double tp() const { return tp_; }
  double fill() const { return fill_; }
  double kernel() const {
    return frame_.kernel_overhead.value > 0.0 ? frame_.kernel_overhead.value : cost_.hardware().kernel_overhead.value;
  }
  void launches(double forward, double backward) {
    out_.kernels_forward += forward;
    out_.kernels_backward += backward;
  }
  LayerCost& out() { return out_; }

 private:
  friend class ModuleScope;
  double products(double groups, double rows, double n, double k, double peak, const Quantization&);
  /// Two batched products around a softmax whose s x s scores go through memory.
  void unfused_attention(double heads, double keys, double qk, double v);
  /// CP passes K and V around a ring, Ulysses swaps tokens for heads and back (four all-to-alls forward).
  void sequence_exchange(double heads, double kv_heads, double qk, double v);
  /// CP as PyTorch has it (torch/distributed/tensor/experimental/_attention.py): each rank gathers all K and V at once,
  /// attends to one rank's block after the other and merges the blocks in fp32 by kernels of their own.
  void torch_context(double heads, double kv_heads, double qk, double v);
  /// CP by gathers of all K and V before attention, and a reduce-scatter of their gradients behind it.
  void gathered_context(double kv_heads, double qk, double v);

  const TrainModel& model_;
  const TrainPoint& point_;
  const CostModel& cost_;
  const FrameworkProfile& frame_;
  double peak_, wide_peak_;  // of the layers' products; of attention, head and router
  Quantization quantization_;
  double e_, tokens_ = 0, narrow_ = 0, tp_ = 1;
  double exposed_context_forward_ = 0, exposed_context_backward_ = 0;  // nothing to run beside
  double fill_ = 1;  // tokens of the fullest micro-batch over those of a mean one: bytes are of it, time of the mean
  double products_ = 0, product_bytes_ = 0, attention_bytes_ = 0;  // of the forward pass
  double last_product_ = 0;                                        // seconds of the forward pass
  bool again_ = false, core_again_ = false;  // inside a recomputed module; attention's core is in one
  std::vector<KeptTensor>* kept_ = nullptr;
  LayerCost out_;
};

/// What is built in its scope belongs to `module`: where selective recomputation has it, its forward pass comes once
/// more in backward and what it keeps is dropped. A module inside a recomputed one adds nothing.
class ModuleScope {
 public:
  ModuleScope(LayerBuilder& b, RecomputeModule module)
      : b_(b), starts_(!b.again_ && b.frame_.recomputes(module) && !b.frame_.selective_products), before_(b.out_) {
    if (starts_) b_.again_ = true;
  }
  ~ModuleScope() {
    if (!starts_) return;
    b_.again_ = false;
    LayerCost& o = b_.out_;
    o.recompute_core += o.forward - before_.forward;
    o.recompute_tensor += o.tensor_forward - before_.tensor_forward;
    o.recompute_expert += o.expert_forward - before_.expert_forward;
    o.recompute_kernels += o.kernels_forward - before_.kernels_forward;
  }
  bool starts() const { return starts_; }
  ModuleScope(const ModuleScope&) = delete;
  ModuleScope& operator=(const ModuleScope&) = delete;

 private:
  LayerBuilder& b_;
  bool starts_;
  LayerCost before_;
};

/// Norm, q, k, v, positions, attention, output projection and residual: planner/train/layer_attention.cc.
/// `linear`: of a layer with linear attention.
void attention_block(LayerBuilder&, const TrainModel&, bool linear);

}  // namespace hotbunk
