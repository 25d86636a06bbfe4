// Launches of other systems whose outcome is known (data/published/launches.csv), as scenarios: what is said of them
// must be what happened.
#include <catch2/catch.hpp>

#include "planner/answers/verdict.h"
#include "tests/paths.h"
#include "tests/planner/pricers.h"

namespace hotbunk {
namespace {

Explanation explained(const std::string& launch, const std::vector<std::string>& sets = {}) {
  auto s = load_scenario(std::filesystem::path(source_folder) / "data/published/launches" / (launch + ".yaml"), sets);
  if (!s) FAIL(render(s.error()));
  return explain(*pricer_for(*s));
}

TEST_CASE("launches that run every day are not told no") {
  for (const char* launch : {"verl-7b-2xh800-min", "verl-14b-4xh800-min", "verl-72b-32xh800-min"}) {
    INFO(launch);
    const Explanation e = explained(launch);
    CHECK(e.price.fits);
    CHECK(e.verdict.verdict != Verdict::no);
    CHECK(e.verdict.load.overflows <= 1.05);  // at most the one in 1,000 that memory is charged for
  }
}

// grpo_math_8B_megatron.yaml ran out of memory at 0.8 and runs at 0.6 (NVIDIA-NeMo/RL pull request 687).
TEST_CASE("NeMo-RL's engines start first: what PyTorch keeps of the sleeping trainer comes on top of their share") {
  const Explanation before = explained("nemo-llama3.1-8b-8xh100", {"rollout.memory_fraction=0.8"}),
                    after = explained("nemo-llama3.1-8b-8xh100");
  CHECK(before.verdict.verdict == Verdict::tight);
  CHECK(after.verdict.verdict == Verdict::fits);
  CHECK_THAT(render(before),
             Catch::Contains("tight: beside the engine PyTorch may keep so much of the sleeping trainer"));
  // The share of the device is whole, the trainer's communicators are beside it.
  CHECK(before.price.rollout_bytes > 0.8 * before.capacity_bytes + 1e9);
  CHECK(before.verdict.asleep_bytes == Approx(before.price.rollout_bytes + 1.575e10).epsilon(1e-6));
  // While the trainer is awake its own tensors are in these blocks: a small share of the device does not add them.
  const Explanation small = explained("nemo-llama3.1-8b-8xh100", {"rollout.memory_fraction=0.25"});
  REQUIRE(small.price.sync_bytes > small.price.rollout_bytes + 1e9);
  CHECK(small.verdict.asleep_bytes == Approx(small.price.rollout_bytes + 1.575e10).epsilon(1e-6));
  // Nothing sleeps apart.
  CHECK(explained("verl-7b-2xh800-min").verdict.asleep_bytes == 0.0);
}

// THUDM/slime issue 1851: eight actors of 102 GiB on a node of 1,007 GiB, in use 999.9, killed.
TEST_CASE("a host that holds its ranks and not what its node holds besides is tight") {
  const Explanation slime = explained("slime-qwen3-30b-a3b-8xh100");
  CHECK(slime.price.fits);
  CHECK(slime.verdict.verdict == Verdict::tight);
  CHECK(slime.verdict.host_bytes * 8.0 == Approx(999.9 * 1024 * 1024 * 1024).epsilon(0.05));
  CHECK_THAT(render(slime), Catch::Contains("tight: of the host"));
  CHECK(explained("slime-qwen3-30b-a3b-8xh100", {"cluster.host_memory_gib=2048"}).verdict.verdict == Verdict::fits);
  // Without the CPUs' optimizer the device is too small, as slime's documentation says.
  CHECK(explained("slime-qwen3-30b-a3b-8xh100", {"optimizer.cpu_fraction=0"}).verdict.verdict == Verdict::no);
  CHECK(explained("verl-dsv3-671b-96xh20").verdict.verdict == Verdict::fits);
}

// OpenRLHF/OpenRLHF issue 1013: a 7B on nodes of 8 GPUs and 512 GB. With vLLM's sleep Ray killed workers while models
// were loaded, without it the same launch runs.
TEST_CASE("OpenRLHF's engines sleep on the host while every rank loads a whole model") {
  const std::string text =
      "model: qwen2.5-7b\nprofile: openrlhf\ncluster: {gpu: h100-sxm-80gb, nodes: 2, host_memory_gib: 477}\n"
      "train: {engine: zero1, layout: {dp: 16}, micro_batch_sequences: 2, micro_batch_tokens: 14192, recompute: full}\n"
      "rollout: {engine: vllm, layout: {tp: 1, dp: 16}, memory_fraction: 0.5, sleep_level: 1}\n"
      "algorithm: {prompts: 128, samples_per_prompt: 8, mini_batches: 8}\n"
      "workload: {prompt_tokens: {mean: 750, max: 3000}, response_tokens: {mean: 1365, max: 4096}}\n";
  const auto with = pricer_of_text(text, {"train.offload=none"}),
             without = pricer_of_text(text, {"train.offload=none", "rollout.sleep=false"});
  const Explanation asleep = explain(*with), awake = explain(*without);
  const double model = 2.0 * 7'615'616'512, process = 3e9;
  CHECK(awake.price.host_bytes == Approx(process + model));
  CHECK(asleep.price.host_bytes - awake.price.host_bytes > model);
  CHECK(asleep.verdict.host_bytes > asleep.verdict.host_limit_bytes);
  CHECK(awake.verdict.host_bytes < awake.verdict.host_limit_bytes);
  // A pinned copy takes the next power of two of each tensor: of a layer's 37,888 x 3,584 and 3,584 x 18,944 matrices
  // (259 and 129.5 MiB) 512 and 256 MiB, of q, k and v and of the output (31.5 and 24.5 MiB) 32 each, of the two of
  // 152,064 x 3,584 (1,039.5 MiB) 2,048 each.
  const double mib = 1024.0 * 1024.0;
  CHECK(with->rl().price_rollout(with->point().rollout).pinned_bytes ==
        Approx((28 * (253 + 126.5 + 0.5 + 7.5) + 2 * 1008.5) * mib).epsilon(1e-9));
}

TEST_CASE("a verdict has three words") {
  // Room to spare, less than what is reserved, less than what tensors take: the device shrinks.
  const Explanation roomy = explained("verl-7b-2xh800-min");
  CHECK(roomy.verdict.verdict == Verdict::fits);
  CHECK(roomy.verdict.error == Approx(0.04));
  const double mib = 1024.0 * 1024.0;
  const auto device = [&](double bytes) {
    return explained("verl-7b-2xh800-min", {"cluster.device_memory_mib=" + std::to_string(std::lround(bytes / mib))});
  };
  const Explanation tight = device(1.01 * roomy.price.train_bytes), no = device(0.99 * roomy.price.train_bytes);
  CHECK((tight.price.fits && tight.verdict.verdict == Verdict::tight));
  CHECK((!no.price.fits && no.verdict.verdict == Verdict::no));
  CHECK(no.verdict.load.overflows > 1.0);
  CHECK(tight.verdict.load.overflows < no.verdict.load.overflows);
  CHECK_THAT(render(tight), Catch::Contains("  tight: with what PyTorch reserves "));
  CHECK_THAT(to_json(tight), Catch::Contains("\"verdict\": \"tight\"") && Catch::Contains("\"fits\": true"));
}

TEST_CASE(
    "the default headroom of what is priced is the error of its bytes, and none is lost to a fraction of a byte") {
  const SearchOptions tenth{.device_bytes = 85027979264.0 + 3, .headroom = 0.1};
  CHECK(tenth.limit_bytes() >= (85027979264.0 + 3) * 0.9);
  CHECK(tenth.limit_bytes() < (85027979264.0 + 3) * 0.9 + 3);
  CHECK(SearchOptions{.device_bytes = 1e9}.limit_bytes() == 1e9);
}

}  // namespace
}  // namespace hotbunk
