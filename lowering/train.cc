// The training phases: forward, loss, explicit backward and optimizer step under FSDP2, and the log-prob passes.
#include <fmt/format.h>

#include <optional>

#include "layout/placement.h"
#include "lowering/packed_model.h"
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
  f.cu_seqlens = b.transient(prefix + "cu_seqlens", DType::i32, {fixed(packed_seqs(s) + 1)}, Category::workspace);
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

/// From the normed stream x [T,H] to the log-probs of the next tokens. Where a vocabulary is cut over ranks each finds
/// what its part adds, and all learn all (Megatron's vocab-parallel cross-entropy, with one exchange in place of
/// three).
struct TokenLogps {
  Tensor logits, lse;  // [T,V] of this rank's part; [T] over all of it
};
TokenLogps lower_token_logps(const Scenario& s, ProgramBuilder& b, const TensorSharding& sharding,
                             const std::string& name, const Tensor& x, const Tensor& head, const Tensor& targets,
                             const Tensor& logp, const Tensor& entropy) {
  const Dim T = x.shape[0];
  const auto make = [&](const char* what, std::initializer_list<Dim> shape, Category category) {
    return b.transient(name + what, DType::f32, shape, category);
  };
  const TokenLogps out{make("logits", {T, head.shape[0]}, Category::activations),
                       make("lse", {T}, Category::activations)};
  b.emit(OpKind::linear, streams::compute, name + "lm_head", {x, head}, {out.logits});
  if (sharding.tp.ranks == 1) {
    Op& p =
        b.emit(OpKind::log_prob, streams::compute, name + "log_prob", {out.logits, targets}, {logp, out.lse, entropy});
    with(with(p, Attr::vocab, s.model.vocab), Attr::temperature, logit_temperature(s));
    return out;
  }
  const Tensor stats = make("stats", {T, fixed(4)}, Category::activations),
               all = make("all_stats", {fixed(sharding.tp.ranks), T, fixed(4)}, Category::communication);
  Op& part = b.emit(OpKind::vocab_stats, streams::compute, name + "stats", {out.logits, targets}, {stats});
  with(with_vocabulary(part, sharding), Attr::temperature, logit_temperature(s));
  b.communicate(OpKind::all_gather, sharding.tp.stream, Family::train_tp, name + "stats.all_gather", {stats}, {all});
  with(b.emit(OpKind::vocab_log_prob, streams::compute, name + "log_prob", {all, targets}, {logp, out.lse, entropy}),
       Attr::temperature, logit_temperature(s));
  return out;
}

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
      : s_(s), b_(b), state_(state), metrics_(metrics), model_(s, b, "train.", feed_tokens(s, b, "train.")) {}

  void lower() {
    targets_ = feed_vector(s_, b_, "train.targets", DType::i32, Slot::targets);
    old_ = feed_vector(s_, b_, "train.old_logps", DType::f32, Slot::old_logps);
    ref_ = feed_vector(s_, b_, "train.ref_logps", DType::f32, Slot::ref_logps);
    advantages_ = feed_vector(s_, b_, "train.advantages", DType::f32, Slot::advantages);
    weights_ = feed_vector(s_, b_, "train.loss_weights", DType::f32, Slot::loss_weights);

    const WholeUnit root = state_.gather(b_, 0, Weights::trained, "train.");
    const std::size_t layers = state_.units().size() - 1;
    PackedModel::Stream stream = model_.embed(root);
    std::vector<Values> kept(layers);
    std::vector<WholeUnit> whole(layers);
    const bool reshards = s_.train.reshard_after_forward;
    const SlotLimitId two = limit_layers(s_, b_, "train."), one = b_.limit_slots("train.gradients", 1);
    Gathers forward(s_, b_, state_, Weights::trained, "train.forward.", layer_units(state_, false),
                    reshards ? std::optional(two) : std::nullopt);
    for (std::size_t i = 0; i < layers; ++i) {
      whole[i] = forward.use(i);
      stream = model_.layer_forward(whole[i], static_cast<int>(i), stream, kept[i]);
    }
    const Values end = model_.end(root, stream);
    const WholeUnit d_root = state_.gradients(b_, 0, "train.");
    const Tensor d_normed = head(root, d_root, model_.normed(root, end));
    const Tensor g = model_.end_backward(root, d_root, end, d_normed, state_.accumulates());

    Gathers backward(s_, b_, state_, Weights::trained, "train.backward.", layer_units(state_, true), two);
    for (std::size_t i = layers; i-- > 0;) {
      const WholeUnit w = reshards ? backward.use(layers - 1 - i) : whole[i];
      model_.recompute(w, static_cast<int>(i), kept[i]);
      const WholeUnit dw = state_.gradients(b_, i + 1, "train.", one);
      model_.layer_backward(w, dw, static_cast<int>(i), kept[i], g, state_.accumulates());
      state_.reduce(b_, i + 1, dw, "train.");
    }
    embedding_backward(root, d_root, g);
    state_.reduce(b_, 0, d_root, "train.");
  }

 private:
  /// Logits, log-probs, loss and their backward, in chunks of tokens; returns d(normed) [T,H], on each rank of a
  /// tensor-parallel group what its part of the vocabulary adds.
  Tensor head(const WholeUnit& root, const WholeUnit& d_root, const Tensor& normed) {
    const ModelSpec& m = s_.model;
    const DType compute = s_.train.precision.params;
    const Tensor w = root.tensor(b_, head_role(m)), dw = d_root.tensor(b_, head_role(m));
    const Tensor d_normed = model_.make_d_normed(root);
    const Chunks chunks = loss_chunks(s_);
    for (std::int64_t c = 0; c < chunks.count; ++c) {
      const std::string name = fmt::format("train.head{}.", chunks.count > 1 ? fmt::format(".{}", c) : "");
      const auto part = [&](const Tensor& t) { return rows_of(t, c * chunks.size, chunks.size); };
      const Tensor x = part(normed);
      const Dim T = x.shape[0];
      const auto make = [&](const char* what, std::initializer_list<Dim> shape, DType dtype) {
        return b_.transient(name + what, dtype, shape, Category::activations);
      };
      b_.begin_call("train.head", name);
      const Tensor logp = make("logp", {T}, DType::f32), entropy = make("entropy", {T}, DType::f32),
                   d_logp = make("d_logp", {T}, DType::f32);
      const auto [logits, lse] =
          lower_token_logps(s_, b_, model_.sharding(), name, x, w, part(targets_), logp, entropy);
      Op& l = b_.emit(OpKind::token_loss, streams::compute, name + "loss",
                      {logp, part(old_), part(ref_), part(advantages_), part(weights_), entropy}, {d_logp, metrics_});
      with(with(with(l, Attr::clip_low, s_.algorithm.clip_low), Attr::clip_high, s_.algorithm.clip_high), Attr::kl_coef,
           s_.algorithm.reference ? s_.algorithm.kl_coef : 0.0);
      with(l, Attr::sft, std::int64_t{s_.algorithm.name == AlgorithmName::sft ? 1 : 0});
      with(l, Attr::reference, std::int64_t{s_.algorithm.reference ? 1 : 0});
      const Tensor d_logits = compute == DType::f32 ? logits : make("d_logits", {T, w.shape[0]}, compute);
      Op& d = b_.emit(OpKind::log_prob_backward, streams::compute, name + "log_prob.backward",
                      {logits, lse, part(targets_), d_logp}, {d_logits});
      with(model_.sharding().tp.ranks > 1 ? with_vocabulary(d, model_.sharding()) : with(d, Attr::vocab, m.vocab),
           Attr::temperature, logit_temperature(s_));
      b_.emit(OpKind::linear_dgrad, streams::compute, name + "lm_head.dgrad", {d_logits, w}, {part(d_normed)});
      with(b_.emit(OpKind::linear_wgrad, streams::compute, name + "lm_head.wgrad", {d_logits, x}, {dw}),
           Attr::accumulate, std::int64_t{state_.accumulates() || c > 0 ? 1 : 0});
    }
    return d_normed;
  }

  void embedding_backward(const WholeUnit& root, const WholeUnit& d_root, const Tensor& g) {
    b_.begin_call("train.embedding.backward", "train.");
    // The scatter adds: into zeros, into the head's gradient when tied, or into what earlier micro-batches left.
    if (!state_.accumulates() && !s_.model.tie_embeddings)
      b_.emit(OpKind::zero, streams::compute, "train.embedding.zero", {}, {d_root.tensor(b_, R::embedding)});
    model_.embedding_backward(root, d_root, g);
  }

  const Scenario& s_;
  ProgramBuilder& b_;
  const TrainState& state_;
  Tensor metrics_;
  PackedModel model_;
  Tensor targets_, old_, ref_, advantages_, weights_;
};

