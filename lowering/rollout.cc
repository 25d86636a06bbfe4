#include "lowering/rollout.h"

#include <fmt/format.h>

#include <array>
#include <tuple>

#include "base/check.h"
#include "lowering/decoder.h"
#include "lowering/sample_rows.h"

namespace hotbunk {

EngineSeat engine_seat(const RolloutLayout& l, std::int64_t rank) {
  const std::int64_t each = l.tp * l.cp * l.pp;
  if (l.order == RankOrder::strided) return {rank % l.dp, rank / l.dp};
  return {rank / each, rank % each};
}

std::int64_t rank_of_seat(const RolloutLayout& l, EngineSeat seat) {
  return l.order == RankOrder::strided ? seat.place * l.dp + seat.engine
                                       : seat.engine * l.tp * l.cp * l.pp + seat.place;
}

std::int64_t kv_block_bytes(const Scenario& s) {
  const std::int64_t kv_heads = heads_of_rank(s.model, s.rollout.layout.tp, 0).key_value.size();
  return 2 * s.rollout.block_tokens * kv_heads * s.model.head_dim * s.model.layers * size_of(s.rollout.dtype);
}

RolloutState::RolloutState(const Scenario& s, ProgramBuilder& b, ModelShapes::Weights weights, std::int64_t kv_blocks)
    : scenario_(s),
      weights_(std::move(weights)),
      by_layer_(static_cast<std::size_t>(s.model.layers)),
      kv_blocks_(kv_blocks) {
  const std::int64_t tp = s.rollout.layout.tp;
  const HeadRanges mine = heads_of_rank(s.model, tp, 0);  // every rank has as many
  heads_ = mine.query.size();
  kv_heads_ = mine.key_value.size();
  const bool backed_up = s.rollout.sleep_level == 1 && JobPhases(s).sleepers().weights;
  for (std::size_t i = 0; i < weights_->size(); ++i) {
    const LocalWeight& w = (*weights_)[i];
    by_name_.emplace(w.name, i);
    buffers_.push_back(
        b.managed("rollout." + w.name, s.rollout.dtype, w.elements(), Category::params, sections::rollout_weights));
    if (w.layer >= 0) by_layer_[static_cast<std::size_t>(w.layer)].push_back(buffers_.back());
    host_buffers_.push_back(backed_up ? b.managed("host.rollout." + w.name, s.rollout.dtype, w.elements(),
                                                  Category::params, sections::host_weights)
                                      : -1);
  }
  kv_ = b.managed("rollout.kv_cache", s.rollout.dtype, kv_blocks * kv_block_bytes(s) / size_of(s.rollout.dtype),
                  Category::kv_cache, sections::kv_cache);
}

std::size_t RolloutState::index(const std::string& name) const {
  const auto it = by_name_.find(name);
  HB_CHECK(it != by_name_.end(), "no rollout weight '{}'", name);
  return it->second;
}

Tensor RolloutState::matrix(const ProgramBuilder& b, const std::string& name) const {
  const std::size_t i = index(name);
  return b.view(buffers_[i], scenario_.rollout.dtype, {fixed((*weights_)[i].rows), fixed((*weights_)[i].cols)});
}

Tensor RolloutState::vector(const ProgramBuilder& b, const std::string& name) const {
  const std::size_t i = index(name);
  return b.view(buffers_[i], scenario_.rollout.dtype, {fixed((*weights_)[i].elements())});
}

Tensor RolloutState::kv_layer(const ProgramBuilder& b, std::int64_t layer) const {
  const std::int64_t rows = 2 * scenario_.rollout.block_tokens, cols = kv_heads_ * scenario_.model.head_dim;
  return b.view(kv_, scenario_.rollout.dtype, {fixed(kv_blocks_), fixed(rows), fixed(cols)},
                layer * kv_blocks_ * rows * cols);
}

namespace {

/// One engine step over T tokens of S sequences. Collectives over the TP group run on the compute stream, as rollout
/// engines do: nothing in a step could overlap with them.
class EngineStepLowering {
 public:
  EngineStepLowering(const Scenario& s, ProgramBuilder& b, const RolloutState& r, std::string prefix,
                     std::int64_t max_tokens, std::int64_t max_seqs)
      : s_(s),
        m_(s.model),
        b_(b),
        r_(r),
        prefix_(std::move(prefix)),
        T_(tokens(max_tokens)),
        S_(seqs(max_seqs)),
        tp_(s.rollout.layout.tp) {}

