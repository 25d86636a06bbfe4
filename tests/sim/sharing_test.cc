#include "sim/sharing.h"

#include <catch2/catch.hpp>

using namespace hotbunk;

TEST_CASE("one slot, two equal jobs: each runs at half rate, both are done after twice the time") {
  SharedResource r(1);
  r.join(0, 7, 100);
  r.join(0, 9, 100);
  CHECK(r.next_done_ns() == 200);
  CHECK_FALSE(r.take_done(199));
  CHECK(r.take_done(200) == 7);  // ties in the order of joining
  CHECK(r.take_done(200) == 9);
  CHECK_FALSE(r.take_done(200));
  CHECK_FALSE(r.next_done_ns());
}

TEST_CASE("a job that joins in the middle takes half from then on") {
  // A (100) alone until 40: 60 left. With B (30) both at half rate: B is done at 40 + 60 = 100, when A has had
  // 40 + 30 = 70. A alone again: 30 more, done at 130. Total work 130 on one slot: no time is lost.
  SharedResource r(1);
  r.join(0, 1, 100);
  CHECK(r.next_done_ns() == 100);
  r.join(40, 2, 30);
  CHECK(r.next_done_ns() == 100);
  CHECK(r.take_done(100) == 2);
  CHECK(r.next_done_ns() == 130);
  CHECK(r.take_done(130) == 1);
}

TEST_CASE("as many jobs as slots do not slow each other; one more does") {
  // Three jobs of 100 on two slots run at 2/3: done at 150.
  SharedResource r(2);
  r.join(0, 1, 100);
  r.join(0, 2, 100);
  CHECK(r.next_done_ns() == 100);
  r.join(0, 3, 100);
  CHECK(r.next_done_ns() == 150);
  for (std::uint32_t job : {1u, 2u, 3u}) CHECK(r.take_done(150) == job);
}

TEST_CASE("rates that do not divide are late by less than two nanoseconds") {
  // 3 jobs of 10 on one slot: 30. 7 jobs of 1: 7.
  SharedResource r(1);
  for (std::uint32_t job = 0; job < 3; ++job) r.join(0, job, 10);
  CHECK(r.next_done_ns() == 30);
  SharedResource shifting(1);
  shifting.join(0, 0, 1000);
  for (std::uint32_t t = 1; t <= 5; ++t) shifting.join(t, t, 1000);
  // Work 6000 in all, always busy: the last one leaves at 6000, but for rounding at the 5 + 5 changes of k.
  std::int64_t end = 0;
  while (const auto next = shifting.next_done_ns()) {
    end = *next;
    while (shifting.take_done(end)) {
    }
  }
  CHECK(end >= 6000);
  CHECK(end <= 6000 + 10);
}

TEST_CASE("a resource that is slowed by a quarter does three quarters of the work until it is free again") {
  // 100 ns of work: 40 at full rate, then 40 ns at 3/4 make 30, then 30 at full rate: done at 110.
  SharedResource r(1);
  r.join(0, 1, 100);
  r.slow_down(40, 0.25);
  CHECK(r.next_done_ns() == 40 + 80);
  r.slow_down(80, 0.0);
  CHECK(r.next_done_ns() == 110);
  CHECK_FALSE(r.take_done(109));
  CHECK(r.take_done(110) == 1);
  // Two jobs share what is left: 3/8 each.
  SharedResource both(1);
  both.slow_down(0, 0.25);
  for (std::uint32_t job : {1u, 2u}) both.join(0, job, 30);
  CHECK(both.next_done_ns() == 80);
}

TEST_CASE("the count of service starts anew when idle, so that long runs do not overflow") {
  SharedResource r(1);
  std::int64_t now = 0;
  const std::int64_t hour = 3'600'000'000'000;
  for (int i = 0; i < 10'000; ++i) {  // a year of virtual time
    r.join(now, 0, hour);
    now = *r.next_done_ns();
    CHECK(r.take_done(now) == 0);
  }
  CHECK(now == 10'000 * hour);
}
