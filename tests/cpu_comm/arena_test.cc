// Arena: what is mapped is resident, what is unmapped is gone, and both books refuse what no plan should do.
#include "backends/cpu_gloo/arena.h"

#include <rapidcheck.h>
#include <sys/mman.h>
#include <sys/stat.h>

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
  CHECK(*arena.at(101 * chunk) == (shared ? std::byte{7} : std::byte{0}));  // a file has its pages still
  arena.unmap(0, 4096 * chunk);
  arena.unmap(5000 * chunk, 5001 * chunk);
  CHECK(arena.resident_bytes() == 0);
  CHECK(arena.counters().mapped == 0);
  CHECK(arena.counters().mapped_peak == 4097 * chunk);
}

ArenaOptions in_pieces(std::int64_t reserve, std::vector<FilePiece> pieces) {
  ArenaOptions o = options(true, reserve, reserve);
  o.pieces = std::move(pieces);
  return o;
}

/// What a memfd holds, as its kernel counts it.
std::int64_t held(const Arena& arena) {
  struct stat info {};
  REQUIRE(fstat(arena.fd(), &info) == 0);
  return info.st_blocks * 512;
}

TEST_CASE("kept pages leave the process and stay in the file, for what is mapped there next", "[arena]") {
  Arena arena(options(true, 1024 * chunk, 1024 * chunk));
  arena.map(0, 512 * chunk, "a");
  std::memset(arena.at(0), 7, 512 * chunk);
  arena.unmap(100 * chunk, 512 * chunk);
  CHECK(arena.resident_bytes() == 100 * chunk);
  CHECK(held(arena) == 512 * chunk);
  CHECK(arena.file_bytes() == 512 * chunk);
  arena.map(400 * chunk, 600 * chunk, "some of it, and more");
  CHECK(arena.resident_bytes() == 300 * chunk);
  CHECK(held(arena) == 600 * chunk);
  CHECK(arena.file_bytes() == 600 * chunk);
  std::memset(arena.at(400 * chunk), 8, 200 * chunk);  // all of it can be written
  CHECK(*arena.at(99 * chunk) == std::byte{7});
  CHECK(*arena.at(599 * chunk) == std::byte{8});
  arena.unmap(0, 100 * chunk);
  arena.unmap(400 * chunk, 600 * chunk);
  CHECK(arena.resident_bytes() == 0);
  CHECK(held(arena) == 600 * chunk);
}

TEST_CASE("pieces that are never mapped at once share their pages", "[arena]") {
  // [0, 256) and [512, 768) are the same pages; [256, 512) has its own.
  Arena arena(in_pieces(768 * chunk,
                        {{0, 256 * chunk, 0}, {256 * chunk, 512 * chunk, 256 * chunk}, {512 * chunk, 768 * chunk, 0}}));
  arena.map(0, 512 * chunk, "both");
  std::memset(arena.at(0), 7, 512 * chunk);
  CHECK_THAT(message_of<InternalError>([&] { arena.map(700 * chunk, 701 * chunk, "early"); }),
             Catch::Contains("early maps [2867200, 2871296)") && Catch::Contains("are another's now"));
  arena.unmap(100 * chunk, 256 * chunk);
  arena.map(612 * chunk, 768 * chunk, "beside it");
  CHECK(arena.resident_bytes() == 512 * chunk);
  CHECK(held(arena) == 512 * chunk);
  std::memset(arena.at(612 * chunk), 8, 156 * chunk);
  CHECK(*arena.at(100 * chunk - 1) == std::byte{7});
  CHECK(*arena.at(256 * chunk) == std::byte{7});
  CHECK_THROWS_AS(arena.map(99 * chunk, 101 * chunk, "too early"), InternalError);
  arena.unmap(612 * chunk, 768 * chunk);
  arena.map(100 * chunk, 256 * chunk, "again");
  CHECK(arena.resident_bytes() == 512 * chunk);
  CHECK(held(arena) == 512 * chunk);
}

