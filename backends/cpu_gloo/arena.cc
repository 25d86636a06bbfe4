#include "backends/cpu_gloo/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <utility>

#include "base/check.h"
#include "base/format.h"
#include "base/limits.h"

namespace hotbunk {
namespace {

constexpr std::int64_t huge_page_bytes = 2 << 20;  // x86-64 and arm64 with 4 KiB base pages

std::int64_t round_up(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit * unit; }

std::string bytes_text(std::int64_t n) { return fmt::format("{} ({} B)", format_bytes(static_cast<double>(n)), n); }

/// Writes to every page, so that each is ours; with MADV_POPULATE_WRITE (Linux 5.14) an exhausted machine is an errno.
bool populate(std::byte* p, std::int64_t bytes) {
  if (madvise(p, static_cast<std::size_t>(bytes), MADV_POPULATE_WRITE) == 0) return true;
  if (errno != EINVAL) return false;
  for (std::int64_t i = 0; i < bytes; i += arena_chunk_bytes) reinterpret_cast<volatile char*>(p)[i] = 0;
  return true;
}

void raise_peaks(ArenaCounters& c) {
  c.mapped_peak = std::max(c.mapped_peak, c.mapped);
  for (int i = 0; i < arena_num_categories; ++i)
    c.peak_by_category[i] = std::max(c.peak_by_category[i], c.live_by_category[i]);
  if (c.live > c.live_peak) {
    c.live_peak = c.live;
    c.at_peak = c.live_by_category;
  }
}

}  // namespace

Arena::Arena(ArenaOptions options) : options_(std::move(options)) {
  options_.reserve_bytes = round_up(options_.reserve_bytes, arena_chunk_bytes);
  if (options_.reserve_bytes == 0) return;
  const auto bytes = static_cast<std::size_t>(options_.reserve_bytes);
  if (options_.shared) {
    fd_ = memfd_create(("hotbunk-" + options_.name).c_str(), MFD_CLOEXEC);
    if (fd_ < 0 || ftruncate(fd_, options_.reserve_bytes) != 0) {
      const int error = errno;
      if (fd_ >= 0) close(fd_);
      throw RuntimeFailure(fmt::format("arena {}: no shared memory of {}: {}", options_.name,
                                       bytes_text(options_.reserve_bytes), system_error_text(error)));
    }
  }
  // Addresses that nobody may touch on both sides: a VMA of the arena then never merges with a neighbour's, and what
  // the kernel counts for it is ours alone. Aligned to huge pages.
  guarded_bytes_ = bytes + 2 * static_cast<std::size_t>(huge_page_bytes);
  guarded_ = mmap(nullptr, guarded_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  void* p = guarded_;
  if (p != MAP_FAILED) {
    const auto first = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(p)) + arena_chunk_bytes;
    p = static_cast<std::byte*>(p) + arena_chunk_bytes + (round_up(first, huge_page_bytes) - first);
    if (options_.shared) p = mmap(p, bytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd_, 0);
  }
  if (p == MAP_FAILED) {
    const int error = errno;
    if (guarded_ != MAP_FAILED) munmap(guarded_, guarded_bytes_);
    if (fd_ >= 0) close(fd_);
    throw RuntimeFailure(fmt::format("arena {}: cannot reserve {} of addresses: {}", options_.name,
                                     bytes_text(options_.reserve_bytes), system_error_text(error)));
  }
  base_ = static_cast<std::byte*>(p);
  if (options_.reserve_bytes >= huge_page_bytes) madvise(base_, bytes, MADV_HUGEPAGE);  // a wish; refusal is harmless
}

Arena::~Arena() {
  if (base_ != nullptr) munmap(guarded_, guarded_bytes_);
  if (fd_ >= 0) close(fd_);
}

bool Arena::contains(const void* p) const {
  const auto* b = static_cast<const std::byte*>(p);
  return b >= base_ && b < base_ + options_.reserve_bytes;
}

void Arena::check_range(std::int64_t begin, std::int64_t end, const char* what) const {
  HB_CHECK(begin >= 0 && begin <= end && end <= options_.reserve_bytes, "arena {}: {} [{}, {}) is outside [0, {})",
           options_.name, what, begin, end, options_.reserve_bytes);
  HB_CHECK(begin % arena_chunk_bytes == 0 && end % arena_chunk_bytes == 0,
           "arena {}: {} [{}, {}) is not in chunks of {} B", options_.name, what, begin, end, arena_chunk_bytes);
}

bool Arena::covered(std::int64_t begin, std::int64_t end) const {
  if (begin == end) return true;
  auto it = mapped_.upper_bound(begin);
  if (it == mapped_.begin()) return false;
  return std::prev(it)->second >= end;  // neighbours are merged: one interval covers it or none does
}

bool Arena::is_mapped(std::int64_t begin, std::int64_t end) const {
  std::lock_guard lock(mutex_);
  return covered(begin, end);
}

void Arena::make_resident(std::int64_t begin, std::int64_t end, std::string_view who) {
  std::byte* p = base_ + begin;
  const auto bytes = static_cast<std::size_t>(end - begin);
  if (mprotect(p, bytes, PROT_READ | PROT_WRITE) == 0 && populate(p, end - begin)) return;
  const int error = errno;
  release(begin, end);  // its failure adds nothing to this one
  throw RuntimeFailure(fmt::format("arena {}: the machine gives no {} for {} (mapped now: {}): {}", options_.name,
                                   bytes_text(end - begin), who, bytes_text(total_.mapped), system_error_text(error)));
}

bool Arena::release(std::int64_t begin, std::int64_t end) noexcept {
  std::byte* p = base_ + begin;
  const auto bytes = static_cast<std::size_t>(end - begin);
  // MADV_REMOVE punches the hole in the memfd: the pages leave every process that maps them.
  return madvise(p, bytes, options_.shared ? MADV_REMOVE : MADV_DONTNEED) == 0 && mprotect(p, bytes, PROT_NONE) == 0;
}

void Arena::map(std::int64_t begin, std::int64_t end, std::string_view who) {
  std::lock_guard lock(mutex_);
  check_range(begin, end, "map");
  if (begin == end) return;
  auto next = mapped_.lower_bound(begin);
  const bool overlaps_next = next != mapped_.end() && next->first < end;
  const bool overlaps_previous = next != mapped_.begin() && std::prev(next)->second > begin;
  HB_CHECK(!overlaps_next && !overlaps_previous, "arena {}: {} maps [{}, {}), part of which is mapped already",
           options_.name, who, begin, end);
  const std::int64_t bytes = end - begin;
  if (total_.mapped + bytes > options_.capacity_bytes)
    throw RuntimeFailure(
        fmt::format("out of memory in arena {}: {} asks for {}, mapped now {}, sum {} of capacity {}: {} too much",
                    options_.name, who, bytes_text(bytes), bytes_text(total_.mapped), bytes_text(total_.mapped + bytes),
                    bytes_text(options_.capacity_bytes), bytes_text(total_.mapped + bytes - options_.capacity_bytes)));
  make_resident(begin, end, who);

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
    raise_peaks(*c);
  }
}

