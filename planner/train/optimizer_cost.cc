#include "planner/train/optimizer_cost.h"

#include <array>

namespace hotbunk {
namespace {

/// `count` weights of rows x cols on one rank.
struct Matrix {
  double count = 0, rows = 0, cols = 0;
  bool expert = false;
  double elements() const { return count * rows * cols; }
};

/// The matrices of one layer on one rank; tensor parallelism cuts them before the optimizer sees them, and Muon takes
/// each slice for itself (Megatron's blockwise mode).
class LayerMatrices {
 public:
  LayerMatrices(const ModelSpec& m, const TrainPoint& p, bool moe) {
    const auto h = static_cast<double>(m.hidden), tp = static_cast<double>(p.tp);
    const double heads = static_cast<double>(m.heads) / tp, fan = m.gated_mlp ? 2.0 : 1.0;
    if (m.lora.on()) {
      adapters(m, heads, tp);
      return;
    }
    if (m.mla) {
      const MlaSpec& a = *m.mla;
      const auto q_rank = static_cast<double>(a.q_lora_rank), kv_rank = static_cast<double>(a.kv_lora_rank);
      const auto nope = static_cast<double>(a.qk_nope_head_dim), rope = static_cast<double>(a.qk_rope_head_dim);
      const auto v = static_cast<double>(a.v_head_dim);
      if (q_rank > 0) add(1, q_rank, h);
      add(1, heads * (nope + rope), q_rank > 0 ? q_rank : h);
      add(1, kv_rank + rope, h);
      add(1, heads * (nope + v), kv_rank);
      add(1, h, heads * v);
    } else {
      const auto d = static_cast<double>(m.head_dim);
      add(1, heads * d, h);
      add(2, std::max(static_cast<double>(m.kv_heads) / tp, 1.0) * d, h);
      add(1, h, heads * d);
    }
    if (!moe) {
      feed_forward(1, static_cast<double>(m.intermediate) / tp, h, fan, false);
      return;
    }
    const auto width = static_cast<double>(m.moe->expert_intermediate), experts = static_cast<double>(m.moe->experts);
    add(1, experts, h);
    feed_forward(experts / static_cast<double>(p.ep), width / static_cast<double>(p.etp), h, 2.0, true);
    if (m.moe->shared_experts > 0)
      feed_forward(1, static_cast<double>(m.moe->shared_experts) * width / tp, h, 2.0, false);
  }

  const Matrix* begin() const { return all_.data(); }
  const Matrix* end() const { return all_.data() + size_; }

