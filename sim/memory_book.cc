#include "sim/memory_book.h"

#include <algorithm>

#include "base/check.h"
#include "trace/capacity.h"

namespace hotbunk {
namespace {

bool covers(const std::map<std::int64_t, std::int64_t>& ranges, std::int64_t begin, std::int64_t end) {
  auto after = ranges.upper_bound(begin);
  return after != ranges.begin() && std::prev(after)->second >= end;  // neighbours are merged: one range or none
}

}  // namespace

MemoryBook::MemoryBook(const Plan& plan, Rank rank, bool enforce_capacity)
    : plan_(plan),
      program_(plan.program(rank)),
      rank_(rank),
      enforce_capacity_(enforce_capacity),
      live_(program_.buffers.size()),
      mapped_(program_.sections.size()) {}

void MemoryBook::enter(std::int32_t step, std::int16_t phase) {
  step_ = step;
  phase_ = phase;
  meter_.enter(step, phase);
}

std::string MemoryBook::at(const BoundOp& op) const {
  const std::string phase = phase_ < 0 ? "-" : plan_.phases[static_cast<std::size_t>(phase_)].name;
  return fmt::format("rank {}, phase {}, step {}, {} '{}'", rank_, phase, step_, name_of(op->kind), op.name());
}

void MemoryBook::alloc(const BoundOp& op, const BoundBuffer& b) {
  if (b.is_local()) {
    HB_CHECK(std::ranges::none_of(locals_, [&](const BoundBuffer& l) { return l.buffer == b.buffer; }),
             "{}: local '{}' is live already", at(op), b.name());
    locals_.push_back(b);
  } else {
    HB_CHECK(!live_[static_cast<std::size_t>(b.id)], "{}: buffer '{}' is live already", at(op), b.name());
    live_[static_cast<std::size_t>(b.id)] = true;
  }
  HB_CHECK(b.bytes() == 0 || covers(ranges(b.section()), b.offset, b.offset + b.bytes()),
           "{}: buffer '{}' at [{}, {}) of {} is not wholly mapped", at(op), b.name(), b.offset, b.offset + b.bytes(),
           b.section_name());
  meter_.add_live(b.space(), b.category(), b.bytes());
}

void MemoryBook::free(const BoundOp& op, const BoundBuffer& b) {
  if (b.is_local()) {
    const auto local = std::ranges::find(locals_, b.buffer, &BoundBuffer::buffer);
    HB_CHECK(local != locals_.end(), "{}: local '{}' is not live", at(op), b.name());
    *local = locals_.back(), locals_.pop_back();
  } else {
    HB_CHECK(live_[static_cast<std::size_t>(b.id)], "{}: buffer '{}' is not live", at(op), b.name());
    live_[static_cast<std::size_t>(b.id)] = false;
  }
  meter_.add_live(b.space(), b.category(), -b.bytes());
}

void MemoryBook::check_range(const BoundOp& op) const {
  HB_CHECK(op->map_begin >= 0 && op->map_begin <= op->map_end && op->map_begin % plan_.chunk_bytes == 0 &&
               op->map_end % plan_.chunk_bytes == 0,
           "{}: [{}, {}) of {} is no range of {} B chunks", at(op), op->map_begin, op->map_end, op.section().name,
           plan_.chunk_bytes);
}

void MemoryBook::play(const BlockMemory& block) {
  const auto flip = [&](const std::vector<BufferId>& buffers, bool live) {
    for (const BufferId id : buffers) {
      HB_CHECK(live_[static_cast<std::size_t>(id)] != live, "rank {}, step {}: buffer '{}' is {} already", rank_, step_,
               program_.buffers[static_cast<std::size_t>(id)].name, live ? "live" : "free");
      live_[static_cast<std::size_t>(id)] = live;
    }
  };
  flip(block.becomes_live, true);
  flip(block.becomes_free, false);
  meter_.add_live(block.whole);
}

Status MemoryBook::map(const BoundOp& op) {
  check_range(op);
  if (op->map_begin == op->map_end) return {};
  Ranges& held = ranges(op->section);
  auto next = held.lower_bound(op->map_begin);
  const bool on_next = next != held.end() && next->first < op->map_end;
  const bool on_previous = next != held.begin() && std::prev(next)->second > op->map_begin;
  HB_CHECK(!on_next && !on_previous, "{}: part of [{}, {}) of {} is mapped already", at(op), op->map_begin, op->map_end,
           op.section().name);

  const Space space = op.section().space;
  const std::int64_t bytes = op->map_end - op->map_begin;
  if (const std::int64_t most = mappable_bytes(plan_, space);
      enforce_capacity_ && most >= 0 && meter_.mapped(space) + bytes > most)
    return fail(does_not_fit(
        plan_, {.rank = rank_, .step = step_, .phase = phase_, .op = op, .mapped_bytes = meter_.mapped(space)},
        [this](const Buffer& b) { return live_[static_cast<std::size_t>(&b - program_.buffers.data())]; }));

  auto range = held.emplace_hint(next, op->map_begin, op->map_end);
  if (next != held.end() && next->first == op->map_end) {
    range->second = next->second;
    held.erase(next);
  }
  if (range != held.begin() && std::prev(range)->second == op->map_begin) {
    std::prev(range)->second = range->second;
    held.erase(range);
  }
  meter_.add_mapped(space, bytes);
  return {};
}

void MemoryBook::unmap(const BoundOp& op) {
  check_range(op);
  if (op->map_begin == op->map_end) return;
  Ranges& held = ranges(op->section);
  HB_CHECK(covers(held, op->map_begin, op->map_end), "{}: part of [{}, {}) of {} is not mapped", at(op), op->map_begin,
           op->map_end, op.section().name);
  for (std::size_t id = 0; id < live_.size(); ++id) {
    const Buffer& b = program_.buffers[id];
    HB_CHECK(!live_[id] || b.section != op->section || b.offset + b.bytes() <= op->map_begin || b.offset >= op->map_end,
             "{}: live buffer '{}' lies on [{}, {}) of {}", at(op), b.name, op->map_begin, op->map_end,
             op.section().name);
  }
  for (const BoundBuffer& b : locals_)
    HB_CHECK(op->section != transient_section || b.offset + b.bytes() <= op->map_begin || b.offset >= op->map_end,
             "{}: live local '{}' lies on [{}, {}) of {}", at(op), b.name(), op->map_begin, op->map_end,
             op.section().name);
  auto range = std::prev(held.upper_bound(op->map_begin));
  const auto [begin, end] = *range;
  held.erase(range);
  if (begin < op->map_begin) held.emplace(begin, op->map_begin);
  if (op->map_end < end) held.emplace(op->map_end, end);
  meter_.add_mapped(op.section().space, op->map_begin - op->map_end);
}

}  // namespace hotbunk