void Arena::unmap(std::int64_t begin, std::int64_t end) {
  std::lock_guard lock(mutex_);
  check_range(begin, end, "unmap");
  if (begin == end) return;
  HB_CHECK(covered(begin, end), "arena {}: unmap [{}, {}), part of which is not mapped", options_.name, begin, end);
  auto after = live_.lower_bound(end);
  if (after != live_.begin()) {
    const auto& [offset, buffer] = *std::prev(after);
    HB_CHECK(offset + buffer.bytes <= begin, "arena {}: unmap [{}, {}) under live buffer {} at [{}, {})", options_.name,
             begin, end, buffer.name, offset, offset + buffer.bytes);
  }
  if (!release(begin, end)) {
    const int error = errno;
    throw RuntimeFailure(fmt::format("arena {}: the machine does not take back [{}, {}), {}: {}", options_.name, begin,
                                     end, bytes_text(end - begin), system_error_text(error)));
  }
  auto at = std::prev(mapped_.upper_bound(begin));
  const auto [old_begin, old_end] = *at;
  mapped_.erase(at);
  if (old_begin < begin) mapped_.emplace(old_begin, begin);
  if (end < old_end) mapped_.emplace(end, old_end);
  total_.mapped -= end - begin;
  window_.mapped -= end - begin;
}

