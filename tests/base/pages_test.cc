#include "base/pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <vector>

using namespace hotbunk;

namespace {

/// How many of the range's 4-KiB pages the process holds.
std::int64_t present(std::byte* begin, std::int64_t bytes) {
  std::vector<unsigned char> pages(static_cast<std::size_t>(bytes / 4096));
  REQUIRE(::mincore(begin, static_cast<std::size_t>(bytes), pages.data()) == 0);
  return std::ranges::count_if(pages, [](unsigned char p) { return (p & 1) != 0; });
}

}  // namespace

TEST_CASE("pages come and go as a whole, whatever the number of threads") {
  constexpr std::int64_t bytes = 40 * huge_page_bytes + 3 * 4096;  // in two pieces, the last with odd pages
  for (const int threads : {1, 3}) {
    CAPTURE(threads);
    void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(at != MAP_FAILED);
    auto* begin = static_cast<std::byte*>(at);
    begin[bytes - 1] = std::byte{7};
    CHECK(populate_pages(begin, bytes, threads));
    CHECK(present(begin, bytes) == bytes / 4096);
    CHECK(begin[bytes - 1] == std::byte{7});
    CHECK(discard_pages(begin, bytes, threads));
    CHECK(present(begin, bytes) == 0);
    CHECK(begin[bytes - 1] == std::byte{0});
    ::munmap(at, bytes);
  }
}

TEST_CASE("pages that a file has are mapped as they are, and can be written") {
  constexpr std::int64_t bytes = 20 * huge_page_bytes + 3 * 4096;
  const int fd = ::memfd_create("pages", MFD_CLOEXEC);
  REQUIRE(fd >= 0);
  REQUIRE(::ftruncate(fd, bytes) == 0);
  void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  REQUIRE(at != MAP_FAILED);
  auto* begin = static_cast<std::byte*>(at);
  REQUIRE(populate_pages(begin, bytes, 1));
  std::fill(begin, begin + bytes, std::byte{7});
  REQUIRE(::madvise(at, bytes, MADV_DONTNEED) == 0);
  CHECK(map_present_pages(begin, bytes, 2));
  CHECK(std::all_of(begin, begin + bytes, [](std::byte b) { return b == std::byte{7}; }));
  begin[bytes - 1] = std::byte{8};
  CHECK(begin[bytes - 1] == std::byte{8});
  ::munmap(at, bytes);
  ::close(fd);
}
