// What is alive in the passes over a micro-batch, op by op: lowering/train.cc and lowering/decoder.cc as sizes. A
// buffer lives from its first to its last use in the block (graph/lifetimes.cc), so each is freed here where no later
// op reads it; what one op makes is listed in the order of the lowering's buffers, which is the order that places them.
#include <algorithm>

#include "lowering/sample_rows.h"
#include "planner/form/plan_walk.h"

namespace hotbunk {
namespace {

using enum Category;

constexpr std::int64_t f32_bytes = size_of(DType::f32), i32_bytes = size_of(DType::i32);

/// Bytes of one unit's buffers around its use; 0 where one rank computes on the shard itself.
struct UnitBytes {
  std::int64_t gather_in = 0, gather_out = 0, whole = 0;
  std::int64_t grads = 0, reduce_in = 0, reduce_out = 0;
  bool padded = false;

  UnitBytes(const UnitShape& u, std::int64_t n, const Scenario& s, DType source) {
    const Precision& precision = s.train.precision;
    const std::int64_t world = s.train.layout.ranks();
    const std::int64_t compute = size_of(precision.params), reduced = size_of(precision.grads);
    const bool cast = source != precision.params;
    if (world > 1 || cast) whole = u.elements * compute;
    if (world == 1) return;
    if (cast) gather_in = n * compute;
    gather_out = world * n * compute;
    grads = u.elements * reduced;
    reduce_in = world * n * reduced;
    reduce_out = n * reduced;
    padded = world * n > u.elements;
  }
};

/// Bytes of one layer's tensors over the micro-batch's capacity, named as in lowering/decoder.h.
struct TensorBytes {
  std::int64_t stream, rstd, qkv, qk_rstd, attended, lse, gate_up, activated;
  std::int64_t vector;  // fp32 or int32 per token
  TensorBytes(const ModelSpec& m, std::int64_t tokens, DType dtype) {
    const std::int64_t row = tokens * size_of(dtype);
    vector = rstd = tokens * f32_bytes;
    stream = row * m.hidden;
    qkv = row * (m.q_rows() + 2 * m.kv_rows());
    qk_rstd = tokens * (m.heads + m.kv_heads) * f32_bytes;
    attended = row * m.q_rows();
    lse = tokens * m.heads * f32_bytes;
    gate_up = row * 2 * m.intermediate;
    activated = row * m.intermediate;
  }
};

/// One layer's activations; qkv_raw and qk_rstd only with QK-norm (else qkv is raw).
struct LayerHeld {
  Held x, normed1, rstd1, qkv_raw, qk_rstd, qkv, attended, lse, h, normed2, rstd2, gate_up, activated;
};

/// What forward leaves for backward, in order: each keeps what those before it keep.
enum class Keeps : std::uint8_t { nothing, input, products, all };

Keeps keeps_of(Recompute r) {
  return r == Recompute::none ? Keeps::all : r == Recompute::selective ? Keeps::products : Keeps::input;
}

template <class Walk>
class MicroWalk {
 public:
  MicroWalk(Walk& w, const ShardedShapes& sharded, const Scenario& s, DType source, Keeps keeps)
      : w_(w),
        s_(s),
        layers_(sharded.shapes.layers),
        root_(sharded.shapes.root, sharded.root.elements, s, source),
        layer_(sharded.shapes.layer, sharded.layer.elements, s, source),
        t_(s.model, s.train.micro_batch_tokens, s.train.precision.params),
        keeps_(keeps),
        reshards_(keeps == Keeps::nothing || s.train.reshard_after_forward),
        kept_(layers_),
        whole_(layers_),
        gathered_(layers_) {}

  void train() {
    feed();
    old_ = vector(), reference_ = vector(), advantages_ = vector(), weights_ = vector();
    gather_root();
    h_ = act(t_.stream);  // embedded
    forward();
    const Held gradient = train_head();
    w_.repeat(layers_, [&](std::int64_t i) { layer_backward(layers_ - 1 - i, i); });
    w_.down(ids_), w_.down(gradient);
    reduce(root_, root_grads_);
  }

  void log_probs() {
    feed();
    gather_root();
    h_ = act(t_.stream);
    w_.down(ids_);
    forward();
    w_.down(final_rstd_), w_.down(final_x_);  // nobody goes back to them
    Held log_probs;
    for_chunks([&](std::int64_t tokens, bool first, bool last) {
      const std::int64_t bytes = tokens * f32_bytes;
      const Held logits = act(bytes * s_.model.vocab);
      if (last) w_.down(final_normed_), w_.down(whole_root_);
      if (first) log_probs = vector();
      const Held lse = act(bytes), entropy = act(bytes);
      w_.down(logits), w_.down(lse), w_.down(entropy);
    });
    w_.down(targets_), w_.down(log_probs);
  }

