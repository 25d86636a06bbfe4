// The training phases: forward, loss, explicit backward and optimizer step under FSDP2, and the log-prob passes.
#include <fmt/format.h>

#include <optional>

#include "lowering/decoder.h"
#include "lowering/sample_rows.h"
#include "lowering/train_state.h"

namespace hotbunk {
namespace {

using R = ParamRole;

constexpr std::int64_t num_metrics = static_cast<std::int64_t>(Metric::count);

TokenFeeds feed_tokens(const Scenario& s, ProgramBuilder& b, const std::string& prefix) {
  const Dim T = tokens(s.train.micro_batch_tokens);
  TokenFeeds f;
  f.ids = b.transient(prefix + "token_ids", DType::i32, {T}, Category::workspace);
  f.positions = b.transient(prefix + "positions", DType::i32, {T}, Category::workspace);
  f.cu_seqlens =
      b.transient(prefix + "cu_seqlens", DType::i32, {fixed(max_micro_batch_seqs(s) + 1)}, Category::workspace);
  b.feed(f.ids, Slot::token_ids);
  b.feed(f.positions, Slot::positions);
  b.feed(f.cu_seqlens, Slot::cu_seqlens);
  return f;
}

/// Per-token fp32 or int32 vectors that the Driver fills.
Tensor feed_vector(const Scenario& s, ProgramBuilder& b, const std::string& name, DType dtype, Slot slot) {
  const Tensor t = b.transient(name, dtype, {tokens(s.train.micro_batch_tokens)}, Category::workspace);
  b.feed(t, slot);
  return t;
}

/// Tokens of one logits chunk and their number of chunks.
struct Chunks {
  std::int64_t size = 0, count = 0;
};
Chunks loss_chunks(const Scenario& s) {
  const std::int64_t all = s.train.micro_batch_tokens;
  const std::int64_t size = s.train.loss_chunk_tokens > 0 ? std::min(all, s.train.loss_chunk_tokens) : all;
  return {size, ceil_div(all, size)};
}

/// Rows [begin, begin + size) of a [T, ...] tensor.
Tensor rows_of(const Tensor& t, std::int64_t begin, std::int64_t size) {
  Tensor out = t;
  std::int64_t row = size_of(t.dtype);
  for (int d = 1; d < t.rank; ++d) row *= t.shape[static_cast<std::size_t>(d)].size;
  out.offset_bytes += begin * row;
  out.shape[0] = tokens(std::min(size, t.shape[0].size - begin), begin);
  return out;
}

double logit_temperature(const Scenario& s) { return s.rollout.temperature > 0 ? s.rollout.temperature : 1.0; }

ParamRole head_role(const ModelSpec& m) { return m.tie_embeddings ? R::embedding : R::lm_head; }

/// FSDP2's limit: of the layers, the one that computes and those gathered ahead of it are whole.
SlotLimitId limit_layers(const Scenario& s, ProgramBuilder& b, const std::string& prefix) {
  return b.limit_slots(prefix + "layers", s.train.prefetch + 1);
}

/// Walks the units in an order and gathers each one `prefetch` units before it is used.
class Gathers {
 public:
  Gathers(const Scenario& s, ProgramBuilder& b, const TrainState& state, Weights which, std::string prefix,
          std::vector<std::size_t> order, std::optional<SlotLimitId> limit)
      : b_(b),
        state_(state),
        which_(which),
        prefix_(std::move(prefix)),
        order_(std::move(order)),
        limit_(limit),
        ahead_(static_cast<std::size_t>(s.train.prefetch)) {}

  /// The i-th unit of the order, whole; gathers those up to `prefetch` further.
  WholeUnit use(std::size_t i) {
    while (ready_.size() <= std::min(i + ahead_, order_.size() - 1))
      ready_.push_back(state_.gather(b_, order_[ready_.size()], which_, prefix_, limit_));
    return ready_[i];
  }

