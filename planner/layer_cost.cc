// The operations of one layer, written once: from each come its seconds in both passes, the kernels launched and the
// bytes that backward keeps. Shapes: T tokens of the rank's micro-batch (after cp and ulysses), h hidden, a heads,
// k KV heads, d head dim, i intermediate, s sequence, e bytes of an activation element.
#include <algorithm>
#include <cmath>

#include "planner/train_model.h"

namespace hotbunk {

/// Collects one layer. Every call is one operation of the framework's forward pass with its backward.
class LayerBuilder {
 public:
  LayerBuilder(const TrainModel& m, const TrainPoint& p, std::vector<KeptTensor>* kept = nullptr)
      : model_(m),
        point_(p),
        cost_(m.cost()),
        frame_(m.framework()),
        peak_(m.peak_),
        e_(m.setting().element_bytes),
        kept_(kept) {
    tokens_ = static_cast<double>(p.micro_batch * m.setting().sequence) / static_cast<double>(p.cp * p.ulysses);
    fill_ = m.fullest_tokens(p) / static_cast<double>(p.micro_batch * m.setting().sequence);
    tp_ = static_cast<double>(p.tp);
    narrow_ = p.sp ? tokens_ / tp_ : tokens_;  // tokens where norms, dropout and residuals run
  }

  /// Linear layer [rows,k] -> [rows,n] with its weight on this rank. Returns the weight gradient's seconds.
  double linear(double rows, double n, double k) { return grouped_linear(1.0, rows, n, k); }

  /// `groups` such layers of equal size, the experts of a rank: they share the SMs four at a time, as Transformer
  /// Engine's streams do, so that small ones leave SMs idle.
  double grouped_linear(double groups, double rows, double n, double k) {
    const double together = std::min(groups, 4.0), batches = groups / together, m = together * rows;
    const double third = 2.0 * together * (rows * n + rows * k + n * k), overhead = kernel();
    const double product = batches * (cost_.gemm_seconds(m, n, k, peak_, third) + overhead);
    const double input = batches * (cost_.gemm_seconds(m, k, n, peak_, third) + overhead);
    const double weight =
        batches *
        (cost_.gemm_seconds(together * n, k, rows, peak_, together * (2.0 * rows * (n + k) + 8.0 * n * k)) + overhead);
    out_.forward += product;
    out_.backward += input + weight;
    out_.weight_grad += weight;
    if (!frame_.fused_accumulation)  // reads both, writes one
      out_.accumulate += cost_.memory_seconds(3.0 * model_.setting().state.grads * groups * n * k) + overhead;
    out_.flops_forward += 2.0 * groups * rows * n * k;
    products_ += product;
    product_bytes_ += e_ * groups * rows * n;
    launches(groups, 2.0 * groups);
    return weight;
  }

  /// A kernel that streams memory.
  void stream(double forward_bytes, double backward_bytes) {
    const double passes = frame_.elementwise_passes.value;
    out_.forward += cost_.memory_seconds(passes * forward_bytes) + (forward_bytes > 0 ? kernel() : 0.0);
    out_.backward += cost_.memory_seconds(passes * backward_bytes) + (backward_bytes > 0 ? kernel() : 0.0);
    launches(forward_bytes > 0 ? 1 : 0, backward_bytes > 0 ? 1 : 0);
  }

  /// Kept for backward; `core`: only where selective recomputation does not drop it.
  void keep(double mean_bytes, bool core = false) {
    const double bytes = fill_ * mean_bytes;
    out_.kept_bytes += bytes;
    if (!core) out_.kept_selective_bytes += bytes;
    if (kept_ && bytes > 0) kept_->push_back({bytes, core});
  }

  void weights(double split, double replicated) {
    out_.parameters += split / tp_ + replicated;
    out_.largest_weights += split / tp_;
  }

