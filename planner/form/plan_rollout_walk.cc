// What is alive in an engine's steps, the sync and the exchange: lowering/rollout.cc and lowering/sync.cc as sizes, in
// the manner of plan_train_walk.cc.
#include <algorithm>

#include "base/check.h"
#include "lowering/sample_rows.h"
#include "planner/form/plan_walk.h"

namespace hotbunk {
namespace {

using enum Category;
constexpr std::int64_t f32_bytes = size_of(DType::f32), i32_bytes = size_of(DType::i32);

/// One engine step over `tokens` of `seqs`.
template <class Walk>
class EngineStepWalk {
 public:
  EngineStepWalk(Walk& w, const PlanShapes& shapes, const Scenario& s, std::int64_t tokens, std::int64_t seqs)
      : w_(w),
        s_(s),
        engine_(engine_of(shapes, s)),
        layers_(shapes.layers),
        seqs_(seqs),
        vector_(tokens * f32_bytes),
        seq_vector_(seqs * f32_bytes) {
    const std::int64_t row = tokens * size_of(s.rollout.dtype), d = s.model.head_dim;
    stream_ = row * s.model.hidden;
    last_ = seqs * s.model.hidden * size_of(s.rollout.dtype);
    qkv_ = row * (engine_.heads + 2 * engine_.kv_heads) * d;
    qk_rstd_ = tokens * (engine_.heads + engine_.kv_heads) * f32_bytes;
    attended_ = row * engine_.heads * d;
    activated_ = row * (s.model.intermediate / engine_.tp);
  }

  void walk() {
    const Held ids = work(vector_);
    positions_ = work(vector_);
    cu_seqlens_ = work((seqs_ + 1) * i32_bytes);
    kv_slots_ = work(vector_);
    tables_ = work(seqs_ * max_blocks_per_seq(s_) * i32_bytes);
    lengths_ = work(seq_vector_), last_rows_ = work(seq_vector_), uniforms_ = work(seq_vector_);
    h_ = act(stream_);  // embedded
    w_.down(ids);
    w_.repeat(layers_, [&](std::int64_t l) { layer(l); });
    sample();
  }

 private:
  Held act(std::int64_t bytes) { return w_.up(activations, bytes); }
  Held work(std::int64_t bytes) { return w_.up(workspace, bytes); }

  /// normed = norm(h + z), where there is a z yet; h becomes the sum.
  Held norm(bool residual) {
    const Held normed = act(stream_), rstd = act(vector_);
    if (residual) {
      const Held sum = act(stream_);
      w_.down(z_), w_.down(h_);
      h_ = sum;
    }
    w_.down(rstd);
    return normed;
  }

  void layer(std::int64_t l) {
    const bool last = l == layers_ - 1;
    const Held normed1 = norm(l > 0);
    Held qkv = act(qkv_);
    w_.down(normed1);
    if (s_.model.qk_norm) {
      const Held raw = qkv;
      qkv = act(qkv_);
      const Held rstd = act(qk_rstd_);
      w_.down(raw), w_.down(rstd);
    }
    if (last) w_.down(positions_), w_.down(kv_slots_);
    const Held attended = act(attended_);
    w_.down(qkv);
    if (last) w_.down(cu_seqlens_), w_.down(tables_), w_.down(lengths_);
    z_ = act(stream_);
    w_.down(attended);
    const Held normed2 = norm(true), gate_up = act(2 * activated_);
    w_.down(normed2);
    const Held activated = act(activated_);
    w_.down(gate_up);
    z_ = act(stream_);
    w_.down(activated);
  }

  /// Final norm and head on each sequence's last row.
  void sample() {
    const Held last_h = act(last_);
    w_.down(h_);
    const Held last_z = act(last_);
    w_.down(z_), w_.down(last_rows_);
    const Held normed = act(last_), rstd = act(seq_vector_), sum = act(last_);
    w_.down(last_h), w_.down(last_z), w_.down(rstd), w_.down(sum);
    const std::int64_t bytes = seq_vector_ * engine_.vocab_rows;
    Held logits = act(bytes);
    w_.down(normed);
    if (engine_.tp > 1) {
      const Held part = logits;
      logits = w_.up(communication, engine_.tp * bytes);
      w_.down(part);
    }
    const Held ids = work(seq_vector_), log_probs = work(seq_vector_);
    w_.down(logits), w_.down(uniforms_), w_.down(ids), w_.down(log_probs);
  }

