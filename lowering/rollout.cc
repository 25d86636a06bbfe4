#include "lowering/rollout.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <tuple>

#include "base/check.h"
#include "layout/placement.h"
#include "layout/scenario_layout.h"
#include "lowering/fuse.h"
#include "lowering/sample_rows.h"
#include "model/decoder.h"
#include "shard/rules.h"
#include "spec/parameter_roles.h"

namespace hotbunk {

EngineSeat engine_seat(const RolloutLayout& l, std::int64_t rank) {
  const std::int64_t each = l.tp * l.cp * l.pp;
  if (l.order == RankOrder::strided) return {rank % l.dp, rank / l.dp};
  return {rank / each, rank % each};
}

std::int64_t engine_stage(const RolloutLayout& l, std::int64_t rank) {
  return engine_seat(l, rank).place / (l.tp * l.cp);
}

std::int64_t rank_of_seat(const RolloutLayout& l, EngineSeat seat) {
  return l.order == RankOrder::strided ? seat.place * l.dp + seat.engine
                                       : seat.engine * l.tp * l.cp * l.pp + seat.place;
}

Range engine_stage_layers(const Scenario& s, std::int64_t stage) {
  const StagePart part = engine_cuts(s)[static_cast<std::size_t>(stage)].stage;
  return part.layers.empty() ? Range{0, s.model.layers} : part.layers.front();
}

std::int64_t kv_row_elements(const Scenario& s) {
  if (s.model.mla) return s.model.mla->kept_dim();
  const std::int64_t sharers = s.rollout.layout.tp / s.rollout.layout.attention_dp;
  return 2 * heads_of_rank(s.model, sharers, 0).key_value.size() * s.model.head_dim;  // as on every rank
}

std::int64_t kv_block_bytes(const Scenario& s, std::int64_t layers) {
  return s.rollout.block_tokens * kv_row_elements(s) * layers * size_of(s.rollout.kv_dtype());
}

RolloutState::RolloutState(const Scenario& s, ProgramBuilder& b, ModelShapes::Weights weights, std::int64_t stage,
                           std::int64_t kv_blocks)
    : scenario_(s),
      weights_(std::move(weights)),
      stage_(stage),
      layers_(engine_stage_layers(s, stage)),
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
  const DType kept = s.rollout.kv_dtype();
  kv_ = b.managed("rollout.kv_cache", kept, kv_blocks * kv_block_bytes(s, layers_.size()) / size_of(kept),
                  Category::kv_cache, sections::kv_cache);
  prepacked_ = prepacked_weights(s, *this);
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

bool RolloutState::is_prepacked(const Tensor& of_weight) const {
  const auto found = std::ranges::find(buffers_, of_weight.buffer);
  HB_CHECK(found != buffers_.end(), "no rollout weight in buffer {}", of_weight.buffer);
  return is_prepacked(static_cast<std::size_t>(found - buffers_.begin()));
}

Tensor RolloutState::kv_layer(const ProgramBuilder& b, std::int64_t layer) const {
  const std::int64_t tokens = scenario_.rollout.block_tokens, of_token = kv_row_elements(scenario_);
  const std::int64_t rows = scenario_.model.mla ? tokens : of_token / scenario_.model.head_dim;
  const std::int64_t cols = tokens * of_token / rows;
  return b.view(kv_, scenario_.rollout.kv_dtype(), {fixed(kv_blocks_), fixed(rows), fixed(cols)},
                (layer - layers_.begin) * kv_blocks_ * rows * cols);
}

std::string weight_of(const Weight& w) {
  if (w.first == ParamRole::q_proj && w.last == w.first) return "q";  // alone: queries of latent attention
  const std::string_view name = rule_of(w.first).engine;
  HB_CHECK(!name.empty(), "no engine holds role {}", static_cast<int>(w.first));
  return std::string(name);
}

ModelSpec served_model(const Scenario& s) {
  ModelSpec model = base_of(s.model);
  model.vocab_multiple = 0;
  return model;
}

namespace {

/// One engine step over T tokens of S sequences, of a stage of the engine's pipeline: the stream comes from the stage
/// before and goes to the next one, and all stages learn what the last one samples. Collectives and messages run on the
/// compute stream, as rollout engines do: nothing in a step could overlap with them.
/// With attention data parallelism the T tokens of S sequences are those of a group of ranks, and as many in every
/// group: each attends to its own, the MLP is that of all groups' tokens, gathered before it and each group's sums
/// scattered behind it, and all ranks learn what each group samples.
class EngineStepLowering {
 public:
  /// `fuses`: products with what stands beside them are one op.
  EngineStepLowering(const Scenario& s, ProgramBuilder& b, const RolloutState& r, std::string prefix,
                     std::int64_t max_tokens, std::int64_t max_seqs, bool fuses)
      : s_(s),
        m_(served_model(s)),
        b_(b),
        r_(r),
        prefix_(std::move(prefix)),
        groups_(attention_groups(s)),
        T_(groups_ > 1 ? Dim{max_tokens, sequence_extent, 0} : tokens(max_tokens)),
        S_(seqs(max_seqs)),
        tp_(s.rollout.layout.tp),
        fuses_(fuses) {}

