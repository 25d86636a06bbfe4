// Training's state from files and into them: what is loaded before the first iteration, and what a checkpoint has.
#include <fmt/format.h>

#include <array>

#include "lowering/train_state.h"

namespace hotbunk {

namespace {

/// The parts of training's state that are read before the first iteration.
class Load {
 public:
  Load(ProgramBuilder& b, const TrainState& state) : b_(b), state_(state) {}

  /// A unit of this stage.
  void own(const UnitState& u) {
    std::vector<Input> inputs;
    for (const BufferId id : {u.shard, u.reference, u.exp_avg, u.exp_avg_sq})
      if (id >= 0) inputs.emplace_back(id);
    if (u.publishes()) inputs.emplace_back(u.whole);
    for (const SteppedPart& p : u.parts)
      if (u.is_split() && p.on_host)
        for (const BufferId id : {p.shard, p.exp_avg, p.exp_avg_sq}) inputs.emplace_back(id);
    const std::string name = parameters_prefix(u.unit);
    b_.call("load.unit", u.unit.kind, name, std::move(inputs), [&] { load_unit(u, name); });
  }

  /// A unit of another stage, of which the first rank says what this stage does not keep: all ranks hear all of it.
  void others(const ShardedUnit& unit, std::int64_t stage) {
    b_.call(fmt::format("load.heard.{}", stage), unit.kind, parameters_prefix(unit), {}, [&] {
      const auto hear = [&](Slot slot) {
        for (const UnitParam& p : unit.params) say(p, slot);
      };
      hear(Slot::parameter);
      if (state_.has_reference()) hear(Slot::reference_parameter);
      if (state_.trains(unit)) hear(Slot::first_moment), hear(Slot::second_moment);
    });
  }

 private:
  void load_unit(const UnitState& u, const std::string& name) {
    const auto load_split = [&](StateTensor what, Slot slot, DType dtype, const char* suffix) {
      const std::string staged = name + "loaded" + suffix;
      const Tensor t = b_.transient(staged, dtype, {fixed(u.unit.shard_elements)}, Category::communication);
      load(u.unit, t.buffer, slot);
      state_.put_parts(b_, u, what, t, staged);
    };
    if (u.publishes()) b_.alloc(u.whole, streams::gather);
    const Precision& precision = state_.precision();
    if (u.is_split() && u.publishes()) {
      load_split(StateTensor::shard, Slot::parameter, precision.master, "");
    } else {
      load(u.unit, u.shard, Slot::parameter, state_.shards_of(u.unit) < state_.shards());
      if (u.is_split()) state_.put_parts(b_, u, StateTensor::shard, b_.whole(u.shard), name + "loaded");
    }
    if (u.reference >= 0) load(u.unit, u.reference, Slot::reference_parameter, u.whole >= 0);
    if (u.is_split()) {
      load_split(StateTensor::exp_avg, Slot::first_moment, precision.moments, ".exp_avg");
      load_split(StateTensor::exp_avg_sq, Slot::second_moment, precision.moments, ".exp_avg_sq");
      return;
    }
    if (u.exp_avg >= 0) load(u.unit, u.exp_avg, Slot::first_moment);
    if (u.exp_avg_sq >= 0) load(u.unit, u.exp_avg_sq, Slot::second_moment);
  }

  void load(const ShardedUnit& unit, BufferId id, Slot slot, bool whole = false) {
    if (b_.buffer(id).section != sections::transient) b_.alloc(id, b_.is_on_host(id) ? streams::host : streams::h2d);
    const DType dtype = b_.buffer(id).dtype;
    if (state_.first_rank_reads())  // what no parameter has is padding
      b_.emit(OpKind::zero, streams::h2d, unit.params.front().parameter + said(slot) + ".padding", {}, {b_.whole(id)});
    for (const UnitParam& p : unit.params) {
      const std::int64_t rows = whole ? p.rows : p.padded_rows, at = whole ? p.full_offset : p.shard_offset;
      const Tensor place = unit.flat ? b_.whole(id) : b_.view(id, dtype, {fixed(rows), fixed(p.cols)}, at);
      Side mine = shards_of(unit, p, whole ? 1 : state_.shards(), state_.mesh(), Holds::mine);
      if (whole) mine.piece.row_end = rows, mine.parts.rows = rows;
      if (whole && state_.mesh().tensor == 1 && !p.over_data) mine.parts = {};
      mine.piece.offset = 0;  // of the view
      if (state_.first_rank_reads()) {
        const Tensor heard = say(p, slot);
        b_.emit(OpKind::copy_boxes, streams::h2d, p.parameter + said(slot) + ".take", {heard}, {place})
            .moves.push_back({logical(p), mine});
        continue;
      }
      // Where a parameter lies in a flat unit's shard is each rank's own matter: the first one clears what is padding.
      const bool shares = unit.flat ? &p != &unit.params.front() : !p.has_place();
      Op& op = b_.feed(place, slot);
      op.name = p.parameter;
      if (shares) with(op, Attr::accumulate, std::int64_t{1});  // beside what is there
      op.moves.push_back({logical(p), mine});
    }
  }

