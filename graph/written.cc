#include "graph/written.h"

#include <algorithm>

namespace hotbunk {

void WrittenBytes::alloc(const BoundBuffer& b) {
  for (auto* of : {&written_, &prepacked_})
    (*of)[static_cast<std::size_t>(b.section())].remove(b.offset, b.offset + b.bytes());
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
    const ByteRanges& prepacked = prepacked_[static_cast<std::size_t>(r.section)];
    if (i == 1 && op.has(Attr::prepacked)) {
      if (!prepacked.holds(r.begin, r.end())) out.emplace_back(&op.inputs[i], "not prepacked since they were written");
    } else if (prepacked.meets(r.begin, r.end())) {
      out.emplace_back(&op.inputs[i], "prepacked, as rows");
    }
  }
  return out;
}

void WrittenBytes::order(const BoundOp& bound, const Places& places) {
  const Op& op = *bound;
  const auto of = [&](const Runs& r) -> ByteRanges& { return prepacked_[static_cast<std::size_t>(r.section)]; };
  if (op.kind == OpKind::prepack) {
    const Runs r = all_of(bound, op.outputs[0]);
    return of(r).add(r.begin, r.end());
  }
  const auto meets = [&](const Tensor& t) {
    const Runs r = all_of(bound, t);
    return of(r).meets(r.begin, r.end());
  };
  const auto remove = [&](const Runs& r) {
    for (std::int64_t row = 0, at = r.begin; row < r.rows; ++row, at += r.pitch_bytes)
      of(r).remove(at, at + r.row_bytes);
  };
  if (std::ranges::any_of(op.outputs, meets)) {
    if (!writes_boxes(op.kind))
      for (const Tensor& t : op.outputs) remove(all_of(bound, t));
    else
      for (const Box& b : written_boxes(op, places))
        remove(part_of(bound, op.outputs[static_cast<std::size_t>(b.output)], b.dst_offset, b.dst_pitch, b));
  }
  if (op.kind != OpKind::copy || !meets(op.inputs[0])) return;
  const Runs from = all_of(bound, op.inputs[0]), to = all_of(bound, op.outputs[0]);
  const ByteRanges source = of(from);  // of its own: both may lie in one section
  source.each_part(from.begin, from.end(), [&](std::int64_t begin, std::int64_t end, bool prepacked) {
    if (prepacked) of(to).add(to.begin + begin - from.begin, to.begin + end - from.begin);
  });
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
