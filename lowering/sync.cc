// Weight sync in flattened buckets (BACKGROUND F1, F2): FSDP2 shards, cast to the rollout dtype, into the packed and
// tensor-parallel rollout weights of the same rank.
//
//   collective  each rank casts its part of the bucket, all-gathers it, and copies its slices out of the whole bucket
//   ipc         each rank casts its part and shows it to its peers, who read exactly the slices they need: no bytes
//               cross a socket, no rank holds a whole bucket; barriers order writers, readers and the next writers
//
// Long for the two, which share the buckets and how rows are packed, gathered, merged with adapters and hashed.
//
// Where training's parameters sleep, a bucket's rows come up from their host copy first, and are packed from there.
//
// A bucket holds whole rows of padded shards, or of flat units (FSDP1) elements of their shards, whatever parameters
// these are of. A parameter larger than the bucket spreads over several.
#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "base/check.h"
#include "lowering/rollout.h"
#include "spec/parameter_roles.h"

namespace hotbunk {
namespace {

/// Rows [begin, end) of every rank's padded shard of what it has of one parameter; of a flat unit no parameter, and
/// elements of every rank's shard.
struct Entry {
  const SyncedUnit* unit = nullptr;
  const UnitParam* param = nullptr;
  std::int64_t begin = 0, end = 0;
  std::int64_t offset = 0;  // elements into a rank's part of the bucket
  std::int64_t cols() const { return param ? param->cols : 1; }
  std::int64_t elements() const { return (end - begin) * cols(); }
  std::int64_t shard_element() const { return (param ? param->shard_offset : 0) + begin * cols(); }
  /// visit(p) for what it has something of; of parameters that share a place for the first.
  template <class Visit>
  void each_param(Visit visit) const {
    if (param) return visit(*param);
    for (const UnitParam& p : unit->unit->params)
      if (p.has_place()) visit(p);
  }
};

/// Rows that a tensor-parallel rank has of a parameter: of a vocabulary the last ranks have fewer than room for.
std::int64_t rows_of_piece(const UnitParam& p, std::int64_t piece) {
  if (rule_of(p.role).cut != RoleCut::vocabulary) return p.rows;
  return std::clamp<std::int64_t>(p.whole_rows - piece * p.step.rows, 0, p.rows);
}

struct Bucket {
  std::int64_t stage = 0;  // of the pipeline, that has its parameters
  std::vector<Entry> entries;
  std::int64_t elements = 0;  // of one rank's part
  /// Elements of all parts that are padding: rows past the parameter's end, those that training's vocabulary is padded
  /// by among them.
  std::int64_t padding(std::int64_t shards, const ShardMesh& mesh) const {
    std::int64_t n = 0;
    for (const Entry& e : entries) {
      if (!e.param) {
        const ShardedUnit& unit = *e.unit->unit;
        const bool experts = unit.params.front().apart;
        for (std::int64_t w = 0; w < unit.only_region().shards; ++w)
          n += (experts ? mesh.experts.spread * mesh.experts.places : mesh.tensor) *
               (e.end - e.begin -
                std::clamp<std::int64_t>(unit.full_elements - w * unit.shard_elements - e.begin, 0, e.end - e.begin));
        continue;
      }
      const std::int64_t cut_into = e.param->apart ? mesh.expert_shards(shards) : shards;
      const std::int64_t pieces = e.param->apart ? mesh.experts.spread * mesh.experts.places : mesh.tensor;
      const bool alike = rule_of(e.param->role).cut != RoleCut::vocabulary;  // all pieces
      for (std::int64_t piece = 0; piece < (alike ? 1 : pieces); ++piece)
        for (std::int64_t w = 0; w < cut_into; ++w) {
          const std::int64_t real = std::clamp<std::int64_t>(
              rows_of_piece(*e.param, piece) - w * e.param->padded_rows - e.begin, 0, e.end - e.begin);
          n += (alike ? pieces : 1) * (e.end - e.begin - real) * e.param->cols;
        }
    }
    return n;
  }
};

/// So many elements of a flat unit's shards, and those behind them in further buckets.
void fill_flat(std::vector<Bucket>& buckets, const SyncedUnit& u, std::int64_t capacity) {
  for (std::int64_t at = 0; at < u.unit->shard_elements;) {
    const std::int64_t room = capacity - buckets.back().elements;
    if (room <= 0) {
      buckets.emplace_back().stage = u.stage;
      continue;
    }
    Bucket& b = buckets.back();
    const std::int64_t n = std::min(u.unit->shard_elements - at, room);
    b.entries.push_back({&u, nullptr, at, at + n, b.elements});
    b.elements += n, at += n;
  }
}

/// Greedy, in the order of the units; at least one row goes into a bucket, however small the bucket is. No bucket has
/// parameters of several stages; of a table that two have, the first one's is sent. Rows that no rank's shard has of a
/// parameter are not.
std::vector<Bucket> fill_buckets(const std::vector<SyncedUnit>& units, std::int64_t holders, std::int64_t bucket_bytes,
                                 DType dtype) {
  std::vector<Bucket> buckets(1);
  const std::int64_t capacity = std::max<std::int64_t>(1, bucket_bytes / size_of(dtype) / holders);
  for (const SyncedUnit& u : units) {
    if (u.stage != buckets.back().stage) {
      if (!buckets.back().entries.empty()) buckets.emplace_back();
      buckets.back().stage = u.stage;
    }
    if (u.unit->flat) {  // where two stages have the table, it is a unit of its own
      if (u.stage == 0 || u.unit->params.front().role != ParamRole::embedding) fill_flat(buckets, u, capacity);
      continue;
    }
    for (const UnitParam& p : u.unit->params) {
      if (p.role == ParamRole::embedding && u.stage > 0) continue;
      const std::int64_t sent = std::min(p.padded_rows, rows_of_piece(p, 0));
      for (std::int64_t row = p.has_place() ? 0 : sent; row < sent;) {
        std::int64_t rows = std::min(sent - row, (capacity - buckets.back().elements) / p.cols);
        if (rows <= 0 && buckets.back().elements > 0) {
          buckets.emplace_back().stage = u.stage;
          continue;
        }
        rows = std::max<std::int64_t>(rows, 1);
        Bucket& b = buckets.back();
        b.entries.push_back({&u, &p, row, row + rows, b.elements});
        b.elements += rows * p.cols;
        row += rows;
      }
    }
  }
  return buckets;
}

/// Where a parameter's rectangles go.
using Destinations = std::map<std::string, std::vector<std::pair<std::size_t, const LocalWeight::Source*>>>;

Destinations destinations_of(const RolloutState& r) {
  Destinations out;
  for (std::size_t i = 0; i < r.weights().size(); ++i)
    for (const auto& source : r.weights()[i].sources) out[source.parameter].emplace_back(i, &source);
  return out;
}

class SyncLowering {
 public:
  SyncLowering(const Scenario& s, ProgramBuilder& b, const TrainState& t, const RolloutState& r, bool from_host)
      : s_(s),
        b_(b),
        t_(t),
        r_(r),
        from_host_(from_host),
        to_(destinations_of(r)),
        units_(t.synced()),
        shards_(t.synced_shards()),
        holders_(t.synced_holders()) {
    staging_ = b.limit_slots("sync.staging", 1);  // all have read a bucket before the next is packed
  }

