#include "lowering/pipeline.h"

#include <fmt/format.h>

#include <set>
#include <utility>

#include "lowering/sample_rows.h"

namespace hotbunk {
namespace {

Op& to_stage(Op& op, std::int64_t stage) {
  with(op, Attr::peer, stage);
  return op.kind == OpKind::send_recv ? with(op, Attr::source, stage) : op;
}

/// The residual stream as one tensor.
void add_up(ProgramBuilder& b, const std::string& name, const PackedModel::Stream& stream, const Tensor& sum) {
  if (stream.z.buffer >= 0) b.emit(OpKind::add, streams::compute, name, {stream.h, stream.z}, {sum});
  else b.emit(OpKind::copy, streams::compute, name, {stream.h}, {sum});
}

}  // namespace

StageMessages::StageMessages(const Scenario& s, ProgramBuilder& b, const TrainState& state,
                             const TensorSharding& sharding, std::string prefix, PipelinePasses which)
    : b_(b),
      prefix_(std::move(prefix)),
      pipeline_(pipeline_of(s)),
      stage_(state.stage()),
      room_((*state.shapes().rooms(pipeline_, most_micro_batches(s), which))[static_cast<std::size_t>(stage_)]) {
  const Dim rows = sharding.stream_tokens(), width = fixed(s.model.hidden);
  const bool several = pipeline_.chunks > 1, trains = which == PipelinePasses::both_ways;
  const auto made = [&](const char* name) { return make(name, rows, width, sharding.compute); };
  if (several || !state.part().first) input_ = made("input");
  if (several || !state.part().last) output_ = made("output");
  if (trains) gradient_ = made("gradient"), returned_ = several ? made("returned") : gradient_;
}

Tensor StageMessages::make(const std::string& name, const Dim& rows, const Dim& width, DType dtype) {
  const BufferId id =
      b_.managed(prefix_ + name, dtype, rows.size * width.size, Category::communication, sections::transient);
  b_.alloc(id);
  allocated_.push_back(id);
  return b_.view(id, dtype, {rows, width});
}

void StageMessages::before_forward(std::int32_t phase, std::int64_t chunk) {
  if (is_first(chunk)) return;
  message(phase, StageStep::output, model_chunk(chunk) - 1);
  if (!std::exchange(parks_outputs_, true))
    park(phase, StageStep::park_output, StageStep::take_output, input_, room_.parked_outputs);
}
void StageMessages::after_forward(std::int32_t phase, std::int64_t chunk) {
  if (!is_last(chunk)) message(phase, StageStep::output, model_chunk(chunk));
}
void StageMessages::before_backward(std::int32_t phase, std::int64_t chunk) {
  if (is_last(chunk)) return;
  message(phase, StageStep::gradient, model_chunk(chunk));
  if (!std::exchange(parks_gradients_, true))
    park(phase, StageStep::park_gradient, StageStep::take_gradient, gradient_, room_.parked_gradients);
}
void StageMessages::after_backward(std::int32_t phase, std::int64_t chunk) {
  if (!is_first(chunk)) message(phase, StageStep::gradient, model_chunk(chunk) - 1);
}
void StageMessages::exchanges(std::int32_t phase) {
  if (pipeline_.schedule == PipelineSchedule::gpipe) return;
  for (std::int64_t c = chunks(); c-- > 0;) {
    if (!is_last(c)) message(phase, StageStep::exchange, model_chunk(c));
    if (!is_first(c)) message(phase, StageStep::exchange, model_chunk(c) - 1);
  }
}

/// Between model chunk `edge` and the next one, of which this stage has one.
void StageMessages::message(std::int32_t phase, StageStep step, std::int64_t edge) {
  const std::string name = block_name(step, edge);
  b_.begin_block(phase, name);
  b_.begin_call(prefix_ + "message", prefix_);
  const bool forward = edge % pipeline_.stages == stage_;  // this stage's output goes that way
  Tensor gradient = forward ? gradient_ : returned_;
  gradient.shape[0].extent = returned_extent;
  std::vector<Tensor> sent, received;
  if (step != StageStep::gradient) (forward ? sent : received).push_back(forward ? output_ : input_);
  if (step != StageStep::output) (forward ? received : sent).push_back(gradient);
  const OpKind kind = received.empty() ? OpKind::send : sent.empty() ? OpKind::recv : OpKind::send_recv;
  to_stage(b_.communicate(kind, streams::pipeline, Family::train_pp, prefix_ + name, sent, received),
           (forward ? edge + 1 : edge) % pipeline_.stages);
}

void StageMessages::park(std::int32_t phase, StageStep to, StageStep back, const Tensor& tensor, std::int64_t places) {
  for (std::int64_t i = 0; i < places; ++i) {
    const Tensor parked =
        b_.transient(fmt::format("{}parked_{}.{}", prefix_, to == StageStep::park_output ? "output" : "gradient", i),
                     tensor.dtype, {tensor.shape[0], tensor.shape[1]}, Category::communication);
    b_.keep(parked.buffer);
    for (const StageStep step : {to, back}) {
      b_.begin_block(phase, block_name(step, i));
      b_.begin_call(prefix_ + "park", prefix_);
      b_.emit(OpKind::copy, streams::compute, prefix_ + block_name(step, i), {step == to ? tensor : parked},
              {step == to ? parked : tensor});
    }
  }
}

void StageMessages::free() {
  for (const BufferId id : allocated_) b_.free(id);
}

namespace {

/// What the Driver fills, the same for all blocks of a phase, each of which is fed anew: calls that read it share their
/// bodies. `metrics`: of training, with what the loss takes.
MicroFeeds shared_feeds(const Scenario& s, ProgramBuilder& b, const StagePart& part, const std::string& prefix,
                        const Tensor* metrics, std::vector<BufferId>& allocated) {
  b.begin_call(prefix + "stage", prefix);
  const Dim T = tokens(s.train.micro_batch_tokens);
  const auto make = [&](const char* name, DType dtype, const Dim& shape) {
    const BufferId id = b.managed(prefix + name, dtype, shape.size, Category::workspace, sections::transient);
    b.alloc(id, streams::h2d);
    allocated.push_back(id);
    return b.view(id, dtype, {shape});
  };
  MicroFeeds f;
  if (part.first) f.tokens.ids = make("token_ids", DType::i32, T);
  f.tokens.positions = make("positions", DType::i32, T);
  f.tokens.cu_seqlens = make("cu_seqlens", DType::i32, fixed(packed_seqs(s) + 1));
  if (metrics != nullptr) f.tokens.router_loss = router_loss_feeds(s, part, *metrics, make);
  if (!part.last) return f;
  f.targets = make("targets", DType::i32, T);
  if (metrics == nullptr) return f;
  f.old_logps = make("old_logps", DType::f32, T), f.ref_logps = make("ref_logps", DType::f32, T);
  f.advantages = make("advantages", DType::f32, T), f.loss_weights = make("loss_weights", DType::f32, T);
  return f;
}

/// What a chunk computes on: what the stage before sent.
PackedModel::Stream enter(ProgramBuilder& b, const std::string& prefix, const std::string& name, const Tensor& input) {
  b.begin_call(prefix + "enter", name);
  const Tensor entered =
      b.transient(name + "entered", input.dtype, {input.shape[0], input.shape[1]}, Category::activations);
  b.emit(OpKind::copy, streams::compute, name + "enter", {input}, {entered});
  return {entered, {}};
}

void leave(ProgramBuilder& b, const std::string& prefix, const std::string& name, const PackedModel::Stream& stream,
           const Tensor& output) {
  b.begin_call(prefix + "leave", name);
  add_up(b, name + "leave", stream, output);
}

}  // namespace

StageTraining::StageTraining(const Scenario& s, ProgramBuilder& b, const TrainState& state, const Tensor& metrics)
    : s_(s),
      b_(b),
      state_(state),
      feeds_(shared_feeds(s, b, state.part(), "train.", &metrics, allocated_)),
      passes_(s, b, state, metrics, feeds_.tokens),
      messages_(s, b, state, passes_.model().sharding(), "train.", PipelinePasses::both_ways) {
  for (const std::int64_t slots : messages_.room().slots) slots_.emplace_back(static_cast<std::size_t>(slots));
  if (!s.train.reshard_after_forward) passes_.hold(state.hold_layers(b, "train.held.", allocated_));
  if (state.keeps_parts()) passes_.keep_layers(allocated_);
}

/// In the order in which a full mini-batch comes to them first: so each reads what those before have left, and as many
/// slots are in use as ever are. A chunk's messages stand around its first row of passes, which is the same order on
/// all stages.
void StageTraining::lower_passes(std::int32_t phase) {
  const Pipeline& pipeline = messages_.pipeline();
  std::vector<StageTurn> firsts;
  std::set<std::string> names;
  for (StageTurn& t : stage_passes(pipeline, state_.stage(), most_micro_batches(s_))) {
    t.micro %= std::ssize(slots_[static_cast<std::size_t>(t.chunk)]);  // its slot
    if (names.insert(pass_name(t.step, pipeline.chunks, t.chunk, t.micro)).second) firsts.push_back(t);
  }
  std::set<std::pair<StageStep, std::int64_t>> before, after;
  for (std::size_t i = 0; i < firsts.size(); ++i) {
    const auto& [step, slot, returned, edge, chunk, place] = firsts[i];
    const bool begins = before.insert({step, chunk}).second;
    if (begins && step == StageStep::forward) messages_.before_forward(phase, chunk);
    if (begins && step == StageStep::backward) messages_.before_backward(phase, chunk);
    b_.begin_block(phase, pass_name(step, pipeline.chunks, chunk, slot));
    if (step == StageStep::forward) forward(chunk, slot);
    else if (step == StageStep::backward) backward(chunk, slot);
    else weights(chunk, slot);
    if (i + 1 < firsts.size() && firsts[i + 1].step == step && firsts[i + 1].chunk == chunk) continue;
    const bool ends = after.insert({step, chunk}).second;
    if (ends && step == StageStep::forward) messages_.after_forward(phase, chunk);
    if (ends && step == StageStep::backward) messages_.after_backward(phase, chunk);
  }
  messages_.exchanges(phase);
}

std::string StageTraining::slot_name(std::int64_t chunk, std::int64_t slot) const {
  return messages_.chunks() == 1 ? fmt::format("train.slot{}.", slot)
                                 : fmt::format("train.chunk{}.slot{}.", chunk, slot);
}

/// A tensor that the slot's backward pass reads.
Tensor StageTraining::keep(const Tensor& t) {
  if (t.buffer >= 0) b_.keep(t.buffer);
  return t;
}

void StageTraining::forward(std::int64_t chunk, std::int64_t slot) {
  Slot& kept = slots_[static_cast<std::size_t>(chunk)][static_cast<std::size_t>(slot)];
  const std::string name = slot_name(chunk, slot);
  passes_.model().set_name(name);
  const bool first = messages_.is_first(chunk);
  feed_tokens(b_, feeds_.tokens, first);
  PackedModel::Stream stream = first ? passes_.model().embed(state_.gather_outer(b_, Weights::trained, "train."))
                                     : enter(b_, "train.", name, messages_.input());
  stream = passes_.forward(stream, state_.layers_of(chunk), {}, kept.kept);
  for (const Values& layer : kept.kept.values)
    for (const Tensor& t : layer) keep(t);
  if (messages_.is_last(chunk)) kept.left = {keep(stream.h), keep(stream.z)};
  else leave(b_, "train.", name, stream, messages_.output());
}

void StageTraining::backward(std::int64_t chunk, std::int64_t slot) {
  Slot& kept = slots_[static_cast<std::size_t>(chunk)][static_cast<std::size_t>(slot)];
  const bool first = messages_.is_first(chunk), last = messages_.is_last(chunk);
  passes_.model().set_name(slot_name(chunk, slot));
  feed_tokens(b_, feeds_.tokens, first);
  if (last) feed_loss(b_, feeds_);
  feed_router_loss(b_, feeds_.tokens.router_loss);
  WholeUnit root, d_root;
  Tensor gradient = messages_.gradient();
  if (last) root = state_.gather_outer(b_, Weights::trained, "train.");
  if (first || last) d_root = state_.outer_gradients(b_, "train.");
  if (last) gradient = passes_.loss(feeds_, root, d_root, kept.left);
  passes_.backward(kept.kept, state_.layers_of(chunk), root, d_root, gradient, messages_.pipeline().defers_weights());
  if (first) passes_.embedding_backward(root, d_root, gradient);
  if (first || last) state_.reduce_outer(b_, d_root, "train.");
  if (first || gradient.buffer == messages_.returned().buffer) return;
  b_.begin_call("train.return", "train.");
  b_.emit(OpKind::copy, streams::compute, "train.return", {gradient}, {messages_.returned()});
}

void StageTraining::weights(std::int64_t chunk, std::int64_t slot) {
  passes_.model().set_name(slot_name(chunk, slot));
  passes_.weights(slots_[static_cast<std::size_t>(chunk)][static_cast<std::size_t>(slot)].kept,
                  state_.layers_of(chunk));
}

void StageTraining::free() {
  for (const BufferId id : allocated_) b_.free(id);
  messages_.free();
}

StageScoring::StageScoring(const Scenario& s, ProgramBuilder& b, const TrainState& state, std::int32_t phase,
                           Weights which, std::string prefix)
    : s_(s),
      b_(b),
      state_(state),
      phase_(phase),
      which_(which),
      prefix_(std::move(prefix)),
      feeds_([&] {
        b.begin_block(phase, "begin");
        return shared_feeds(s, b, state.part(), prefix_, nullptr, allocated_);
      }()),
      model_(s, b, prefix_, feeds_.tokens, state.part(), which),
      layers_(limit_layers(s, b, prefix_)),
      messages_(s, b, state, model_.sharding(), prefix_, PipelinePasses::forward) {}

void StageScoring::lower() {
  for (std::int64_t c = 0; c < messages_.chunks(); ++c) {
    messages_.before_forward(phase_, c);
    b_.begin_block(phase_, pass_name(StageStep::forward, messages_.chunks(), c, 0));
    forward(c);
    messages_.after_forward(phase_, c);
  }
  b_.begin_block(phase_, "end");
  for (const BufferId id : allocated_) b_.free(id);
  messages_.free();
}

void StageScoring::forward(std::int64_t chunk) {
  const bool first = messages_.is_first(chunk), last = messages_.is_last(chunk);
  const std::string name = fmt::format("{}chunk{}.", prefix_, chunk);
  model_.set_name(name);
  feed_tokens(b_, feeds_.tokens, first);
  if (last) b_.feed(feeds_.targets, Slot::targets);
  const WholeUnit root = first || last ? state_.gather_outer(b_, which_, prefix_) : WholeUnit{};
  PackedModel::Stream stream = first ? model_.embed(root) : enter(b_, prefix_, name, messages_.input());
  const Range layers = state_.layers_of(chunk);
  Gathers gathers(s_, b_, state_, which_, prefix_, layers_in_order(layers, false), root, layers_);
  for (std::int64_t i = layers.begin; i < layers.end; ++i) {
    Values dropped;
    stream = model_.layer_forward(gathers.use(static_cast<std::size_t>(i - layers.begin)),
                                  state_.layer(static_cast<std::size_t>(i)), stream, dropped);
  }
  if (last) lower_logps(s_, b_, model_, prefix_, root, stream, feeds_.targets);
  else leave(b_, prefix_, name, stream, messages_.output());
}

PackedModel::Stream receive_stream(ProgramBuilder& b, const TrainState& state, const PackedModel& model,
                                   const std::string& prefix) {
  b.begin_call(prefix + "enter", prefix);
  const TensorSharding& s = model.sharding();
  const Tensor entered =
      b.transient(prefix + "entered", s.compute, {s.stream_tokens(), fixed(s.model.hidden)}, Category::activations);
  to_stage(b.communicate(OpKind::recv, streams::pipeline, Family::train_pp, prefix + "receive", {}, {entered}),
           state.stage() - 1);
  return {entered, {}};
}

void send_stream(ProgramBuilder& b, const TrainState& state, const PackedModel& model, const std::string& prefix,
                 const PackedModel::Stream& stream) {
  b.begin_call(prefix + "leave", prefix);
  const TensorSharding& s = model.sharding();
  const Tensor sum =
      b.transient(prefix + "output", s.compute, {s.stream_tokens(), fixed(s.model.hidden)}, Category::communication);
  add_up(b, prefix + "leave", stream, sum);
  to_stage(b.communicate(OpKind::send, streams::pipeline, Family::train_pp, prefix + "send", {sum}, {}),
           state.stage() + 1);
}

}  // namespace hotbunk