 private:
  Held act(std::int64_t bytes) { return w_.up(activations, bytes); }
  Held vector() { return w_.up(workspace, t_.vector); }

  void feed() {
    ids_ = vector(), positions_ = vector();
    cu_seqlens_ = w_.up(workspace, (max_micro_batch_seqs(s_) + 1) * i32_bytes);
    targets_ = vector();
  }

  Held gather(const UnitBytes& u) {
    const Held in = w_.up(communication, u.gather_in), out = w_.up(communication, u.gather_out);
    w_.down(in);
    const Held whole = w_.up(params, u.whole);
    w_.down(out);
    return whole;
  }

  /// On the gather stream: the turn before the one that this turn takes the slot of is over.
  void gather_layer(std::int64_t layer) {
    w_.on(StreamId::gather);
    const auto slots = static_cast<std::size_t>(s_.train.prefetch + 1);
    if (reshards_ && turn_ >= slots) w_.wait(over_[turn_ % slots]);
    ++turn_;
    whole_[index(layer)] = gather(layer_);
    gathered_[index(layer)] = w_.mark();
    w_.on(StreamId::compute);
  }
  /// Behind the last op that computes with the layer.
  void end_turn(const Held& whole) {
    w_.down(whole);
    over_[turns_over_++ % static_cast<std::size_t>(s_.train.prefetch + 1)] = w_.mark();
  }

  void gather_root() {
    w_.on(StreamId::gather);
    whole_root_ = gather(root_);
    const auto gathered = w_.mark();
    w_.on(StreamId::compute);
    w_.wait(gathered);
  }

  /// The layers that step i of a pass gathers: its own, or those up to `prefetch` ahead that are not there yet.
  void gather_ahead(std::int64_t i, bool backward) {
    const std::int64_t ahead = s_.train.prefetch;
    const std::int64_t have = i == 0 ? 0 : std::min(i + ahead, layers_), want = std::min(i + ahead + 1, layers_);
    for (std::int64_t n = have; n < want; ++n) gather_layer(backward ? layers_ - 1 - n : n);
  }

  /// Behind the last gradient of the unit. Padding is made zero before they are there.
  void reduce(const UnitBytes& u, const Held& grads_whole) {
    const auto written = w_.mark();
    w_.on(StreamId::reduce);
    if (!u.padded) w_.wait(written);
    const Held in = w_.up(communication, u.reduce_in);
    w_.wait(written);
    w_.down(grads_whole);
    copied_in_ = w_.mark();
    const Held out = w_.up(communication, u.reduce_out);
    w_.down(in), w_.down(out);
    w_.on(StreamId::compute);
  }

  void forward() {
    w_.repeat(layers_, [&](std::int64_t i) { layer_forward(i); });
    final_normed_ = act(t_.stream), final_rstd_ = act(t_.rstd), final_x_ = act(t_.stream);
    w_.down(z_);
    if (keeps_ < Keeps::products) w_.down(h_);
  }

  void layer_forward(std::int64_t i) {
    const bool all = keeps_ == Keeps::all, products = keeps_ >= Keeps::products;
    gather_ahead(i, false);
    w_.wait(gathered_[index(i)]);
    LayerHeld& a = kept_[index(i)];
    a.normed1 = act(t_.stream), a.rstd1 = act(t_.rstd);
    a.x = h_;  // the first layer's is the embedding; the others form the sum h + z
    if (i > 0) {
      a.x = act(t_.stream);
      w_.down(z_);
      if (!products) w_.down(h_);
    }
    if (!all) w_.down(a.rstd1);
    attention_forward(a, i == layers_ - 1);
    const Held out = act(t_.stream);
    if (!products) w_.down(a.attended);
    a.h = act(t_.stream), a.normed2 = act(t_.stream), a.rstd2 = act(t_.rstd);
    w_.down(out);
    if (!all) w_.down(a.rstd2);
    if (keeps_ == Keeps::nothing) w_.down(a.x);
    a.gate_up = act(t_.gate_up);
    if (!all) w_.down(a.normed2);
    a.activated = act(t_.activated);
    if (!products) w_.down(a.gate_up);
    h_ = a.h, z_ = act(t_.stream);
    if (!all) w_.down(a.activated);
    if (reshards_) end_turn(whole_[index(i)]);
  }

