// How tasks are shared by threads.
#include "backends/cpu_gloo/kernels/parallel.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <cmath>
#include <utility>
#include <vector>

#include "backends/cpu_gloo/kernels/gemm.h"
#include "tests/cpu_kernels/oracle.h"

using namespace hotbunk;
using namespace hotbunk::kernels;
using namespace hotbunk::kernels::test;

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

TEST_CASE("a team is as large as asked for, and products are whole, whatever OpenMP was told") {
  const int threads = omp_get_num_procs() + 1, dynamic = omp_get_dynamic(), levels = omp_get_max_active_levels();
  const std::int64_t T = 64, N = 96, K = 48;
  Random rng(1);
  const Tensor dy = Tensor::random(DType::f32, T, N, N, rng), x = Tensor::random(DType::f32, T, K, K, rng);
  const auto gradient = [&] {
    KernelContext ctx(threads);
    Tensor dw = Tensor::filled(DType::f32, N, K, K, NAN);
    linear_wgrad(ctx, dy.matrix(), x.matrix(), dw.matrix(), T, N, K, Write::overwrite);
    return dw;
  };
  const Tensor plain = gradient();
  for (const auto& [is_dynamic, most_levels] : {std::pair{1, 1}, {0, 0}, {1, 0}}) {
    CAPTURE(is_dynamic, most_levels);
    omp_set_dynamic(is_dynamic), omp_set_max_active_levels(most_levels);
    CHECK(gradient().bytes() == plain.bytes());
    omp_set_dynamic(is_dynamic), omp_set_max_active_levels(most_levels);
    std::atomic<int> met = 0, team = 0;
    on_team(threads, [&](int, int all) { ++met, team = all; });
    CHECK(met == threads);
    CHECK(team == threads);
  }
  omp_set_dynamic(dynamic), omp_set_max_active_levels(levels);
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