  void lower() {
    zero_padding();
    if (s_.sync.verify) begin_hashes();
    const std::vector<Bucket> buckets = fill_buckets(units_, holders_, s_.sync.bucket_bytes, s_.rollout.dtype);
    for (std::size_t i = 0; i < buckets.size(); ++i) {
      const std::string name = fmt::format("sync.bucket{}.", i);
      if (holders_ == 1 && t_.mesh().ranks() > 1) from_own(buckets[i], name);
      else if (s_.sync.transport == SyncTransport::ipc || holders_ == 1) through_peers(buckets[i], name);
      else through_gather(buckets[i], name);
    }
    if (s_.sync.verify) verify();
    lower_prepack(s_, b_, r_);  // what is hashed are rows
  }

 private:
  /// The last rows of a vocabulary that does not divide by tp are filled by no parameter, on some ranks. Sampling
  /// ignores their logits, but what lies in fresh memory must not look like a fault, or differ from run to run.
  void zero_padding() {
    for (std::size_t i = 0; i < r_.weights().size(); ++i) {
      const LocalWeight& w = r_.weights()[i];
      if (w.sources.size() != 1 || w.sources[0].step.rows == 0) continue;
      const std::int64_t held =
          rows_of_parameter(w.sources[0].parameter) - w.sources[0].step.rows * (cutters_of(w).ranks - 1);
      const std::int64_t filled = std::max<std::int64_t>(held, 0) * w.cols;  // of the last rank: the least of all
      if (filled >= w.elements()) continue;
      b_.emit(OpKind::zero, streams::compute, "sync.padding." + w.name, {},
              {b_.view(r_.buffer(i), s_.rollout.dtype, {fixed(w.elements() - filled)}, filled)});
    }
  }

