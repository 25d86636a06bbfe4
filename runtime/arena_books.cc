#include "runtime/arena_books.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"
#include "base/format.h"

namespace hotbunk {
namespace {

/// So many bytes more of a category are live, whose peak and the sum's alone may rise.
void add_live(ArenaCounters& c, int category, std::int64_t bytes) {
  c.live += bytes;
  const std::int64_t of_category = c.live_by_category[category] += bytes;
  c.peak_by_category[category] = std::max(c.peak_by_category[category], of_category);
  if (c.live > c.live_peak) {
    c.live_peak = c.live;
    c.at_peak = c.live_by_category;
  }
}

}  // namespace

std::string bytes_text(std::int64_t n) { return fmt::format("{} ({} B)", format_bytes(static_cast<double>(n)), n); }

void ArenaBooks::check_range(std::int64_t begin, std::int64_t end, const char* what) const {
  HB_CHECK(begin >= 0 && begin <= end && end <= book_.reserve_bytes, "arena {}: {} [{}, {}) is outside [0, {})",
           book_.name, what, begin, end, book_.reserve_bytes);
  HB_CHECK(begin % book_.chunk_bytes == 0 && end % book_.chunk_bytes == 0,
           "arena {}: {} [{}, {}) is not in chunks of {} B", book_.name, what, begin, end, book_.chunk_bytes);
}

bool ArenaBooks::covered(std::int64_t begin, std::int64_t end) const {
  if (begin == end) return true;
  auto it = mapped_.upper_bound(begin);
  if (it == mapped_.begin()) return false;
  return std::prev(it)->second >= end;  // neighbours are merged: one interval covers it or none does
}

bool ArenaBooks::is_mapped(std::int64_t begin, std::int64_t end) const {
  std::lock_guard lock(mutex_);
  return covered(begin, end);
}

void ArenaBooks::map(std::int64_t begin, std::int64_t end, std::string_view who) {
  std::lock_guard lock(mutex_);
  check_range(begin, end, "map");
  if (begin == end) return;
  auto next = mapped_.lower_bound(begin);
  const bool overlaps_next = next != mapped_.end() && next->first < end;
  const bool overlaps_previous = next != mapped_.begin() && std::prev(next)->second > begin;
  HB_CHECK(!overlaps_next && !overlaps_previous, "arena {}: {} maps [{}, {}), part of which is mapped already",
           book_.name, who, begin, end);
  const std::int64_t bytes = end - begin;
  if (total_.mapped + bytes > book_.capacity_bytes)
    throw RuntimeFailure(
        fmt::format("out of memory in arena {}: {} asks for {}, mapped now {}, sum {} of capacity {}: {} too much",
                    book_.name, who, bytes_text(bytes), bytes_text(total_.mapped), bytes_text(total_.mapped + bytes),
                    bytes_text(book_.capacity_bytes), bytes_text(total_.mapped + bytes - book_.capacity_bytes)));
  provide(begin, end, who);

  auto at = mapped_.emplace_hint(next, begin, end);
  if (next != mapped_.end() && next->first == end) {
    at->second = next->second;
    mapped_.erase(next);
  }
  if (at != mapped_.begin() && std::prev(at)->second == begin) {
    std::prev(at)->second = at->second;
    mapped_.erase(at);
  }
  for (ArenaCounters* c : {&total_, &window_}) {
    c->mapped += bytes;
    c->mapped_peak = std::max(c->mapped_peak, c->mapped);
  }
}

void ArenaBooks::unmap(std::int64_t begin, std::int64_t end) {
  std::lock_guard lock(mutex_);
  check_range(begin, end, "unmap");
  if (begin == end) return;
  HB_CHECK(covered(begin, end), "arena {}: unmap [{}, {}), part of which is not mapped", book_.name, begin, end);
  auto after = live_.lower_bound(end);
  if (after != live_.begin()) {
    const auto& [offset, buffer] = *std::prev(after);
    HB_CHECK(offset + buffer.bytes <= begin, "arena {}: unmap [{}, {}) under live buffer {} at [{}, {})", book_.name,
             begin, end, buffer.name, offset, offset + buffer.bytes);
  }
  withdraw(begin, end);
  auto at = std::prev(mapped_.upper_bound(begin));
  const auto [old_begin, old_end] = *at;
  mapped_.erase(at);
  if (old_begin < begin) mapped_.emplace(old_begin, begin);
  if (end < old_end) mapped_.emplace(end, old_end);
  total_.mapped -= end - begin;
  window_.mapped -= end - begin;
}

ArenaBooks::Live& ArenaBooks::entry(LiveMap::iterator before, std::int64_t offset) {
  if (spare_.empty()) return live_.emplace_hint(before, offset, Live{})->second;
  LiveMap::node_type node = std::move(spare_.back());
  spare_.pop_back();
  node.key() = offset;
  return live_.insert(before, std::move(node))->second;
}

std::int64_t ArenaBooks::alloc(std::int64_t offset, std::int64_t bytes, int category, std::string_view name,
                               std::string_view prefix) {
  std::lock_guard lock(mutex_);
  HB_CHECK(bytes >= 0 && offset >= 0 && offset <= book_.reserve_bytes - bytes,
           "arena {}: buffer {}{} at {} of {} B lies outside [0, {})", book_.name, prefix, name, offset, bytes,
           book_.reserve_bytes);
  HB_CHECK(category >= 0 && category < arena_num_categories, "arena {}: buffer {}{} has category {}", book_.name,
           prefix, name, category);
  if (bytes == 0) return 0;
  HB_CHECK(covered(offset, offset + bytes), "arena {}: buffer {}{} at [{}, {}) is not wholly mapped", book_.name,
           prefix, name, offset, offset + bytes);
  auto next = live_.lower_bound(offset);
  if (next != live_.end())
    HB_CHECK(next->first >= offset + bytes, "arena {}: buffer {}{} at [{}, {}) overlaps live buffer {} at [{}, {})",
             book_.name, prefix, name, offset, offset + bytes, next->second.name, next->first,
             next->first + next->second.bytes);
  if (next != live_.begin()) {
    const auto& [before, buffer] = *std::prev(next);
    HB_CHECK(before + buffer.bytes <= offset, "arena {}: buffer {}{} at [{}, {}) overlaps live buffer {} at [{}, {})",
             book_.name, prefix, name, offset, offset + bytes, buffer.name, before, before + buffer.bytes);
  }
  Live& live = entry(next, offset);
  live.bytes = bytes, live.category = category;
  live.name.assign(prefix).append(name);
  const std::int64_t before = total_.live;
  for (ArenaCounters* c : {&total_, &window_}) add_live(*c, category, bytes);
  return total_.live - before;
}

std::int64_t ArenaBooks::free(std::int64_t offset, std::int64_t bytes) {
  if (bytes == 0) return 0;
  std::lock_guard lock(mutex_);
  auto it = live_.find(offset);
  HB_CHECK(it != live_.end(), "arena {}: free of {} B at {}, where no buffer is live", book_.name, bytes, offset);
  HB_CHECK(it->second.bytes == bytes, "arena {}: free of {} B at {}, but live buffer {} has {} B", book_.name, bytes,
           offset, it->second.name, it->second.bytes);
  const std::int64_t before = total_.live;
  for (ArenaCounters* c : {&total_, &window_}) {
    c->live -= bytes;
    c->live_by_category[it->second.category] -= bytes;
  }
  spare_.push_back(live_.extract(it));
  return total_.live - before;
}

bool ArenaBooks::is_live(std::int64_t offset, std::string_view name) const {
  std::lock_guard lock(mutex_);
  const auto it = live_.find(offset);
  return it != live_.end() && it->second.name == name;
}

ArenaCounters ArenaBooks::counters() const {
  std::lock_guard lock(mutex_);
  return total_;
}

ArenaCounters ArenaBooks::take_window() {
  std::lock_guard lock(mutex_);
  ArenaCounters taken = window_;
  window_.mapped_peak = window_.mapped;
  window_.live_peak = window_.live;
  window_.peak_by_category = window_.at_peak = window_.live_by_category;
  return taken;
}

}  // namespace hotbunk
