#include "shard/ulysses.h"

namespace hotbunk {
namespace {

bool shares(const TensorSharding& s) { return s.ulysses.ranks > 1; }

Dim width_in_attention(const TensorSharding& s, HeadsOf what) {
  return {in_attention(s).width_of(what == HeadsOf::qkv ? Width::qkv : Width::attended), fixed_extent, 0};
}

Tensor make_parts(Emitter& to, const TensorSharding& s, HeadsOf what, const std::string& name, DType dtype) {
  return to.make(name + ".parts", dtype, {{s.ulysses.ranks, fixed_extent, 0}, s.tokens, width_in_attention(s, what)});
}

Op& with_all_heads(Op& op, const TensorSharding& s, HeadsOf what) {
  const bool all = what == HeadsOf::qkv;
  with(with(op, Attr::heads, s.heads()), Attr::kv_heads, all ? s.kv_heads() : std::int64_t{0});
  with(op, Attr::head_dim, all ? s.model.head_dim : s.model.value_dim());
  return all && s.model.mla ? with(op, Attr::value_dim, s.model.value_dim()) : op;
}

void exchange(Emitter& to, const TensorSharding& s, const std::string& name, const Tensor& x, const Tensor& y) {
  to.emit(OpKind::all_to_all, s.ulysses.stream, name + ".all_to_all", {x}, {y}).group = s.ulysses.group;
}

}  // namespace

TensorSharding in_attention(const TensorSharding& s) {
  if (!shares(s)) return s;
  TensorSharding out = s;
  out.tokens = {s.tokens.size * s.ulysses.ranks, s.ulysses.all_tokens, 0};
  out.head_parts = s.ulysses.ranks;
  out.ulysses = {};
  return out;
}

Tensor by_heads(Emitter& to, const TensorSharding& s, HeadsOf what, const std::string& name, const Tensor& x) {
  if (!shares(s)) return x;
  const Tensor parts = make_parts(to, s, what, name, x.dtype);
  with_all_heads(to.emit(OpKind::split_heads, lead_stream, name + ".split_heads", {x}, {parts}), s, what);
  const Tensor heads = make_by_heads(to, s, what, name, x);
  exchange(to, s, name, parts, heads);
  return heads;
}

Tensor make_by_heads(Emitter& to, const TensorSharding& s, HeadsOf what, const std::string& name, const Tensor& y) {
  if (!shares(s)) return y;
  return to.make(name + ".by_heads", y.dtype, {in_attention(s).tokens, width_in_attention(s, what)});
}

void by_tokens(Emitter& to, const TensorSharding& s, HeadsOf what, const std::string& name, const Tensor& heads,
               const Tensor& y) {
  if (!shares(s)) return;
  const Tensor parts = make_parts(to, s, what, name + ".returned", y.dtype);
  exchange(to, s, name + ".returned", heads, parts);
  with_all_heads(to.emit(OpKind::merge_heads, lead_stream, name + ".merge_heads", {parts}, {y}), s, what);
}

}  // namespace hotbunk
