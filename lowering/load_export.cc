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
      if (whole && state_.mesh().tensor == 1 && !p.apart) mine.parts = {};
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
  const char* suffix;
};

/// A frozen unit's shard as the merged model has it: its adapters in it, if there are any, in the master's dtype.
/// `used`: the buffers on the way to it.
Tensor merged_shard(ProgramBuilder& b, const TrainState& state, std::size_t u, DType dtype, const std::string& name,
                    std::vector<BufferId>& used) {
  const UnitState& of = state.units()[u];
  const auto gather = [&](std::size_t unit) {
    GatheredUnit out = state.gather_unit(b, unit, "export.lora.");
    used.insert(used.end(), {out.parts, out.whole.parts.front().buffer});
    return out;
  };
  const GatheredAdapters adapters = adapters_for(state, of.unit, gather);
  if (of.unit.flat && !adapters.empty()) {
    const GatheredUnit whole = gather(u);
    b.begin_call("export.merge", name);
    return merge_flat(b, state, whole, adapters, dtype, name);
  }
  const Tensor held = state.on_device(b, u, StateTensor::shard, name);
  used.push_back(held.buffer);
  b.begin_call("export.merge", name);
  const Tensor merged = b.transient(name + ".merged", dtype, {fixed(of.unit.shard_elements)}, Category::communication);
  b.emit(dtype == held.dtype ? OpKind::copy : OpKind::cast, streams::compute, name + ".cast", {held}, {merged});
  for (const UnitParam& p : of.unit.params) {
    if (!state.model().adapts(p.role) || !p.has_place()) continue;
    const auto view = [&](BufferId id) {
      return b.view(id, b.buffer(id).dtype, {fixed(p.padded_rows), fixed(p.cols)}, p.shard_offset);
    };
    emit_merge(b, state.model(), adapters.at(state.adapters_of(p)), p, {0, p.padded_rows}, view(held.buffer),
               view(merged.buffer), fmt::format("{}.{}", name, merged_name(state.model(), p)));
  }
  return merged;
}

/// Hands out what each rank has of a unit in its shard: of its parameters, or of their moments. What several ranks have
/// all of them hand out; who writes it is the driver's to say.
void fetch_parameters(ProgramBuilder& b, const TrainState& state, const ShardedUnit& unit, const Tensor& shard,
                      Slot slot) {
  const std::int64_t shards = state.shards_of(unit), slots = static_cast<std::int64_t>(Slot::count);
  const std::int64_t what = unit.kind * slots + static_cast<std::int64_t>(slot);
  b.call("export.fetch", what, parameters_prefix(unit), {shard}, [&] {
    for (const UnitParam& p : unit.params) {
      if (state.stage() > 0 && p.role == ParamRole::embedding) continue;  // the first stage's, tied
      Side held = shards_of(unit, p, shards, state.mesh(), Holds::mine);
      if (shards < state.shards() && state.mesh().tensor == 1 && !p.apart) held.parts = {};  // every rank has it
      Tensor place = shard;
      if (!unit.flat) {
        place = b.view(shard.buffer, shard.dtype, {fixed(p.padded_rows), fixed(p.cols)}, p.shard_offset);
        held.piece.offset = 0;  // of the view
      }
      Op& op = b.fetch(place, slot);
      op.name = p.parameter;
      op.moves.push_back({held, logical(p)});
    }
  });
}

}  // namespace

void lower_export(ProgramBuilder& b, const TrainState& state, std::int32_t phase, const std::string& prefix,
                  bool merges) {
  b.begin_block(phase, "export");
  std::optional<SlotLimitId> one;
  // What is made for it, from the host's parts or with adapters in it, one unit at a time: each is handed out before
  // the next is begun, so that this is all that a checkpoint needs beside the state.
  const auto hand_out = [&](const ShardedUnit& unit, const Tensor& shard, Slot slot, std::vector<BufferId> used) {
    if (b.buffer(shard.buffer).section == sections::transient) {
      if (!one) one = b.limit_slots(prefix + "units", 1);
      used.push_back(shard.buffer);
      b.take_turn(*one, used);
    }
    fetch_parameters(b, state, unit, shard, slot);
  };
  constexpr std::array parts = {SavedPart{Slot::exported, ""}, SavedPart{Slot::exported_first_moment, ".exp_avg"},
                                SavedPart{Slot::exported_second_moment, ".exp_avg_sq"}};
  for (std::size_t u = 0; u < state.units().size(); ++u) {
    const ShardedUnit& unit = state.units()[u].unit;
    const std::string name = prefix + unit.name;
    if (state.trains(unit)) {
      for (std::size_t i = 0; i < parts.size(); ++i)
        hand_out(unit, state.on_device(b, u, static_cast<StateTensor>(i), name + parts[i].suffix), parts[i].slot, {});
    } else if (merges || unit.frozen) {
      std::vector<BufferId> used;
      const Tensor merged = merged_shard(b, state, u, state.precision().master, name, used);
      hand_out(unit, merged, Slot::exported, std::move(used));
    }
  }
}

}  // namespace hotbunk