  Walk& w_;
  const Scenario& s_;
  const EngineSlices& engine_;
  std::int64_t layers_, seqs_, vector_, seq_vector_;
  std::int64_t stream_ = 0, last_ = 0, qkv_ = 0, qk_rstd_ = 0, attended_ = 0, activated_ = 0;
  Held positions_, cu_seqlens_, kv_slots_, tables_, lengths_, last_rows_, uniforms_, h_, z_;
};

}  // namespace

const EngineSlices& engine_of(const PlanShapes& shapes, const Scenario& s) {
  const EngineSlices* e = shapes.engine(s.rollout.layout.tp);
  HB_CHECK(e, "no engine of tp {}", s.rollout.layout.tp);
  return *e;
}

template <class Walk>
void walk_rollout(Walk& w, const PlanShapes& shapes, const Scenario& s) {
  const std::int64_t slots = s.rollout.max_running_requests, prefill = s.rollout.max_prefill_tokens;
  EngineStepWalk<Walk>(w, shapes, s, prefill, std::min(slots, prefill)).walk();
  w.begin_block();
  EngineStepWalk<Walk>(w, shapes, s, slots, slots).walk();
}

template <class Walk>
void walk_exchange(Walk& w, const Scenario& s) {
  const std::int64_t world = s.train.layout.ranks(), rows = rows_per_rank(s);
  for (const std::int64_t row : {row_ints(s) * i32_bytes, max_response_tokens(s) * f32_bytes}) {
    w.begin_block();  // one slot
    const Held part = w.up(communication, rows * row);
    if (world == 1) {
      w.down(part);
      continue;
    }
    const Held all = w.up(communication, world * rows * row);
    w.down(part), w.down(all);
  }
}

template <class Walk>
void walk_sync(Walk& w, const ShardedShapes& sharded, const Scenario& s, bool from_host) {
  const RankSlice& any_rank = engine_of(sharded.shapes, s).ranks.front();  // sizes do not depend on the slice
  // Buckets follow one another from the same place: the largest stands for all.
  const DType dtype = s.rollout.dtype;
  const SyncBuckets buckets = fill_sync_buckets(sharded, s.sync.bucket_bytes, dtype, any_rank);
  Held whole, staged, hashes, all_hashes;
  const auto make_sums = [&] { hashes = w.up(workspace, sharded.shapes.sync_hash_bytes()); };
  if (from_host) {
    if (s.sync.verify) make_sums();
    w.on(StreamId::h2d);
    staged = w.up(communication, buckets.largest_elements * size_of(s.train.precision.master));
    const auto uploaded = w.mark();
    w.on(StreamId::compute), w.wait(uploaded);
  }
  const Held part = w.up(communication, buckets.largest_elements * size_of(dtype));
  w.down(staged);
  if (s.sync.transport == SyncTransport::collective && sharded.world > 1) {
    const auto packed = w.mark();
    w.on(StreamId::gather), w.wait(packed);
    whole = w.up(communication, sharded.world * part.bytes);
  }
  w.down(part), w.down(whole);
  if (!s.sync.verify) return;
  w.begin_block();  // one slot for all that a sync works in
  if (!from_host) make_sums();
  if (sharded.world > 1) all_hashes = w.up(communication, sharded.world * hashes.bytes);
  w.down(hashes), w.down(all_hashes);
}

template void walk_rollout(LiveWalk&, const PlanShapes&, const Scenario&);
template void walk_rollout(ArenaWalk&, const PlanShapes&, const Scenario&);
template void walk_exchange(LiveWalk&, const Scenario&);
template void walk_exchange(ArenaWalk&, const Scenario&);
template void walk_sync(LiveWalk&, const ShardedShapes&, const Scenario&, bool);
template void walk_sync(ArenaWalk&, const ShardedShapes&, const Scenario&, bool);

}  // namespace hotbunk