 private:
  ProgramBuilder& b_;
  const TrainState& state_;
  Weights which_;
  std::string prefix_;
  std::vector<std::size_t> order_;
  std::optional<SlotLimitId> limit_;
  std::size_t ahead_;
  std::vector<WholeUnit> ready_;
};

std::vector<std::size_t> layer_units(const TrainState& state, bool backward) {
  std::vector<std::size_t> out;
  for (std::size_t u = 1; u < state.units().size(); ++u) out.push_back(u);
  if (backward) out = {out.rbegin(), out.rend()};
  return out;
}

/// One micro-batch: forward, loss and backward.
class MicroBatch {
 public:
  MicroBatch(const Scenario& s, ProgramBuilder& b, const TrainState& state, const Tensor& metrics)
      : s_(s), b_(b), state_(state), metrics_(metrics), decoder_(s, b, "train.", feed_tokens(s, b, "train.")) {}

  void lower() {
    targets_ = feed_vector(s_, b_, "train.targets", DType::i32, Slot::targets);
    old_ = feed_vector(s_, b_, "train.old_logps", DType::f32, Slot::old_logps);
    ref_ = feed_vector(s_, b_, "train.ref_logps", DType::f32, Slot::ref_logps);
    advantages_ = feed_vector(s_, b_, "train.advantages", DType::f32, Slot::advantages);
    weights_ = feed_vector(s_, b_, "train.loss_weights", DType::f32, Slot::loss_weights);

    const WholeUnit root = state_.gather(b_, 0, Weights::trained, "train.");
    const std::size_t layers = state_.units().size() - 1;
    Decoder::Stream stream{decoder_.embed(root), std::nullopt};
    std::vector<LayerActivations> kept(layers);
    std::vector<WholeUnit> whole(layers);
    const bool reshards = s_.train.reshard_after_forward;
    const SlotLimitId two = limit_layers(s_, b_, "train."), one = b_.limit_slots("train.gradients", 1);
    Gathers forward(s_, b_, state_, Weights::trained, "train.forward.", layer_units(state_, false),
                    reshards ? std::optional(two) : std::nullopt);
    for (std::size_t i = 0; i < layers; ++i) {
      whole[i] = forward.use(i);
      stream = decoder_.layer_forward(whole[i], static_cast<int>(i), stream, kept[i]);
    }
    const Decoder::FinalNorm last = decoder_.final_norm(root, stream);
    const WholeUnit d_root = state_.gradients(b_, 0, "train.");
    const Tensor g = head(root, d_root, last);

    Gathers backward(s_, b_, state_, Weights::trained, "train.backward.", layer_units(state_, true), two);
    for (std::size_t i = layers; i-- > 0;) {
      const WholeUnit w = reshards ? backward.use(layers - 1 - i) : whole[i];
      if (s_.train.recompute == Recompute::full) decoder_.recompute_layer(w, static_cast<int>(i), kept[i]);
      if (s_.train.recompute == Recompute::selective) decoder_.recompute_selective(w, static_cast<int>(i), kept[i]);
      const WholeUnit dw = state_.gradients(b_, i + 1, "train.", one);
      decoder_.layer_backward(w, dw, static_cast<int>(i), kept[i], g, state_.accumulates());
      state_.reduce(b_, i + 1, dw, "train.");
    }
    embedding_backward(d_root, g);
    state_.reduce(b_, 0, d_root, "train.");
  }

