#include "planner/train/layer_builder.h"

#include <algorithm>
#include <cmath>

namespace hotbunk {

LayerBuilder::LayerBuilder(const TrainModel& m, const TrainPoint& p, std::vector<KeptTensor>* kept)
    : model_(m),
      point_(p),
      cost_(m.cost()),
      frame_(m.framework()),
      peak_(m.peak_),
      wide_peak_(m.wide_peak_),
      quantization_(quantization_of(m.setting().precision)),
      e_(m.setting().element_bytes),
      kept_(kept) {
  const double padding = m.padding_tokens(p), all = static_cast<double>(p.micro_batch * m.setting().sequence) + padding;
  tokens_ = all / static_cast<double>(p.cp * p.ulysses);
  // Our buffers are of their capacity, padding included; others' budgets count what is trained.
  fill_ = m.filled_tokens(p, m.fullest_tokens(p)) / all;
  if (!frame_.lowered_ops) fill_ = std::max(1.0, fill_);
  tp_ = static_cast<double>(p.tp);
  narrow_ = p.sp ? tokens_ / tp_ : tokens_;  // tokens where norms, dropout and residuals run
}

Quantization quantization_of(const std::string& precision) {
  // Transformer Engine's recipes (docs, "Using FP8 and FP4"). One scale per tensor (current scaling): a pass for the
  // maximum 2 B, then 2 B read and 1 B written twice. MXFP8: a scale byte per 32, no pass before. NVFP4: a scale byte
  // per 16 of half a byte each, after a pass for the tensor's own scale.
  if (precision == "fp8") return {.stored_bytes = 1.0, .moved_bytes = 2.0 + 2.0 + 2.0 * 1.0};
  if (precision == "mxfp8") return {.stored_bytes = 1.0 + 1.0 / 32, .moved_bytes = 2.0 + 2.0 * (1.0 + 1.0 / 32)};
  if (precision == "nvfp4") return {.stored_bytes = 0.5 + 1.0 / 16, .moved_bytes = 2.0 + 2.0 + 2.0 * (0.5 + 1.0 / 16)};
  return {};
}

double LayerBuilder::products(double groups, double rows, double n, double k, double peak, const Quantization& q) {
  const double together = std::min(groups, 4.0), batches = groups / together, m = together * rows;
  const double operand = q.stored_bytes > 0 ? q.stored_bytes : e_, overhead = kernel();
  // Weight gradients are added to what is there, written by our own ops, or written as activations are.
  const double grads = model_.setting().state.grads;
  const double grad = frame_.lowered_ops ? grads : frame_.fused_accumulation ? 2.0 * grads : e_;
  const auto seconds = [&](double m_, double n_, double k_, double bytes) {
    return batches * (cost_.gemm_seconds(m_, n_, k_, peak, together * bytes) + overhead);
  };
  double product = seconds(m, n, k, operand * (rows * k + n * k) + e_ * rows * n);
  double input = seconds(m, k, n, operand * (rows * n + n * k) + e_ * rows * k);
  const bool trains = !frozen();
  const double weight = trains ? seconds(together * n, k, rows, operand * rows * (n + k) + grad * n * k) : 0.0;
  if (q.moved_bytes > 0) {  // the weights once per step: TrainModel::step_end
    product += cost_.memory_seconds(q.moved_bytes * groups * rows * k) + overhead;
    input += cost_.memory_seconds(q.moved_bytes * groups * rows * n) + overhead;
    launches(1, 1);
  }
  out_.forward += product;
  out_.backward += input + weight;
  out_.weight_grad += weight;
  if (trains) out_.weight_grad_kernels += groups;
  if (trains && !frame_.fused_accumulation)  // reads both, writes one
    out_.accumulate += cost_.memory_seconds(3.0 * model_.setting().state.grads * groups * n * k) + overhead;
  out_.flops_forward += 2.0 * groups * rows * n * k;
  products_ += product;
  last_product_ = product;
  product_bytes_ += e_ * groups * rows * n;
  launches(groups, (trains ? 2.0 : 1.0) * groups);
  return weight;
}

bool LayerBuilder::reads_input(std::initializer_list<ParamRole> matrices) const {
  return !frozen() || std::ranges::any_of(matrices, [&](ParamRole m) { return model_.model().adapts(m); });
}

/// u = x A^T, y += f u B^T; backward d = f dy B, dB = dy^T u, dA = d^T x, dx += d A. Ours computes u once more in
/// backward; PEFT keeps it, scales what B makes and adds it, each by a kernel of its own (peft/tuners/lora/layer.py).
void LayerBuilder::adapter(ParamRole base, double rows, double out, double in, double groups) {
  if (!model_.model().adapts(base)) return;
  const double r = static_cast<double>(model_.model().lora.rank), before = out_.forward,
               launched = out_.kernels_forward;
  const auto product = [&](double m, double n, double k) {
    return groups * cost_.gemm_seconds(m, n, k, wide_peak_, e_ * (m * k + n * k + m * n)) + kernel();
  };
  const double down = product(rows, r, in);
  out_.forward += down + product(rows, out, r);
  out_.backward += product(rows, r, out) + product(out, r, rows) + product(r, in, rows) + product(rows, in, r);
  launches(2, 4);
  if (frame_.lowered_ops) {
    out_.backward += down;
    launches(0, 1);
  } else {
    keep(e_ * groups * rows * r);
    move(2.0 * e_ * groups * rows * out, 2.0 * e_ * groups * rows * out);
    move(3.0 * e_ * groups * rows * out, 3.0 * e_ * groups * rows * in);
  }
  const double elements = groups * r * (in + out);
  if (!frame_.fused_accumulation)
    out_.accumulate += cost_.memory_seconds(3.0 * model_.setting().state.grads * elements) + 2.0 * kernel();
  out_.adapter_parameters += elements;
  out_.adapters_forward += out_.forward - before;
  last_product_ += out_.forward - before;
  out_.adapter_kernels += out_.kernels_forward - launched;
}

void LayerBuilder::move(double forward_bytes, double backward_bytes) {
  out_.forward += cost_.memory_seconds(forward_bytes) + (forward_bytes > 0 ? kernel() : 0.0);
  out_.backward += cost_.memory_seconds(backward_bytes) + (backward_bytes > 0 ? kernel() : 0.0);
  launches(forward_bytes > 0 ? 1 : 0, backward_bytes > 0 ? 1 : 0);
}

void LayerBuilder::keep(double mean_bytes) {
  const double bytes = fill_ * mean_bytes;
  out_.kept_bytes += bytes;
  if (!again_) out_.kept_selective_bytes += bytes;
  if (kept_ && bytes > 0) kept_->push_back({bytes, again_});
}

void LayerBuilder::weights(double split, double replicated) {
  out_.parameters += split / tp_ + replicated;
  out_.largest_weights += split / tp_;
}

void LayerBuilder::keep_attended(double elements) {
  if (frame_.lowered_ops && !quantizes()) {  // one tensor, of attention and of the product behind it
    const ModuleScope module(*this, RecomputeModule::core_attn);
    return keep_input(elements);
  }
  if (quantizes()) {
    const ModuleScope module(*this, RecomputeModule::core_attn);
    keep(e_ * elements);
  }
  keep_input(elements);
}

void LayerBuilder::norm(bool quantized, bool read) {
  const double h = hidden();
  // transformers' RMSNorm: hidden.to(float32) is kept for the square and the product, the normalised copy for the
  // weight.
  keep((frame_.eager_activations ? 4.0 : e_) * narrow_ * h);
  const ModuleScope module(*this, RecomputeModule::layernorm);
  if (frame_.eager_activations && !frozen()) keep(e_ * narrow_ * h);
  if (frame_.lowered_ops) {
    // Ours adds the branch to the stream on the way, and its gradient on the way back; run again, it finds the sum.
    stream(4.0 * e_ * narrow_ * h, 3.0 * e_ * narrow_ * h);
    if (module.starts()) out_.recompute_core -= cost_.memory_seconds(2.0 * e_ * narrow_ * h);
  } else {
    // Backward reads the output's gradient and the input, writes the input's gradient, and the weight's gradient takes
    // half a pass more over what is mostly in L2 (stated).
    stream(2.0 * e_ * narrow_ * h, 3.5 * e_ * narrow_ * h);
  }
  if (read && quantized) keep_input(narrow_ * h);
  else if (read) keep(e_ * narrow_ * h);
  weights(0.0, h * (model_.model().layer_norm ? 2.0 : 1.0));
}

void LayerBuilder::residual() {
  const double h = hidden(), mask = frame_.dropout ? 1.0 : 0.0;
  if (!frame_.lowered_ops) stream(narrow_ * h * (3.0 * e_ + mask), narrow_ * h * (2.0 * e_ + mask));
  if (frame_.dropout) keep(narrow_ * h);
}

void LayerBuilder::tensor_parallel(double hides_behind, double width) {
  if (point_.tp <= 1) return;
  const GroupShape group = model_.groups(point_).tensor();
  const double in = e_ * tokens_ * width, out = e_ * tokens_ * hidden();
  const auto seconds = [&](OpKind kind, double bytes) { return cost_.collective_seconds(kind, group, bytes); };
  const double each = frame_.collective_kernels.value;
  double hideable = 0.0;
  if (point_.sp) {
    // Backward gathers the output's gradient, and the kept shard of the input once more beside the input gradient.
    const double gather = seconds(OpKind::all_gather, in), scatter = seconds(OpKind::reduce_scatter, in);
    out_.tensor_forward += gather + seconds(OpKind::reduce_scatter, out);
    out_.tensor_backward += seconds(OpKind::all_gather, out) + gather + scatter;
    out_.tensor_payload += 3.0 * in + 2.0 * out;
    hideable = gather + scatter;
    launches(2.0 * each, 3.0 * each);
  } else {
    hideable = seconds(OpKind::all_reduce, in);
    out_.tensor_forward += seconds(OpKind::all_reduce, out);
    out_.tensor_backward += hideable;
    out_.tensor_payload += in + out;
    launches(each, each);
  }
  out_.hidden_tensor += std::min(hideable, hides_behind);
}

void LayerBuilder::attention(double heads, double kv_heads, double qk, double v) {
  const TrainSetting& s = model_.setting();
  const double all_keys = static_cast<double>(s.sequence);
  const double causal = s.mean_keys > 0 ? s.mean_keys : (all_keys + 1.0) / 2.0;
  // Ulysses trades tokens for heads: the products stay the same.
  const double keys = frame_.fused_attention ? causal : all_keys;
  const double products = 2.0 * tokens_ * keys * heads * (qk + v);
  out_.flops_forward += 2.0 * tokens_ * causal * heads * (qk + v);
  const ModuleScope module(*this, RecomputeModule::core_attn);
  core_again_ = again_;
  const double before_forward = out_.forward, before_backward = out_.backward;
  if (frame_.repeated_kv && kv_heads < heads) {
    const double copied = e_ * tokens_ * (qk + v);
    stream(copied * (kv_heads + heads), copied * (kv_heads + heads));
    kv_heads = heads;
  }
  if (frame_.fused_attention) {
    const AttentionKernel which = frame_.flash2_attention ? AttentionKernel::flash2 : AttentionKernel::library;
    const double bytes = e_ * tokens_ * (heads * (qk + v) + kv_heads * (qk + v));
    out_.forward += cost_.attention_seconds(products, keys, bytes, false, wide_peak_, which) + kernel();
    out_.backward += cost_.attention_seconds(2.5 * products, keys, 2.5 * bytes, true, wide_peak_, which) +
                     (frame_.lowered_ops ? 1.0 : 2.0) * kernel();
    launches(1, 2);
    keep(4.0 * tokens_ * heads);
  } else {
    unfused_attention(heads, keys, qk, v);
  }
  out_.attention_forward = out_.forward - before_forward;
  out_.attention_backward = out_.backward - before_backward;
  attention_bytes_ = e_ * tokens_ * heads * v;
  sequence_exchange(heads, kv_heads, qk, v);
}

/// Chunks of C = 64 tokens (flash-linear-attention's chunk_gated_delta_rule): per head and token products among the
/// chunk's tokens, 2 C key for K K^T and for Q K^T, 2 C (key + value) for the solved K and V, 2 C value for what is
/// read of them; with the state 2 key value each to correct V, to read and to write. Six kernels, twice as many back.
/// Kept are the solved triangle and two numbers a token in fp32; states of chunks are computed again.
void LayerBuilder::delta_rule(double heads, double key, double value) {
  constexpr double chunk = 64.0;
  const double products = tokens_ * heads * (6.0 * key * value + 2.0 * chunk * (3.0 * key + 2.0 * value));
  const double bytes = e_ * tokens_ * heads * (2.0 * key + 2.0 * value + 2.0 * chunk);
  // What the model needs: a token reads, corrects and writes the state (as verl/utils/flops_counter.py counts it).
  out_.flops_forward += 5.0 * tokens_ * heads * key * value;
  const AttentionKernel which = frame_.flash2_attention ? AttentionKernel::flash2 : AttentionKernel::library;
  out_.forward += cost_.attention_seconds(products, chunk, bytes, false, wide_peak_, which) + 6.0 * kernel();
  out_.backward +=
      cost_.attention_seconds(2.5 * products, chunk, 2.5 * bytes, true, wide_peak_, which) + 12.0 * kernel();
  launches(6, 12);
  keep(tokens_ * heads * (e_ * chunk + 8.0));
}

void LayerBuilder::unfused_attention(double heads, double keys, double qk, double v) {
  const double scores = tokens_ * keys * heads, mask = frame_.dropout ? 5.0 : 0.0;
  const double rows = tokens_ * heads;
  const double overhead = kernel();
  out_.forward += cost_.gemm_seconds(rows, keys, qk, wide_peak_, 0.0) +
                  cost_.gemm_seconds(rows, v, keys, wide_peak_, 0.0) + 2.0 * overhead;
  out_.backward +=
      2.0 * (cost_.gemm_seconds(rows, keys, qk, wide_peak_, 0.0) + cost_.gemm_seconds(rows, v, keys, wide_peak_, 0.0)) +
      4.0 * overhead;
  launches(2, 4);
  stream(scores * (4.0 * e_ + mask), scores * (7.0 * e_ + mask));
  if (std::fmod(static_cast<double>(point_.micro_batch) * heads, 4.0) != 0.0)
    launches(frame_.softmax_kernels.value, frame_.backward_kernels.value * frame_.softmax_kernels.value);
  keep(scores * e_);
  if (frame_.dropout) keep(scores * (e_ + 1.0));
}

void LayerBuilder::sequence_exchange(double heads, double kv_heads, double qk, double v) {
  if (point_.cp > 1 && model_.gathers_context()) {
    if (frame_.gathered_context) torch_context(heads, kv_heads, qk, v);
    else gathered_context(kv_heads, qk, v);
  } else if (point_.cp > 1) {
    const auto steps = static_cast<double>(point_.cp - 1);
    const GroupShape pair = model_.groups(point_).context();
    const double block = e_ * tokens_ * kv_heads * (qk + v);
    const double seconds = steps * cost_.collective_seconds(OpKind::send, {2, pair.nodes > 1 ? 2 : 1, 1}, block);
    out_.ring_forward += seconds;
    out_.ring_backward += 2.0 * seconds;
    out_.context_payload += 3.0 * steps * block;
    launches(point_.cp, 2 * point_.cp);
  }
  if (point_.ulysses > 1) {
    const auto ways = static_cast<double>(point_.ulysses);
    const GroupShape group = model_.groups(point_).ulysses();
    const double repeat = std::max(1.0, ways / std::max(kv_heads, 1.0));
    const double share = (ways - 1.0) / ways * e_ * tokens_;
    const double sent[] = {share * heads * qk, share * kv_heads * repeat * qk, share * kv_heads * repeat * v,
                           share * heads * v};
    for (double bytes : sent) {
      const double seconds = cost_.collective_seconds(OpKind::all_to_all, group, bytes);
      exposed_context_forward_ += seconds;
      exposed_context_backward_ += seconds;
      out_.context_payload += 2.0 * bytes;
    }
    launches(4, 4);
  }
}

/// All keys and values in front of attention, forward and backward, and their gradients in fp32 behind it.
void LayerBuilder::gathered_context(double kv_heads, double qk, double v) {
  const GroupShape group = model_.groups(point_).context();
  const double all = static_cast<double>(point_.cp) * tokens_ * kv_heads * (qk + v);
  const double gather = cost_.collective_seconds(OpKind::all_gather, group, e_ * all);
  exposed_context_forward_ += gather;
  exposed_context_backward_ += gather + cost_.collective_seconds(OpKind::reduce_scatter, group, 4.0 * all);
  out_.context_payload += 2.0 * e_ * all + 4.0 * all;
  launches(2, 4);
}

void LayerBuilder::torch_context(double heads, double kv_heads, double qk, double v) {
  const auto ways = static_cast<double>(point_.cp);
  const GroupShape group = model_.groups(point_).context();
  const double own = tokens_ * kv_heads * (qk + v), out = tokens_ * heads * v;
  // The gather runs beside the rank's own block; what is left of it is waited for.
  const double gather = cost_.collective_seconds(OpKind::all_gather, group, ways * e_ * own);
  exposed_context_forward_ += std::max(0.0, gather - out_.attention_forward / ways);
  // Gradients of K and V travel in fp32, one step behind every block; the last finds nothing to run beside.
  const double pass = cost_.collective_seconds(OpKind::send, {2, group.nodes > 1 ? 2 : 1, 1}, 4.0 * own);
  exposed_context_backward_ += std::max(0.0, gather - out_.attention_backward / ways) + pass +
                               (ways - 1.0) * std::max(0.0, pass - out_.attention_backward / ways);
  out_.context_payload += 2.0 * ways * e_ * own + ways * 4.0 * own;
  launches(1 + 9 * point_.cp, 1 + 9 * point_.cp);
  // Every block is cast (6 B an element) and merged: difference 12, weight 8, sum 12; the result is cast back. In
  // backward three gradients are added to fp32 sums (10), those of K and V packed for the next rank (8).
  const double blocks = ways - 1.0;
  move((6.0 * ways + 32.0 * blocks + 6.0) * out, ways * (10.0 * tokens_ * heads * qk + 18.0 * own));
}

LayerCost LayerBuilder::finish(double extra_kernels) {
  // Kernels that are not listed (views made contiguous, casts, masks) occupy the device for a moment each.
  const double backward = frame_.backward_kernels.value * extra_kernels;
  launches(extra_kernels, backward);
  const double each = frame_.kernel_seconds.value > 0.0 ? frame_.kernel_seconds.value : kernel();
  out_.forward += extra_kernels * each;
  out_.backward += backward * each;
  out_.input_bytes = e_ * narrow_ * hidden();
  out_.recompute_layer = out_.forward;
  if (frame_.lowered_ops)  // Decoder::recompute_layer needs nothing behind the activation
    out_.recompute_layer = std::max(0.0, out_.forward - last_product_);
  if (frame_.selective_products) {
    out_.recompute_core = std::max(0.0, out_.forward - out_.attention_forward - 0.5 * products_);
    out_.kept_selective_bytes = fill_ * (out_.input_bytes + attention_bytes_ + 0.5 * product_bytes_);
  }
  out_.kept_full_bytes = fill_ * out_.input_bytes;
  out_.transient_bytes *= fill_;
  // The ring hides behind attention except for what is longer; Ulysses hides behind nothing.
  out_.context_forward = std::max(0.0, out_.ring_forward - out_.attention_forward) + exposed_context_forward_;
  out_.context_backward = std::max(0.0, out_.ring_backward - out_.attention_backward) + exposed_context_backward_;
  out_.context_again = core_again_;
  if (core_again_) out_.recompute_context = out_.context_forward;
  return out_;
}

}  // namespace hotbunk