  /// The ranks of an engine that a weight is cut over.
  struct Cutters {
    Family family = Family::tp;
    std::int64_t ranks = 1;
  };
  Cutters cutters_of(const LocalWeight& w) const {
    const RolloutLayout& l = s_.rollout.layout;
    if (w.of_attention && has_attention_groups(l)) return {Family::engine_attention, l.tp / l.attention_dp};
    return {Family::tp, l.tp};
  }

  std::int64_t rows_of_parameter(const std::string& name) const {
    for (const SyncedUnit& u : units_)
      for (const UnitParam& p : u.unit->params)
        if (p.parameter == name) return p.whole_rows;
    HB_CHECK(false, "no parameter '{}'", name);
    return 0;
  }

  /// What a bucket is packed from: each entry's tensor, and its first element there.
  struct Sources {
    std::vector<Tensor> tensors;
    std::vector<std::pair<std::int32_t, std::int64_t>> of_entry;
    BufferId staged = -1;
  };

  Sources shards(const Bucket& bucket) const {
    Sources out;
    for (const Entry& e : bucket.entries) {
      out.of_entry.emplace_back(static_cast<std::int32_t>(out.tensors.size()), e.shard_element());
      out.tensors.push_back(merges_flat(*e.unit) ? merged_.at(e.unit) : b_.whole(e.unit->buffer));
    }
    return out;
  }

  /// Up from the host, a copy for what of a unit lies together; hashed there, for the shards themselves stay below.
  /// Merged shards of flat units are here already.
  Sources upload(const Bucket& bucket, const std::string& name) {
    if (std::ranges::all_of(bucket.entries, [&](const Entry& e) { return merges_flat(*e.unit); }))
      return shards(bucket);
    const DType dtype = b_.buffer(bucket.entries[0].unit->buffer).dtype;
    b_.begin_call("sync.upload", name);
    const Tensor staged = b_.transient(name + "staged", dtype, {fixed(bucket.elements)}, Category::communication);
    for (std::size_t i = 0; i < bucket.entries.size();) {
      const Entry& first = bucket.entries[i];
      if (merges_flat(*first.unit)) {
        ++i;
        continue;
      }
      std::int64_t n = 0;
      for (; i < bucket.entries.size() && bucket.entries[i].unit == first.unit &&
             bucket.entries[i].shard_element() == first.shard_element() + n;
           ++i)
        n += bucket.entries[i].elements();
      b_.emit(OpKind::copy, streams::h2d, name + "up." + first.unit->unit->name,
              {b_.view(first.unit->host, dtype, {fixed(n)}, first.shard_element())},
              {b_.view(staged.buffer, dtype, {fixed(n)}, first.offset)});
    }
    Sources out{{staged}, {}, staged.buffer};
    for (const Entry& e : bucket.entries) {
      const bool merged = merges_flat(*e.unit);
      out.of_entry.emplace_back(merged ? static_cast<std::int32_t>(out.tensors.size()) : 0,
                                merged ? e.shard_element() : e.offset);
      if (merged) out.tensors.push_back(merged_.at(e.unit));
    }
    if (s_.sync.verify)
      for (const Entry& e : bucket.entries)
        if (!merges(e) && !merges_flat(*e.unit)) hash_entry(e, staged);
    return out;
  }
  /// What a rank has of an entry in a tensor that is laid out as its part of the bucket.
  void hash_entry(const Entry& e, const Tensor& part) {
    e.each_param([&](const UnitParam& first) {
      if (!e.param && !has(e, first)) return;
      each_of_place(*e.unit->unit, first, [&](const UnitParam& p) {
        hash(p.parameter, {part}, sum(sum_of_.at(p.parameter)),
             {{holders_ > 1 ? rows_in_parts(e, first, Holds::mine, 0) : rows_of(e), logical(p)}});
      });
    });
  }