  static const char* said(Slot slot) {
    return slot == Slot::parameter             ? ".said"
           : slot == Slot::reference_parameter ? ".reference.said"
           : slot == Slot::first_moment        ? ".exp_avg.said"
                                               : ".exp_avg_sq.said";
  }

  /// A parameter as the first rank has read it, on all ranks, in fp32. One after another on one stream: beside what
  /// persists there is room for the largest.
  Tensor say(const UnitParam& p, Slot slot) {
    const std::string name = p.parameter + said(slot);
    const Tensor t =
        b_.transient(name, DType::f32, {fixed(p.whole_rows), fixed(p.whole_cols)}, Category::communication);
    Op& op = b_.feed(t, slot);
    op.name = p.parameter;
    op.moves.push_back({logical(p), on_first_rank(p, state_.ranks())});
    with(b_.communicate(OpKind::broadcast, streams::h2d, Family::world, name + ".broadcast", {t}, {t}), Attr::src_rank,
         std::int64_t{0});
    return t;
  }

  ProgramBuilder& b_;
  const TrainState& state_;
};

}  // namespace

void lower_load(ProgramBuilder& b, const TrainState& state, std::int32_t phase) {
  b.begin_block(phase, "load");
  b.map(sections::train_params);
  b.map(sections::train_optimizer);
  b.map(sections::train_reference);
  b.map(sections::host_resident);
  Load load(b, state);
  for (std::int64_t stage = 0; stage < state.mesh().stages; ++stage) {
    if (stage == state.stage())
      for (const UnitState& u : state.units()) load.own(u);
    else if (state.first_rank_reads())
      for (std::size_t u = 0; u < state.units_of(stage).size(); ++u) load.others(state.exported_unit(stage, u), stage);
  }
  state.publish(b, "load.");
}

namespace {

/// One of the three parts of a unit's state that a checkpoint has.
struct SavedPart {
  Slot slot;
  DType dtype;
  const char* suffix;
};

/// Its shards of all ranks that hold some, on each of these.
Tensor gather_shards(ProgramBuilder& b, const TrainState& state, const ShardedUnit& unit, std::int64_t shards,
                     const Tensor& shard, const std::string& name) {
  const std::int64_t holders = state.mesh().holders(shards);
  if (holders == 1) return shard;
  return b.call("export.gather", unit.kind, name + ".", {shard}, [&] {
    const Tensor all =
        b.transient(name + ".gathered", shard.dtype, {fixed(holders * unit.shard_elements)}, Category::communication);
    Op& op = b.communicate(OpKind::all_gather, streams::gather, holders_of(shards, state.mesh()), name + ".all_gather",
                           {shard}, {all});
    with(op, Attr::padding_bytes, padding_bytes(unit, state.mesh(), shard.dtype));
    return all;
  });
}

/// A frozen unit's shard as the merged model has it: its adapters in it, if there are any, in the master's dtype.
/// `used`: the buffers on the way to it.
Tensor merged_shard(ProgramBuilder& b, const TrainState& state, std::size_t u, DType dtype, const std::string& name,
                    std::vector<BufferId>& used) {
  const UnitState& of = state.units()[u];
  std::optional<MergedAdapters> adapters;
  if (state.adapters_of(u)) adapters = state.gather_adapters(b, u, "export.lora.");
  const Tensor held = state.on_device(b, u, StateTensor::shard, name);
  used.push_back(held.buffer);
  if (adapters) used.insert(used.end(), {adapters->parts, adapters->whole.parts.front().buffer});
  b.begin_call("export.merge", name);
  const Tensor merged = b.transient(name + ".merged", dtype, {fixed(of.unit.shard_elements)}, Category::communication);
  b.emit(dtype == held.dtype ? OpKind::copy : OpKind::cast, streams::compute, name + ".cast", {held}, {merged});
  for (const UnitParam& p : of.unit.params) {
    if (!adapters || !state.model().adapts(p.role)) continue;
    const auto view = [&](BufferId id) {
      return b.view(id, b.buffer(id).dtype, {fixed(p.padded_rows), fixed(p.cols)}, p.shard_offset);
    };
    emit_merge(b, state.model(), *adapters, p, {0, p.padded_rows}, view(held.buffer), view(merged.buffer),
               fmt::format("{}.{}", name, lora_target(p.role)->module));
  }
  return merged;
}

/// The parameters of a stage's unit, out of all its shards.
void fetch_parameters(ProgramBuilder& b, const TrainState& state, const ShardedUnit& unit, std::int64_t shards,
                      std::int64_t stage, Slot slot, const Tensor& gathered) {
  const std::int64_t what =
      (stage * std::ssize(state.units_of(stage)) + unit.kind) * static_cast<std::int64_t>(Slot::count) +
      static_cast<std::int64_t>(slot);
  b.call(stage == 0 ? "export.fetch" : fmt::format("export.fetch.{}", stage), what, parameters_prefix(unit), {gathered},
         [&] {
           for (const UnitParam& p : unit.params) {
             if (stage > 0 && p.role == ParamRole::embedding) continue;  // the first stage's, tied
             Op& op = b.fetch(gathered, slot);
             op.name = p.parameter;
             Side held = shards_of(unit, p, shards, state.mesh(), Holds::every);
             if (shards < state.shards() && state.mesh().holders(shards) == 1) held.parts = {};  // every rank has it
             op.moves.push_back({held, logical(p)});
           }
         });
}

/// Gathers one unit's part on its stage, where `shard` has it, and hands it out on the first.
void export_part(ProgramBuilder& b, const TrainState& state, const ShardedUnit& unit, std::int64_t shards,
                 std::int64_t stage, const Tensor& shard, const SavedPart& part, SlotLimitId one,
                 const std::string& name, std::vector<BufferId> used = {}) {
  Tensor gathered;
  if (stage == state.stage()) {
    gathered = gather_shards(b, state, unit, shards, shard, name);
  } else if (state.stage() == 0) {
    const std::int64_t elements = state.mesh().holders(shards) * unit.shard_elements;
    gathered = b.transient(name + ".received", part.dtype, {fixed(elements)}, Category::communication);
  } else {
    return;
  }
  if (stage != 0) {
    const bool sends = stage == state.stage();
    b.begin_call(fmt::format("export.{}.{}", sends ? "send" : "receive", stage), name + ".");
    const auto tensors = [&](bool here) { return here ? std::vector<Tensor>{gathered} : std::vector<Tensor>{}; };
    Op& op = b.communicate(sends ? OpKind::send : OpKind::recv, streams::pipeline, Family::train_pp, name + ".to_first",
                           tensors(sends), tensors(!sends));
    with(op, Attr::peer, sends ? 0 : stage);
  }
  used.push_back(gathered.buffer);
  if (shard.buffer >= 0) used.push_back(shard.buffer);
  if (b.buffer(gathered.buffer).section == sections::transient) b.take_turn(one, used);
  if (state.stage() == 0) fetch_parameters(b, state, unit, shards, stage, part.slot, gathered);
}

}  // namespace

void lower_export(ProgramBuilder& b, const TrainState& state, std::int32_t phase, const std::string& prefix,
                  bool merges) {
  b.begin_block(phase, "export");
  // One at a time, each written out before the next is gathered or comes up from the host: what a checkpoint needs
  // beside the state is one unit's part.
  const SlotLimitId one = b.limit_slots(prefix + "units", 1);
  const Precision& precision = state.precision();
  const std::array parts = {SavedPart{Slot::exported, precision.master, ""},
                            SavedPart{Slot::exported_first_moment, precision.moments, ".exp_avg"},
                            SavedPart{Slot::exported_second_moment, precision.moments, ".exp_avg_sq"}};
  for (std::int64_t stage = 0; stage < state.mesh().stages; ++stage) {
    const bool own = stage == state.stage();
    for (std::size_t u = 0; u < state.units_of(stage).size(); ++u) {
      const ShardedUnit& unit = state.exported_unit(stage, u);
      const std::string name = prefix + unit.name;
      const std::int64_t shards = state.shards_of(unit);
      if (state.trains(unit)) {
        for (std::size_t i = 0; i < parts.size(); ++i) {
          const std::string part = name + parts[i].suffix;
          const Tensor shard = own ? state.on_device(b, u, static_cast<StateTensor>(i), part) : Tensor{};
          export_part(b, state, unit, shards, stage, shard, parts[i], one, part);
        }
      } else if (merges || unit.frozen) {
        std::vector<BufferId> used;
        const Tensor shard = own ? merged_shard(b, state, u, precision.master, name, used) : Tensor{};
        export_part(b, state, unit, shards, stage, shard, parts[0], one, name, std::move(used));
      }
    }
  }
}

}  // namespace hotbunk
