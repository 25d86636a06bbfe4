#include "lowering/rollout.h"

#include <fmt/format.h>

#include <array>
#include <tuple>

#include "base/check.h"
#include "layout/placement.h"
#include "lowering/sample_rows.h"
#include "model/decoder.h"
#include "shard/rules.h"

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

std::int64_t kv_row_elements(const Scenario& s) {
  if (s.model.mla) return s.model.mla->kept_dim();
  return 2 * heads_of_rank(s.model, s.rollout.layout.tp, 0).key_value.size() * s.model.head_dim;  // as on every rank
}

std::int64_t kv_block_bytes(const Scenario& s) {
  return s.rollout.block_tokens * kv_row_elements(s) * s.model.layers * size_of(s.rollout.dtype);
}

RolloutState::RolloutState(const Scenario& s, ProgramBuilder& b, ModelShapes::Weights weights, std::int64_t kv_blocks)
    : scenario_(s),
      weights_(std::move(weights)),
      by_layer_(static_cast<std::size_t>(s.model.layers)),
      kv_blocks_(kv_blocks) {
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
  const std::int64_t apart = scenario_.model.mla ? 1 : 2;  // keys and values
  const std::int64_t rows = apart * scenario_.rollout.block_tokens, cols = kv_row_elements(scenario_) / apart;
  return b.view(kv_, scenario_.rollout.dtype, {fixed(kv_blocks_), fixed(rows), fixed(cols)},
                layer * kv_blocks_ * rows * cols);
}

namespace {

/// The weight of an engine that holds these parameters.
std::string weight_of(const Weight& w) {
  switch (w.first) {
    case ParamRole::embedding:
      return "embedding";
    case ParamRole::position_embedding:
      return "position_embedding";
    case ParamRole::final_norm:
      return "final_norm";
    case ParamRole::final_norm_bias:
      return "final_norm_bias";
    case ParamRole::input_norm:
      return "input_norm";
    case ParamRole::input_norm_bias:
      return "input_norm_bias";
    case ParamRole::q_proj:
      return w.last == ParamRole::v_proj ? "qkv" : "q";
    case ParamRole::q_a_proj:
      return "q_a";
    case ParamRole::q_a_norm:
      return "q_a_norm";
    case ParamRole::q_b_proj:
      return "q_b";
    case ParamRole::kv_a_proj:
      return "kv_a";
    case ParamRole::kv_a_norm:
      return "kv_a_norm";
    case ParamRole::kv_b_proj:
      return "kv_b";
    case ParamRole::q_bias:
      return "qkv_bias";
    case ParamRole::q_norm:
      return "q_norm";
    case ParamRole::k_norm:
      return "k_norm";
    case ParamRole::o_proj:
      return "o";
    case ParamRole::o_bias:
      return "o_bias";
    case ParamRole::post_norm:
      return "post_norm";
    case ParamRole::post_norm_bias:
      return "post_norm_bias";
    case ParamRole::attention_out_norm:
      return "attention_out_norm";
    case ParamRole::mlp_out_norm:
      return "mlp_out_norm";
    case ParamRole::gate_proj:
      return "gate_up";
    case ParamRole::up_proj:
      return "up";
    case ParamRole::up_bias:
      return "up_bias";
    case ParamRole::down_proj:
      return "down";
    case ParamRole::down_bias:
      return "down_bias";
    case ParamRole::router:
      return "router";
    case ParamRole::router_bias:
      return "router_bias";
    case ParamRole::shared_gate:
      return "shared_gate_up";
    case ParamRole::shared_down:
      return "shared_down";
    case ParamRole::expert_gate:
      return "experts_gate_up";
    case ParamRole::expert_down:
      return "experts_down";
    default:
      HB_CHECK(false, "no engine holds role {}", static_cast<int>(w.first));
      return "";
  }
}

/// One engine step over T tokens of S sequences. Collectives over the TP group run on the compute stream, as rollout
/// engines do: nothing in a step could overlap with them.
class EngineStepLowering {
 public:
  EngineStepLowering(const Scenario& s, ProgramBuilder& b, const RolloutState& r, std::string prefix,
                     std::int64_t max_tokens, std::int64_t max_seqs)
      : s_(s),
        m_(base_of(s.model)),
        b_(b),
        r_(r),
        prefix_(std::move(prefix)),
        T_(tokens(max_tokens)),
        S_(seqs(max_seqs)),
        tp_(s.rollout.layout.tp) {}

