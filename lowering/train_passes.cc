#include "lowering/train_passes.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "layout/placement.h"
#include "lowering/sample_rows.h"
#include "spec/router_loss.h"

namespace hotbunk {
namespace {

using R = ParamRole;

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
  if (s.model.logit_softcap > 0.0)
    with(b.emit(OpKind::softcap, streams::compute, name + "softcap", {out.logits}, {out.logits}), Attr::softcap,
         s.model.logit_softcap);
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

}  // namespace

TokenFeeds transient_tokens(const Scenario& s, ProgramBuilder& b, const std::string& prefix) {
  const Dim T = tokens(s.train.micro_batch_tokens);
  TokenFeeds f;
  f.ids = b.transient(prefix + "token_ids", DType::i32, {T}, Category::workspace);
  f.positions = b.transient(prefix + "positions", DType::i32, {T}, Category::workspace);
  f.cu_seqlens = b.transient(prefix + "cu_seqlens", DType::i32, {fixed(packed_seqs(s) + 1)}, Category::workspace);
  return f;
}

Tensor transient_vector(const Scenario& s, ProgramBuilder& b, const std::string& name, DType dtype) {
  return b.transient(name, dtype, {tokens(s.train.micro_batch_tokens)}, Category::workspace);
}

void feed_tokens(ProgramBuilder& b, const TokenFeeds& f, bool ids) {
  if (ids) b.feed(f.ids, Slot::token_ids);
  b.feed(f.positions, Slot::positions);
  b.feed(f.cu_seqlens, Slot::cu_seqlens);
}

void feed_loss(ProgramBuilder& b, const MicroFeeds& f) {
  b.feed(f.targets, Slot::targets);
  b.feed(f.old_logps, Slot::old_logps);
  b.feed(f.ref_logps, Slot::ref_logps);
  b.feed(f.advantages, Slot::advantages);
  b.feed(f.loss_weights, Slot::loss_weights);
}

RouterLossFeeds router_loss_feeds(const Scenario& s, const StagePart& part, const Tensor& metrics,
                                  const std::function<Tensor(const char*, DType, const Dim&)>& make) {
  const RouterLosses losses = router_losses(s);
  const auto routes = [&](std::int64_t layer) { return s.model.is_moe_layer(static_cast<int>(layer)); };
  std::int64_t all = 0, own = 0;  // layers with routers
  for (std::int64_t layer = 0; layer < s.model.layers; ++layer)
    all += routes(layer) ? 1 : 0, own += routes(layer) && part.has_layer(layer) ? 1 : 0;
  if (!losses.any() || own == 0) return {};
  const Dim T = tokens(s.train.micro_batch_tokens);
  return {.sequence_ids = make("sequence_ids", DType::i32, T),
          .sequence_weights = make("sequence_weights", DType::f32, T),
          .metrics = metrics,
          .num_sequences = packed_seqs(s),
          .balance = losses.balance / static_cast<double>(all),
          .z = losses.z / static_cast<double>(all)};
}

void feed_router_loss(ProgramBuilder& b, const RouterLossFeeds& f) {
  if (f.num_sequences == 0) return;
  b.feed(f.sequence_ids, Slot::sequence_ids);
  b.feed(f.sequence_weights, Slot::sequence_weights);
}

SlotLimitId limit_layers(const Scenario& s, ProgramBuilder& b, const std::string& prefix) {
  return b.limit_slots(prefix + "layers", s.train.prefetch + 1);
}

Gathers::Gathers(const Scenario& s, std::vector<std::size_t> order, std::function<WholeUnit(std::size_t)> gather)
    : order_(std::move(order)), gather_(std::move(gather)), ahead_(static_cast<std::size_t>(s.train.prefetch)) {}

Gathers::Gathers(const Scenario& s, ProgramBuilder& b, const TrainState& state, Weights which, std::string prefix,
                 std::vector<std::size_t> order, const WholeUnit& outer, std::optional<SlotLimitId> limit)
    : Gathers(s, std::move(order), [&b, &state, which, prefix = std::move(prefix), outer, limit](std::size_t layer) {
        return state.gather_layer(b, layer, which, prefix, outer, limit);
      }) {}

WholeUnit Gathers::use(std::size_t i) {
  while (ready_.size() <= std::min(i + ahead_, order_.size() - 1)) ready_.push_back(gather_(order_[ready_.size()]));
  if (i + ahead_ >= order_.size()) end();
  return ready_[i];
}

void Gathers::end() {
  if (const auto gather = std::exchange(behind_, nullptr)) gather();
}

std::vector<std::size_t> layers_in_order(Range layers, bool backward) {
  std::vector<std::size_t> out;
  for (auto i = static_cast<std::size_t>(layers.begin); i < static_cast<std::size_t>(layers.end); ++i) out.push_back(i);
  if (backward) out = {out.rbegin(), out.rend()};
  return out;
}

void lower_logps(const Scenario& s, ProgramBuilder& b, PackedModel& model, const std::string& prefix,
                 const WholeUnit& root, const PackedModel::Stream& stream, const Tensor& targets) {
  const Tensor normed = model.normed(root, model.end(root, stream)), head = model.head(root);
  const Tensor logps = transient_vector(s, b, prefix + "logps", DType::f32);
  const Chunks chunks = loss_chunks(s);
  for (std::int64_t c = 0; c < chunks.count; ++c) {
    const std::string name = fmt::format("{}head{}.", prefix, chunks.count > 1 ? fmt::format(".{}", c) : "");
    const auto part = [&](const Tensor& t) { return rows_of(t, c * chunks.size, chunks.size); };
    const Tensor x = part(normed);
    b.begin_call(prefix + "head", name);
    const Tensor entropy = b.transient(name + "entropy", DType::f32, {x.shape[0]}, Category::activations);
    lower_token_logps(s, b, model.sharding(), name, x, head, part(targets), part(logps), entropy);
  }
  b.begin_call(prefix + "logps", prefix);
  b.fetch(logps, Slot::logps);
}

TrainPasses::TrainPasses(const Scenario& s, ProgramBuilder& b, const TrainState& state, const Tensor& metrics,
                         const TokenFeeds& feeds)
    : s_(s),
      b_(b),
      state_(state),
      metrics_(metrics),
      model_(s, b, "train.", feeds, state.part()),
      layers_(limit_layers(s, b, "train.")),
      gradients_(b.limit_slots("train.gradients", 1)) {}

PackedModel::Stream TrainPasses::forward(PackedModel::Stream stream, Range range, const WholeUnit& root, Kept& kept,
                                         std::function<void()> behind) {
  const auto first = static_cast<std::size_t>(range.begin), layers = static_cast<std::size_t>(range.size());
  kept.values.resize(layers), kept.whole.resize(layers), kept.parts.resize(layers);
  if (!held_.empty()) {
    for (std::size_t i = 0; i < layers; ++i) {
      kept.whole[i] = held_[first + i];
      stream = model_.layer_forward(kept.whole[i], state_.layer(first + i), stream, kept.values[i]);
    }
    if (behind) behind();
    return stream;
  }
  Gathers gathers = !shared_.empty() ? gathers_shared(layers_in_order(range, false), "train.forward.")
                                     : Gathers(s_, b_, state_, Weights::trained, "train.forward.",
                                               layers_in_order(range, false), root, forward_limit());
  gathers.then(std::move(behind));
  for (std::size_t i = 0; i < layers; ++i) {
    kept.whole[i] = gathers.use(i);
    stream = model_.layer_forward(kept.whole[i], state_.layer(first + i), stream, kept.values[i]);
    if (state_.keeps_parts() && shared_.empty()) kept.parts[i] = state_.keep_parts(b_, kept.whole[i], "train.forward.");
  }
  gathers.end();
  return stream;
}

Gathers TrainPasses::gathers_shared(std::vector<std::size_t> order, const std::string& prefix) const {
  return {s_, std::move(order), [this, prefix](std::size_t layer) {
            return state_.gather_kept(b_, shared_[layer].layer, shared_[layer].parts, prefix, layers_);
          }};
}

Gathers TrainPasses::gathers_again(const Kept& kept, Range range, const WholeUnit& root) const {
  std::vector<std::size_t> order = layers_in_order(range, true);
  if (!shared_.empty()) return gathers_shared(std::move(order), "train.backward.");
  if (!state_.keeps_parts())
    return {s_, b_, state_, Weights::trained, "train.backward.", std::move(order), root, layers_};
  const auto first = static_cast<std::size_t>(range.begin);
  return {s_, std::move(order), [this, &kept, first](std::size_t layer) {
            return state_.gather_kept(b_, kept.whole[layer - first], kept.parts[layer - first], "train.backward.",
                                      layers_);
          }};
}

Tensor TrainPasses::loss(const MicroFeeds& feeds, const WholeUnit& root, const WholeUnit& d_root,
                         const PackedModel::Stream& stream) {
  const Values end = model_.end(root, stream);
  const Tensor d_normed = head(feeds, root, d_root, model_.normed(root, end));
  return model_.end_backward(root, d_root, end, d_normed, state_.accumulates());
}

void TrainPasses::backward(Kept& kept, Range range, const WholeUnit& root, const WholeUnit& d_root,
                           const Tensor& gradient, bool defers) {
  Gathers gathers = gathers_again(kept, range, root);
  const auto first = static_cast<std::size_t>(range.begin), layers = static_cast<std::size_t>(range.size());
  kept.deferred.resize(layers), kept.gradients.resize(layers);
  const auto limit = defers ? std::nullopt : std::optional(gradients_);
  for (std::size_t i = layers; i-- > 0;) {
    const WholeUnit w = s_.train.reshard_after_forward ? gathers.use(layers - 1 - i) : kept.whole[i];
    const int layer = state_.layer(first + i);
    model_.recompute(w, layer, kept.values[i]);
    const WholeUnit dw = kept.gradients[i] = state_.layer_gradients(b_, first + i, "train.", d_root, limit);
    kept.deferred[i] = model_.layer_backward(w, dw, layer, kept.values[i], gradient, state_.accumulates(), defers);
    for (const Op& op : kept.deferred[i].ops)
      for (const Tensor& t : op.inputs) b_.keep(t.buffer);
    if (!defers) state_.reduce_layer(b_, first + i, dw, "train.");
  }
}

void TrainPasses::weights(const Kept& kept, Range range) {
  for (std::size_t i = kept.deferred.size(); i-- > 0;) {
    const std::size_t layer = static_cast<std::size_t>(range.begin) + i;
    const WholeUnit& dw = kept.gradients[i];
    if (!state_.accumulates()) {
      std::vector<BufferId> made;
      for (const WholeUnit::Part& part : dw.parts) made.push_back(part.buffer);
      b_.take_turn(gradients_, made);
    }
    model_.layer_weights(dw, state_.layer(layer), kept.deferred[i]);
    state_.reduce_layer(b_, layer, dw, "train.");
  }
}

/// Logits, log-probs, loss and their backward, in chunks of tokens; returns d(normed) [T,H], on each rank of a
/// tensor-parallel group what its part of the vocabulary adds.
Tensor TrainPasses::head(const MicroFeeds& feeds, const WholeUnit& root, const WholeUnit& d_root,
                         const Tensor& normed) {
  const ModelSpec& m = s_.model;
  const DType compute = s_.train.precision.params;
  const bool trains = model_.sharding().trains(head_role(m));
  const Tensor w = model_.head(root), dw = trains ? d_root.tensor(b_, head_role(m)) : Tensor{};
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
        lower_token_logps(s_, b_, model_.sharding(), name, x, w, part(feeds.targets), logp, entropy);
    Op& l = b_.emit(
        OpKind::token_loss, streams::compute, name + "loss",
        {logp, part(feeds.old_logps), part(feeds.ref_logps), part(feeds.advantages), part(feeds.loss_weights), entropy},
        {d_logp, metrics_});
    with(with(with(l, Attr::clip_low, s_.algorithm.clip_low), Attr::clip_high, s_.algorithm.clip_high), Attr::kl_coef,
         s_.algorithm.reference ? s_.algorithm.kl_coef : 0.0);
    with(l, Attr::sft, std::int64_t{s_.algorithm.name == AlgorithmName::sft ? 1 : 0});
    with(l, Attr::reference, std::int64_t{s_.algorithm.reference ? 1 : 0});
    const Tensor d_logits = compute == DType::f32 ? logits : make("d_logits", {T, w.shape[0]}, compute);
    Op& d = b_.emit(OpKind::log_prob_backward, streams::compute, name + "log_prob.backward",
                    {logits, lse, part(feeds.targets), d_logp}, {d_logits});
    with(model_.sharding().tp.ranks > 1 ? with_vocabulary(d, model_.sharding()) : with(d, Attr::vocab, m.vocab),
         Attr::temperature, logit_temperature(s_));
    if (m.logit_softcap > 0.0) with(d, Attr::softcap, m.logit_softcap);
    b_.emit(OpKind::linear_dgrad, streams::compute, name + "lm_head.dgrad", {d_logits, w}, {part(d_normed)});
    if (!trains) continue;
    with(b_.emit(OpKind::linear_wgrad, streams::compute, name + "lm_head.wgrad", {d_logits, x}, {dw}), Attr::accumulate,
         std::int64_t{state_.accumulates() || c > 0 ? 1 : 0});
  }
  return d_normed;
}

void TrainPasses::embedding_backward(const WholeUnit& root, const WholeUnit& d_root, const Tensor& gradient) {
  if (!model_.sharding().trains(R::embedding)) return;
  b_.begin_call("train.embedding.backward", "train.");
  // The scatter adds: into zeros, into the head's gradient where the two are one, or into what earlier micro-batches
  // left.
  if (!state_.accumulates() && !(s_.model.tie_embeddings && state_.part().last))
    b_.emit(OpKind::zero, streams::compute, "train.embedding.zero", {}, {d_root.tensor(b_, R::embedding)});
  if (!state_.accumulates() && s_.model.learned_positions)
    b_.emit(OpKind::zero, streams::compute, "train.positions.zero", {}, {d_root.tensor(b_, R::position_embedding)});
  model_.embedding_backward(root, d_root, gradient);
}

}  // namespace hotbunk
