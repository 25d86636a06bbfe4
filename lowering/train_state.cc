// What train_state.h declares of the state and its gathers: long because each engine's units are held and gathered in
// one place.
#include "lowering/train_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/check.h"
#include "layout/placement.h"
#include "lowering/phases.h"

namespace hotbunk {
namespace {

struct Span2 {
  std::int64_t offset = 0, rows = 0, cols = 0;
};

/// A layer's parameters [first, last] in unit order as one block of rows; of all experts, one below the other.
std::optional<Span2> find_block(const ShardedUnit& unit, int layer, ParamRole first, ParamRole last) {
  std::optional<Span2> out;
  for (std::size_t i = 0; i < unit.params.size(); ++i) {
    const UnitParam& p = unit.params[i];
    if (!p.has_place() || p.layer != layer || (!out && p.role != first)) continue;
    if (!out) out = Span2{p.full_offset, 0, p.cols};
    HB_CHECK(p.cols == out->cols, "{} is not as wide as its neighbours", p.parameter);
    out->rows += p.rows;
    const bool again = i + 1 < unit.params.size() && unit.params[i + 1].role == first &&
                       unit.params[i + 1].layer == layer && unit.params[i + 1].has_place();
    if (p.role == last && !again) break;
  }
  return out;
}

}  // namespace

std::string parameters_prefix(const ShardedUnit& unit) {
  std::string prefix = unit.params.front().parameter;
  for (const UnitParam& p : unit.params)
    prefix.resize(static_cast<std::size_t>(std::ranges::mismatch(prefix, p.parameter).in1 - prefix.begin()));
  return prefix.substr(0, prefix.rfind('.') + 1);  // npos + 1: none
}

Side local(const UnitParam& p) {
  return {.piece = {.row_end = p.rows, .col_end = p.cols, .pitch = p.cols}, .parts = {}};
}

Side on_first_rank(const UnitParam& p, std::int64_t ranks) {
  Side side = logical(p);
  side.parts = {.who = Holds::mine,
                .family = static_cast<GroupId>(Family::world),
                .count = static_cast<std::int32_t>(ranks),
                .rows = p.whole_rows,  // the next rank's would begin where the parameter ends
                .last_row = side.piece.row_end,
                .within = {}};
  return side;
}

Side logical(const UnitParam& p) {
  return {.piece = {.row_begin = p.base.row,
                    .row_end = p.base.row + p.whole_rows,
                    .col_begin = p.base.col,
                    .col_end = p.base.col + p.whole_cols,
                    .pitch = p.whole_cols},
          .parts = {}};
}

Family holders_of(std::int64_t shards, const ShardMesh& mesh) {
  if (shards == 1 && mesh.experts.spread > 1)
    return mesh.experts.blocks > 1 ? Family::expert_holders : Family::expert_places;
  return mesh.tensor == 1 ? Family::fsdp : shards == 1 ? Family::train_tp : Family::holders;
}

namespace {

/// The same of an expert that lies apart: of its pieces, those of all places of one block follow one another, and then
/// come the next block's.
Parts parts_of_expert(const UnitParam& p, std::int64_t shards, const ShardMesh& mesh, Holds who, std::int64_t pitch) {
  const auto pieces = static_cast<std::int32_t>(mesh.experts.spread * mesh.experts.places),
             repeat = static_cast<std::int32_t>(p.step.repeat);
  Parts parts{.who = who,
              .family = static_cast<GroupId>(who != Holds::mine ? holders_of(shards, mesh)
                                             : shards == 1      ? Family::expert_places
                                                                : Family::expert_shards),
              .count = static_cast<std::int32_t>(mesh.expert_shards(shards)),
              .rows = p.padded_rows,
              .pitch = pitch,
              .last_row = p.rows,
              .within = {.family = static_cast<GroupId>(Family::expert_places),
                         .count = pieces / repeat,
                         .repeat = repeat,
                         .rows = p.step.rows,
                         .cols = p.step.cols,
                         .last_row = p.rows_of_all()}};
  // Among who together has everything, as many blocks as a tensor-parallel group has have copies of an expert.
  if (shards == 1) parts.repeat = who == Holds::mine ? pieces : static_cast<std::int32_t>(mesh.experts.blocks);
  return parts;
}

}  // namespace

Parts parts_of(const UnitParam& p, std::int64_t shards, const ShardMesh& mesh, Holds who, std::int64_t pitch) {
  if (p.apart) return parts_of_expert(p, shards, mesh, who, pitch);
  Parts parts{.who = who,
              .family = static_cast<GroupId>(Family::fsdp),
              .count = static_cast<std::int32_t>(shards),
              .rows = p.padded_rows,
              .pitch = pitch,
              .last_row = mesh.tensor == 1 ? std::min(p.rows, p.rows_of_all()) : p.rows,  // a vocabulary has padding
              .within = {}};
  // Who spreads experts has all else whole, as its neighbours do: the first of them counts.
  const bool repeats = shards == 1 && mesh.experts.spread > 1;
  if (repeats) parts.repeat = static_cast<std::int32_t>(mesh.experts.spread);
  if (repeats || (mesh.tensor > 1 && (shards == 1 || who != Holds::mine)))
    parts.family = static_cast<GroupId>(holders_of(shards, mesh));
  if (mesh.tensor == 1) return parts;
  const auto ranks = static_cast<std::int32_t>(mesh.tensor), repeat = static_cast<std::int32_t>(p.step.repeat);
  if (shards == 1 && who == Holds::mine) parts.repeat *= ranks;
  parts.within = {.family = static_cast<GroupId>(Family::train_tp),
                  .count = ranks / repeat,
                  .repeat = repeat,
                  .rows = p.step.rows,
                  .cols = p.step.cols,
                  .last_row = p.rows_of_all()};
  return parts;
}

Side runs_of(const ShardedUnit& unit, const UnitParam& p, Holds who, Range of_shard, std::int64_t pitch) {
  return {.piece = {.row_end = std::min(p.rows, p.rows_of_all()), .col_end = p.cols, .pitch = p.cols},
          .parts = {.who = who,
                    .family = static_cast<GroupId>(p.apart ? Family::expert_shards : Family::fsdp),
                    .count = static_cast<std::int32_t>(unit.only_region().shards),
                    .pitch = who == Holds::every ? pitch : 0,
                    .within = {},
                    .run = {of_shard.begin - p.full_offset, of_shard.size(), unit.shard_elements}}};
}

Side logical_runs_of(const ShardedUnit& unit, const UnitParam& p, const ShardMesh& mesh, Holds who, Range of_shard,
                     std::int64_t pitch) {
  Side out = runs_of(unit, p, who, of_shard, pitch);
  if (p.apart) {
    const Parts like = parts_of_expert(p, mesh.shards, mesh, who, pitch);
    out.parts.family = like.family, out.parts.within = like.within;
    return out;
  }
  if (mesh.tensor == 1) return out;
  const auto repeat = static_cast<std::int32_t>(p.step.repeat);
  if (who != Holds::mine) out.parts.family = static_cast<GroupId>(holders_of(unit.shared.shards, mesh));
  out.parts.within = {.family = static_cast<GroupId>(Family::train_tp),
                      .count = static_cast<std::int32_t>(mesh.tensor) / repeat,
                      .repeat = repeat,
                      .rows = p.step.rows,
                      .cols = p.step.cols,
                      .last_row = p.rows_of_all()};
  return out;
}

Side shards_of(const ShardedUnit& unit, const UnitParam& p, std::int64_t shards, const ShardMesh& mesh, Holds who) {
  if (unit.flat) return logical_runs_of(unit, p, mesh, who, {0, unit.shard_elements}, unit.shard_elements);
  return {.piece = {.row_end = p.padded_rows, .col_end = p.cols, .offset = p.shard_offset, .pitch = p.cols},
          .parts = parts_of(p, shards, mesh, who, who == Holds::every ? unit.shard_elements : 0)};
}

std::int64_t padding_bytes(const ShardedUnit& unit, const ShardMesh& mesh, DType dtype) {
  const std::int64_t of_experts = mesh.experts.spread * mesh.experts.places * unit.experts.padding_elements();
  return (mesh.tensor * unit.shared.padding_elements() + of_experts) * size_of(dtype);
}

Tensor WholeUnit::tensor(const ProgramBuilder& b, ParamRole first, ParamRole last) const {
  for (const Part& part : parts) {
    const auto block = find_block(*part.unit, layer, first, last);
    if (!block) continue;
    if (is_vector(first)) return b.view(part.buffer, part.dtype, {fixed(block->rows)}, block->offset);
    return b.view(part.buffer, part.dtype, {fixed(block->rows), fixed(block->cols)}, block->offset);
  }
  HB_CHECK(false, "{} lack the parameter asked for", parts.empty() ? "no units" : parts.front().unit->name);
  return {};
}

std::vector<Input> WholeUnit::inputs(std::vector<Input> first) const {
  for (const Part& part : parts) first.emplace_back(part.buffer);
  return first;
}

TrainState::TrainState(const Scenario& s, ProgramBuilder& b, const ShardMesh& mesh, ModelShapes& shapes,
                       std::int64_t stage, bool trains)
    : scenario_(s), mesh_(mesh), stage_(stage), parts_(stage_parts(s)), shapes_(&shapes) {
  const Precision& precision = s.train.precision;
  const TrainEngine engine = s.train.engine;
  const SleepParts sleepers = JobPhases(s).sleepers();
  whole_grads_ = trains && (engine == TrainEngine::ddp || engine == TrainEngine::zero1);
  whole_params_ = trains && (whole_grads_ || engine == TrainEngine::zero2);
  streams_ = trains && s.train.offload == Offload::layerwise;
  for (const StagePart& part : parts_) {
    cut_.push_back(engine == TrainEngine::fsdp1
                       ? shapes.flat_units(s.train.wrap, part, mesh.tensor, mesh.shards, mesh.experts)
                       : shapes.units(part, mesh.tensor, mesh.shards, mesh.experts));
    if (whole_params_) uncut_.push_back(shapes.units(part, mesh.tensor, 1, mesh.experts));
  }
  // Parameters that the optimizer can step in place need no copy.
  const bool in_place = mesh.shards == 1 && precision.params == precision.master;
  for (std::size_t u = 0; u < units_of(stage).size(); ++u) {
    const ShardedUnit& unit = exported_unit(stage, u);
    const bool trained = trains && this->trains(unit), is_whole = whole_params_ && !this->trains(unit);
    UnitState state{.unit = unit};
    const std::int64_t n = unit.shard_elements;
    const std::string name = "train." + unit.name;
    const auto on_host = [&](BufferId device, Category category, SectionId section) {
      const Buffer of = b.buffer(device);  // a buffer that is made moves the others
      return b.managed("host." + of.name, of.dtype, of.elements, category, section);
    };
    if (whole_params_)
      state.whole =
          b.managed(name + ".params", precision.params, unit.full_elements, Category::params, sections::train_params);
    // Of its optimizer state, so many elements are stepped by the host, beside parameters that stay on the device.
    const std::int64_t apart =
        trained && whole_params_ ? std::llround(s.optimizer.cpu_fraction * static_cast<double>(n)) : 0;
    const auto persists = [&](SectionId section) { return streams_ ? sections::host_resident : section; };
    if (is_whole || (whole_params_ && in_place)) state.shard = state.whole;
    else if (whole_params_ && apart < n)
      state.shard =
          b.managed(name + ".master", precision.master, n - apart, Category::optimizer, sections::train_optimizer);
    else if (!whole_params_)
      state.shard = b.managed(name + ".shard", this->trains(unit) || unit.frozen ? precision.master : precision.params,
                              n, Category::params, persists(sections::train_params));
    if (trained) {
      if (apart < n) {
        const SectionId section = persists(sections::train_optimizer);
        state.exp_avg = b.managed(name + ".exp_avg", precision.moments, n - apart, Category::optimizer, section);
        state.exp_avg_sq = b.managed(name + ".exp_avg_sq", precision.moments, n - apart, Category::optimizer, section);
      }
      state.grad = b.managed(name + ".grad", s.train.summed_grads(), whole_grads_ ? unit.full_elements : n,
                             Category::grads, persists(sections::transient));
      make_parts(b, state, apart, name);
    }
    if (has_reference_copy(s))
      state.reference =
          b.managed("reference." + unit.name + (whole_params_ ? ".params" : ".shard"), precision.params,
                    whole_params_ ? unit.full_elements : n, Category::params, persists(sections::train_reference));
    if (sleepers.params && whole_params_)
      state.host_whole = on_host(state.whole, Category::params, sections::host_params);
    if (sleepers.params && !whole_params_)
      state.host_shard = on_host(state.shard, Category::params, sections::host_params);
    if (sleepers.moments && trained) {
      if (state.publishes() && state.shard >= 0)
        state.host_shard = on_host(state.shard, Category::optimizer, sections::host_optimizer);
      if (state.exp_avg >= 0) {
        state.host_exp_avg = on_host(state.exp_avg, Category::optimizer, sections::host_optimizer);
        state.host_exp_avg_sq = on_host(state.exp_avg_sq, Category::optimizer, sections::host_optimizer);
      }
    }
    if (sleepers.reference && state.reference >= 0)
      state.host_reference = on_host(state.reference, Category::params, sections::host_reference);
    units_.push_back(std::move(state));
  }
  find_layers();
  make_host_buffers(b);
}

void TrainState::find_layers() {
  for (std::size_t u = 0; u < units_.size(); ++u)
    if (units_[u].unit.layer < 0) {
      outer_.push_back(u);
      if (std::ranges::all_of(units_[u].unit.params, is_of_head, &UnitParam::role)) loss_.push_back(u);
    }
  std::vector<std::vector<std::int64_t>> kinds;  // of layers in several units
  for (const Range& chunk : part().layers)
    for (auto number = static_cast<int>(chunk.begin); number < chunk.end; ++number) {
      Layer& layer = layers_.emplace_back(Layer{.number = number, .units = {}});
      std::vector<std::int64_t> of_units;
      for (std::size_t u = 0; u < units_.size(); ++u)
        if (units_[u].unit.layer == number) layer.units.push_back(u), of_units.push_back(units_[u].unit.kind);
      for (const std::size_t u : outer_)
        layer.is_shared |= std::ranges::count(units_[u].unit.params, number, &UnitParam::layer) > 0;
      layer.kind = of_units.empty() ? 0 : of_units.front();
      if (of_units.size() == 1 && !layer.is_shared) continue;
      if (layer.is_shared) of_units.push_back(-1 - number);  // it lies there as no other
      const auto at = std::ranges::find(kinds, of_units);
      layer.kind = std::ssize(units_) + (at - kinds.begin());
      if (at == kinds.end()) kinds.push_back(std::move(of_units));
    }
}

Range TrainState::layers_of(std::int64_t chunk) const {
  Range out;
  for (std::int64_t c = 0; c <= chunk; ++c)
    out = {out.end, out.end + part().layers[static_cast<std::size_t>(c)].size()};
  return out;
}

std::vector<SyncedUnit> TrainState::synced() const {
  std::vector<SyncedUnit> out;
  for (std::size_t stage = 0; stage < parts_.size(); ++stage) {
    const auto& units = whole_params_ ? *uncut_[stage] : *cut_[stage];
    for (std::size_t u = 0; u < units.size(); ++u) {
      if (units[u].adapters) continue;  // they are in the matrices that are sent
      SyncedUnit& unit = out.emplace_back(SyncedUnit{&units[u], static_cast<std::int64_t>(stage), u});
      if (unit.stage != stage_) continue;
      unit.buffer = whole_params_ ? units_[u].whole : units_[u].shard;
      unit.host = whole_params_ ? units_[u].host_whole : streams_ ? units_[u].shard : units_[u].host_shard;
    }
  }
  return out;
}

std::int64_t TrainState::whole_elements(const ShardedUnit& unit) {
  return unit.flat ? unit.only_region().shards * unit.shard_elements : unit.full_elements;
}

WholeUnit::Part TrainState::gather(ProgramBuilder& b, std::size_t u, Weights which, const std::string& prefix,
                                   std::vector<BufferId>& made, BufferId source, bool stays) const {
  const UnitState& state = units_[u];
  const DType compute = scenario_.train.precision.params;
  const bool copied = which == Weights::reference && state.reference >= 0;
  if (source < 0) source = copied ? state.reference : whole_params_ ? state.whole : state.shard;
  const Tensor held = b.whole(source);
  const bool is_below = b.is_on_host(source), as_computed = shards() == 1 && held.dtype == compute;
  if (whole_params_ || (as_computed && !is_below)) return {&state.unit, source, compute};
  const std::string name = prefix + state.unit.name;
  std::vector<Input> inputs = {source};
  BufferId stayed = -1;
  if (stays) {
    stayed = b.managed(name + ".params", compute, whole_elements(state.unit), Category::params, sections::transient);
    inputs.emplace_back(stayed);
  }
  const auto write = [&] {
    if (stays) b.alloc(stayed, streams::gather);
    const Tensor whole =
        b.whole(stays ? stayed : b.transient(name + ".params", compute, whole_elements(state.unit), Category::params));
    Tensor shard = held;
    if (is_below) {
      if (!as_computed)
        shard = b.transient(name + ".come_up", held.dtype, {fixed(b.buffer(source).elements)}, Category::communication);
      b.emit(OpKind::copy, streams::h2d, name + ".up", {held}, {as_computed ? whole : shard});
      if (as_computed) return std::array{whole, whole, whole, whole};
    }
    const std::vector<BufferId> buffers = fill(b, state, shard, whole, name);
    if (buffers.empty()) return std::array{state.unit.flat ? whole : shard, whole, whole, shard};
    return std::array{shard.dtype == compute ? shard : b.whole(buffers.front()), b.whole(buffers.back()), whole, shard};
  };
  const auto [send, gathered, whole, come_up] =
      b.call(prefix + "gather", state.unit.kind, name + ".", std::move(inputs), write);
  made.insert(made.end(), {send.buffer, gathered.buffer, whole.buffer, come_up.buffer});
  return {&state.unit, whole.buffer, compute};
}

const ShardedUnit& TrainState::exported_unit(std::int64_t stage, std::size_t u) const {
  const ShardedUnit& cut = units_of(stage)[u];
  return whole_params_ && !trains(cut) ? (*uncut_[static_cast<std::size_t>(stage)])[u] : cut;
}

std::size_t TrainState::adapters_of(const UnitParam& p) const {
  for (std::size_t u = 0; u < units_.size(); ++u) {
    const ShardedUnit& unit = units_[u].unit;
    if (unit.adapters && unit.layer == p.layer && std::ranges::count(unit.params, p.apart, &UnitParam::apart) > 0)
      return u;
  }
  HB_CHECK(false, "no adapter of {}", p.parameter);
  return 0;
}

GatheredUnit TrainState::gather_unit(ProgramBuilder& b, std::size_t u, const std::string& prefix,
                                     BufferId awake) const {
  std::vector<BufferId> made;
  const WholeUnit::Part part = gather(b, u, Weights::trained, prefix, made, awake);
  GatheredUnit out;
  out.whole = {.parts = {part}, .layer = units_[u].unit.layer, .kind = part.unit->kind};
  out.parts_are_whole = whole_params_ || shards() == 1;
  // A flat unit is sent from where it lies, or came up to.
  out.parts = out.parts_are_whole ? part.buffer : part.unit->flat ? made.back() : made.front();
  return out;
}

GatheredAdapters adapters_for(const TrainState& state, const ShardedUnit& unit,
                              const std::function<GatheredUnit(std::size_t)>& gather) {
  GatheredAdapters out;
  for (const UnitParam& p : unit.params)
    if (state.model().adapts(p.role))
      if (const std::size_t of = state.adapters_of(p); !out.contains(of)) out.emplace(of, gather(of));
  return out;
}

std::string merged_name(const ModelSpec& model, const UnitParam& p) {
  const std::string_view op = lora_target(model, p.role)->op;
  return p.expert < 0 ? std::string(op) : fmt::format("{}.{}", op, p.expert);
}

Tensor merge_flat(ProgramBuilder& b, const TrainState& state, const GatheredUnit& gathered,
                  const GatheredAdapters& adapters, DType dtype, const std::string& name) {
  const ModelSpec& model = state.model();
  const WholeUnit::Part& whole = gathered.whole.parts.front();
  const ShardedUnit& unit = *whole.unit;
  const Tensor held = b.whole(gathered.parts);
  const Tensor merged = b.transient(name + ".merged", dtype, {fixed(unit.shard_elements)}, Category::communication);
  b.emit(dtype == held.dtype ? OpKind::copy : OpKind::cast, streams::compute, name + ".cast", {held}, {merged});
  for (const UnitParam& p : unit.params) {
    if (!model.adapts(p.role) || !p.has_place()) continue;
    const std::string of = fmt::format("{}.{}.{}", name, p.layer, merged_name(model, p));
    const Dim rows = fixed(p.rows), cols = fixed(p.cols);
    const Tensor matrix = b.transient(of, dtype, {rows, cols}, Category::communication);
    emit_merge(b, model, adapters.at(state.adapters_of(p)), p, {0, p.rows},
               b.view(whole.buffer, whole.dtype, {rows, cols}, p.full_offset), matrix, of + ".merge");
    const Side own = runs_of(unit, p, Holds::mine, {0, unit.shard_elements}, unit.shard_elements);
    b.emit(OpKind::copy_boxes, streams::compute, of + ".take", {matrix}, {merged}).moves = {{local(p), own}};
  }
  return merged;
}

void emit_merge(ProgramBuilder& b, const ModelSpec& model, const GatheredUnit& adapters, const UnitParam& p, Range rows,
                const Tensor& from, const Tensor& to, const std::string& name) {
  const LoraTarget& target = *lora_target(model, p.role);
  const WholeUnit::Part& part = adapters.whole.parts.front();
  // Of an expert those in the place that the matrix has among this rank's.
  const std::int64_t expert = p.expert < 0 ? -1 : p.expert % (model.moe->experts / p.spread);
  const auto one_of = [&](ParamRole role) -> const UnitParam& {
    const auto& params = part.unit->params;
    const auto at =
        std::ranges::find_if(params, [&](const UnitParam& a) { return a.role == role && a.expert == expert; });
    HB_CHECK(at != params.end(), "{} has no adapter", p.parameter);
    return *at;
  };
  const UnitParam &of_a = one_of(target.a), &of_b = one_of(target.b);
  // Of a flat unit's shard no row is said to be a rank's.
  const bool whole = adapters.parts_are_whole || part.unit->flat;
  const std::int64_t first = whole ? of_b.full_offset : of_b.shard_offset;
  const Tensor rows_of_b = b.view(whole ? part.buffer : adapters.parts, part.dtype,
                                  {fixed(rows.size()), fixed(of_b.cols)}, first + rows.begin * of_b.cols);
  const Tensor a = b.view(part.buffer, part.dtype, {fixed(of_a.rows), fixed(of_a.cols)}, of_a.full_offset);
  with(b.emit(OpKind::lora_merge, streams::compute, name, {from, rows_of_b, a}, {to}), Attr::factor,
       model.lora.factor());
}

std::vector<std::size_t> TrainState::trained() const {
  std::vector<std::size_t> out;
  for (std::size_t u = 0; u < units_.size(); ++u)
    if (units_[u].is_trained()) out.push_back(u);
  return out;
}

WholeUnit TrainState::gather_outer(ProgramBuilder& b, Weights which, const std::string& prefix, Outer outer) const {
  WholeUnit out;
  std::vector<BufferId> made;
  for (const std::size_t u : outer_)
    if (outer == Outer::all || !std::ranges::count(loss_, u)) out.parts.push_back(gather(b, u, which, prefix, made));
  return out;
}

void TrainState::add_loss_units(ProgramBuilder& b, Weights which, const std::string& prefix, WholeUnit& outer,
                                std::optional<SlotLimitId> limit) const {
  std::vector<BufferId> made;
  for (const std::size_t u : loss_) outer.parts.push_back(gather(b, u, which, prefix, made));
  if (limit && !made.empty()) b.take_turn(*limit, made);
}

WholeUnit TrainState::gather_layer(ProgramBuilder& b, std::size_t i, Weights which, const std::string& prefix,
                                   const WholeUnit& outer, std::optional<SlotLimitId> limit) const {
  const Layer& layer = layers_[i];
  WholeUnit out{.parts = {}, .layer = layer.number, .kind = layer.kind};
  std::vector<BufferId> made;
  for (const std::size_t u : layer.units) {
    // The policy that a frozen model with adapters began with is the model without them.
    if (units_[u].unit.adapters && which == Weights::reference) continue;
    out.parts.push_back(gather(b, u, which, prefix, made));
  }
  if (layer.is_shared) out.parts.insert(out.parts.end(), outer.parts.begin(), outer.parts.end());
  if (limit && !made.empty()) b.take_turn(*limit, made);
  return out;
}

std::vector<WholeUnit> TrainState::hold_layers(ProgramBuilder& b, const std::string& prefix,
                                               std::vector<BufferId>& held) const {
  std::vector<WholeUnit> out;
  std::vector<BufferId> made;
  for (const Layer& layer : layers_) {
    HB_CHECK(!layer.is_shared, "layer {} has parameters in units of no layer", layer.number);
    WholeUnit& whole = out.emplace_back(WholeUnit{.parts = {}, .layer = layer.number, .kind = layer.kind});
    for (const std::size_t u : layer.units) {
      made.clear();
      whole.parts.push_back(gather(b, u, Weights::trained, prefix, made, -1, true));
      if (!made.empty()) held.push_back(whole.parts.back().buffer);
    }
  }
  return out;
}

std::vector<TrainState::KeptLayer> TrainState::keep_layers(ProgramBuilder& b, const std::string& prefix,
                                                           SlotLimitId limit, std::vector<BufferId>& held) const {
  std::vector<KeptLayer> out;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    KeptLayer& kept = out.emplace_back(KeptLayer{gather_layer(b, i, Weights::trained, prefix, {}, limit), {}});
    kept.parts = keep_parts(b, kept.layer, prefix, &held);
  }
  return out;
}