  void lower() {
    feeds();
    Tensor h = embed();
    std::optional<Tensor> z;
    for (std::int64_t l = 0; l < m_.layers; ++l) {
      const Tensor pool = r_.kv_layer(b_, l);
      std::vector<Input> inputs = {h, pool};
      if (z) inputs.emplace_back(*z);
      inputs.insert(inputs.end(), r_.layer_buffers(l).begin(), r_.layer_buffers(l).end());
      const std::string at = fmt::format("layers.{}.", l);
      std::tie(h, z) = std::tuple_cat(
          b_.call(prefix_ + "layer", 0, prefix_ + at, std::move(inputs), [&] { return layer(at, h, z, pool); }));
    }
    sample(h, z);
  }

 private:
  Tensor make(const std::string& name, std::initializer_list<Dim> shape, DType dtype,
              Category c = Category::activations) {
    return b_.transient(prefix_ + name, dtype, shape, c);
  }
  Tensor activation(const std::string& name, std::int64_t width) {
    return make(name, {T_, fixed(width)}, s_.rollout.dtype);
  }
  Op& op(OpKind kind, const std::string& name, std::vector<Tensor> in, std::vector<Tensor> out) {
    return b_.emit(kind, streams::compute, prefix_ + name, std::move(in), std::move(out));
  }
  void all_reduce(const std::string& name, const Tensor& t) {
    if (tp_ > 1) b_.communicate(OpKind::all_reduce, streams::compute, Family::tp, prefix_ + name, {t}, {t});
  }
  Tensor feed(const char* name, std::initializer_list<Dim> shape, DType dtype, Slot slot) {
    const Tensor t = make(name, shape, dtype, Category::workspace);
    b_.feed(t, slot);
    return t;
  }

  void feeds() {
    ids_ = feed("token_ids", {T_}, DType::i32, Slot::token_ids);
    positions_ = feed("positions", {T_}, DType::i32, Slot::positions);
    cu_seqlens_ = feed("cu_seqlens", {fixed(S_.size + 1)}, DType::i32, Slot::cu_seqlens);
    kv_slots_ = feed("kv_slots", {T_}, DType::i32, Slot::kv_slots);
    tables_ = feed("block_tables", {S_, fixed(max_blocks_per_seq(s_))}, DType::i32, Slot::block_tables);
    lengths_ = feed("context_lengths", {S_}, DType::i32, Slot::context_lengths);
    last_rows_ = feed("last_rows", {S_}, DType::i32, Slot::last_rows);
    uniforms_ = feed("uniforms", {S_}, DType::f32, Slot::uniforms);
  }

  Tensor embed() {
    b_.begin_call(prefix_ + "embed", prefix_);
    const LocalWeight& w = r_.weights()[r_.index("embedding")];
    const Tensor x = activation("embedded", m_.hidden);
    Op& e = op(OpKind::embedding, "embedding", {r_.matrix(b_, "embedding"), ids_}, {x});
    with(with(e, Attr::vocab_begin, std::int64_t{0}), Attr::vocab_end, tp_ > 1 ? w.rows : m_.vocab);
    if (tp_ > 1) {  // each rank answers for its own rows (vocab_rows)
      e.group = static_cast<GroupId>(Family::tp);
      with(with(e, Attr::vocab_stride, w.rows), Attr::vocab, m_.vocab);
    }
    all_reduce("embedding.all_reduce", x);
    return x;
  }

  /// normed = norm(h + z); h becomes h + z.
  Tensor norm(const std::string& name, const std::string& weight, Tensor& h, const std::optional<Tensor>& z) {
    const Tensor normed = activation(name, m_.hidden);
    const Tensor rstd = make(name + ".rstd", {T_}, DType::f32);
    std::vector<Tensor> in = {h, r_.vector(b_, weight)}, out = {normed, rstd};
    if (z) {
      const Tensor sum = activation(name + ".sum", m_.hidden);
      in.push_back(*z);
      out.push_back(sum);
      with(op(OpKind::rms_norm, name, in, out), Attr::eps, m_.norm_eps);
      h = sum;
    } else {
      with(op(OpKind::rms_norm, name, in, out), Attr::eps, m_.norm_eps);
    }
    return normed;
  }

