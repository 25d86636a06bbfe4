#include "lowering/packed_model.h"

#include <fmt/format.h>

#include <utility>

#include "base/check.h"
#include "layout/expert_copies.h"
#include "shard/context_parallel.h"
#include "spec/expert_mesh.h"
#include "spec/expert_rounds.h"

namespace hotbunk {

/// Writes with a unit's parameters and gradients, under the name of a layer.
class PackedModel::Emits : public BackwardEmitter {
 public:
  Emits(const PackedModel& m, const WholeUnit& w, const WholeUnit* dw, std::string prefix, std::string suffix = "")
      : m_(m), w_(w), dw_(dw), prefix_(std::move(prefix)), suffix_(std::move(suffix)) {}

  Tensor make(const std::string& name, DType dtype, std::initializer_list<Dim> shape) override {
    return m_.b_.transient(prefix_ + name + suffix_, dtype, shape, Category::activations);
  }
  /// From now on products that make gradients of matrices go there. `overwritten`: a tensor that is not what it was
  /// when they come. `apart`: the unit's gradients are only there then, so what is found now of the others (of norms,
  /// vectors) is kept by itself, and copied to them.
  void defer(Deferred& to, BufferId overwritten, bool apart) {
    deferred_ = &to, overwritten_ = overwritten, apart_ = apart;
  }
  Op& emit(OpKind kind, StreamId stream, const std::string& name, std::vector<Tensor> in,
           std::vector<Tensor> out) override {
    if (deferred_ == nullptr) return m_.b_.emit(kind, stream, prefix_ + name + suffix_, std::move(in), std::move(out));
    if (makes_matrix_gradient(kind)) return deferred(kind, name, std::move(in), std::move(out));
    if (apart_)
      for (Tensor& t : out)
        if (std::ranges::count(dw_->parts, t.buffer, &WholeUnit::Part::buffer) > 0) t = found_apart(name, t);
    return m_.b_.emit(kind, stream, prefix_ + name + suffix_, std::move(in), std::move(out));
  }
  Tensor weight(const Weight& w) override { return w_.tensor(m_.b_, w.first, w.last); }
  Tensor gradient(const Weight& w) override { return dw_->tensor(m_.b_, w.first, w.last); }
  Tensor ids() override { return m_.feeds_.ids; }
  Tensor positions() override { return m_.feeds_.positions; }
  const RouterLossFeeds* router_loss() const override {
    return m_.feeds_.router_loss.metrics.buffer >= 0 ? &m_.feeds_.router_loss : nullptr;
  }
  Tensor attend(const TensorSharding& s, const ForwardOp& op, const Tensor& qkv, const Tensor& attended) override {
    if (s.context.ranks > 1) return context_attention(*this, s, op, qkv, m_.feeds_.cu_seqlens, attended);
    const Tensor lse = make("lse", DType::f32, {s.tokens, fixed(s.heads())});
    Op& a = emit(OpKind::attention, streams::compute, op.name, {qkv, m_.feeds_.cu_seqlens}, {attended, lse});
    with_attrs(with_heads(a, s), op);
    return lse;
  }
  void attend_backward(const TensorSharding& s, const ForwardOp& op, const Tensor& d_attended, const Tensor& qkv,
                       const Tensor& attended, const Tensor& lse, const Tensor& d_qkv) override {
    if (s.context.ranks > 1)
      return context_attention_backward(*this, s, op, m_.feeds_.cu_seqlens, {d_attended, qkv, attended, lse, d_qkv});
    Op& a = emit(OpKind::attention_backward, streams::compute, op.name + ".backward",
                 {d_attended, qkv, attended, lse, m_.feeds_.cu_seqlens}, {d_qkv});
    with_attrs(with_heads(a, s), op);
  }

 private:
  static bool makes_matrix_gradient(OpKind kind) {
    return kind == OpKind::linear_wgrad || kind == OpKind::grouped_linear_wgrad || kind == OpKind::lora_up_wgrad;
  }
  Op& deferred(OpKind kind, const std::string& name, std::vector<Tensor> in, std::vector<Tensor> out) {
    for (Tensor& t : in) {
      if (t.buffer != overwritten_) continue;
      const Tensor copy = make(name + ".read", t.dtype, {t.shape[0], t.shape[1]});
      m_.b_.emit(OpKind::copy, streams::compute, prefix_ + name + ".save" + suffix_, {t}, {copy});
      t = copy;
    }
    Op& op = deferred_->ops.emplace_back();
    op.kind = kind, op.stream = streams::compute, op.name = name + suffix_;
    op.inputs = std::move(in), op.outputs = std::move(out);
    return op;
  }
  /// In the place of a vector's gradient, a tensor that lives until the unit's are there.
  Tensor found_apart(const std::string& name, const Tensor& gradient) {
    HB_CHECK(gradient.rank == 1, "the gradient of a matrix by {} is not left for later", name);
    const std::string number = fmt::format("{}.found{}", name, deferred_->ops.size());
    const Tensor found =
        m_.b_.transient(prefix_ + number + suffix_, gradient.dtype, {gradient.shape[0]}, Category::grads);
    Op& copy = deferred_->ops.emplace_back();
    copy.kind = OpKind::copy, copy.stream = streams::compute, copy.name = number + ".placed" + suffix_;
    copy.inputs = {found}, copy.outputs = {gradient};
    return found;
  }

