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
#include "base/limits.h"
#include "base/rounding.h"

namespace hotbunk {
namespace {

constexpr std::int64_t huge_page_bytes = 2 << 20;  // x86-64 and arm64 with 4 KiB base pages

/// Writes to every page, so that each is ours; with MADV_POPULATE_WRITE (Linux 5.14) an exhausted machine is an errno.
bool populate(std::byte* p, std::int64_t bytes) {
  if (madvise(p, static_cast<std::size_t>(bytes), MADV_POPULATE_WRITE) == 0) return true;
  if (errno != EINVAL) return false;
  for (std::int64_t i = 0; i < bytes; i += arena_chunk_bytes) reinterpret_cast<volatile char*>(p)[i] = 0;
  return true;
}

}  // namespace

Arena::Arena(const ArenaOptions& options)
    : ArenaBooks({.name = options.name,
                  .reserve_bytes = round_up(options.reserve_bytes, arena_chunk_bytes),
                  .capacity_bytes = options.capacity_bytes,
                  .chunk_bytes = arena_chunk_bytes}),
      options_(options) {
  options_.reserve_bytes = book().reserve_bytes;
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

void Arena::provide(std::int64_t begin, std::int64_t end, std::string_view who) {
  std::byte* p = base_ + begin;
  const auto bytes = static_cast<std::size_t>(end - begin);
  if (mprotect(p, bytes, PROT_READ | PROT_WRITE) == 0 && populate(p, end - begin)) return;
  const int error = errno;
  release(begin, end);  // its failure adds nothing to this one
  throw RuntimeFailure(fmt::format("arena {}: the machine gives no {} for {} (mapped now: {}): {}", options_.name,
                                   bytes_text(end - begin), who, bytes_text(mapped_now()), system_error_text(error)));
}

bool Arena::release(std::int64_t begin, std::int64_t end) noexcept {
  std::byte* p = base_ + begin;
  const auto bytes = static_cast<std::size_t>(end - begin);
  // MADV_REMOVE punches the hole in the memfd: the pages leave every process that maps them.
  return madvise(p, bytes, options_.shared ? MADV_REMOVE : MADV_DONTNEED) == 0 && mprotect(p, bytes, PROT_NONE) == 0;
}

void Arena::withdraw(std::int64_t begin, std::int64_t end) {
  if (release(begin, end)) return;
  const int error = errno;
  throw RuntimeFailure(fmt::format("arena {}: the machine does not take back [{}, {}), {}: {}", options_.name, begin,
                                   end, bytes_text(end - begin), system_error_text(error)));
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
