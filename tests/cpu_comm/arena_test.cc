// Arena: what is mapped is resident, what is unmapped is gone, and both books refuse what no plan should do.
#include "backends/cpu_gloo/arena.h"

#include <rapidcheck.h>
#include <sys/mman.h>

#include <catch2/catch.hpp>
#include <cerrno>
#include <cstring>
#include <functional>

#include "base/check.h"

namespace hotbunk {
namespace {

constexpr std::int64_t chunk = arena_chunk_bytes;

ArenaOptions options(bool shared, std::int64_t reserve, std::int64_t capacity) {
  ArenaOptions o;
  o.name = "test";
  o.reserve_bytes = reserve;
  o.capacity_bytes = capacity;
  o.shared = shared;
  return o;
}

template <class Error>
std::string message_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

TEST_CASE("mapped bytes are resident bytes, and unmapped ones leave the process", "[arena]") {
  const bool shared = GENERATE(false, true);
  // 64 MiB of addresses, so that transparent huge pages take part.
  Arena arena(options(shared, 16384 * chunk, 16384 * chunk));
  CHECK(arena.resident_bytes() == 0);
  arena.map(0, 4096 * chunk, "a");  // 16 MiB
  CHECK(arena.resident_bytes() == 4096 * chunk);
  arena.map(5000 * chunk, 5001 * chunk, "one chunk");
  CHECK(arena.resident_bytes() == 4097 * chunk);
  CHECK(arena.counters().mapped == 4097 * chunk);
  std::memset(arena.at(0), 7, 4096 * chunk);
  arena.unmap(100 * chunk, 103 * chunk);  // inside what may be a huge page
  CHECK(arena.resident_bytes() == 4094 * chunk);
  CHECK(*arena.at(99 * chunk) == std::byte{7});
  CHECK(*arena.at(103 * chunk) == std::byte{7});
  arena.map(100 * chunk, 103 * chunk, "again");
  CHECK(*arena.at(101 * chunk) == std::byte{0});  // fresh memory, not the old contents
  arena.unmap(0, 4096 * chunk);
  arena.unmap(5000 * chunk, 5001 * chunk);
  CHECK(arena.resident_bytes() == 0);
  CHECK(arena.counters().mapped == 0);
  CHECK(arena.counters().mapped_peak == 4097 * chunk);
}

TEST_CASE("an unmap that the kernel refuses is an error, and the books keep the range", "[arena]") {
  const bool shared = GENERATE(false, true);
  Arena arena(options(shared, 4 * chunk, 4 * chunk));
  arena.map(0, 2 * chunk, "a");
  CHECK(arena.is_mapped(0, 2 * chunk));
  CHECK(!arena.is_mapped(chunk, 3 * chunk));
  REQUIRE(munmap(arena.at(chunk), chunk) == 0);  // behind its back: madvise answers ENOMEM
  CHECK_THAT(message_of<RuntimeFailure>([&] { arena.unmap(0, 2 * chunk); }),
             Catch::Contains("does not take back [0, 8192)") && Catch::Contains(std::strerror(ENOMEM)));
  CHECK(arena.counters().mapped == 2 * chunk);
  CHECK(arena.is_mapped(0, 2 * chunk));
}

TEST_CASE("addresses survive unmap and map", "[arena]") {
  Arena arena(options(true, 8 * chunk, 8 * chunk));
  std::byte* before = arena.at(3 * chunk);
  arena.map(3 * chunk, 4 * chunk, "a");
  arena.unmap(3 * chunk, 4 * chunk);
  arena.map(3 * chunk, 4 * chunk, "b");
  CHECK(arena.at(3 * chunk) == before);
  CHECK(arena.contains(before));
  CHECK_FALSE(arena.contains(arena.base() + 8 * chunk));
}

TEST_CASE("the capacity is hard, and the message has the arithmetic", "[arena]") {
  Arena arena(options(false, 8 * chunk, 3 * chunk));
  arena.map(0, 2 * chunk, "weights");
  const std::string message = message_of<RuntimeFailure>([&] { arena.map(4 * chunk, 6 * chunk, "KV cache"); });
  CHECK(message ==
        "out of memory in arena test: KV cache asks for 8.0 KiB (8192 B), mapped now 8.0 KiB (8192 B), sum 16.0 KiB "
        "(16384 B) "
        "of capacity 12.0 KiB (12288 B): 4.0 KiB (4096 B) too much");
  CHECK(arena.counters().mapped == 2 * chunk);  // nothing changed
  CHECK(arena.resident_bytes() == 2 * chunk);
  arena.map(4 * chunk, 5 * chunk, "less");  // exactly full
  CHECK(arena.counters().mapped == 3 * chunk);
}

TEST_CASE("mapping mistakes are internal errors", "[arena]") {
  Arena arena(options(false, 8 * chunk, 8 * chunk));
  arena.map(2 * chunk, 4 * chunk, "a");
  CHECK_THROWS_AS(arena.map(3 * chunk, 5 * chunk, "b"), InternalError);
  CHECK_THROWS_AS(arena.map(0, 8 * chunk, "b"), InternalError);
  CHECK_THROWS_AS(arena.map(1, chunk, "b"), InternalError);
  CHECK_THROWS_AS(arena.map(7 * chunk, 9 * chunk, "b"), InternalError);
  CHECK_THROWS_AS(arena.unmap(0, chunk), InternalError);
  CHECK_THROWS_AS(arena.unmap(3 * chunk, 5 * chunk), InternalError);
  arena.alloc(2 * chunk, 10, 0, "buffer");
  CHECK_THAT(message_of<InternalError>([&] { arena.unmap(2 * chunk, 3 * chunk); }),
             Catch::Contains("live buffer buffer"));
  arena.unmap(3 * chunk, 4 * chunk);  // beside the buffer
}

TEST_CASE("live buffers: overlap, unmapped ranges, wrong frees", "[arena]") {
  Arena arena(options(false, 8 * chunk, 8 * chunk));
  arena.map(0, 2 * chunk, "a");
  arena.alloc(100, 50, 1, "weight");
  for (const auto& [offset, bytes] : {std::pair{90, 11}, {149, 1}, {100, 50}, {120, 5}, {0, 4096}}) {
    const std::string message =
        message_of<InternalError>([&, at = offset, n = bytes] { arena.alloc(at, n, 2, "grad"); });
    CHECK_THAT(message, Catch::Contains("buffer grad") && Catch::Contains("live buffer weight at [100, 150)"));
  }
  arena.alloc(150, 10, 2, "right behind");
  arena.alloc(90, 10, 2, "right before");
  arena.alloc(120, 0, 2, "empty");  // books nothing
  CHECK_THAT(message_of<InternalError>([&] { arena.alloc(2 * chunk - 1, 2, 0, "tail"); }),
             Catch::Contains("tail") && Catch::Contains("not wholly mapped"));
  CHECK_THROWS_AS(arena.alloc(8 * chunk, 1, 0, "outside"), InternalError);
  CHECK_THROWS_AS(arena.alloc(0, 1, arena_num_categories, "category"), InternalError);
  CHECK_THAT(message_of<InternalError>([&] { arena.free(100, 49); }), Catch::Contains("weight has 50 B"));
  CHECK_THROWS_AS(arena.free(101, 49), InternalError);
  arena.free(100, 50);
  CHECK_THROWS_AS(arena.free(100, 50), InternalError);
  arena.alloc(100, 50, 3, "reused");
}

TEST_CASE("peaks: in total, by category, at the peak, and by window", "[arena]") {
  Arena arena(options(false, 4 * chunk, 4 * chunk));
  arena.map(0, chunk, "a");
  arena.alloc(0, 100, 0, "p");
  arena.alloc(100, 300, 1, "g");  // live 400 = the peak so far
  arena.free(100, 300);
  arena.alloc(100, 200, 2, "a");  // live 300
  ArenaCounters c = arena.counters();
  CHECK(c.live == 300);
  CHECK(c.live_peak == 400);
  CHECK(c.at_peak == decltype(c.at_peak){100, 300});
  CHECK(c.peak_by_category == decltype(c.at_peak){100, 300, 200});
  CHECK(c.live_by_category == decltype(c.at_peak){100, 0, 200});

  CHECK(arena.take_window().live_peak == 400);
  arena.alloc(300, 50, 2, "b");  // the second window's peak: 350, at once with category 2 at 250
  arena.free(300, 50);
  arena.map(chunk, 2 * chunk, "c");
  arena.unmap(chunk, 2 * chunk);
  c = arena.take_window();
  CHECK(c.live_peak == 350);
  CHECK(c.at_peak == decltype(c.at_peak){100, 0, 250});
  CHECK(c.peak_by_category == decltype(c.at_peak){100, 0, 250});
  CHECK(c.mapped_peak == 2 * chunk);
  CHECK(c.live == 300);
  CHECK(arena.take_window().mapped_peak == chunk);
  CHECK(arena.counters().live_peak == 400);
}

TEST_CASE("the books agree with a bitmap under random calls", "[arena][property]") {
  // Oracle: one bool per chunk (mapped) and per 64 bytes (live).
  CHECK(rc::check("random map, unmap, alloc, free", [](bool shared) {
    constexpr int chunks = 24, cell = 512, cells = static_cast<int>(chunks * chunk / cell);
    Arena arena(options(shared, chunks * chunk, chunks * chunk));
    std::vector<bool> mapped(chunks), live(cells);
    std::map<int, int> buffers;
    for (int i = 0; i < 60; ++i) {
      if (*rc::gen::inRange(0, 2) == 0) {
        const int begin = *rc::gen::inRange(0, chunks), end = *rc::gen::inRange(begin, chunks + 1);
        const bool unmap = *rc::gen::inRange(0, 2) == 1;
        bool legal = true;
        for (int k = begin; k < end; ++k) legal &= mapped[k] == unmap;
        for (int k = begin * 8; unmap && k < end * 8; ++k) legal &= !live[k];
        const auto work = [&] {
          unmap ? arena.unmap(begin * chunk, end * chunk) : arena.map(begin * chunk, end * chunk, "x");
        };
        if (!legal) {
          RC_ASSERT_THROWS_AS(work(), InternalError);
          continue;
        }
        work();
        for (int k = begin; k < end; ++k) mapped[k] = !unmap;
      } else {
        const int begin = *rc::gen::inRange(0, cells), length = *rc::gen::inRange(1, 20);
        if (const auto it = buffers.find(begin); it != buffers.end()) {
          arena.free(begin * cell, it->second * cell);
          for (int k = begin; k < begin + it->second; ++k) live[k] = false;
          buffers.erase(it);
          continue;
        }
        bool legal = begin + length <= cells;
        for (int k = begin; legal && k < begin + length; ++k) legal = !live[k] && mapped[k / 8];
        const auto work = [&] { arena.alloc(begin * cell, length * cell, i % 8, "b"); };
        if (!legal) {
          RC_ASSERT_THROWS_AS(work(), InternalError);
          continue;
        }
        work();
        buffers[begin] = length;
        for (int k = begin; k < begin + length; ++k) live[k] = true;
      }
      const ArenaCounters c = arena.counters();
      RC_ASSERT(c.mapped == chunk * std::count(mapped.begin(), mapped.end(), true));
      RC_ASSERT(c.live == cell * std::count(live.begin(), live.end(), true));
    }
    RC_ASSERT(arena.resident_bytes() == arena.counters().mapped);
  }));
}

}  // namespace
}  // namespace hotbunk