  void attention_forward(LayerHeld& a, bool last_layer) {
    const bool products = keeps_ >= Keeps::products, last = last_layer && keeps_ == Keeps::nothing;
    a.qkv = act(t_.qkv);
    if (keeps_ != Keeps::all) w_.down(a.normed1);
    if (s_.model.qk_norm) {
      a.qkv_raw = a.qkv;
      a.qkv = act(t_.qkv), a.qk_rstd = act(t_.qk_rstd);
      if (!products) w_.down(a.qkv_raw), w_.down(a.qk_rstd);
    }
    if (last) w_.down(positions_);
    a.attended = act(t_.attended), a.lse = act(t_.lse);
    if (!products) w_.down(a.qkv), w_.down(a.lse);
    if (last) w_.down(cu_seqlens_);
  }

  /// Chunks of the loss; of those alike, the second and the last stand for all where the walk skips.
  template <class F>
  void for_chunks(F&& f) {
    const std::int64_t all = s_.train.micro_batch_tokens, asked = s_.train.loss_chunk_tokens;
    const std::int64_t size = asked > 0 ? std::min(all, asked) : all, count = ceil_div(all, size);
    for (std::int64_t c = 0; c < count; c = Walk::skips && c == 1 ? std::max<std::int64_t>(2, count - 1) : c + 1)
      f(std::min(size, all - c * size), c == 0, c == count - 1);
  }

  /// Logits, loss and their backward; returns the gradient of the stream.
  Held train_head() {
    const DType compute = s_.train.precision.params;
    Held d_normed;
    for_chunks([&](std::int64_t tokens, bool first, bool last) {
      const std::int64_t bytes = tokens * f32_bytes;
      const Held logits = act(bytes * s_.model.vocab);
      const Held logp = act(bytes), lse = act(bytes), entropy = act(bytes);
      const Held d_logp = act(bytes);
      w_.down(logp), w_.down(entropy);
      if (last) w_.down(old_), w_.down(reference_), w_.down(advantages_), w_.down(weights_);
      Held d_logits = logits;  // in place in fp32
      if (compute != DType::f32) d_logits = act(tokens * s_.model.vocab * size_of(compute)), w_.down(logits);
      w_.down(lse), w_.down(d_logp);
      if (last) w_.down(targets_);
      if (first) d_normed = act(t_.stream), root_grads_ = w_.up(grads, root_.grads);
      w_.down(d_logits);
      if (last) w_.down(final_normed_);
    });
    const Held gradient = act(t_.stream);
    w_.down(d_normed), w_.down(final_x_), w_.down(final_rstd_), w_.down(whole_root_);
    return gradient;
  }

  void recompute(LayerHeld& a) {
    if (keeps_ == Keeps::all) return;
    a.normed1 = act(t_.stream), a.rstd1 = act(t_.rstd);
    if (keeps_ == Keeps::products) {
      a.normed2 = act(t_.stream), a.rstd2 = act(t_.rstd);
      a.activated = act(t_.activated);
      return;
    }
    a.qkv = act(t_.qkv);
    if (s_.model.qk_norm) a.qkv_raw = a.qkv, a.qkv = act(t_.qkv), a.qk_rstd = act(t_.qk_rstd);
    a.attended = act(t_.attended), a.lse = act(t_.lse);
    const Held out = act(t_.stream);
    a.h = act(t_.stream), a.normed2 = act(t_.stream), a.rstd2 = act(t_.rstd);
    w_.down(out);
    a.gate_up = act(t_.gate_up), a.activated = act(t_.activated);
  }

  void layer_backward(std::int64_t layer, std::int64_t step) {
    if (reshards_) gather_ahead(step, true);
    w_.wait(gathered_[index(layer)]);
    LayerHeld& a = kept_[index(layer)];
    recompute(a);
    const Held d_activated = act(t_.activated);
    if (step > 0) w_.wait(copied_in_);  // there is one slot for gradients
    const Held layer_grads = w_.up(grads, layer_.grads);
    w_.down(a.activated);
    const Held d_gate_up = act(t_.gate_up);
    w_.down(d_activated), w_.down(a.gate_up), w_.down(a.normed2);
    const Held d_normed2 = act(t_.stream);
    w_.down(d_gate_up), w_.down(d_normed2), w_.down(a.h), w_.down(a.rstd2);
    attention_backward(a, layer == 0);
    const Held d_normed1 = act(t_.stream);
    w_.down(d_qkv_), w_.down(d_normed1), w_.down(a.x), w_.down(a.rstd1), end_turn(whole_[index(layer)]);
    reduce(layer_, layer_grads);
  }

