// Weight sync in flattened buckets (BACKGROUND F1, F2): FSDP2 shards, cast to the rollout dtype, into the packed and
// tensor-parallel rollout weights of the same rank.
//
//   collective  each rank casts its part of the bucket, all-gathers it, and copies its slices out of the whole bucket
//   ipc         each rank casts its part and shows it to its peers, who read exactly the slices they need: no bytes
//               cross a socket, no rank holds a whole bucket; barriers order writers, readers and the next writers
//
// A bucket holds whole rows of padded shards. A parameter larger than the bucket spreads over several.
#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"
#include "lowering/rollout.h"

namespace hotbunk {
namespace {

/// Rows [begin, end) of every rank's padded shard of one parameter.
struct Entry {
  const UnitState* unit = nullptr;
  const UnitParam* param = nullptr;
  std::int64_t begin = 0, end = 0;
  std::int64_t offset = 0;  // elements into a rank's part of the bucket
  std::int64_t elements() const { return (end - begin) * param->cols; }
};

struct Bucket {
  std::vector<Entry> entries;
  std::int64_t elements = 0;  // of one rank's part
  /// Elements of all parts that are padding: rows past the parameter's end.
  std::int64_t padding(std::int64_t world) const {
    std::int64_t n = 0;
    for (const Entry& e : entries)
      for (std::int64_t w = 0; w < world; ++w) {
        const std::int64_t real =
            std::clamp<std::int64_t>(e.param->rows - w * e.param->padded_rows - e.begin, 0, e.end - e.begin);
        n += (e.end - e.begin - real) * e.param->cols;
      }
    return n;
  }
};

/// Greedy, in the order of the units; at least one row goes into a bucket, however small the bucket is.
std::vector<Bucket> fill_buckets(const TrainState& state, std::int64_t bucket_bytes, DType dtype) {
  std::vector<Bucket> buckets(1);
  const std::int64_t capacity = std::max<std::int64_t>(1, bucket_bytes / size_of(dtype) / state.world());
  for (const UnitState& u : state.units())
    for (const UnitParam& p : u.unit.params)
      for (std::int64_t row = 0; row < p.padded_rows;) {
        std::int64_t rows = std::min(p.padded_rows - row, (capacity - buckets.back().elements) / p.cols);
        if (rows <= 0 && buckets.back().elements > 0) {
          buckets.emplace_back();
          continue;
        }
        rows = std::max<std::int64_t>(rows, 1);
        Bucket& b = buckets.back();
        b.entries.push_back({&u, &p, row, row + rows, b.elements});
        b.elements += rows * p.cols;
        row += rows;
      }
  return buckets;
}

/// Where a parameter's rectangles go on this rank.
using Destinations = std::map<std::string, std::vector<std::pair<std::size_t, const Piece*>>>;

Destinations destinations_of(const RolloutState& r) {
  Destinations out;
  for (std::size_t i = 0; i < r.weights().size(); ++i)
    for (const auto& source : r.weights()[i].sources) out[source.parameter].emplace_back(i, &source.piece);
  return out;
}

class SyncLowering {
 public:
  SyncLowering(const Scenario& s, ProgramBuilder& b, const TrainState& t, const RolloutState& r, std::int64_t rank)
      : s_(s), b_(b), t_(t), r_(r), rank_(rank), to_(destinations_of(r)) {
    staging_ = b.limit_slots("sync.staging", 1);  // all have read a bucket before the next is packed
  }

  void lower() {
    zero_padding();
    const std::vector<Bucket> buckets = fill_buckets(t_, s_.sync.bucket_bytes, s_.rollout.dtype);
    for (std::size_t i = 0; i < buckets.size(); ++i) {
      const std::string name = fmt::format("sync.bucket{}.", i);
      if (s_.sync.transport == SyncTransport::ipc || t_.world() == 1) through_peers(buckets[i], name);
      else through_gather(buckets[i], name);
    }
    if (s_.sync.verify) verify();
  }

 private:
  /// A vocabulary that does not divide by tp leaves rows behind the last rank's own that no parameter fills. Sampling
  /// ignores their logits, but what lies in fresh memory must not look like a fault, or differ from run to run.
  void zero_padding() {
    for (std::size_t i = 0; i < r_.weights().size(); ++i) {
      const LocalWeight& w = r_.weights()[i];
      std::int64_t filled = 0;
      for (const auto& source : w.sources)
        filled += (source.piece.row_end - source.piece.row_begin) * (source.piece.col_end - source.piece.col_begin);
      if (filled == w.elements()) continue;
      HB_CHECK(w.sources.size() <= 1 && filled % w.cols == 0, "'{}' is padded elsewhere than in its last rows", w.name);
      b_.emit(OpKind::zero, StreamId::compute, "sync.padding." + w.name, {},
              {b_.view(r_.buffer(i), s_.rollout.dtype, {fixed(w.elements() - filled)}, filled)});
    }
  }

