// Layer-wise offload: training's state on the host, copied up around every gather, stepped by the CPUs.
#include <catch2/catch.hpp>

#include "planner/answers/answers.h"
#include "planner/answers/choices.h"
#include "planner/search/train_points.h"
#include "planner/train/layer_kinds.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "tests/planner/small_models.h"

namespace hotbunk {
namespace {

double at(const TrainPrice& t, Term term) { return t.seconds[static_cast<std::size_t>(term)]; }
double at(const TrainPrice& t, Category c) { return t.bytes[static_cast<std::size_t>(c)]; }

TrainPoint fsdp8(std::int64_t micro_batches) {
  return {.dp = 8, .sharding = Sharding::fsdp, .micro_batches = micro_batches};
}
TrainPoint on_host(TrainPoint p) {
  p.optimizer_on_host = true;
  return p;
}

/// 8 ranks of a node: 25 GB/s links, 8 x 41 GB/s of host memory, copies of 10 us.
constexpr double link = 25e9, memory = 8 * 41e9, latency = 10e-6;

const char* const offloaded_seven_b =
    "model: qwen2.5-7b\ncluster: {gpu: h100-sxm-80gb, nodes: 1}\nprofile: verl-fsdp\n"
    "train: {engine: fsdp2, layout: {dp: 8}, micro_batch_tokens: 16384}\n"
    "rollout: {engine: sglang, layout: {tp: 2, dp: 4}}\nalgorithm: {prompts: 64, samples_per_prompt: 8}\n"
    "workload: {prompt_tokens: {mean: 512, max: 1024}, response_tokens: {mean: 1536, max: 4096}}\n";

std::unique_ptr<ScenarioPricer> offload_pricer(const std::vector<std::string>& sets) {
  auto s = load_scenario_text(offloaded_seven_b, "t.yaml", sets);
  if (!s) FAIL(render(s.error()));
  auto p = ScenarioPricer::make(*s, catalog_root());
  if (!p) FAIL(render(p.error()));
  return std::move(*p);
}

}  // namespace

TEST_CASE("layer-wise offload: the host holds the state, the device what is on its way") {
  const TrainModel model = model_of(small_gpt(), 8);
  const TrainPoint p = fsdp8(1);
  const auto l = model.layers(p);
  const TrainPrice awake = model.price(p, l), host = model.price(on_host(p), l);
  const double own = (8 * l.dense.parameters + model.end_parameters(p, l, 0)) / 8;
  // One fp32 shard, fp32 gradients, two fp32 moments.
  CHECK(awake.host_bytes == 0);
  CHECK(host.host_bytes == Approx(own * 16));
  CHECK(at(awake, Category::optimizer) + at(awake, Category::grads) == Approx(own * 16));
  CHECK(at(host, Category::optimizer) + at(host, Category::grads) == 0);
  CHECK(host.state_bytes == 0);
  CHECK(host.source_bytes == Approx(awake.source_bytes));
  // Two shards of the fullest unit in fp32 going up, one unit's gradients going down.
  const double unit = std::max(l.dense.parameters, 2.0 / 3.0 * model.end_parameters(p, l, 0));
  CHECK(awake.peak_bytes - host.peak_bytes == Approx(own * 16 - unit / 8 * (2 * 4 + 4)));
}

TEST_CASE("layer-wise offload: every gather copies its shard up, every reduction its gradients down") {
  const TrainModel model = model_of(small_gpt(), 8);  // nothing overlaps
  const double tensors = tensor_count(small_gpt());
  for (const std::int64_t m : {1, 4})
    for (const bool reshard : {true, false}) {
      TrainPoint p = fsdp8(m);
      p.reshard_after_forward = reshard;
      const auto l = model.layers(p);
      const double own = (8 * l.dense.parameters + model.end_parameters(p, l, 0)) / 8;
      const double up = tensors * latency + own * 4 / link, down = up;
      const double add = own * 3 * 4 / (memory / 8), all = static_cast<double>(m);
      const TrainPrice awake = model.price(p, l), host = model.price(on_host(p), l);
      CHECK(at(host, Term::data) - at(awake, Term::data) ==
            Approx(all * ((reshard ? 2 : 1) * up + down) + (all - 1) * add));
      CHECK(host.host_up_bytes == Approx(all * (reshard ? 2 : 1) * own * 4));
      CHECK(host.host_down_bytes == Approx(all * own * 4));
      // The norm reads gradients, clipping reads and writes them: 12 B. The step reads gradient, master, moments and
      // writes master and moments: 28 B. Eight ranks share the memory.
      CHECK(at(host, Term::optimizer) == Approx(own * 40 / (memory / 8)));
    }
}

TEST_CASE("layer-wise offload: copies up hide behind compute, gradients only of the first micro-batch") {
  FrameworkProfile overlaps = plain_frame();
  overlaps.overlap_grad_reduce = overlaps.overlap_param_gather = true;
  const TrainModel model = model_of(small_gpt(), 8, overlaps);
  const double tensors = tensor_count(small_gpt());
  TrainPoint p = fsdp8(4);
  p.micro_batch = 64;  // computes for much longer than it copies
  const auto l = model.layers(p);
  const double own = (8 * l.dense.parameters + model.end_parameters(p, l, 0)) / 8;
  const double up = tensors * latency + own * 4 / link, down = up, add = own * 3 * 4 / (memory / 8);
  const TrainPrice awake = model.price(p, l), host = model.price(on_host(p), l);
  REQUIRE(at(awake, Term::compute) > 50 * (8 * up));
  const double hidden_reduce = awake.hidden_seconds;  // of reductions and gathers, an eighth of each exposed
  REQUIRE(hidden_reduce > 0);
  // An eighth of the eight gathers' copies and of the first reduction's are exposed; three reductions are, whole.
  const auto where = model.groups(p);
  const double elements = own * 8;
  const double reduce = 8 * model.cost().collective_seconds(OpKind::reduce_scatter, where.shard(), elements * 4 / 8);
  CHECK(at(host, Term::data) - at(awake, Term::data) ==
        Approx((8 * up + down) / 8 + 3 * (reduce + down + add) - 3 * reduce / 8));
}

TEST_CASE("layer-wise offload: the rollout is synced from the host, its log-probs stream too") {
  const auto awake = offload_pricer({"train.offload=none", "transition=hotbunk"});
  const auto host = offload_pricer({"train.offload=layerwise", "transition=hotbunk"});
  const RlPrice a = awake->price(awake->point()), b = host->price(host->point());
  const auto seconds = [](const RlPrice& p, RlPhase phase) { return p.seconds[static_cast<std::size_t>(phase)]; };
  const TrainPrice t = host->train().price(host->point().train);
  CHECK(t.source_bytes == Approx(7.616e9 * 4 / 8).epsilon(0.001));
  CHECK(seconds(b, RlPhase::sync) - seconds(a, RlPhase::sync) ==
        Approx(host->train().cost().node_copy_seconds(t.source_bytes)));
  CHECK(seconds(b, RlPhase::old_logprobs) > seconds(a, RlPhase::old_logprobs));
  // Nothing of training is beside the rollout but what a process always holds, and nothing moves between them.
  CHECK(a.rollout_bytes - b.rollout_bytes > 0);
  // Awake, loading is the host's fullest moment: the first rank's whole model.
  CHECK(b.host_bytes == Approx(t.host_bytes + host->train().framework().host_process_bytes.value));
  CHECK(a.host_bytes == Approx(awake->rl().loading_bytes(awake->point(), awake->rl().price_rollout(awake->point()))));
  double links = 0;
  for (const LinkUse& u : link_bytes(host->rl(), host->point(), t, host->rl().price_rollout(host->point()), true))
    if (u.what == "parameters from the host") links += u.host_bytes;
  // Up twice a micro-batch in training and once in the log-probs, and once for the sync.
  CHECK(links == Approx(t.source_bytes * (3 * static_cast<double>(host->point().train.micro_batches) + 1)));
}

TEST_CASE("the search tries layer-wise offload where the engine has it") {
  const auto offloads = [](const std::vector<std::string>& sets) {
    const auto pricer = offload_pricer(sets);
    return default_rl_space(pricer->scenario()).train.optimizer_on_host.size() == 2;
  };
  CHECK(offloads({}));
  CHECK(offloads({"train.engine=fsdp1"}));
  CHECK_FALSE(offloads({"train.engine=zero2"}));
  CHECK_FALSE(offloads({"train.engine=megatron", "profile=verl-megatron"}));
  CHECK_FALSE(offloads({"optimizer.name=muon"}));
  // FSDP1 adds up no gradients on the host: a step has one micro-batch there.
  const auto pricer = offload_pricer({"train.engine=fsdp1", "algorithm.prompts=16"});
  const TrainSpace space = default_rl_space(pricer->scenario()).train;
  int on_host = 0;
  for (const LayerKey& key : layer_keys(space))
    visit_points(pricer->train(), space, key, [&](const TrainPoint& p, const auto&) {
      if (!p.optimizer_on_host) return;
      ++on_host;
      CHECK(p.micro_batches == 1);
    });
  CHECK(on_host > 0);
  // 40 GiB hold neither a quarter of the state nor the rollout beside it: the state goes to the host.
  const auto small = offload_pricer({"cluster.gpus_per_node=2", "train.layout.dp=2", "rollout.layout={tp: 2, dp: 1}",
                                     "cluster.device_memory_gib=40", "train.micro_batch_tokens=5120"});
  const auto found = choose(*small, {});
  REQUIRE(found.has_value());
  REQUIRE(!found->rows.empty());
  CHECK(found->rows[0].price.fits);
  CHECK(found->rows[0].point.train.streams_from_host());
}

// ---- Megatron's optimizer on the CPU
// ---------------------------------------------------------------------------------

namespace {

const char* const megatron_7b =
    "model: qwen2.5-7b\ncluster: {gpu: h100-sxm-80gb, nodes: 1}\nprofile: slime-megatron\n"
    "train: {engine: megatron, layout: {dp: 4, tp: 2}, micro_batch_tokens: 16384}\n"
    "rollout: {engine: sglang, layout: {tp: 2, dp: 4}}\nalgorithm: {prompts: 64, samples_per_prompt: 8}\n"
    "workload: {prompt_tokens: {mean: 512, max: 1024}, response_tokens: {mean: 1536, max: 4096}}\n";

RlPrice megatron_price(std::vector<std::string> sets, TrainPrice* train = nullptr) {
  auto s = load_scenario_text(megatron_7b, "t.yaml", sets);
  if (!s) FAIL(render(s.error()));
  const auto p = ScenarioPricer::make(*s, catalog_root());
  if (!p) FAIL(render(p.error()));
  const RlPoint point = (*p)->point();
  if (train != nullptr) *train = (*p)->train().price(point.train);
  return (*p)->price(point);
}

}  // namespace

TEST_CASE("a fraction of the optimizer on the CPUs: as much less on the device, 16 bytes of each element on the host") {
  TrainPrice device, half, host;
  const RlPrice none = megatron_price({}, &device), part = megatron_price({"optimizer.cpu_fraction=0.5"}, &half),
                all = megatron_price({"optimizer.cpu_fraction=1"}, &host);
  const double state = at(device, Category::optimizer);  // master 4 B and moments 8 B of this rank's elements
  CHECK(state > 10e9);
  CHECK(at(half, Category::optimizer) == Approx(state / 2));
  CHECK(at(host, Category::optimizer) == 0);
  CHECK(at(host, Category::grads) == at(device, Category::grads));
  CHECK(half.peak_bytes == Approx(device.peak_bytes - state / 2));
  // Beside master and moments the host has their gradients in fp32: 16 B where the device had 12.
  CHECK(device.host_bytes == 0);
  CHECK(host.host_bytes == Approx(state / 12 * 16));
  CHECK(half.host_bytes == Approx(state / 12 * 16 / 2));
  // Gradients in fp32 go down, parameters in bf16 come up, once a step.
  CHECK(host.host_down_bytes == Approx(state / 12 * 4));
  CHECK(host.host_up_bytes == Approx(state / 12 * 2));
  CHECK(at(device, Term::optimizer) < at(half, Term::optimizer));
  CHECK(at(half, Term::optimizer) < at(host, Term::optimizer));
  // What is on the host for good does not sleep: the account of the host has it once, with its gradients.
  CHECK(all.host_bytes == Approx(none.host_bytes - state + state / 12 * 16));
  CHECK(part.host_bytes == Approx(none.host_bytes - state / 2 + state / 12 * 8));
  const auto sleep = static_cast<std::size_t>(RlPhase::sleep);
  CHECK(all.seconds[sleep] < none.seconds[sleep]);
}

TEST_CASE("the whole optimizer on the CPUs keeps the bytes of gradients and parameters on the device") {
  TrainPrice host;
  megatron_price({"optimizer.cpu_fraction=1"}, &host);
  CHECK(host.state_bytes == Approx(host.source_bytes + host.grad_bytes));
}

TEST_CASE("Muon has no way of it") {
  const auto code = [](std::vector<std::string> sets) {
    const auto s = load_scenario_text(megatron_7b, "t.yaml", sets);
    return s ? std::string() : s.error()[0].code;
  };
  CHECK(code({"optimizer.cpu_fraction=0.5"}).empty());
  CHECK(code({"optimizer.cpu_fraction=0.5", "optimizer.name=muon"}) == "E214");
  CHECK(code({"optimizer.cpu_fraction=1.5"}) == "E206");
}

TEST_CASE("a layout of FSDP that is proposed beside an optimizer on the CPUs can be selected by its flags") {
  const auto s = load_scenario_text(megatron_7b, "t.yaml", {"optimizer.cpu_fraction=1"});
  REQUIRE(s);
  RlPoint point = rl_point_of(*s);
  point.train = {.dp = 8, .sharding = Sharding::fsdp, .micro_batch = point.train.micro_batch};
  std::vector<std::string> sets = {"optimizer.cpu_fraction=1"};
  for (const std::string& flag : flags_of(*s, point)) sets.push_back(flag);
  const auto chosen = load_scenario_text(megatron_7b, "t.yaml", sets);
  if (!chosen) FAIL(render(chosen.error()));
  CHECK(chosen->optimizer.cpu_fraction == 0);
}

// ---- a cap on prompt and response together
// ---------------------------------------------------------------------------

TEST_CASE(
    "a cap on prompt and response together is the longest sample: of micro-batches, KV pools, positions and draws") {
  const std::vector<std::string> long_both = {"workload.prompt_tokens.max=16384", "workload.response_tokens.max=16384",
                                              "rollout.max_prefill_tokens=16384"};
  std::vector<std::string> capped = long_both;
  capped.emplace_back("workload.max_tokens=16384");
  const auto whole = load_scenario_text(megatron_7b, "t.yaml", long_both);
  REQUIRE(!whole);
  CHECK(whole.error()[0].code == "E217");  // 32768 tokens in a micro-batch of 16384
  const auto s = load_scenario_text(megatron_7b, "t.yaml", capped);
  REQUIRE(s);
  CHECK(train_setting_of(*s).longest == 16384);
  CHECK(rl_setting_of(*s).longest_sample == 16384);
  CHECK(rl_setting_of(*s).longest_response == 16384);
  std::vector<std::string> below = capped;
  below.back() = "workload.max_tokens=2000";  // 512 + 1536 on average
  const auto mean = load_scenario_text(megatron_7b, "t.yaml", below);
  REQUIRE(!mean);
  CHECK(mean.error()[0].code == "E217");
}

}  // namespace hotbunk