  void attention_backward(const LayerHeld& a, bool first_layer) {
    const Held d_attended = act(t_.attended);
    d_qkv_ = act(t_.qkv);
    w_.down(d_attended), w_.down(a.attended), w_.down(a.lse), w_.down(a.qkv);
    if (first_layer) w_.down(cu_seqlens_), w_.down(positions_);
    if (s_.model.qk_norm) w_.down(a.qkv_raw), w_.down(a.qk_rstd);
    w_.down(a.normed1);
  }

  static auto index(std::int64_t layer) { return static_cast<std::size_t>(layer); }

  Walk& w_;
  const Scenario& s_;
  std::int64_t layers_;
  UnitBytes root_, layer_;
  TensorBytes t_;
  Keeps keeps_;
  bool reshards_;
  typename Walk::template PerLayer<LayerHeld> kept_;
  typename Walk::template PerLayer<Held> whole_;  // gathered parameters
  typename Walk::template PerLayer<typename Walk::Mark> gathered_;
  std::array<typename Walk::Mark, 2> over_{};  // [turn % slots]; train.prefetch is 0 or 1
  std::size_t turn_ = 0, turns_over_ = 0;
  typename Walk::Mark copied_in_{};
  Held ids_, positions_, cu_seqlens_, targets_, old_, reference_, advantages_, weights_;
  Held whole_root_, root_grads_, h_, z_, final_normed_, final_rstd_, final_x_, d_qkv_;
};

}  // namespace

template <class Walk>
void walk_train(Walk& w, const ShardedShapes& sharded, const Scenario& s) {
  const std::int64_t world = sharded.world, element = size_of(s.train.precision.grads);
  const auto layers = static_cast<std::size_t>(sharded.shapes.layers);
  const Held metrics = w.up(workspace, static_cast<std::int64_t>(Metric::count) * f32_bytes);
  const Held root = w.up(grads, sharded.root.elements * element);
  typename Walk::template PerLayer<Held> shards(static_cast<std::int64_t>(layers));
  const auto shard = [&](std::int64_t i) -> Held& { return shards[static_cast<std::size_t>(i)]; };
  w.repeat(sharded.shapes.layers, [&](std::int64_t i) { shard(i) = w.up(grads, sharded.layer.elements * element); });

  w.begin_block();
  MicroWalk<Walk>(w, sharded, s, s.train.precision.master, keeps_of(s.train.recompute)).train();

  w.begin_block();
  const Held learning_rate = w.up(workspace, 2 * f32_bytes), squares = w.up(workspace, f32_bytes);
  if (world > 1) w.down(w.up(workspace, num_max_metrics * f32_bytes));  // the largest log-prob gaps
  const Held clip = w.up(workspace, f32_bytes);
  w.down(squares), w.down(learning_rate), w.down(clip), w.down(root);
  w.repeat(sharded.shapes.layers, [&](std::int64_t i) { w.down(shard(i)); });
  w.down(metrics);
}

template <class Walk>
void walk_log_probs(Walk& w, const ShardedShapes& sharded, const Scenario& s, bool reference) {
  const DType source = reference ? s.train.precision.params : s.train.precision.master;
  MicroWalk<Walk>(w, sharded, s, source, Keeps::nothing).log_probs();
}

template <class Walk>
void walk_export(Walk& w, const ShardedShapes& sharded, const Scenario& s) {
  if (sharded.world == 1) return;
  const Precision& precision = s.train.precision;
  for (const std::int64_t shard : {sharded.root.elements, sharded.layer.elements})
    for (const DType part : {precision.master, precision.moments, precision.moments}) {
      w.begin_block();  // one slot: a gathered part finds what the one before had
      w.down(w.up(communication, sharded.world * shard * size_of(part)));
    }
}

template void walk_train(LiveWalk&, const ShardedShapes&, const Scenario&);
template void walk_train(ArenaWalk&, const ShardedShapes&, const Scenario&);
template void walk_log_probs(LiveWalk&, const ShardedShapes&, const Scenario&, bool);
template void walk_log_probs(ArenaWalk&, const ShardedShapes&, const Scenario&, bool);
template void walk_export(LiveWalk&, const ShardedShapes&, const Scenario&);
template void walk_export(ArenaWalk&, const ShardedShapes&, const Scenario&);

}  // namespace hotbunk
