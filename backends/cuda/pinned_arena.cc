#include "backends/cuda/pinned_arena.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cerrno>
#include <utility>

#include "base/check.h"
#include "base/limits.h"
#include "base/pages.h"
#include "base/rounding.h"

namespace hotbunk::cuda {

PinnedArena::PinnedArena(const Context& context, BookOptions options, int threads)
    : ArenaBooks(std::move(options)), context_(context), threads_(threads) {
  if (book().reserve_bytes == 0) return;
  const auto bytes = static_cast<std::size_t>(book().reserve_bytes);
  reserved_bytes_ = bytes + huge_page_bytes;
  void* at = ::mmap(nullptr, reserved_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED)
    throw RuntimeFailure(fmt::format("arena {}: cannot reserve {} of addresses: {}", book().name,
                                     bytes_text(book().reserve_bytes), system_error_text(errno)));
  reserved_ = at;
  const auto first = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(at));
  base_ = static_cast<std::byte*>(at) + (round_up(first, huge_page_bytes) - first);
  ::madvise(base_, bytes, MADV_HUGEPAGE);  // a wish: without it the driver pins 512 times as many pages
}

PinnedArena::~PinnedArena() {
  for (const auto& [begin, end] : pinned_) context_.driver().cuMemHostUnregister(base_ + begin);
  if (reserved_ != nullptr) ::munmap(reserved_, reserved_bytes_);
}

void PinnedArena::pin(std::int64_t begin, std::int64_t end) {
  HB_CUDA(context_.driver(),
          cuMemHostRegister(base_ + begin, static_cast<std::size_t>(end - begin), CU_MEMHOSTREGISTER_PORTABLE));
  pinned_[begin] = end;
}

bool PinnedArena::hide(std::int64_t begin, std::int64_t end) {
  return discard_pages(base_ + begin, end - begin, threads_) &&
         ::mprotect(base_ + begin, static_cast<std::size_t>(end - begin), PROT_NONE) == 0;
}

void PinnedArena::provide(std::int64_t begin, std::int64_t end, std::string_view who) {
  std::string why;
  // The driver would have never-touched pages one by one, in one thread.
  if (::mprotect(base_ + begin, static_cast<std::size_t>(end - begin), PROT_READ | PROT_WRITE) != 0 ||
      !populate_pages(base_ + begin, end - begin, threads_))
    why = system_error_text(errno);
  try {
    if (why.empty()) return pin(begin, end);
  } catch (const RuntimeFailure& e) {
    why = e.what();
  }
  hide(begin, end);  // its failure adds nothing to this one
  throw RuntimeFailure(fmt::format("arena {}: the machine gives no {} for {} (mapped now: {}): {}", book().name,
                                   bytes_text(end - begin), who, bytes_text(mapped_now()), why));
}

void PinnedArena::withdraw(std::int64_t begin, std::int64_t end) {
  // The driver takes back only what it was given as a whole: what stays of a range is given to it anew.
  for (auto it = pinned_.begin(); it != pinned_.end();) {
    const auto [first, last] = *it;
    if (last <= begin || first >= end) {
      ++it;
      continue;
    }
    HB_CUDA(context_.driver(), cuMemHostUnregister(base_ + first));
    it = pinned_.erase(it);
    if (first < begin) pin(first, begin);
    if (last > end) pin(end, last);
  }
  if (hide(begin, end)) return;
  throw RuntimeFailure(fmt::format("arena {}: the machine does not take back [{}, {}), {}: {}", book().name, begin, end,
                                   bytes_text(end - begin), system_error_text(errno)));
}

}  // namespace hotbunk::cuda
