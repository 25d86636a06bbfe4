#include "backends/cuda/pinned_arena.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cerrno>
#include <utility>

#include "base/check.h"
#include "base/limits.h"

namespace hotbunk::cuda {

PinnedArena::PinnedArena(const Context& context, BookOptions options)
    : ArenaBooks(std::move(options)), context_(context) {
  if (book().reserve_bytes == 0) return;
  void* at = ::mmap(nullptr, static_cast<std::size_t>(book().reserve_bytes), PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED)
    throw RuntimeFailure(fmt::format("arena {}: cannot reserve {} of addresses: {}", book().name,
                                     bytes_text(book().reserve_bytes), system_error_text(errno)));
  base_ = static_cast<std::byte*>(at);
}

PinnedArena::~PinnedArena() {
  for (const auto& [begin, end] : pinned_) context_.driver().cuMemHostUnregister(base_ + begin);
  if (base_ != nullptr) ::munmap(base_, static_cast<std::size_t>(book().reserve_bytes));
}

void PinnedArena::pin(std::int64_t begin, std::int64_t end) {
  HB_CUDA(context_.driver(),
          cuMemHostRegister(base_ + begin, static_cast<std::size_t>(end - begin), CU_MEMHOSTREGISTER_PORTABLE));
  pinned_[begin] = end;
}

void PinnedArena::provide(std::int64_t begin, std::int64_t end, std::string_view who) {
  const auto bytes = static_cast<std::size_t>(end - begin);
  std::string why;
  if (::mprotect(base_ + begin, bytes, PROT_READ | PROT_WRITE) != 0) why = system_error_text(errno);
  try {
    if (why.empty()) return pin(begin, end);
  } catch (const RuntimeFailure& e) {
    why = e.what();
  }
  ::mprotect(base_ + begin, bytes, PROT_NONE);
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
  const auto bytes = static_cast<std::size_t>(end - begin);
  if (::madvise(base_ + begin, bytes, MADV_DONTNEED) == 0 && ::mprotect(base_ + begin, bytes, PROT_NONE) == 0) return;
  throw RuntimeFailure(fmt::format("arena {}: the machine does not take back [{}, {}), {}: {}", book().name, begin, end,
                                   bytes_text(end - begin), system_error_text(errno)));
}

}  // namespace hotbunk::cuda
