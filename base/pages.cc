#include "base/pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "base/parallel.h"
#include "base/rounding.h"

namespace hotbunk {
namespace {

/// As much as costs more than starting a thread.
constexpr std::int64_t piece_bytes = 16 * huge_page_bytes;

/// advise(piece, bytes) gives 0 or an errno.
template <class Advise>
bool in_pieces(std::byte* begin, std::int64_t bytes, int threads, Advise advise) {
  std::atomic<int> error = 0;
  in_parallel(
      static_cast<std::size_t>(ceil_div(bytes, piece_bytes)),
      [&](std::size_t i) {
        const std::int64_t first = static_cast<std::int64_t>(i) * piece_bytes;
        if (error != 0) return;
        const int e = advise(begin + first, static_cast<std::size_t>(std::min(piece_bytes, bytes - first)));
        if (e != 0) error = e;
      },
      static_cast<std::size_t>(std::max(threads, 1)));
  if (error == 0) return true;
  errno = error;
  return false;
}

/// By `advice`, or page by page where the kernel does not know it. 0 or an errno.
template <class TouchOne>
int touch(std::byte* at, std::size_t bytes, int advice, TouchOne touch_one) {
  if (::madvise(at, bytes, advice) == 0) return 0;
  if (errno != EINVAL) return errno;
  constexpr std::size_t smallest_page = 4096;
  for (std::size_t i = 0; i < bytes; i += smallest_page) touch_one(reinterpret_cast<volatile char*>(at) + i);
  return 0;
}

}  // namespace

bool populate_pages(std::byte* begin, std::int64_t bytes, int threads) {
  return in_pieces(begin, bytes, threads, [](std::byte* at, std::size_t n) {
    return touch(at, n, MADV_POPULATE_WRITE, [](volatile char* p) { *p = *p; });
  });
}

bool map_present_pages(std::byte* begin, std::int64_t bytes, int threads) {
  return in_pieces(begin, bytes, threads, [](std::byte* at, std::size_t n) {
    return touch(at, n, MADV_POPULATE_READ, [](volatile char* p) { static_cast<void>(*p); });
  });
}

bool discard_pages(std::byte* begin, std::int64_t bytes, int threads) {
  return in_pieces(begin, bytes, threads,
                   [](std::byte* at, std::size_t n) { return ::madvise(at, n, MADV_DONTNEED) == 0 ? 0 : errno; });
}

}  // namespace hotbunk
