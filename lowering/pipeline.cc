#include "lowering/pipeline.h"

#include <fmt/format.h>

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

StageTraining::StageTraining(const Scenario& s, ProgramBuilder& b, const TrainState& state, const Tensor& metrics)
    : s_(s),
      b_(b),
      state_(state),
      feeds_([&] {
        b.begin_call("train.stage", "train.");
        // The same for all slots, each of which is fed anew: calls that read them share their bodies.
        const Dim T = tokens(s.train.micro_batch_tokens);
        const auto make = [&](const char* name, DType dtype, const Dim& shape) {
          const BufferId id =
              b.managed(std::string("train.") + name, dtype, shape.size, Category::workspace, sections::transient);
          b.alloc(id, streams::h2d);
          allocated_.push_back(id);
          return b.view(id, dtype, {shape});
        };
        MicroFeeds f;
        if (state.part().first) f.tokens.ids = make("token_ids", DType::i32, T);
        f.tokens.positions = make("positions", DType::i32, T);
        f.tokens.cu_seqlens = make("cu_seqlens", DType::i32, fixed(packed_seqs(s) + 1));
        if (!state.part().last) return f;
        f.targets = make("targets", DType::i32, T);
        f.old_logps = make("old_logps", DType::f32, T), f.ref_logps = make("ref_logps", DType::f32, T);
        f.advantages = make("advantages", DType::f32, T), f.loss_weights = make("loss_weights", DType::f32, T);
        return f;
      }()),
      passes_(s, b, state, metrics, feeds_.tokens) {
  const TensorSharding& sharding = passes_.model().sharding();
  const Dim stream = sharding.stream_tokens(), width = fixed(s.model.hidden);
  const auto make = [&](const char* name, const Dim& rows) {
    const BufferId id = b.managed(std::string("train.") + name, sharding.compute, rows.size * width.size,
                                  Category::communication, sections::transient);
    b.alloc(id);
    allocated_.push_back(id);
    return b.view(id, sharding.compute, {rows, width});
  };
  if (!state.part().first) input_ = make("input", stream);
  if (!state.part().last) output_ = make("output", stream);
  gradient_ = make("gradient", stream);
  slots_.resize(static_cast<std::size_t>(pipeline_of(s).slots(state.stage(), most_micro_batches(s))));
}

void StageTraining::lower_passes(std::int32_t phase) {
  const bool first = state_.part().first, last = state_.part().last;
  const std::int64_t before = state_.stage() - 1, stage = state_.stage();
  const bool exchanges = pipeline_of(s_).schedule != PipelineSchedule::gpipe;
  // In an order in which each reads what those before have left.
  if (!first) message(phase, StageStep::output, before);
  for (std::int64_t j = 0; j < std::ssize(slots_); ++j) {
    b_.begin_block(phase, block_name(StageStep::forward, j));
    forward(j);
  }
  if (!last) message(phase, StageStep::output, stage);
  if (!last) message(phase, StageStep::gradient, stage);
  for (std::int64_t j = 0; j < std::ssize(slots_); ++j) {
    b_.begin_block(phase, block_name(StageStep::backward, j));
    backward(j);
  }
  if (!first) message(phase, StageStep::gradient, before);
  if (exchanges && !last) message(phase, StageStep::exchange, stage);
  if (exchanges && !first) message(phase, StageStep::exchange, before);
}

/// Between stage `edge` and the next one, of which this is one.
void StageTraining::message(std::int32_t phase, StageStep step, std::int64_t edge) {
  const std::string name = block_name(step, edge);
  b_.begin_block(phase, name);
  b_.begin_call("train.message", "train.");
  const bool forward = edge == state_.stage();  // this stage's output goes that way
  Tensor returned = gradient_;
  returned.shape[0].extent = returned_extent;
  std::vector<Tensor> sent, received;
  if (step != StageStep::gradient) (forward ? sent : received).push_back(forward ? output_ : input_);
  if (step != StageStep::output) (forward ? received : sent).push_back(returned);
  const OpKind kind = received.empty() ? OpKind::send : sent.empty() ? OpKind::recv : OpKind::send_recv;
  to_stage(b_.communicate(kind, streams::pipeline, Family::train_pp, "train." + name, sent, received),
           forward ? edge + 1 : edge);
}

/// A tensor that the slot's backward pass reads.
Tensor StageTraining::keep(const Tensor& t) {
  if (t.buffer >= 0) b_.keep(t.buffer);
  return t;
}

void StageTraining::forward(std::int64_t slot) {
  Slot& kept = slots_[static_cast<std::size_t>(slot)];
  const std::string name = fmt::format("train.slot{}.", slot);
  passes_.model().set_name(name);
  feed_tokens(b_, feeds_.tokens, state_.part().first);
  PackedModel::Stream stream;
  if (state_.part().first) {
    stream = passes_.model().embed(state_.gather(b_, 0, Weights::trained, "train."));
  } else {
    b_.begin_call("train.enter", name);
    stream.h = b_.transient(name + "entered", input_.dtype, {input_.shape[0], input_.shape[1]}, Category::activations);
    b_.emit(OpKind::copy, streams::compute, name + "enter", {input_}, {stream.h});
  }
  stream = passes_.forward(stream, kept.kept);
  for (const Values& layer : kept.kept.values)
    for (const Tensor& t : layer) keep(t);
  if (state_.part().last) {
    kept.left = {keep(stream.h), keep(stream.z)};
    return;
  }
  b_.begin_call("train.leave", name);
  add_up(b_, name + "leave", stream, output_);
}

void StageTraining::backward(std::int64_t slot) {
  Slot& kept = slots_[static_cast<std::size_t>(slot)];
  const bool last = state_.part().last;
  passes_.model().set_name(fmt::format("train.slot{}.", slot));
  feed_tokens(b_, feeds_.tokens, state_.part().first);
  if (last) feed_loss(b_, feeds_);
  WholeUnit root, d_root;
  Tensor gradient = gradient_;
  if (last) root = state_.gather(b_, 0, Weights::trained, "train.");
  if (state_.has_root()) d_root = state_.gradients(b_, 0, "train.");
  if (last) gradient = passes_.loss(feeds_, root, d_root, kept.left);
  passes_.backward(kept.kept, gradient);
  if (state_.part().first) passes_.embedding_backward(root, d_root, gradient);
  if (state_.has_root()) state_.reduce(b_, 0, d_root, "train.");
  if (!last) return;
  b_.begin_call("train.return", "train.");
  b_.emit(OpKind::copy, streams::compute, "train.return", {gradient}, {gradient_});
}

void StageTraining::free() {
  for (const BufferId id : allocated_) b_.free(id);
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