std::vector<Tensor> TrainState::keep_parts(ProgramBuilder& b, const WholeUnit& whole, const std::string& prefix,
                                           std::vector<BufferId>* held) const {
  const std::int64_t ranks = scenario_.train.reshard_ranks;
  std::vector<Tensor> out;
  for (const WholeUnit::Part& part : whole.parts) {
    const std::int64_t all = part.unit->full_elements, each = ceil_div(all, ranks);
    const std::string name = prefix + part.unit->name;
    std::vector<Input> inputs = {part.buffer};
    BufferId stays = -1;
    if (held != nullptr) {
      stays = b.managed(name + ".kept", part.dtype, each, Category::params, sections::transient);
      held->push_back(stays), inputs.emplace_back(stays);
    }
    out.push_back(b.call(prefix + "reshard", part.unit->kind, name + ".", std::move(inputs), [&] {
      if (held != nullptr) b.alloc(stays);
      const Tensor kept =
          b.whole(held != nullptr ? stays : b.transient(name + ".kept", part.dtype, each, Category::params));
      // What lies behind the unit's end is gathered with the rest.
      if (ranks * each > all) b.emit(OpKind::zero, streams::compute, name + ".zero_padding", {}, {kept});
      const Side row{.piece = {.row_end = 1, .col_end = all, .pitch = all}, .parts = {}};
      Side mine = row;
      mine.parts = {.who = Holds::mine,
                    .family = static_cast<GroupId>(Family::reshard),
                    .count = static_cast<std::int32_t>(ranks),
                    .within = {},
                    .run = {0, each, each}};
      b.emit(OpKind::copy_boxes, streams::compute, name + ".reshard", {b.whole(part.buffer)}, {kept}).moves = {
          {row, mine}};
      return kept;
    }));
  }
  return out;
}