  void lower() {
    feeds();
    Stream stream = r_.is_first() ? embed() : receive();
    const DecoderLayers layers(m_);
    for (std::int64_t l = r_.layers().begin; l < r_.layers().end; ++l) {
      const Tensor pool = r_.kv_layer(b_, l);
      std::vector<Input> inputs = {stream[0], pool};
      if (stream[1].buffer >= 0) inputs.emplace_back(stream[1]);
      inputs.insert(inputs.end(), r_.layer_buffers(l).begin(), r_.layer_buffers(l).end());
      const std::string at = fmt::format("layers.{}.", l);
      const auto number = static_cast<int>(l);
      stream =
          b_.call(prefix_ + "layer", static_cast<std::int64_t>(layers.sort_of(number)), prefix_ + at, std::move(inputs),
                  [&] { return layer(layers.at(number, l == r_.layers().begin), at, stream, pool); });
    }
    if (!r_.is_last()) send(stream);
    learn_samples(stream);
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
      Op& op = step_.b_.emit(kind, stream, step_.prefix_ + at_ + name, std::move(in), std::move(out));
      return kind == OpKind::linear ? step_.as_prepacked(op) : op;
    }
    Tensor weight(const Weight& w) override {
      const std::string name = at_ + weight_of(w);
      return is_vector(w.first) ? step_.r_.vector(step_.b_, name) : step_.r_.matrix(step_.b_, name);
    }
    Tensor ids() override { return step_.ids_; }
    Tensor positions() override { return step_.positions_; }
    Tensor attend(const TensorSharding& s, const ForwardOp& op, const Tensor& qkv, const Tensor& attended) override {
      of_pool(with_heads(emit(OpKind::kv_write, streams::compute, "kv_write", {qkv, step_.kv_slots_}, {*pool_}), s));
      const bool wants_sums = !op.weights.empty() || step_.holds_part();
      const Tensor lse = wants_sums ? make_sums("attention.lse", s) : Tensor{};
      Op& a = emit(OpKind::paged_attention, streams::compute, op.name,
                   {qkv, *pool_, step_.cu_seqlens_, step_.tables_, step_.lengths_}, {attended});
      with_attrs(of_pool(with_heads(a, s)), op);
      if (!wants_sums) return {};
      a.outputs.push_back(lse);
      add_parts(s, op, attended, lse);
      return op.weights.empty() ? Tensor{} : lse;
    }
    bool attend_latents(const TensorSharding& s, const ForwardOp& op, const LatentInputs& in,
                        const Tensor& attended) override {
      of_pool(emit(OpKind::latent_write, streams::compute, "kv_write", {in.latent, in.shared_key, step_.kv_slots_},
                   {*pool_}));
      const Tensor lse = step_.holds_part() ? make_sums("attention.lse", s) : Tensor{};
      Op& a = emit(OpKind::latent_attention, streams::compute, op.name,
                   {in.queries, *pool_, weight(op.weights[0]), step_.cu_seqlens_, step_.tables_, step_.lengths_},
                   {attended});
      with_attrs(of_pool(with_heads(a, s)), op);
      if (!step_.holds_part()) return true;
      a.outputs.push_back(lse);
      add_parts(s, op, attended, lse);
      return true;
    }