  /// Residual stream -> norm. Its input is kept (the residual), its output too where the framework does that.
  void norm() {
    const double h = hidden();
    stream(2.0 * e_ * narrow_ * h, 3.5 * e_ * narrow_ * h);
    keep(e_ * narrow_ * h);
    if (frame_.keeps_norm_output) keep(e_ * narrow_ * h);
    weights(0.0, h * (model_.model().layer_norm ? 2.0 : 1.0));
  }

  /// Bias, dropout and residual behind a row-parallel projection.
  void residual() {
    const double h = hidden(), mask = frame_.dropout ? 1.0 : 0.0;
    stream(narrow_ * h * (3.0 * e_ + mask), narrow_ * h * (2.0 * e_ + mask));
    if (frame_.dropout) keep(narrow_ * h);
  }

  /// The collective on either side of a tensor-parallel pair (column then row): all-reduce of [T,h], or all-gather
  /// plus reduce-scatter of the same volume under SP. `hides_behind`: weight gradients that backward's half overlaps.
  void tensor_parallel(double hides_behind) {
    if (point_.tp <= 1) return;
    const GroupShape group = GroupShape::strided(point_.tp, 1, cost_.ranks_per_node());
    const double bytes = e_ * tokens_ * hidden();
    const double gather = cost_.collective_seconds(OpKind::all_gather, group, bytes);
    const double scatter = cost_.collective_seconds(OpKind::reduce_scatter, group, bytes);
    const double reduce = cost_.collective_seconds(OpKind::all_reduce, group, bytes);
    out_.tensor_forward += point_.sp ? gather + scatter : reduce;
    // SP gathers the kept shard of the column layer's input once more, beside the input gradient.
    out_.tensor_backward += point_.sp ? 2.0 * gather + scatter : reduce;
    const double hideable = point_.sp ? gather + scatter : reduce;
    out_.hidden_tensor += std::min(hideable, hides_behind);
    out_.tensor_payload += (point_.sp ? 5.0 : 2.0) * bytes;
    const double each = frame_.collective_kernels.value;
    launches((point_.sp ? 2 : 1) * each, (point_.sp ? 3 : 1) * each);
  }

  /// softmax(q k^T) v over `heads` heads of width `qk` and `v` on this rank, and what it exchanges along the sequence.
  void attention(double heads, double kv_heads, double qk, double v) {
    const TrainSetting& s = model_.setting();
    const double all_keys = static_cast<double>(s.sequence);
    const double causal = s.mean_keys > 0 ? s.mean_keys : (all_keys + 1.0) / 2.0;
    // Ulysses trades tokens for heads: the products stay the same.
    const double keys = frame_.fused_attention ? causal : all_keys;
    const double products = 2.0 * tokens_ * keys * heads * (qk + v);
    out_.flops_forward += 2.0 * tokens_ * causal * heads * (qk + v);
    const double before_forward = out_.forward, before_backward = out_.backward;
    if (frame_.fused_attention) {
      const double bytes = e_ * tokens_ * (heads * (qk + v) + kv_heads * (qk + v));
      out_.forward += cost_.attention_seconds(products, keys, bytes, false, peak_) + kernel();
      out_.backward += cost_.attention_seconds(2.5 * products, keys, 2.5 * bytes, true, peak_) + 2.0 * kernel();
      launches(1, 2);
      keep(4.0 * tokens_ * heads);
    } else {
      unfused_attention(heads, keys, qk, v);
    }
    out_.attention_forward = out_.forward - before_forward;
    out_.attention_backward = out_.backward - before_backward;
    out_.recompute_core = frame_.fused_attention ? 0.0 : out_.attention_forward;
    attention_bytes_ = e_ * tokens_ * heads * v;
    sequence_exchange(heads, kv_heads, qk, v);
  }