/// Of what every tensor-parallel rank has, the gradients of which each has found only what its heads, or its tokens,
/// add: they are summed before anybody steps. Source: Megatron-LM (finalize_model_grads: layer norms and QK norms). A
/// router's come from what each rank's columns of the experts left.
/// Ranks that share a KV head have each what its own query heads add. No family: nothing is missing.
std::optional<Family> found_in_parts(const UnitParam& p, std::int64_t tensor, bool cuts_tokens) {
  if (p.step.repeat == 1) return std::nullopt;
  if (p.step.repeat < tensor) return Family::kv_sharers;
  const bool of_heads = p.role == R::q_norm || p.role == R::k_norm || p.role == R::k_proj || p.role == R::v_proj ||
                        p.role == R::k_bias || p.role == R::v_bias;
  return of_heads || p.role == R::router || cuts_tokens ? std::optional(Family::train_tp) : std::nullopt;
}

void sum_parts(const Scenario& s, ProgramBuilder& b, const TrainState& state, const std::vector<BufferId>& grads) {
  if (state.mesh().tensor == 1) return;
  for (std::size_t u = 0; u < grads.size(); ++u) {
    const ShardedUnit& unit = state.units()[u].unit;
    b.call("train.sum_parts", unit.kind, "train.sum_parts." + unit.name + ".", {grads[u]}, [&] {
      for (const UnitParam& p : unit.params) {
        const std::optional<Family> among = found_in_parts(p, state.mesh().tensor, s.train.layout.sp);
        if (!among) continue;
        const Tensor part = b.view(grads[u], b.buffer(grads[u]).dtype, {fixed(p.padded_elements())}, p.shard_offset);
        b.communicate(OpKind::all_reduce, streams::control, *among,
                      fmt::format("train.sum_parts.{}.{}", unit.name, p.shard_offset), {part}, {part});
      }
    });
  }
}