   private:
    /// Of an op that writes to the pool or reads it; of which each context-parallel rank has a part.
    Op& of_pool(Op& op) const {
      with(op, Attr::block_tokens, step_.s_.rollout.block_tokens);
      if (!step_.holds_part()) return op;
      op.group = static_cast<GroupId>(Family::engine_context);
      return with(op, Attr::ranks, step_.s_.rollout.layout.cp);
    }
    Tensor make_sums(const std::string& name, const TensorSharding& s) {
      return make(name, DType::f32, {s.tokens, fixed(s.heads())});
    }
    /// A context-parallel rank has attended to the keys that it holds, with all of its heads. Once it knows everyone's
    /// log-sum-exps it knows what its part weighs, and the parts add up.
    void add_parts(const TensorSharding& s, const ForwardOp& op, const Tensor& attended, const Tensor& lse) {
      if (!step_.holds_part()) return;
      const auto context = static_cast<GroupId>(Family::engine_context);
      const Tensor all =
          step_.make(at_ + "attention.all_lse", {fixed(step_.s_.rollout.layout.cp), s.tokens, fixed(s.heads())},
                     DType::f32, Category::communication);
      emit(OpKind::all_gather, streams::compute, op.name + ".lse.all_gather", {lse}, {all}).group = context;
      emit(OpKind::attention_sinks, streams::compute, op.name + ".part", {attended, lse, all}, {attended, lse}).group =
          context;
      emit(OpKind::all_reduce, streams::compute, op.name + ".all_reduce", {attended}, {attended}).group = context;
    }

    EngineStepLowering& step_;
    std::string at_;
    const Tensor* pool_;
  };

  /// Whether the engine's ranks hold parts of every sequence.
  bool holds_part() const { return s_.rollout.layout.cp > 1; }

