#include "shard/expert_parallel.h"

#include <algorithm>
#include <initializer_list>

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

/// `by`: where the rows of each rank begin, of all ranks. One of the two tensors has a rank's own tokens' rows [.,.,H].
Op& exchange(Emitter& to, const Forward& f, const TensorSharding& s, const std::string& name, const Tensor& x,
             const Tensor& y, ValueId by, const Values& values, std::int64_t round = 0) {
  Op& op = to.emit(OpKind::all_to_all, s.ep.stream, name, {x, at(values, by)}, {y});
  op.group = s.ep.group;
  if (s.tp.expert_ranks > 1) with(op, Attr::tp, s.tp.expert_ranks);
  if (s.ep.rounds() > 1) with(op, Attr::rounds, s.ep.rounds());
  if (round > 0 && y.rank == 3) with(op, Attr::accumulate, std::int64_t{1});  // beside what earlier rounds brought back
  return with_count_of_rows(op, f, s, values);
}

/// Copies that a rank sends, or gets back, as an exchange has a rank's own tokens' rows.
Tensor as_own_rows(const Tensor& copies) {
  Tensor out = copies;
  out.rank = 3, out.shape = {copies.shape[0], {1, fixed_extent, 0}, copies.shape[1]};
  return out;
}

/// Over a group of their own, so that bytes which nobody knows before are apart from those of rows.
void exchange_of_copies(Emitter& to, const Forward& f, const TensorSharding& s, const std::string& name,
                        const Tensor& x, const Tensor& y, const Values& values) {
  Op& op = exchange(to, f, s, name + ".copies.all_to_all", x, y, copy_ids(f).blocks, values);
  with(op, Attr::ranks, s.ep.ranks).group = s.ep.copies_group;
}

/// Behind the sort of rows: which copies go, which come, and which rows are of which.
void sort_of_copies(Emitter& to, const Forward& f, const TensorSharding& s, const ForwardOp& op, const Tensor& sent,
                    Values& values) {
  const CopyIds ids = copy_ids(f);
  const std::string& name = f.value(op.outputs[1]).name;
  const auto of = [](std::int64_t n) { return Dim{n, fixed_extent, 0}; };
  const auto make = [&](ValueId id, const char* what, DType dtype, std::initializer_list<Dim> shape) {
    return values[static_cast<std::size_t>(id)] = to.make(name + what, dtype, shape);
  };
  const Tensor& rows = at(values, op.outputs[0]);
  const std::int64_t ranks = s.ep.ranks, choices = rows.shape[1].size;
  const Tensor slots = to.make(name + ".slots", DType::i32, {rows.shape[0], rows.shape[1], of(1)}),
               blocks = to.make(name + ".blocks", DType::i32, {of(ranks + 1)});
  const Tensor tokens = make(ids.tokens, ".tokens", DType::i32, {of(s.ep.sent.size)}),
               copies = make(ids.copies, ".copies", DType::i32, {rows.shape[0], of(std::min(ranks, choices))}),
               count = make(ids.sent, ".copies_sent", DType::i64, {of(1)});
  to.emit(OpKind::copy_sort, lead_stream, op.name + ".copies", {rows, sent}, {tokens, copies, slots, blocks, count});
  const Tensor all = make(ids.blocks, ".blocks_of_all", DType::i32, {of(ranks), of(ranks + 1)});
  to.emit(OpKind::all_gather, s.ep.stream, op.name + ".copies.all_gather", {blocks}, {all}).group = s.ep.group;
  const Tensor came = make_routed(to, s, name + ".slots_came", DType::i32, of(1));
  exchange(to, f, s, op.name + ".copies.all_to_all", slots, came, sent_by_all(f, op), values);
  const Tensor sources = make(ids.sources, ".sources", DType::i32, {s.ep.rows(0)}),
               rows_of = make(ids.rows, ".rows_of_copies", DType::i32,
                              {of(s.ep.came.size), of(std::min(choices, s.model.moe->experts * s.ep.parts / ranks))}),
               count_came = make(ids.came, ".copies_came", DType::i64, {of(1)});
  Op& arrivals = to.emit(OpKind::copy_arrivals, lead_stream, op.name + ".copies.arrivals",
                         {all, came, at(values, op.outputs[1])}, {sources, rows_of, count_came});
  arrivals.group = s.ep.group;
  with_count_of_rows(arrivals, f, s, values);
}

/// A list of copies, of as many as are counted.
Tensor counted(const Tensor& list, const Dim& copies) {
  Tensor out = list;
  out.shape[0] = copies;
  return out;
}

}  // namespace

ValueId sent_by_all(const Forward& f, const ForwardOp& sort) { return beside(f, sort.outputs[0]); }
ValueId count_of_rows(const Forward& f, const ForwardOp& sort) { return beside(f, sort.outputs[1]); }

CopyIds copy_ids(const Forward& f) {
  const auto first = static_cast<ValueId>(2 * std::ssize(f.values()));
  return {first, first + 1, first + 2, first + 3, first + 4, first + 5, first + 6};
}

const ForwardOp* sort_of(const Forward& f) {
  const auto sort = std::ranges::find(f.ops(), OpKind::expert_sort, &ForwardOp::kind);
  return sort == f.ops().end() ? nullptr : &*sort;
}