 private:
  /// Logits, log-probs, loss and their backward, in chunks of tokens; returns d(stream) [T,H].
  Tensor head(const WholeUnit& root, const WholeUnit& d_root, const Decoder::FinalNorm& last) {
    const ModelSpec& m = s_.model;
    const Dim H = fixed(m.hidden), V = fixed(m.vocab);
    const DType compute = s_.train.precision.params;
    const Tensor w = root.matrix(b_, head_role(m)), dw = d_root.matrix(b_, head_role(m));
    const Tensor d_normed = b_.transient("train.d_final_normed", compute, {decoder_.T(), H}, Category::activations);
    const Chunks chunks = loss_chunks(s_);
    for (std::int64_t c = 0; c < chunks.count; ++c) {
      const std::string name = fmt::format("train.head{}.", chunks.count > 1 ? fmt::format(".{}", c) : "");
      const auto part = [&](const Tensor& t) { return rows_of(t, c * chunks.size, chunks.size); };
      const Tensor x = part(last.normed);
      const Dim T = x.shape[0];
      const auto make = [&](const char* what, std::initializer_list<Dim> shape, DType dtype) {
        return b_.transient(name + what, dtype, shape, Category::activations);
      };
      b_.begin_call("train.head", name);
      const Tensor logits = make("logits", {T, V}, DType::f32);
      const Tensor logp = make("logp", {T}, DType::f32), lse = make("lse", {T}, DType::f32),
                   entropy = make("entropy", {T}, DType::f32), d_logp = make("d_logp", {T}, DType::f32);
      b_.emit(OpKind::linear, streams::compute, name + "lm_head", {x, w}, {logits});
      Op& p = b_.emit(OpKind::log_prob, streams::compute, name + "log_prob", {logits, part(targets_)},
                      {logp, lse, entropy});
      with(with(p, Attr::vocab, m.vocab), Attr::temperature, logit_temperature(s_));
      Op& l = b_.emit(OpKind::token_loss, streams::compute, name + "loss",
                      {logp, part(old_), part(ref_), part(advantages_), part(weights_), entropy}, {d_logp, metrics_});
      with(with(with(l, Attr::clip_low, s_.algorithm.clip_low), Attr::clip_high, s_.algorithm.clip_high), Attr::kl_coef,
           s_.algorithm.reference ? s_.algorithm.kl_coef : 0.0);
      with(l, Attr::sft, std::int64_t{s_.algorithm.name == AlgorithmName::sft ? 1 : 0});
      with(l, Attr::reference, std::int64_t{s_.algorithm.reference ? 1 : 0});
      const Tensor d_logits = compute == DType::f32 ? logits : make("d_logits", {T, V}, compute);
      Op& d = b_.emit(OpKind::log_prob_backward, streams::compute, name + "log_prob.backward",
                      {logits, lse, part(targets_), d_logp}, {d_logits});
      with(with(d, Attr::vocab, m.vocab), Attr::temperature, logit_temperature(s_));
      b_.emit(OpKind::linear_dgrad, streams::compute, name + "lm_head.dgrad", {d_logits, w}, {part(d_normed)});
      with(b_.emit(OpKind::linear_wgrad, streams::compute, name + "lm_head.wgrad", {d_logits, x}, {dw}),
           Attr::accumulate, std::int64_t{state_.accumulates() || c > 0 ? 1 : 0});
    }
    b_.begin_call("train.final_norm.backward", "train.");
    const Tensor g = b_.transient("train.d_stream", compute, {decoder_.T(), H}, Category::activations);
    Op& n =
        b_.emit(OpKind::rms_norm_backward, streams::compute, "train.final_norm.backward",
                {d_normed, last.x, root.vector(b_, R::final_norm), last.rstd}, {g, d_root.vector(b_, R::final_norm)});
    with(with(n, Attr::residual, std::int64_t{0}), Attr::accumulate, std::int64_t{state_.accumulates() ? 1 : 0});
    return g;
  }

  void embedding_backward(const WholeUnit& d_root, const Tensor& g) {
    b_.begin_call("train.embedding.backward", "train.embedding.");
    const Tensor d_table = d_root.matrix(b_, R::embedding);
    // The scatter adds: into zeros, into the head's gradient when tied, or into what earlier micro-batches left.
    if (!state_.accumulates() && !s_.model.tie_embeddings)
      b_.emit(OpKind::zero, streams::compute, "train.embedding.zero", {}, {d_table});
    Op& e = b_.emit(OpKind::embedding_backward, streams::compute, "train.embedding.backward", {decoder_.ids(), g},
                    {d_table});
    with(with(with(e, Attr::accumulate, std::int64_t{1}), Attr::vocab_begin, std::int64_t{0}), Attr::vocab_end,
         s_.model.vocab);
  }