TEST_CASE("a map that the machine has no pages for leaves nothing mapped and nothing in the file", "[arena]") {
  Arena arena(options(true, 16 * chunk, 16 * chunk));
  arena.map(0, 2 * chunk, "kept");
  arena.unmap(0, 2 * chunk);
  REQUIRE(ftruncate(arena.fd(), 4 * chunk) == 0);  // behind its back
  CHECK_THAT(message_of<RuntimeFailure>([&] { arena.map(0, 8 * chunk, "weights"); }),
             Catch::Contains("the machine gives no 32.0 KiB (32768 B) for weights"));
  CHECK(arena.counters().mapped == 0);
  CHECK(arena.resident_bytes() == 0);
  CHECK(held(arena) == 0);
  CHECK(arena.file_bytes() == 0);
  REQUIRE(ftruncate(arena.fd(), 16 * chunk) == 0);
  arena.map(0, 8 * chunk, "again");
  CHECK(arena.resident_bytes() == 8 * chunk);
  CHECK(held(arena) == 8 * chunk);
}

TEST_CASE("pages that are lent are not for other pieces, until nobody has them", "[arena]") {
  Arena home(in_pieces(16 * chunk, {{0, 8 * chunk, 0}, {8 * chunk, 16 * chunk, 0}}));
  Arena away(options(false, 8 * chunk, 8 * chunk));
  home.map(0, 8 * chunk, "device");
  away.map(0, 8 * chunk, "host");
  std::memset(home.at(0), 7, 8 * chunk);
  REQUIRE(home.lend(0, 4 * chunk, away, 0, [](std::byte*, const std::byte*, std::int64_t) {}) == 4 * chunk);
  home.unmap(0, 8 * chunk);
  CHECK(held(home) == 8 * chunk);
  CHECK_THROWS_AS(home.map(8 * chunk, 16 * chunk, "over all"), InternalError);
  home.map(12 * chunk, 16 * chunk, "over the rest");
  CHECK(*away.at(3 * chunk) == std::byte{7});
  away.unmap(0, 8 * chunk);  // nobody takes them back: they leave the file too
  CHECK(held(home) == 4 * chunk);
  home.map(8 * chunk, 12 * chunk, "over what was lent");
  CHECK(home.resident_bytes() == 8 * chunk);
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
  CHECK_THAT(message_of<InternalError>([&] { arena.alloc(149, 1, 2, "grad", "layers.0."); }),
             Catch::Contains("buffer layers.0.grad") && Catch::Contains("live buffer reused at [100, 150)"));
}