  /// This rank's part of the bucket, and the transient that it came up in.
  struct Packed {
    Tensor part;
    BufferId staged = -1;
  };
  Packed pack(const Bucket& bucket, const std::string& name) {
    if (bucket.stage != t_.stage()) return receive(bucket, name);
    merge_flat_units(bucket);
    Sources from = from_host_ ? upload(bucket, name) : shards(bucket);
    gather_adapters(bucket);
    b_.begin_call("sync.bucket", name);
    const Tensor part =
        b_.transient(name + "part", s_.rollout.dtype, {fixed(bucket.elements)}, Category::communication);
    std::vector<Move> moves;
    for (std::size_t i = 0; i < bucket.entries.size(); ++i) {  // padding as well: all parts are of one size
      const Entry& e = bucket.entries[i];
      if (merges(e)) continue;
      const auto [tensor, element] = from.of_entry[i];
      const std::int64_t cols = e.cols();
      const Piece own{e.begin, e.end, 0, cols, element, cols};
      const Piece packed{e.begin, e.end, 0, cols, e.offset, cols};
      moves.push_back({{tensor, own, {}}, {0, packed, {}}});
    }
    const std::vector<Tensor> merged_from = from.tensors;
    if (!moves.empty())
      b_.emit(OpKind::copy_boxes, streams::compute, name + "pack", std::move(from.tensors), {part}).moves =
          std::move(moves);
    for (std::size_t i = 0; i < bucket.entries.size(); ++i) {
      const Entry& e = bucket.entries[i];
      if (!merges(e)) continue;
      const Dim rows = fixed(e.end - e.begin), cols = fixed(e.param->cols);
      const Tensor& held = merged_from[static_cast<std::size_t>(from.of_entry[i].first)];
      emit_merge(b_, s_.model, adapters_.at(t_.adapters_of(*e.param)), *e.param, {e.begin, e.end},
                 b_.view(held.buffer, held.dtype, {rows, cols}, from.of_entry[i].second),
                 b_.view(part.buffer, part.dtype, {rows, cols}, e.offset), name + "merge." + e.param->parameter);
    }
    pass_on(bucket, name, part);
    if (from_host_ && s_.sync.verify) hash_part(bucket, name, part);
    return {part, from.staged};
  }
  /// Of matrices that came up from the host, what was made of them.
  void hash_part(const Bucket& bucket, const std::string& name, const Tensor& part) {
    for (const Entry& e : bucket.entries)
      if (merges(e) || merges_flat(*e.unit)) hash_entry(e, part);
    b_.begin_call("sync.bucket", name);
  }
  /// Whether a matrix is sent with its adapter in it.
  bool merges(const Entry& e) const { return e.param && s_.model.adapts(e.param->role); }
  /// Whether matrices of a flat unit are: then its shard is made anew (merge_flat).
  bool merges_flat(const SyncedUnit& u) const {
    return u.unit->flat &&
           std::ranges::any_of(u.unit->params, [&](const UnitParam& p) { return s_.model.adapts(p.role); });
  }
  /// Of the flat units that the bucket has and none before it had.
  void merge_flat_units(const Bucket& bucket) {
    for (const Entry& e : bucket.entries)
      if (merges_flat(*e.unit) && !merged_.contains(e.unit)) merged_.emplace(e.unit, merged_shard(*e.unit, "sync."));
  }
  /// One unit's gathered parameters at a time: these are given back before the next one's come.
  Tensor merged_shard(const SyncedUnit& u, const std::string& prefix) {
    if (!whole_) whole_ = b_.limit_slots("sync.whole", 1);
    std::vector<BufferId> used;
    const auto gather = [&](std::size_t unit) {
      GatheredUnit out = gathered(unit, prefix);
      used.insert(used.end(), {out.parts, out.whole.parts.front().buffer});
      return out;
    };
    const GatheredAdapters adapters = adapters_for(t_, *u.unit, gather);
    const GatheredUnit whole = gather(u.number);
    b_.take_turn(*whole_, used);
    const std::string name = prefix + "merge." + u.unit->name;
    b_.begin_call("sync.merge", name);
    return merge_flat(b_, t_, whole, adapters, s_.rollout.dtype, name);
  }
  /// Adapters of the layers that the bucket has and none before it had.
  void gather_adapters(const Bucket& bucket) {
    for (const Entry& e : bucket.entries)
      if (merges(e) && e.unit->buffer >= 0)
        if (const std::size_t of = t_.adapters_of(*e.param); !adapters_.contains(of))
          adapters_.emplace(of, gathered(of, "sync."));
  }
  GatheredUnit gathered(std::size_t u, const std::string& prefix) {
    const bool wakes = from_host_ && !t_.streams_from_host();  // else it comes up as it does to train
    return t_.gather_unit(b_, u, prefix, wakes ? wake(u) : -1);
  }
  /// A unit's parameters, up from their host copy.
  BufferId wake(std::size_t u) {
    const UnitState& of = t_.units()[u];
    const BufferId asleep = of.whole >= 0 ? of.host_whole : of.host_shard;
    const Buffer like = b_.buffer(asleep);  // a buffer that is made moves the others
    const std::string name = "sync." + of.unit.name + ".";
    b_.begin_call("sync.upload", name);
    const BufferId awake = b_.transient(name + "staged", like.dtype, like.elements, Category::communication);
    b_.emit(OpKind::copy, streams::h2d, name + "up", {b_.whole(asleep)}, {b_.whole(awake)});
    return awake;
  }
  Packed receive(const Bucket& bucket, const std::string& name) {
    b_.begin_call("sync.bucket", name);
    const Tensor part =
        b_.transient(name + "part", s_.rollout.dtype, {fixed(bucket.elements)}, Category::communication);
    pass_on(bucket, name, part);
    return {part};
  }
  /// A rank's part, to the ranks of its place in the other stages: then each stage's ranks have all parts among them.
  void pass_on(const Bucket& bucket, const std::string& name, const Tensor& part) {
    if (t_.mesh().stages == 1) return;
    with(b_.communicate(OpKind::broadcast, streams::pipeline, Family::train_pp, name + "all_stages", {part}, {part}),
         Attr::src_rank, bucket.stage);
  }
  void take_turn(const Packed& packed, BufferId whole) {
    if (packed.staged >= 0) b_.take_turn(staging_, {packed.staged, packed.part.buffer, whole});
    else b_.take_turn(staging_, {packed.part.buffer, whole});
  }