  /// Two batched products around a softmax whose s x s scores go through memory.
  void unfused_attention(double heads, double keys, double qk, double v) {
    const double scores = tokens_ * keys * heads, mask = frame_.dropout ? 5.0 : 0.0;
    const double rows = tokens_ * heads;
    const double overhead = kernel();
    out_.forward +=
        cost_.gemm_seconds(rows, keys, qk, peak_, 0.0) + cost_.gemm_seconds(rows, v, keys, peak_, 0.0) + 2.0 * overhead;
    out_.backward +=
        2.0 * (cost_.gemm_seconds(rows, keys, qk, peak_, 0.0) + cost_.gemm_seconds(rows, v, keys, peak_, 0.0)) +
        4.0 * overhead;
    launches(2, 4);
    stream(scores * (4.0 * e_ + mask), scores * (7.0 * e_ + mask));
    if (std::fmod(static_cast<double>(point_.micro_batch) * heads, 4.0) != 0.0)
      launches(frame_.softmax_kernels.value, frame_.backward_kernels.value * frame_.softmax_kernels.value);
    keep(scores * e_, true);
    if (frame_.dropout) keep(scores * (e_ + 1.0), true);
  }

  /// CP passes K and V around a ring, Ulysses swaps tokens for heads and back (four all-to-alls forward).
  void sequence_exchange(double heads, double kv_heads, double qk, double v) {
    if (point_.cp > 1) {
      const auto steps = static_cast<double>(point_.cp - 1);
      const GroupShape pair = GroupShape::strided(point_.cp, point_.tp, cost_.ranks_per_node());
      const double block = e_ * tokens_ * kv_heads * (qk + v);
      const double seconds = steps * cost_.collective_seconds(OpKind::send, {2, pair.nodes > 1 ? 2 : 1, 1}, block);
      out_.context_forward += seconds;
      out_.context_backward += 2.0 * seconds;
      out_.context_payload += 3.0 * steps * block;
      launches(point_.cp, 2 * point_.cp);
    }
    if (point_.ulysses > 1) {
      const auto ways = static_cast<double>(point_.ulysses);
      const GroupShape group = GroupShape::strided(point_.ulysses, point_.tp * point_.cp, cost_.ranks_per_node());
      const double repeat = std::max(1.0, ways / std::max(kv_heads, 1.0));
      const double share = (ways - 1.0) / ways * e_ * tokens_;
      const double sent[] = {share * heads * qk, share * kv_heads * repeat * qk, share * kv_heads * repeat * v,
                             share * heads * v};
      for (double bytes : sent) {
        const double seconds = cost_.collective_seconds(OpKind::all_to_all, group, bytes);
        ulysses_forward_ += seconds;
        out_.context_payload += 2.0 * bytes;
      }
      launches(4, 4);
    }
  }

  LayerCost finish(double extra_kernels) {
    // Kernels that are not listed (views made contiguous, casts, masks) occupy the device for a moment each.
    const double backward = frame_.backward_kernels.value * extra_kernels;
    launches(extra_kernels, backward);
    const double each = frame_.kernel_seconds.value > 0.0 ? frame_.kernel_seconds.value : kernel();
    out_.forward += extra_kernels * each;
    out_.backward += backward * each;
    out_.input_bytes = e_ * narrow_ * hidden();
    if (frame_.selective_products) {
      out_.recompute_core = std::max(0.0, out_.forward - out_.attention_forward - 0.5 * products_);
      out_.kept_selective_bytes = fill_ * (out_.input_bytes + attention_bytes_ + 0.5 * product_bytes_);
    }
    out_.kept_full_bytes = fill_ * out_.input_bytes;
    out_.transient_bytes *= fill_;
    // The ring hides behind attention except for what is longer; Ulysses hides behind nothing.
    out_.context_forward = std::max(0.0, out_.context_forward - out_.attention_forward) + ulysses_forward_;
    out_.context_backward = std::max(0.0, out_.context_backward - out_.attention_backward) + ulysses_forward_;
    return out_;
  }

  double hidden() const { return static_cast<double>(model_.model().hidden); }
  double tokens() const { return tokens_; }
  double narrow() const { return narrow_; }
  double e() const { return e_; }
  double tp() const { return tp_; }
  double fill() const { return fill_; }
  double kernel() const { return cost_.hardware().kernel_overhead.value; }
  void launches(double forward, double backward) {
    out_.kernels_forward += forward;
    out_.kernels_backward += backward;
  }
  LayerCost& out() { return out_; }