void Arena::alloc(std::int64_t offset, std::int64_t bytes, int category, std::string_view name) {
  std::lock_guard lock(mutex_);
  HB_CHECK(bytes >= 0 && offset >= 0 && offset <= options_.reserve_bytes - bytes,
           "arena {}: buffer {} at {} of {} B lies outside [0, {})", options_.name, name, offset, bytes,
           options_.reserve_bytes);
  HB_CHECK(category >= 0 && category < arena_num_categories, "arena {}: buffer {} has category {}", options_.name, name,
           category);
  if (bytes == 0) return;
  HB_CHECK(covered(offset, offset + bytes), "arena {}: buffer {} at [{}, {}) is not wholly mapped", options_.name, name,
           offset, offset + bytes);
  auto next = live_.lower_bound(offset);
  if (next != live_.end())
    HB_CHECK(next->first >= offset + bytes, "arena {}: buffer {} at [{}, {}) overlaps live buffer {} at [{}, {})",
             options_.name, name, offset, offset + bytes, next->second.name, next->first,
             next->first + next->second.bytes);
  if (next != live_.begin()) {
    const auto& [before, buffer] = *std::prev(next);
    HB_CHECK(before + buffer.bytes <= offset, "arena {}: buffer {} at [{}, {}) overlaps live buffer {} at [{}, {})",
             options_.name, name, offset, offset + bytes, buffer.name, before, before + buffer.bytes);
  }
  live_.emplace_hint(next, offset, Live{bytes, category, std::string(name)});
  for (ArenaCounters* c : {&total_, &window_}) {
    c->live += bytes;
    c->live_by_category[category] += bytes;
    raise_peaks(*c);
  }
}

void Arena::free(std::int64_t offset, std::int64_t bytes) {
  if (bytes == 0) return;
  std::lock_guard lock(mutex_);
  auto it = live_.find(offset);
  HB_CHECK(it != live_.end(), "arena {}: free of {} B at {}, where no buffer is live", options_.name, bytes, offset);
  HB_CHECK(it->second.bytes == bytes, "arena {}: free of {} B at {}, but live buffer {} has {} B", options_.name, bytes,
           offset, it->second.name, it->second.bytes);
  for (ArenaCounters* c : {&total_, &window_}) {
    c->live -= bytes;
    c->live_by_category[it->second.category] -= bytes;
  }
  live_.erase(it);
}

bool Arena::is_live(std::int64_t offset, std::string_view name) const {
  std::lock_guard lock(mutex_);
  const auto it = live_.find(offset);
  return it != live_.end() && it->second.name == name;
}

void Arena::poison(std::int64_t offset, std::int64_t bytes) {
  HB_CHECK(offset >= 0 && bytes >= 0 && offset <= options_.reserve_bytes - bytes, "arena {}: poison of {} B at {}",
           options_.name, bytes, offset);
  std::memset(base_ + offset, 0xff, static_cast<std::size_t>(bytes));
}

ArenaCounters Arena::counters() const {
  std::lock_guard lock(mutex_);
  return total_;
}

ArenaCounters Arena::take_window() {
  std::lock_guard lock(mutex_);
  ArenaCounters taken = window_;
  window_.mapped_peak = window_.mapped;
  window_.live_peak = window_.live;
  window_.peak_by_category = window_.at_peak = window_.live_by_category;
  return taken;
}

std::int64_t Arena::resident_bytes() const {
  const auto low = reinterpret_cast<std::uintptr_t>(base_),
             high = low + static_cast<std::uintptr_t>(options_.reserve_bytes);
  std::ifstream smaps("/proc/self/smaps");
  std::string line;
  bool ours = false;
  std::int64_t kib_sum = 0;
  while (std::getline(smaps, line)) {
    std::uintptr_t begin = 0, end = 0;
    const char* last = line.data() + line.size();
    const auto first = std::from_chars(line.data(), last, begin, 16);
    if (first.ec == std::errc() && first.ptr < last && *first.ptr == '-' &&
        std::from_chars(first.ptr + 1, last, end, 16).ec == std::errc()) {
      ours = begin >= low && end <= high;  // guarded on both sides, so that VMAs never straddle its ends
    } else if (ours && line.starts_with("Rss:")) {
      kib_sum += std::stoll(line.substr(4));
    }
  }
  return kib_sum * 1024;
}

}  // namespace hotbunk
