// Training's pipeline as calls: each stage plays its own passes in its own order (layout/pipeline_schedule.h) and meets
// its neighbours in the messages between them. No bubble is priced; it is what a stage waits.
#include <fmt/format.h>

#include "layout/shard.h"
#include "lowering/sample_rows.h"
#include "planner/priced/writer.h"

namespace hotbunk {
namespace {

constexpr StreamId pipeline_stream{8};  // behind plan_streams()

}  // namespace

/// What a stage works with in a phase. Seconds and bytes of a pass: a micro-batch's or, interleaved, a chunk's of it.
struct PricedPlanWriter::StageWork {
  std::string what;  // the phase
  Pipeline schedule;
  double tokens = 0;               // of a full micro-batch, on the ranks that share its sequences
  std::int64_t buffer_tokens = 0;  // that one may hold
  StagePrice price = {};
  TrainModel::Hop hop;
  std::int64_t fills = 0;
  double beside = 0;                                       // seconds of a message that compute runs beside
  double activations = 0, communication = 0, library = 0;  // of the rest of a backward pass, beside what passes keep
  double gathered = 0;
  BufferId grads = -1, sent = -1, received = -1;
  // Of warm-up passes until their backward pass; GPipe: of all passes in one, until the step's end. That is also where
  // blocks have two forms: each buffer is freed in one place.
  std::vector<BufferId> kept = {};

