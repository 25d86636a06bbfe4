#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

#include "base/check.h"
#include "base/cores.h"
#include "base/diagnostic.h"
#include "base/dtype.h"
#include "base/file.h"
#include "base/format.h"
#include "base/hash.h"
#include "base/max.h"
#include "base/parallel.h"
#include "base/parse.h"
#include "base/rng.h"

using namespace hotbunk;

TEST_CASE("philox matches the published known-answer vectors") {
  // Random123 kat_vectors, philox4x32-10: all-zero and all-one inputs.
  CHECK(philox({0, 0}, {0, 0, 0, 0}) == Philox4{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  const std::uint32_t f = 0xffffffff;
  CHECK(philox({f, f}, {f, f, f, f}) == Philox4{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
}

TEST_CASE("normals have mean 0 and variance 1") {
  double sum = 0, squares = 0;
  const int n = 20000;
  for (int i = 0; i < n; ++i)
    for (double x : normal2(7, RngPurpose::test, static_cast<std::uint64_t>(i), 0)) sum += x, squares += x * x;
  CHECK(std::abs(sum / (2 * n)) < 0.02);  // 4 sigma: 4 / sqrt(40000)
  CHECK(std::abs(squares / (2 * n) - 1) < 0.03);
}

TEST_CASE("bf16 rounds to nearest even and keeps NaN") {
  CHECK(to_bf16(1.0f).bits == 0x3f80);
  CHECK(to_bf16(std::bit_cast<float>(0x3f808000u)).bits == 0x3f80);  // tie, even below
  CHECK(to_bf16(std::bit_cast<float>(0x3f818000u)).bits == 0x3f82);  // tie, even above
  CHECK(std::isnan(to_f32(to_bf16(std::bit_cast<float>(0x7f800001u)))));
  CHECK(to_f32(to_bf16(3.4e38f)) == std::bit_cast<float>(0x7f800000u));  // overflows to infinity
}

TEST_CASE("a diagnostic prints place, arithmetic and remedy") {
  const Diagnostic d{.code = "E203",
                     .message = "mesh does not cover the cluster",
                     .where = {"a.yaml", 23, 3},
                     .notes = {"dp 2 x tp 8 = 16 ranks"},
                     .help = "set tp to 4"};
  CHECK(render(d) ==
        "error[E203]: mesh does not cover the cluster\n  --> a.yaml:23:3\n   = note: dp 2 x tp 8 = 16 ranks\n"
        "   = help: set tp to 4\n");
  CHECK(nearest_name("rolout", {"train", "rollout", "sync"}) == "rollout");
  CHECK(nearest_name("zzzzzzzz", {"train", "rollout"}) == "");
}

TEST_CASE("atomic write replaces the whole file, and a failed one leaves it") {
  const auto folder = std::filesystem::temp_directory_path() / "hotbunk_file_test";
  std::filesystem::remove_all(folder);
  REQUIRE(write_file_atomic(folder / "deep" / "a.txt", "one"));
  REQUIRE(write_file_atomic(folder / "deep" / "a.txt", "two"));
  CHECK(read_file(folder / "deep" / "a.txt").value() == "two");
  CHECK(!read_file(folder / "none"));
  CHECK(read_file(folder / "deep" / "a.txt", 2).error()[0].code == "E102");
  CHECK(!write_file_atomic(folder / "deep", "over a folder"));
  CHECK(read_file(folder / "deep" / "a.txt").value() == "two");
}

TEST_CASE("numbers print with units") {
  CHECK(format_bytes(13.0 * gib) == "13.00 GiB");
  CHECK(format_bytes(17) == "17 B");
  CHECK(format_seconds(0.0123) == "12.30 ms");
  CHECK(format_count(1234567) == "1,234,567");
  CHECK(format_count(-123) == "-123");
}

TEST_CASE("hashes separate fields") {
  Hasher a, b;
  a.add(std::string_view("ab")), a.add(std::string_view("c"));
  b.add(std::string_view("a")), b.add(std::string_view("bc"));
  CHECK(a.hex() != b.hex());
  CHECK(a.hex().size() == 32);
}

TEST_CASE("a maximum with NaN is NaN, on either side") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  CHECK(std::isnan(max_or_nan(nan, 1.0)));
  CHECK(std::isnan(max_or_nan(1.0, nan)));
  CHECK(max_or_nan(1.0, 2.0) == 2.0);
  CHECK(max_or_nan(2.0f, 1.0f) == 2.0f);
}

TEST_CASE("an integer is the whole text or nothing") {
  CHECK(parse_integer("0") == 0);
  CHECK(parse_integer("-12") == -12);
  CHECK(parse_integer("9223372036854775807") == std::numeric_limits<std::int64_t>::max());
  for (const char* bad : {"", "x", "1x", " 1", "1 ", "+1", "1.0", "9223372036854775808"}) CHECK(!parse_integer(bad));
}

TEST_CASE("work in parallel: every piece once, and the lowest error comes out") {
  std::vector<std::atomic<int>> done(100);
  in_parallel(
      done.size(), [&](std::size_t i) { ++done[i]; }, 4);
  for (const auto& d : done) CHECK(d == 1);
  CHECK_THROWS_WITH(in_parallel(
                        50,
                        [](std::size_t i) {
                          if (i % 20 == 7) throw std::runtime_error(std::to_string(i));
                        },
                        4),
                    "7");
}

TEST_CASE("workers do every piece of every round once, and no thread two at a time") {
  for (const int threads : {1, 2, 4}) {
    Workers workers(threads);
    CHECK(workers.threads() == threads);
    std::vector<std::atomic<int>> busy(static_cast<std::size_t>(threads));
    std::atomic<int> shared = 0;
    for (std::size_t round = 0; round < 2000; ++round) {
      const std::size_t count = round % 7;
      std::vector<int> done(count, 0);
      workers.each(count, [&](std::size_t i, int thread) {
        std::atomic<int>& mine = busy[static_cast<std::size_t>(thread)];
        if (mine.fetch_add(1) != 0) ++shared;
        ++done[i];
        mine.fetch_sub(1);
      });
      REQUIRE(done == std::vector<int>(count, 1));  // all of them when each() returns
    }
    CHECK(shared == 0);
    // An error waits for the others, and the next round goes on.
    std::atomic<int> begun = 0;
    CHECK_THROWS_WITH(workers.each(50,
                                   [&](std::size_t i, int) {
                                     ++begun;
                                     if (i % 20 == 7) throw std::runtime_error(std::to_string(i));
                                   }),
                      "7");
    CHECK((begun == 50 || threads == 1));
    workers.each(3, [&](std::size_t, int) { ++begun; });
    CHECK((begun == 53 || threads == 1));
  }
}

// A sanitizer's own memory takes addresses too, and it ends the process where it gets none.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST_CASE("work in parallel goes on where the machine gives no more threads") {
  // The child may add 32 MiB of addresses: stacks of 8 MiB for a few threads, not for 64.
  const pid_t child = fork();
  if (child == 0) {
    std::int64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const auto bytes = static_cast<rlim_t>(pages * sysconf(_SC_PAGE_SIZE) + (32 << 20));
    const rlimit stack{8 << 20, 8 << 20}, space{bytes, bytes};
    if (setrlimit(RLIMIT_STACK, &stack) != 0 || setrlimit(RLIMIT_AS, &space) != 0) _exit(2);
    bool refused = false;  // the limit bites
    std::vector<std::thread> threads;
    try {
      for (int i = 0; i < 64; ++i) threads.emplace_back([] { usleep(100'000); });
    } catch (const std::system_error&) {
      refused = true;
    }
    for (std::thread& t : threads) t.join();
    if (!refused) _exit(3);
    std::atomic<int> done = 0;
    in_parallel(
        64, [&](std::size_t) { usleep(1000), ++done; }, 64);
    _exit(done == 64 ? 0 : 4);
  }
  REQUIRE(child > 0);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));  // not by std::terminate
  CHECK(WEXITSTATUS(status) == 0);
}
#endif

TEST_CASE("a rank's share of the cores: whole where it is bound to its own, else by how many ranks may run there") {
  using Masks = std::vector<std::string>;
  const std::string eight(8, '1');
  CHECK(cores_of_rank(eight, Masks{eight}, 8) == 8);
  CHECK(cores_of_rank(eight, Masks(4, eight), 8) == 2);        // torchrun, our own launcher, ranks as threads
  CHECK(cores_of_rank(eight, Masks(3, eight), 8) == 2);        // 8 / 3
  CHECK(cores_of_rank("111111", Masks(3, "111111"), 6) == 2);  // six thirds
  CHECK(cores_of_rank(eight, Masks(16, eight), 8) == 1);
  // srun --cpus-per-task=4 on 16 cores, bound: nobody else runs on them.
  CHECK(cores_of_rank("1111", Masks{"1111", "00001111", "000000001111", "0000000000001111"}, 4) == 4);
  CHECK(cores_of_rank("00001111", Masks{"1111", "00001111"}, 4) == 4);
  // Bound to sockets of four cores, two ranks each.
  CHECK(cores_of_rank("1111", Masks{"1111", "1111", "00001111", "00001111"}, 4) == 2);
  // One that is bound to nothing beside one that is: 2 of its own, half of the other 2.
  CHECK(cores_of_rank("1111", Masks{"1111", "11"}, 4) == 3);
  // A quota of 4 cores on 8 is for both ranks.
  CHECK(cores_of_rank(eight, Masks(2, eight), 4) == 2);
  CHECK(std::ranges::count(allowed_cores(), '1') >= local_cores());
  CHECK(allowed_cores().ends_with('1'));
}
