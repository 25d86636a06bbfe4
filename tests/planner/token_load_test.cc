// What micro-batches hold, beside drawn lengths.
#include "planner/train/token_load.h"

#include <fmt/format.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <numeric>
#include <vector>

#include "exec/lengths.h"
#include "planner/rl/length_moments.h"
#include "tests/planner/pricers.h"

namespace hotbunk {
namespace {

/// The share-th largest of `sums` sums of `count` drawn responses.
double drawn_quantile(const LengthSpec& l, int count, int sums, double share) {
  std::vector<double> all;
  for (int i = 0; i < sums; ++i) {
    double sum = 0.0;
    for (int k = 0; k < count; ++k)
      sum += static_cast<double>(draw_length(l, 7, 1, LengthOf::response, static_cast<std::int64_t>(i) * count + k));
    all.push_back(sum);
  }
  std::sort(all.begin(), all.end());
  return all[static_cast<std::size_t>((1.0 - share) * sums)];
}

TEST_CASE("a micro-batch's load is a random sum: its quantiles are those of drawn lengths") {
  for (const double cv : {0.3, 0.5, 0.8})
    for (const int count : {4, 16, 40}) {
      const LengthSpec l{.mean = 400, .max = 4096, .cv = cv};
      const TokenLoad load({l.mean, mean_square(l) - l.mean * l.mean, l.max}, count);
      INFO(fmt::format("cv {} count {}", cv, count));
      CHECK(load.exceeded_with(1e-3) == Approx(drawn_quantile(l, count, 20000, 1e-3)).epsilon(0.05));
      CHECK(load.exceeded_with(0.1) == Approx(drawn_quantile(l, count, 20000, 0.1)).epsilon(0.015));
      // One is the other's inverse.
      CHECK(load.exceeds(load.exceeded_with(1e-6)) == Approx(1e-6).epsilon(1e-6));
    }
}

TEST_CASE("a load ends at the longest sequences, and without spread is what it is") {
  const TokenLoad one({400, 160000, 1024}, 1), same({400, 0, 400}, 16);
  CHECK(one.exceeded_with(1e-9) == 1024);
  CHECK(one.exceeds(1024) == 0.0);
  CHECK(same.exceeded_with(1e-6) == 6400);
  CHECK(same.exceeds(6399) == 1.0);
  CHECK(same.exceeds(6400) == 0.0);
}

const char* const two_gpus =
    "model: qwen2.5-7b\ncluster: {gpu: h800-sxm-80gb, nodes: 1, gpus_per_node: 2}\nprofile: verl-fsdp\n"
    "train: {engine: fsdp1, layout: {dp: 2}, micro_batch_tokens: 32768, recompute: full}\n"
    "rollout: {engine: vllm, layout: {tp: 2, dp: 1}, memory_fraction: 0.6}\n"
    "algorithm: {prompts: 1024, samples_per_prompt: 5, mini_batches: 4}\n"
    "workload: {prompt_tokens: {mean: 130, max: 1024, cv: 0.4}, response_tokens: {mean: 270, max: 1024, cv: 0.4}}\n";

TEST_CASE("memory is that of the tokens that come") {
  // 16 sequences of at most 2048 tokens are 32768; of mean 400 with (0.4^2 (130^2 + 270^2)) = 14368 of variance they
  // are 6400, give or take sqrt(16 * 14368) = 479. In 1,000 iterations 4 * 2 * 40 * 1000 = 320,000 are drawn: one of
  // them is about 4.5 deviations above.
  const auto s = pricer_of_text(two_gpus, {"train.micro_batch_sequences=16"});
  const TrainPoint p = s->point().train;
  CHECK((p.micro_batch == 16 && p.micro_batches == 40));
  const double tokens = s->train().fullest_tokens(p);
  CHECK(tokens > 6400 + 4.4 * 479);
  CHECK(tokens < 6400 + 5.6 * 479);                                            // the lognormal leans to the right
  CHECK(s->train().overflow_chance(p, tokens) == Approx(1e-3).epsilon(0.05));  // a whole token more than the quantile
  CHECK(s->train().overflow_chance(p, 32768) == 0.0);
  CHECK(s->train().overflow_chance(p, 6000) == Approx(1.0));
  // Cut by tokens, a micro-batch of 32768 is filled; a step of 40 sequences fills none of 24000.
  const auto filled = pricer_of_text(two_gpus);
  CHECK(filled->train().fullest_tokens(filled->point().train) == 32768);
  const auto few = pricer_of_text(two_gpus, {"train.micro_batch_tokens=24000", "algorithm.prompts=64"});
  CHECK(few->point().train.sequences() == 40);
  CHECK(few->train().fullest_tokens(few->point().train) < 21000);
  CHECK(few->train().fullest_tokens(few->point().train) > 16000 + 3.5 * 758);  // sqrt(40 * 14368)
}

TEST_CASE("our own buffers are of their capacity, whatever comes") {
  const auto s = pricer_of_text(two_gpus, {"profile=hotbunk", "train.engine=fsdp2", "train.micro_batch_sequences=16"});
  const TrainPoint p = s->point().train;
  CHECK(s->train().fullest_tokens(p) >= 16 * 2048);
  CHECK(s->train().overflow_chance(p, 100) == 0.0);
}

TEST_CASE("a step of one micro-batch finds no gradients") {
  // PyTorch's FSDP allocates them in backward: at the loss of the only micro-batch there are none, at that of a second
  // one all.
  const auto one = pricer_of_text(two_gpus, {"algorithm.prompts=8", "algorithm.mini_batches=1"});
  const TrainPoint p = one->point().train;
  REQUIRE(p.micro_batches == 1);
  TrainPoint two = p;
  two.micro_batches = 2;
  const auto bytes = [&](const TrainPoint& q, PeakTensor t) {
    return one->train().peak_bytes(q, one->train().layers(q), 0)[static_cast<std::size_t>(t)];
  };
  CHECK(bytes(two, PeakTensor::grads) == Approx(7615616512.0 / 2 * 4));
  CHECK(bytes(p, PeakTensor::grads) < bytes(two, PeakTensor::grads));
}

}  // namespace
}  // namespace hotbunk
