#include "planner/allocator/caching_allocator.h"

#include <rapidcheck.h>

#include <catch2/catch.hpp>

namespace hotbunk {

constexpr std::int64_t MiB = 1 << 20;

TEST_CASE("segments and rounding") {
  CachingAllocator a;
  a.allocate(1);  // 512 B out of a 2 MiB segment
  CHECK(a.allocated_bytes() == 512);
  CHECK(a.reserved_bytes() == 2 * MiB);
  a.allocate(MiB);  // fits the same segment
  CHECK(a.reserved_bytes() == 2 * MiB);
  a.allocate(3 * MiB);  // 20 MiB segment, split
  CHECK(a.reserved_bytes() == 22 * MiB);
  a.allocate(16 * MiB);  // 17 MiB of the rest would do, and does
  CHECK(a.reserved_bytes() == 22 * MiB);
  a.allocate(11 * MiB + 1);  // its own segment, rounded up to 2 MiB
  CHECK(a.reserved_bytes() == 34 * MiB);
  // A rest of at most 1 MiB stays with its block: 16 MiB in 17, 11 MiB + 512 B in 12.
  CHECK(a.allocated_bytes() == 512 + MiB + 3 * MiB + 17 * MiB + 12 * MiB);
}

TEST_CASE("freed memory stays reserved, merges, and leaves with empty_cache") {
  CachingAllocator a;
  const auto x = a.allocate(4 * MiB), y = a.allocate(4 * MiB), z = a.allocate(4 * MiB);
  a.free(x);
  a.free(z);
  a.free(y);
  CHECK(a.allocated_bytes() == 0);
  CHECK(a.reserved_bytes() == 20 * MiB);
  const auto whole = a.allocate(20 * MiB);  // the merged segment serves it
  CHECK(a.reserved_bytes() == 20 * MiB);
  a.empty_cache();
  CHECK(a.reserved_bytes() == 20 * MiB);
  a.free(whole);
  a.empty_cache();
  CHECK(a.reserved_bytes() == 0);
  CHECK(a.peak_reserved_bytes() == 20 * MiB);
}

TEST_CASE("fragmentation: a hole too small for the next allocation grows the reservation") {
  CachingAllocator a;
  const auto x = a.allocate(30 * MiB);
  a.allocate(30 * MiB);
  a.free(x);
  a.allocate(32 * MiB);
  CHECK(a.reserved_bytes() == 92 * MiB);
  CHECK(a.allocated_bytes() == 62 * MiB);
}

TEST_CASE("any sequence keeps the books") {
  CHECK(rc::check("allocated <= reserved, all freed and emptied is nothing", [] {
    CachingAllocator a;
    std::vector<CachingAllocator::Handle> live;
    const auto steps = *rc::gen::container<std::vector<std::int64_t>>(rc::gen::inRange<std::int64_t>(0, 40 * MiB));
    for (std::int64_t s : steps) {
      if (s % 3 == 0 && !live.empty()) {
        const auto i = static_cast<std::size_t>(s) % live.size();
        a.free(live[i]);
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        live.push_back(a.allocate(s));
      }
      RC_ASSERT(a.allocated_bytes() <= a.reserved_bytes());
      RC_ASSERT(a.reserved_bytes() % (2 * MiB) == 0);
    }
    for (auto h : live) a.free(h);
    a.empty_cache();
    RC_ASSERT(a.allocated_bytes() == 0);
    RC_ASSERT(a.reserved_bytes() == 0);
  }));
}

}  // namespace hotbunk