  Op& with_local_heads(Op& o) { return with_heads(o, r_.heads(), r_.kv_heads(), m_.head_dim); }

  /// The two parts of the stream behind it.
  std::array<Tensor, 2> layer(const std::string& at, Tensor h, const std::optional<Tensor>& z, const Tensor& pool) {
    const Tensor normed = norm(at + "input_norm", at + "input_norm", h, z);
    Tensor qkv = activation(at + "qkv", (r_.heads() + 2 * r_.kv_heads()) * m_.head_dim);
    std::vector<Tensor> in = {normed, r_.matrix(b_, at + "qkv")};
    if (m_.qkv_bias) in.push_back(r_.vector(b_, at + "qkv_bias"));
    op(OpKind::linear, at + "qkv_proj", std::move(in), {qkv});
    if (m_.qk_norm) {
      const Tensor raw = qkv;
      qkv = activation(at + "qkv_normed", (r_.heads() + 2 * r_.kv_heads()) * m_.head_dim);
      const Tensor rstd = make(at + "qk_rstd", {T_, fixed(r_.heads() + r_.kv_heads())}, DType::f32);
      Op& n = op(OpKind::qk_norm, at + "qk_norm", {raw, r_.vector(b_, at + "q_norm"), r_.vector(b_, at + "k_norm")},
                 {qkv, rstd});
      with(with_local_heads(n), Attr::eps, m_.norm_eps);
    }
    with_rope(with_local_heads(op(OpKind::rope, at + "rope", {qkv, positions_}, {qkv})), m_);
    with(with_local_heads(op(OpKind::kv_write, at + "kv_write", {qkv, kv_slots_}, {pool})), Attr::block_tokens,
         s_.rollout.block_tokens);
    const Tensor attended = activation(at + "attended", r_.heads() * m_.head_dim);
    Op& a = op(OpKind::paged_attention, at + "attention", {qkv, pool, cu_seqlens_, tables_, lengths_}, {attended});
    with(with_local_heads(a), Attr::block_tokens, s_.rollout.block_tokens);
    const Tensor y = activation(at + "attention_out", m_.hidden);
    op(OpKind::linear, at + "o_proj", {attended, r_.matrix(b_, at + "o")}, {y});
    all_reduce(at + "o_proj.all_reduce", y);

    const Tensor normed2 = norm(at + "post_norm", at + "post_norm", h, y);
    const std::int64_t I = m_.intermediate / tp_;
    const Tensor gate_up = activation(at + "gate_up", 2 * I), act = activation(at + "activated", I);
    op(OpKind::linear, at + "gate_up_proj", {normed2, r_.matrix(b_, at + "gate_up")}, {gate_up});
    op(OpKind::swiglu, at + "swiglu", {gate_up}, {act});
    const Tensor down = activation(at + "mlp_out", m_.hidden);
    op(OpKind::linear, at + "down_proj", {act, r_.matrix(b_, at + "down")}, {down});
    all_reduce(at + "down_proj.all_reduce", down);
    return {h, down};
  }