  TensorSharding sharding(Dim rows) const {
    return {m_,
            s_.rollout.dtype,
            rows,
            {.ranks = sharers(),
             .group = static_cast<GroupId>(attention_family()),
             .stream = streams::compute,
             .expert_ranks = groups_ > 1 ? 1 : s_.rollout.layout.ep}};
  }
  /// Ranks that share attention, the vocabulary and each sequence.
  std::int64_t sharers() const { return tp_ / groups_; }
  Family attention_family() const { return groups_ > 1 && sharers() > 1 ? Family::engine_attention : Family::tp; }
  /// One rank of each group.
  Family peers_family() const { return sharers() > 1 ? Family::engine_peers : Family::tp; }
  /// Of the tokens of all groups, of which a rank's stream has its own.
  TensorSharding of_all() const {
    return {m_,
            s_.rollout.dtype,
            tokens(groups_ * T_.size),
            {.ranks = tp_,
             .group = static_cast<GroupId>(Family::tp),
             .stream = streams::compute,
             .tokens = sequence_extent,
             .expert_ranks = s_.rollout.layout.ep,
             .token_sharers = sharers(),
             .sharers = static_cast<GroupId>(attention_family()),
             .peers = static_cast<GroupId>(peers_family())}};
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
    if (r_.is_first()) ids_ = feed("token_ids", {T_}, DType::i32, Slot::token_ids);
    positions_ = feed("positions", {T_}, DType::i32, Slot::positions);
    cu_seqlens_ = feed("cu_seqlens", {fixed(S_.size + 1)}, DType::i32, Slot::cu_seqlens);
    kv_slots_ = feed("kv_slots", {T_}, DType::i32, Slot::kv_slots);
    tables_ = feed("block_tables", {S_, fixed(max_blocks_per_seq(s_))}, DType::i32, Slot::block_tables);
    lengths_ = feed("context_lengths", {S_}, DType::i32, Slot::context_lengths);
    if (!r_.is_last()) return;
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

  /// The sum of the stream's two parts, which the next stage's first layer begins with.
  void send(const Stream& stream) {
    b_.begin_call(prefix_ + "send", prefix_);
    Tensor sum = stream[0];
    if (stream[1].buffer >= 0) {
      sum = make("sent", {T_, fixed(m_.hidden)}, s_.rollout.dtype, Category::communication);
      op(OpKind::add, "sent.add", {stream[0], stream[1]}, {sum});
    }
    with(b_.communicate(OpKind::send, streams::compute, Family::engine_stages, prefix_ + "send", {sum}, {}), Attr::peer,
         r_.stage() + 1);
  }
  Stream receive() {
    b_.begin_call(prefix_ + "receive", prefix_);
    const Tensor h = make("received", {T_, fixed(m_.hidden)}, s_.rollout.dtype, Category::communication);
    with(b_.communicate(OpKind::recv, streams::compute, Family::engine_stages, prefix_ + "receive", {}, {h}),
         Attr::peer, r_.stage() - 1);
    return {h, {}};
  }

  Stream layer(const DecoderLayer& l, const std::string& at, const Stream& in, const Tensor& pool) {
    Values values(l.forward.values().size());
    const auto value = [&](ValueId id) -> Tensor& { return values[static_cast<std::size_t>(id)]; };
    value(l.in.h) = in[0], value(l.in.z) = in[1];
    Emits emits(*this, at, &pool);
    if (groups_ == 1) {
      emit_forward(l.forward, sharding(T_), emits, values);
    } else {
      const std::vector<ValueId> up_to_norm = {l.out.h}, behind = {l.out.z};
      emit_forward(l.forward, sharding(T_), emits, values, &up_to_norm);
      emit_forward(l.forward, of_all(), emits, values, &behind);
    }
    const Stream out = {value(l.out.h), value(l.out.z)};
    if (fuses_) fuse_linears(b_.open_ops(), out);
    return out;
  }

  /// A linear reads its matrix as the sync left it.
  Op& as_prepacked(Op& linear) const {
    return r_.is_prepacked(linear.inputs[1]) ? with(linear, Attr::prepacked, std::int64_t{1}) : linear;
  }

  struct Samples {
    Tensor ids, logps;
  };
  Samples make_samples() {
    const Tensor ids = make("sampled_ids", {S_}, DType::i32, Category::workspace);
    return {ids, make("sampled_logps", {S_}, DType::f32, Category::workspace)};
  }

  /// What the last stage samples, on every stage.
  void learn_samples(const Stream& stream) {
    b_.begin_call(prefix_ + "sample", prefix_);
    const Samples found = r_.is_last() ? sample(stream) : make_samples();
    const auto to_all_stages = [&](const Tensor& t, const char* name) {
      with(b_.communicate(OpKind::broadcast, streams::compute, Family::engine_stages, prefix_ + name, {t}, {t}),
           Attr::src_rank, s_.rollout.layout.pp - 1);
    };
    if (s_.rollout.layout.pp > 1)
      to_all_stages(found.ids, "sampled_ids.all_stages"), to_all_stages(found.logps, "sampled_logps.all_stages");
    b_.fetch(of_all_groups(found.ids, "sampled_ids"), Slot::sampled_ids);
    b_.fetch(of_all_groups(found.logps, "sampled_logps"), Slot::sampled_logps);
  }
  Tensor of_all_groups(const Tensor& own, const std::string& name) {
    if (groups_ == 1) return own;
    const Tensor all = make("all_" + name, {fixed(groups_), S_}, own.dtype, Category::communication);
    b_.communicate(OpKind::all_gather, streams::compute, peers_family(), prefix_ + name + ".all_gather", {own}, {all});
    return all;
  }

  /// Final norm and head on each sequence's last row only.
  Samples sample(const Stream& stream) {
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

    const Tensor head = r_.matrix(b_, r_.head());
    const std::int64_t V = head.shape[0].size;
    Tensor logits = make("logits", {S_, fixed(V)}, DType::f32);
    as_prepacked(op(OpKind::linear, "lm_head", {normed, head}, {logits}));
    if (m_.logit_softcap > 0.0)
      with(op(OpKind::softcap, "logits.softcap", {logits}, {logits}), Attr::softcap, m_.logit_softcap);
    if (sharers() > 1) {
      const Tensor all = make("all_logits", {fixed(sharers()), S_, fixed(V)}, DType::f32, Category::communication);
      b_.communicate(OpKind::all_gather, streams::compute, attention_family(), prefix_ + "logits.all_gather", {logits},
                     {all});
      logits = all;
    } else {
      logits = b_.view(logits.buffer, DType::f32, {fixed(1), S_, fixed(V)});
    }
    const Samples found = make_samples();
    Op& o = op(OpKind::sample, "sample", {logits, uniforms_}, {found.ids, found.logps});
    with(
        with(with(with(with(o, Attr::vocab, m_.vocab), Attr::tp, sharers()), Attr::temperature, s_.rollout.temperature),
             Attr::top_k, s_.rollout.top_k),
        Attr::top_p, s_.rollout.top_p);
    if (fuses_) fuse_linears(b_.open_ops(), {});
    return found;
  }

  const Scenario& s_;
  const ModelSpec m_;
  ProgramBuilder& b_;
  const RolloutState& r_;
  std::string prefix_;
  std::int64_t groups_ = 1;
  Dim T_, S_;
  std::int64_t tp_;
  bool fuses_ = false;
  Tensor ids_, positions_, cu_seqlens_, kv_slots_, tables_, lengths_, last_rows_, uniforms_;
};

}  // namespace

void lower_rollout(const Scenario& s, ProgramBuilder& b, const RolloutState& r, std::int32_t phase) {
  const std::int64_t slots = slots_of_group(s), prefill = prefill_of_group(s);
  b.begin_block(phase, "prefill");
  EngineStepLowering(s, b, r, "rollout.prefill.", prefill, std::min(slots, prefill), false).lower();
  b.begin_block(phase, "decode");
  EngineStepLowering(s, b, r, "rollout.decode.", slots, slots, s.cluster.gpu.is_cpu).lower();
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
