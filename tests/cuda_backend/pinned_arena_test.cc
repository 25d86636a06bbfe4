// The host's pages of one rank: there and pinned while mapped, the machine's afterwards.
#include "backends/cuda/pinned_arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <vector>

#include "backends/cuda/fake/fake_driver.h"
#include "base/check.h"
#include "base/pages.h"

using namespace hotbunk;
using namespace hotbunk::cuda;

namespace {

constexpr std::int64_t chunk = huge_page_bytes;

/// Bytes of [begin, end) that the process holds.
std::int64_t resident(const PinnedArena& arena, std::int64_t begin, std::int64_t end) {
  std::vector<unsigned char> pages(static_cast<std::size_t>((end - begin) / 4096));
  REQUIRE(::mincore(arena.at(begin), static_cast<std::size_t>(end - begin), pages.data()) == 0);
  return 4096 * std::ranges::count_if(pages, [](unsigned char p) { return (p & 1) != 0; });
}

/// Whether the driver has the page, by what it says to who gives it again.
bool is_pinned(const Context& context, std::byte* page) {
  if (context.driver().cuMemHostRegister(page, 4096, 0) == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED) return true;
  REQUIRE(context.driver().cuMemHostUnregister(page) == CUDA_SUCCESS);
  return false;
}

BookOptions host(std::int64_t chunks) {
  return {.name = "host", .reserve_bytes = chunks * chunk, .capacity_bytes = chunks * chunk, .chunk_bytes = chunk};
}

}  // namespace

TEST_CASE("a mapped range of the host is there, pinned and zero; an unmapped one is the machine's") {
  FakeDriver fake({.memory_bytes = 64 << 20});
  const Context context(fake.table());
  for (const int threads : {1, 3}) {
    CAPTURE(threads);
    PinnedArena arena(context, host(40), threads);
    CHECK(reinterpret_cast<std::uintptr_t>(arena.base()) % huge_page_bytes == 0);
    arena.map(chunk, 39 * chunk, "a test");
    CHECK(resident(arena, chunk, 39 * chunk) == 38 * chunk);
    CHECK(resident(arena, 0, chunk) == 0);
    CHECK(resident(arena, 39 * chunk, 40 * chunk) == 0);
    CHECK(is_pinned(context, arena.at(chunk)));
    CHECK(is_pinned(context, arena.at(39 * chunk - 4096)));
    std::memset(arena.at(chunk), 7, 38 * chunk);
    arena.unmap(3 * chunk, 37 * chunk);
    CHECK(resident(arena, 0, 40 * chunk) == 4 * chunk);
    CHECK(is_pinned(context, arena.at(3 * chunk - 4096)));
    CHECK_FALSE(is_pinned(context, arena.at(3 * chunk)));
    CHECK_FALSE(is_pinned(context, arena.at(37 * chunk - 4096)));
    CHECK(is_pinned(context, arena.at(37 * chunk)));
    arena.map(3 * chunk, 5 * chunk, "a test");
    CHECK(std::all_of(arena.at(3 * chunk), arena.at(5 * chunk), [](std::byte b) { return b == std::byte{0}; }));
    CHECK(std::all_of(arena.at(chunk), arena.at(3 * chunk), [](std::byte b) { return b == std::byte{7}; }));
  }
}

TEST_CASE("pages that the driver does not pin are not kept") {
  FakeDriver fake({.memory_bytes = 64 << 20});
  const Context context(fake.table());
  PinnedArena arena(context, host(20), 2);
  fake.fail_call("cuMemHostRegister", 1, CUDA_ERROR_OUT_OF_MEMORY);
  CHECK_THROWS_AS(arena.map(0, 20 * chunk, "a test"), RuntimeFailure);
  CHECK(resident(arena, 0, 20 * chunk) == 0);
  arena.map(0, 20 * chunk, "a test");
  CHECK(resident(arena, 0, 20 * chunk) == 20 * chunk);
}
