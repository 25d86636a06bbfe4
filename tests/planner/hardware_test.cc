// What a price stands on: what is known of a device, what is zero, and what is refused for want of a figure.
#include <fmt/format.h>

#include <catch2/catch.hpp>

#include "planner/answers.h"
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

TEST_CASE("rates that are not known are no lines of a profile") {
  ClusterSpec c = loaded("{gpu: h100-sxm-80gb, nodes: 2, gpus_per_node: 8}").cluster;
  c.network_bandwidth = {};
  const std::string text = to_yaml(hardware_from_datasheet(c));
  const auto back = parse_hardware(text, "profile.yaml", c);
  REQUIRE(back.has_value());
  CHECK(back->inter.bandwidth.value == 0);
  CHECK(to_yaml(*back) == text);
}

}  // namespace hotbunk
