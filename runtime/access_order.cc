#include "runtime/access_order.h"

#include <fmt/format.h>

#include <algorithm>

#include "graph/print.h"

namespace hotbunk {
namespace {

/// The op's tensors that have bytes of the access, as "writes 'grad' bytes 0..96".
std::string tensors_in(const BoundOp& op, const Access& a) {
  std::string out;
  const auto side = [&](const std::vector<Tensor>& tensors, const char* verb) {
    for (const Tensor& t : tensors) {
      const BoundBuffer b = op.buffer(t);
      const std::int64_t begin = op.begin_of(t), end = begin + t.capacity_bytes();
      if (b.section() == a.section && begin < a.end && end > a.begin)
        out += fmt::format("{}{} '{}' at bytes {}..{}", out.empty() ? "" : ", ", verb, b.name(), begin, end);
    }
  };
  side(op->inputs, "reads");
  side(op->outputs, "writes");
  return out;
}

}  // namespace

AccessOrder::AccessOrder(const Plan& plan, const Program& program)
    : plan_(plan), num_events_(static_cast<std::size_t>(std::max(program.num_events, 0))) {
  join();
}

void AccessOrder::join() {
  clocks_.fill(before_all);
  recorded_.assign(num_events_, before_all);
  conflicts_ = {};
  touched_.clear();
}

void AccessOrder::record(StreamId stream, EventId event) {
  recorded_[static_cast<std::size_t>(event)] = clocks_[at(stream)];
}

void AccessOrder::wait(StreamId stream, EventId event) {
  merge(clocks_[at(stream)], recorded_[static_cast<std::size_t>(event)]);
}

std::optional<std::string> AccessOrder::touch(const BoundOp& op, const Sizes& sizes) {
  const auto index = static_cast<std::int32_t>(touched_.size());
  touched_.push_back(op);
  Clock& mine = clocks_[at(op->stream)];
  std::optional<std::string> race;
  each_actual_access(op, sizes, [&](const Access& a) {
    conflicts_.touch(a, op->stream, index, [&](StreamId stream, std::int32_t earlier) {
      if (race || earlier == index || stream == op->stream || mine[at(stream)] >= earlier) return;
      race = describe(touched_[static_cast<std::size_t>(earlier)], op, a);
    });
  });
  mine[at(op->stream)] = index;
  return race;
}

std::string AccessOrder::describe(const BoundOp& earlier, const BoundOp& later, const Access& a) const {
  const auto said = [&](const BoundOp& op) {
    return fmt::format("{} '{}' on stream {} ({})", name_of(op->kind), label_of(op), plan_.stream(op->stream).name,
                       tensors_in(op, a));
  };
  return fmt::format("{} and {} race for bytes {}..{} of {}: no event orders them", said(earlier), said(later), a.begin,
                     a.end, later.program->section(a.section).name);
}

}  // namespace hotbunk