  /// Final norm and head on each sequence's last row only.
  void sample(const Tensor& h, const std::optional<Tensor>& z) {
    b_.begin_call(prefix_ + "sample", prefix_);
    const Dim H = fixed(m_.hidden);
    const auto rows = [&](const char* name, const Tensor& x) {
      const Tensor y = make(name, {S_, H}, s_.rollout.dtype);
      op(OpKind::gather_rows, name, {x, last_rows_}, {y});
      return y;
    };
    const Tensor normed = make("final_normed", {S_, H}, s_.rollout.dtype), rstd = make("final_rstd", {S_}, DType::f32);
    std::vector<Tensor> in = {rows("last_h", h), r_.vector(b_, "final_norm")}, out = {normed, rstd};
    if (z) {
      in.push_back(rows("last_z", *z));
      out.push_back(make("final_sum", {S_, H}, s_.rollout.dtype));
    }
    with(op(OpKind::rms_norm, "final_norm", std::move(in), std::move(out)), Attr::eps, m_.norm_eps);

    const std::string head = r_.has("lm_head") ? "lm_head" : "embedding";
    const std::int64_t V = r_.weights()[r_.index(head)].rows;
    Tensor logits = make("logits", {S_, fixed(V)}, DType::f32);
    op(OpKind::linear, "lm_head", {normed, r_.matrix(b_, head)}, {logits});
    if (tp_ > 1) {
      const Tensor all = make("all_logits", {fixed(tp_), S_, fixed(V)}, DType::f32, Category::communication);
      b_.communicate(OpKind::all_gather, streams::compute, Family::tp, prefix_ + "logits.all_gather", {logits}, {all});
      logits = all;
    } else {
      logits = b_.view(logits.buffer, DType::f32, {fixed(1), S_, fixed(V)});
    }
    const Tensor ids = make("sampled_ids", {S_}, DType::i32, Category::workspace);
    const Tensor logps = make("sampled_logps", {S_}, DType::f32, Category::workspace);
    Op& o = op(OpKind::sample, "sample", {logits, uniforms_}, {ids, logps});
    with(with(with(with(with(o, Attr::vocab, m_.vocab), Attr::tp, tp_), Attr::temperature, s_.rollout.temperature),
              Attr::top_k, s_.rollout.top_k),
         Attr::top_p, s_.rollout.top_p);
    b_.fetch(ids, Slot::sampled_ids);
    b_.fetch(logps, Slot::sampled_logps);
  }

  const Scenario& s_;
  const ModelSpec& m_;
  ProgramBuilder& b_;
  const RolloutState& r_;
  std::string prefix_;
  Dim T_, S_;
  std::int64_t tp_;
  Tensor ids_, positions_, cu_seqlens_, kv_slots_, tables_, lengths_, last_rows_, uniforms_;
};

}  // namespace

void lower_rollout(const Scenario& s, ProgramBuilder& b, const RolloutState& r, std::int32_t phase) {
  const std::int64_t slots = s.rollout.max_running_requests, prefill = s.rollout.max_prefill_tokens;
  b.begin_block(phase, "prefill");
  EngineStepLowering(s, b, r, "rollout.prefill.", prefill, std::min(slots, prefill)).lower();
  b.begin_block(phase, "decode");
  EngineStepLowering(s, b, r, "rollout.decode.", slots, slots).lower();
}

void lower_exchange(const Scenario& s, ProgramBuilder& b, std::int64_t world, std::int32_t phase) {
  b.begin_block(phase, "exchange");
  const SlotLimitId one = b.limit_slots("exchange", 1);
  const auto share = [&](const std::string& name, DType dtype, std::int64_t width, Slot mine, Slot all) {
    const std::int64_t rows = rows_per_rank(s);
    const Tensor part = b.transient("exchange." + name, dtype, {fixed(rows), fixed(width)}, Category::communication);
    b.feed(part, mine);
    if (world == 1) {
      b.take_turn(one, {part.buffer});
      b.fetch(part, all);
      return;
    }
    const Tensor gathered =
        b.transient("exchange.all_" + name, dtype, {fixed(world * rows), fixed(width)}, Category::communication);
    b.communicate(OpKind::all_gather, streams::control, Family::world, "exchange." + name + ".all_gather", {part},
                  {gathered});
    b.take_turn(one, {part.buffer, gathered.buffer});
    b.fetch(gathered, all);
  };
  share("sample_rows", DType::i32, row_ints(s), Slot::sample_rows, Slot::all_sample_rows);
  share("sample_logps", DType::f32, max_response_tokens(s), Slot::sample_logps, Slot::all_sample_logps);
}

ShiftBuffers shift_buffers(const TrainState& t, const RolloutState* r) {
  ShiftBuffers out;
  for (const UnitState& u : t.units()) {
    if (u.whole >= 0) out.params.push_back({u.whole, u.host_whole});
    else out.params.push_back({u.shard, u.host_shard});
    if (u.publishes()) out.moments.push_back({u.shard, u.host_shard});
    out.moments.push_back({u.exp_avg, u.host_exp_avg});
    out.moments.push_back({u.exp_avg_sq, u.host_exp_avg_sq});
    if (u.reference >= 0) out.reference.push_back({u.reference, u.host_reference});
  }
  if (!r) return out;
  for (std::size_t i = 0; i < r->weights().size(); ++i) out.weights.push_back({r->buffer(i), r->host_buffer(i)});
  out.kv = r->kv();
  return out;
}

}  // namespace hotbunk
