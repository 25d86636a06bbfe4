#include "shard/context_parallel.h"

#include <fmt/format.h>

namespace hotbunk {
namespace {

Dim exactly(std::int64_t size) { return {size, fixed_extent, 0}; }

/// One rank's attention, forward or backward, as it is written.
class ContextAttention {
 public:
  ContextAttention(Emitter& to, const TensorSharding& s, const ForwardOp& op, const Tensor& qkv, const Tensor& cu)
      : to_(to), s_(s), op_(op), qkv_(qkv), cu_seqlens_(cu) {}

  Tensor forward(const Tensor& attended);
  void backward(const AttendedBackward&);

 private:
  Tensor make_kv(const std::string& name, DType dtype, std::int64_t ranks = 1) {
    const std::int64_t of_head = s_.model.head_dim + s_.model.value_dim();
    return to_.make(name, dtype, {exactly(ranks), s_.tokens, exactly(s_.kv_heads() * of_head)});
  }
  Tensor make_of_heads(const std::string& name, DType dtype, std::int64_t width) {
    return to_.make(name, dtype, {s_.tokens, exactly(s_.heads() * width)});
  }
  /// The rank's own.
  Tensor take_kv() {
    const Tensor kv = make_kv("kv", s_.compute);
    with_heads(to_.emit(OpKind::take_kv, lead_stream, "kv", {qkv_}, {as_rows(kv)}), s_);
    return kv;
  }
  Tensor gather(const Tensor& kv) {
    const Tensor all = make_kv("kv.gathered", s_.compute, s_.context.ranks);
    communicate(OpKind::all_gather, "kv.all_gather", kv, all);
    return all;
  }
  Op& communicate(OpKind kind, const std::string& name, const Tensor& from, const Tensor& to) {
    Op& op = to_.emit(kind, s_.context.stream, name, {from}, {to});
    op.group = s_.context.group;
    return op;
  }
  /// To the next rank, from the one before: into a tensor like it.
  Tensor pass_on(const std::string& name, const Tensor& kv) {
    const Tensor next = make_kv(name, kv.dtype);
    Op& op = communicate(OpKind::send_recv, name + ".exchange", kv, next);
    with(with(with(op, Attr::peer, std::int64_t{1}), Attr::source, std::int64_t{-1}), Attr::relative, std::int64_t{1});
    return next;
  }
  /// An op over the keys and values of the rank `step` places before this one, or of all.
  void attend(OpKind kind, const std::string& name, std::vector<Tensor> in, std::vector<Tensor> out,
              std::int64_t step) {
    Op& op = with_attrs(with_heads(to_.emit(kind, lead_stream, name, std::move(in), std::move(out)), s_), op_);
    op.group = s_.context.group;
    with(with(op, Attr::ranks, s_.context.ranks), Attr::source, -step);
    if (step > 0) with(op, Attr::accumulate, std::int64_t{1});
  }
  /// Keys and values of one rank as rows.
  static Tensor as_rows(Tensor kv) {
    kv.rank = 2, kv.shape = {kv.shape[1], kv.shape[2]};
    return kv;
  }
  void merge(const Tensor& d_q, std::vector<Tensor> d_kv, const Tensor& d_qkv) {
    std::vector<Tensor> in = {d_q};
    for (const Tensor& t : d_kv) in.push_back(as_rows(t));
    with_heads(to_.emit(OpKind::merge_qkv, lead_stream, op_.name + ".backward.merge", std::move(in), {d_qkv}), s_);
  }
  void backward_around(const AttendedBackward&, const Tensor& d_q);

  Emitter& to_;
  const TensorSharding& s_;
  const ForwardOp& op_;
  const Tensor &qkv_, &cu_seqlens_;
};

Tensor ContextAttention::forward(const Tensor& attended) {
  const Tensor lse = to_.make("lse", DType::f32, {s_.tokens, exactly(s_.heads())});
  Tensor kv = take_kv();
  if (s_.context.gathers) {
    attend(OpKind::context_attention, op_.name, {qkv_, gather(kv), cu_seqlens_}, {attended, lse}, 0);
    return lse;
  }
  // Merged in fp32, whatever is computed in.
  const Tensor sum =
      s_.compute == DType::f32 ? attended : make_of_heads("attended.merged", DType::f32, s_.model.value_dim());
  for (std::int64_t step = 0; step < s_.context.ranks; ++step) {
    const Tensor next = step + 1 < s_.context.ranks ? pass_on(fmt::format("kv.{}", step + 1), kv) : kv;
    attend(OpKind::context_attention, fmt::format("{}.{}", op_.name, step), {qkv_, kv, cu_seqlens_}, {sum, lse}, step);
    kv = next;
  }
  if (s_.compute != DType::f32) to_.emit(OpKind::cast, lead_stream, "attended.cast", {sum}, {attended});
  return lse;
}

void ContextAttention::backward(const AttendedBackward& x) {
  const Tensor d_q = make_of_heads("d_q", DType::f32, s_.model.head_dim);
  if (!s_.context.gathers) return backward_around(x, d_q);
  const Tensor all = gather(take_kv()), d_all = make_kv("d_kv.gathered", DType::f32, s_.context.ranks),
               d_kv = make_kv("d_kv", DType::f32);
  attend(OpKind::context_attention_backward, op_.name + ".backward",
         {x.d_attended, qkv_, all, x.attended, x.lse, cu_seqlens_}, {d_q, d_all}, 0);
  communicate(OpKind::reduce_scatter, "d_kv.reduce_scatter", d_all, d_kv);
  merge(d_q, {d_kv}, x.d_qkv);
}

/// The gradients of a rank's keys and values begin at the next rank, and gather what each rank finds of them on their
/// way home; what the rank itself finds waits there. So they take as many hops as keys and values do.
void ContextAttention::backward_around(const AttendedBackward& x, const Tensor& d_q) {
  const std::int64_t ranks = s_.context.ranks;
  Tensor kv = take_kv(), travelling;
  const Tensor own = make_kv("d_kv", DType::f32);
  for (std::int64_t step = 0; step < ranks; ++step) {
    const Tensor next = step + 1 < ranks ? pass_on(fmt::format("kv.{}", step + 1), kv) : kv;
    const Tensor found = step == 0 ? own : make_kv(fmt::format("d_kv.{}", step), DType::f32);
    const Tensor arrived = step > 1 ? pass_on(fmt::format("d_kv.{}.arrived", step), travelling) : found;
    attend(OpKind::context_attention_backward, fmt::format("{}.backward.{}", op_.name, step),
           {x.d_attended, qkv_, kv, x.attended, x.lse, cu_seqlens_}, {d_q, found}, step);
    if (step > 1) to_.emit(OpKind::add, lead_stream, fmt::format("d_kv.{}.add", step), {arrived, found}, {arrived});
    travelling = arrived, kv = next;
  }
  merge(d_q, {own, pass_on("d_kv.home", travelling)}, x.d_qkv);
}

}  // namespace

Tensor context_attention(Emitter& to, const TensorSharding& s, const ForwardOp& op, const Tensor& qkv,
                         const Tensor& cu_seqlens, const Tensor& attended) {
  return ContextAttention(to, s, op, qkv, cu_seqlens).forward(attended);
}

void context_attention_backward(Emitter& to, const TensorSharding& s, const ForwardOp& op, const Tensor& cu_seqlens,
                                const AttendedBackward& x) {
  ContextAttention(to, s, op, x.qkv, cu_seqlens).backward(x);
}

}  // namespace hotbunk
