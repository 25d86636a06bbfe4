// What is alive in the passes over a micro-batch, op by op: lowering/train.cc and lowering/decoder.cc as sizes. A
// buffer lives from its first to its last use in the block (graph/lifetimes.cc), so each line frees what no later op
// reads.
#include <algorithm>

#include "lowering/sample_rows.h"
#include "planner/plan_walk.h"

namespace hotbunk {
namespace {

using enum Category;

constexpr std::int64_t f32_bytes = size_of(DType::f32), i32_bytes = size_of(DType::i32);

/// Bytes of one unit's buffers around its use; 0 where one rank computes on the shard itself.
struct UnitBytes {
  std::int64_t gather_in = 0, gather_out = 0, whole = 0;
  std::int64_t grads = 0, reduce_in = 0, reduce_out = 0;

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
  }
};

/// Bytes of one layer's tensors over the micro-batch's capacity, named as in lowering/decoder.h.
struct Tensors {
  std::int64_t stream, rstd, qkv, qk_rstd, attended, lse, gate_up, activated;
  std::int64_t vector;  // fp32 or int32 per token
  Tensors(const ModelSpec& m, std::int64_t tokens, DType dtype) {
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

/// What forward leaves for backward, in order: each keeps what those before it keep.
enum class Keeps : std::uint8_t { nothing, input, products, all };

Keeps keeps_of(Recompute r) {
  return r == Recompute::none ? Keeps::all : r == Recompute::selective ? Keeps::products : Keeps::input;
}

class MicroWalk {
 public:
  MicroWalk(LiveWalk& w, const ShardedShapes& sharded, const Scenario& s, DType source, Keeps keeps)
      : w_(w),
        s_(s),
        layers_(sharded.shapes.layers),
        root_(sharded.shapes.root, sharded.root.elements, s, source),
        layer_(sharded.shapes.layer, sharded.layer.elements, s, source),
        t_(s.model, s.train.micro_batch_tokens, s.train.precision.params),
        cu_seqlens_((max_micro_batch_seqs(s) + 1) * i32_bytes),
        keeps_(keeps),
        reshards_(keeps == Keeps::nothing || s.train.reshard_after_forward) {}

  void train() {
    feed(4 + 3);  // ids, positions, targets; old and reference log-probs, advantages, loss weights
    gather(root_);
    w_.up(activations, t_.stream);  // embedded
    forward();
    train_head();
    w_.repeat(layers_, [&](std::int64_t i) { layer_backward(i); });
    w_.down(workspace, t_.vector);    // ids
    w_.down(activations, t_.stream);  // the stream's gradient
    reduce(root_);
  }

  void log_probs() {
    feed(3);  // ids, positions, targets
    gather(root_);
    w_.up(activations, t_.stream);
    w_.down(workspace, t_.vector);  // ids
    forward();
    w_.down(activations, t_.rstd);
    w_.down(activations, t_.stream);  // the normed sum: nobody goes back to it
    for_chunks([&](std::int64_t tokens, bool first, bool last) {
      const std::int64_t vector = tokens * f32_bytes, logits = vector * s_.model.vocab;
      w_.up(activations, logits);
      if (last) w_.down(activations, t_.stream), w_.down(params, root_.whole);
      w_.up(activations, vector), w_.up(activations, vector);  // lse, entropy
      if (first) w_.up(workspace, t_.vector);                  // log-probs
      w_.down(activations, logits), w_.down(activations, vector), w_.down(activations, vector);
    });
    w_.down(workspace, t_.vector), w_.down(workspace, t_.vector);  // targets, log-probs
  }

 private:
  void feed(std::int64_t vectors) {
    for (std::int64_t i = 0; i < vectors; ++i) w_.up(workspace, t_.vector);
    w_.up(workspace, cu_seqlens_);
  }

  void gather(const UnitBytes& u) {
    w_.up(communication, u.gather_in), w_.up(communication, u.gather_out), w_.down(communication, u.gather_in);
    w_.up(params, u.whole), w_.down(communication, u.gather_out);
  }

  /// The layers that step i of a pass gathers: its own, or those up to `prefetch` ahead that are not there yet.
  void gather_ahead(std::int64_t i) {
    const std::int64_t ahead = s_.train.prefetch;
    const std::int64_t have = i == 0 ? 0 : std::min(i + ahead, layers_), want = std::min(i + ahead + 1, layers_);
    for (std::int64_t n = have; n < want; ++n) gather(layer_);
  }

  void reduce(const UnitBytes& u) {
    w_.up(communication, u.reduce_in), w_.down(grads, u.grads);
    w_.up(communication, u.reduce_out), w_.down(communication, u.reduce_in), w_.down(communication, u.reduce_out);
  }

  void forward() {
    w_.repeat(layers_, [&](std::int64_t i) { layer_forward(i); });
    // Final norm of h + z.
    w_.up(activations, t_.stream), w_.up(activations, t_.rstd), w_.up(activations, t_.stream);
    w_.down(activations, t_.stream);
    if (keeps_ < Keeps::products) w_.down(activations, t_.stream);
  }

  void layer_forward(std::int64_t i) {
    const bool all = keeps_ == Keeps::all, products = keeps_ >= Keeps::products;
    const bool last = i == layers_ - 1 && keeps_ == Keeps::nothing;
    gather_ahead(i);
    w_.up(activations, t_.stream), w_.up(activations, t_.rstd);  // normed1
    if (i > 0) {
      w_.up(activations, t_.stream), w_.down(activations, t_.stream);  // x; z of the layer before
      if (!products) w_.down(activations, t_.stream);                  // h of the layer before
    }
    if (!all) w_.down(activations, t_.rstd);
    attention_forward(all, products, last);
    w_.up(activations, t_.stream);  // attention_out
    if (!products) w_.down(activations, t_.attended);
    w_.up(activations, t_.stream), w_.up(activations, t_.rstd), w_.up(activations, t_.stream);  // normed2, h
    w_.down(activations, t_.stream);                                                            // attention_out
    if (!all) w_.down(activations, t_.rstd);
    if (keeps_ == Keeps::nothing) w_.down(activations, t_.stream);  // x
    w_.up(activations, t_.gate_up);
    if (!all) w_.down(activations, t_.stream);  // normed2
    w_.up(activations, t_.activated);
    if (!products) w_.down(activations, t_.gate_up);
    w_.up(activations, t_.stream);  // z
    if (!all) w_.down(activations, t_.activated);
    if (reshards_) w_.down(params, layer_.whole);
  }

  void attention_forward(bool all, bool products, bool last) {
    w_.up(activations, t_.qkv);
    if (!all) w_.down(activations, t_.stream);  // normed1
    if (s_.model.qk_norm) {
      w_.up(activations, t_.qkv), w_.up(activations, t_.qk_rstd);
      if (!products) w_.down(activations, t_.qkv), w_.down(activations, t_.qk_rstd);
    }
    if (last) w_.down(workspace, t_.vector);  // positions
    w_.up(activations, t_.attended), w_.up(activations, t_.lse);
    if (!products) w_.down(activations, t_.qkv), w_.down(activations, t_.lse);
    if (last) w_.down(workspace, cu_seqlens_);
  }

  /// Chunks of the loss: the first, the second and the last; those between are like the second.
  template <class F>
  void for_chunks(F&& f) {
    const std::int64_t all = s_.train.micro_batch_tokens, asked = s_.train.loss_chunk_tokens;
    const std::int64_t size = asked > 0 ? std::min(all, asked) : all, count = ceil_div(all, size);
    for (std::int64_t c = 0; c < count; c = c == 1 ? std::max<std::int64_t>(2, count - 1) : c + 1)
      f(std::min(size, all - c * size), c == 0, c == count - 1);
  }

  void train_head() {
    const bool in_place = s_.train.precision.params == DType::f32;
    for_chunks([&](std::int64_t tokens, bool first, bool last) {
      const std::int64_t vector = tokens * f32_bytes, logits = vector * s_.model.vocab;
      const std::int64_t d_logits = tokens * s_.model.vocab * size_of(s_.train.precision.params);
      w_.up(activations, logits);
      for (int i = 0; i < 4; ++i) w_.up(activations, vector);             // logp, lse, entropy; d_logp
      w_.down(activations, vector), w_.down(activations, vector);         // logp, entropy
      for (int i = 0; last && i < 4; ++i) w_.down(workspace, t_.vector);  // old, reference, advantages, weights
      if (!in_place) w_.up(activations, d_logits), w_.down(activations, logits);
      w_.down(activations, vector), w_.down(activations, vector);           // lse, d_logp
      if (last) w_.down(workspace, t_.vector);                              // targets
      if (first) w_.up(activations, t_.stream), w_.up(grads, root_.grads);  // d_final_normed
      w_.down(activations, in_place ? logits : d_logits);
      if (last) w_.down(activations, t_.stream);  // final_normed
    });
    w_.up(activations, t_.stream);                                     // the stream's gradient
    w_.down(activations, t_.stream), w_.down(activations, t_.stream);  // d_final_normed, final_x
    w_.down(activations, t_.rstd), w_.down(params, root_.whole);
  }

  void recompute_layer() {
    if (keeps_ == Keeps::all) return;
    w_.up(activations, t_.stream), w_.up(activations, t_.rstd);  // normed1
    if (keeps_ == Keeps::products) {
      w_.up(activations, t_.stream), w_.up(activations, t_.rstd);  // normed2
      w_.up(activations, t_.activated);
      return;
    }
    w_.up(activations, t_.qkv);
    if (s_.model.qk_norm) w_.up(activations, t_.qkv), w_.up(activations, t_.qk_rstd);
    w_.up(activations, t_.attended), w_.up(activations, t_.lse);
    w_.up(activations, t_.stream);                                                              // attention_out
    w_.up(activations, t_.stream), w_.up(activations, t_.rstd), w_.up(activations, t_.stream);  // normed2, h
    w_.down(activations, t_.stream);                                                            // attention_out
    w_.up(activations, t_.gate_up), w_.up(activations, t_.activated);
  }

  /// Step i of backward: layer L - 1 - i.
  void layer_backward(std::int64_t i) {
    const bool first_layer = i == layers_ - 1;
    if (reshards_) gather_ahead(i);
    recompute_layer();
    w_.up(activations, t_.activated);                                    // d_activated
    w_.up(grads, layer_.grads), w_.down(activations, t_.activated);      // activated
    w_.up(activations, t_.gate_up), w_.down(activations, t_.activated);  // d_gate_up; d_activated
    w_.down(activations, t_.gate_up), w_.down(activations, t_.stream);   // gate_up; normed2
    w_.up(activations, t_.stream), w_.down(activations, t_.gate_up);     // d_normed2; d_gate_up
    w_.down(activations, t_.stream), w_.down(activations, t_.stream);    // d_normed2, h
    w_.down(activations, t_.rstd);                                       // rstd2
    w_.up(activations, t_.attended), w_.up(activations, t_.qkv);         // d_attended, d_qkv
    w_.down(activations, t_.attended), w_.down(activations, t_.attended);
    w_.down(activations, t_.lse), w_.down(activations, t_.qkv);
    if (s_.model.qk_norm) w_.down(activations, t_.qkv), w_.down(activations, t_.qk_rstd);
    if (first_layer) w_.down(workspace, t_.vector), w_.down(workspace, cu_seqlens_);  // positions
    w_.down(activations, t_.stream);                                                  // normed1
    w_.up(activations, t_.stream), w_.down(activations, t_.qkv);                      // d_normed1; d_qkv
    w_.down(activations, t_.stream), w_.down(activations, t_.stream);                 // d_normed1, x
    w_.down(activations, t_.rstd), w_.down(params, layer_.whole);
    reduce(layer_);
  }

  LiveWalk& w_;
  const Scenario& s_;
  std::int64_t layers_;
  UnitBytes root_, layer_;
  Tensors t_;
  std::int64_t cu_seqlens_;
  Keeps keeps_;
  bool reshards_;
};

}  // namespace

void walk_train(LiveWalk& w, const ShardedShapes& sharded, const Scenario& s) {
  constexpr std::int64_t metrics = static_cast<std::int64_t>(Metric::count) * f32_bytes;
  const std::int64_t world = s.train.layout.ranks(), element = size_of(s.train.precision.grads);
  w.up(workspace, metrics);
  const std::int64_t root = sharded.root.elements * element;
  const std::int64_t layer = sharded.layer.elements * element;
  w.up(grads, root);
  w.repeat(sharded.shapes.layers, [&](std::int64_t) { w.up(grads, layer); });

  MicroWalk(w, sharded, s, s.train.precision.master, keeps_of(s.train.recompute)).train();

  // Norm, clip and update: learning rate (2), sum of squares, the largest gap, clip coefficient.
  w.up(workspace, 2 * f32_bytes), w.up(workspace, f32_bytes);
  if (world > 1) w.up(workspace, f32_bytes), w.down(workspace, f32_bytes);
  w.up(workspace, f32_bytes);
  w.down(workspace, f32_bytes), w.down(workspace, f32_bytes), w.down(workspace, 2 * f32_bytes);
  w.down(grads, root);
  w.repeat(sharded.shapes.layers, [&](std::int64_t) { w.down(grads, layer); });
  w.down(workspace, metrics);
}

void walk_log_probs(LiveWalk& w, const ShardedShapes& sharded, const Scenario& s, bool reference) {
  MicroWalk(w, sharded, s, reference ? s.train.precision.params : s.train.precision.master, Keeps::nothing).log_probs();
}

}  // namespace hotbunk