/// Adds up the squares of all gradients that this rank has, in one sum; of what tensor-parallel ranks have each a part
/// of, the parts of all of them.
void sum_squares(ProgramBuilder& b, const TrainState& state, const std::vector<BufferId>& grads, const Tensor& sum) {
  const std::int64_t tensor = state.mesh().tensor;
  Tensor common = sum, shared = sum;  // of what all of them have, and of KV heads that several have
  if (tensor > 1) {
    b.begin_call("train.sum_squares.zero", "train.");
    common = b.transient("train.grad_squares_in_common", DType::f32, {fixed(1)}, Category::workspace);
    shared = b.transient("train.grad_squares_shared", DType::f32, {fixed(1)}, Category::workspace);
    for (const Tensor& t : {sum, common, shared})
      b.emit(OpKind::zero, streams::compute, b.buffer(t.buffer).name + ".zero", {}, {t});
  }
  bool shares = false;
  for (std::size_t u = 0; u < grads.size(); ++u) {
    const ShardedUnit& unit = state.units()[u].unit;
    const std::string name = "train.sum_squares." + unit.name;
    const BufferId grad = grads[u];
    const auto add = [&](const std::string& op, const Tensor& of, const Tensor& to, bool accumulate) {
      with(b.emit(OpKind::sum_squares, streams::compute, op, {of}, {to}), Attr::accumulate,
           std::int64_t{accumulate ? 1 : 0});
    };
    if (tensor == 1) {
      b.call("train.sum_squares", u > 0 ? 1 : 0, name, {grad}, [&] { add(name, b.whole(grad), sum, u > 0); });
      continue;
    }
    shares |= std::ranges::any_of(unit.params,
                                  [&](const UnitParam& p) { return p.step.repeat > 1 && p.step.repeat < tensor; });
    b.call("train.sum_squares", unit.kind, name + ".", {grad}, [&] {
      for (std::size_t i = 0; i < unit.params.size();) {
        const UnitParam& first = unit.params[i];
        const std::int64_t repeat = first.step.repeat;
        std::int64_t elements = 0;
        for (; i < unit.params.size() && unit.params[i].step.repeat == repeat; ++i)
          elements += unit.params[i].has_place() ? unit.params[i].padded_elements() : 0;
        add(name + "." + std::to_string(i), b.view(grad, b.buffer(grad).dtype, {fixed(elements)}, first.shard_offset),
            repeat == 1        ? sum
            : repeat == tensor ? common
                               : shared,
            true);
      }
    });
  }
  if (tensor == 1) return;
  b.begin_call("train.sum_squares.all", "train.");
  const auto add_all = [&](const Tensor& t, std::optional<Family> among) {
    const std::string& name = b.buffer(t.buffer).name;
    if (among) b.communicate(OpKind::all_reduce, streams::control, *among, name + ".all_reduce", {t}, {t});
    if (t.buffer != sum.buffer) b.emit(OpKind::add, streams::compute, name + ".add", {sum, t}, {sum});
  };
  add_all(sum, Family::train_tp);
  if (shares) add_all(shared, Family::kv_parts);
  add_all(common, std::nullopt);
}

