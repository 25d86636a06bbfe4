#include "sim/links.h"

#include <rapidcheck.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <map>
#include <numeric>

using namespace hotbunk;

namespace {

SharedLinks with_links(std::size_t count) {
  SharedLinks links;
  for (std::size_t i = 0; i < count; ++i) links.add_link("link");
  return links;
}

void join(SharedLinks& links, std::int64_t now, std::uint32_t job, std::int64_t price, std::vector<Demand> demands) {
  links.join(now, job, price, demands);
}

/// Plays to the end: when each job is done.
std::map<std::uint32_t, std::int64_t> play(SharedLinks& links) {
  std::map<std::uint32_t, std::int64_t> done;
  while (const auto next = links.next_done_ns())
    while (const auto job = links.take_done(*next)) done[*job] = *next;
  return done;
}

}  // namespace

TEST_CASE("links: a job alone is done after its price, whatever fractions it takes") {
  for (const double fraction : {1.0, 1.0 / 3, 0.9999999999, 1e-12, 0.0})
    for (const std::int64_t price : {std::int64_t{0}, std::int64_t{1}, std::int64_t{999'999'999'999'999}}) {
      SharedLinks links = with_links(2);
      join(links, 5, 3, price, {{0, fraction}, {1, 1.0}});
      CHECK(links.next_done_ns() == 5 + price);
      if (price > 0) CHECK_FALSE(links.take_done(5 + price - 1));
      CHECK(links.take_done(5 + price) == 3);
      CHECK_FALSE(links.next_done_ns());
      CHECK(links.running() == 0);
    }
}

TEST_CASE("links: jobs that want no more than a link has do not slow each other") {
  SharedLinks links = with_links(1);
  // Thirds, fifths and tenths are no binary fractions; they still add up to no more than the link.
  for (std::uint32_t job = 0; job < 3; ++job) join(links, 0, job, 100, {{0, 1.0 / 3}});
  CHECK(play(links) == std::map<std::uint32_t, std::int64_t>{{0, 100}, {1, 100}, {2, 100}});
  for (std::uint32_t job = 0; job < 10; ++job) join(links, 100, job, 7, {{0, 0.1}});
  for (const auto& [job, time] : play(links)) CHECK(time == 107);
}

TEST_CASE("links: two jobs that each fill a link take twice as long; one that comes later gets half from then on") {
  SharedLinks links = with_links(1);
  join(links, 0, 7, 100, {{0, 1.0}});
  join(links, 0, 9, 100, {{0, 1.0}});
  CHECK(links.next_done_ns() == 200);
  CHECK_FALSE(links.take_done(199));
  CHECK(links.take_done(200) == 7);  // ties in the order of joining
  CHECK(links.take_done(200) == 9);
  // A (100) alone until 240: 60 left. With B (30) both at half rate: B is done at 240 + 60 = 300, when A has had
  // 40 + 30 = 70. A alone again: 30 more, done at 330.
  join(links, 200, 1, 100, {{0, 1.0}});
  CHECK(links.next_done_ns() == 300);
  join(links, 240, 2, 30, {{0, 1.0}});
  CHECK(links.next_done_ns() == 300);
  CHECK(links.take_done(300) == 2);
  CHECK(links.next_done_ns() == 330);
}

TEST_CASE("links: max-min over three links") {
  // Link 0 carries A and B, link 1 A, B, C and E, link 2 C and D, each at its whole capacity when alone (E takes half).
  // All rise together: link 1 is full first, at r (1 + 1 + 1 + 1/2) = 1, r = 2/7; it stops A, B, C, E there. Link 0 has
  // 3/7 left that nobody wants. Link 2: D goes on to 1 - 2/7 = 5/7.
  SharedLinks links = with_links(3);
  join(links, 0, 'A', 2000, {{0, 1.0}, {1, 1.0}});
  join(links, 0, 'B', 2000, {{0, 1.0}, {1, 1.0}});
  join(links, 0, 'C', 1000, {{1, 1.0}, {2, 1.0}});
  join(links, 0, 'D', 1000, {{2, 1.0}});
  join(links, 0, 'E', 4000, {{1, 0.5}});
  // D is done first, at 1000 x 7/5 = 1400; then nobody changes on link 1. C at 1000 x 7/2 = 3500. Then A, B and E:
  // link 1 is full at r (1 + 1 + 1/2) = 1, r = 2/5, link 0 at 1/2. A and B have had 1000 of 2000: 1000 x 5/2 = 2500
  // more, done at 6000. E has had 3500 x 2/7 + 2500 x 2/5 = 2000 of 4000; alone at rate 1: done at 8000.
  CHECK(play(links) ==
        std::map<std::uint32_t, std::int64_t>{{'A', 6000}, {'B', 6000}, {'C', 3500}, {'D', 1400}, {'E', 8000}});
}

