#include "graph/written.h"

#include <algorithm>
#include <iterator>

namespace hotbunk {

void WrittenBytes::alloc(const Buffer& b) {
  if (b.bytes() == 0) return;
  auto& written = written_[static_cast<std::size_t>(b.section)];
  const std::int64_t begin = b.offset, end = b.offset + b.bytes();
  auto it = written.upper_bound(begin);
  if (it != written.begin() && std::prev(it)->second > begin) --it;
  while (it != written.end() && it->first < end) {
    const auto [from, to] = *it;
    it = written.erase(it);
    if (from < begin) written.emplace_hint(it, from, begin);
    if (to > end) it = written.emplace_hint(it, end, to);
  }
}

std::vector<const Tensor*> WrittenBytes::run(const Op& op) {
  std::vector<const Tensor*> unwritten;
  if (op.kind == OpKind::barrier) return unwritten;  // its tensors say what it orders
  const auto read = [&](const Tensor& t, const Runs& runs) {
    if (!holds(runs) && !std::ranges::count(unwritten, &t)) unwritten.push_back(&t);
  };
  const bool moves_boxes = op.kind == OpKind::copy_boxes || op.kind == OpKind::peer_copy;
  if (op.kind == OpKind::copy_boxes || op.kind == OpKind::hash_boxes)
    for (const Box& b : op.boxes) {
      const Tensor& from = op.inputs[static_cast<std::size_t>(b.input)];
      read(from, part_of(from, b.src_offset, b.src_pitch, b));
    }
  else  // of a peer_copy's input, the peers read at the same time what this rank does not
    for (const Tensor& t : op.inputs) read(t, all_of(t));
  if (moves_boxes)
    for (const Box& b : op.boxes)
      add(part_of(op.outputs[static_cast<std::size_t>(b.output)], b.dst_offset, b.dst_pitch, b));
  else
    for (const Tensor& t : op.outputs) add(all_of(t));
  return unwritten;
}

WrittenBytes::Runs WrittenBytes::all_of(const Tensor& t) const {
  const Buffer& b = program_.buffers[static_cast<std::size_t>(t.buffer)];
  return {b.section, b.offset + t.offset_bytes, t.capacity_bytes(), 0, 1};
}

WrittenBytes::Runs WrittenBytes::part_of(const Tensor& t, std::int64_t offset, std::int64_t pitch,
                                         const Box& box) const {
  const std::int64_t element = size_of(t.dtype);
  Runs r = all_of(t);
  r.begin += offset * element;
  const bool whole = pitch == box.cols;  // rows without a gap
  r.row_bytes = (whole ? box.rows * box.cols : box.cols) * element;
  r.pitch_bytes = pitch * element;
  r.rows = whole ? 1 : box.rows;
  return r;
}

bool WrittenBytes::holds(Section s, std::int64_t begin, std::int64_t end) const {
  if (begin >= end) return true;
  const auto& written = written_[static_cast<std::size_t>(s)];
  const auto it = written.upper_bound(begin);
  return it != written.begin() && std::prev(it)->second >= end;
}

/// Row by row only where the rows and what lies between them are not written as one.
bool WrittenBytes::holds(const Runs& r) const {
  if (holds(r.section, r.begin, r.end())) return true;
  for (std::int64_t row = 0, at = r.begin; row < r.rows; ++row, at += r.pitch_bytes)
    if (!holds(r.section, at, at + r.row_bytes)) return false;
  return true;
}

void WrittenBytes::add(Section s, std::int64_t begin, std::int64_t end) {
  if (begin >= end) return;
  auto& written = written_[static_cast<std::size_t>(s)];
  auto next = written.upper_bound(begin);
  const bool grows = next != written.begin() && std::prev(next)->second >= begin;
  const auto it = grows ? std::prev(next) : written.emplace_hint(next, begin, end);
  for (; next != written.end() && next->first <= end; next = written.erase(next)) end = std::max(end, next->second);
  it->second = std::max(it->second, end);
}

void WrittenBytes::add(const Runs& r) {
  if (r.rows > 1 && holds(r.section, r.begin, r.end())) return;
  for (std::int64_t row = 0, at = r.begin; row < r.rows; ++row, at += r.pitch_bytes)
    add(r.section, at, at + r.row_bytes);
}

}  // namespace hotbunk
