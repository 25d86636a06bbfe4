// Ranges of the transient section: what is joined because nobody asks about it any more changes no answer.
#include "graph/ordered_ranges.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <limits>
#include <random>
#include <vector>

namespace hotbunk {
namespace {

struct Held {
  std::int64_t at, bytes;
};

/// Takes and gives drawn from `seed`, whose askers know ever more, but not all the same. Where each range went;
/// `every`: after so many steps what all later askers know is joined, 0: never.
std::vector<std::int64_t> places(unsigned seed, std::size_t every) {
  constexpr std::size_t steps = 400;
  std::mt19937 draw(seed);
  const auto below = [&](std::uint32_t n) { return static_cast<std::int32_t>(draw() % n); };
  std::vector<Clock> asked(steps), later(steps + 1, clock_of(std::numeric_limits<std::int32_t>::max()));
  for (std::size_t i = 0; i < steps; ++i)
    for (std::size_t s = 0; s < 4; ++s) asked[i][s] = std::max(-1, static_cast<std::int32_t>(i) - below(40));
  for (std::size_t i = steps; i-- > 0;)
    for (std::size_t s = 0; s < max_streams; ++s) later[i][s] = std::min(later[i + 1][s], asked[i][s]);
  OrderedRanges ranges;
  std::vector<Held> held;
  std::vector<std::int64_t> out;
  for (std::size_t i = 0; i < steps; ++i) {
    if (every > 0 && i % every == 0) ranges.join(later[i]);
    if (!held.empty() && below(100) < 48) {
      const auto which = static_cast<std::size_t>(below(static_cast<std::uint32_t>(held.size())));
      Clock done = before_all;
      for (int uses = 1 + below(2); uses > 0; --uses)
        done[static_cast<std::size_t>(below(4))] = static_cast<std::int32_t>(i);
      ranges.give(held[which].at, held[which].bytes, done);
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(which));
    } else {
      const std::int64_t bytes = 64 * (1 + below(6));
      out.push_back(ranges.take(bytes, asked[i]));
      held.push_back({out.back(), bytes});
    }
  }
  return out;
}

TEST_CASE("joining what all later askers know changes no answer") {
  for (unsigned seed = 0; seed < 200; ++seed) {
    const std::vector<std::int64_t> alone = places(seed, 0);
    for (const std::size_t every : {1, 3, 8}) {
      CAPTURE(seed, every);
      REQUIRE(places(seed, every) == alone);
    }
  }
}

TEST_CASE("a stretch that one asker may use goes to no other that knows less") {
  OrderedRanges ranges;
  Clock knows = before_all;
  const std::int64_t first = ranges.take(64, knows), second = ranges.take(64, knows);
  Clock done = before_all;
  done[1] = 5;
  ranges.give(first, 64, done);
  done[1] = 3;
  ranges.give(second, 64, done);
  knows[1] = 4;
  ranges.join(knows);
  CHECK(ranges.take(64, knows) == second);
  CHECK(ranges.take(64, knows) == second + 64);
  knows[1] = 5;
  CHECK(ranges.take(64, knows) == first);
}

}  // namespace
}  // namespace hotbunk