  Tensor pack(const Bucket& bucket, const std::string& name) {
    const Tensor part =
        b_.transient(name + "part", s_.rollout.dtype, {fixed(bucket.elements)}, Category::communication);
    std::vector<Tensor> shards;
    std::vector<Box> boxes;
    for (const Entry& e : bucket.entries) {
      shards.push_back(b_.whole(e.unit->shard));
      boxes.push_back({.src_offset = e.param->shard_offset + e.begin * e.param->cols,
                       .src_pitch = e.elements(),
                       .dst_offset = e.offset,
                       .dst_pitch = e.elements(),
                       .rows = 1,
                       .cols = e.elements(),
                       .peer = -1,
                       .input = static_cast<std::int32_t>(shards.size()) - 1,
                       .output = 0});
    }
    b_.emit(OpKind::copy_boxes, StreamId::compute, name + "pack", std::move(shards), {part}).boxes = std::move(boxes);
    return part;
  }

  /// The slices of this bucket that this rank's rollout weights want, as copies out of per-rank parts that lie
  /// `part_pitch` elements apart (0: each in its own rank's memory). Outputs are numbered in the order of `used`.
  std::vector<Box> slices(const Bucket& bucket, std::int64_t part_pitch, bool from_peers,
                          std::vector<std::size_t>& used) {
    std::vector<Box> boxes;
    const auto output = [&](std::size_t weight) {
      auto it = std::find(used.begin(), used.end(), weight);
      if (it == used.end()) it = used.insert(used.end(), weight);
      return static_cast<std::int32_t>(it - used.begin());
    };
    for (const Entry& e : bucket.entries) {
      const auto found = to_.find(e.param->parameter);
      if (found == to_.end()) continue;
      for (const auto& [weight, piece] : found->second)
        for (std::int64_t w = 0; w < t_.world(); ++w) {
          const std::int64_t first = w * e.param->padded_rows + e.begin;  // global row of the entry on rank w
          const std::int64_t begin = std::max(first, piece->row_begin);
          const std::int64_t end = std::min({first + e.end - e.begin, piece->row_end, e.param->rows});
          if (begin >= end) continue;
          boxes.push_back({.src_offset = w * part_pitch + e.offset + (begin - first) * e.param->cols + piece->col_begin,
                           .src_pitch = e.param->cols,
                           .dst_offset = piece->offset + (begin - piece->row_begin) * piece->pitch,
                           .dst_pitch = piece->pitch,
                           .rows = end - begin,
                           .cols = piece->col_end - piece->col_begin,
                           .peer = from_peers && w != rank_ ? static_cast<std::int32_t>(w) : -1,
                           .input = 0,
                           .output = output(weight)});
        }
    }
    return boxes;
  }

  std::vector<Tensor> weights(const std::vector<std::size_t>& used) const {
    std::vector<Tensor> out;
    for (std::size_t weight : used) out.push_back(b_.whole(r_.buffer(weight)));
    return out;
  }

  void through_peers(const Bucket& bucket, const std::string& name) {
    const Tensor part = pack(bucket, name);
    b_.take_turn(staging_, {part.buffer});
    const auto barrier = [&](const char* what) {
      if (t_.world() > 1) b_.communicate(OpKind::barrier, StreamId::control, Family::fsdp, name + what, {part}, {part});
    };
    barrier("ready");
    std::vector<std::size_t> used;
    std::vector<Box> boxes = slices(bucket, 0, true, used);
    if (!boxes.empty()) {
      Op& op = b_.communicate(OpKind::peer_copy, StreamId::compute, Family::fsdp, name + "read", {part}, weights(used));
      op.boxes = std::move(boxes);
    }
    barrier("done");
  }