 private:
  const TrainModel& model_;
  const TrainPoint& point_;
  const CostModel& cost_;
  const FrameworkProfile& frame_;
  double peak_, e_, tokens_ = 0, narrow_ = 0, tp_ = 1, ulysses_forward_ = 0;
  double fill_ =
      1;  // tokens of the fullest micro-batch over those of a mean one: bytes are of the first, time of the other
  double products_ = 0, product_bytes_ = 0, attention_bytes_ = 0;  // of the forward pass
  std::vector<KeptTensor>* kept_ = nullptr;
  LayerCost out_;
};

namespace {

/// q, k, v, rotary positions, attention and the output projection of grouped-query attention.
void grouped_query_attention(LayerBuilder& b, const ModelSpec& m, const FrameworkProfile& f) {
  const double d = static_cast<double>(m.head_dim), h = b.hidden(), T = b.tokens(), e = b.e();
  const double heads = static_cast<double>(m.heads) / b.tp();
  const double kv = std::max(static_cast<double>(m.kv_heads) / b.tp(), 1.0);
  const double qkv = (heads + 2.0 * kv) * d;
  const double qkv_grad = b.linear(T, qkv, h);
  const double bias = m.qkv_bias ? (static_cast<double>(m.heads + 2 * m.kv_heads) * d) : 0.0;
  b.weights((static_cast<double>(m.heads) * d + 2.0 * kv * b.tp() * d) * h + bias, 0.0);
  if (!m.learned_positions) {
    b.stream(2.0 * e * T * (heads + kv) * d, 2.0 * e * T * (heads + kv) * d);
    if (f.keeps_packed_qkv) b.keep(e * T * (heads + kv) * d);
  }
  if (m.qk_norm) {
    b.stream(2.0 * e * T * (heads + kv) * d, 3.0 * e * T * (heads + kv) * d);
    b.keep(e * T * (heads + kv) * d);
    b.weights(0.0, 2.0 * d);
  }
  b.keep(e * T * qkv);
  b.attention(heads, kv, d, d);
  b.keep(e * T * heads * d);
  b.linear(T, h, heads * d);
  b.weights(static_cast<double>(m.heads) * d * h, m.o_bias ? h : 0.0);
  b.tensor_parallel(qkv_grad);
}

/// DeepSeek's latent attention: low-rank projections of queries and of keys with values, one rotary key for all heads.
void latent_attention(LayerBuilder& b, const ModelSpec& m, const FrameworkProfile& f) {
  const MlaSpec& a = *m.mla;
  const double h = b.hidden(), T = b.tokens(), e = b.e(), all = static_cast<double>(m.heads), heads = all / b.tp();
  const double qk = static_cast<double>(a.qk_nope_head_dim + a.qk_rope_head_dim), v = static_cast<double>(a.v_head_dim);
  const double nope = static_cast<double>(a.qk_nope_head_dim), rope = static_cast<double>(a.qk_rope_head_dim);
  const double q_rank = static_cast<double>(a.q_lora_rank), kv_rank = static_cast<double>(a.kv_lora_rank);
  double up_grad = 0.0;
  if (q_rank > 0) {
    b.linear(b.narrow(), q_rank, h);
    b.weights(0.0, q_rank * h + q_rank);
    b.keep(2.0 * e * b.narrow() * q_rank);
    b.stream(2.0 * e * T * q_rank, 3.0 * e * T * q_rank);
  }
  up_grad += b.linear(T, heads * qk, q_rank > 0 ? q_rank : h);
  b.weights(all * qk * (q_rank > 0 ? q_rank : h), 0.0);
  b.linear(b.narrow(), kv_rank + rope, h);
  b.weights(0.0, (kv_rank + rope) * h + kv_rank);
  b.keep(2.0 * e * b.narrow() * kv_rank + e * b.narrow() * rope);
  b.stream(2.0 * e * T * kv_rank, 3.0 * e * T * kv_rank);
  up_grad += b.linear(T, heads * (nope + v), kv_rank);
  b.weights(all * (nope + v) * kv_rank, 0.0);
  // Rotary parts are concatenated to the others: copies of whole queries and keys.
  b.stream(4.0 * e * T * heads * qk, 4.0 * e * T * heads * qk);
  b.keep(e * T * heads * (2.0 * qk + v));
  if (f.keeps_packed_qkv) b.keep(e * T * heads * (qk + nope));
  b.attention(heads, heads, qk, v);
  b.keep(e * T * heads * v);
  b.linear(T, h, heads * v);
  b.weights(all * v * h, 0.0);
  b.tensor_parallel(up_grad);
}

void attention_block(LayerBuilder& b, const TrainModel& t) {
  b.norm();
  if (t.model().mla) latent_attention(b, t.model(), t.framework());
  else grouped_query_attention(b, t.model(), t.framework());
  b.out().attention_weights = b.out().largest_weights;
  b.residual();
}

/// Column, activation, row; `width` is the whole intermediate size, divided by `ways`. `groups` experts of `rows` each.
void feed_forward(LayerBuilder& b, const ModelSpec& m, double rows, double width, double ways, double groups = 1.0) {
  const double h = b.hidden(), e = b.e(), local = width / ways, fan = m.gated_mlp ? 2.0 : 1.0;
  const double values = e * groups * rows * local;
  b.grouped_linear(groups, rows, fan * local, h);
  b.stream(values * (fan + 1.0), values * (2.0 * fan + 1.0));
  b.keep(values * fan);
  b.keep(values);
  b.grouped_linear(groups, rows, h, local);
}

}  // namespace

LayerCost TrainModel::dense_layer(const TrainPoint& p, std::vector<KeptTensor>* kept) const {
  LayerBuilder b(*this, p, kept);
  attention_block(b, *this);
  b.norm();
  const double h = b.hidden(), i = static_cast<double>(model_.intermediate), fan = model_.gated_mlp ? 3.0 : 2.0;
  const double before = b.out().weight_grad;
  feed_forward(b, model_, b.tokens(), i, b.tp());
  b.weights(fan * h * i + (model_.mlp_bias ? i : 0.0), model_.mlp_bias ? h : 0.0);
  b.tensor_parallel((b.out().weight_grad - before) * 0.5);
  b.residual();
  // Backward of the MLP: gradients of both sides of the activation, and of the layer's output and input.
  b.out().transient_bytes = b.e() * b.tokens() * ((model_.gated_mlp ? 3.0 : 2.0) * i / b.tp() + 2.0 * h);
  return b.finish(framework_.forward_kernels.value);
}

LayerCost TrainModel::moe_layer(const TrainPoint& p, std::vector<KeptTensor>* kept) const {
  if (!model_.moe || model_.moe->experts == 0) return {};
  const MoeSpec& moe = *model_.moe;
  LayerBuilder b(*this, p, kept);
  attention_block(b, *this);
  b.norm();
  const double h = b.hidden(), e = b.e(), experts = static_cast<double>(moe.experts);
  const double top = static_cast<double>(moe.experts_per_token), i = static_cast<double>(moe.expert_intermediate);
  const auto ep = static_cast<double>(p.ep), etp = static_cast<double>(p.etp);
  // Router: fp32 scores of every expert.
  b.linear(b.narrow(), experts, h);
  b.stream(16.0 * b.narrow() * experts, 16.0 * b.narrow() * experts);
  b.keep(8.0 * b.narrow() * experts);
  b.weights(0.0, experts * h);
  // Under TP without SP every rank of the group routes the same tokens: each sends its share.
  const double routed = b.tokens() / b.tp() * top;
  const double rows = routed * setting_.expert_balance * etp;
  const double sent = e * routed * h * (ep - 1.0) / ep;
  if (p.ep > 1) {
    const GroupShape group = GroupShape::strided(p.ep, p.etp, cost_.ranks_per_node());
    const double seconds = cost_.collective_seconds(OpKind::all_to_all, group, sent);
    b.out().expert_forward += 2.0 * seconds;
    b.out().expert_backward += 2.0 * seconds;
    b.out().expert_payload += 4.0 * sent;
    b.launches(2, 2);
  }
  // Permute before dispatch, sort by expert behind it, and the two inverses with the routing weights.
  b.stream(4.0 * e * routed * h, 4.0 * e * routed * h);
  b.stream(4.0 * e * rows * h, 5.0 * e * rows * h);
  b.keep(2.0 * e * rows * h);
  const double local = std::max(1.0, experts / ep);
  feed_forward(b, model_, rows / local, i, etp, local);
  const double expert_weights = experts / ep * 3.0 * h * i / etp;
  b.out().parameters += expert_weights;
  b.out().expert_parameters += expert_weights;
  b.out().largest_weights += 3.0 * h * i / etp;
  if (moe.shared_experts > 0) {
    const double width = static_cast<double>(moe.shared_experts) * i;
    feed_forward(b, model_, b.tokens(), width, b.tp());
    b.weights(3.0 * h * width, 0.0);
    b.tensor_parallel(0.0);
  }
  b.residual();
  b.out().transient_bytes = e * rows * ((model_.gated_mlp ? 3.0 : 2.0) * i / etp + 2.0 * h);
  return b.finish(framework_.forward_kernels.value + 12.0);  // routing: a dozen small kernels
}

LayerCost TrainModel::embedding(const TrainPoint& p) const {
  LayerBuilder b(*this, p);
  const double h = b.hidden();
  b.stream(2.0 * b.e() * b.tokens() * h, 3.0 * b.e() * b.tokens() * h);
  b.weights(static_cast<double>(model_.vocab) * h,
            model_.learned_positions ? static_cast<double>(model_.max_position) * h : 0.0);
  b.out().largest_weights = 0.0;
  if (framework_.dropout) b.keep(b.narrow() * h);
  if (p.tp > 1) {
    const GroupShape group = GroupShape::strided(p.tp, 1, cost_.ranks_per_node());
    b.out().tensor_forward +=
        cost_.collective_seconds(p.sp ? OpKind::reduce_scatter : OpKind::all_reduce, group, b.e() * b.tokens() * h);
    b.out().tensor_payload += b.e() * b.tokens() * h;
  }
  return b.finish(0.0);
}

LayerCost TrainModel::head(const TrainPoint& p) const {
  LayerBuilder b(*this, p);
  const double h = b.hidden(), v = static_cast<double>(model_.vocab) / b.tp(), T = b.tokens();
  b.norm();
  const double weight = b.linear(T, v, h);
  b.out().parameters += v * h;  // tied with the embedding where both are on one stage: end_parameters()
  if (p.tp > 1) {
    const GroupShape group = GroupShape::strided(p.tp, 1, cost_.ranks_per_node());
    const double bytes = b.e() * T * h;
    if (p.sp) b.out().tensor_forward += cost_.collective_seconds(OpKind::all_gather, group, bytes);
    const double back = cost_.collective_seconds(p.sp ? OpKind::reduce_scatter : OpKind::all_reduce, group, bytes);
    b.out().tensor_backward += back;
    b.out().hidden_tensor += std::min(back, weight);
    // Vocabulary-parallel cross-entropy: maximum, target's logit and sum, 4 bytes each per token.
    b.out().tensor_forward += 3.0 * cost_.collective_seconds(OpKind::all_reduce, group, 4.0 * T);
    b.out().tensor_payload += (p.sp ? 2.0 : 1.0) * bytes + 12.0 * T;
  }
  const double traffic = framework_.loss_traffic.value * T * v;
  b.stream(0.7 * traffic, 0.3 * traffic);  // forward: cast, maximum, exponentials, sum; backward: the gradient
  LayerCost out = b.finish(10.0);
  out.transient_bytes = framework_.loss_bytes.value * b.fill() * T * v;
  if (framework_.dummy_weight_grads) out.transient_bytes += 2.0 * v * h + 3.0 * b.e() * b.fill() * T * h;
  return out;
}

}  // namespace hotbunk
