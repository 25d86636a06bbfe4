// What a price stands on: what is known of a device, what is zero, and what is refused for want of a figure.
#include <fmt/format.h>
#include <rapidcheck.h>

#include <catch2/catch.hpp>
#include <cmath>
#include <set>

#include "planner/answers/answers.h"
#include "planner/rl/length_moments.h"
#include "spec/catalog.h"
#include "spec/loader.h"

namespace hotbunk {
namespace {

Scenario loaded(const std::string& cluster, const std::vector<std::string>& sets = {}) {
  auto s = load_scenario_text(
      fmt::format("model: qwen2.5-7b\ncluster: {}\n"
                  "train: {{engine: fsdp2, layout: {{dp: 16}}, recompute: full, micro_batch_tokens: 4096}}\n"
                  "rollout: {{engine: sglang, layout: {{tp: 4, dp: 4}}}}\n"
                  "workload: {{prompt_tokens: {{mean: 512, max: 1024}}, response_tokens: {{mean: 1024, max: 2048}}}}\n",
                  cluster),
      "hardware.yaml", sets);
  if (!s) FAIL(render(s.error()));
  return *s;
}

Diagnostics refused(const Scenario& s) {
  const auto p = ScenarioPricer::make(s, catalog_root());
  REQUIRE(!p.has_value());
  return p.error();
}

double seconds_of(const Scenario& s) {
  const auto p = ScenarioPricer::make(s, catalog_root());
  if (!p) FAIL(render(p.error()));
  return (*p)->price((*p)->point()).iteration_seconds;
}

}  // namespace

TEST_CASE("a format that the device has no products in is refused, with those it has") {
  const struct {
    const char *gpu, *set, *message, *has;
  } cases[] = {
      {"a100-sxm-40gb", "train.precision.gemm=fp8", "a100-sxm-40gb has no fp8 products", "bf16, fp16, fp32"},
      {"h20-sxm-96gb", "train.precision.gemm=nvfp4", "h20-sxm-96gb has no nvfp4 products", "fp8"},
      {"h100-sxm-80gb", "train.precision.gemm=mxfp8", "h100-sxm-80gb has no mxfp8 products", "fp8"},
  };
  for (const auto& c : cases) {
    INFO(c.gpu << " " << c.set);
    const Diagnostics errors = refused(loaded(fmt::format("{{gpu: {}, nodes: 2, gpus_per_node: 8}}", c.gpu), {c.set}));
    REQUIRE(errors.size() == 1);
    CHECK(errors[0].code == "E260");
    CHECK_THAT(errors[0].message, Catch::Contains(c.message) && Catch::Contains("train.precision.gemm"));
    CHECK_THAT(errors[0].notes.at(0), Catch::Contains(c.has));
    CHECK_THAT(errors[0].notes.at(0), !Catch::Contains(std::string(c.set).substr(21)));
  }
  // What it has is priced.
  CHECK(seconds_of(loaded("{gpu: b200-sxm-180gb, nodes: 2, gpus_per_node: 8}", {"train.precision.gemm=mxfp8"})) > 0);
}

TEST_CASE("a figure that nobody gave is asked for by its key, each that is missing") {
  const std::string bare = "{gpu: {name: mine, memory_gib: 80, tflops: {bf16: 100}}, nodes: 2, gpus_per_node: 8}";
  const Diagnostics errors = refused(loaded(bare));
  std::vector<std::string> keys;
  for (const Diagnostic& d : errors) {
    CHECK(d.code == "E264");
    keys.push_back(d.help);
  }
  const char* expected[] = {"cluster.gpu.memory_gb_per_s", "cluster.gpu.pcie_gb_per_s", "cluster.gpu.nvlink_gb_per_s",
                            "cluster.network_gb_per_s", "cluster.host_memory_gib"};
  REQUIRE(keys.size() == std::size(expected));
  for (std::size_t i = 0; i < keys.size(); ++i) CHECK_THAT(keys[i], Catch::Contains(expected[i]));
  CHECK(errors[0].message == "no memory bandwidth of GPU 'mine' is known");
  // With them it is priced, and without NVLink the GPUs talk over PCIe.
  const std::vector<std::string> rest = {"cluster.gpu.memory_gb_per_s=2000", "cluster.gpu.pcie_gb_per_s=25",
                                         "cluster.network_gb_per_s=25", "cluster.host_memory_gib=512"};
  const double over_pcie = seconds_of(loaded(bare, rest));
  std::vector<std::string> linked = rest;
  linked.emplace_back("cluster.gpu.nvlink_gb_per_s=300");
  CHECK(seconds_of(loaded(bare, linked)) < over_pcie);
  CHECK(over_pcie < 1e4);
  // A precision of training that has no peak is no reason to take another's.
  CHECK(refused(loaded("{gpu: {name: mine, memory_gib: 80}, nodes: 2, gpus_per_node: 8}", rest))[0].code == "E260");
}

TEST_CASE("a latency of zero is zero, one left out is the stated one") {
  const std::string cluster = "{gpu: h100-sxm-80gb, nodes: 2, gpus_per_node: 8}";
  for (const char* key : {"cluster.network_latency_us", "cluster.nvlink_latency_us"}) {
    INFO(key);
    const auto at = [&](const char* us) { return seconds_of(loaded(cluster, {fmt::format("{}={}", key, us)})); };
    const double none = at("0"), little = at("0.1"), much = at("5"), most = at("50");
    CHECK(none < little);
    CHECK(little < much);
    CHECK(much < most);
  }
  // Spelled out without latencies: the model's stated ones, not none.
  ClusterSpec c = loaded(cluster).cluster;
  c.network_latency = c.nvlink_latency = {};
  const Hardware h = hardware_from_datasheet(c);
  CHECK(h.inter.hop_latency.value == 5e-6);
  CHECK(h.intra.hop_latency.value == 0.8e-6);
}

TEST_CASE("a key twice in a profile is an error, at every depth") {
  const std::string head = "schema: hotbunk.hardware/1\n";
  for (const char* text :
       {"name: a\nname: b\n", "gemm:\n  half_k: {value: 1, source: a}\n  half_k: {value: 2, source: a}\n",
        "launch: {value: 1e-6, value: 2e-6, source: a}\n",
        "measurements:\n  - {op: linear, m: 1, m: 2, n: 1, k: 1, seconds: 1}\n"}) {
    const auto read = parse_hardware(head + text, "profile.yaml", {});
    INFO(text);
    REQUIRE_FALSE(read);
    CHECK(read.error()[0].code == "E204");
  }
}

TEST_CASE("rates that are not known are no lines of a profile") {
  ClusterSpec c = loaded("{gpu: h100-sxm-80gb, nodes: 2, gpus_per_node: 8}").cluster;
  c.network_bandwidth = {};
  const std::string text = to_yaml(hardware_from_datasheet(c));
  const auto back = parse_hardware(text, "profile.yaml", c);
  REQUIRE(back.has_value());
  CHECK(back->inter.bandwidth.value == 0);
  CHECK(to_yaml(*back) == text);
}

TEST_CASE("a chip without a profile of its own stands on its sibling's efficiencies and its own rates") {
  const struct {
    const char *chip, *sibling;
  } cases[] = {{"a100-sxm-40gb", "a100-sxm-80gb"}, {"h200-sxm-141gb", "h100-sxm-80gb"},
               {"h800-sxm-80gb", "h100-sxm-80gb"}, {"gb200-nvl72", "b200-sxm-180gb"},
               {"gb300-nvl72", "b200-sxm-180gb"},  {"b300-sxm-288gb", "b200-sxm-180gb"}};
  std::set<std::string> covered = {"h20-sxm-96gb"};  // microbenchmarks of its own
  for (const auto& c : cases) {
    INFO(c.chip);
    covered.insert(c.chip), covered.insert(c.sibling);
    const auto own = catalogue_cluster(c.chip), theirs = catalogue_cluster(c.sibling);
    REQUIRE(own.has_value());
    REQUIRE(theirs.has_value());
    const auto h = hardware_for(*own, catalog_root()), fitted = hardware_for(*theirs, catalog_root());
    REQUIRE(h.has_value());
    REQUIRE(fitted.has_value());
    CHECK(fitted->calibrated);
    CHECK_FALSE(h->calibrated);
    CHECK_THAT(h->source, Catch::Contains("uncalibrated") && Catch::Contains(c.sibling));
    CHECK(h->gemm.efficiency == fitted->gemm.efficiency);
    CHECK(h->gemm.half_k == fitted->gemm.half_k);
    CHECK(h->gemm.units == own->gpu.sms);  // not the sibling's: H20 has 78 of H100's 132
    CHECK(own->gpu.sms.known());
    CHECK(fitted->gemm.units == theirs->gpu.sms);
    CHECK(h->attention.forward == fitted->attention.forward);
    CHECK(h->memory_efficiency == fitted->memory_efficiency);
    CHECK(h->kernel_overhead == fitted->kernel_overhead);
    CHECK(h->overlap_slowdown == fitted->overlap_slowdown);
    CHECK(h->peak_flops("bf16") == own->gpu.peak_flops("bf16"));
    CHECK(h->memory_bandwidth == own->gpu.memory_bandwidth.value);
    // The same share of another line.
    CHECK(h->intra.bandwidth.value / own->gpu.nvlink_bandwidth.value ==
          Approx(fitted->intra.bandwidth.value / theirs->gpu.nvlink_bandwidth.value));
  }
  // A GPU that joins the catalogue has a profile, a sibling, or a line here that says why not.
  for (const std::string& gpu : catalog_names("gpus")) CHECK((gpu == "local-cpu" || covered.contains(gpu)));
}

TEST_CASE("a profile's links follow the lines that a scenario gives") {
  // A100's states 235 GB/s of its 300 GB/s of NVLink: 600 GB/s carry 470. Its other links are the datasheet's.
  auto a100 = catalogue_cluster("a100-sxm-80gb");
  REQUIRE(a100.has_value());
  REQUIRE(a100->gpu.nvlink_bandwidth.value == 300e9);
  CHECK(hardware_for(*a100, catalog_root())->intra.bandwidth.value == Approx(235e9).epsilon(1e-12));
  a100->gpu.nvlink_bandwidth.value = 600e9;
  CHECK(hardware_for(*a100, catalog_root())->intra.bandwidth.value == Approx(470e9).epsilon(1e-12));
  for (const std::string& gpu : catalog_names("gpus")) {
    INFO(gpu);
    auto c = catalogue_cluster(gpu);
    REQUIRE(c.has_value());
    const auto usual = hardware_for(*c, catalog_root());
    if (c->gpu.is_cpu) continue;  // one memory carries everything there
    c->gpu.nvlink_bandwidth.value *= 3, c->network_bandwidth.value *= 5, c->gpu.pcie_bandwidth.value *= 7;
    const auto other = hardware_for(*c, catalog_root());
    REQUIRE(other.has_value());
    CHECK(other->intra.bandwidth.value == Approx(3 * usual->intra.bandwidth.value));
    CHECK(other->inter.bandwidth.value == Approx(5 * usual->inter.bandwidth.value));
    CHECK(other->host_bandwidth.value == Approx(7 * usual->host_bandwidth.value));
  }
}

namespace {

/// Every rate of `a` that a price stands on is no less than that of `b`. Not the capacity, which is one for all below:
/// an A100 shows a process more of its 80 GB than an H100 does.
bool dominates(const ClusterSpec& a, const ClusterSpec& b) {
  return a.gpu.peak_flops("bf16") >= b.gpu.peak_flops("bf16") && a.gpu.peak_flops("fp32") >= b.gpu.peak_flops("fp32") &&
         a.gpu.memory_bandwidth.value >= b.gpu.memory_bandwidth.value &&
         a.gpu.nvlink_bandwidth.value >= b.gpu.nvlink_bandwidth.value && a.gpu.nvlink_sharp >= b.gpu.nvlink_sharp &&
         a.gpu.pcie_bandwidth.value >= b.gpu.pcie_bandwidth.value &&
         a.network_bandwidth.value >= b.network_bandwidth.value;
}

}  // namespace

TEST_CASE("a chip that has more of every rate is slower in no phase, within an architecture and across") {
  std::vector<std::pair<std::string, std::string>> pairs;  // faster, slower
  for (const std::string& a : catalog_names("gpus"))
    for (const std::string& b : catalog_names("gpus"))
      if (a != b && a != "local-cpu" && b != "local-cpu" && dominates(*catalogue_cluster(a), *catalogue_cluster(b)))
        pairs.emplace_back(a, b);
  const auto is_there = [&](const char* a, const char* b) {
    return std::find(pairs.begin(), pairs.end(), std::pair<std::string, std::string>(a, b)) != pairs.end();
  };
  for (const auto& [a, b] : {std::pair{"a100-sxm-80gb", "a100-sxm-40gb"},
                             {"h100-sxm-80gb", "h800-sxm-80gb"},
                             {"h200-sxm-141gb", "h100-sxm-80gb"},
                             {"h100-sxm-80gb", "a100-sxm-80gb"},
                             {"b200-sxm-180gb", "h200-sxm-141gb"},
                             {"b300-sxm-288gb", "b200-sxm-180gb"},
                             {"gb200-nvl72", "b200-sxm-180gb"},
                             {"gb300-nvl72", "gb200-nvl72"}})
    CHECK(is_there(a, b));
  CHECK(rc::check([&] {
    const auto pick = [](const std::vector<std::string>& values) { return *rc::gen::elementOf(values); };
    const auto [fast, slow] = *rc::gen::elementOf(pairs);
    std::vector<std::string> sets = {
        pick({"profile=hotbunk", "profile=verl-fsdp", "profile=megatron", "profile=verl-megatron"}),
        pick({"model=qwen2.5-7b", "model=qwen2.5-0.5b", "model=llama-3.1-8b"}),
        pick({"train.recompute=none", "train.recompute=selective", "train.recompute=full"}),
        pick({"train.layout={dp: 16}", "train.layout={dp: 8, cp: 2}", "train.layout={dp: 4, tp: 2, sp: true, pp: 2}"}),
        pick({"train.micro_batch_tokens=4096", "train.micro_batch_tokens=16384"}),
        pick({"rollout.engine=sglang", "rollout.engine=vllm", "rollout.engine=hotbunk"}),
        pick({"rollout.layout={tp: 2, dp: 8}", "rollout.layout={tp: 1, dp: 16}"}),
        pick({"rollout.max_running_requests=8", "rollout.max_running_requests=64"}),
        // One capacity: with a larger pool engines run other batches, which is not what is compared here.
        "cluster.device_memory_gib=39", "cluster.host_memory_gib=1024"};
    if (sets[3].find("tp") != std::string::npos) sets.emplace_back("train.engine=megatron");
    const auto priced = [&](const std::string& gpu) {
      const auto p = ScenarioPricer::make(loaded(fmt::format("{{gpu: {}, nodes: 2, gpus_per_node: 8}}", gpu), sets),
                                          catalog_root());
      RC_ASSERT(p.has_value());
      return (*p)->price((*p)->point());
    };
    const RlPrice more = priced(fast), less = priced(slow);
    RC_ASSERT(less.iteration_seconds > 0);
    for (std::size_t i = 0; i < num_rl_phases; ++i) {
      RC_LOG() << fast << " against " << slow << ", " << name_of(static_cast<RlPhase>(i)) << ": " << more.seconds[i]
               << " and " << less.seconds[i] << "\n";
      RC_ASSERT(more.seconds[i] <= less.seconds[i] * (1 + 1e-12));
    }
  }));
}

TEST_CASE("what an eager front end leaves between kernels is the framework's, and no engine's decode pays it") {
  const auto framework = framework_named("megatron-bridge", catalog_root());
  REQUIRE(framework.has_value());
  const Scenario s = loaded("{gpu: b200-sxm-180gb, nodes: 2, gpus_per_node: 8}", {"train.micro_batch_tokens=4096"});
  const auto hardware = hardware_for(s, catalog_root());
  REQUIRE(hardware.has_value());
  CHECK(framework->kernel_overhead.value > 2 * hardware->kernel_overhead.value);
  FrameworkProfile plain = *framework;
  plain.kernel_overhead.value = 0;
  const CostModel cost(*hardware, s.cluster);
  const TrainModel eager(s.model, train_setting_of(s), cost, *framework),
      tight(s.model, train_setting_of(s), cost, plain);
  const TrainPoint p = rl_point_of(s).train;
  CHECK(eager.price(p).step_seconds > tight.price(p).step_seconds);
  CHECK(RlModel(eager, rl_setting_of(s)).price_rollout(rl_point_of(s).rollout).seconds() ==
        RlModel(tight, rl_setting_of(s)).price_rollout(rl_point_of(s).rollout).seconds());
  // Our engine launches each kernel of a step, SGLang replays the step: one sequence at a time shows the host.
  const auto decode = [&](const char* engine, double launch) {
    Scenario t = s;
    t.rollout.engine = std::string(engine) == "hotbunk" ? RolloutEngine::hotbunk : RolloutEngine::sglang;
    t.rollout.max_running_requests = 1;
    Hardware h = *hardware;
    h.launch.value = launch;
    const TrainModel train(t.model, train_setting_of(t), CostModel(h, t.cluster), *framework);
    return RlModel(train, rl_setting_of(t)).price_rollout(rl_point_of(t).rollout).decode_seconds;
  };
  CHECK(decode("sglang", 1e-4) == decode("sglang", 0));
  // 28 layers of 10 kernels and 2 reductions, and 6 around them, at 100 us each.
  LengthSpec decoded = s.workload.response_tokens;  // but the token that the prompt's pass samples
  decoded.mean -= 1.0, decoded.max -= 1.0;
  const RlSetting set = rl_setting_of(s);
  const auto engines = static_cast<double>(rl_point_of(s).rollout.engines);
  const double steps = drain_steps(decoded, std::ceil(set.prompts * set.samples / engines), 1.0, engines).full;
  CHECK(decode("hotbunk", 1e-4) == Approx(steps * (28 * 12 + 6) * 1e-4).epsilon(1e-9));
}

TEST_CASE("a vLLM that cannot start says so, and what would let it") {
  const std::string cluster = "{gpu: h100-sxm-80gb, nodes: 2, gpus_per_node: 8}";
  const auto said = [&](const char* fraction) {
    const auto p = ScenarioPricer::make(
        loaded(cluster, {"rollout.engine=vllm", fmt::format("rollout.memory_fraction={}", fraction)}), catalog_root());
    REQUIRE(p.has_value());
    return explain(**p);
  };
  const Explanation refused = said("0.99");
  REQUIRE(refused.unpriced.has_value());
  CHECK(refused.unpriced->code == "E301");
  CHECK_THAT(refused.unpriced->message, Catch::Contains("vllm does not start"));
  // 79.19 GiB less 0.6 + 0.688 GB is 0.9849 of the device: 0.98 starts.
  CHECK_FALSE(said("0.98").unpriced.has_value());
  CHECK_THAT(refused.unpriced->help, Catch::StartsWith("--set "));
  // Too little for the weights is another story.
  const Explanation small = said("0.05");
  REQUIRE(small.unpriced.has_value());
  CHECK_THAT(small.unpriced->help, Catch::StartsWith("--set "));
  // Where a whole device is too small no fraction of it helps.
  const auto huge = ScenarioPricer::make(loaded(cluster, {"model=deepseek-v3"}), catalog_root());
  REQUIRE(huge.has_value());
  const Explanation hopeless = explain(**huge);
  REQUIRE(hopeless.unpriced.has_value());
  CHECK(hopeless.unpriced->code == "E301");
  CHECK_THAT(hopeless.unpriced->help, Catch::StartsWith("no change of one key cures it"));
}

}  // namespace hotbunk
