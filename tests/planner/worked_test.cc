// The worked configurations and check figures of the field, each expectation derived by hand in a comment.
#include <catch2/catch.hpp>
#include <numeric>

#include "base/format.h"
#include "planner/answers/answers.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "tests/paths.h"

namespace hotbunk {
namespace {

struct Worked {
  Scenario scenario;
  std::unique_ptr<ScenarioPricer> pricer;
  Explanation answer;

  double part(PeakTensor t) const {
    const TrainModel& m = pricer->train();
    for (const PeakPart& p : m.peak_parts(answer.point.train, m.layers(answer.point.train)))
      if (p.tensor == t) return p.bytes;
    return 0.0;
  }
  double seconds(RlPhase p) const { return answer.price.seconds[static_cast<std::size_t>(p)]; }
  double network(RlPhase phase, const std::string& what) const { return link(phase, what).network_wire; }
  double node(RlPhase phase, const std::string& what) const { return link(phase, what).node_wire; }
  LinkUse link(RlPhase phase, const std::string& what) const {
    for (const LinkUse& u : answer.links)
      if (u.phase == phase && u.what == what) return u;
    return {};
  }
  const Lever* lever(const std::string& change) const {
    for (const Lever& l : answer.levers)
      if (l.change == change) return &l;
    return nullptr;
  }
};

Worked worked(const std::string& file, const std::vector<std::string>& sets = {}) {
  auto s = load_scenario(std::string(source_folder) + "/scenarios/" + file, sets);
  if (!s) FAIL(render(s.error()));
  auto pricer = ScenarioPricer::make(*s, catalog_root());
  if (!pricer) FAIL(render(pricer.error()));
  Explanation answer = explain(**pricer);
  return {*s, std::move(*pricer), std::move(answer)};
}

/// Tokens of a mean micro-batch with what fills it up, over those that are trained: what moves has these.
double filled(const Worked& w) {
  const TrainModel& m = w.pricer->train();
  const TrainPoint& t = w.answer.point.train;
  return 1.0 + m.padding_tokens(t) / static_cast<double>(t.micro_batch * m.setting().sequence);
}

/// What holds of every answer: parts add up, no phase is faster than its FLOPs or bytes allow.
void check_sane(const Worked& w) {
  const TrainModel& m = w.pricer->train();
  const TrainPrice t = m.price(w.answer.point.train);
  const auto parts = m.peak_parts(w.answer.point.train, m.layers(w.answer.point.train));
  REQUIRE(parts.size() >= 4);
  const double sum =
      std::accumulate(parts.begin(), parts.end(), 0.0, [](double a, const PeakPart& p) { return a + p.bytes; });
  CHECK(sum == Approx(t.peak_bytes));
  for (std::size_t i = 1; i < parts.size(); ++i) CHECK(parts[i - 1].bytes >= parts[i].bytes);
  // Training cannot beat its model FLOPs at the datasheet peak, nor take 20 times as long.
  const double mini = w.pricer->rl().setting().mini_batches;
  const double least =
      mini * t.model_flops / (m.cost().peak_flops(DType::bf16) * static_cast<double>(w.answer.point.train.ranks()));
  CHECK(w.seconds(RlPhase::train) > least);
  CHECK(w.seconds(RlPhase::train) < 20.0 * least);
  // A forward pass alone is shorter than the step.
  CHECK(w.seconds(RlPhase::old_logprobs) < w.seconds(RlPhase::train));
  // Every decode step reads the engine's weights once.
  const RolloutPrice r = w.pricer->rl().price_rollout(w.answer.point.rollout);
  CHECK(r.seconds() >
        r.steps * r.weight_bytes * (w.scenario.model.moe ? 0.02 : 1.0) / m.cost().hardware().memory_bandwidth);
  CHECK(!w.answer.levers.empty());
}

}  // namespace

TEST_CASE("worked: 7B on 8, FSDP2 with Ulysses 4, rollout TP2") {
  const Worked w = worked("qwen2.5-7b-ulysses.yaml");
  check_sane(w);
  CHECK(w.answer.price.fits);
  const double n = 7'615'616'512;
  // One fp32 shard over 8 ranks: 3.81 GB, its moments 7.62 GB, fp32 gradients 3.81 GB: verl's 16 B/param = 15.2 GB.
  CHECK(w.part(PeakTensor::master) == Approx(n * 4 / 8).epsilon(0.001));
  CHECK(w.part(PeakTensor::moments) == Approx(n * 8 / 8).epsilon(0.001));
  CHECK(w.part(PeakTensor::grads) == Approx(n * 4 / 8).epsilon(0.001));
  CHECK(w.part(PeakTensor::params) == 0.0);
  // A buffer of 4096 tokens on each rank. verl's logits are bf16, their gradient takes their place, and the division by
  // the temperature makes one more: 4 B, 2.5 GB. With so little at the loss the peak is the backward of a layer.
  const TrainModel& model = w.pricer->train();
  CHECK(model.framework().loss_bytes.value == 4.0);
  CHECK(w.part(PeakTensor::logits) == 0.0);
  CHECK(w.part(PeakTensor::rebuilt) > 0.0);
  CHECK(4096.0 * 152064 * 4 < w.part(PeakTensor::rebuilt) + w.part(PeakTensor::gathered));
  // Layers' inputs: 28 x 4096 tokens x 3584 x 2 B.
  CHECK(w.part(PeakTensor::kept) == Approx(28.0 * 4096 * 3584 * 2));
  // Peak is the rollout's: half of the weights, and what 0.7 of the device leaves.
  CHECK(w.answer.price.peak_bytes() == w.answer.price.rollout_bytes);
  const RolloutPrice r = w.pricer->rl().price_rollout(w.answer.point.rollout);
  CHECK(r.weight_bytes == Approx(n * 2 / 2));
  // SGLang keeps 0.3 of what is free beside the context and the engine's communicator.
  const FrameworkProfile& f = w.pricer->train().framework();
  CHECK(r.weight_bytes + r.pool_bytes ==
        Approx(0.7 * (79.19 * gib - f.context_bytes.value - f.communicator_bytes.value)).epsilon(0.001));
  CHECK(r.kv_bytes_per_token == 28.0 * 2 * 128 * 2 * 2);  // 28 layers, 4 / 2 KV heads of 128, K and V, bf16
  // Links. The sync gathers 7/8 of 15.23 GB; sleep moves master and moments each way.
  CHECK(w.node(RlPhase::sync, "gathered buckets") == Approx(n * 2 * 7 / 8));
  // verl's order brings the 4 B of the parameters back for the sync, and to the host again.
  CHECK(w.link(RlPhase::sleep, "training's state to the host").host_bytes == Approx(n * (12 + 4) / 8).epsilon(0.001));
  CHECK(w.link(RlPhase::wake, "and back").host_bytes == Approx(n * (12 + 4) / 8).epsilon(0.001));
  // 86 micro-batches: fp32 reduce-scatter once, bf16 gather twice each.
  CHECK(w.node(RlPhase::train, "dp gradients") == Approx(86.0 * n * 4 * 7 / 8).epsilon(0.001));
  CHECK(w.node(RlPhase::train, "dp parameters") == Approx(86.0 * n * 2 * 2 * 7 / 8).epsilon(0.001));
  // Scoring gathers once in each of them; the reference comes from the host in bf16 first, 1/8 of it.
  CHECK(w.node(RlPhase::old_logprobs, "dp parameters") == Approx(86.0 * n * 2 * 7 / 8).epsilon(0.001));
  CHECK(w.node(RlPhase::reference, "dp parameters") == Approx(86.0 * n * 2 * 7 / 8).epsilon(0.001));
  CHECK(w.link(RlPhase::reference, "reference from the host").host_bytes == Approx(n * 2 / 8).epsilon(0.001));
  CHECK(w.seconds(RlPhase::reference) - w.seconds(RlPhase::old_logprobs) + w.pricer->rl().driver_seconds() ==
        Approx(w.pricer->train().cost().host_copy_seconds(n * 2 / 8)).epsilon(0.001));
  // Ulysses per layer and pass: q and o of 28 heads, k and v of 4 heads (4 ways need no repetition), 3/4 of them leave.
  // Three passes (forward, again under full recomputation, backward) of 256 sequences by 3, the last one alone.
  const double pass = 0.75 * 2 * 3840 * 128 * (28 + 4 + 4 + 28);
  CHECK(w.node(RlPhase::train, "ulysses") == Approx(256.0 / 3 * 28 * 3 * pass * filled(w)));
  CHECK(w.network(RlPhase::train, "dp gradients") == 0.0);  // one node
}

TEST_CASE("worked: 7B on 8, FSDP2 dp4 x cp2, rollout 2 x TP4, and the figures that circulate wrong") {
  const Worked w = worked("qwen2.5-7b-colocated.yaml");
  check_sane(w);
  CHECK(w.answer.price.fits);
  const double n = 7'615'616'512;
  // Wrong in the wild: "1.75 GB of parameters and 3.5 GB of optimizer per GPU". Over dp x cp = 8 ranks a bf16 shard is
  // 1/8 x 2 B (1.75 GB at 7e9), the moments 1/8 x 8 B (7 GB), the fp32 master 1/8 x 4 B (3.5 GB).
  CHECK(w.part(PeakTensor::moments) / n * 7e9 == Approx(7e9).epsilon(0.001));
  CHECK(w.part(PeakTensor::master) / n * 7e9 == Approx(3.5e9).epsilon(0.001));
  // Sharded over dp alone (4 ranks), 7e9 parameters are 3.5 GB in bf16 and their moments 14 GB.
  const Worked hybrid = worked("qwen2.5-7b-colocated.yaml", {"train.layout.fsdp=4"});
  CHECK(hybrid.part(PeakTensor::moments) / n * 7e9 == Approx(14e9).epsilon(0.001));
  CHECK(hybrid.part(PeakTensor::master) / n * 7e9 / 2 == Approx(3.5e9).epsilon(0.001));  // at 2 B instead of 4
  // Shards of 4, twice: each gradient shard is reduced over its 2 replicas, 2 * 1/2 of its bytes, in 22 micro-batches.
  CHECK(w.node(RlPhase::train, "replicas' gradients") == 0.0);
  CHECK(hybrid.node(RlPhase::train, "replicas' gradients") == Approx(22.0 * n * 4 / 4).epsilon(0.001));
  // Wrong in the wild: "a full gather of 7B in bf16 peaks at 28 GB". A gather delivers 2 B per parameter, 14 GB at 7e9.
  CHECK(w.pricer->rl().sync_job(w.answer.point).model_bytes / n * 7e9 == Approx(14e9));
  // Qwen2.5-7B: 12.41 GiB received per rank.
  CHECK(w.node(RlPhase::sync, "gathered buckets") / gib == Approx(12.41).margin(0.005));
  // fp32 logits of 16,384 tokens: 9.28 GiB per copy; this profile holds them and their bf16
  // gradient, 6 B of each.
  CHECK(16384.0 * 152064 * 4 / gib == Approx(9.28).margin(0.005));
  CHECK(w.part(PeakTensor::logits) == Approx(16384.0 * 152064 * 6));
  // The ring sends one block of K and V to the neighbour: 2 KV-head tensors of 4 x 128, once forward, once more when
  // recomputed, twice (with gradients) in backward. 256 sequences by 12. A scoring pass goes forward once.
  const double ring = 256.0 / 12 * 28 * (2.0 * 15360 * 4 * 256);
  CHECK(w.node(RlPhase::train, "cp ring") == Approx(4.0 * ring * filled(w)));
  CHECK(w.node(RlPhase::old_logprobs, "cp ring") == Approx(ring * filled(w)));
  CHECK(filled(w) - 1.0 == Approx(18.0 / 30720));  // 12 sequences in 4 chunks each: 1.5 tokens of each
  // Under reshard-after-forward the gathered peak is the root unit, not the model: embedding and head in bf16 are
  // 2.18 GB, and as much of its gradient.
  CHECK(w.part(PeakTensor::gathered) == Approx(2 * 2.18e9).epsilon(0.005));
}

TEST_CASE("worked: 32B on 32, Megatron TP4 PP2 DP4 to rollout TP4") {
  const Worked w = worked("qwen2.5-32b-megatron.yaml");
  check_sane(w);
  CHECK(w.answer.price.fits);
  // A rank holds 1/8 of 32.76e9 parameters: bf16 2 B, fp32 main gradients 4 B; master and moments further over 4.
  const double own = 32'763'876'352.0 / 8;
  REQUIRE(parameter_count(w.scenario.model) == 32'763'876'352);
  CHECK(w.part(PeakTensor::params) == Approx(own * 2).epsilon(0.002));
  CHECK(w.part(PeakTensor::grads) == Approx(own * 4).epsilon(0.002));
  CHECK(w.part(PeakTensor::master) == Approx(own * 4 / 4).epsilon(0.002));
  CHECK(w.part(PeakTensor::moments) == Approx(own * 8 / 4).epsilon(0.002));
  // SP splits the kept inputs over tp: 32 layers x 10240 tokens / 4 x 5120 x 2 B, one micro-batch in flight at the end.
  CHECK(w.part(PeakTensor::kept) == Approx(32.0 * 10240 / 4 * 5120 * 2 * filled(w)));
  // DP over 4 ranks 4 apart: two on a node, so half of the ring's edges leave the node, and of a rank's bytes.
  CHECK(w.node(RlPhase::train, "dp gradients") == Approx(own * 4 * 3 / 4 / 2).epsilon(0.002));
  CHECK(w.network(RlPhase::train, "dp gradients") == Approx(own * 4 * 3 / 4 / 2).epsilon(0.002));
  // The first stage passes 64 micro-batches of 10240 / 4 x 5120 in bf16 on, the last one as many gradients back.
  CHECK(w.network(RlPhase::train, "pipeline") == Approx(64.0 * 10240 / 4 * 5120 * 2 * filled(w)));
  CHECK(w.node(RlPhase::train, "pipeline") == 0.0);
}

TEST_CASE("worked: 70B on 32 with Megatron TP4 PP2 does not fit, and what to change") {
  const Worked w = worked("llama-3.1-70b-megatron.yaml");
  check_sane(w);
  CHECK_FALSE(w.answer.price.fits);
  CHECK(w.answer.price.peak_bytes() == w.answer.price.train_bytes);
  // 70.55e9 / 8 x (2 + 4 + 12 / 4) = 79.4 GB of states before the first activation; the device has 85.5 GB.
  const double own = 70'553'706'496.0 / 8;
  REQUIRE(parameter_count(w.scenario.model) == 70'553'706'496);
  const double states =
      w.part(PeakTensor::params) + w.part(PeakTensor::grads) + w.part(PeakTensor::master) + w.part(PeakTensor::moments);
  CHECK(states == Approx(own * 9).epsilon(0.002));
  // Largest first: the gradients.
  const TrainModel& m = w.pricer->train();
  CHECK(m.peak_parts(w.answer.point.train, m.layers(w.answer.point.train))[0].tensor == PeakTensor::grads);
  // Remedies: twice the tensor or pipeline parallelism halves parameters and gradients. Recomputation is full already,
  // and half a micro-batch does not hold the longest sequence (E217), so it is not offered.
  for (const char* helps : {"train.layout.tp doubled, dp halved", "train.layout.pp doubled, dp halved"}) {
    REQUIRE(w.lever(helps));
    CHECK(w.lever(helps)->fits);
    CHECK(w.lever(helps)->bytes < -20 * gib);
  }
  CHECK(10240.0 / 2 < w.scenario.workload.prompt_tokens.max + w.scenario.workload.response_tokens.max);
  CHECK_FALSE(w.lever("train.micro_batch_tokens halved"));
  const Worked wider = worked("llama-3.1-70b-megatron.yaml", {"train.layout.tp=8", "train.layout.dp=2"});
  CHECK(wider.answer.price.fits);
}

TEST_CASE("worked: 671B on 128, TP8 PP4 CP4 EP32, two engines of 64 GPUs with attention-dp 8") {
  const Worked w = worked("deepseek-v3-megatron.yaml");
  check_sane(w);
  CHECK(w.answer.price.fits);
  // Rollout: 256 experts over 64 ranks, attention over 64 / 8 = 8. Attention of a layer: 7168 x 1536 + 1536 x 128 x 192
  // + 7168 x 576 + 512 x 128 x 256 + 128 x 128 x 7168 = 187.1e6 elements, 61 layers 11.4e9.
  const double attention =
      61.0 * (7168.0 * 1536 + 1536.0 * 128 * 192 + 7168.0 * 576 + 512.0 * 128 * 256 + 128.0 * 128 * 7168);
  const double all = static_cast<double>(parameter_count(w.scenario.model));
  const RolloutPrice r = w.pricer->rl().price_rollout(w.answer.point.rollout);
  CHECK(r.weight_bytes == Approx(2 * (attention / 8 + (all - attention) / 64)));
  // MLA caches 512 + 64 values per layer and token, unsplit by tp; an engine's tokens lie on 8 attention groups.
  CHECK(r.kv_bytes_per_token == Approx(61.0 * 576 * 2 / 8));
  // Training: the fullest stage has 15 MoE layers; 8 experts of 44.04e6 per rank and layer exist once (EDP 1: 18 B
  // each).
  const double experts = 15.0 * 8 * 3 * 7168 * 2048;
  CHECK(w.part(PeakTensor::moments) > experts * 8);
  CHECK(w.part(PeakTensor::moments) < experts * 8 * 1.05);  // the rest is over cp 4
  // Gradients of experts are reduced over nobody; the others over the cp group of 4, each on a node of its own. First
  // stage: 16 layers' attention (down projections, 7168 x (1536 + 576), on every tp rank, the rest over 8), 3 dense
  // MLPs of 18432, 13 shared experts and routers, and the embedding.
  const double down = 7168.0 * (1536 + 576), up = attention / 61 - down;
  const double stage = 16 * (down + up / 8) + 3 * 3.0 * 7168 * 18432 / 8 + 13 * (3.0 * 7168 * 2048 / 8 + 256.0 * 7168) +
                       129280.0 * 7168 / 8;
  CHECK(w.network(RlPhase::train, "dp gradients") == Approx(stage * 4 * 3 / 4).epsilon(0.002));
  CHECK(w.network(RlPhase::train, "expert dispatch and combine") >
        w.node(RlPhase::train, "expert dispatch and combine"));
  // Gathering 671e9 x 2 B on every GPU is what the sync costs: 625 buckets of 2 GiB at 10 ms, 45,000
  // tensors at 0.3 ms. Shard to shard is no lever: verl has none.
  CHECK(w.seconds(RlPhase::sync) > 15);
  CHECK(w.seconds(RlPhase::sync) < 55);
  for (const Lever& lever : w.answer.levers) CHECK(lever.change != "sync.mode = direct");
  // 80 GB do not hold it: states alone are 18 B x 656e9 / 128 = 92 GB.
  const Worked small = worked("deepseek-v3-megatron.yaml", {"cluster.gpu=h800-sxm-80gb"});
  CHECK_FALSE(small.answer.price.fits);
  CHECK(small.answer.price.train_bytes > 92e9);
}

TEST_CASE("worked: arithmetic of moments, caches, links") {
  // A: Adam's moments alone are 8 B per parameter.
  const Worked w = worked("qwen2.5-7b-ulysses.yaml");
  const TrainModel& m = w.pricer->train();
  const double n = static_cast<double>(parameter_count(w.scenario.model));
  PeakPart moments{};
  for (const PeakPart& p : m.peak_parts({.sharding = Sharding::replicated}, m.layers({})))
    if (p.tensor == PeakTensor::moments) moments = p;
  const double each = moments.bytes / n;
  CHECK(each * 7e9 == Approx(56e9).epsilon(0.001));
  CHECK(each * 13e9 == Approx(104e9).epsilon(0.001));
  CHECK(each * 30e9 == Approx(240e9).epsilon(0.001));
  CHECK(each * 70e9 == Approx(560e9).epsilon(0.001));
  // G: 56 GB at 13.6 GB/s 4.12 s, at 27.2 GB/s 2.06 s.
  ClusterSpec c = w.scenario.cluster;
  for (double rate : {13.6e9, 27.2e9}) {
    Hardware h = hardware_from_datasheet(c);
    h.host_bandwidth.value = rate;
    CHECK(CostModel(h, c).host_copy_seconds(56e9) == Approx(rate < 2e10 ? 4.12 : 2.06).margin(0.005));
  }
  // F: 14 GB over 100 Gb/s take 1.12 s.
  Hardware h = hardware_from_datasheet(c);
  h.inter.bandwidth.value = 12.5e9;
  CHECK(CostModel(h, c).collective_seconds(OpKind::send, {2, 2, 1}, 14e9) == Approx(1.12).margin(0.001));
  // D2: b 32, s 2048, k 32, d 128, bf16: 1 GiB per layer whole, 256 MiB per rank at TP4, 8 GiB for 32 layers.
  Scenario s = w.scenario;
  s.model.heads = s.model.kv_heads = 32, s.model.head_dim = 128, s.model.layers = 32;
  s.rollout.engine = RolloutEngine::vllm;  // which divides a sequence's cache among context-parallel ranks
  const TrainModel train(s.model, train_setting_of(s), CostModel(hardware_from_datasheet(c), c), {});
  const RlModel rl(train, rl_setting_of(s));
  const auto cache = [&](std::int64_t tp, std::int64_t cp, double tokens) {
    return rl.price_rollout({.tp = tp, .engines = 8 / (tp * cp), .cp = cp}).kv_bytes_per_token * tokens;
  };
  CHECK(cache(1, 1, 32 * 2048) / 32 == gib);
  CHECK(cache(4, 1, 32 * 2048) / 32 == 256 * mib);
  CHECK(cache(4, 1, 32 * 2048) == 8 * gib);
  // b 32, s 32768 at TP4 CP2: 2 GiB per layer and rank, 64 GiB per rank ("64 GB over 4 GPUs, 16 each" is wrong).
  CHECK(cache(4, 2, 32.0 * 32768) / 32 == 2 * gib);
  CHECK(cache(4, 2, 32.0 * 32768) == 64 * gib);
  // verl's fp32 masters: 16 B per parameter, 7.6e9 over 8 ranks 15.2 GB; all-bf16 states would be 8 B, 7.6 GB.
  CHECK(m.price({.dp = 8, .sharding = Sharding::fsdp}).state_bytes == Approx(15.23e9).epsilon(0.001));
  const TrainModel low(w.scenario.model, {.state = {2, 2, 2, 4}}, m.cost(), m.framework());
  CHECK(low.price({.dp = 8, .sharding = Sharding::fsdp}).state_bytes == Approx(7.6e9).epsilon(0.003));
}

TEST_CASE("a given pipeline split: the heaviest stage decides, not the average") {
  const Worked even = worked("qwen2.5-32b-megatron.yaml");
  const Worked uneven = worked("qwen2.5-32b-megatron.yaml", {"train.pipeline_split=[40, 24]"});
  // 40 of 64 layers instead of 32: a quarter more of the layers' parameters on the fullest stage.
  const double layer = (32'763'876'352.0 - 2.0 * 152064 * 5120) / 64 / 4;
  CHECK(uneven.part(PeakTensor::params) - even.part(PeakTensor::params) == Approx(8 * layer * 2).epsilon(0.002));
  CHECK(uneven.seconds(RlPhase::train) > 1.15 * even.seconds(RlPhase::train));
}

}  // namespace hotbunk
