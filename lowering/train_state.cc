#include "lowering/train_state.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"
#include "lowering/phases.h"

namespace hotbunk {
namespace {

struct Span2 {
  std::int64_t offset = 0, rows = 0, cols = 0;
};

/// Parameters [first, last] in unit order as one block of rows.
std::optional<Span2> find_block(const ShardedUnit& unit, ParamRole first, ParamRole last) {
  std::optional<Span2> out;
  bool inside = false;
  for (const UnitParam& p : unit.params) {
    if (p.role == first) inside = true, out = Span2{p.full_offset, 0, p.cols};
    if (inside) {
      HB_CHECK(p.cols == out->cols, "{} is not as wide as its neighbours", p.parameter);
      out->rows += p.rows;
    }
    if (p.role == last) break;
  }
  return out;
}

/// Between the gathered shards, padded, and the unit as it is computed with.
std::vector<Move> shard_moves(const ShardedUnit& unit, std::int64_t world, bool to_whole) {
  std::vector<Move> moves;
  for (const UnitParam& p : unit.params) {
    const Side gathered = shards_of(unit, p, world, Holds::every);
    Side whole = logical(p);
    whole.piece.offset = p.full_offset;
    moves.push_back(to_whole ? Move{gathered, whole} : Move{whole, gathered});
  }
  return moves;
}

}  // namespace

std::string parameters_prefix(const ShardedUnit& unit) {
  std::string prefix = unit.params.front().parameter;
  for (const UnitParam& p : unit.params)
    prefix.resize(static_cast<std::size_t>(std::ranges::mismatch(prefix, p.parameter).in1 - prefix.begin()));
  return prefix.substr(0, prefix.rfind('.') + 1);  // npos + 1: none
}

Side logical(const UnitParam& p) {
  return {.piece = {.row_end = p.rows, .col_end = p.cols, .pitch = p.cols}, .parts = {}};
}

Side shards_of(const ShardedUnit& unit, const UnitParam& p, std::int64_t world, Holds who, std::int32_t tensor) {
  return {.tensor = tensor,
          .piece = {.row_end = p.padded_rows, .col_end = p.cols, .offset = p.shard_offset, .pitch = p.cols},
          .parts = {.who = who,
                    .family = static_cast<GroupId>(Family::fsdp),
                    .count = static_cast<std::int32_t>(world),
                    .rows = p.padded_rows,
                    .pitch = who == Holds::every ? unit.shard_elements : 0,
                    .last_row = p.rows}};
}

std::int64_t padding_bytes(const ShardedUnit& unit, DType dtype) { return unit.padding_elements * size_of(dtype); }

Tensor WholeUnit::matrix(const ProgramBuilder& b, ParamRole first, ParamRole last) const {
  const auto block = find_block(*unit, first, last);
  HB_CHECK(block, "unit {} lacks the parameter asked for", unit->name);
  return b.view(buffer, dtype, {fixed(block->rows), fixed(block->cols)}, block->offset);
}

Tensor WholeUnit::vector(const ProgramBuilder& b, ParamRole first, ParamRole last) const {
  const auto block = find_block(*unit, first, last);
  HB_CHECK(block, "unit {} lacks the parameter asked for", unit->name);
  return b.view(buffer, dtype, {fixed(block->rows * block->cols)}, block->offset);
}

TrainState::TrainState(const Scenario& s, ProgramBuilder& b, std::int64_t world, const std::vector<ShardedUnit>& units,
                       bool trains)
    : scenario_(s), world_(world) {
  const Precision& precision = s.train.precision;
  const SleepParts sleepers = JobPhases(s).sleepers();
  for (const ShardedUnit& unit : units) {
    UnitState state{.unit = unit};
    const std::int64_t n = unit.shard_elements;
    const std::string name = "train." + unit.name;
    state.shard = b.managed(name + ".shard", precision.master, n, Category::params, sections::train_params);
    if (trains) {
      state.exp_avg =
          b.managed(name + ".exp_avg", precision.moments, n, Category::optimizer, sections::train_optimizer);
      state.exp_avg_sq =
          b.managed(name + ".exp_avg_sq", precision.moments, n, Category::optimizer, sections::train_optimizer);
      state.grad = b.managed(name + ".grad", precision.grads, n, Category::grads, sections::transient);
    }
    if (s.algorithm.reference)
      state.reference = b.managed("reference." + unit.name + ".shard", precision.params, n, Category::params,
                                  sections::train_reference);
    if (sleepers.params)
      state.host_shard =
          b.managed("host." + name + ".shard", precision.master, n, Category::params, sections::host_params);
    if (sleepers.moments) {
      state.host_exp_avg =
          b.managed("host." + name + ".exp_avg", precision.moments, n, Category::optimizer, sections::host_optimizer);
      state.host_exp_avg_sq = b.managed("host." + name + ".exp_avg_sq", precision.moments, n, Category::optimizer,
                                        sections::host_optimizer);
    }
    if (sleepers.reference)
      state.host_reference = b.managed("host.reference." + unit.name + ".shard", precision.params, n, Category::params,
                                       sections::host_reference);
    units_.push_back(state);
  }
}

WholeUnit TrainState::gather(ProgramBuilder& b, std::size_t u, Weights which, const std::string& prefix,
                             std::optional<SlotLimitId> limit) const {
  const UnitState& state = units_[u];
  const BufferId source = which == Weights::trained ? state.shard : state.reference;
  const DType compute = scenario_.train.precision.params;
  const Tensor shard = b.whole(source);
  if (world_ == 1 && shard.dtype == compute) return {&state.unit, source, compute};

  const std::string name = prefix + state.unit.name;
  const std::int64_t n = state.unit.shard_elements;
  const auto write = [&] {
    const Tensor whole = b.whole(b.transient(name + ".params", compute, state.unit.full_elements, Category::params));
    if (world_ == 1) {
      b.emit(OpKind::cast, streams::gather, name + ".cast", {shard}, {whole});
      return std::array{whole, whole, whole};
    }
    Tensor send = shard;
    if (shard.dtype != compute) {
      send = b.transient(name + ".gather_in", compute, {fixed(n)}, Category::communication);
      b.emit(OpKind::cast, streams::gather, name + ".cast", {shard}, {send});
    }
    const Tensor gathered = b.transient(name + ".gather_out", compute, {fixed(world_ * n)}, Category::communication);
    Op& op = b.communicate(OpKind::all_gather, streams::gather, Family::fsdp, name + ".all_gather", {send}, {gathered});
    with(op, Attr::padding_bytes, padding_bytes(state.unit, compute));
    Op& copy = b.emit(OpKind::copy_boxes, streams::gather, name + ".copy_out", {gathered}, {whole});
    copy.moves = shard_moves(state.unit, world_, true);
    return std::array{send, gathered, whole};
  };
  const auto [send, gathered, whole] = b.call(prefix + "gather", state.unit.kind, name + ".", {source}, write);
  if (limit) b.take_turn(*limit, {send.buffer, gathered.buffer, whole.buffer});
  return {&state.unit, whole.buffer, compute};
}

WholeUnit TrainState::gradients(ProgramBuilder& b, std::size_t u, const std::string& prefix,
                                std::optional<SlotLimitId> limit) const {
  const UnitState& state = units_[u];
  const DType dtype = scenario_.train.precision.grads;
  if (world_ == 1) return {&state.unit, state.grad, dtype};
  const BufferId whole =
      b.transient(prefix + state.unit.name + ".grads", dtype, state.unit.full_elements, Category::grads);
  if (limit) b.take_turn(*limit, {whole});
  return {&state.unit, whole, dtype};
}

void TrainState::reduce(ProgramBuilder& b, std::size_t u, const WholeUnit& gradients, const std::string& prefix) const {
  if (world_ == 1) return;
  const UnitState& state = units_[u];
  const DType dtype = gradients.dtype;
  const std::int64_t n = state.unit.shard_elements;
  const std::string name = prefix + state.unit.name;
  b.call(prefix + "reduce", state.unit.kind, name + ".", {gradients.buffer, state.grad}, [&] {
    const Tensor in = b.transient(name + ".reduce_in", dtype, {fixed(world_ * n)}, Category::communication);
    const Tensor out = b.transient(name + ".reduce_out", dtype, {fixed(n)}, Category::communication);
    // Padding takes part in the sum and in the gradient norm: it must be zero.
    if (state.unit.padding_elements > 0) b.emit(OpKind::zero, streams::reduce, name + ".zero_padding", {}, {in});
    Op& copy = b.emit(OpKind::copy_boxes, streams::reduce, name + ".copy_in", {b.whole(gradients.buffer)}, {in});
    copy.moves = shard_moves(state.unit, world_, false);
    Op& op =
        b.communicate(OpKind::reduce_scatter, streams::reduce, Family::fsdp, name + ".reduce_scatter", {in}, {out});
    with(op, Attr::padding_bytes, padding_bytes(state.unit, dtype));
    const Tensor shard = b.whole(state.grad);
    b.emit(OpKind::add, streams::reduce, name + ".accumulate", {shard, out}, {shard});
  });
}

void lower_load(ProgramBuilder& b, const TrainState& state, std::int32_t phase) {
  b.begin_block(phase, "load");
  b.map(sections::train_params);
  b.map(sections::train_optimizer);
  b.map(sections::train_reference);
  const auto load = [&](const ShardedUnit& unit, BufferId id, Slot slot) {
    b.alloc(id, streams::h2d);
    const DType dtype = b.buffer(id).dtype;
    for (const UnitParam& p : unit.params) {
      Op& op = b.feed(b.view(id, dtype, {fixed(p.padded_rows), fixed(p.cols)}, p.shard_offset), slot);
      op.name = p.parameter;
      Side mine = shards_of(unit, p, state.world(), Holds::mine);
      mine.piece.offset = 0;  // of the view
      op.moves.push_back({logical(p), mine});
    }
  };
  for (const UnitState& u : state.units()) {
    std::vector<Input> inputs = {u.shard};
    for (const BufferId id : {u.reference, u.exp_avg, u.exp_avg_sq})
      if (id >= 0) inputs.emplace_back(id);
    b.call("load.unit", u.unit.kind, parameters_prefix(u.unit), std::move(inputs), [&] {
      load(u.unit, u.shard, Slot::parameter);
      if (u.reference >= 0) load(u.unit, u.reference, Slot::reference_parameter);
      if (u.exp_avg >= 0) load(u.unit, u.exp_avg, Slot::first_moment);
      if (u.exp_avg_sq >= 0) load(u.unit, u.exp_avg_sq, Slot::second_moment);
    });
  }
}

namespace {

/// Gathers one unit's shards and fetches its parameters out of them.
void export_shards(ProgramBuilder& b, const TrainState& state, const ShardedUnit& unit, BufferId shard, Slot slot,
                   SlotLimitId one, const std::string& name) {
  const DType dtype = b.buffer(shard).dtype;
  const std::int64_t world = state.world(), n = unit.shard_elements;
  Tensor gathered = b.whole(shard);
  if (world > 1) {
    gathered = b.call("export.gather", unit.kind, name + ".", {shard}, [&] {
      const Tensor all = b.transient(name + ".gathered", dtype, {fixed(world * n)}, Category::communication);
      Op& op = b.communicate(OpKind::all_gather, streams::gather, Family::fsdp, name + ".all_gather", {b.whole(shard)},
                             {all});
      with(op, Attr::padding_bytes, padding_bytes(unit, dtype));
      return all;
    });
    b.take_turn(one, {gathered.buffer});
  }
  const std::int64_t kind_and_slot =
      static_cast<std::int64_t>(Slot::count) * unit.kind + static_cast<std::int64_t>(slot);
  b.call("export.fetch", kind_and_slot, parameters_prefix(unit), {gathered}, [&] {
    for (const UnitParam& p : unit.params) {
      Op& op = b.fetch(gathered, slot);
      op.name = p.parameter;
      op.moves.push_back({shards_of(unit, p, world, Holds::every), logical(p)});
    }
  });
}

}  // namespace

void lower_export(ProgramBuilder& b, const TrainState& state, std::int32_t phase, const std::string& prefix) {
  b.begin_block(phase, "export");
  struct Part {
    BufferId shard;
    Slot slot;
    const char* suffix;
  };
  // One at a time, each written out before the next is gathered: what a checkpoint needs beside the state is one unit's
  // gathered part.
  const SlotLimitId one = b.limit_slots(prefix + "units", 1);
  for (const UnitState& u : state.units())
    for (const Part& part :
         {Part{u.shard, Slot::exported, ""}, Part{u.exp_avg, Slot::exported_first_moment, ".exp_avg"},
          Part{u.exp_avg_sq, Slot::exported_second_moment, ".exp_avg_sq"}})
      export_shards(b, state, u.unit, part.shard, part.slot, one, prefix + u.unit.name + part.suffix);
}

}  // namespace hotbunk
