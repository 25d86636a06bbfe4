// Training's micro-batches, optimizer steps and log-prob passes as priced blocks.
#include <fmt/format.h>

#include "base/check.h"
#include "planner/priced/writer.h"

namespace hotbunk {

/// One forward pass over all micro-batches. A reference that lives on the host comes up first.
void PricedPlanWriter::passes(std::int32_t phase, std::string_view what, const TrainPrice& price, bool trained) {
  if (pipelined()) return stage_passes(phase, what, price, trained);
  const RlModel::Scoring by = rl_.scoring(point_.train, layers_, what == "values");
  const ForwardSeconds seconds = rl_.forward_seconds(by, trained);
  const ForwardTraffic sent = by.model->forward_traffic(by.point, by.layers);
  const double times = setting().mini_batches;
  const auto part = [&](double of, double payload = 0.0) { return per_token(tokens(), times * of, times * payload); };
  b().begin_block(phase, "micro");
  b().begin_call(fmt::format("{}.micro", what), fmt::format("{}.", what));
  const auto named = [&](const char* name) { return fmt::format("{}.{}", what, name); };
  const double swapped = trained ? 0.0 : train_.swapped_reference;
  const std::vector<BufferId> work = scoring_work(what, by, swapped, 0.0);
  if (swapped > 0.0)
    priced(OpKind::priced, streams::h2d, named("upload"), work,
           per_token(tokens(), model_.cost().host_copy_seconds(swapped)));
  if (const double driver = driver_seconds(what); driver > 0.0)
    priced(OpKind::priced, streams::host, named("driver"), work, per_token(tokens(), driver));
  gathered_parameters(what, work[0], price, times * seconds.gathers);
  const double all = by.point.full_micro_batches();
  RingPrice ring = by.model->scoring_pass(by.point, by.layers, 0).ring;
  ring = {times * all * ring.messages, times * all * ring.attention};
  compute(named("forward"), work, per_token(tokens(), times * seconds.compute - ring.attention));
  communicate(tensor_kind(), streams::tensor, "train_tp", named("tensor"), work, part(seconds.tensor, sent.tensor));
  communicate(OpKind::all_to_all, streams::tensor, "train_experts", named("expert"), work,
              part(seconds.expert, sent.expert));
  if (passes_ring()) pass_around(named("ring"), work, ring, times * sent.context, tokens());
  else
    communicate(context_kind(), streams::tensor, "train_cp", named("context"), work,
                part(seconds.context, sent.context));
}

/// In each of cp - 1 steps a rank attends to the keys and values that it holds while it sends these on and receives the
/// next ones, in turns into one of two places. Of a step the longer counts, as the closed form has it of all together.
void PricedPlanWriter::pass_around(const std::string& name, const std::vector<BufferId>& work, const RingPrice& seconds,
                                   double payload_bytes, double tokens) {
  const std::int64_t steps = point_.train.cp - 1;
  const auto parts = static_cast<double>(steps);
  BufferId carrier = -1;
  for (const BufferId id : work)
    if (id >= 0 && b().buffer(id).category == Category::activations &&
        (carrier < 0 || b().buffer(id).bytes() > b().buffer(carrier).bytes()))
      carrier = id;
  if (carrier < 0)  // GPipe's are all in one buffer, for the whole step
    carrier = *std::ranges::max_element(work, {}, [&](BufferId id) {
      return id < 0 || b().buffer(id).category == Category::grads ? -1 : b().buffer(id).bytes();
    });
  HB_CHECK(carrier >= 0 && b().buffer(carrier).bytes() >= 192, "{}: no activations to pass around", name);
  // What a layer keeps of its keys and values is among the activations.
  const std::int64_t size = b().buffer(carrier).bytes();
  const double layer = std::max(layers_.dense.context_payload, layers_.moe.context_payload) / (3.0 * parts);
  const std::int64_t each = std::clamp<std::int64_t>(whole_bytes(layer) / 64 * 64, 64, size / 192 * 64);
  const auto place = [&](std::int64_t step) { return b().view(carrier, DType::u8, {fixed(each)}, step % 2 * each); };
  const Tensor rest = b().view(carrier, DType::u8, {fixed(size - 2 * each)}, 2 * each);
  for (std::int64_t step = 0; step < steps; ++step) {
    Op& sent = b().emit(OpKind::send_recv, streams::tensor, fmt::format("{}.{}", name, step), {place(step)},
                        {place(step + 1)});
    sent.group = family("train_cp");
    sent.prices = per_token(tokens, seconds.messages / parts, payload_bytes / parts);
    with(with(with(sent, Attr::peer, std::int64_t{1}), Attr::source, std::int64_t{-1}), Attr::relative,
         std::int64_t{1});
    Op& attends =
        b().emit(OpKind::priced, streams::compute, fmt::format("{}.attention.{}", name, step), {place(step)}, {rest});
    attends.prices = per_token(tokens, seconds.attention / parts);
  }
}

/// What a log-prob pass works in; first of all, its weights: gathered units, and a reference that came up.
/// `messages`: bytes of its communication that are booked elsewhere.
std::vector<BufferId> PricedPlanWriter::scoring_work(std::string_view what, const RlModel::Scoring& by, double swapped,
                                                     double messages) {
  const ScoringBytes bytes = by.model->scoring_bytes(by.point, by.layers, stage_);
  const auto transient = [&](const char* name, double size, Category category) {
    return b().transient(fmt::format("{}.{}", what, name), DType::u8, std::max<std::int64_t>(whole_bytes(size), 64),
                         category);
  };
  return {transient("weights", bytes.gathered + swapped, Category::params),
          transient("activations", bytes.activations, Category::activations),
          transient("communication", bytes.communication - messages, Category::communication)};
}

/// Sharded parameters, gathered once in a forward pass: of training's gathers one.
/// `seconds`: of an iteration.
void PricedPlanWriter::gathered_parameters(std::string_view what, BufferId weights, const TrainPrice& t,
                                           double seconds) {
  const TrainPoint& p = point_.train;
  if (!p.gathers_units()) return;
  const double runs = p.gathers_of_step();
  const double experts = t.expert_data_gather_payload / runs, others = t.data_gather_payload / runs - experts;
  const double of_others = experts > 0.0 ? seconds * others / (others + experts) : seconds;
  communicate(OpKind::all_gather, streams::gather, shard_family(), fmt::format("{}.parameters", what), {weights},
              per_run(tokens(), of_others, others));
  if (experts > 0.0)
    communicate(OpKind::all_gather, streams::gather, "train_expert_shard", fmt::format("{}.expert_parameters", what),
                {weights}, per_run(tokens(), seconds - of_others, experts));
}

/// Gradients live from a step's first micro-batch to its end, what else a step works in for a micro-batch.
void PricedPlanWriter::optimizer_steps(std::int32_t phase, std::string_view what, const TrainPrice& price,
                                       const TrainModel::Layers& layers, double working) {
  if (pipelined()) return stage_steps(phase, what, price, layers);
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
  const StagePrice stage = model_.stage_price(point_.train, layers, 0, price);
  const double all = point_.train.full_micro_batches();
  const auto of_step = [&](const RingPrice& r) { return RingPrice{all * r.messages, all * r.attention}; };
  const RingPrice forward = of_step(stage.forward.ring), backward = of_step(stage.backward.ring),
                  again = of_step(stage.backward.ring_again);
  compute(named("micro.compute"), work,
          per_token(step_tokens, term(Term::compute) - forward.attention - backward.attention));
  if (term(Term::recompute) > again.attention)
    compute(named("micro.recompute"), work, per_token(step_tokens, term(Term::recompute) - again.attention));
  communicate(tensor_kind(), streams::tensor, "train_tp", named("micro.tensor"), work,
              per_token(step_tokens, term(Term::tensor), price.tensor_payload));
  communicate(OpKind::all_to_all, streams::tensor, "train_experts", named("micro.expert"), work,
              per_token(step_tokens, term(Term::expert), price.expert_payload));
  if (passes_ring()) {
    // Backward's messages are K and V and their gradients.
    const double once = all * stage.forward.payload.context;
    pass_around(named("micro.ring"), work, forward, once, step_tokens);
    if (again.messages > 0.0) pass_around(named("micro.ring_again"), work, again, once, step_tokens);
    pass_around(named("micro.ring_backward"), work, backward, 2.0 * once, step_tokens);
  } else {
    communicate(context_kind(), streams::tensor, "train_cp", named("micro.context"), work,
                per_token(step_tokens, term(Term::context), price.context_payload));
  }
  b().begin_block(phase, "step");
  b().begin_call(named("step"), named("step."));
  // What a step waits for beyond its passes: nothing of it is a kernel.
  if (const double idle = term(Term::bubble) + term(Term::host); idle > 0.0)
    compute(named("step.bubble"), {grads}, always(idle));
  step_end(what, grads, price, term(Term::data), term(Term::optimizer));
  b().free(grads);
}

/// What follows a step's passes: gradients and parameters over the data ranks, and the update.
void PricedPlanWriter::step_end(std::string_view what, BufferId grads, const TrainPrice& moved, double data,
                                double optimizer) {
  const auto named = [&](const char* name) { return fmt::format("{}.{}", what, name); };
  struct Exchange {
    const char* name;
    OpKind kind;
    StreamId stream;
    const char* group;
    double payload;
  };
  const OpKind sum = point_.train.sharding == Sharding::replicated ? OpKind::all_reduce : OpKind::reduce_scatter;
  const Exchange parts[] = {
      {"step.gradients", sum, streams::reduce, shard_family(),
       moved.data_reduce_payload - moved.expert_data_reduce_payload},
      {"step.expert_gradients", sum, streams::reduce, "train_expert_shard", moved.expert_data_reduce_payload},
      {"step.replicas", OpKind::all_reduce, streams::reduce, "train_replicas", moved.replica_payload},
      {"step.expert_replicas", OpKind::all_reduce, streams::reduce, "train_expert_replicas",
       moved.expert_replica_payload},
      {"step.parameters", OpKind::all_gather, streams::gather, shard_family(),
       moved.data_gather_payload - moved.expert_data_gather_payload},
      {"step.expert_parameters", OpKind::all_gather, streams::gather, "train_expert_shard",
       moved.expert_data_gather_payload},
      {"step.kept_parameters", OpKind::all_gather, streams::gather, "train_reshard", moved.kept_gather_payload}};
  // The seconds of all that nothing hides, by what each moves.
  double all = 0.0;
  for (const Exchange& part : parts) all += part.payload;
  if (all <= 0.0 && data > 0.0) compute(named("step.data"), {grads}, always(data));
  for (const Exchange& part : parts)
    if (part.payload >= 1.0)
      communicate(part.kind, part.stream, part.group, named(part.name), {grads},
                  always(data * part.payload / all, part.payload));
  // Matrices to the ranks that orthogonalize them, and back: part of the update's seconds.
  const double matrices = moved.optimizer_payload <= 0.0
                              ? 0.0
                              : std::min(optimizer, 2.0 * model_.cost().collective_seconds(
                                                              OpKind::all_to_all, model_.groups(point_.train).shard(),
                                                              0.5 * moved.optimizer_payload));
  if (pipelined()) stages_meet(named("step.norm"), grads);
  communicate(OpKind::all_to_all, streams::reduce, shard_family(), named("step.matrices"), {grads},
              always(matrices, moved.optimizer_payload));
  Op& update = priced(OpKind::priced, streams::compute, named("step.optimizer"), {grads}, always(optimizer - matrices));
  for (const Tensor& t : state()) update.outputs.push_back(t);
}

/// A phase in which training's side works.
void PricedPlanWriter::train_phase(PlanPhase name, std::int32_t phase) {
  const double working = std::max(0.0, train_.total_bytes - train_.persistent());
  // Beside the actor, on ranks that are not this plan's: one wait.
  const auto wait_beside = [&](double seconds) {
    b().begin_block(phase, std::string(name_of(name)));
    priced(OpKind::priced, streams::compute, fmt::format("{}.beside", name_of(name)), {}, always(seconds)).outputs =
        state();
  };
  if (name == PlanPhase::reference && setting().reference_apart) return wait_beside(train_.reference_seconds);
  if (name == PlanPhase::reference) return passes(phase, "reference", step_, false);
  if (name == PlanPhase::old_logprobs) return passes(phase, "old", step_, true);
  if (name == PlanPhase::train) return optimizer_steps(phase, "train", step_, layers_, working);
  if (name != PlanPhase::values && name != PlanPhase::critic) return;
  if (setting().critic_apart)
    return wait_beside(name == PlanPhase::values ? train_.values_seconds : train_.critic_seconds);
  const TrainModel::Layers layers = rl_.critic_layers(point_.train, layers_);
  const TrainPrice t = model_.price(point_.train, layers);
  if (name == PlanPhase::values) passes(phase, "values", t, true);
  else optimizer_steps(phase, "critic", t, layers, std::max(0.0, t.peak_bytes - (t.state_bytes - t.grad_bytes)));
}

}  // namespace hotbunk