 private:
  void add(double count, double rows, double cols, bool expert = false) { all_[size_++] = {count, rows, cols, expert}; }
  void feed_forward(double count, double width, double h, double fan, bool expert) {
    add(fan * count, width, h, expert);
    add(count, h, width, expert);
  }
  /// A and B of each matrix that has them; of what trains nothing else.
  void adapters(const ModelSpec& m, double heads, double tp) {
    const auto h = static_cast<double>(m.hidden), d = static_cast<double>(m.head_dim);
    const double kv = std::max(static_cast<double>(m.kv_heads) / tp, 1.0), r = static_cast<double>(m.lora.rank);
    const double width = static_cast<double>(m.intermediate) / tp;
    const auto both = [&](ParamRole base, double out, double in) {
      if (m.adapts(base)) add(1, r, in), add(1, out, r);
    };
    if (m.mla) {
      const MlaSpec& a = *m.mla;
      const auto q_rank = static_cast<double>(a.q_lora_rank), kv_rank = static_cast<double>(a.kv_lora_rank);
      const auto nope = static_cast<double>(a.qk_nope_head_dim), rope = static_cast<double>(a.qk_rope_head_dim);
      const auto v = static_cast<double>(a.v_head_dim);
      if (q_rank > 0) both(ParamRole::q_a_proj, q_rank, h), both(ParamRole::q_b_proj, heads * (nope + rope), q_rank);
      else both(ParamRole::q_proj, heads * (nope + rope), h);
      both(ParamRole::kv_a_proj, kv_rank + rope, h), both(ParamRole::kv_b_proj, heads * (nope + v), kv_rank);
      both(ParamRole::o_proj, h, heads * v);
    } else if (one_adapter_of_qkv(m)) {
      both(ParamRole::q_proj, (heads + 2.0 * kv) * d, h), both(ParamRole::o_proj, h, heads * d);
    } else {
      both(ParamRole::q_proj, heads * d, h), both(ParamRole::o_proj, h, heads * d);
      both(ParamRole::k_proj, kv * d, h), both(ParamRole::v_proj, kv * d, h);
    }
    both(ParamRole::gate_proj, width, h), both(ParamRole::up_proj, width, h), both(ParamRole::down_proj, h, width);
  }
  std::array<Matrix, 16> all_{};
  std::size_t size_ = 0;
};

/// Newton-Schulz, five steps of X <- aX + (bA + cA^2) X with A = X X^T, of a matrix whose shorter side is m: products
/// m x m x n, m x m x m and m x n x m, in bf16.
double orthogonalize_seconds(const CostModel& cost, const Matrix& x) {
  const double m = std::min(x.rows, x.cols), n = std::max(x.rows, x.cols);
  const double step = cost.gemm_seconds(m, m, n, DType::bf16) + cost.gemm_seconds(m, m, m, DType::bf16) +
                      cost.gemm_seconds(m, n, m, DType::bf16) + 3.0 * cost.hardware().kernel_overhead.value;
  return 5.0 * step;
}

}  // namespace

OptimizerWork& OptimizerWork::add(const OptimizerWork& w, double count) {
  ordinary_bytes += count * w.ordinary_bytes;
  expert_bytes += count * w.expert_bytes;
  whole_bytes += count * w.whole_bytes;
  ordinary_matrices += count * w.ordinary_matrices;
  expert_matrices += count * w.expert_matrices;
  ordinary_seconds += count * w.ordinary_seconds;
  expert_seconds += count * w.expert_seconds;
  if (count > 0) longest_seconds = std::max(longest_seconds, w.longest_seconds);
  return *this;
}

OptimizerWork TrainModel::layer_work(const TrainPoint& p, const LayerCost& c, bool moe) const {
  const double adam = setting_.state.moments, each = moment_bytes_each(p.optimizer, adam, setting_.momentum);
  OptimizerWork out;
  double vectors = frozen() ? c.adapter_parameters : c.parameters;
  for (const Matrix& x : LayerMatrices(model_, p, moe)) {
    vectors -= x.elements();
    double& bytes = x.expert ? out.expert_bytes : out.ordinary_bytes;
    bytes += each * x.elements();
    if (p.optimizer == OptimizerName::adafactor) {
      // A shard of rows keeps their statistics and all of the columns'.
      bytes += 4.0 * x.count * x.rows;
      out.whole_bytes += 4.0 * x.count * x.cols;
      continue;
    }
    const double one = orthogonalize_seconds(cost_, x);
    (x.expert ? out.expert_matrices : out.ordinary_matrices) += x.elements();
    (x.expert ? out.expert_seconds : out.ordinary_seconds) += x.count * one;
    out.longest_seconds = std::max(out.longest_seconds, one);
  }
  out.ordinary_bytes += std::max(0.0, vectors) * (p.optimizer == OptimizerName::muon ? adam : each + 4.0);
  return out;
}

/// Embedding and head are AdamW's under Muon, and a table under Adafactor.
OptimizerWork TrainModel::end_work(const TrainPoint& p, const LayerCost& c) const {
  OptimizerWork out;
  if (frozen()) return out;
  const double adam = setting_.state.moments;
  if (p.optimizer == OptimizerName::muon) {
    out.ordinary_bytes = adam * c.parameters;
    return out;
  }
  out.ordinary_bytes = moment_bytes_each(p.optimizer, adam, setting_.momentum) * c.parameters + 4.0 * vocab_rows(p);
  out.whole_bytes = 4.0 * static_cast<double>(model_.hidden);
  return out;
}

double TrainModel::moment_bytes(const TrainPoint& p, const StageShare& held) const {
  if (!follows_shapes(p.optimizer))
    return held.own_trained(p) * moment_bytes_each(p.optimizer, setting_.state.moments, setting_.momentum);
  const OptimizerWork& w = held.optimizer;
  return p.own_elements(w.ordinary_bytes, w.expert_bytes) + w.whole_bytes;
}

/// The optimizer's step on one rank. It reads gradient, master and moments, writes master, moments and the
/// low-precision parameter; the norm reads every gradient once more, and they are zeroed.
double TrainModel::update_seconds(const TrainPoint& p, const StageShare& held) const {
  const StateBytes& b = setting_.state;
  const double own = held.own_trained(p);
  const bool cut = p.sharding != Sharding::replicated && p.sharding != Sharding::zero1;
  const double local_grads = cut ? own : held.trained();
  // The layers' new weights are quantised once, for all micro-batches.
  const double quantized = cost_.memory_seconds(quantized_bytes_ * (held.ordinary + held.expert - held.ends));
  double bytes = own * (b.shard_grads(p.sharding) + 2.0 * b.master + b.params) + 2.0 * moment_bytes(p, held);
  // Its statistics first, then the fp32 update, which is written to be scaled by its root mean square.
  if (p.optimizer == OptimizerName::adafactor) bytes += own * (b.shard_grads(p.sharding) + 8.0);
  const double on_host = host_fraction(p);
  const double host = on_host > 0.0 ? host_step_seconds(p, on_host * own, on_host * moment_bytes(p, held)) : 0.0;
  if (on_host >= 1.0) return host + quantized;
  // One after the other: the CPUs' part waits for gradients, and the next forward for both.
  double seconds = framework_.step_seconds.value + host + quantized +
                   cost_.memory_seconds((1.0 - on_host) * bytes + 2.0 * local_grads * b.shard_grads(p.sharding));
  if (p.optimizer != OptimizerName::muon) return seconds;
  // Whole matrices are dealt to the ranks that share them; nobody does less than one.
  const OptimizerWork& w = held.optimizer;
  seconds += std::max(p.own_elements(w.ordinary_seconds, w.expert_seconds), w.longest_seconds);
  const GroupShape group = groups(p).shard();
  const double sent = orthogonalizer_bytes * own_matrices(p, w);
  return seconds + cost_.memory_seconds(4.0 * sent) + 2.0 * cost_.collective_seconds(OpKind::all_to_all, group, sent);
}

}  // namespace hotbunk
