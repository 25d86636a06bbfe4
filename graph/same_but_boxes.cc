#include "graph/same_but_boxes.h"

#include <algorithm>

namespace hotbunk {

bool same_but_boxes(const Program& a, const Program& b) {
  const auto same_buffer = [](const Buffer& x, const Buffer& y) {
    return x.section == y.section && x.offset == y.offset && x.elements == y.elements && x.dtype == y.dtype;
  };
  const auto same_op = [](const Op& x, const Op& y) {
    return x.kind == y.kind && x.stream == y.stream && x.group == y.group && x.buffer == y.buffer &&
           x.event == y.event && x.section == y.section && x.map_begin == y.map_begin && x.map_end == y.map_end &&
           x.inputs == y.inputs && x.outputs == y.outputs;
  };
  const auto same_block = [&](const Block& x, const Block& y) {
    return x.name == y.name && x.enters == y.enters && x.section == y.section &&
           (x.ops.shares(y.ops) || std::ranges::equal(x.ops, y.ops, same_op));
  };
  const auto same_phase = [&](const std::vector<Block>& x, const std::vector<Block>& y) {
    return std::ranges::equal(x, y, same_block);
  };
  return a.section_bytes == b.section_bytes && a.num_events == b.num_events && a.slot_limits == b.slot_limits &&
         std::ranges::equal(a.phases, b.phases, same_phase) &&
         (a.buffers.shares(b.buffers) || std::ranges::equal(a.buffers, b.buffers, same_buffer));
}

}  // namespace hotbunk