  void lower() {
    feeds();
    Stream stream = embed();
    const DecoderLayers layers(m_);
    for (std::int64_t l = 0; l < m_.layers; ++l) {
      const Tensor pool = r_.kv_layer(b_, l);
      std::vector<Input> inputs = {stream[0], pool};
      if (stream[1].buffer >= 0) inputs.emplace_back(stream[1]);
      inputs.insert(inputs.end(), r_.layer_buffers(l).begin(), r_.layer_buffers(l).end());
      const std::string at = fmt::format("layers.{}.", l);
      const auto number = static_cast<int>(l);
      stream = b_.call(prefix_ + "layer", static_cast<std::int64_t>(layers.sort_of(number)), prefix_ + at,
                       std::move(inputs), [&] { return layer(layers.at(number, l == 0), at, stream, pool); });
    }
    sample(stream);
  }

 private:
  /// The residual stream, h and z (model/decoder.h); z without a buffer: there is only h.
  using Stream = std::array<Tensor, 2>;

  /// Writes with an engine's weights; tensors of a layer under its name.
  class Emits : public Emitter {
   public:
    Emits(EngineStepLowering& step, std::string at, const Tensor* pool = nullptr)
        : step_(step), at_(std::move(at)), pool_(pool) {}
    Tensor make(const std::string& name, DType dtype, std::initializer_list<Dim> shape) override {
      return step_.make(at_ + name, shape, dtype);
    }
    Op& emit(OpKind kind, StreamId stream, const std::string& name, std::vector<Tensor> in,
             std::vector<Tensor> out) override {
      return step_.b_.emit(kind, stream, step_.prefix_ + at_ + name, std::move(in), std::move(out));
    }
    Tensor weight(const Weight& w) override {
      const std::string name = at_ + weight_of(w);
      return is_vector(w.first) ? step_.r_.vector(step_.b_, name) : step_.r_.matrix(step_.b_, name);
    }
    Tensor ids() override { return step_.ids_; }
    Tensor positions() override { return step_.positions_; }
    Tensor attend(const TensorSharding& s, const ForwardOp& op, const Tensor& qkv, const Tensor& attended) override {
      const std::int64_t block = step_.s_.rollout.block_tokens;
      with(with_heads(emit(OpKind::kv_write, streams::compute, "kv_write", {qkv, step_.kv_slots_}, {*pool_}), s),
           Attr::block_tokens, block);
      Op& a = emit(OpKind::paged_attention, streams::compute, op.name,
                   {qkv, *pool_, step_.cu_seqlens_, step_.tables_, step_.lengths_}, {attended});
      with_attrs(with(with_heads(a, s), Attr::block_tokens, block), op);
      return {};
    }
    bool attend_latents(const TensorSharding& s, const ForwardOp& op, const LatentInputs& in,
                        const Tensor& attended) override {
      const std::int64_t block = step_.s_.rollout.block_tokens;
      with(emit(OpKind::latent_write, streams::compute, "kv_write", {in.latent, in.shared_key, step_.kv_slots_},
                {*pool_}),
           Attr::block_tokens, block);
      Op& a = emit(OpKind::latent_attention, streams::compute, op.name,
                   {in.queries, *pool_, weight(op.weights[0]), step_.cu_seqlens_, step_.tables_, step_.lengths_},
                   {attended});
      with_attrs(with(with_heads(a, s), Attr::block_tokens, block), op);
      return true;
    }

