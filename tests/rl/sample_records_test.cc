// Which samples of a step people are shown, and of which steps.
#include "rl/sample_records.h"

#include <catch2/catch.hpp>
#include <vector>

using namespace hotbunk;
using Indices = std::vector<std::size_t>;

TEST_CASE("of a step the best and the worst sample are chosen, then evenly spread ones") {
  const std::vector<double> rewards{0.5, 0.5, 0.25, 1.0, 0.5, 0.0, 0.5, 1.0, 0.0, 0.5};
  CHECK(chosen_samples(rewards, 10, 2) == Indices{3, 5});  // the first of equals
  CHECK(chosen_samples(rewards, 10, 1) == Indices{3});
  CHECK(chosen_samples(rewards, 10, 4) == Indices{0, 3, 5, 6});  // 0, 3, 6 and 9 would be even
  CHECK(chosen_samples({}, 10, 4) == Indices{0, 3, 6, 9});
  CHECK(chosen_samples({}, 3, 8) == Indices{0, 1, 2});
  CHECK(chosen_samples(rewards, 10, 0).empty());
  CHECK(chosen_samples({}, 0, 4).empty());
  CHECK(chosen_samples({}, 5, 1) == Indices{0});
}

TEST_CASE("samples are written of the first step, the last, and about twenty between, or as often as asked") {
  const auto written = [](std::int64_t steps, std::optional<std::int32_t> every) {
    std::vector<std::int32_t> out;
    for (std::int32_t step = 1; step <= steps; ++step)
      if (writes_samples(step, steps, every)) out.push_back(step);
    return out;
  };
  CHECK(written(5, {}) == std::vector<std::int32_t>{1, 2, 3, 4, 5});
  CHECK(written(1000, {}).size() == 21);  // 1 and each 50th, the last among them
  CHECK(written(10, 4) == std::vector<std::int32_t>{1, 4, 8, 10});
  CHECK(written(10, 0).empty());
}