  /// Of a parameter that is not cut.
  static Side rows_of(const Entry& e) {
    return {.tensor = 0, .piece = {e.begin, e.end, 0, e.param->cols, e.offset, e.param->cols}, .parts = {}};
  }

  /// Whether some rank's part of an entry of a flat unit has an element of the parameter.
  static bool has(const Entry& e, const UnitParam& p) {
    const ShardedUnit& unit = *e.unit->unit;
    for (std::int64_t w = 0; w < unit.only_region().shards; ++w) {
      const std::int64_t first = w * unit.shard_elements - p.full_offset;
      if (first + e.begin < p.elements() && first + e.end > 0) return true;
    }
    return false;
  }

  /// The parts of an entry, of one of its parameters: of each rank in its own memory (peers), or `pitch` elements
  /// apart.
  Side rows_in_parts(const Entry& e, const UnitParam& p, Holds who, std::int64_t pitch) const {
    if (!e.param) {
      Side runs = logical_runs_of(*e.unit->unit, p, t_.mesh(), who, {e.begin, e.end}, pitch);
      runs.piece.offset = e.offset;
      return runs;
    }
    return {.piece = {.row_begin = e.begin,
                      .row_end = e.end,
                      .col_end = e.param->cols,
                      .offset = e.offset,
                      .pitch = e.param->cols},
            .parts = parts_of(*e.param, shards_, t_.mesh(), who, pitch)};
  }

  /// A rank's slice of a parameter in the rollout's weights.
  Side slice_of(const LocalWeight& weight, const LocalWeight::Source& source, const UnitParam& p,
                std::int32_t tensor) const {
    const Cutters cutters = cutters_of(weight);
    const auto repeat = static_cast<std::int32_t>(source.step.repeat);
    const Shift shift = shift_of(source, p);
    Piece piece = source.piece;
    piece.row_begin += p.base.row, piece.row_end += p.base.row;
    piece.col_begin += p.base.col, piece.col_end += p.base.col;
    Side out{.tensor = tensor,
             .piece = piece,
             .parts = {.who = Holds::mine,
                       .family = static_cast<GroupId>(cutters.family),
                       .count = static_cast<std::int32_t>(cutters.ranks) / repeat,
                       .repeat = repeat,
                       .rows = source.step.rows,
                       .cols = source.step.cols,
                       .last_row = p.base.row + p.whole_rows,
                       .within = {}}};
    if (source.holder < 0) return out;
    const std::int64_t columns = s_.rollout.layout.tp / s_.rollout.layout.ep,
                       last = p.base.row + shift.rows + p.whole_rows;
    out.parts.count /= static_cast<std::int32_t>(columns), out.parts.repeat = static_cast<std::int32_t>(columns);
    out.parts.rows = p.rows_of_all(), out.parts.cols = 0, out.parts.last_row = last;
    // Counted through all groups: what a group's ranks before the first one add, the shift has, too.
    if (columns > 1)
      out.parts.within = {.family = static_cast<GroupId>(Family::tp),
                          .count = static_cast<std::int32_t>(s_.rollout.layout.tp),
                          .rows = source.step.rows,
                          .cols = source.step.cols,
                          .last_row = last};
    return out;
  }

