#include "sim/memory_book.h"

#include <algorithm>

#include "base/check.h"
#include "base/format.h"

namespace hotbunk {
namespace {

bool covers(const std::map<std::int64_t, std::int64_t>& ranges, std::int64_t begin, std::int64_t end) {
  auto after = ranges.upper_bound(begin);
  return after != ranges.begin() && std::prev(after)->second >= end;  // neighbours are merged: one range or none
}

std::string bytes_text(std::int64_t bytes) {
  return fmt::format("{} ({} B)", format_bytes(static_cast<double>(bytes)), bytes);
}

}  // namespace

MemoryBook::MemoryBook(const Plan& plan, Rank rank, bool enforce_capacity)
    : plan_(plan),
      program_(plan.program(rank)),
      rank_(rank),
      enforce_capacity_(enforce_capacity),
      live_(program_.buffers.size()),
      mapped_(num_sections) {}

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
    HB_CHECK(b.bytes() == 0 || locals_.emplace(b.offset, b).second, "{}: a local is live where '{}' begins", at(op),
             b.name());
  } else {
    HB_CHECK(!live_[static_cast<std::size_t>(b.id)], "{}: buffer '{}' is live already", at(op), b.name());
    live_[static_cast<std::size_t>(b.id)] = true;
  }
  HB_CHECK(b.bytes() == 0 || covers(ranges(b.section()), b.offset, b.offset + b.bytes()),
           "{}: buffer '{}' at [{}, {}) of {} is not wholly mapped", at(op), b.name(), b.offset, b.offset + b.bytes(),
           name_of(b.section()));
  meter_.add_live(space_of(b.section()), b.category(), b.bytes());
}

void MemoryBook::free(const BoundOp& op, const BoundBuffer& b) {
  if (b.is_local()) {
    HB_CHECK(b.bytes() == 0 || locals_.erase(b.offset) == 1, "{}: local '{}' is not live", at(op), b.name());
  } else {
    HB_CHECK(live_[static_cast<std::size_t>(b.id)], "{}: buffer '{}' is not live", at(op), b.name());
    live_[static_cast<std::size_t>(b.id)] = false;
  }
  meter_.add_live(space_of(b.section()), b.category(), -b.bytes());
}

void MemoryBook::check_range(const BoundOp& op) const {
  HB_CHECK(op->map_begin >= 0 && op->map_begin <= op->map_end && op->map_begin % plan_.chunk_bytes == 0 &&
               op->map_end % plan_.chunk_bytes == 0,
           "{}: [{}, {}) of {} is no range of {} B chunks", at(op), op->map_begin, op->map_end, name_of(op->section),
           plan_.chunk_bytes);
}

Status MemoryBook::map(const BoundOp& op) {
  check_range(op);
  if (op->map_begin == op->map_end) return {};
  Ranges& held = ranges(op->section);
  auto next = held.lower_bound(op->map_begin);
  const bool on_next = next != held.end() && next->first < op->map_end;
  const bool on_previous = next != held.begin() && std::prev(next)->second > op->map_begin;
  HB_CHECK(!on_next && !on_previous, "{}: part of [{}, {}) of {} is mapped already", at(op), op->map_begin, op->map_end,
           name_of(op->section));

  const Space space = space_of(op->section);
  const std::int64_t bytes = op->map_end - op->map_begin;
  const std::int64_t overhead = space == Space::device ? plan_.overhead_bytes : 0;
  const std::int64_t capacity = space == Space::device ? plan_.device_capacity_bytes : plan_.host_capacity_bytes;
  if (enforce_capacity_ && capacity > 0 && meter_.mapped(space) + bytes + overhead > capacity)
    return fail(does_not_fit(op, space, capacity));

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
           op->map_end, name_of(op->section));
  for (std::size_t id = 0; id < live_.size(); ++id) {
    const Buffer& b = program_.buffers[id];
    HB_CHECK(!live_[id] || b.section != op->section || b.offset + b.bytes() <= op->map_begin || b.offset >= op->map_end,
             "{}: live buffer '{}' lies on [{}, {}) of {}", at(op), b.name, op->map_begin, op->map_end,
             name_of(op->section));
  }
  for (const auto& [begin, b] : locals_)
    HB_CHECK(op->section != Section::transient || begin + b.bytes() <= op->map_begin || begin >= op->map_end,
             "{}: live local '{}' lies on [{}, {}) of {}", at(op), b.name(), op->map_begin, op->map_end,
             name_of(op->section));
  auto range = std::prev(held.upper_bound(op->map_begin));
  const auto [begin, end] = *range;
  held.erase(range);
  if (begin < op->map_begin) held.emplace(begin, op->map_begin);
  if (op->map_end < end) held.emplace(op->map_end, end);
  meter_.add_mapped(space_of(op->section), op->map_begin - op->map_end);
}

Diagnostic MemoryBook::does_not_fit(const BoundOp& op, Space space, std::int64_t capacity) const {
  const std::int64_t asked = op->map_end - op->map_begin, mapped = meter_.mapped(space);
  const std::int64_t overhead = space == Space::device ? plan_.overhead_bytes : 0;
  const std::int64_t needed = mapped + asked + overhead;
  Diagnostic d;
  d.code = "E301";
  d.message = fmt::format("the plan does not fit: rank {} needs {} of {} on the {} in phase {}", rank_,
                          format_bytes(static_cast<double>(needed)), format_bytes(static_cast<double>(capacity)),
                          name_of(space), plan_.phases[static_cast<std::size_t>(phase_)].name);
  d.notes.push_back(
      fmt::format("step {}, op '{}' maps {} of {}", step_, op.name(), bytes_text(asked), name_of(op->section)));
  d.notes.push_back(fmt::format("mapped {} + asked {} + overhead {} = {} B, capacity {} B: {} B too much", mapped,
                                asked, overhead, needed, capacity, needed - capacity));

  // What lives there now, and what the section that is being mapped is for.
  std::vector<const Buffer*> largest;
  for (std::size_t id = 0; id < live_.size(); ++id) {
    const Buffer& b = program_.buffers[id];
    if (space_of(b.section) == space && (live_[id] || b.section == op->section)) largest.push_back(&b);
  }
  std::stable_sort(largest.begin(), largest.end(),
                   [](const Buffer* a, const Buffer* b) { return a->bytes() > b->bytes(); });
  for (std::size_t i = 0; i < std::min<std::size_t>(3, largest.size()); ++i)
    d.notes.push_back(fmt::format("large: '{}' ({}, {}) {}", largest[i]->name, name_of(largest[i]->category),
                                  name_of(largest[i]->section), bytes_text(largest[i]->bytes())));
  d.help =
      "make those smaller (train.micro_batch_tokens, train.recompute, rollout.memory_fraction, sync.bucket_mib) or "
      "let the other side sleep (train.offload, rollout.sleep)";
  return d;
}

}  // namespace hotbunk
