// What a layer of each kind, the embedding and the head cost one rank for one micro-batch.
#include <algorithm>

#include "planner/train/expert_dispatch.h"
#include "planner/train/layer_builder.h"

namespace hotbunk {
namespace {

/// Of whom an MLP is, by its matrices, which may have adapters.
struct MlpRoles {
  ParamRole gate = ParamRole::gate_proj, up = ParamRole::up_proj, down = ParamRole::down_proj;
};
constexpr MlpRoles of_experts{ParamRole::expert_gate, ParamRole::expert_up, ParamRole::expert_down},
    of_shared{ParamRole::shared_gate, ParamRole::shared_up, ParamRole::shared_down};

/// Column, activation, row; `width` is the whole intermediate size, divided by `ways`. `groups` experts of `rows` each.
void feed_forward(LayerBuilder& b, const ModelSpec& m, const MlpRoles& roles, RecomputeModule activation, double rows,
                  double width, double ways, double groups = 1.0) {
  const double h = b.hidden(), e = b.e(), local = width / ways, fan = m.gated_mlp ? 2.0 : 1.0;
  const double values = e * groups * rows * local;
  b.grouped_linear(groups, rows, fan * local, h);
  for (const ParamRole role : {roles.gate, roles.up}) b.adapter(role, rows, local, h, groups);
  b.keep(values * fan);
  {
    const ModuleScope module(b, activation);
    b.stream(values * (fan + 1.0), values * (2.0 * fan + 1.0));
    if (b.reads_input({roles.down})) b.keep_input(groups * rows * local);
    if (m.gated_mlp && b.eager()) b.keep(values);
  }
  b.grouped_linear(groups, rows, h, local);
  b.adapter(roles.down, rows, h, local, groups);
}

/// Router, dispatch, experts, combine, shared experts.
void mixture(LayerBuilder& b, const TrainModel& t, const TrainPoint& p) {
  const ModelSpec& model = t.model();
  const MoeSpec& moe = *model.moe;
  const double h = b.hidden(), e = b.e(), experts = static_cast<double>(moe.experts);
  const double top = static_cast<double>(moe.experts_per_token), i = static_cast<double>(moe.expert_intermediate);
  const auto ep = static_cast<double>(p.ep), etp = static_cast<double>(p.etp);
  // Router: fp32 scores of every expert, written by softmax and top-k, read by each (16 B an expert and token, the same
  // in backward); kept are the probabilities and the routing map (4 B each).
  b.wide_linear(b.narrow(), experts, h);
  b.stream(16.0 * b.narrow() * experts, 16.0 * b.narrow() * experts);
  b.keep(8.0 * b.narrow() * experts);
  b.weights(0.0, experts * h);
  // Under TP without SP every rank of the group routes the same tokens: each sends its share.
  const double routed = b.tokens() / b.tp() * top;
  const double rows = routed * etp;
  if (p.ep > 1) {
    const GroupShape group = t.groups(p).expert();
    const FrameworkProfile& f = t.framework();
    const Copies copies = f.distinct_dispatch ? copies_per_place(moe, group) : copies_per_expert(moe, group);
    const double tokens = b.tokens() / b.tp() * h;
    const auto send = [&](double bytes_each) {
      const double bytes = tokens * bytes_each;
      b.out().expert_payload += (copies.network + copies.node) * bytes;
      b.launches(0.5, 0.5);
      return t.cost().exchange_seconds(group, copies.network * bytes, copies.node * bytes);
    };
    const double combined = send(e);
    b.out().expert_forward += send(f.dispatch_bytes.value > 0.0 ? f.dispatch_bytes.value : e) + combined;
    b.out().expert_backward += send(e) + send(e);  // gradients are combined and dispatched
  }
  // Expert TP: every rank of the group needs the others' tokens, and its part of their outputs goes back. Under TP
  // without SP each rank holds the outputs of its share of the tokens, and all need them all, as in backward their
  // gradients.
  const auto both = [&](const GroupShape& group, double bytes, std::initializer_list<OpKind> kinds) {
    for (const OpKind kind : kinds) {
      const double seconds = t.cost().collective_seconds(kind, group, bytes);
      b.out().expert_forward += seconds;
      b.out().expert_backward += seconds;
      b.out().expert_payload += 2.0 * bytes;
      b.launches(1, 1);
    }
  };
  if (p.etp > 1) both(t.groups(p).expert_tensor(), e * rows * h, {OpKind::all_gather, OpKind::reduce_scatter});
  if (p.tp > 1 && !p.sp) both(t.groups(p).tensor(), e * b.tokens() * h, {OpKind::all_gather});
  // Permute before dispatch, sort by expert behind it, and the two inverses with the routing weights.
  b.stream(4.0 * e * routed * h, 4.0 * e * routed * h);
  b.stream(4.0 * e * rows * h, 5.0 * e * rows * h);
  if (b.reads_input({of_experts.gate, of_experts.up})) b.keep_input(rows * h);  // of the first product
  b.keep(e * rows * h);                                                         // of the combination
  const double local = std::max(1.0, experts / ep), adapters = b.out().adapter_parameters;
  feed_forward(b, model, of_experts, RecomputeModule::moe_act, rows / local, i, etp, local);
  b.out().expert_adapter_parameters = b.out().adapter_parameters - adapters;
  const double expert_weights = experts / ep * 3.0 * h * i / etp;
  b.out().parameters += expert_weights;
  b.out().expert_parameters += expert_weights;
  b.out().largest_weights += 3.0 * h * i / etp;
  if (moe.shared_experts > 0) {
    const ModuleScope module(b, RecomputeModule::shared_experts);
    const double width = static_cast<double>(moe.shared_experts) * i;
    if (b.quantizes() && !b.frozen()) b.keep_input(b.narrow() * h);  // a copy of what the router keeps
    feed_forward(b, model, of_shared, RecomputeModule::mlp_act, b.tokens(), width, b.tp());
    b.weights(3.0 * h * width, 0.0);
    b.tensor_parallel(0.0);
  }
  b.out().transient_bytes = e * rows * ((model.gated_mlp ? 3.0 : 2.0) * i / etp + 2.0 * h);
}

/// Of layers of two kinds the mean one, `share` of the second: what a stage's layers take together is exact where it
/// has the kinds in the model's proportion. The highest moment is that of the kind that needs more.
LayerCost mean_of(const LayerCost& a, const LayerCost& b, double share) {
  constexpr double LayerCost::*parts[] = {&LayerCost::forward,           &LayerCost::backward,
                                          &LayerCost::weight_grad,       &LayerCost::weight_grad_kernels,
                                          &LayerCost::accumulate,        &LayerCost::recompute_layer,
                                          &LayerCost::recompute_core,    &LayerCost::recompute_tensor,
                                          &LayerCost::recompute_kernels, &LayerCost::tensor_forward,
                                          &LayerCost::tensor_backward,   &LayerCost::hidden_tensor,
                                          &LayerCost::attention_forward, &LayerCost::attention_backward,
                                          &LayerCost::kernels_forward,   &LayerCost::kernels_backward,
                                          &LayerCost::kept_bytes,        &LayerCost::kept_selective_bytes,
                                          &LayerCost::kept_full_bytes,   &LayerCost::input_bytes,
                                          &LayerCost::parameters,        &LayerCost::flops_forward,
                                          &LayerCost::tensor_payload,    &LayerCost::largest_weights,
                                          &LayerCost::attention_weights};
  LayerCost out;
  for (const auto part : parts) out.*part = (1.0 - share) * a.*part + share * b.*part;
  out.transient_bytes = std::max(a.transient_bytes, b.transient_bytes);
  return out;
}

}  // namespace

LayerCost TrainModel::dense_layer(const TrainPoint& p, std::vector<KeptTensor>* kept) const {
  const double attending = model_.attending_share();
  if (attending >= 1.0) return dense_layer(p, false, kept);
  // Tensors that the mean layer keeps: of both kinds, each by its share.
  std::vector<KeptTensor> of[2];
  const LayerCost full = dense_layer(p, false, kept ? &of[0] : nullptr),
                  linear = dense_layer(p, true, kept ? &of[1] : nullptr);
  for (const int kind : {0, 1})
    for (KeptTensor t : of[kind]) {
      t.bytes *= kind == 0 ? attending : 1.0 - attending;
      kept->push_back(t);
    }
  return mean_of(full, linear, 1.0 - attending);
}

LayerCost TrainModel::dense_layer(const TrainPoint& p, bool linear, std::vector<KeptTensor>* kept) const {
  LayerBuilder b(*this, p, kept);
  attention_block(b, *this, linear);
  b.norm(true, b.reads_input({ParamRole::gate_proj, ParamRole::up_proj}));
  const double h = b.hidden(), i = static_cast<double>(model_.intermediate), fan = model_.gated_mlp ? 3.0 : 2.0;
  const double before = b.out().weight_grad;
  {
    const ModuleScope module(b, RecomputeModule::mlp);
    feed_forward(b, model_, {}, RecomputeModule::mlp_act, b.tokens(), i, b.tp());
    b.weights(fan * h * i + (model_.mlp_bias ? i : 0.0), model_.mlp_bias ? h : 0.0);
    b.tensor_parallel((b.out().weight_grad - before) * 0.5);
  }
  if (model_.output_norms) b.norm();
  b.residual();
  // Backward of the MLP: gradients of both sides of the activation, and of the layer's output and input.
  b.out().transient_bytes = b.e() * b.tokens() * ((model_.gated_mlp ? 3.0 : 2.0) * i / b.tp() + 2.0 * h);
  return b.finish(framework_.forward_kernels.value);
}

LayerCost TrainModel::moe_layer(const TrainPoint& p, std::vector<KeptTensor>* kept) const {
  if (!model_.moe || model_.moe->experts == 0) return {};
  LayerBuilder b(*this, p, kept);
  attention_block(b, *this, false);
  b.norm(false, !b.frozen());  // the router reads it
  {
    const ModuleScope module(b, RecomputeModule::moe);
    mixture(b, *this, p);
  }
  b.residual();
  return b.finish(framework_.forward_kernels.value + framework_.routing_kernels.value);
}

LayerCost TrainModel::embedding(const TrainPoint& p) const {
  LayerBuilder b(*this, p);
  const double h = b.hidden();
  b.stream(2.0 * b.e() * b.tokens() * h, b.frozen() ? 0.0 : 3.0 * b.e() * b.tokens() * h);
  b.weights(vocab_rows(p) * b.tp() * h, model_.learned_positions ? static_cast<double>(model_.max_position) * h : 0.0);
  b.out().largest_weights = 0.0;
  if (framework_.dropout) b.keep(b.narrow() * h);
  if (p.tp > 1) {
    const GroupShape group = groups(p).tensor();
    b.out().tensor_forward +=
        cost_.collective_seconds(p.sp ? OpKind::reduce_scatter : OpKind::all_reduce, group, b.e() * b.tokens() * h);
    b.out().tensor_payload += b.e() * b.tokens() * h;
  }
  return b.finish(0.0);
}

LayerCost TrainModel::head(const TrainPoint& p) const {
  LayerBuilder b(*this, p);
  const double h = b.hidden(), v = vocab_rows(p), T = b.tokens();
  b.norm(false, !b.frozen());
  const double weight = b.wide_linear(T, v, h);
  b.out().parameters += v * h;  // tied with the embedding where both are on one stage: end_parameters()
  if (p.tp > 1) {
    const GroupShape group = groups(p).tensor();
    const double bytes = b.e() * T * h;
    if (p.sp) b.out().tensor_forward += cost_.collective_seconds(OpKind::all_gather, group, bytes);
    const double back = cost_.collective_seconds(p.sp ? OpKind::reduce_scatter : OpKind::all_reduce, group, bytes);
    b.out().tensor_backward += back;
    b.out().hidden_tensor += std::min(back, weight);
    // Vocabulary-parallel cross-entropy: maximum, target's logit and sum, 4 bytes each per token.
    b.out().tensor_forward += 3.0 * cost_.collective_seconds(OpKind::all_reduce, group, 4.0 * T);
    b.out().tensor_payload += (p.sp ? 2.0 : 1.0) * bytes + 12.0 * T;
  }
  // loss_traffic counts every pass over the logits, so elementwise_passes has no part in it. Of the 52 B of Megatron's
  // unfused loss forward moves 38 (cast 6, maximum 4, difference 8, exponential 8, sum 4, quotient 8), backward 14
  // (gradient 8, cast 6); others are split alike.
  const double traffic = framework_.loss_traffic.value * T * v, forward_share = 38.0 / 52.0;
  // Ours reads fp32 logits once, and once more to write their gradient.
  if (framework_.lowered_ops) b.move(4.0 * T * v, (4.0 + b.e()) * T * v);
  else b.move(forward_share * traffic, (1.0 - forward_share) * traffic);
  LayerCost out = b.finish(framework_.lowered_ops ? 0.0 : framework_.loss_kernels.value);
  // Chunk by chunk, forward and backward at once (docs/memory.md): logits of one, and the stream's gradient that they
  // leave piece by piece.
  const double all = b.fill() * T, at_once = loss_tokens(all);
  out.transient_bytes = framework_.loss_bytes.value * at_once * v + (at_once < all ? b.e() * all * h : 0.0);
  if (framework_.dummy_weight_grads) out.transient_bytes += 2.0 * v * h + 3.0 * b.e() * b.fill() * T * h;
  return out;
}

}  // namespace hotbunk