  /// An expert's place in memory has another expert in each other group of the engine's ranks. To a move, every group
  /// has as many rows as the tensor that the parameter is part of, one group's below the other's; the parameter lies in
  /// those of the group that has it, of which rank i has the part that i steps lead to from the engine's first rank.
  struct Shift {
    std::int64_t rows = 0, cols = 0;
  };
  Shift shift_of(const LocalWeight::Source& source, const UnitParam& p) const {
    if (source.holder <= 0) return {};
    const std::int64_t ranks_before = source.holder * (s_.rollout.layout.tp / s_.rollout.layout.ep);
    return {source.holder * p.rows_of_all() + ranks_before * source.step.rows, ranks_before * source.step.cols};
  }
  static Side shifted(Side side, const Shift& by) {
    side.piece.row_begin += by.rows, side.piece.row_end += by.rows;
    side.piece.col_begin += by.cols, side.piece.col_end += by.cols;
    if (side.parts.run.elements == 0 && side.parts.who != Holds::whole) side.parts.last_row += by.rows;
    if (side.parts.within.family >= 0) side.parts.within.last_row += by.rows;
    return side;
  }

  /// From the parts of this bucket into the slices of them that the rollout's weights want. Outputs are numbered in the
  /// order of `used`.
  std::vector<Move> slices(const Bucket& bucket, Holds who, std::int64_t pitch, std::vector<std::size_t>& used) const {
    std::vector<Move> moves;
    for (const Entry& e : bucket.entries)
      e.each_param([&](const UnitParam& p) {
        if (!e.param && !has(e, p)) return;
        each_slice(e, p, used, [&](const Side& slice, const Shift& by) {
          moves.push_back({shifted(rows_in_parts(e, p, who, pitch), by), slice});
        });
      });
    return moves;
  }

  /// visit(p) for the parameter and those that share its place.
  template <class Visit>
  static void each_of_place(const ShardedUnit& unit, const UnitParam& first, Visit visit) {
    if (first.spread == 1) return visit(first);
    for (const UnitParam& p : unit.params)
      if (p.expert >= 0 && p.full_offset == first.full_offset) visit(p);
  }

  /// visit(slice, where it is shifted to) for every slice of an entry's parameter among the rollout's weights, which
  /// are numbered as `used`.
  template <class Visit>
  void each_slice(const Entry& e, const UnitParam& first, std::vector<std::size_t>& used, Visit visit) const {
    each_of_place(*e.unit->unit, first, [&](const UnitParam& p) {
      const auto found = to_.find(p.parameter);
      if (found == to_.end()) return;
      for (const auto& [weight, source] : found->second) {
        auto it = std::find(used.begin(), used.end(), weight);
        if (it == used.end()) it = used.insert(used.end(), weight);
        visit(slice_of(r_.weights()[weight], *source, p, static_cast<std::int32_t>(it - used.begin())),
              shift_of(*source, p));
      }
    });
  }

  std::vector<Tensor> weights(const std::vector<std::size_t>& used) const {
    std::vector<Tensor> out;
    for (std::size_t weight : used) out.push_back(b_.whole(r_.buffer(weight)));
    return out;
  }

  void through_peers(const Bucket& bucket, const std::string& name) {
    const Packed packed = pack(bucket, name);
    const Tensor& part = packed.part;
    take_turn(packed, part.buffer);
    const auto barrier = [&](const char* what) {
      if (holders_ > 1)
        b_.communicate(OpKind::barrier, streams::control, t_.synced_family(), name + what, {part}, {part});
    };
    barrier("ready");
    std::vector<std::size_t> used;
    if (std::vector<Move> moves = slices(bucket, Holds::peers, 0, used); !moves.empty()) {
      Op& op =
          b_.communicate(OpKind::peer_copy, streams::compute, t_.synced_family(), name + "read", {part}, weights(used));
      op.moves = std::move(moves);
    }
    barrier("done");
  }

  /// A bucket of whole parameters that one stage has and all stages then have.
  Sources passed_on(const Bucket& bucket, const std::string& name) {
    const Packed packed = pack(bucket, name);
    Sources out{{packed.part}, {}, -1};
    for (const Entry& e : bucket.entries) out.of_entry.emplace_back(0, e.offset);
    take_turn(packed, packed.part.buffer);
    return out;
  }

