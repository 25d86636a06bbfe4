#include "shard/expert_parallel.h"

#include <algorithm>

#include "base/check.h"

namespace hotbunk {
namespace {

bool spreads(const TensorSharding& s) { return s.ep.ranks > 1; }

ValueId beside(const Forward& f, ValueId id) { return static_cast<ValueId>(std::ssize(f.values())) + id; }

const Tensor& at(const Values& values, ValueId id) {
  HB_CHECK(is_there(values, id), "what is beside value {} is not there", id);
  return values[static_cast<std::size_t>(id)];
}

const ForwardOp& the_sort(const Forward& f) {
  const ForwardOp* const sort = sort_of(f);
  HB_CHECK(sort, "rows of experts in a piece that has none");
  return *sort;
}

void exchange(Emitter& to, const Forward& f, const TensorSharding& s, const std::string& name, const Tensor& x,
              const Tensor& y, const Values& values, std::int64_t round) {
  Op& op = to.emit(OpKind::all_to_all, s.ep.stream, name, {x, at(values, sent_by_all(f, the_sort(f)))}, {y});
  op.group = s.ep.group;
  if (s.tp.expert_ranks > 1) with(op, Attr::tp, s.tp.expert_ranks);
  if (s.ep.rounds() > 1) with(op, Attr::rounds, s.ep.rounds());
  if (round > 0 && y.rank == 3) with(op, Attr::accumulate, std::int64_t{1});  // beside what earlier rounds brought back
  with_count_of_rows(op, f, s, values);
}

}  // namespace

ValueId sent_by_all(const Forward& f, const ForwardOp& sort) { return beside(f, sort.outputs[0]); }
ValueId count_of_rows(const Forward& f, const ForwardOp& sort) { return beside(f, sort.outputs[1]); }

const ForwardOp* sort_of(const Forward& f) {
  const auto sort = std::ranges::find(f.ops(), OpKind::expert_sort, &ForwardOp::kind);
  return sort == f.ops().end() ? nullptr : &*sort;
}

Op& with_count_of_rows(Op& op, const Forward& f, const TensorSharding& s, const Values& values) {
  if (!spreads(s)) return op;
  const auto routed = [&](const Tensor& t) { return t.rank > 0 && t.shape[0].extent == s.ep.routed; };
  if (std::ranges::none_of(op.inputs, routed) && std::ranges::none_of(op.outputs, routed)) return op;
  with(op, Attr::count, static_cast<std::int64_t>(op.inputs.size()));
  op.inputs.push_back(at(values, count_of_rows(f, the_sort(f))));
  return op;
}

void sort_of_all_ranks(Emitter& to, const Forward& f, const TensorSharding& s, const ForwardOp& op,
                       const Tensor& choices, Values& values) {
  const ForwardValue &rows = f.value(op.outputs[0]), &offsets = f.value(op.outputs[1]);
  const Dim width{s.width_of(Width::expert_offsets), fixed_extent, 0};
  const auto set = [&](ValueId id, const Tensor& t) { return values[static_cast<std::size_t>(id)] = t; };
  const Tensor sent = to.make(offsets.name + ".sent", DType::i32, {width});
  Op& sort = to.emit(OpKind::expert_sort, lead_stream, op.name, {choices},
                     {set(op.outputs[0], make_value(to, s, rows, rows.name, DType::i32)), sent});
  if (s.tp.expert_ranks > 1) {  // each of the data ranks' experts are those of all its tensor-parallel places
    sort.group = s.tp.group;
    with(with(sort, Attr::tp, s.tp.expert_ranks), Attr::groups, s.ep.ranks);
  }
  const Tensor all = to.make(offsets.name + ".sent_by_all", DType::i32, {{s.ep.ranks, fixed_extent, 0}, width});
  to.emit(OpKind::all_gather, s.ep.stream, op.name + ".all_gather", {sent}, {all}).group = s.ep.group;
  set(sent_by_all(f, op), all);
  const Tensor count = to.make(offsets.name + ".count", DType::i64, {{1, fixed_extent, 0}});
  to.emit(OpKind::expert_arrivals, lead_stream, op.name + ".arrivals", {all},
          {set(op.outputs[1], make_value(to, s, offsets, offsets.name, DType::i32)), count})
      .group = s.ep.group;
  set(count_of_rows(f, op), count);
}

Tensor make_routed(Emitter& to, const TensorSharding& s, const std::string& name, DType dtype, const Dim& width,
                   std::int64_t round) {
  return to.make(name, dtype, {s.ep.rows(round), width});
}

Tensor to_experts(Emitter& to, const Forward& f, const TensorSharding& s, const std::string& name,
                  const Tensor& choices, const Values& values, std::int64_t round) {
  const Tensor routed = make_routed(to, s, name, choices.dtype, choices.shape[2], round);
  exchange(to, f, s, name + ".all_to_all", choices, routed, values, round);
  return routed;
}

void from_experts(Emitter& to, const Forward& f, const TensorSharding& s, const std::string& name, const Tensor& routed,
                  const Tensor& choices, const Values& values, std::int64_t round) {
  exchange(to, f, s, name + ".all_to_all", routed, choices, values, round);
}

}  // namespace hotbunk
