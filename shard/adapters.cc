// The rules of adapters (LoRA): what stands beside a product in whose matrices some have one, forward and backward.
#include <fmt/format.h>

#include "shard/writers.h"

namespace hotbunk {
namespace {

/// Where of what matrices side by side leave, or get, one of them begins.
std::int64_t column_of(const TensorSharding& s, ParamRole base) {
  const std::int64_t head = s.model.head_dim;
  if (base == ParamRole::k_proj) return s.heads() * head;
  if (base == ParamRole::v_proj) return (s.heads() + s.kv_heads()) * head;
  if (base == ParamRole::expert_up) return s.width_of(Width::expert_inner);
  if (base == ParamRole::shared_up) return s.width_of(Width::shared_inner);
  return base == ParamRole::up_proj && s.model.gated_mlp ? s.width_of(Width::inner) : 0;
}

std::string adapter_name(const Adapter& adapter, const char* what) { return fmt::format("{}.{}", adapter.op, what); }

/// What an adapter's A makes of x [T,K]: [T,r]. Where a matrix is cut by rows each rank has a summand of it, which is
/// as good: B is not cut there, and what it leaves are summands of y.
Tensor adapter_down(Emitter& to, const TensorSharding& s, const Adapter& adapter, const Tensor& x, const char* what) {
  const Tensor a = to.weight(adapter.a), u = to.make(adapter_name(adapter, what), s.compute, {x.shape[0], a.shape[0]});
  with(to.emit(OpKind::lora_down, lead_stream, adapter_name(adapter, what), {x, a}, {u}), Attr::factor, adapter.factor);
  return u;
}

/// As wide as an adapter is, a row for each of x, which is of experts.
Tensor make_expert_rows(Emitter& to, const std::string& name, const Tensor& x, const Dim& rank) {
  return x.rank == 3 ? to.make(name, x.dtype, {x.shape[0], x.shape[1], rank})
                     : to.make(name, x.dtype, {x.shape[0], rank});
}

}  // namespace

ExpertAdapters::ExpertAdapters(Emitter& to, const Forward& f, const TensorSharding& s, const Values& values,
                               const ForwardOp& op, const Tensor& offsets, std::string suffix)
    : to_(to), f_(f), s_(s), values_(values), op_(op), offsets_(offsets), suffix_(std::move(suffix)) {}

Op& ExpertAdapters::emit(OpKind kind, const Adapter& adapter, const char* what, std::vector<Tensor> in,
                         const Tensor& out) const {
  Op& op = to_.emit(kind, lead_stream, adapter_name(adapter, what) + suffix_, std::move(in), {out});
  if (kind != OpKind::grouped_linear_wgrad && kind != OpKind::grouped_linear_dgrad) with(op, Attr::ranks, s_.ep.ranks);
  return with_count_of_rows(with_share(op, s_), f_, s_, values_);
}

Tensor ExpertAdapters::down(const Adapter& adapter, const Tensor& x, const char* what) const {
  const Tensor a = to_.weight(adapter.a), u = make_expert_rows(to_, adapter_name(adapter, what) + suffix_, x,
                                                               {s_.model.lora.rank, fixed_extent, 0});
  with(emit(OpKind::lora_down, adapter, what, {x, a, offsets_}, u), Attr::factor, adapter.factor);
  return u;
}

void ExpertAdapters::add(const Tensor& x, const Tensor& found) const {
  for (const Adapter& adapter : op_.adapters) {
    const Tensor u = down(adapter, x, "lora_down");
    with(emit(OpKind::lora_up, adapter, "lora_up", {u, to_.weight(adapter.b), offsets_}, found), Attr::column,
         column_of(s_, adapter.base));
  }
}

std::vector<Tensor> ExpertAdapters::through(const Tensor& dy) const {
  std::vector<Tensor> d_down;
  for (const Adapter& adapter : op_.adapters) {
    d_down.push_back(make_expert_rows(to_, adapter_name(adapter, "d_lora_down") + suffix_, dy,
                                      {s_.model.lora.rank, fixed_extent, 0}));
    Op& d = emit(OpKind::lora_up_dgrad, adapter, "lora_up.dgrad", {dy, to_.weight(adapter.b), offsets_}, d_down.back());
    with(with(d, Attr::column, column_of(s_, adapter.base)), Attr::factor, adapter.factor);
  }
  return d_down;
}

void ExpertAdapters::of_weights(BackwardEmitter& gradients, const Tensor& x, const Tensor& dy,
                                const std::vector<Tensor>& d_down, std::int64_t accumulate) const {
  for (std::size_t i = 0; i < op_.adapters.size(); ++i) {
    const Adapter& adapter = op_.adapters[i];
    const Tensor u = down(adapter, x, "lora_down.for_wgrad");
    Op& b = emit(OpKind::lora_up_wgrad, adapter, "lora_up.wgrad", {dy, u, offsets_}, gradients.gradient(adapter.b));
    with(with(b, Attr::column, column_of(s_, adapter.base)), Attr::accumulate, accumulate);
    with(emit(OpKind::grouped_linear_wgrad, adapter, "lora_down.wgrad", {d_down[i], x, offsets_},
              gradients.gradient(adapter.a)),
         Attr::accumulate, accumulate);
  }
}

void ExpertAdapters::of_input(const std::vector<Tensor>& d_down, const Tensor& dx) const {
  for (std::size_t i = 0; i < op_.adapters.size(); ++i)
    with(emit(OpKind::grouped_linear_dgrad, op_.adapters[i], "lora_down.dgrad",
              {d_down[i], to_.weight(op_.adapters[i].a), offsets_}, dx),
         Attr::accumulate, std::int64_t{1});
}

void ForwardWriter::add_adapters(const ForwardOp& op, const Tensor& x, const Tensor& found) {
  for (const Adapter& adapter : op.adapters) {
    const Tensor u = adapter_down(to_, s_, adapter, x, "lora_down");
    with(to_.emit(OpKind::lora_up, lead_stream, adapter_name(adapter, "lora_up"), {u, to_.weight(adapter.b)}, {found}),
         Attr::column, column_of(s_, adapter.base));
  }
}

/// What A left is computed again, which costs less than to keep it.
void BackwardWriter::of_adapters(const ForwardOp& op, const Tensor& x, const Tensor& dy,
                                 const std::vector<Tensor>& d_down) {
  for (std::size_t i = 0; i < op.adapters.size(); ++i) {
    const Adapter& adapter = op.adapters[i];
    const Tensor u = adapter_down(to_, s_, adapter, x, "lora_down.again");
    Op& b = to_.emit(OpKind::lora_up_wgrad, lead_stream, adapter_name(adapter, "lora_up.wgrad"), {dy, u},
                     {to_.gradient(adapter.b)});
    with(with(b, Attr::column, column_of(s_, adapter.base)), Attr::accumulate, accumulate_);
    with(to_.emit(OpKind::linear_wgrad, lead_stream, adapter_name(adapter, "lora_down.wgrad"), {d_down[i], x},
                  {to_.gradient(adapter.a)}),
         Attr::accumulate, accumulate_);
  }
}

std::vector<Tensor> BackwardWriter::through_adapters(const ForwardOp& op, const Tensor& dy) {
  std::vector<Tensor> d_down;
  for (const Adapter& adapter : op.adapters) {
    const Tensor b = to_.weight(adapter.b);
    d_down.push_back(to_.make(adapter_name(adapter, "d_lora_down"), s_.compute, {dy.shape[0], b.shape[1]}));
    Op& d =
        to_.emit(OpKind::lora_up_dgrad, lead_stream, adapter_name(adapter, "lora_up.dgrad"), {dy, b}, {d_down.back()});
    with(with(d, Attr::column, column_of(s_, adapter.base)), Attr::factor, adapter.factor);
  }
  return d_down;
}

void BackwardWriter::add_of_adapters(const ForwardOp& op, const std::vector<Tensor>& d_down, const Tensor& dx) {
  for (std::size_t i = 0; i < op.adapters.size(); ++i)
    with(to_.emit(OpKind::linear_dgrad, lead_stream, adapter_name(op.adapters[i], "lora_down.dgrad"),
                  {d_down[i], to_.weight(op.adapters[i].a)}, {dx}),
         Attr::accumulate, std::int64_t{1});
}

}  // namespace hotbunk
