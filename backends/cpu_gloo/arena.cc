#include "backends/cpu_gloo/arena.h"

#include <fcntl.h>
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
#include "base/pages.h"
#include "base/rounding.h"

namespace hotbunk {
namespace {

/// Another address for pages, whose old addresses stay reserved (Linux 5.7; of shared memory 5.13).
bool remap(std::byte* from, std::byte* to, std::int64_t bytes) {
  const auto n = static_cast<std::size_t>(bytes);
  return mremap(from, n, n, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, to) != MAP_FAILED;
}

std::int64_t round_down(std::int64_t offset) { return offset / arena_chunk_bytes * arena_chunk_bytes; }

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
    if (options_.pieces.empty()) options_.pieces = {{0, options_.reserve_bytes, 0}};
    std::int64_t last = 0, file_end = 0;
    for (const FilePiece& piece : options_.pieces) {
      const auto whole = [](std::int64_t offset) { return offset % arena_chunk_bytes == 0; };
      HB_CHECK(last <= piece.begin && piece.begin <= piece.end && piece.end <= options_.reserve_bytes &&
                   whole(piece.begin) && whole(piece.end) && whole(piece.file_offset),
               "arena {}: piece [{}, {}) at {} of the file", options_.name, piece.begin, piece.end, piece.file_offset);
      last = piece.end;
    }
    for (const FilePiece& piece : options_.pieces)
      file_end = std::max(file_end, piece.file_offset + piece.end - piece.begin);
    fd_ = memfd_create(("hotbunk-" + options_.name).c_str(), MFD_CLOEXEC);
    if (fd_ < 0 || ftruncate(fd_, file_end) != 0) {
      const int error = errno;
      if (fd_ >= 0) close(fd_);
      throw RuntimeFailure(fmt::format("arena {}: no shared memory of {}: {}", options_.name, bytes_text(file_end),
                                       system_error_text(error)));
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
    if (options_.shared && !map_pieces(static_cast<std::byte*>(p), fd_, options_.pieces, PROT_NONE)) p = MAP_FAILED;
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
  // Peers may still have the file open; what nobody has mapped is of no use to them.
  if (fd_ >= 0)
    kept_.each_part(0, kept_.end(), [&](std::int64_t begin, std::int64_t end, bool kept) {
      if (kept) punch(begin, end - begin);
    });
  if (base_ != nullptr) munmap(guarded_, guarded_bytes_);
  if (fd_ >= 0) close(fd_);
}

bool Arena::contains(const void* p) const {
  const auto* b = static_cast<const std::byte*>(p);
  return b >= base_ && b < base_ + options_.reserve_bytes;
}

void Arena::provide(std::int64_t begin, std::int64_t end, std::string_view who) {
  const bool later =
      std::ranges::any_of(filled_later_, [&](const auto& r) { return r.first <= begin && end <= r.second; });
  each_present(begin, end, [&](std::int64_t b, std::int64_t e) { take(b, e, who); });
  bool provided = true;
  int error = 0;
  each_present(begin, end, [&](std::int64_t b, std::int64_t e) {
    if (!provided) return;
    provided =
        mprotect(base_ + b, static_cast<std::size_t>(e - b), PROT_READ | PROT_WRITE) == 0 && (later || populate(b, e));
    error = errno;
  });
  if (provided) return;
  give_up(begin, end);
  throw RuntimeFailure(fmt::format("arena {}: the machine gives no {} for {} (mapped now: {}): {}", options_.name,
                                   bytes_text(end - begin), who, bytes_text(mapped_now()), system_error_text(error)));
}

bool Arena::populate(std::int64_t begin, std::int64_t end) {
  if (!options_.shared) return populate_pages(base_ + begin, end - begin, 1);
  struct Part {
    std::int64_t begin, bytes, file_offset;
    bool kept;
  };
  std::vector<Part> parts;
  {
    std::lock_guard lock(moves_);
    each_piece(begin, end, [&](std::int64_t b, std::int64_t e, std::int64_t file_offset) {
      kept_.each_part(file_offset, file_offset + e - b, [&](std::int64_t first, std::int64_t last, bool kept) {
        parts.push_back({b + first - file_offset, last - first, first, kept});
      });
    });
  }
  // Nobody else has these bytes of the file now.
  for (const Part& part : parts) {
    // Pages that a file has already are touched in less time than it takes to make them then (docs/benchmarks.md);
    // where it gets none here, touching them says why.
    if (!part.kept) fallocate(fd_, FALLOC_FL_KEEP_SIZE, part.file_offset, part.bytes);
    std::byte* const at = base_ + part.begin;
    if (!(part.kept ? map_present_pages(at, part.bytes, 1) : populate_pages(at, part.bytes, 1))) return false;
  }
  std::lock_guard lock(moves_);
  for (const Part& part : parts) kept_.remove(part.file_offset, part.file_offset + part.bytes);
  return true;
}

void Arena::take(std::int64_t begin, std::int64_t end, std::string_view who) {
  std::lock_guard lock(moves_);
  const auto each = [&](auto&& visit) {
    each_piece(begin, end, [&](std::int64_t b, std::int64_t e, std::int64_t file_offset) {
      visit(file_offset, file_offset + e - b);
    });
  };
  each([&](std::int64_t first, std::int64_t last) {
    HB_CHECK(!taken_.meets(first, last), "arena {}: {} maps [{}, {}), whose pages in the file are another's now",
             options_.name, who, begin, end);
  });
  each([&](std::int64_t first, std::int64_t last) { taken_.add(first, last); });
}

bool Arena::release(std::int64_t begin, std::int64_t end) noexcept {
  bool released = send_home(begin, end);
  each_present(begin, end, [&](std::int64_t b, std::int64_t e) {
    const auto bytes = static_cast<std::size_t>(e - b);
    // The pages leave this process; of shared memory its file keeps them.
    released = released && madvise(base_ + b, bytes, MADV_DONTNEED) == 0 && mprotect(base_ + b, bytes, PROT_NONE) == 0;
    if (!released) return;
    std::lock_guard lock(moves_);
    each_piece(b, e, [&](std::int64_t first, std::int64_t last, std::int64_t file_offset) {
      taken_.remove(file_offset, file_offset + last - first);
      kept_.add(file_offset, file_offset + last - first);
    });
  });
  return released;
}

void Arena::give_up(std::int64_t begin, std::int64_t end) noexcept {
  each_present(begin, end, [&](std::int64_t b, std::int64_t e) {
    const auto bytes = static_cast<std::size_t>(e - b);
    madvise(base_ + b, bytes, MADV_DONTNEED);
    mprotect(base_ + b, bytes, PROT_NONE);
    std::lock_guard lock(moves_);
    each_piece(b, e, [&](std::int64_t first, std::int64_t last, std::int64_t file_offset) {
      punch(file_offset, last - first);
      taken_.remove(file_offset, file_offset + last - first);
      kept_.remove(file_offset, file_offset + last - first);
    });
  });
}

void Arena::punch(std::int64_t file_offset, std::int64_t bytes) const noexcept {
  fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, file_offset, bytes);
}

void Arena::withdraw(std::int64_t begin, std::int64_t end) {
  if (release(begin, end)) return;
  const int error = errno;
  throw RuntimeFailure(fmt::format("arena {}: the machine does not take back [{}, {}), {}: {}", options_.name, begin,
                                   end, bytes_text(end - begin), system_error_text(error)));
}

// --- pages that change their arena -----------------------------------------------------------------------------------
// A page of shared memory has its place in the file, which peers know: so a page is its home's for good, and elsewhere
// only on loan. What the kernel then holds under its home's addresses is nothing, and nobody may touch it.

void Arena::fill_later(std::int64_t begin, std::int64_t end) {
  HB_CHECK(!options_.shared, "arena {}: pages of a file are where they are", options_.name);
  filled_later_.emplace_back(begin, end);
}

void Arena::each_present(std::int64_t begin, std::int64_t end,
                         const std::function<void(std::int64_t, std::int64_t)>& visit) const {
  std::vector<std::pair<std::int64_t, std::int64_t>> present;
  {
    std::lock_guard lock(moves_);
    auto loan = loans_.upper_bound(begin);
    if (loan != loans_.begin() && std::prev(loan)->second.end > begin) --loan;
    for (; loan != loans_.end() && loan->first < end; ++loan) {
      if (begin < loan->first) present.emplace_back(begin, loan->first);
      begin = loan->second.end;
    }
  }
  if (begin < end) present.emplace_back(begin, end);
  for (const auto& [b, e] : present) visit(b, e);
}

void Arena::each_piece(std::int64_t begin, std::int64_t end,
                       const std::function<void(std::int64_t, std::int64_t, std::int64_t)>& visit) const {
  for (const FilePiece& piece : options_.pieces) {
    const std::int64_t b = std::max(begin, piece.begin), e = std::min(end, piece.end);
    if (b < e) visit(b, e, piece.file_offset + b - piece.begin);
  }
}

std::int64_t Arena::file_bytes() const {
  std::lock_guard lock(moves_);
  return taken_.bytes() + kept_.bytes();
}

std::int64_t Arena::lent_bytes() const {
  std::lock_guard lock(moves_);
  std::int64_t out = 0;
  for (const auto& [begin, loan] : loans_) out += loan.end - begin;
  return out;
}

bool Arena::make_private(std::int64_t begin, std::int64_t end, int protection) {
  const auto bytes = static_cast<std::size_t>(end - begin);
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  return mmap(base_ + begin, bytes, protection, flags, -1, 0) != MAP_FAILED;
}

std::int64_t Arena::lend(std::int64_t from, std::int64_t bytes, Arena& to, std::int64_t at, const CopyBytes& copy) {
  HB_CHECK(is_mapped(from, from + bytes) && to.is_mapped(at, at + bytes), "arena {}: lends [{}, {}), not all is mapped",
           options_.name, from, from + bytes);
  HB_CHECK(!to.options_.shared, "arena {} lends to {}, whose pages have a place in a file", options_.name,
           to.options_.name);
  std::int64_t begin = round_up(from, arena_chunk_bytes), end = round_down(from + bytes);
  if ((from - at) % arena_chunk_bytes != 0 || begin >= end || !give(begin, end, to, begin - from + at))
    begin = end = from;
  copy_part(*this, from, to, at, begin - from, copy);
  copy_part(*this, end, to, at + end - from, from + bytes - end, copy);
  return end - begin;
}

bool Arena::give(std::int64_t begin, std::int64_t end, Arena& to, std::int64_t at) {
  const std::scoped_lock lock(moves_, to.moves_);
  if (!remap(base_ + begin, to.base_ + at, end - begin)) {
    to.make_private(at, at + end - begin, PROT_READ | PROT_WRITE);  // the kernel may have begun
    return false;
  }
  mprotect(base_ + begin, static_cast<std::size_t>(end - begin), PROT_NONE);  // only a guard
  loans_[begin] = {end, &to, at};
  to.guests_[at] = {at + end - begin, this, begin};
  return true;
}

std::int64_t Arena::take_back(std::int64_t to, std::int64_t bytes, Arena& holder, std::int64_t at,
                              const CopyBytes& copy) {
  HB_CHECK(is_mapped(to, to + bytes) && holder.is_mapped(at, at + bytes),
           "arena {}: takes [{}, {}) back, not all is mapped", options_.name, to, to + bytes);
  std::int64_t begin = round_up(to, arena_chunk_bytes), end = round_down(to + bytes);
  if (!fetch(begin, end, holder, begin - to + at)) begin = end = to;
  std::int64_t present = 0;
  each_present(to, to + bytes, [&](std::int64_t b, std::int64_t e) { present += e - b; });
  HB_CHECK(present == bytes, "arena {}: [{}, {}) was lent in other parts than it comes back", options_.name, to,
           to + bytes);
  copy_part(holder, at, *this, to, begin - to, copy);
  copy_part(holder, at + end - to, *this, end, to + bytes - end, copy);
  return end - begin;
}

bool Arena::fetch(std::int64_t begin, std::int64_t end, Arena& holder, std::int64_t at) {
  const std::scoped_lock lock(moves_, holder.moves_);
  const auto loan = loans_.find(begin);
  if (loan == loans_.end() || loan->second.end != end || loan->second.holder != &holder || loan->second.at != at)
    return false;
  // What is left at the holder's are addresses of this arena's pages: it gets some of its own.
  if (!remap(holder.base_ + at, base_ + begin, end - begin) ||
      !holder.make_private(at, at + end - begin, PROT_READ | PROT_WRITE)) {
    const int error = errno;
    throw RuntimeFailure(fmt::format("arena {}: {} at {} do not come back from arena {}: {}", options_.name,
                                     bytes_text(end - begin), begin, holder.options_.name, system_error_text(error)));
  }
  loans_.erase(loan);
  holder.guests_.erase(at);
  return true;
}

bool Arena::send_home(std::int64_t begin, std::int64_t end) {
  std::vector<std::pair<std::int64_t, Guest>> leaving;
  {
    std::lock_guard lock(moves_);
    for (auto guest = guests_.lower_bound(begin); guest != guests_.end() && guest->second.end <= end; ++guest)
      leaving.emplace_back(*guest);
  }
  for (const auto& [at, guest] : leaving) {
    const auto bytes = static_cast<std::size_t>(guest.end - at);
    if ((guest.home->options_.shared && madvise(base_ + at, bytes, MADV_REMOVE) != 0) ||
        !make_private(at, guest.end, PROT_NONE))
      return false;
    const std::scoped_lock lock(moves_, guest.home->moves_);
    guest.home->each_piece(guest.home_begin, guest.home_begin + guest.end - at,
                           [&](std::int64_t b, std::int64_t e, std::int64_t in_file) {
                             guest.home->taken_.remove(in_file, in_file + e - b);
                           });
    guest.home->loans_.erase(guest.home_begin);
    guests_.erase(at);
  }
  return true;
}

void Arena::copy_part(Arena& from, std::int64_t begin, Arena& to, std::int64_t at, std::int64_t bytes,
                      const CopyBytes& copy) {
  if (bytes == 0) return;
  if (!to.populate(round_down(at), round_up(at + bytes, arena_chunk_bytes))) {
    const int error = errno;
    throw RuntimeFailure(fmt::format("arena {}: the machine gives no {} for what is copied there: {}", to.options_.name,
                                     bytes_text(bytes), system_error_text(error)));
  }
  copy(to.at(at), from.at(begin), bytes);
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
      if (begin >= high) break;            // in the order of addresses, and the kernel counts each as it is read
      ours = begin >= low && end <= high;  // guarded on both sides, so that VMAs never straddle its ends
    } else if (ours && line.starts_with("Rss:")) {
      kib_sum += std::stoll(line.substr(4));
    }
  }
  return kib_sum * 1024;
}

}  // namespace hotbunk