   private:
    EngineStepLowering& step_;
    std::string at_;
    const Tensor* pool_;
  };

  TensorSharding sharding(Dim rows) const {
    return {m_, s_.rollout.dtype, rows, {tp_, static_cast<GroupId>(Family::tp), streams::compute}};
  }

  Tensor make(const std::string& name, std::initializer_list<Dim> shape, DType dtype,
              Category c = Category::activations) {
    return b_.transient(prefix_ + name, dtype, shape, c);
  }
  Op& op(OpKind kind, const std::string& name, std::vector<Tensor> in, std::vector<Tensor> out) {
    return b_.emit(kind, streams::compute, prefix_ + name, std::move(in), std::move(out));
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

  Stream embed() {
    b_.begin_call(prefix_ + "embed", prefix_);
    const DecoderEmbedding e = decoder_embedding(m_);
    Values values;
    Emits emits(*this, "");
    emit_forward(e.forward, sharding(T_), emits, values);
    return {values[static_cast<std::size_t>(e.embedded)], {}};
  }

  Stream layer(const DecoderLayer& l, const std::string& at, const Stream& in, const Tensor& pool) {
    Values values(l.forward.values().size());
    const auto value = [&](ValueId id) -> Tensor& { return values[static_cast<std::size_t>(id)]; };
    value(l.in.h) = in[0], value(l.in.z) = in[1];
    Emits emits(*this, at, &pool);
    emit_forward(l.forward, sharding(T_), emits, values);
    return {value(l.out.h), value(l.out.z)};
  }

  /// Final norm and head on each sequence's last row only.
  void sample(const Stream& stream) {
    b_.begin_call(prefix_ + "sample", prefix_);
    const DecoderEnd end = decoder_end(m_);
    Values values(end.forward.values().size());
    const auto rows = [&](const char* name, const Tensor& x) {
      const Tensor y = make(name, {S_, fixed(m_.hidden)}, s_.rollout.dtype);
      op(OpKind::gather_rows, name, {x, last_rows_}, {y});
      return y;
    };
    values[static_cast<std::size_t>(end.in.h)] = rows("last_h", stream[0]);
    values[static_cast<std::size_t>(end.in.z)] = rows("last_z", stream[1]);
    Emits emits(*this, "");
    emit_forward(end.forward, sharding(S_), emits, values);
    const Tensor& normed = values[static_cast<std::size_t>(end.normed)];

    const std::string head = r_.has("lm_head") ? "lm_head" : "embedding";
    const std::int64_t V = r_.weights()[r_.index(head)].rows;
    Tensor logits = make("logits", {S_, fixed(V)}, DType::f32);
    op(OpKind::linear, "lm_head", {normed, r_.matrix(b_, head)}, {logits});
    if (m_.logit_softcap > 0.0)
      with(op(OpKind::softcap, "logits.softcap", {logits}, {logits}), Attr::softcap, m_.logit_softcap);
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
  const ModelSpec m_;  // adapters are in its matrices
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
    if (t.streams_from_host()) break;  // nothing of it is on the device
    if (u.whole >= 0) out.params.push_back({u.whole, u.host_whole});
    else out.params.push_back({u.shard, u.host_shard});
    if (u.publishes() && u.shard >= 0) out.moments.push_back({u.shard, u.host_shard});
    if (u.exp_avg >= 0) {
      out.moments.push_back({u.exp_avg, u.host_exp_avg});
      out.moments.push_back({u.exp_avg_sq, u.host_exp_avg_sq});
    }
    if (u.reference >= 0) out.reference.push_back({u.reference, u.host_reference});
  }
  if (!r) return out;
  for (std::size_t i = 0; i < r->weights().size(); ++i) out.weights.push_back({r->buffer(i), r->host_buffer(i)});
  out.kv = r->kv();
  return out;
}

}  // namespace hotbunk
