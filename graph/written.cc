#include "graph/written.h"

#include <algorithm>

namespace hotbunk {

namespace {

/// A matrix, as bytes [begin, end) of a section.
PackedMatrices::Packed matrix_at(std::int64_t begin, std::int64_t end, const Tensor& w) {
  return {begin, end, w.shape[0].size, w.shape[1].size, w.dtype};
}

}  // namespace

/// The first that ends behind `at`.
std::size_t PackedMatrices::first_behind(std::int64_t at) const {
  return static_cast<std::size_t>(std::ranges::upper_bound(all_, at, {}, &Packed::end) - all_.begin());
}

void PackedMatrices::add(const Packed& one) {
  if (one.begin >= one.end) return;
  all_.insert(all_.begin() + static_cast<std::ptrdiff_t>(first_behind(one.begin)), one);
}

bool PackedMatrices::meets(std::int64_t begin, std::int64_t end) const {
  const std::size_t i = first_behind(begin);
  return begin < end && i < all_.size() && all_[i].begin < end;
}

bool PackedMatrices::holds(std::int64_t begin, std::int64_t end) const {
  for (std::size_t i = first_behind(begin); begin < end; begin = all_[i++].end)
    if (i == all_.size() || all_[i].begin > begin) return false;
  return true;
}

bool PackedMatrices::holds(const Packed& one) const {
  const std::size_t i = first_behind(one.begin);
  return one.begin >= one.end || (i < all_.size() && all_[i] == one);
}

std::vector<PackedMatrices::Packed> PackedMatrices::within(std::int64_t begin, std::int64_t end) const {
  std::vector<Packed> out;
  for (std::size_t i = first_behind(begin); i < all_.size() && all_[i].begin < end; ++i) {
    const bool whole = all_[i].begin >= begin && all_[i].end <= end;
    out.push_back({std::max(all_[i].begin, begin), std::min(all_[i].end, end), whole ? all_[i].rows : 0, all_[i].cols,
                   all_[i].dtype});
  }
  return out;
}

void PackedMatrices::remove(std::int64_t begin, std::int64_t end) {
  if (!meets(begin, end)) return;
  const auto first = all_.begin() + static_cast<std::ptrdiff_t>(first_behind(begin));
  const auto last = std::ranges::lower_bound(first, all_.end(), end, {}, &Packed::begin);
  std::vector<Packed> left;  // in front of what is removed, and behind it
  if (first->begin < begin) left.push_back({first->begin, begin, 0, first->cols, first->dtype});
  if (const Packed& at_end = *std::prev(last); at_end.end > end)
    left.push_back({end, at_end.end, 0, at_end.cols, at_end.dtype});
  const auto at = all_.erase(first, last);
  all_.insert(at, left.begin(), left.end());
}

void WrittenBytes::alloc(const BoundBuffer& b) {
  const auto section = static_cast<std::size_t>(b.section());
  written_[section].remove(b.offset, b.offset + b.bytes());
  packed_[section].remove(b.offset, b.offset + b.bytes());
}

std::vector<const Tensor*> WrittenBytes::unwritten(const BoundOp& bound, const Places& places) const {
  const Op& op = *bound;
  std::vector<const Tensor*> out;
  if (op.kind == OpKind::barrier) return out;  // its tensors say what it orders
  if (op.kind == OpKind::broadcast && places[static_cast<std::size_t>(op.group)] != op.integer(Attr::src_rank, 0))
    return out;  // it is read at one place
  const auto unwritten = [&](const Tensor& t) { return !holds(all_of(bound, t)); };
  // Of a peer_copy's input, the peers read at the same time what this rank does not.
  if (!reads_boxes(op.kind)) {
    for (const Tensor& t : op.inputs)
      if (unwritten(t)) out.push_back(&t);
    return out;
  }
  if (std::ranges::none_of(op.inputs, unwritten)) return out;
  for (const Box& b : boxes_of(op, places)) {
    const Tensor& from = op.inputs[static_cast<std::size_t>(b.input)];
    if (!holds(part_of(bound, from, b.src_offset, b.src_pitch, b)) && !std::ranges::count(out, &from))
      out.push_back(&from);
  }
  return out;
}

void WrittenBytes::write(const BoundOp& bound, const Places& places) {
  const Op& op = *bound;
  if (op.kind == OpKind::barrier) return;
  order(bound, places);
  if (!writes_boxes(op.kind)) {
    for (const Tensor& t : op.outputs) add(all_of(bound, t));
    return;
  }
  if (std::ranges::all_of(op.outputs, [&](const Tensor& t) { return holds(all_of(bound, t)); })) return;
  for (const Box& b : written_boxes(op, places))
    add(part_of(bound, op.outputs[static_cast<std::size_t>(b.output)], b.dst_offset, b.dst_pitch, b));
}

std::vector<std::pair<const Tensor*, std::string_view>> WrittenBytes::misread(const BoundOp& bound) const {
  const Op& op = *bound;
  std::vector<std::pair<const Tensor*, std::string_view>> out;
  if (op.kind == OpKind::barrier || op.kind == OpKind::copy) return out;
  for (std::size_t i = 0; i < op.inputs.size(); ++i) {
    const Runs r = all_of(bound, op.inputs[i]);
    const PackedMatrices& packed = packed_[static_cast<std::size_t>(r.section)];
    if (i == 1 && op.has(Attr::prepacked)) {
      if (packed.holds(matrix_at(r.begin, r.end(), op.inputs[i]))) continue;
      out.emplace_back(&op.inputs[i], packed.holds(r.begin, r.end()) ? "prepacked, but not as this matrix"
                                                                     : "not prepacked since they were written");
    } else if (packed.meets(r.begin, r.end())) {
      out.emplace_back(&op.inputs[i], "prepacked, as rows");
    }
  }
  return out;
}

void WrittenBytes::order(const BoundOp& bound, const Places& places) {
  const Op& op = *bound;
  const auto of = [&](const Runs& r) -> PackedMatrices& { return packed_[static_cast<std::size_t>(r.section)]; };
  if (op.kind == OpKind::prepack) {
    const Runs r = all_of(bound, op.outputs[0]);
    of(r).remove(r.begin, r.end());  // packed twice: a fault of its own
    return of(r).add(matrix_at(r.begin, r.end(), op.outputs[0]));
  }
  const auto meets = [&](const Tensor& t) {
    const Runs r = all_of(bound, t);
    return of(r).meets(r.begin, r.end());
  };
  const auto remove = [&](const Runs& r) {
    for (std::int64_t row = 0, at = r.begin; row < r.rows; ++row, at += r.pitch_bytes)
      of(r).remove(at, at + r.row_bytes);
  };
  std::vector<PackedMatrices::Packed> before;  // of what is copied: it may lie in the same section
  if (op.kind == OpKind::copy && meets(op.inputs[0])) {
    const Runs from = all_of(bound, op.inputs[0]);
    before = of(from).within(from.begin, from.end());
  }
  if (std::ranges::any_of(op.outputs, meets)) {
    if (!writes_boxes(op.kind))
      for (const Tensor& t : op.outputs) remove(all_of(bound, t));
    else
      for (const Box& b : written_boxes(op, places))
        remove(part_of(bound, op.outputs[static_cast<std::size_t>(b.output)], b.dst_offset, b.dst_pitch, b));
  }
  if (op.kind != OpKind::copy) return;
  const Runs from = all_of(bound, op.inputs[0]), to = all_of(bound, op.outputs[0]);
  for (PackedMatrices::Packed one : before) {
    one.begin += to.begin - from.begin, one.end += to.begin - from.begin;
    of(to).add(one);
  }
}

WrittenBytes::Runs WrittenBytes::all_of(const BoundOp& op, const Tensor& t) {
  return {op.buffer(t).section(), op.begin_of(t), t.capacity_bytes(), 0, 1};
}

WrittenBytes::Runs WrittenBytes::part_of(const BoundOp& op, const Tensor& t, std::int64_t offset, std::int64_t pitch,
                                         const Box& box) {
  const std::int64_t element = size_of(t.dtype);
  Runs r = all_of(op, t);
  r.begin += offset * element;
  const bool whole = pitch == box.cols;  // rows without a gap
  r.row_bytes = (whole ? box.rows * box.cols : box.cols) * element;
  r.pitch_bytes = pitch * element;
  r.rows = whole ? 1 : box.rows;
  return r;
}

/// Row by row only where the rows and what lies between them are not written as one.
bool WrittenBytes::holds(const Runs& r) const {
  const ByteRanges& written = written_[static_cast<std::size_t>(r.section)];
  if (written.holds(r.begin, r.end())) return true;
  for (std::int64_t row = 0, at = r.begin; row < r.rows; ++row, at += r.pitch_bytes)
    if (!written.holds(at, at + r.row_bytes)) return false;
  return true;
}

void WrittenBytes::add(const Runs& r) {
  ByteRanges& written = written_[static_cast<std::size_t>(r.section)];
  if (r.rows > 1 && written.holds(r.begin, r.end())) return;
  for (std::int64_t row = 0, at = r.begin; row < r.rows; ++row, at += r.pitch_bytes) written.add(at, at + r.row_bytes);
}

}  // namespace hotbunk
