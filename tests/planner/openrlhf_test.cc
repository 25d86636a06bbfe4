// What is DeepSpeed's and OpenRLHF's own: ZeRO-3's shards beside a master copy, its optimizer on the CPUs, a critic on
// GPUs of its own. Both launches were told that they do not fit.
#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "planner/answers/verdict.h"
#include "planner/search/lacking.h"
#include "tests/planner/played.h"
#include "tests/planner/pricers.h"

namespace hotbunk {
namespace {

const std::string launch =
    "name: launch\nmodel: qwen2.5-7b\nprofile: openrlhf\n"
    "cluster: {gpu: h100-sxm-80gb, nodes: 2, gpus_per_node: 8, host_memory_gib: 2048}\nplacement: disaggregated\n"
    "train: {engine: fsdp1, layout: {dp: 8}, precision: {grads: bf16}, micro_batch_sequences: 1, micro_batch_tokens: "
    "8192, recompute: full, offload: none}\n"
    "rollout: {engine: vllm, layout: {tp: 2, dp: 4}, memory_fraction: 0.9, sleep_level: 1}\nsync: {mode: stream}\n"
    "algorithm: {name: grpo, prompts: 128, samples_per_prompt: 4, mini_batches: 4, reference: false}\n"
    "workload: {prompt_tokens: {mean: 512, max: 2048}, response_tokens: {mean: 1024, max: 6144}}\n";
constexpr double elements = 7'615'616'512.0;

TrainPrice trained(const std::vector<std::string>& sets) {
  const auto pricer = pricer_of_text(launch, sets);
  return pricer->train().price(pricer->point().train);
}
double at(const RlPrice& p, RlPhase phase) { return p.seconds[static_cast<std::size_t>(phase)]; }

TEST_CASE("ZeRO-3 keeps 16 bytes of an element: a bf16 shard and gradient beside master copy and moments") {
  const double own = elements / 8;
  const TrainPrice device = trained({}), host = trained({"optimizer.cpu_fraction=1"}),
                   half = trained({"optimizer.cpu_fraction=0.5"});
  CHECK(device.state_bytes == Approx(own * (2 + 2 + 4 + 8)).epsilon(1e-6));
  CHECK(device.source_bytes == Approx(own * 2).epsilon(1e-6));  // what an update of weights reads
  CHECK(device.host_bytes == 0);
  // On the CPUs: master and moments, the sums of gradients in bf16, and their copy in fp32 to step with. The device has
  // the shards that it gathers.
  CHECK(host.state_bytes == Approx(own * 2).epsilon(1e-6));
  CHECK(host.host_bytes == Approx(own * (4 + 8 + 2 + 4)).epsilon(1e-6));
  CHECK(half.state_bytes == Approx(own * (2 + 1 + 2 + 4)).epsilon(1e-6));
  CHECK(half.host_bytes == Approx(own * 9).epsilon(1e-6));
  CHECK(host.step_seconds > device.step_seconds);
  // 16 micro-batches of a sample: each one's gradients go down, each later one's sums come up, at last the parameters.
  CHECK(host.host_down_bytes == Approx(16 * own * 2).epsilon(1e-6));
  CHECK(host.host_up_bytes == Approx(15 * own * 2 + own * 2).epsilon(1e-6));
  // FSDP's one shard is the master copy.
  const TrainPrice fsdp = trained({"profile=verl-fsdp", "train.engine=fsdp2"});
  CHECK(fsdp.state_bytes == Approx(own * (4 + 4 + 8)).epsilon(1e-6));
}

TEST_CASE("an optimizer on the CPUs beside FSDP's shards is refused where the system has none") {
  const Scenario s = scenario_of_text(launch, {"profile=verl-fsdp", "train.engine=fsdp2", "optimizer.cpu_fraction=1"});
  const auto pricer = ScenarioPricer::make(s, catalog_root());
  REQUIRE_FALSE(pricer);
  CHECK(pricer.error()[0].code == "E214");
  CHECK_THAT(pricer.error()[0].message, Catch::Contains("verl-fsdp keeps its optimizer where its shards are"));
}

TEST_CASE("OpenRLHF's ZeRO-3 with adam_offload trains what does not fit without") {
  const std::vector<std::string> wide = {"model=qwen2.5-32b"};  // 32.8e9 x 16 B / 8 = 61 GiB beside 30 GiB of units
  const auto with = [&](const char* fraction) {
    std::vector<std::string> sets = wide;
    sets.push_back(std::string("optimizer.cpu_fraction=") + fraction);
    return explain(*pricer_of_text(launch, sets)).verdict.verdict;
  };
  CHECK(with("0") == Verdict::no);
  CHECK(with("1") == Verdict::fits);
}

TEST_CASE("a critic on GPUs of its own takes no memory of the actor's, and time only where it takes longer") {
  const auto priced = [](const std::vector<std::string>& sets) { return pricer_of_text(launch, sets); };
  const auto grpo = priced({}), beside = priced({"algorithm.name=ppo"}),
             apart = priced({"algorithm.name=ppo", "algorithm.critic_placement=disaggregated"});
  const RlPrice alone = grpo->rl().price(grpo->point()), shared = beside->rl().price(beside->point()),
                own = apart->rl().price(apart->point());
  CHECK(own.train_bytes == alone.train_bytes);
  CHECK(own.host_bytes == alone.host_bytes);
  CHECK(own.iteration_seconds == Approx(alone.iteration_seconds));
  CHECK(shared.train_bytes > alone.train_bytes);
  CHECK(at(shared, RlPhase::critic) > 0.0);
  CHECK(apart->rl().gpus(apart->point()) == beside->rl().gpus(beside->point()) + 8);
  CHECK_THAT(render(explain(*apart)), Catch::Contains("the critic has 8 GPUs of its own beside these 16"));
  // OpenRLHF's updates go tensor by tensor: no bucket is too small for one.
  CHECK_THAT(render(explain(*apart)), !Catch::Contains("bucket of"));
  CHECK_THAT(describe(apart->point()), Catch::EndsWith("sync stream"));
  // Its values have nothing to wait beside where the actor has no log-probs to compute.
  const auto values =
      priced({"algorithm.name=ppo", "algorithm.critic_placement=disaggregated", "algorithm.old_logprobs=false"});
  const RlPrice longer = values->rl().price(values->point());
  CHECK(at(longer, RlPhase::values) == Approx(at(shared, RlPhase::values)));
  CHECK(at(longer, RlPhase::critic) == 0.0);
  // OpenRLHF has such nodes, verl has none.
  CHECK(lacking(apart->scenario(), apart->point(), apart->train().framework().can).empty());
  const auto verl = priced(
      {"algorithm.name=ppo", "algorithm.critic_placement=disaggregated", "profile=verl-fsdp", "train.engine=fsdp2"});
  const std::vector<Lack> lacks = lacking(verl->scenario(), verl->point(), verl->train().framework().can);
  CHECK(std::ranges::count(lacks, "algorithm.critic_placement", &Lack::key) == 1);
}

TEST_CASE("a reference on GPUs of its own takes nothing of the actor's host, and time only where it takes longer") {
  const auto priced = [](const std::vector<std::string>& sets) { return pricer_of_text(launch, sets); };
  const std::string apart_key = "algorithm.reference_placement=disaggregated";
  const auto none = priced({"algorithm.reference=false"}), beside = priced({"algorithm.reference=true"}),
             apart = priced({"algorithm.reference=true", apart_key});
  const RlPrice without = none->rl().price(none->point()), shared = beside->rl().price(beside->point()),
                own = apart->rl().price(apart->point());
  CHECK(at(shared, RlPhase::reference) > 0.0);
  CHECK(at(own, RlPhase::reference) == 0.0);  // the actor's log-probs take as long
  CHECK(own.iteration_seconds == Approx(without.iteration_seconds));
  CHECK(own.host_bytes == Approx(without.host_bytes));
  CHECK(beside->rl().parts(beside->point()).train.swapped_reference > 0.0);
  CHECK(apart->rl().parts(apart->point()).train.swapped_reference == 0.0);
  CHECK(apart->rl().gpus(apart->point()) == beside->rl().gpus(beside->point()) + 8);
  CHECK_THAT(render(explain(*apart)), Catch::Contains("the reference model has 8 GPUs of its own beside these 16"));
  // Where the actor has no log-probs to compute, all of it is waited for; in a simulation, too.
  const auto waited = priced({"algorithm.reference=true", apart_key, "algorithm.old_logprobs=false",
                              "workload.prompt_tokens={mean: 512, max: 512, distribution: fixed}",
                              "workload.response_tokens={mean: 1024, max: 1024, distribution: fixed}"});
  const RlPrice whole = waited->rl().price(waited->point());
  CHECK(at(whole, RlPhase::reference) > 0.0);
  const auto job = priced_job(*waited);
  if (!job) FAIL(render(job.error()));
  const Played played = play(*job, waited->train().cost());
  for (const RlPhase p : {RlPhase::reference, RlPhase::train})
    CHECK(played.seconds[static_cast<std::size_t>(p)] == Approx(at(whole, p)).epsilon(0.03));
  CHECK(lacking(apart->scenario(), apart->point(), apart->train().framework().can).empty());
  const auto verl = priced({"algorithm.reference=true", apart_key, "profile=verl-fsdp", "train.engine=fsdp2"});
  const std::vector<Lack> lacks = lacking(verl->scenario(), verl->point(), verl->train().framework().can);
  CHECK(std::ranges::count(lacks, "algorithm.reference_placement", &Lack::key) == 1);
}

TEST_CASE("a critic on GPUs of its own lasts in a simulation as long as it is priced, in stages too") {
  for (const std::vector<std::string>& layout :
       {std::vector<std::string>{}, {"profile=hotbunk", "train.engine=megatron", "train.layout={dp: 4, pp: 2}"}}) {
    std::vector<std::string> sets = layout;
    for (const char* set :
         {"algorithm.name=ppo", "algorithm.critic_placement=disaggregated", "algorithm.old_logprobs=false",
          "workload.prompt_tokens={mean: 512, max: 512, "
          "distribution: fixed}",
          "workload.response_tokens={mean: 1024, max: 1024, distribution: "
          "fixed}"})
      sets.emplace_back(set);
    const auto pricer = pricer_of_text(launch, sets);
    const RlPrice price = pricer->rl().price(pricer->point());
    const auto job = priced_job(*pricer);
    if (!job) FAIL(render(job.error()));
    const Played played = play(*job, pricer->train().cost());
    REQUIRE(at(price, RlPhase::values) > 0.0);
    for (const RlPhase p : {RlPhase::values, RlPhase::critic, RlPhase::train}) {
      INFO(name_of(p));
      CHECK(played.seconds[static_cast<std::size_t>(p)] == Approx(at(price, p)).epsilon(0.03).margin(1e-6));
    }
  }
}

}  // namespace
}  // namespace hotbunk
