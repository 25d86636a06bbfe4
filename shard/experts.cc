// The rules of a mixture of experts. A rank of a tensor-parallel group has the whole router, and its columns of every
// expert, as of a dense MLP, all of some experts, or columns of some. Each rank routes all tokens of its block, which
// is the group or a part of it (spec/expert_mesh.h), and all find the same. Where data ranks have other experts each,
// the same is done of the rows that have come (expert_parallel.h).
#include "base/check.h"
#include "shard/expert_rounds.h"
#include "shard/router_loss.h"
#include "shard/writers.h"

namespace hotbunk {
namespace {

/// How a token's experts are chosen and weighed; what is usual is not said.
void with_routing(Op& op, const MoeSpec& moe) {
  with(op, Attr::renormalise, std::int64_t{moe.norm_topk ? 1 : 0});
  if (moe.sigmoid_scores) with(op, Attr::sigmoid, std::int64_t{1});
  if (moe.groups > 1) with(with(op, Attr::groups, moe.groups), Attr::taken_groups, moe.topk_groups);
  if (moe.routed_scaling != 1.0) with(op, Attr::factor, moe.routed_scaling);
}

/// A product whose rows go back to their tokens: what it leaves is as wide as the stream.
bool leaves_experts(const Forward& f, const ForwardOp& grouped) {
  return f.value(grouped.outputs[0]).width == Width::routed;
}

}  // namespace

Op& with_share(Op& op, const TensorSharding& s) {
  return s.ep.ranks == 1 && s.tp.expert_ranks > 1 ? with(op, Attr::tp, s.tp.expert_ranks) : op;
}

Op& with_bias_share(Op& op, const ForwardOp& forward, bool leaves, const TensorSharding& s) {
  if (forward.weights.size() < 2 || !leaves || s.tp.expert_columns() * s.ep.parts == 1) return op;
  op.group = s.ep.parts > 1 ? s.ep.places : s.tp.group;
  return op;
}

void ForwardWriter::route(const ForwardOp& op) {
  std::vector<Tensor> inputs = {at(op.inputs[0])};
  if (!op.weights.empty()) inputs.push_back(to_.weight(op.weights[0]));
  with_routing(emit(op.kind, op.name, std::move(inputs), {make(op.outputs[0]), make(op.outputs[1])}), *e_.model.moe);
}

void ForwardWriter::expert_sort(const ForwardOp& op) {
  if (e_.ep.ranks > 1) return sort_of_all_ranks(to_, f_, e_, op, at(op.inputs[0]), values_);
  Op& sort = emit(op.kind, op.name, {at(op.inputs[0])}, {make(op.outputs[0]), make(op.outputs[1])});
  if (e_.tp.expert_ranks > 1) with_own_experts(sort, e_);
}

void ForwardWriter::dispatch(const ForwardOp& op) {
  const Tensor x = all_tokens_of(op.inputs[0], is_of_block(f_, s_, op));
  if (e_.ep.ranks == 1) {
    emit(op.kind, op.name, {x, at(op.inputs[1])}, {make(op.outputs[0])});
    return;
  }
  const ForwardValue& y = f_.value(op.outputs[0]);
  if (e_.ep.copies()) {
    values_[static_cast<std::size_t>(op.outputs[0])] = copies_to_experts(to_, f_, e_, y.name, x, values_);
    return;
  }
  const Tensor choices = make_value(to_, e_, y, y.name + ".choices", e_.compute);
  emit(op.kind, op.name, {x, at(op.inputs[1])}, {choices});
  values_[static_cast<std::size_t>(op.outputs[0])] =
      in_rounds(e_) ? choices : to_experts(to_, f_, e_, y.name, choices, values_);
}

void ForwardWriter::grouped_linear(const ForwardOp& op) {
  if (in_rounds(e_)) return leaves_experts(f_, op) ? rounds(op) : void();
  const Tensor y = make(op.outputs[0]);
  const std::string& name = f_.value(op.outputs[0]).name;
  const bool goes_back = e_.ep.ranks > 1 && leaves_experts(f_, op);
  const Tensor found = goes_back ? make_routed(to_, e_, name + ".routed", y.dtype, y.shape[2]) : y;
  std::vector<Tensor> inputs = {at(op.inputs[0]), to_.weight(op.weights[0]), at(op.inputs[1])};
  if (op.weights.size() > 1) inputs.push_back(to_.weight(op.weights[1]));
  with_bias_share(with_share(emit(op.kind, op.name, std::move(inputs), {found}), e_), op, leaves_experts(f_, op), e_);
  ExpertAdapters(to_, f_, e_, values_, op, at(op.inputs[1])).add(at(op.inputs[0]), found);
  if (goes_back) from_experts(to_, f_, e_, name, found, y, values_);
}

void ForwardWriter::combine(const ForwardOp& op) {
  const Tensor z = make(op.outputs[0]), found = make_summands(to_, e_, f_.value(op.outputs[0]).name, z);
  std::vector<Tensor> inputs;
  for (const ValueId in : op.inputs) inputs.push_back(at(in));
  const bool beside = inputs.size() > 3 && s_.blocks.count > 1;  // what has summands on all ranks
  const Tensor others = inputs.back();
  if (beside) inputs.pop_back();
  emit(op.kind, op.name, std::move(inputs), {found});
  sum_into_stream(to_, e_, op.name, found, z);
  if (beside) add_beside(op.name, others, z);
}

void ForwardWriter::add_beside(const std::string& op, const Tensor& summands, const Tensor& stream) {
  const Tensor sum = to_.make(op + ".beside", stream.dtype, {stream.shape[0], stream.shape[1]});
  sum_into_stream(to_, s_, op + ".beside", summands, sum);
  emit(OpKind::add, op + ".beside.add", {stream, sum}, {stream});
}

void BackwardWriter::combine(const ForwardOp& op) {
  const ValueId y = op.inputs[0], rows = op.inputs[1], weights = op.inputs[2];
  const Tensor dz = all_tokens(to_, e_, "d_" + f_.value(op.outputs[0]).name, gradient(op.outputs[0]));
  const ForwardValue& w = f_.value(weights);
  const Tensor d_weights = gradient_of(weights) = make_value(to_, e_, w, "d_" + w.name, DType::f32);
  emit(OpKind::combine_backward, op.name + ".backward", {dz, value(y), value(rows), value(weights)},
       {make(y), d_weights});
  if (op.inputs.size() > 3)
    gradient_of(op.inputs[3]) =
        s_.blocks.count > 1
            ? all_tokens(to_, s_, "d_" + f_.value(op.outputs[0]).name + ".beside", gradient(op.outputs[0]))
            : dz;
}

void BackwardWriter::grouped_linear(const ForwardOp& op) {
  if (in_rounds(e_)) return leaves_experts(f_, op) ? rounds(op) : void();
  const ValueId x = op.inputs[0], offsets = op.inputs[1];
  const std::string d_name = "d_" + f_.value(op.outputs[0]).name;
  Tensor dy = gradient(op.outputs[0]);
  if (e_.ep.ranks > 1 && leaves_experts(f_, op)) dy = to_experts(to_, f_, e_, d_name + ".routed", dy, values_);
  const bool came = f_.value(x).width == Width::routed;
  const ExpertAdapters adapters(to_, f_, e_, values_, op, value(offsets));
  const std::vector<Tensor> d_down = adapters.through(dy);
  const auto of_weights = [&] {
    if (!op.adapters.empty()) adapters.of_weights(to_, value(x), dy, d_down, accumulate_);
    if (!e_.trains(op.weights[0].first)) return;
    std::vector<Tensor> outputs;
    for (const Weight& w : op.weights) outputs.push_back(to_.gradient(w));
    Op& wgrad =
        emit(OpKind::grouped_linear_wgrad, op.name + ".wgrad", {dy, value(x), value(offsets)}, std::move(outputs));
    with_bias_share(with_share(with(wgrad, Attr::accumulate, accumulate_), e_), op, leaves_experts(f_, op), e_);
  };
  const auto of_input = [&] {
    if (came && e_.ep.ranks > 1)
      gradient_of(x) =
          make_routed(to_, e_, "d_" + f_.value(x).name, e_.compute, {e_.width_of(Width::routed), fixed_extent, 0});
    else make(x);
    with_share(emit(OpKind::grouped_linear_dgrad, op.name + ".dgrad", {dy, to_.weight(op.weights[0]), value(offsets)},
                    {gradient(x)}),
               e_);
    adapters.of_input(d_down, gradient(x));
  };
  // What was dispatched is free before its gradient, as large, is there.
  if (came) of_weights();
  of_input();
  if (!came) of_weights();
}

void BackwardWriter::dispatch(const ForwardOp& op) {
  Tensor dy = gradient(op.outputs[0]);
  if (e_.ep.copies()) {
    const auto found = summands_of(op.inputs[0], is_of_block(f_, s_, op));
    copies_from_experts(to_, f_, e_, "d_" + f_.value(op.outputs[0]).name, dy, found.tensor, found.first, values_);
    return added(op.inputs[0], op.name + ".backward", is_of_block(f_, s_, op));
  }
  if (e_.ep.ranks > 1 && !in_rounds(e_)) {
    const ForwardValue& y = f_.value(op.outputs[0]);
    const Tensor choices = make_value(to_, e_, y, "d_" + y.name + ".choices", e_.compute);
    from_experts(to_, f_, e_, "d_" + y.name, dy, choices, values_);
    dy = choices;
  }
  const auto found = summands_of(op.inputs[0], is_of_block(f_, s_, op));
  with(emit(OpKind::dispatch_backward, op.name + ".backward", {dy, value(op.inputs[1])}, {found.tensor}),
       Attr::accumulate, std::int64_t{found.first ? 0 : 1});
  added(op.inputs[0], op.name + ".backward", is_of_block(f_, s_, op));
}

void BackwardWriter::route(const ForwardOp& op) {
  const ValueId logits = op.inputs[0], weights = op.outputs[0], experts = op.outputs[1];
  with_routing(emit(OpKind::route_backward, op.name + ".backward", {gradient(weights), value(logits), value(experts)},
                    {make(logits)}),
               *e_.model.moe);
  if (const RouterLossFeeds* const loss = to_.router_loss())
    add_router_loss(to_, s_, op.name, *loss, value(logits), value(experts), gradient(logits));
  // A bias of scores is for the choice alone: no gradient reaches it.
  if (!op.weights.empty() && e_.trains(op.weights[0].first) && accumulate_ == 0)
    emit(OpKind::zero, op.name + ".bias.zero", {}, {to_.gradient(op.weights[0])});
}

}  // namespace hotbunk
