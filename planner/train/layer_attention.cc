// The attention half of a layer: grouped-query and latent attention.
#include <algorithm>

#include "planner/train/layer_builder.h"

namespace hotbunk {
namespace {

/// q, k, v, rotary positions, attention and the output projection of grouped-query attention.
void grouped_query_attention(LayerBuilder& b, const ModelSpec& m) {
  const double d = static_cast<double>(m.head_dim), h = b.hidden(), T = b.tokens(), e = b.e();
  const double heads = static_cast<double>(m.heads) / b.tp();
  const double kv = std::max(static_cast<double>(m.kv_heads) / b.tp(), 1.0);
  // A gate of what is attended to comes out of the same product as queries.
  const double gate = m.gated_attention ? heads * d : 0.0, qkv = (heads + 2.0 * kv) * d + gate;
  const double qkv_grad = b.linear(T, qkv, h);
  if (one_adapter_of_qkv(m)) {
    b.adapter(ParamRole::q_proj, T, (heads + 2.0 * kv) * d, h);
  } else {
    b.adapter(ParamRole::q_proj, T, heads * d, h);
    for (const ParamRole role : {ParamRole::k_proj, ParamRole::v_proj}) b.adapter(role, T, kv * d, h);
  }
  const double bias = m.qkv_bias ? (static_cast<double>(m.heads + 2 * m.kv_heads) * d) : 0.0;
  b.weights((static_cast<double>(m.heads) * d + gate * b.tp() + 2.0 * kv * b.tp() * d) * h + bias, 0.0);
  if (!m.learned_positions) {
    // Ours rotates the packed rows in place, values pass by.
    const double rotated = 2.0 * e * T * (heads + (b.lowered() ? 2.0 : 1.0) * kv) * d;
    b.stream(rotated, rotated);
  }
  if (m.qk_norm) {
    b.stream(2.0 * e * T * (heads + kv) * d, 3.0 * e * T * (heads + kv) * d);
    b.keep(e * T * (heads + kv) * d);
    b.weights(0.0, 2.0 * d);
  }
  b.keep(e * T * qkv);
  b.attention(heads, kv, d, d);
  if (gate > 0.0) {
    b.stream(3.0 * e * T * gate, 5.0 * e * T * gate);
    b.keep(e * T * gate);
  }
  b.keep_attended(T * heads * d);
  b.linear(T, h, heads * d);
  b.adapter(ParamRole::o_proj, T, h, heads * d);
  b.weights(static_cast<double>(m.heads) * d * h, m.o_bias ? h : 0.0);
  b.tensor_parallel(qkv_grad);
}

/// A gated delta net (spec/model.h, LinearAttentionSpec) as flash-linear-attention computes it: projections, a causal
/// convolution with SiLU, queries and keys normalised and repeated to as many heads as values have, the recurrence in
/// chunks, a norm with the gate, the output projection.
void linear_attention(LayerBuilder& b, const ModelSpec& m) {
  const LinearAttentionSpec& a = *m.linear;
  const double h = b.hidden(), T = b.tokens(), e = b.e();
  const auto all = static_cast<double>(a.convolved()), values = static_cast<double>(a.values()) / b.tp();
  const double convolved = all / b.tp(), heads = static_cast<double>(a.value_heads) / b.tp();
  const double inner = heads * static_cast<double>(a.key_dim);
  const double grad = b.linear(T, convolved + values + 2.0 * heads, h);
  b.weights((all + static_cast<double>(a.values() + 2 * a.value_heads)) * h + all * static_cast<double>(a.kernel) +
                2.0 * static_cast<double>(a.value_heads),
            static_cast<double>(a.value_dim));
  b.stream(2.0 * e * T * convolved, 3.0 * e * T * convolved);
  b.keep(2.0 * e * T * convolved);  // before and behind the convolution
  b.stream(e * T * (convolved - values + 2.0 * inner), 2.0 * e * T * (convolved - values + 2.0 * inner));
  b.keep(2.0 * e * T * inner);
  b.delta_rule(heads, static_cast<double>(a.key_dim), static_cast<double>(a.value_dim));
  b.stream(3.0 * e * T * values, 5.0 * e * T * values);
  b.keep(2.0 * e * T * values);  // what was read from the state, and its gate
  b.keep_input(T * values);
  b.linear(T, h, values);
  b.weights(static_cast<double>(a.values()) * h, 0.0);
  b.tensor_parallel(grad);
}

/// DeepSeek's latent attention: low-rank projections of queries and of keys with values, one rotary key for all heads.
void latent_attention(LayerBuilder& b, const ModelSpec& m) {
  const MlaSpec& a = *m.mla;
  const double h = b.hidden(), T = b.tokens(), e = b.e(), all = static_cast<double>(m.heads), heads = all / b.tp();
  const double qk = static_cast<double>(a.qk_nope_head_dim + a.qk_rope_head_dim), v = static_cast<double>(a.v_head_dim);
  const double nope = static_cast<double>(a.qk_nope_head_dim), rope = static_cast<double>(a.qk_rope_head_dim);
  const double q_rank = static_cast<double>(a.q_lora_rank), kv_rank = static_cast<double>(a.kv_lora_rank);
  double up_grad = 0.0;
  if (q_rank > 0) {
    b.linear(b.narrow(), q_rank, h);
    b.adapter(ParamRole::q_a_proj, b.narrow(), q_rank, h);
    b.weights(0.0, q_rank * h + q_rank);
    b.keep(e * b.narrow() * q_rank);  // before its norm
    b.keep_input(b.narrow() * q_rank);
    b.stream(2.0 * e * T * q_rank, 3.0 * e * T * q_rank);
  }
  b.linear(b.narrow(), kv_rank + rope, h);
  b.adapter(ParamRole::kv_a_proj, b.narrow(), kv_rank + rope, h);
  b.weights(0.0, (kv_rank + rope) * h + kv_rank);
  b.keep(e * b.narrow() * (kv_rank + rope));
  b.keep_input(b.narrow() * kv_rank);
  b.stream(2.0 * e * T * kv_rank, 3.0 * e * T * kv_rank);
  {
    const ModuleScope module(b, RecomputeModule::mla_up_proj);
    up_grad += b.linear(T, heads * qk, q_rank > 0 ? q_rank : h);
    if (q_rank > 0) b.adapter(ParamRole::q_b_proj, T, heads * qk, q_rank);
    else b.adapter(ParamRole::q_proj, T, heads * qk, h);
    b.weights(all * qk * (q_rank > 0 ? q_rank : h), 0.0);
    up_grad += b.linear(T, heads * (nope + v), kv_rank);
    b.adapter(ParamRole::kv_b_proj, T, heads * (nope + v), kv_rank);
    b.weights(all * (nope + v) * kv_rank, 0.0);
    // Rotary parts are concatenated to the others: copies of whole queries and keys.
    b.stream(4.0 * e * T * heads * qk, 4.0 * e * T * heads * qk);
    b.keep(e * T * heads * (2.0 * qk + v));
  }
  b.attention(heads, heads, qk, v);
  b.keep_attended(T * heads * v);
  b.linear(T, h, heads * v);
  b.adapter(ParamRole::o_proj, T, h, heads * v);
  b.weights(all * v * h, 0.0);
  // Down-projections are whole on every rank: what the up-projections need of other ranks is the latents and the rotary
  // key (Megatron-core gathers these), not the hidden state.
  b.tensor_parallel(up_grad, (q_rank > 0 ? q_rank : h) + kv_rank + rope);
}

}  // namespace

void attention_block(LayerBuilder& b, const TrainModel& t, bool linear) {
  b.norm(true, b.reads_input({ParamRole::q_proj, ParamRole::k_proj, ParamRole::v_proj, ParamRole::q_a_proj,
                              ParamRole::kv_a_proj}));
  if (linear) linear_attention(b, t.model());
  else if (t.model().mla) latent_attention(b, t.model());
  else grouped_query_attention(b, t.model());
  if (t.model().output_norms) b.norm();
  b.out().attention_weights = b.out().largest_weights;
  b.residual();
}

}  // namespace hotbunk
