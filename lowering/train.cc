// The training phases: forward, loss, explicit backward and optimizer step under FSDP2, and the log-prob passes.
#include <optional>
#include <string>

#include "layout/placement.h"
#include "lowering/pipeline.h"
#include "lowering/train_passes.h"

namespace hotbunk {
namespace {

constexpr std::int64_t num_metrics = static_cast<std::int64_t>(Metric::count);

/// One micro-batch: forward, loss and backward.
void lower_micro_batch(const Scenario& s, ProgramBuilder& b, const TrainState& state, const Tensor& metrics) {
  MicroFeeds feeds;
  feeds.tokens = transient_tokens(s, b, "train.");
  feed_tokens(b, feeds.tokens);
  const auto vector = [&](const char* name, DType dtype) { return transient_vector(s, b, name, dtype); };
  feeds.tokens.router_loss =
      router_loss_feeds(s, state.part(), metrics, [&](const char* name, DType dtype, const Dim&) {
        return transient_vector(s, b, std::string("train.") + name, dtype);
      });
  TrainPasses passes(s, b, state, metrics, feeds.tokens);
  feeds.targets = vector("train.targets", DType::i32);
  feeds.old_logps = vector("train.old_logps", DType::f32);
  feeds.ref_logps = vector("train.ref_logps", DType::f32);
  feeds.advantages = vector("train.advantages", DType::f32);
  feeds.loss_weights = vector("train.loss_weights", DType::f32);
  feed_loss(b, feeds);
  feed_router_loss(b, feeds.tokens.router_loss);

  // A head that is a unit of its own is there from the last layer to the end of its backward.
  constexpr auto early = TrainState::Outer::all_but_loss;
  WholeUnit root = state.gather_outer(b, Weights::trained, "train.", early);
  TrainPasses::Kept kept;
  const PackedModel::Stream stream = passes.forward(passes.model().embed(root), state.layers_of(0), root, kept, [&] {
    state.add_loss_units(b, Weights::trained, "train.", root, passes.forward_limit());
  });
  const WholeUnit d_root = state.outer_gradients(b, "train.");
  const Tensor gradient = passes.loss(feeds, root, d_root, stream);
  state.reduce_loss_units(b, d_root, "train.");
  passes.backward(kept, state.layers_of(0), root, d_root, gradient);
  passes.embedding_backward(root, d_root, gradient);
  state.reduce_outer(b, d_root, "train.", early);
}

}  // namespace

void lower_train(const Scenario& s, ProgramBuilder& b, const TrainState& state, std::int32_t phase) {
  const BufferId metrics =
      b.managed("train.metrics", DType::f32, num_metrics, Category::workspace, sections::transient);
  b.begin_block(phase, "begin");
  b.alloc(metrics, streams::h2d);
  state.alloc_host_gradients(b);
  // What the log-prob pass measured on this rank travels with the metrics: zeros elsewhere.
  b.feed(b.whole(metrics), Slot::first_metrics);
  for (const UnitState& u : state.units()) {
    if (!u.is_trained()) continue;
    const std::string name = b.buffer(u.grad).name;  // a call makes buffers
    const StreamId at = b.is_on_host(u.grad) ? streams::host : streams::compute;
    b.call("train.zero", 0, name + ".", {u.grad}, [&] {
      b.alloc(u.grad, at);
      b.emit(OpKind::zero, at, name + ".zero", {}, {b.whole(u.grad)});
    });
  }
  if (state.mesh().stages > 1) {
    StageTraining stage(s, b, state, b.whole(metrics));
    stage.lower_passes(phase);
    b.begin_block(phase, "step");
    stage.free();
  } else {
    b.begin_block(phase, "micro");
    lower_micro_batch(s, b, state, b.whole(metrics));
    b.begin_block(phase, "step");
  }
  lower_step(s, b, state, b.whole(metrics));
  b.free(metrics);
}

void lower_log_probs(const Scenario& s, ProgramBuilder& b, const TrainState& state, std::int32_t phase, Weights which,
                     const std::string& prefix) {
  if (state.part().layers.size() > 1) return StageScoring(s, b, state, phase, which, prefix).lower();
  b.begin_block(phase, "micro");
  const TokenFeeds feeds = transient_tokens(s, b, prefix);
  feed_tokens(b, feeds, state.part().first);
  PackedModel model(s, b, prefix, feeds, state.part(), which);
  Tensor targets;
  if (state.part().last) {
    targets = transient_vector(s, b, prefix + "targets", DType::i32);
    b.feed(targets, Slot::targets);
  }
  WholeUnit root = state.gather_outer(b, which, prefix, TrainState::Outer::all_but_loss);
  PackedModel::Stream stream = state.part().first ? model.embed(root) : receive_stream(b, state, model, prefix);
  const SlotLimitId limit = limit_layers(s, b, prefix);
  Gathers gathers(s, b, state, which, prefix, layers_in_order(state.layers_of(0), false), root, limit);
  if (state.part().last) gathers.then([&] { state.add_loss_units(b, which, prefix, root, limit); });
  for (std::size_t i = 0; i < state.num_layers(); ++i) {
    Values dropped;
    stream = model.layer_forward(gathers.use(i), state.layer(i), stream, dropped);
  }
  gathers.end();
  if (!state.part().last) return send_stream(b, state, model, prefix, stream);
  lower_logps(s, b, model, prefix, root, stream, targets);
}

}  // namespace hotbunk