/// Norm over all shards of all ranks, clip, AdamW, metrics.
void lower_step(const Scenario& s, ProgramBuilder& b, const TrainState& state, const Tensor& metrics) {
  const OptimizerSpec& o = s.optimizer;
  const Tensor sum = b.transient("train.grad_squares", DType::f32, {fixed(1)}, Category::workspace);
  const Tensor coefficient = b.transient("train.clip_coefficient", DType::f32, {fixed(1)}, Category::workspace);
  const Tensor lr = b.transient("train.learning_rate", DType::f32, {fixed(2)}, Category::workspace);
  b.feed(lr, Slot::learning_rate);
  std::vector<BufferId> grads;
  for (std::size_t u = 0; u < state.units().size(); ++u) grads.push_back(state.reduced(b, u, "train."));
  sum_parts(s, b, state, grads);
  sum_squares(b, state, grads, sum);
  b.begin_call("train.norm", "train.");
  // As late as can be, and still in what all ranks add up: a request ends the run after the step it came in.
  b.feed(b.view(metrics.buffer, DType::f32, {fixed(1)}, static_cast<std::int64_t>(Metric::stop_requests)),
         Slot::stop_request);
  // Every copy of the shards has all gradients.
  const ShardMesh& mesh = state.mesh();
  if (state.shards() > 1)
    b.communicate(OpKind::all_reduce, streams::control, mesh.ranks() == mesh.shards ? Family::world : Family::fsdp,
                  "train.grad_squares.all_reduce", {sum}, {sum});
  if (mesh.tensor > 1) {  // ranks of one tensor-parallel place add up their metrics; a request may come to any rank
    const Tensor stop =
        b.view(metrics.buffer, DType::f32, {fixed(1)}, static_cast<std::int64_t>(Metric::stop_requests));
    b.communicate(OpKind::all_reduce, streams::control, Family::train_tp, "train.stop.all_reduce", {stop}, {stop});
  }
  if (mesh.data() > 1) {
    const Family data = mesh.tensor > 1 ? Family::data : Family::world;
    // The largest gaps are maxima, the other metrics are sums.
    static_assert(static_cast<int>(Metric::max_rollout_gap) == static_cast<int>(Metric::max_logp_gap) + 1);
    const Tensor gaps = b.transient("train.max_gaps", DType::f32, {fixed(num_max_metrics)}, Category::workspace);
    const Tensor gaps_in_metrics =
        b.view(metrics.buffer, DType::f32, {fixed(num_max_metrics)}, static_cast<std::int64_t>(Metric::max_logp_gap));
    b.emit(OpKind::copy, streams::compute, "train.max_gaps.take", {gaps_in_metrics}, {gaps});
    with(b.communicate(OpKind::all_reduce, streams::control, data, "train.max_gaps.all_reduce", {gaps}, {gaps}),
         Attr::reduce_max, std::int64_t{1});
    b.communicate(OpKind::all_reduce, streams::control, data, "train.metrics.all_reduce", {metrics}, {metrics});
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
  PackedModel model(s, b, prefix, feed_tokens(s, b, prefix));
  const Tensor targets = feed_vector(s, b, prefix + "targets", DType::i32, Slot::targets);
  const WholeUnit root = state.gather(b, 0, which, prefix);
  PackedModel::Stream stream = model.embed(root);
  Gathers gathers(s, b, state, which, prefix, layer_units(state, false), limit_layers(s, b, prefix));
  for (std::size_t i = 0; i + 1 < state.units().size(); ++i) {
    Values dropped;
    stream = model.layer_forward(gathers.use(i), static_cast<int>(i), stream, dropped);
  }
  const Tensor normed = model.normed(root, model.end(root, stream));
  const Tensor logps = b.transient(prefix + "logps", DType::f32, {model.T()}, Category::workspace);
  const Chunks chunks = loss_chunks(s);
  for (std::int64_t c = 0; c < chunks.count; ++c) {
    const std::string name = fmt::format("{}head{}.", prefix, chunks.count > 1 ? fmt::format(".{}", c) : "");
    const Tensor x = rows_of(normed, c * chunks.size, chunks.size);
    const Dim T = x.shape[0];
    b.begin_call(prefix + "head", name);
    const Tensor entropy = b.transient(name + "entropy", DType::f32, {T}, Category::activations);
    lower_token_logps(s, b, model.sharding(), name, x, root.tensor(b, head_role(m)),
                      rows_of(targets, c * chunks.size, chunks.size), rows_of(logps, c * chunks.size, chunks.size),
                      entropy);
  }
  b.begin_call(prefix + "logps", prefix);
  b.fetch(logps, Slot::logps);
}

}  // namespace hotbunk