  /// Every rank of a stage has all parameters: it takes its slices of them, and nothing is staged but what comes up
  /// from the host or from another stage.
  void from_own(const Bucket& bucket, const std::string& name) {
    const bool passes_on =
        t_.mesh().stages > 1 || std::ranges::any_of(bucket.entries, [&](const Entry& e) { return merges(e); });
    Sources from = passes_on ? passed_on(bucket, name) : from_host_ ? upload(bucket, name) : shards(bucket);
    if (!passes_on) b_.begin_call("sync.bucket", name);
    std::vector<std::size_t> used;
    std::vector<Move> moves;
    for (std::size_t i = 0; i < bucket.entries.size(); ++i) {
      const Entry& e = bucket.entries[i];
      const std::int32_t tensor = from.of_entry[i].first;
      const Piece held{e.begin, e.end, 0, e.param->cols, from.of_entry[i].second, e.param->cols};
      each_slice(e, *e.param, used, [&](const Side& slice, const Shift& by) {
        moves.push_back({shifted({tensor, held, {}}, by), slice});
      });
    }
    if (moves.empty()) return;
    b_.emit(OpKind::copy_boxes, streams::compute, name + "take", std::move(from.tensors), weights(used)).moves =
        std::move(moves);
    if (from.staged >= 0) b_.take_turn(staging_, {from.staged});
  }

  /// All-gather, then copy the slices out.
  void through_gather(const Bucket& bucket, const std::string& name) {
    const DType dtype = s_.rollout.dtype;
    const Packed packed = pack(bucket, name);
    const Tensor& part = packed.part;
    Tensor whole = part;
    if (holders_ > 1) {
      whole = b_.transient(name + "whole", dtype, {fixed(holders_ * bucket.elements)}, Category::communication);
      Op& op =
          b_.communicate(OpKind::all_gather, streams::gather, t_.synced_family(), name + "all_gather", {part}, {whole});
      with(op, Attr::padding_bytes, bucket.padding(shards_, t_.mesh()) * size_of(dtype));
    }
    take_turn(packed, whole.buffer);
    std::vector<std::size_t> used;
    std::vector<Move> moves = slices(bucket, Holds::every, bucket.elements, used);
    if (moves.empty()) return;
    b_.emit(OpKind::copy_boxes, streams::compute, name + "unpack", {whole}, weights(used)).moves = std::move(moves);
  }

  /// P5 at run time: each rank hashes what it holds of every parameter, trained and rolled out, and all learn all sums.
  /// Hashes add up over shards, so the Driver can compare tensors, whatever either side's layout (rl/sync_hashes.h).
  /// From shards on the device, all of it behind the last bucket; from the host the trained side is hashed bucket by
  /// bucket, and the sums are there from the start.
  void begin_hashes() {
    for (const SyncedUnit& u : units_)
      for (const UnitParam& p : u.unit->params) sum_of_.emplace(p.parameter, static_cast<std::int64_t>(sum_of_.size()));
    if (from_host_) make_sums();
  }
  void make_sums() {
    b_.begin_call("sync.hashes.zero", "sync.");
    sums_ = b_.transient("sync.hashes", DType::i64, {fixed(2 * num_sums())}, Category::workspace);
    b_.emit(OpKind::zero, streams::compute, "sync.hashes.zero", {}, {sums_});
  }
  std::int64_t num_sums() const { return static_cast<std::int64_t>(sum_of_.size()); }
  Tensor sum(std::int64_t i) const { return b_.view(sums_.buffer, DType::i64, {fixed(1)}, i); }

  void verify() {
    if (!from_host_) make_sums();
    for (const SyncedUnit& u : units_) {
      std::optional<Tensor> again;  // a flat unit's shard with adapters in its matrices, made once more
      if (!from_host_ && u.buffer >= 0 && merges_flat(u)) again = merged_shard(u, "sync.verify.");
      for (const UnitParam& p : u.unit->params) {
        const std::int64_t i = sum_of_.at(p.parameter);
        if (again) hash(p.parameter, {*again}, sum(i), {{held(u, p), logical(p)}});
        else if (!from_host_) hash_trained(u, p, sum(i));
        if (p.role == ParamRole::embedding && u.stage > 0) continue;  // the first stage's, tied
        hash_rollout(p, sum(num_sums() + i));
      }
    }
    b_.begin_call("sync.hashes", "sync.");
    Tensor all = sums_;
    const std::int64_t ranks = t_.mesh().ranks();
    if (ranks > 1) {
      all = b_.transient("sync.all_hashes", DType::i64, {fixed(ranks * 2 * num_sums())}, Category::communication);
      const Family everyone = t_.mesh().ranks() > t_.mesh().shards ? Family::world : Family::fsdp;
      b_.communicate(OpKind::all_gather, streams::gather, everyone, "sync.hashes.all_gather", {sums_}, {all});
    }
    if (!from_host_) b_.take_turn(staging_, {sums_.buffer, all.buffer});
    else if (ranks > 1) b_.take_turn(staging_, {all.buffer});
    b_.fetch(all, Slot::sync_hashes);
  }