WholeUnit TrainState::gather_kept(ProgramBuilder& b, const WholeUnit& whole, const std::vector<Tensor>& parts,
                                  const std::string& prefix, SlotLimitId limit) const {
  WholeUnit out{.parts = {}, .layer = whole.layer, .kind = whole.kind};
  std::vector<BufferId> made;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const ShardedUnit& unit = *whole.parts[i].unit;
    const Tensor& kept = parts[i];
    const std::int64_t elements = scenario_.train.reshard_ranks * kept.shape[0].size;
    const std::string name = prefix + unit.name;
    const Tensor all = b.call(prefix + "gather_kept", unit.kind, name + ".", {kept.buffer}, [&] {
      const Tensor gathered = b.whole(b.transient(name + ".params", kept.dtype, elements, Category::params));
      with(
          b.communicate(OpKind::all_gather, streams::gather, Family::reshard, name + ".all_gather", {kept}, {gathered}),
          Attr::padding_bytes, (elements - unit.full_elements) * size_of(kept.dtype));
      return gathered;
    });
    out.parts.push_back({&unit, all.buffer, kept.dtype});
    made.push_back(all.buffer);
  }
  b.take_turn(limit, made);
  return out;
}

void TrainState::publish(ProgramBuilder& b, const std::string& prefix) const {
  if (!whole_params_) return;
  const SlotLimitId two = b.limit_slots(prefix + "published", 2);
  for (const UnitState& u : units_) {
    if (!u.publishes()) continue;
    const std::string name = prefix + u.unit.name;
    std::vector<Input> inputs;
    if (u.shard >= 0) inputs.emplace_back(u.shard);
    inputs.emplace_back(u.whole);
    if (u.is_split()) add_host_parts(u, inputs);
    const std::array made = b.call(prefix + "publish", u.unit.kind, name + ".", std::move(inputs), [&] {
      const std::vector<BufferId> buffers =
          fill(b, u, u.shard >= 0 ? b.whole(u.shard) : Tensor{}, b.whole(u.whole), name);
      return buffers.empty() ? std::array{b.whole(u.whole), b.whole(u.whole)}
                             : std::array{b.whole(buffers.front()), b.whole(buffers.back())};
    });
    if (shards() > 1) b.take_turn(two, {made[0].buffer, made[1].buffer});
  }
}

}  // namespace hotbunk