  const PackedModel& m_;
  const WholeUnit &w_, *dw_;
  std::string prefix_, suffix_;
  Deferred* deferred_ = nullptr;
  BufferId overwritten_ = -1;
  bool apart_ = false;
};

namespace {

ExpertParallel expert_parallel(const Scenario& s) {
  const ExpertMesh mesh = expert_mesh(s);
  if (mesh.spread == 1) return {};
  const ExpertRounds r = expert_rounds(s);
  const ExpertCopies copies = expert_copies(s);
  return {mesh.spread,
          static_cast<GroupId>(Family::experts),
          streams::tensor,
          routed_extent,
          r.most,
          r.capacity,
          {copies.sent_most, copies_sent_extent, 0},
          {copies.came_most, copies_came_extent, 0},
          static_cast<GroupId>(copies.sent_most > 0 ? Family::expert_copies : Family::experts),
          mesh.parts,
          static_cast<GroupId>(Family::expert_places)};
}

}  // namespace

PackedModel::PackedModel(const Scenario& s, ProgramBuilder& b, std::string prefix, TokenFeeds feeds,
                         const StagePart& part, Weights which)
    : scenario_(s),
      model_(which == Weights::reference ? base_of(s.model) : s.model),
      b_(b),
      prefix_(std::move(prefix)),
      name_(prefix_),
      feeds_(feeds),
      sharding_{model_,
                s.train.precision.params,
                tokens(s.train.micro_batch_tokens),
                {s.train.layout.tp, static_cast<GroupId>(Family::train_tp), streams::tensor,
                 s.train.layout.sp ? sequence_extent : fixed_extent, expert_mesh(s).wholes},
                {s.train.layout.ulysses, static_cast<GroupId>(Family::ulysses), streams::tensor, gathered_extent},
                {s.train.layout.cp, static_cast<GroupId>(Family::context), streams::context,
                 s.train.context_exchange == ContextExchange::all_gather},
                expert_parallel(s),
                {expert_mesh(s).blocks, static_cast<GroupId>(Family::expert_block),
                 static_cast<GroupId>(Family::expert_peers), block_extent}},
      embedding_(decoder_embedding(model_)),
      layers_(model_),
      end_(decoder_end(model_)),
      frozen_(frozen_roles(model_)) {
  if (!frozen_.empty()) sharding_.frozen = frozen_.front();
  for (const Range& chunk : part.layers) first_layers_.push_back(static_cast<int>(chunk.begin));
}

TensorSharding PackedModel::sharding_of(int layer) const {
  TensorSharding out = sharding_;
  if (!frozen_.empty()) out.frozen = frozen_[static_cast<std::size_t>(layer) + 1];
  return out;
}

std::string PackedModel::layer_name(int layer) const { return fmt::format("{}layers.{}.", name_, layer); }

namespace {

Tensor& at(Values& values, ValueId id) { return values[static_cast<std::size_t>(id)]; }

Values only(const Values& values, const std::vector<ValueId>& ids) {
  Values out(values.size());
  for (ValueId id : ids) at(out, id) = values[static_cast<std::size_t>(id)];
  return out;
}

/// Those that are there, in this order, as a call's inputs.
std::vector<Input> inputs_of(std::vector<Input> first, const Values& values, const std::vector<ValueId>& ids) {
  for (ValueId id : ids)
    if (is_there(values, id)) first.emplace_back(values[static_cast<std::size_t>(id)]);
  return first;
}

/// A layer as it goes forward.
struct WentForward {
  PackedModel::Stream out;
  Values kept;
  template <class F>
  friend void each_tensor(WentForward& f, F&& visit) {
    visit(f.out.h), visit(f.out.z);
    each_tensor(f.kept, visit);
  }
};

}  // namespace

PackedModel::Stream PackedModel::embed(const WholeUnit& root) {
  b_.begin_call(prefix_ + "embed", name_);
  Emits emits(*this, root, nullptr, name_);
  Values values;
  emit_forward(embedding_.forward, sharding_, emits, values);
  return {at(values, embedding_.embedded), {}};
}

PackedModel::Stream PackedModel::layer_forward(const WholeUnit& w, int layer, const Stream& in, Values& kept) {
  const TensorSharding sharding = sharding_of(layer);
  std::vector<Input> inputs = w.inputs();
  inputs.emplace_back(in.h);
  if (in.z.buffer >= 0) inputs.emplace_back(in.z);
  auto went = b_.call(prefix_ + "layer.forward", variant_of(w, layer), layer_name(layer), std::move(inputs), [&] {
    const DecoderLayer& l = layer_at(layer);
    Values values(l.forward.values().size());
    at(values, l.in.h) = in.h, at(values, l.in.z) = in.z;
    Emits emits(*this, w, nullptr, layer_name(layer));
    emit_forward(l.forward, sharding, emits, values);
    return WentForward{{at(values, l.out.h), at(values, l.out.z)}, only(values, kept_between(l, sharding))};
  });
  kept = std::move(went.kept);
  return went.out;
}

std::vector<ValueId> PackedModel::kept_between(const DecoderLayer& l, const TensorSharding& sharding) const {
  const TrainSpec& t = scenario_.train;
  return kept_values(l.forward, sharding, t.recompute, recompute_modules(t.recompute_modules, elementwise_modules),
                     l.x);
}

void PackedModel::recompute(const WholeUnit& w, int layer, Values& kept) {
  if (scenario_.train.recompute == Recompute::none) return;
  const TensorSharding sharding = sharding_of(layer);
  const DecoderLayer& l = layer_at(layer);
  const std::vector<ValueId> reads = read_by_backward(l.forward, sharding);
  kept = b_.call(prefix_ + "layer.recompute", variant_of(w, layer), layer_name(layer),
                 inputs_of(w.inputs(), kept, kept_between(l, sharding)), [&] {
                   Values values = kept;
                   Emits emits(*this, w, nullptr, layer_name(layer), ".recomputed");
                   emit_forward(l.forward, sharding, emits, values, &reads);
                   return values;
                 });
}

PackedModel::Deferred PackedModel::layer_backward(const WholeUnit& w, const WholeUnit& dw, int layer,
                                                  const Values& values, const Tensor& gradient, bool accumulate,
                                                  bool defers) {
  const TensorSharding sharding = sharding_of(layer);
  const DecoderLayer& l = layer_at(layer);
  std::vector<Input> inputs = dw.inputs(w.inputs());
  inputs.emplace_back(gradient);
  return b_.call(prefix_ + "layer.backward", variant_of(w, layer), layer_name(layer),
                 inputs_of(std::move(inputs), values, read_by_backward(l.forward, sharding)), [&] {
                   Values gradients(l.forward.values().size());
                   at(gradients, l.out.h) = at(gradients, l.out.z) = gradient;
                   Emits emits(*this, w, &dw, layer_name(layer));
                   Deferred deferred;
                   if (defers) emits.defer(deferred, gradient.buffer, !accumulate);
                   emit_backward(l.forward, sharding, emits, values, gradients, accumulate);
                   return deferred;
                 });
}

void PackedModel::layer_weights(const WholeUnit& dw, int layer, const Deferred& deferred) {
  std::vector<Input> inputs = dw.inputs();
  for (const Op& op : deferred.ops)
    for (const Tensor& t : op.inputs)
      if (!std::ranges::count(inputs, t.buffer, &Input::buffer)) inputs.emplace_back(t);
  b_.call(prefix_ + "layer.weights", variant_of(dw, layer), layer_name(layer), std::move(inputs), [&] {
    for (const Op& op : deferred.ops) {
      Op& now = b_.emit(op.kind, op.stream, layer_name(layer) + op.name, op.inputs, op.outputs);
      now.attrs = op.attrs, now.group = op.group;
    }
  });
}

Values PackedModel::end(const WholeUnit& root, const Stream& in) {
  b_.begin_call(prefix_ + "final_norm", name_);
  Values values(end_.forward.values().size());
  at(values, end_.in.h) = in.h, at(values, end_.in.z) = in.z;
  Emits emits(*this, root, nullptr, name_);
  emit_forward(end_.forward, sharding_, emits, values);
  return values;
}

Tensor PackedModel::normed(const WholeUnit& root, const Values& values) {
  Emits emits(*this, root, nullptr, name_);
  return all_tokens(emits, sharding_, "final_normed", values[static_cast<std::size_t>(end_.normed)]);
}

Tensor PackedModel::make_d_normed(const WholeUnit& root) {
  Emits emits(*this, root, nullptr, name_);
  return emits.make("d_final_normed.summands", sharding_.compute, {sharding_.tokens, fixed(scenario_.model.hidden)});
}

Tensor PackedModel::end_backward(const WholeUnit& root, const WholeUnit& dw, const Values& values,
                                 const Tensor& summands, bool accumulate) {
  b_.begin_call(prefix_ + "final_norm.backward", name_);
  Emits emits(*this, root, &dw, name_);
  Tensor d_normed = summands;
  if (sharding_.tp.cuts_tokens())
    d_normed =
        emits.make("d_final_normed", sharding_.compute, {sharding_.stream_tokens(), fixed(scenario_.model.hidden)});
  sum_into_stream(emits, sharding_, "lm_head.dgrad", summands, d_normed);
  Values gradients(end_.forward.values().size());
  at(gradients, end_.normed) = d_normed;
  emit_backward(end_.forward, sharding_, emits, values, gradients, accumulate);
  return at(gradients, end_.in.h);
}

void PackedModel::embedding_backward(const WholeUnit& root, const WholeUnit& dw, const Tensor& gradient) {
  Values gradients(embedding_.forward.values().size());
  at(gradients, embedding_.embedded) = gradient;
  Emits emits(*this, root, &dw, name_);
  emit_backward(embedding_.forward, sharding_, emits, {}, gradients, true);
}

}  // namespace hotbunk