  /// All-gather, then copy the slices out.
  void through_gather(const Bucket& bucket, const std::string& name) {
    const DType dtype = s_.rollout.dtype;
    const Tensor part = pack(bucket, name);
    Tensor whole = part;
    if (t_.world() > 1) {
      whole = b_.transient(name + "whole", dtype, {fixed(t_.world() * bucket.elements)}, Category::communication);
      Op& op = b_.communicate(OpKind::all_gather, StreamId::gather, Family::fsdp, name + "all_gather", {part}, {whole});
      with(op, Attr::padding_bytes, bucket.padding(t_.world()) * size_of(dtype));
    }
    b_.take_turn(staging_, {part.buffer, whole.buffer});
    std::vector<std::size_t> used;
    std::vector<Box> boxes = slices(bucket, bucket.elements, false, used);
    if (boxes.empty()) return;
    b_.emit(OpKind::copy_boxes, StreamId::compute, name + "unpack", {whole}, weights(used)).boxes = std::move(boxes);
  }

  /// P5 at run time: each rank hashes what it holds of every parameter, trained and rolled out, and all learn all sums.
  /// Hashes add up over shards, so the Driver can compare tensors, whatever either side's layout (rl/sync_hashes.h).
  void verify() {
    std::int64_t n = 0;
    for (const UnitState& u : t_.units()) n += static_cast<std::int64_t>(u.unit.params.size());
    const Tensor sums = b_.transient("sync.hashes", DType::i64, {fixed(2 * n)}, Category::workspace);
    b_.emit(OpKind::zero, StreamId::compute, "sync.hashes.zero", {}, {sums});
    std::int64_t i = 0;
    for (const UnitState& u : t_.units())
      for (const UnitParam& p : u.unit.params) {
        hash_trained(u, p, b_.view(sums.buffer, DType::i64, {fixed(1)}, i));
        hash_rollout(p, b_.view(sums.buffer, DType::i64, {fixed(1)}, n + i));
        ++i;
      }
    Tensor all = sums;
    if (t_.world() > 1) {
      all = b_.transient("sync.all_hashes", DType::i64, {fixed(t_.world() * 2 * n)}, Category::communication);
      b_.communicate(OpKind::all_gather, StreamId::gather, Family::fsdp, "sync.hashes.all_gather", {sums}, {all});
    }
    b_.take_turn(staging_, {sums.buffer, all.buffer});
    b_.fetch(all, Slot::sync_hashes);
  }

  void hash(const std::string& parameter, std::vector<Tensor> inputs, const Tensor& sum, std::vector<Box> boxes) {
    Op& op = b_.emit(OpKind::hash_boxes, StreamId::compute, parameter, std::move(inputs), {sum});
    with(op, Attr::as_dtype, static_cast<std::int64_t>(s_.rollout.dtype));
    op.boxes = std::move(boxes);
  }

  void hash_trained(const UnitState& u, const UnitParam& p, const Tensor& sum) {
    if (p.owned_elements() == 0) return;
    const Box own{.src_offset = p.shard_offset,
                  .src_pitch = p.owned_elements(),
                  .dst_offset = p.shard.begin * p.cols,
                  .dst_pitch = p.owned_elements(),
                  .rows = 1,
                  .cols = p.owned_elements()};
    hash(p.parameter, {b_.whole(u.shard)}, sum, {own});
  }

  void hash_rollout(const UnitParam& p, const Tensor& sum) {
    const auto found = to_.find(p.parameter);
    if (found == to_.end()) return;
    std::vector<Tensor> inputs;
    std::vector<Box> boxes;
    for (const auto& [weight, piece] : found->second) {
      inputs.push_back(b_.whole(r_.buffer(weight)));
      boxes.push_back({.src_offset = piece->offset,
                       .src_pitch = piece->pitch,
                       .dst_offset = piece->row_begin * p.cols + piece->col_begin,
                       .dst_pitch = p.cols,
                       .rows = piece->row_end - piece->row_begin,
                       .cols = piece->col_end - piece->col_begin,
                       .peer = -1,
                       .input = static_cast<std::int32_t>(inputs.size()) - 1});
    }
    hash(p.parameter, std::move(inputs), sum, std::move(boxes));
  }

  const Scenario& s_;
  ProgramBuilder& b_;
  const TrainState& t_;
  const RolloutState& r_;
  std::int64_t rank_;
  Destinations to_;
  SlotLimitId staging_ = 0;
};

}  // namespace

void lower_sync(const Scenario& s, ProgramBuilder& b, const TrainState& t, const RolloutState& r, std::int64_t rank,
                std::int32_t phase) {
  b.begin_block(phase, "sync");
  SyncLowering(s, b, t, r, rank).lower();
}

}  // namespace hotbunk