TEST_CASE("what the books call live more or less is what a call returns", "[arena]") {
  Arena arena(options(false, 4 * chunk, 4 * chunk));
  arena.map(0, chunk, "a");
  CHECK(arena.alloc(0, 100, 0, "p") == 100);
  CHECK(arena.alloc(100, 0, 0, "empty") == 0);
  CHECK(arena.free(100, 0) == 0);
  CHECK(arena.free(0, 100) == -100);
  // What is booked behind a freed buffer has nothing of it.
  CHECK(arena.alloc(200, 30, 1, "weight", "layers.0.") == 30);
  CHECK(arena.is_live(200, "layers.0.weight"));
  CHECK_FALSE(arena.is_live(0, "p"));
  CHECK(arena.counters().live_by_category == std::array<std::int64_t, arena_num_categories>{0, 30});
  CHECK(arena.free(200, 30) == -30);
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

void copy_bytes(std::byte* to, const std::byte* from, std::int64_t bytes) {
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

/// Every byte differs from its neighbours and from the same one of another seed.
void fill(Arena& arena, std::int64_t begin, std::int64_t bytes, int seed) {
  for (std::int64_t i = 0; i < bytes; ++i)
    *arena.at(begin + i) = static_cast<std::byte>((i * 7 + i / 251 + seed) & 0xff);
}
bool holds(const Arena& arena, std::int64_t begin, std::int64_t bytes, int seed) {
  for (std::int64_t i = 0; i < bytes; ++i)
    if (*arena.at(begin + i) != static_cast<std::byte>((i * 7 + i / 251 + seed) & 0xff)) return false;
  return true;
}

TEST_CASE("pages change their arena and come back, and neither copies nor loses a byte", "[arena]") {
  const bool shared = GENERATE(false, true);
  Arena home(options(shared, 2048 * chunk, 2048 * chunk)), away(options(false, 4096 * chunk, 4096 * chunk));
  away.fill_later(512 * chunk, 2048 * chunk);
  // Two buffers side by side that share a page, the second one up to the middle of another.
  const std::int64_t first = 600 * chunk + 100, second = 301 * chunk + 64;
  home.map(0, 1024 * chunk, "device");
  fill(home, 0, first, 1);
  fill(home, first, second, 2);
  away.map(512 * chunk, 1536 * chunk, "host");
  CHECK(away.resident_bytes() == 0);  // it waits for pages
  std::int64_t copied = 0;
  const CopyBytes copy = [&](std::byte* to, const std::byte* from, std::int64_t bytes) {
    copied += bytes;
    copy_bytes(to, from, bytes);
  };
  CHECK(home.lend(0, first, away, 512 * chunk, copy) == 600 * chunk);
  // From 100 bytes into page 600 to 164 bytes into page 901: pages 601 to 900.
  CHECK(home.lend(first, second, away, 512 * chunk + first, copy) == 300 * chunk);
  CHECK(copied == 100 + (chunk - 100) + 164);
  CHECK(home.lent_bytes() == 900 * chunk);
  CHECK(home.resident_bytes() == (1024 - 900) * chunk);
  CHECK(away.resident_bytes() == 902 * chunk);  // and the two pages of which parts were copied
  home.unmap(0, 1024 * chunk);
  CHECK(home.resident_bytes() == 0);
  CHECK(holds(away, 512 * chunk, first, 1));
  CHECK(holds(away, 512 * chunk + first, second, 2));
  std::memset(away.at(512 * chunk + 5000), 99, 10);  // what is written there comes back too

  home.map(0, 1024 * chunk, "device");
  CHECK(home.resident_bytes() == (1024 - 900) * chunk);
  CHECK(home.take_back(0, first, away, 512 * chunk, copy) == 600 * chunk);
  CHECK(home.take_back(first, second, away, 512 * chunk + first, copy) == 300 * chunk);
  CHECK(home.lent_bytes() == 0);
  CHECK(home.resident_bytes() == 1024 * chunk);
  CHECK(*home.at(5009) == std::byte{99});
  CHECK(*away.at(512 * chunk + 5000) == std::byte{0});  // a page of its own
  fill(home, 0, first, 1);
  CHECK(holds(home, 0, first, 1));
  CHECK(holds(home, first, second, 2));
  away.unmap(512 * chunk, 1536 * chunk);
  CHECK(away.resident_bytes() == 0);
  CHECK(home.resident_bytes() == 1024 * chunk);
}

TEST_CASE("what lies elsewhere within a page is copied", "[arena]") {
  const bool shared = GENERATE(false, true);
  Arena home(options(shared, 8 * chunk, 8 * chunk)), away(options(false, 8 * chunk, 8 * chunk));
  home.map(0, 8 * chunk, "device");
  away.map(0, 8 * chunk, "host");
  fill(home, 0, 3 * chunk, 3);
  CHECK(home.lend(0, 3 * chunk, away, 64, copy_bytes) == 0);
  CHECK(home.lend(4 * chunk + 1, chunk, away, 4 * chunk + 1, copy_bytes) == 0);  // no page is whole
  CHECK(home.lent_bytes() == 0);
  CHECK(holds(away, 64, 3 * chunk, 3));
  std::memset(home.at(0), 0, 3 * chunk);
  CHECK(home.take_back(0, 3 * chunk, away, 64, copy_bytes) == 0);
  CHECK(holds(home, 0, 3 * chunk, 3));
}

TEST_CASE("pages that nobody takes back leave the process with the range they are in", "[arena]") {
  const bool shared = GENERATE(false, true);
  Arena home(options(shared, 8 * chunk, 8 * chunk)), away(options(false, 8 * chunk, 8 * chunk));
  home.map(0, 4 * chunk, "device");
  away.map(4 * chunk, 8 * chunk, "host");
  std::memset(home.at(0), 7, 4 * chunk);
  REQUIRE(home.lend(0, 4 * chunk, away, 4 * chunk, copy_bytes) == 4 * chunk);
  home.unmap(0, 4 * chunk);
  away.unmap(4 * chunk, 8 * chunk);
  CHECK(home.lent_bytes() == 0);
  CHECK(home.resident_bytes() + away.resident_bytes() == 0);
  home.map(0, 4 * chunk, "device");
  CHECK(home.resident_bytes() == 4 * chunk);
  CHECK(*home.at(2 * chunk) == std::byte{0});  // fresh memory
}

TEST_CASE("peers read pages where they lie again after they were away", "[arena]") {
  Arena home(options(true, 4 * chunk, 4 * chunk)), away(options(false, 4 * chunk, 4 * chunk));
  const void* peer = mmap(nullptr, 4 * chunk, PROT_READ, MAP_SHARED, home.fd(), 0);
  REQUIRE(peer != MAP_FAILED);
  home.map(0, 4 * chunk, "device");
  away.map(0, 4 * chunk, "host");
  std::memset(home.at(0), 7, 4 * chunk);
  REQUIRE(home.lend(0, 4 * chunk, away, 0, copy_bytes) == 4 * chunk);
  home.unmap(0, 4 * chunk);
  home.map(0, 4 * chunk, "device");
  REQUIRE(home.take_back(0, 4 * chunk, away, 0, copy_bytes) == 4 * chunk);
  std::memset(home.at(chunk), 8, chunk);
  CHECK(static_cast<const std::byte*>(peer)[0] == std::byte{7});
  CHECK(static_cast<const std::byte*>(peer)[chunk] == std::byte{8});
  munmap(const_cast<void*>(peer), 4 * chunk);
}

TEST_CASE("pages that are lent are nobody's to replace", "[arena]") {
  Arena home(options(false, 8 * chunk, 8 * chunk)), away(options(false, 8 * chunk, 8 * chunk));
  home.map(0, 8 * chunk, "device");
  CHECK_THAT(message_of<InternalError>([&] { home.lend(0, chunk, away, 0, copy_bytes); }),
             Catch::Contains("not all is mapped"));
  away.map(0, 8 * chunk, "host");
  REQUIRE(home.lend(0, 4 * chunk, away, 0, copy_bytes) == 4 * chunk);
  CHECK_THAT(message_of<InternalError>([&] { home.take_back(0, 2 * chunk, away, 0, copy_bytes); }),
             Catch::Contains("lent in other parts"));
  CHECK_THAT(message_of<InternalError>([&] { home.take_back(0, 4 * chunk, away, 4 * chunk, copy_bytes); }),
             Catch::Contains("lent in other parts"));
  Arena shared(options(true, 8 * chunk, 8 * chunk));
  shared.map(0, 8 * chunk, "peers'");
  CHECK_THAT(message_of<InternalError>([&] { home.lend(4 * chunk, chunk, shared, 0, copy_bytes); }),
             Catch::Contains("place in a file"));
  std::vector<std::pair<std::int64_t, std::int64_t>> present;
  home.each_present(chunk, 6 * chunk, [&](std::int64_t b, std::int64_t e) { present.emplace_back(b, e); });
  CHECK(present == std::vector<std::pair<std::int64_t, std::int64_t>>{{4 * chunk, 6 * chunk}});
}

TEST_CASE("the books agree with a bitmap under random calls", "[arena][property]") {
  // Oracle: one bool per chunk (mapped) and per 64 bytes (live).
  CHECK(rc::check("random map, unmap, alloc, free", [](bool shared) {
    constexpr int chunks = 24, cell = 512, cells = static_cast<int>(chunks * chunk / cell);
    Arena arena(options(shared, chunks * chunk, chunks * chunk));
    std::vector<bool> mapped(chunks), touched(chunks), live(cells);
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
        for (int k = begin; k < end; ++k) mapped[k] = !unmap, touched[k] = touched[k] || !unmap;
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
    if (shared) RC_ASSERT(held(arena) == chunk * std::count(touched.begin(), touched.end(), true));
    if (shared) RC_ASSERT(held(arena) == arena.file_bytes());
  }));
}

}  // namespace
}  // namespace hotbunk
