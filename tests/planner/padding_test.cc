// Micro-batches whose samples are filled up to the longest of them (train.padding): what is computed is the padding,
// too, what budgets count is not.
#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "planner/rl/length_moments.h"
#include "tests/planner/played.h"
#include "tests/planner/pricers.h"

namespace hotbunk {
namespace {

const std::string packed =
    "name: packed\nmodel: qwen2.5-7b\nprofile: verl-fsdp\ncluster: {gpu: h100-sxm-80gb, nodes: 1, gpus_per_node: 8}\n"
    "train: {engine: fsdp2, layout: {dp: 8}, micro_batch_sequences: 4, micro_batch_tokens: 16384, recompute: full}\n"
    "rollout: {engine: vllm, layout: {tp: 2, dp: 4}, memory_fraction: 0.5}\n"
    "algorithm: {prompts: 64, samples_per_prompt: 4, mini_batches: 2, reference: false}\n"
    "workload: {prompt_tokens: {mean: 512, max: 1024}, response_tokens: {mean: 1024, max: 3072}}\n";

RlPrice priced_packed(std::vector<std::string> sets, const std::vector<std::string>& more = {}) {
  sets.insert(sets.end(), more.begin(), more.end());
  const auto pricer = pricer_of_text(packed, sets);
  return pricer->rl().price(pricer->point());
}
double phase_of(const RlPrice& p, RlPhase phase) { return p.seconds[static_cast<std::size_t>(phase)]; }

TEST_CASE(
    "padded samples take as much longer as the longest of a micro-batch is, and the memory of the longest of all") {
  const Scenario s = scenario_of_text(packed);
  const double mean = 512 + 1024, four = 512 + longest_of(s.workload.response_tokens, 4);
  REQUIRE(four > 1.2 * mean);
  const RlPrice none = priced_packed({}), padded = priced_packed({"train.padding=micro-batch"});
  for (const RlPhase phase : {RlPhase::old_logprobs, RlPhase::train}) {
    INFO(name_of(phase));
    CHECK(phase_of(padded, phase) > phase_of(none, phase) * (1.0 + 0.7 * (four / mean - 1.0)));
    CHECK(phase_of(padded, phase) < phase_of(none, phase) * (1.0 + 1.1 * (four / mean - 1.0)));
  }
  CHECK(phase_of(padded, RlPhase::rollout) <= phase_of(none, RlPhase::rollout) * 1.001);  // engines pad nothing
  const auto pricer = pricer_of_text(packed, {"train.padding=micro-batch"});
  CHECK(pricer->train().fullest_tokens(pricer->point().train) == 4 * 4096);
  // One sample has nothing to be padded to, equal ones neither.
  const std::vector<std::string> one = {"train.micro_batch_sequences=1"},
                                 equal = {"workload.prompt_tokens.distribution=fixed",
                                          "workload.response_tokens.distribution=fixed"};
  for (const std::vector<std::string>& sets : {one, equal})
    CHECK(phase_of(priced_packed(sets, {"train.padding=micro-batch"}), RlPhase::train) ==
          Approx(phase_of(priced_packed(sets), RlPhase::train)).epsilon(0.01));
}

TEST_CASE("what is padded to the longest of all samples takes that length in every micro-batch, and one is enough") {
  const Scenario s = scenario_of_text(packed);
  const double mean = 512 + 1024, all = 512 + longest_of(s.workload.response_tokens, 64 * 4);
  const std::vector<std::string> batch = {"train.padding=batch"};
  const RlPrice none = priced_packed({}), padded = priced_packed(batch);
  for (const RlPhase phase : {RlPhase::old_logprobs, RlPhase::train}) {
    INFO(name_of(phase));
    CHECK(phase_of(padded, phase) > phase_of(none, phase) * (1.0 + 0.7 * (all / mean - 1.0)));
    CHECK(phase_of(padded, phase) < phase_of(none, phase) * (1.0 + 1.2 * (all / mean - 1.0)));
  }
  CHECK(phase_of(padded, RlPhase::rollout) <= phase_of(none, RlPhase::rollout) * 1.001);
  // A micro-batch of one sample is as long as the longest of them all.
  const double one = phase_of(priced_packed({"train.micro_batch_sequences=1"}), RlPhase::train),
               one_padded =
                   phase_of(priced_packed({"train.micro_batch_sequences=1", "train.padding=batch"}), RlPhase::train);
  CHECK(one_padded > 1.4 * one);
  // What a verdict says of it: the padded tokens, and how often some sample is too long.
  const auto pricer = pricer_of_text(packed, batch);
  const TrainModel& model = pricer->train();
  const TrainPoint& p = pricer->point().train;
  CHECK(model.mean_tokens(p) == Approx(4 * all).epsilon(0.01));
  CHECK(model.overflow_chance(p, 4 * 4096.0) == 0.0);
  CHECK(model.overflow_chance(p, 4 * mean) > 0.999);
  CHECK(model.overflow_chance(p, 4 * 3900.0) < model.overflow_chance(p, 4 * 3500.0));
}

TEST_CASE("a budget of tokens counts a sample's own, and beside the longest many are as long as it") {
  const std::vector<std::string> budget = {"train.micro_batch_sequences=0", "train.micro_batch_tokens=8192"};
  const auto of = [&](const char* padding) {
    std::vector<std::string> sets = budget;
    sets.push_back(std::string("train.padding=") + padding);
    return pricer_of_text(packed, sets);
  };
  const auto none = of("none"), padded = of("micro-batch");
  CHECK(none->point().train.micro_batch == 5);  // 8192 / 1536
  CHECK(padded->point().train.micro_batch == 5);
  CHECK(padded->train().fullest_tokens(padded->point().train) == 4096 * (1 + (8192 - 4096) / 1536));
}

TEST_CASE("padded passes last in a simulation as long as they are priced, in stages too") {
  for (const std::vector<std::string>& layout :
       {std::vector<std::string>{},
        {"profile=verl-megatron", "train.engine=megatron", "train.layout={dp: 4, pp: 2}"}}) {
    std::vector<std::string> sets = layout;
    for (const char* set :
         {"train.padding=micro-batch", "workload.prompt_tokens={mean: 512, max: 512, distribution: fixed}",
          "workload.response_tokens={mean: 1024, max: 3072, cv: 0.6}", "algorithm.prompts=512"})
      sets.emplace_back(set);
    const auto pricer = pricer_of_text(packed, sets);
    const RlPrice price = pricer->rl().price(pricer->point());
    const auto job = priced_job(*pricer);
    if (!job) FAIL(render(job.error()));
    const Played played = play(*job, pricer->train().cost());
    for (const RlPhase p : {RlPhase::old_logprobs, RlPhase::train}) {
      INFO(name_of(p));
      CHECK(played.seconds[static_cast<std::size_t>(p)] ==
            Approx(phase_of(price, p)).epsilon(0.15));  // lengths are drawn
    }
  }
}

}  // namespace
}  // namespace hotbunk