  std::string named(std::string_view name) const { return fmt::format("{}.{}", what, name); }
  bool keeps_to_end() const { return schedule.schedule == PipelineSchedule::gpipe || schedule.defers_weights(); }
  std::int64_t own_warm_up(std::int64_t stage) const { return std::min(schedule.warm_up(stage), fills); }
};

/// Passes of a mini-batch at most. Known where all sequences are as long; else the pipeline is as deep as it can be.
std::int64_t PricedPlanWriter::most_passes() const {
  const auto fixed_length = [](const LengthSpec& l) { return l.distribution == LengthDistribution::fixed; };
  if (!fixed_length(scenario_.workload.prompt_tokens) || !fixed_length(scenario_.workload.response_tokens))
    return std::numeric_limits<std::int64_t>::max();
  // Samples that are alike are dealt evenly to mini-batches, to ranks, and to as few micro-batches as hold them.
  const TrainLayout& l = scenario_.train.layout;
  const std::int64_t held =
      std::min(micro_batch_capacity(scenario_) / max_sample_tokens(scenario_), max_micro_batch_seqs(scenario_));
  if (held < 1) return std::numeric_limits<std::int64_t>::max();  // a simulation says why
  const std::int64_t of_rank = ceil_div(ceil_div(num_samples(scenario_), scenario_.algorithm.mini_batches), l.dp);
  const std::int64_t most = std::max<std::int64_t>(1, ceil_div(of_rank, held));
  return most * l.vpp;
}

Tensor PricedPlanWriter::message_tensor(BufferId id) const {
  const double payload = model_.hop(point_.train, layers_).payload;
  const auto width = std::max<std::int64_t>(1, std::llround(payload / micro_tokens()));
  const Buffer& b = builder_->buffer(id);
  return builder_->view(id, DType::u8, {hotbunk::tokens(b.bytes() / width), fixed(width)});
}

/// A micro-batch's hidden states on their way to a neighbour and from one.
void PricedPlanWriter::add_messages(StageWork& w, double most_bytes) {
  const double width = std::max(1.0, std::round(w.hop.payload / w.tokens));
  const auto most = static_cast<double>(w.buffer_tokens);
  const double each = width * std::clamp(std::floor(0.5 * most_bytes / width), 1.0, most);
  w.sent = bytes(w.named("sent"), each, Category::communication, sections::transient);
  w.received = bytes(w.named("received"), each, Category::communication, sections::transient);
}

/// All stages wait for the last one: a gradient's norm, or what the last stage alone computes.
void PricedPlanWriter::stages_meet(const std::string& name, BufferId behind) {
  std::vector<Tensor> both;
  if (behind >= 0) {
    const BufferId all = b().transient(name, DType::u8, 64, Category::workspace);
    priced(OpKind::priced, streams::compute, name, {behind, all}, always(0.0));
    both = {b().whole(all)};
  }
  b().emit(OpKind::barrier, streams::control, fmt::format("{}.all_stages", name), both, both).group =
      family("train_pp");
  if (behind >= 0)
    priced(OpKind::priced, streams::compute, fmt::format("{}.known", name), {behind, both[0].buffer}, always(0.0));
}

/// Sends to a neighbouring stage, receives from it, or both at once. A stage's place in its group is its number.
void PricedPlanWriter::exchange_with(const StageWork& w, const std::string& name, std::int64_t stage, bool sends,
                                     bool receives) {
  if (stage < 0 || stage >= w.schedule.stages || (!sends && !receives)) return;
  const OpKind kind = !receives ? OpKind::send : sends ? OpKind::send_recv : OpKind::recv;
  std::vector<Tensor> in, out;
  if (sends) in.push_back(message_tensor(w.sent));
  if (receives) out.push_back(message_tensor(w.received));
  Op& op = b().emit(kind, pipeline_stream, name, std::move(in), std::move(out));
  op.group = family("train_pp");
  op.prices = per_token(w.tokens, w.hop.seconds);
  with(op, Attr::peer, stage);
  if (kind == OpKind::send_recv) with(op, Attr::source, stage);
}

/// Tensor-parallel ranks that received disjoint parts have the whole before they compute.
void PricedPlanWriter::arrive(const StageWork& w, const std::string& name) {
  communicate(OpKind::all_gather, streams::tensor, "train_tp", name, {w.received},
              per_token(w.tokens, w.hop.gather_seconds, w.hop.gather_payload));
}

/// `beside`: seconds of its compute that have a place of their own.
void PricedPlanWriter::pass(const StageWork& w, const std::string& name, const PassPrice& p, std::vector<BufferId> work,
                            double beside) {
  const auto chunks = static_cast<double>(w.schedule.chunks);
  const auto part = [&](double seconds, double payload = 0.0) {
    return per_token(w.tokens, std::max(0.0, seconds) / chunks, std::max(0.0, payload) / chunks);
  };
  work.push_back(w.sent), work.push_back(w.received);
  compute(name, work, part(p.compute - p.ring.attention - beside * chunks));
  if (p.recompute > p.ring_again.attention)
    compute(name + ".recompute", work, part(p.recompute - p.ring_again.attention));
  communicate(tensor_kind(), streams::tensor, "train_tp", name + ".tensor", work, part(p.tensor, p.payload.tensor));
  communicate(OpKind::all_to_all, streams::tensor, "train_experts", name + ".expert", work,
              part(p.expert, p.payload.expert));
  if (!passes_ring()) {
    communicate(context_kind(), streams::tensor, "train_cp", name + ".context", work,
                part(p.context, p.payload.context));
    return;
  }
  // Of its payload what runs again is a third, of three times K and V.
  const double again = p.ring_again.messages > 0.0 ? p.payload.context / 3.0 : 0.0;
  const auto ring = [&](const std::string& what, const RingPrice& r, double payload) {
    if (r.messages > 0.0)
      pass_around(name + what, work, {r.messages / chunks, r.attention / chunks}, payload / chunks, w.tokens);
  };
  ring(".ring_again", p.ring_again, again);
  ring(".ring", p.ring, p.payload.context - again);
}

/// One forward pass over all micro-batches, stage by stage.
void PricedPlanWriter::stage_passes(std::int32_t phase, std::string_view what, const TrainPrice& price, bool trained) {
  const RlModel::Scoring by = rl_.scoring(point_.train, layers_, what == "values");
  const TrainPoint& p = by.point;
  StageWork w{.what = std::string(what),
              .schedule = {p.pp},
              .tokens = static_cast<double>(p.micro_batch) * static_cast<double>(model_.setting().sequence),
              .buffer_tokens = as_scored(scenario_).train.micro_batch_tokens * p.cp * p.ulysses,
              .hop = by.model->hop(p, by.layers)};
  const PassPrice own = by.model->scoring_pass(p, by.layers, stage_);
  const double swapped = trained ? 0.0 : train_.swapped_reference;
  b().begin_block(phase, "begin");
  b().begin_call(w.named("begin"), w.named(""));
  if (swapped > 0.0)
    priced(OpKind::priced, streams::h2d, w.named("upload"),
           {b().transient(w.named("uploaded"), DType::u8, whole_bytes(swapped), Category::params)},
           always(model_.cost().host_copy_seconds(swapped)));
  if (const double driver = driver_seconds(what); driver > 0.0)
    priced(OpKind::priced, streams::host, w.named("driver"), {}, always(driver));
  b().begin_block(phase, "micro");
  b().begin_call(w.named("micro"), w.named(""));
  add_messages(w, 2.0 * by.layers.dense.kept_full_bytes);
  const std::vector<BufferId> work =
      scoring_work(what, by, swapped, 2.0 * static_cast<double>(b().buffer(w.sent).bytes()));
  b().alloc(w.sent), b().alloc(w.received);
  gathered_parameters(what, work[0], price,
                      setting().mini_batches * by.model->exposed_gathers(p, by.layers, own.total(), trained));
  exchange_with(w, w.named("receive"), stage_ - 1, false, true);
  if (stage_ > 0) arrive(w, w.named("arrive"));
  pass(w, w.named("forward"), own, work, 0.0);
  exchange_with(w, w.named("send"), stage_ + 1, true, false);
  b().free(w.sent), b().free(w.received);
  b().begin_block(phase, "end");
  b().begin_call(w.named("end"), w.named(""));
  stages_meet(w.named("end"), -1);
}

TrainModel::Hop PricedPlanWriter::message() const { return model_.hop(point_.train, layers_); }

PricedPlanWriter::StageWork PricedPlanWriter::stage_work(std::string_view what, const TrainPrice& whole,
                                                         const TrainModel::Layers& layers) {
  const Pipeline schedule = pipeline_of(scenario_);
  StageWork w{.what = std::string(what),
              .schedule = schedule,
              .tokens = micro_tokens(),
              .buffer_tokens = scenario_.train.micro_batch_tokens * point_.train.cp * point_.train.ulysses,
              .price = model_.stage_price(point_.train, layers, stage_, whole),
              .hop = message(),
              .fills = schedule.fills(most_passes())};
  const TrainPrice& held = w.price.held;
  double left = std::max(0.0, held.peak_bytes - (held.state_bytes - held.grad_bytes));
  const auto take = [&](double most) {
    const double taken = std::clamp(most, 0.0, left);
    left -= taken;
    return taken;
  };
  const auto of = [&](Category c) { return take(w.price.held.bytes[static_cast<std::size_t>(c)]); };
  w.grads = bytes(w.named("grads"), take(w.price.held.grad_bytes), Category::grads, sections::transient);
  w.activations = of(Category::activations);
  w.communication = of(Category::communication);
  w.library = of(Category::workspace);
  w.gathered = left;
  add_messages(w, w.communication);
  w.communication -= 2.0 * static_cast<double>(b().buffer(w.sent).bytes());
  const double kept = whole_bytes(w.price.kept_bytes);
  const bool all_at_once = schedule.schedule == PipelineSchedule::gpipe;
  const auto passes = static_cast<std::int64_t>(
      std::llround(model_.in_flight(point_.train, stage_) * static_cast<double>(schedule.chunks)));
  if (all_at_once)
    w.kept.push_back(
        bytes(w.named("kept"), static_cast<double>(passes) * kept, Category::activations, sections::transient));
  for (std::int64_t k = 0; !all_at_once && k < w.own_warm_up(stage_); ++k)
    w.kept.push_back(bytes(w.named(fmt::format("kept.{}", k)), kept, Category::activations, sections::transient));
  w.activations = std::max(0.0, w.activations - static_cast<double>(passes) * kept);
  const auto shortest = [&](const PassPrice& p) {
    return std::max(0.0, p.compute - p.ring.attention) / static_cast<double>(schedule.chunks);
  };
  if (model_.framework().overlap_pipeline)
    w.beside = std::min({w.hop.seconds, shortest(w.price.forward), shortest(w.price.backward)});
  return w;
}

/// Transients of one pass, beside what it keeps.
std::vector<BufferId> PricedPlanWriter::work_of(const StageWork& w, const std::string& name, double activations,
                                                bool backward) {
  std::vector<BufferId> out;
  const auto add = [&](const char* of, double size, Category category) {
    if (size >= 1.0)
      out.push_back(b().transient(fmt::format("{}.{}", name, of), DType::u8, whole_bytes(size), category));
  };
  add("activations", activations + (backward ? w.activations : 0.0), Category::activations);
  add("communication", w.communication, Category::communication);
  add("workspace", w.library, Category::workspace);
  if (backward) add("gathered", w.gathered, Category::params);
  return out;
}

/// Warm-up. What the stage before sends ahead is received also where this one has no more to warm up.
void PricedPlanWriter::fill(const StageWork& w, std::int64_t number) {
  const std::string name = w.named(fmt::format("fill.{}", number));
  const bool computes = number < w.schedule.warm_up(stage_);
  if (stage_ > 0 && number < w.schedule.warm_up(stage_ - 1))
    exchange_with(w, name + ".receive", stage_ - 1, false, true);
  if (!computes) return;
  const BufferId kept = w.kept[static_cast<std::size_t>(number)];
  if (!w.keeps_to_end()) b().alloc(kept);
  if (stage_ > 0) arrive(w, name + ".arrive");
  auto work = work_of(w, name, 0.0, false);
  work.push_back(kept);
  pass(w, name, w.price.forward, work, 0.0);
  exchange_with(w, name + ".send", stage_ + 1, true, false);
}

/// The next forward pass, between two backward passes; GPipe's, of which all come first, also receives and sends.
void PricedPlanWriter::forward(const StageWork& w) {
  const bool first = w.schedule.schedule == PipelineSchedule::gpipe;
  const std::string name = w.named("forward");
  if (first) exchange_with(w, name + ".receive", stage_ - 1, false, true);
  if (stage_ > 0) arrive(w, name + ".arrive");
  pass(w, name, w.price.forward, work_of(w, name, first ? 0.0 : w.price.kept_bytes, false), first ? 0.0 : w.beside);
  if (first) exchange_with(w, name + ".send", stage_ + 1, true, false);
}

/// A backward pass, with the messages on both of its sides. Where the framework overlaps messages, the end of the pass
/// before each runs beside it.
void PricedPlanWriter::backward(const StageWork& w, const PipelineStep& step) {
  const bool gpipe = w.schedule.schedule == PipelineSchedule::gpipe;
  const bool drains = step.block == PipelineBlock::drain;
  const auto still = [&](std::int64_t stage) {  // has a forward pass in front of this backward pass
    return !gpipe && stage >= 0 && (!drains || step.number >= w.schedule.warm_up(stage));
  };
  const std::string name = w.named(name_of(step));
  const auto beside = [&](const char* of) {
    if (w.beside <= 0.0) return;
    const BufferId end = b().transient(fmt::format("{}.{}", name, of), DType::u8, 64, Category::workspace);
    compute(fmt::format("{}.{}", name, of), {end}, per_token(w.tokens, w.beside));
  };
  exchange_with(w, name + ".forward_message", stage_ + 1, still(stage_), true);
  if (still(stage_)) beside("forward_end");
  if (stage_ + 1 < w.schedule.stages) arrive(w, name + ".arrive");
  const std::vector<BufferId> behind = backward_pass(w, name, step);
  exchange_with(w, name + ".backward_message", stage_ - 1, true, still(stage_ - 1));
  beside("backward_end");
  if (step.weights) weight_gradients(w, name + ".deferred", behind);
}

/// Of an earlier pass: nobody waits for them. They come behind all of a pass that worked in `behind`, the ring's last
/// messages too: those are its layers' own, which nothing but their attention hides.
void PricedPlanWriter::weight_gradients(const StageWork& w, const std::string& name, std::vector<BufferId> behind) {
  behind.push_back(w.grads);
  compute(name, behind, per_token(w.tokens, w.price.weight_grad / static_cast<double>(w.schedule.chunks)));
}

/// What it worked in.
std::vector<BufferId> PricedPlanWriter::backward_pass(const StageWork& w, const std::string& name,
                                                      const PipelineStep& step) {
  const bool gpipe = w.schedule.schedule == PipelineSchedule::gpipe;
  const bool warmed = !gpipe && step.block == PipelineBlock::drain && step.number < w.own_warm_up(stage_);
  std::vector<BufferId> work = work_of(w, name, warmed || gpipe ? 0.0 : w.price.kept_bytes, true);
  PassPrice own = w.price.backward;
  if (w.schedule.defers_weights()) own.compute -= w.price.weight_grad;
  if (warmed) work.push_back(w.kept[static_cast<std::size_t>(step.number)]);
  std::vector<BufferId> with_grads = work;
  with_grads.push_back(w.grads);
  pass(w, name, own, with_grads, w.beside);
  if (warmed && !w.keeps_to_end()) b().free(w.kept[static_cast<std::size_t>(step.number)]);
  return work;
}

/// Gradients and messages live from a step's first pass to its end.
void PricedPlanWriter::stage_steps(std::int32_t phase, std::string_view what, const TrainPrice& whole,
                                   const TrainModel::Layers& layers) {
  const StageWork w = stage_work(what, whole, layers);
  for (const PipelineStep& step : pipeline_blocks(w.schedule, w.fills)) {
    b().begin_block(phase, name_of(step));
    b().begin_call(w.named(name_of(step.block)), w.named(""));
    switch (step.block) {
      case PipelineBlock::begin:
        for (const BufferId id : {w.grads, w.sent, w.received}) b().alloc(id);
        for (const BufferId id : w.kept)
          if (w.keeps_to_end()) b().alloc(id);
        break;
      case PipelineBlock::fill:
        fill(w, step.number);
        break;
      case PipelineBlock::forward:
        if (most_passes() > w.schedule.warm_up(stage_)) forward(w);
        break;
      case PipelineBlock::backward:
        if (most_passes() <= w.fills) break;  // never played: all of them are warm-up somewhere
        [[fallthrough]];
      case PipelineBlock::drain:
        backward(w, step);
        break;
      case PipelineBlock::weights:
        weight_gradients(w, w.named("weights"), {});
        break;
      case PipelineBlock::step:
        if (const double idle = w.price.host + w.price.slowed; idle > 0.0)
          compute(w.named("step.waits"), {w.grads}, always(idle));
        step_end(what, w.grads, w.price.held, w.price.data, w.price.optimizer);
        for (const BufferId id : {w.grads, w.sent, w.received}) b().free(id);
        for (const BufferId id : w.kept)
          if (w.keeps_to_end()) b().free(id);
    }
  }
}

}  // namespace hotbunk