Op& with_count_of_rows(Op& op, const Forward& f, const TensorSharding& s, const Values& values) {
  if (!spreads(s)) return op;
  const auto has = [&](ExtentId extent) {
    const auto counted = [&](const Tensor& t) { return t.rank > 0 && t.shape[0].extent == extent; };
    return std::ranges::any_of(op.inputs, counted) || std::ranges::any_of(op.outputs, counted);
  };
  std::vector<ValueId> counts;  // in the order of their extents
  if (has(s.ep.routed)) counts.push_back(count_of_rows(f, the_sort(f)));
  if (s.ep.copies()) {
    const CopyIds ids = copy_ids(f);
    if (has(s.ep.sent.extent)) counts.push_back(ids.sent);
    if (has(s.ep.came.extent)) counts.push_back(ids.came);
  }
  if (counts.empty()) return op;
  with(op, Attr::count, static_cast<std::int64_t>(op.inputs.size()));
  for (const ValueId id : counts) op.inputs.push_back(at(values, id));
  return op;
}

Op& with_own_experts(Op& sort, const TensorSharding& s) {
  sort.group = s.tp.group;
  with(sort, Attr::tp, s.tp.expert_ranks);
  return s.tp.expert_columns() > 1 ? with(sort, Attr::ranks, s.tp.expert_columns()) : sort;
}

void sort_of_all_ranks(Emitter& to, const Forward& f, const TensorSharding& s, const ForwardOp& op,
                       const Tensor& choices, Values& values) {
  const ForwardValue &rows = f.value(op.outputs[0]), &offsets = f.value(op.outputs[1]);
  const Dim width{s.width_of(Width::expert_offsets), fixed_extent, 0};
  const auto set = [&](ValueId id, const Tensor& t) { return values[static_cast<std::size_t>(id)] = t; };
  const Tensor sent = to.make(offsets.name + ".sent", DType::i32, {width});
  Op& sort = to.emit(OpKind::expert_sort, lead_stream, op.name, {choices},
                     {set(op.outputs[0], make_value(to, s, rows, rows.name, DType::i32)), sent});
  // Each of the data ranks' experts are those of all its tensor-parallel places.
  if (s.tp.expert_ranks > 1) with_own_experts(sort, s);
  if (s.tp.expert_ranks * s.ep.parts > 1) with(sort, Attr::groups, s.ep.ranks);
  const Tensor all = to.make(offsets.name + ".sent_by_all", DType::i32, {{s.ep.ranks, fixed_extent, 0}, width});
  to.emit(OpKind::all_gather, s.ep.stream, op.name + ".all_gather", {sent}, {all}).group = s.ep.group;
  set(sent_by_all(f, op), all);
  const Tensor count = to.make(offsets.name + ".count", DType::i64, {{1, fixed_extent, 0}});
  to.emit(OpKind::expert_arrivals, lead_stream, op.name + ".arrivals", {all},
          {set(op.outputs[1], make_value(to, s, offsets, offsets.name, DType::i32)), count})
      .group = s.ep.group;
  set(count_of_rows(f, op), count);
  if (s.ep.copies()) sort_of_copies(to, f, s, op, sent, values);
}

Tensor make_routed(Emitter& to, const TensorSharding& s, const std::string& name, DType dtype, const Dim& width,
                   std::int64_t round) {
  return to.make(name, dtype, {s.ep.rows(round), width});
}

Tensor to_experts(Emitter& to, const Forward& f, const TensorSharding& s, const std::string& name,
                  const Tensor& choices, const Values& values, std::int64_t round) {
  const Tensor routed = make_routed(to, s, name, choices.dtype, choices.shape[2], round);
  exchange(to, f, s, name + ".all_to_all", choices, routed, sent_by_all(f, the_sort(f)), values, round);
  return routed;
}

void from_experts(Emitter& to, const Forward& f, const TensorSharding& s, const std::string& name, const Tensor& routed,
                  const Tensor& choices, const Values& values, std::int64_t round) {
  exchange(to, f, s, name + ".all_to_all", routed, choices, sent_by_all(f, the_sort(f)), values, round);
}

Tensor copies_to_experts(Emitter& to, const Forward& f, const TensorSharding& s, const std::string& name,
                         const Tensor& x, const Values& values) {
  const CopyIds ids = copy_ids(f);
  const auto gather = [&](const std::string& op, const Tensor& from, const Tensor& rows, const Tensor& found) {
    with_count_of_rows(to.emit(OpKind::gather_rows, lead_stream, op, {from, rows}, {found}), f, s, values);
  };
  const Tensor copies = to.make(name + ".copies", x.dtype, {s.ep.sent, x.shape[1]}),
               came = to.make(name + ".copies_came", x.dtype, {s.ep.came, x.shape[1]}),
               routed = make_routed(to, s, name, x.dtype, x.shape[1]);
  gather(name + ".copies", x, counted(at(values, ids.tokens), s.ep.sent), copies);
  exchange_of_copies(to, f, s, name, as_own_rows(copies), came, values);
  gather(name + ".spread", came, at(values, ids.sources), routed);
  return routed;
}

void copies_from_experts(Emitter& to, const Forward& f, const TensorSharding& s, const std::string& name,
                         const Tensor& routed, const Tensor& d_x, bool first, const Values& values) {
  const CopyIds ids = copy_ids(f);
  const auto sum = [&](const std::string& op, const Tensor& rows, const Tensor& which, const Tensor& sums, bool adds) {
    Op& added = to.emit(OpKind::dispatch_backward, lead_stream, op, {rows, which}, {sums});
    with_count_of_rows(with(added, Attr::accumulate, std::int64_t{adds ? 1 : 0}), f, s, values);
  };
  const Tensor came = to.make(name + ".copies_came", routed.dtype, {s.ep.came, routed.shape[1]}),
               copies = to.make(name + ".copies", routed.dtype, {s.ep.sent, routed.shape[1]});
  sum(name + ".sum", routed, counted(at(values, ids.rows), s.ep.came), came, false);
  exchange_of_copies(to, f, s, name, came, as_own_rows(copies), values);
  sum(name + ".copies.sum", copies, at(values, ids.copies), d_x, !first);
}

}  // namespace hotbunk