  void hash(const std::string& parameter, std::vector<Tensor> inputs, const Tensor& sum, std::vector<Move> moves) {
    b_.begin_call("sync.hash", parameter);
    Op& op = b_.emit(OpKind::hash_boxes, streams::compute, parameter, std::move(inputs), {sum});
    with(op, Attr::as_dtype, static_cast<std::int64_t>(s_.rollout.dtype));
    op.moves = std::move(moves);
  }

  /// What this rank has of a parameter.
  Side held(const SyncedUnit& u, const UnitParam& p) const {
    if (holders_ > 1) return shards_of(*u.unit, p, shards_, t_.mesh(), Holds::mine);
    Side whole = local(p);
    whole.piece.offset = p.shard_offset;
    return whole;
  }

  void hash_trained(const SyncedUnit& u, const UnitParam& p, const Tensor& sum) {
    if (u.buffer < 0) return;  // another stage's
    if (s_.model.adapts(p.role)) {
      if (p.has_place()) hash_merged(u, p);
      return;
    }
    hash(p.parameter, {b_.whole(u.buffer)}, sum, {{held(u, p), logical(p)}});
  }

  /// Of the matrix with its adapter in it, made once more for all parameters that share its place.
  void hash_merged(const SyncedUnit& u, const UnitParam& p) {
    const std::string name = "sync.merged." + p.parameter;
    b_.begin_call("sync.merge", name);
    const Dim rows = fixed(p.padded_rows), cols = fixed(p.cols);
    const Tensor merged = b_.transient(name, s_.rollout.dtype, {rows, cols}, Category::communication);
    emit_merge(b_, s_.model, adapters_.at(t_.adapters_of(p)), p, {0, p.padded_rows},
               b_.view(u.buffer, b_.buffer(u.buffer).dtype, {rows, cols}, p.shard_offset), merged, name + ".merge");
    each_of_place(*u.unit, p, [&](const UnitParam& of_place) {
      Side own = held(u, of_place);
      own.piece.offset = 0;
      hash(of_place.parameter, {merged}, sum(sum_of_.at(of_place.parameter)), {{own, logical(of_place)}});
    });
  }

  void hash_rollout(const UnitParam& p, const Tensor& sum) {
    const auto found = to_.find(p.parameter);
    if (found == to_.end()) return;
    std::vector<Tensor> inputs;
    std::vector<Move> moves;
    for (const auto& [weight, source] : found->second) {
      moves.push_back({slice_of(r_.weights()[weight], *source, p, static_cast<std::int32_t>(inputs.size())),
                       shifted(logical(p), shift_of(*source, p))});
      inputs.push_back(b_.whole(r_.buffer(weight)));
    }
    hash(p.parameter, std::move(inputs), sum, std::move(moves));
  }

  const Scenario& s_;
  ProgramBuilder& b_;
  const TrainState& t_;
  const RolloutState& r_;
  bool from_host_;
  Destinations to_;
  std::vector<SyncedUnit> units_;
  std::int64_t shards_ = 1, holders_ = 1;  // of a parameter: its shards, and the ranks that have a part of one
  SlotLimitId staging_ = 0;
  GatheredAdapters adapters_;
  std::optional<SlotLimitId> whole_;            // gathered flat units
  std::map<const SyncedUnit*, Tensor> merged_;  // shards of flat units with adapters in them, in what is sent
  std::map<std::string, std::int64_t> sum_of_;  // each parameter's place among the sums of one side
  Tensor sums_;
};

}  // namespace

void lower_sync(const Scenario& s, ProgramBuilder& b, const TrainState& t, const RolloutState& r, bool from_host,
                std::int32_t phase) {
  b.begin_block(phase, "sync");
  SyncLowering(s, b, t, r, from_host).lower();
}

}  // namespace hotbunk