TEST_CASE("links: a job held back elsewhere leaves its part to others") {
  // A passes links 0 and 1, B to D link 0 only, E link 1 only. Link 0 is full at 1/4; of link 1 A takes that quarter
  // and E three. A to D (100): done at 400. E (300): 400 x 3/4 = 300, done at the same time.
  SharedLinks links = with_links(2);
  join(links, 0, 0, 100, {{0, 1.0}, {1, 1.0}});
  for (std::uint32_t job = 1; job <= 3; ++job) join(links, 0, job, 100, {{0, 1.0}});
  join(links, 0, 4, 300, {{1, 1.0}});
  for (const auto& [job, time] : play(links)) CHECK(time == 400);
}

TEST_CASE("links: one job that stands for eight is slowed as the eight") {
  // Eight that take 0.3 each want 2.4: rate 1/2.4, 100 become 240.
  SharedLinks eight = with_links(1), one = with_links(1);
  for (std::uint32_t job = 0; job < 8; ++job) join(eight, 0, job, 100'000, {{0, 0.3}});
  join(one, 0, 0, 100'000, {{0, 0.3, 8}});
  const auto unfolded = play(eight), folded = play(one);
  for (const auto& [job, time] : unfolded) CHECK(time == folded.at(0));
  CHECK(std::abs(folded.at(0) - 240'000) <= 1);
}

TEST_CASE("links: years of virtual time lose nothing") {
  SharedLinks links = with_links(1);
  const std::int64_t hour = 3'600'000'000'000;
  std::int64_t now = 0;
  for (int i = 0; i < 10'000; ++i) {
    join(links, now, 0, hour, {{0, 1.0}});
    join(links, now, 1, hour, {{0, 1.0}});
    now = *links.next_done_ns();
    while (links.take_done(now)) {
    }
  }
  CHECK(now == 20'000 * hour);
  // Rates that do not divide: of three jobs on one link each has 1/3. An hour's work three times: late by 1 ns at most.
  for (std::uint32_t job = 0; job < 3; ++job) join(links, now, job, hour, {{0, 1.0}});
  CHECK(*links.next_done_ns() >= now + 3 * hour);
  CHECK(*links.next_done_ns() <= now + 3 * hour + 1);
}

TEST_CASE("links: time that runs backwards and fractions beyond a link are internal faults") {
  SharedLinks links = with_links(1);
  join(links, 10, 0, 5, {{0, 1.0}});
  CHECK_THROWS(join(links, 9, 1, 5, {{0, 1.0}}));
  CHECK_THROWS(join(links, 10, 1, 5, {{0, 1.5}}));
  CHECK_THROWS(join(links, 10, 1, -1, {{0, 0.5}}));
}

namespace {

struct DrawnJob {
  std::int64_t at, price;
  std::vector<Demand> demands;
};

/// Instants few enough that several jobs often join at one.
std::vector<DrawnJob> draw_jobs(std::uint32_t num_links) {
  std::vector<DrawnJob> jobs(*rc::gen::inRange<std::size_t>(1, 14));
  for (DrawnJob& job : jobs) {
    job.at = 100 * *rc::gen::inRange<std::int64_t>(0, 8);
    job.price = *rc::gen::inRange<std::int64_t>(0, 1000);
    for (LinkId link = 0; link < num_links; ++link)
      if (*rc::gen::inRange(0, 3) == 0)
        job.demands.push_back({link, *rc::gen::inRange(0, 17) / 16.0, *rc::gen::inRange(1, 4)});
  }
  std::sort(jobs.begin(), jobs.end(), [](const DrawnJob& a, const DrawnJob& b) { return a.at < b.at; });
  return jobs;
}

/// When each is done, by its place in `jobs`; those of one instant join in the order of `order`.
std::vector<std::int64_t> play(const std::vector<DrawnJob>& jobs, std::uint32_t num_links,
                               const std::vector<std::size_t>& order) {
  SharedLinks links = with_links(num_links);
  std::vector<std::int64_t> done(jobs.size(), -1);
  std::size_t next_job = 0;
  for (;;) {
    const auto next = links.next_done_ns();
    if (next_job < order.size() && (!next || jobs[order[next_job]].at <= *next)) {
      const std::int64_t now = jobs[order[next_job]].at;
      while (next_job < order.size() && jobs[order[next_job]].at == now) {
        const DrawnJob& job = jobs[order[next_job]];
        links.join(now, static_cast<std::uint32_t>(order[next_job]), job.price, job.demands);
        ++next_job;
      }
    } else if (next) {
      while (const auto job = links.take_done(*next)) done[*job] = *next;
    } else {
      return done;
    }
  }
}

/// Progressive filling in floating point over everything there is: slow and obvious.
std::vector<double> rates_of(const std::vector<DrawnJob>& jobs, const std::vector<bool>& running,
                             std::uint32_t num_links) {
  std::vector<double> rate(jobs.size(), 0.0);
  std::vector<bool> rising = running;
  for (;;) {
    double step = 1.0;  // how much further all may rise
    for (LinkId link = 0; link < num_links; ++link) {
      double used = 0.0, wanted = 0.0;
      for (std::size_t j = 0; j < jobs.size(); ++j)
        for (const Demand& d : jobs[j].demands)
          if (running[j] && d.link == link) {
            used += rate[j] * d.fraction * d.times;
            if (rising[j]) wanted += d.fraction * d.times;
          }
      if (wanted > 0.0) step = std::min(step, std::max(0.0, 1.0 - used) / wanted);
    }
    for (std::size_t j = 0; j < jobs.size(); ++j)
      if (rising[j]) rate[j] = std::min(1.0, rate[j] + step), rising[j] = rate[j] < 1.0;
    for (LinkId link = 0; link < num_links; ++link) {
      double used = 0.0;
      for (std::size_t j = 0; j < jobs.size(); ++j)
        for (const Demand& d : jobs[j].demands)
          if (running[j] && d.link == link) used += rate[j] * d.fraction * d.times;
      for (std::size_t j = 0; j < jobs.size(); ++j)
        for (const Demand& d : jobs[j].demands)
          if (d.link == link && d.fraction > 0.0 && used > 1.0 - 1e-12) rising[j] = false;
    }
    if (std::none_of(rising.begin(), rising.end(), [](bool b) { return b; })) return rate;
  }
}

std::vector<double> play_slowly(const std::vector<DrawnJob>& jobs, std::uint32_t num_links) {
  std::vector<double> left, done(jobs.size(), -1.0);
  for (const DrawnJob& job : jobs) left.push_back(static_cast<double>(job.price));
  double now = 0.0;
  for (;;) {
    std::vector<bool> running(jobs.size());
    double next = 1e300;
    for (std::size_t j = 0; j < jobs.size(); ++j) {
      running[j] = done[j] < 0.0 && static_cast<double>(jobs[j].at) <= now;
      if (done[j] < 0.0 && !running[j]) next = std::min(next, static_cast<double>(jobs[j].at));
    }
    const std::vector<double> rate = rates_of(jobs, running, num_links);
    for (std::size_t j = 0; j < jobs.size(); ++j)
      if (running[j]) next = std::min(next, now + left[j] / rate[j]);
    if (next == 1e300) return done;
    for (std::size_t j = 0; j < jobs.size(); ++j) {
      if (!running[j]) continue;
      left[j] -= (next - now) * rate[j];
      if (left[j] < 1e-6) done[j] = next;
    }
    now = next;
  }
}

}  // namespace

TEST_CASE("property: links share as progressive filling does, and order within an instant does not matter") {
  CHECK(rc::check("max-min", [] {
    const auto num_links = *rc::gen::inRange<std::uint32_t>(1, 6);
    const std::vector<DrawnJob> jobs = draw_jobs(num_links);
    std::vector<std::size_t> order(jobs.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    const std::vector<std::int64_t> done = play(jobs, num_links, order);
    const std::vector<double> slowly = play_slowly(jobs, num_links);
    for (std::size_t j = 0; j < jobs.size(); ++j) {
      // Late by less than 1 ns itself, and by what others' lateness cost it: each shifts a change of its rate.
      RC_ASSERT(static_cast<double>(done[j]) > slowly[j] - 1e-3 - static_cast<double>(jobs.size()));
      RC_ASSERT(static_cast<double>(done[j]) < slowly[j] + 1.0 + static_cast<double>(jobs.size()));
    }
    // From behind, but for the instants.
    std::vector<std::size_t> other = order;
    std::reverse(other.begin(), other.end());
    std::stable_sort(other.begin(), other.end(), [&](std::size_t a, std::size_t b) { return jobs[a].at < jobs[b].at; });
    RC_ASSERT(play(jobs, num_links, other) == done);
  }));
}

TEST_CASE("property: a link that is wanted all the time carries all it can") {
  CHECK(rc::check("work conservation", [] {
    // All begin at 0 on one link: until the last is done it is full, or all run at rate 1. So the last one ends at the
    // sum of what they take, or at its own price, whichever is later; per job less than 1 ns of rounding.
    SharedLinks links = with_links(1);
    const auto count = *rc::gen::inRange<std::uint32_t>(1, 40);
    double carried = 0.0;
    std::int64_t longest = 0;
    for (std::uint32_t job = 0; job < count; ++job) {
      const auto price = *rc::gen::inRange<std::int64_t>(1, 100'000);
      links.join(0, job, price, std::vector<Demand>{{0, 1.0}});
      carried += static_cast<double>(price), longest = std::max(longest, price);
    }
    std::int64_t end = 0;
    for (const auto& [job, time] : play(links)) end = std::max(end, time);
    RC_ASSERT(end >= longest);
    RC_ASSERT(static_cast<double>(end) >= carried);
    RC_ASSERT(static_cast<double>(end) < carried + count);
  }));
}

TEST_CASE("property: folding alike jobs changes no nanosecond") {
  CHECK(rc::check("folding", [] {
    // Classes of jobs: each on a link of its own and, all of them, on some shared ones.
    const auto classes = *rc::gen::inRange<std::uint32_t>(1, 5);
    SharedLinks folded = with_links(3 + classes), unfolded = with_links(3 + 64);
    std::vector<std::uint32_t> class_of;
    for (std::uint32_t c = 0; c < classes; ++c) {
      const auto times = *rc::gen::inRange(1, 9);
      const auto price = *rc::gen::inRange<std::int64_t>(1, 100'000);
      const double own = *rc::gen::inRange(1, 101) / 100.0, shared = *rc::gen::inRange(1, 101) / 300.0;
      const auto on = *rc::gen::inRange<LinkId>(0, 3);
      folded.join(0, c, price, std::vector<Demand>{{on, shared, times}, {3 + c, own}});
      for (int i = 0; i < times; ++i) {
        const auto job = static_cast<std::uint32_t>(class_of.size());
        unfolded.join(0, job, price, std::vector<Demand>{{on, shared}, {3 + job, own}});
        class_of.push_back(c);
      }
    }
    const auto of_class = play(folded);
    for (const auto& [job, time] : play(unfolded)) RC_ASSERT(time == of_class.at(class_of[job]));
  }));
}

TEST_CASE("links: what a link carried, how long it was in use and how full it was") {
  // Two jobs of 100 ns that each want 3/4: from 0 both, each at 2/3, together full; the first joined at 0 alone would
  // be done at 100. Both are done at 150. Then one of 50 ns that wants half, from 200 on.
  SharedLinks links = with_links(2);
  join(links, 0, 0, 100, {{0, 0.75, 1, 7.0}});
  join(links, 0, 1, 100, {{0, 0.75, 1, 7.0}});
  CHECK(play(links) == std::map<std::uint32_t, std::int64_t>{{0, 150}, {1, 150}});
  join(links, 200, 2, 50, {{0, 0.5, 1, 2.0}, {1, 0.25, 2, 1.0}});
  play(links);
  CHECK(links.load(0).bytes == 16.0);
  CHECK(links.load(0).busy_ns == 200);
  CHECK(links.load(0).full_ns == Approx(2 * 75.0 + 25.0));
  CHECK(links.load(0).peak == Approx(1.0));
  CHECK(links.load(1).bytes == 2.0);
  CHECK(links.load(1).busy_ns == 50);
  CHECK(links.load(1).peak == Approx(0.5));
}
