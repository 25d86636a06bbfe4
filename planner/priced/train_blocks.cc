// Training's micro-batches, optimizer steps and log-prob passes as priced blocks.
#include <fmt/format.h>

#include "planner/priced/writer.h"

namespace hotbunk {

/// One forward pass over all micro-batches. A reference that lives on the host comes up first.
void PricedPlanWriter::passes(std::int32_t phase, std::string_view what, const TrainModel::Layers& layers,
                              bool trained) {
  const ForwardSeconds seconds = rl_.forward_seconds(point_.train, layers, trained);
  const ForwardTraffic sent = model_.forward_traffic(point_.train, layers);
  const double times = setting().mini_batches;
  const auto part = [&](double of, double payload = 0.0) { return per_token(tokens(), times * of, times * payload); };
  b().begin_block(phase, "micro");
  b().begin_call(fmt::format("{}.micro", what), fmt::format("{}.", what));
  const auto named = [&](const char* name) { return fmt::format("{}.{}", what, name); };
  const double swapped = trained ? 0.0 : train_.swapped_reference;
  const std::vector<BufferId> work = {
      b().transient(named("weights"), DType::u8, std::max<std::int64_t>(whole_bytes(swapped), 64), Category::params)};
  if (swapped > 0.0)
    priced(OpKind::priced, streams::h2d, named("upload"), work,
           per_token(tokens(), model_.cost().host_copy_seconds(swapped)));
  communicate(OpKind::all_gather, streams::gather, "train_data", named("parameters"), work, part(seconds.gathers));
  compute(named("forward"), work, part(seconds.compute + seconds.bubble));
  communicate(tensor_kind(), streams::tensor, "train_tp", named("tensor"), work, part(seconds.tensor, sent.tensor));
  communicate(OpKind::all_to_all, streams::tensor, "train_data", named("expert"), work,
              part(seconds.expert, sent.expert));
  communicate(context_kind(), streams::tensor, "train_cp", named("context"), work, part(seconds.context, sent.context));
}

/// Gradients live from a step's first micro-batch to its end, what else a step works in for a micro-batch.
void PricedPlanWriter::optimizer_steps(std::int32_t phase, std::string_view what, const TrainPrice& price,
                                       double working) {
  const double step_tokens = tokens() / setting().mini_batches;
  const auto named = [&](const char* name) { return fmt::format("{}.{}", what, name); };
  const auto term = [&](Term t) { return price.seconds[static_cast<std::size_t>(t)]; };
  double left = working;
  const auto take = [&](double most) {
    const double taken = std::clamp(most, 0.0, left);
    left -= taken;
    return taken;
  };
  const BufferId grads = bytes(named("grads"), take(price.grad_bytes), Category::grads, sections::transient);
  b().begin_block(phase, "begin");
  b().alloc(grads);
  b().begin_block(phase, "micro");
  b().begin_call(named("micro"), named("micro."));
  std::vector<BufferId> work = {grads};
  for (const Category c : {Category::activations, Category::communication, Category::workspace})
    work.push_back(b().transient(fmt::format("{}.micro.{}", what, name_of(c)), DType::u8,
                                 whole_bytes(take(price.bytes[static_cast<std::size_t>(c)])), c));
  work.push_back(b().transient(named("micro.gathered"), DType::u8, whole_bytes(left), Category::params));
  const auto micro = [&](Term t) { return per_token(step_tokens, term(t)); };
  compute(named("micro.compute"), work, micro(Term::compute));
  if (term(Term::recompute) > 0.0) compute(named("micro.recompute"), work, micro(Term::recompute));
  communicate(tensor_kind(), streams::tensor, "train_tp", named("micro.tensor"), work,
              per_token(step_tokens, term(Term::tensor), price.tensor_payload));
  communicate(OpKind::all_to_all, streams::tensor, "train_data", named("micro.expert"), work,
              per_token(step_tokens, term(Term::expert), price.expert_payload));
  communicate(context_kind(), streams::tensor, "train_cp", named("micro.context"), work,
              per_token(step_tokens, term(Term::context), price.context_payload));
  b().begin_block(phase, "step");
  b().begin_call(named("step"), named("step."));
  // What a step waits for beyond its passes: nothing of it is a kernel.
  if (const double idle = term(Term::bubble) + term(Term::host); idle > 0.0)
    compute(named("step.bubble"), {grads}, always(idle));
  communicate(OpKind::all_gather, streams::tensor, "train_pp", named("step.pipeline"), {grads},
              always(term(Term::pipeline), price.pipeline_payload));
  // Parameters and gradients over the data ranks: the seconds of both that nothing hides, by what each moves.
  const double replicas = price.replica_payload,
               moved = price.data_reduce_payload + price.data_gather_payload + replicas;
  const auto share = [&](double payload) { return moved > 0.0 ? term(Term::data) * payload / moved : 0.0; };
  const bool replicated = point_.train.sharding == Sharding::replicated;
  communicate(replicated ? OpKind::all_reduce : OpKind::reduce_scatter, streams::reduce, "train_data",
              named("step.gradients"), {grads},
              always(moved > 0.0 ? share(price.data_reduce_payload) : term(Term::data), price.data_reduce_payload));
  communicate(OpKind::all_gather, streams::gather, "train_data", named("step.parameters"), {grads},
              always(share(price.data_gather_payload), price.data_gather_payload));
  communicate(OpKind::all_reduce, streams::reduce, "train_data", named("step.replicas"), {grads},
              always(share(replicas), replicas));
  Op& update =
      priced(OpKind::priced, streams::compute, named("step.optimizer"), {grads}, always(term(Term::optimizer)));
  for (const Tensor& t : state()) update.outputs.push_back(t);
  b().free(grads);
}

/// A phase in which training's side works.
void PricedPlanWriter::train_phase(std::string_view name, std::int32_t phase) {
  const double working = std::max(0.0, train_.total_bytes - train_.params - train_.optimizer - train_.critic -
                                           train_.reference - train_.overhead_bytes);
  if (name == "reference") passes(phase, name, layers_, false);
  else if (name == "old_logprobs") passes(phase, "old", layers_, true);
  else if (name == "values") passes(phase, name, rl_.critic_layers(point_.train, layers_), true);
  else if (name == "train") optimizer_steps(phase, name, step_, working);
  if (name != "critic") return;
  const TrainPrice t = model_.price(point_.train, rl_.critic_layers(point_.train, layers_));
  optimizer_steps(phase, name, t, std::max(0.0, t.peak_bytes - (t.state_bytes - t.grad_bytes)));
}

}  // namespace hotbunk
