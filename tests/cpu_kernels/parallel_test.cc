// How tasks are shared by threads.
#include "backends/cpu_gloo/kernels/parallel.h"

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <vector>

using namespace hotbunk::kernels;

TEST_CASE("a thread takes its own tasks in order, then those of others from behind") {
  Shares shares(7, 3);  // 0 1 | 2 3 | 4 5 6
  CHECK(shares.take(1) == 2);
  CHECK(shares.take(1) == 3);
  CHECK(shares.take(1) == 6);
  CHECK(shares.take(2) == 4);
  CHECK(shares.take(1) == 5);
  CHECK(shares.take(1) == 1);
  CHECK(shares.take(0) == 0);
  for (int thread : {0, 1, 2}) CHECK_FALSE(shares.take(thread));
  CHECK_FALSE(Shares(0, 2).take(1));
  CHECK(Shares(1, 4).take(0) == 0);  // the last thread's
}

TEST_CASE("every task is done once, whatever the team") {
  for (int threads : {1, 2, 3, 8})
    for (std::int64_t n : {0, 1, 5, 4000})
      for (bool worth_team : {false, true}) {
        CAPTURE(threads, n, worth_team);
        const KernelContext ctx(threads);
        std::vector<std::atomic<int>> done(static_cast<std::size_t>(n));
        std::atomic<bool> within = true;
        parallel_shares(ctx, n, worth_team, [&](std::int64_t i, int thread) {
          ++done[static_cast<std::size_t>(i)];
          if (thread < 0 || thread >= threads) within = false;
        });
        CHECK(within);
        CHECK(std::ranges::all_of(done, [](const auto& times) { return times == 1; }));
      }
}
