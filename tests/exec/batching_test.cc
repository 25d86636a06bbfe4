#include "exec/batching.h"

#include <rapidcheck.h>

#include <catch2/catch.hpp>
#include <numeric>
#include <set>

using namespace hotbunk;

TEST_CASE("micro-batches hold every sample once, within the budget, equally many on all ranks") {
  CHECK(rc::check("batching", [] {
    BatchConfig c{*rc::gen::inRange<std::int64_t>(1, 6), *rc::gen::inRange<std::int64_t>(1, 4),
                  *rc::gen::inRange<std::int64_t>(20, 60), *rc::gen::inRange<std::int64_t>(1, 8)};
    const auto count = *rc::gen::inRange<std::size_t>(3, 60);
    const auto tokens = *rc::gen::container<std::vector<std::int64_t>>(count, rc::gen::inRange<std::int64_t>(1, 21));
    const auto minis = make_mini_batches(tokens, c);
    RC_ASSERT(minis.has_value());
    std::set<std::int64_t> seen;
    std::int64_t expected_first = 0;
    for (const MiniBatch& mini : *minis) {
      RC_ASSERT(mini.first_sample == expected_first);
      RC_ASSERT(mini.end_sample > mini.first_sample);
      expected_first = mini.end_sample;
      std::int64_t lightest = INT64_MAX, heaviest = 0;
      for (const auto& rank : mini.ranks) {
        RC_ASSERT(static_cast<std::int64_t>(rank.size()) == mini.micro_batches());
        std::int64_t load = 0;
        for (const MicroBatch& micro : rank) {
          std::int64_t sum = 0, pairs = 0;
          for (std::int64_t i : micro.samples) {
            RC_ASSERT(i >= mini.first_sample && i < mini.end_sample);
            RC_ASSERT(seen.insert(i).second);
            const std::int64_t n = tokens[static_cast<std::size_t>(i)];
            sum += n;
            for (std::int64_t t = 0; t < n; ++t) pairs += t + 1;
          }
          RC_ASSERT(micro.sizes.tokens == sum && micro.sizes.attention_pairs == pairs);
          RC_ASSERT(micro.sizes.seqs == static_cast<std::int64_t>(micro.samples.size()));
          RC_ASSERT(sum <= c.micro_batch_tokens && micro.sizes.seqs <= c.max_seqs);
          load += sum;
        }
        lightest = std::min(lightest, load);
        heaviest = std::max(heaviest, load);
      }
      // Longest first into the lightest rank: no rank is ahead by more than one (the longest possible) sample.
      RC_ASSERT(heaviest - lightest <= 20);
    }
    RC_ASSERT(expected_first == static_cast<std::int64_t>(tokens.size()));
    RC_ASSERT(seen.size() == tokens.size());
  }));
}

TEST_CASE("longest first into the lightest rank, first fit into micro-batches") {
  // Lengths 5 4 3 3 1 on two ranks: 5 -> r0, 4 -> r1, 3 (sample 2) -> r1 (4 < 5), 3 (sample 3) -> r0, 1 -> r1 (7 < 8).
  // Budget 7: r0 packs {5}, {3}; r1 packs {4, 3}, {1}.
  const std::vector<std::int64_t> tokens{5, 4, 3, 3, 1};
  const auto minis = make_mini_batches(tokens, {2, 1, 7, 8});
  REQUIRE(minis);
  const auto& ranks = minis->front().ranks;
  REQUIRE(minis->front().micro_batches() == 2);
  CHECK(ranks[0][0].samples == std::vector<std::int64_t>{0});
  CHECK(ranks[0][1].samples == std::vector<std::int64_t>{3});
  CHECK(ranks[1][0].samples == std::vector<std::int64_t>{1, 2});
  CHECK(ranks[1][1].samples == std::vector<std::int64_t>{4});
}

TEST_CASE("a rank without work left runs empty micro-batches") {
  const std::vector<std::int64_t> tokens{4, 1};
  const auto minis = make_mini_batches(tokens, {3, 1, 4, 8});
  REQUIRE(minis);
  REQUIRE(minis->front().ranks[2].size() == 1);
  CHECK(minis->front().ranks[2][0].sizes.tokens == 0);
  CHECK(minis->front().ranks[2][0].sizes.seqs == 0);
}

TEST_CASE("a sample longer than a micro-batch is refused with the arithmetic") {
  const std::vector<std::int64_t> tokens{3, 9};
  const auto minis = make_mini_batches(tokens, {1, 1, 8, 8});
  REQUIRE_FALSE(minis);
  CHECK(minis.error().front().code == "E312");
  CHECK(minis.error().front().notes.front() == "it has 9 tokens, train.micro_batch_tokens is 8");
  CHECK(make_mini_batches(tokens, {1, 3, 16, 8}).error().front().message ==
        "2 samples cannot be cut into 3 mini-batches");
}