  const Scenario& s_;
  ProgramBuilder& b_;
  const TrainState& state_;
  Tensor metrics_;
  Decoder decoder_;
  Tensor targets_, old_, ref_, advantages_, weights_;
};

/// Norm over all shards of all ranks, clip, AdamW, metrics.
void lower_step(const Scenario& s, ProgramBuilder& b, const TrainState& state, const Tensor& metrics) {
  const OptimizerSpec& o = s.optimizer;
  const Tensor sum = b.transient("train.grad_squares", DType::f32, {fixed(1)}, Category::workspace);
  const Tensor coefficient = b.transient("train.clip_coefficient", DType::f32, {fixed(1)}, Category::workspace);
  const Tensor lr = b.transient("train.learning_rate", DType::f32, {fixed(2)}, Category::workspace);
  b.feed(lr, Slot::learning_rate);
  std::vector<BufferId> grads;
  for (std::size_t u = 0; u < state.units().size(); ++u) grads.push_back(state.reduced(b, u, "train."));
  for (std::size_t u = 0; u < state.units().size(); ++u) {
    const std::string name = "train.sum_squares." + state.units()[u].unit.name;
    const BufferId grad = grads[u];
    const std::int64_t accumulate = u > 0 ? 1 : 0;
    b.call("train.sum_squares", accumulate, name, {grad}, [&] {
      with(b.emit(OpKind::sum_squares, streams::compute, name, {b.whole(grad)}, {sum}), Attr::accumulate, accumulate);
    });
  }
  b.begin_call("train.norm", "train.");
  // As late as can be, and still in what all ranks add up: a request ends the run after the step it came in.
  b.feed(b.view(metrics.buffer, DType::f32, {fixed(1)}, static_cast<std::int64_t>(Metric::stop_requests)),
         Slot::stop_request);
  // Every copy of the shards has all gradients.
  const bool whole_copy_in_world = state.mesh().replicas == 1;
  if (state.shards() > 1)
    b.communicate(OpKind::all_reduce, streams::control, whole_copy_in_world ? Family::world : Family::fsdp,
                  "train.grad_squares.all_reduce", {sum}, {sum});
  if (state.mesh().ranks() > 1) {
    // The largest gaps are maxima, the other metrics are sums.
    static_assert(static_cast<int>(Metric::max_rollout_gap) == static_cast<int>(Metric::max_logp_gap) + 1);
    const Tensor gaps = b.transient("train.max_gaps", DType::f32, {fixed(num_max_metrics)}, Category::workspace);
    const Tensor gaps_in_metrics =
        b.view(metrics.buffer, DType::f32, {fixed(num_max_metrics)}, static_cast<std::int64_t>(Metric::max_logp_gap));
    b.emit(OpKind::copy, streams::compute, "train.max_gaps.take", {gaps_in_metrics}, {gaps});
    with(
        b.communicate(OpKind::all_reduce, streams::control, Family::world, "train.max_gaps.all_reduce", {gaps}, {gaps}),
        Attr::reduce_max, std::int64_t{1});
    b.communicate(OpKind::all_reduce, streams::control, Family::world, "train.metrics.all_reduce", {metrics},
                  {metrics});
    b.emit(OpKind::copy, streams::compute, "train.max_gaps.put", {gaps}, {gaps_in_metrics});
  }
  with(b.emit(OpKind::clip_coefficient, streams::compute, "train.clip", {sum}, {coefficient, metrics}), Attr::max_norm,
       o.max_grad_norm);
  for (std::size_t i = 0; i < grads.size(); ++i) {
    const UnitState& u = state.units()[i];
    const std::string name = "train.adamw." + u.unit.name;
    b.call("train.adamw", 0, name, {grads[i], u.shard, u.exp_avg, u.exp_avg_sq}, [&] {
      Op& a = b.emit(OpKind::adamw, streams::compute, name, {b.whole(grads[i]), lr, coefficient},
                     {b.whole(u.shard), b.whole(u.exp_avg), b.whole(u.exp_avg_sq)});
      with(with(with(with(a, Attr::beta1, o.beta1), Attr::beta2, o.beta2), Attr::eps, o.eps), Attr::weight_decay,
           o.weight_decay);
    });
  }
  state.publish(b, "train.");
  b.begin_call("train.metrics", "train.");
  b.fetch(metrics, Slot::metrics);
  for (std::size_t i = 0; i < grads.size(); ++i)
    if (grads[i] == state.units()[i].grad) b.free(grads[i]);
}

}  // namespace

void lower_train(const Scenario& s, ProgramBuilder& b, const TrainState& state, std::int32_t phase) {
  const BufferId metrics =
      b.managed("train.metrics", DType::f32, num_metrics, Category::workspace, sections::transient);
  b.begin_block(phase, "begin");
  b.alloc(metrics, streams::h2d);
  // What the log-prob pass measured on this rank travels with the metrics: zeros elsewhere.
  b.feed(b.whole(metrics), Slot::first_metrics);
  for (const UnitState& u : state.units()) {
    const std::string name = b.buffer(u.grad).name;  // a call makes buffers
    b.call("train.zero", 0, name + ".", {u.grad}, [&] {
      b.alloc(u.grad);
      b.emit(OpKind::zero, streams::compute, name + ".zero", {}, {b.whole(u.grad)});
    });
  }
  b.begin_block(phase, "micro");
  MicroBatch(s, b, state, b.whole(metrics)).lower();
  b.begin_block(phase, "step");
  lower_step(s, b, state, b.whole(metrics));
  b.free(metrics);
}

void lower_log_probs(const Scenario& s, ProgramBuilder& b, const TrainState& state, std::int32_t phase, Weights which,
                     const std::string& prefix) {
  b.begin_block(phase, "micro");
  const ModelSpec& m = s.model;
  Decoder decoder(s, b, prefix, feed_tokens(s, b, prefix));
  const Tensor targets = feed_vector(s, b, prefix + "targets", DType::i32, Slot::targets);
  const WholeUnit root = state.gather(b, 0, which, prefix);
  Decoder::Stream stream{decoder.embed(root), std::nullopt};
  Gathers gathers(s, b, state, which, prefix, layer_units(state, false), limit_layers(s, b, prefix));
  for (std::size_t i = 0; i + 1 < state.units().size(); ++i) {
    LayerActivations dropped;
    stream = decoder.layer_forward(gathers.use(i), static_cast<int>(i), stream, dropped);
  }
  const Decoder::FinalNorm last = decoder.final_norm(root, stream);
  const Tensor logps = b.transient(prefix + "logps", DType::f32, {decoder.T()}, Category::workspace);
  const Chunks chunks = loss_chunks(s);
  for (std::int64_t c = 0; c < chunks.count; ++c) {
    const std::string name = fmt::format("{}head{}.", prefix, chunks.count > 1 ? fmt::format(".{}", c) : "");
    const Tensor x = rows_of(last.normed, c * chunks.size, chunks.size);
    const Dim T = x.shape[0];
    b.begin_call(prefix + "head", name);
    const Tensor logits = b.transient(name + "logits", DType::f32, {T, fixed(m.vocab)}, Category::activations);
    const Tensor lse = b.transient(name + "lse", DType::f32, {T}, Category::activations);
    const Tensor entropy = b.transient(name + "entropy", DType::f32, {T}, Category::activations);
    b.emit(OpKind::linear, streams::compute, name + "lm_head", {x, root.matrix(b, head_role(m))}, {logits});
    Op& p = b.emit(OpKind::log_prob, streams::compute, name + "log_prob",
                   {logits, rows_of(targets, c * chunks.size, chunks.size)},
                   {rows_of(logps, c * chunks.size, chunks.size), lse, entropy});
    with(with(p, Attr::vocab, m.vocab), Attr::temperature, logit_temperature(s));
  }
  b.begin_call(prefix + "logps", prefix);
  b.fetch(logps, Slot::logps);
}

}  // namespace hotbunk
