// Scenario files: DESIGN's example means what it says, every default is there, --set reaches every key, and the
// resolved form loads back to the identical scenario.
#include <rapidcheck.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/file.h"
#include "spec/auto_ranks.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "spec/names.h"
#include "spec/scenario_keys.h"
#include "spec/validate.h"
#include "spec/wrapping.h"
#include "spec/yaml_tree.h"
#include "tests/paths.h"

namespace hotbunk {
namespace {

const char* const design_example = R"(name: qwen2.5-7b-colocated
model: qwen2.5-7b                  # catalogue name, or path of a Hugging Face config.json / model folder
cluster: {gpu: h100-sxm-80gb, nodes: 1, gpus_per_node: 8}
placement: colocated               # colocated | disaggregated
train:
  engine: fsdp2                    # ddp | zero1 | zero2 | fsdp1 | fsdp2 | megatron
  layout: {dp: 4, fsdp: -1, cp: 2, ulysses: 1, tp: 1, sp: false, pp: 1, vpp: 1, ep: 1, etp: 1}
  micro_batch_tokens: 16384
  recompute: full                  # none | selective | full
  precision: {params: bf16, grads: fp32, master: fp32, moments: fp32}
  offload: sleep                   # none | sleep | layerwise
rollout:
  engine: sglang                   # hotbunk | sglang | vllm
  layout: {tp: 4, dp: 2, ep: 1, cp: 1}
  memory_fraction: 0.8
  max_running_requests: 256
sync: {mode: bucketed, bucket_mib: 512, transport: ipc}   # bucketed | stream | broadcast | direct
algorithm: {name: grpo, prompts: 128, samples_per_prompt: 8, mini_batches: 1, reference: true}   # grpo | ppo | sft | ...
workload:
  prompt_tokens: {mean: 512, max: 1024}
  response_tokens: {mean: 2048, max: 8192, distribution: lognormal}
)";

/// Valid on its own: one CPU rank, a tiny model.
const char* const tiny = R"(
model: {architectures: [LlamaForCausalLM], hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
        num_attention_heads: 4, vocab_size: 64, max_position_embeddings: 256}
workload: {prompt_tokens: {mean: 8, max: 16}, response_tokens: {mean: 8, max: 16}}
)";

Scenario loaded(const std::string& text, const std::vector<std::string>& overrides = {}) {
  auto scenario = load_scenario_text(text, "test.yaml", overrides);
  INFO((scenario ? "" : render(scenario.error())));
  REQUIRE(scenario);
  return std::move(*scenario);
}

}  // namespace

TEST_CASE("DESIGN's example means what it says") {
  const Scenario s = loaded(design_example);
  CHECK(s.name == "qwen2.5-7b-colocated");
  CHECK(parameter_count(s.model) == 7615616512);
  CHECK(s.cluster.ranks() == 8);
  CHECK(s.cluster.gpu.memory_bandwidth.value == 3350e9);
  CHECK(s.cluster.gpu.peak_flops("bf16") == 989.4e12);
  CHECK(s.cluster.gpu.peak_flops("no such precision") == 0);
  CHECK(s.cluster.device_memory_bytes == s.cluster.gpu.memory_bytes);
  CHECK(s.train.layout.cp == 2);
  CHECK(s.train.recompute == Recompute::full);
  CHECK(s.train.offload == Offload::sleep);
  CHECK(s.rollout.engine == RolloutEngine::sglang);
  CHECK(s.rollout.layout.ranks() == 8);
  CHECK(s.sync.bucket_bytes == std::int64_t{512} << 20);
  CHECK(s.algorithm.reference);
  CHECK(s.workload.response_tokens.max == 8192);
  CHECK(s.rollout.dtype == DType::bf16);
}

TEST_CASE("defaults that depend on other keys") {
  CHECK(loaded(tiny).name == "test");
  CHECK(loaded(tiny, {"train.precision.params=fp32"}).rollout.dtype == DType::f32);
  CHECK(loaded(tiny, {"train.precision.params=fp32", "rollout.dtype=bf16"}).rollout.dtype == DType::bf16);
  // A narrow format is of the layers' products alone: the rest is as wide as training, 16 bits at most.
  const auto narrow = [](const std::vector<std::string>& sets) {
    std::vector<std::string> all = {"rollout.engine=sglang", "rollout.dtype=nvfp4"};
    all.insert(all.end(), sets.begin(), sets.end());
    return loaded(tiny, all).rollout;
  };
  CHECK(narrow({}).quantization == "nvfp4");
  CHECK(narrow({"train.precision.params=fp32"}).dtype == DType::bf16);
  CHECK(narrow({"train.precision.params=fp16"}).dtype == DType::f16);
  CHECK(narrow({"rollout.dtype=fp32"}).quantization.empty());
  CHECK(narrow({"rollout.dtype=fp32"}).dtype == DType::f32);
  const Scenario two = loaded(tiny, {"cluster.ranks_per_device=2", "train.layout.dp=2", "rollout.layout.dp=2"});
  CHECK(two.cluster.device_memory_bytes == two.cluster.gpu.memory_bytes / 2);
  CHECK(two.cluster.gpu.is_cpu);
  CHECK(two.cluster.gpu.memory_bytes == local_machine().memory_bytes);
  // Two devices of one machine halve its memory and its cores.
  const Scenario devices = loaded(tiny, {"cluster.gpus_per_node=2", "train.layout.dp=2", "rollout.layout.dp=2"});
  CHECK(devices.cluster.device_memory_bytes == local_machine().memory_bytes / 2);
  CHECK(devices.cluster.host_memory_bytes == local_machine().memory_bytes);
  CHECK(devices.cluster.gpu.peak_flops("fp32") == Approx(two.cluster.gpu.peak_flops("fp32") / 2));
  CHECK(loaded(tiny, {"cluster.device_memory_mib=64"}).cluster.device_memory_bytes == 64 << 20);
  CHECK(loaded(tiny, {"sync.bucket_mib=0.25"}).sync.bucket_bytes == 1 << 18);
}

TEST_CASE("dp auto is what the other dimensions leave of the ranks") {
  const auto loaded = [](const std::vector<std::string>& sets) {
    const auto s = load_scenario_text(
        "model: qwen2.5-7b\ncluster: {gpu: h100-sxm-80gb, nodes: 4, gpus_per_node: 8}\n"
        "train: {layout: {dp: auto, cp: 2, pp: 2}, micro_batch_tokens: 16384}\nrollout: {layout: {tp: 4, dp: auto}}\n",
        "auto.yaml", sets);
    if (!s) FAIL(render(s.error()));
    return *s;
  };
  CHECK(loaded({}).train.layout.dp == 8);  // 32 / (2 x 2)
  CHECK(loaded({}).rollout.layout.dp == 8);
  CHECK(loaded({"cluster.nodes=1"}).train.layout.dp == 2);
  CHECK(loaded({"train.layout.dp=8"}) == loaded({}));
  // Disaggregated: what the other side leaves, 32 - 2 x 4 = 24 = 6 x 2 x 2.
  const std::string apart = "placement=disaggregated";
  CHECK(loaded({apart, "rollout.layout.dp=2"}).train.layout.dp == 6);
  CHECK(loaded({apart, "train.layout.dp=2"}).rollout.layout.dp == 6);  // (32 - 8) / 4
  CHECK(loaded({"algorithm.name=sft", "rollout.layout.tp=5"}).train.layout.dp == 8);
}

TEST_CASE("a layout of which a scenario says nothing is auto") {
  const auto silent = load_scenario_text("model: qwen2.5-32b\ncluster: {gpu: h100, nodes: 2}\n", "s.yaml");
  REQUIRE(silent);
  CHECK(silent->train.layout.dp == 16);
  // 65.5 GB of weights in half of 0.8 of 85 GB: 2 ranks.
  CHECK((silent->rollout.layout.tp == 2 && silent->rollout.layout.dp == 8));
  const auto trains = load_scenario_text(
      "model: qwen2.5-32b\ncluster: {gpu: h100, nodes: 2}\nalgorithm: {name: sft}\ntrain: {offload: none}\n", "s.yaml");
  REQUIRE(trains);
  CHECK(trains->train.layout.dp == 16);
  // What is said of a layout is all of it, and of two sets of GPUs nothing says how many ranks each has.
  const auto said =
      load_scenario_text("model: qwen2.5-32b\ncluster: {gpu: h100, nodes: 2}\ntrain: {layout: {tp: 2}}\n", "s.yaml");
  REQUIRE(!said);
  CHECK(said.error()[0].code == "E203");
  const auto apart =
      load_scenario_text("model: qwen2.5-32b\ncluster: {gpu: h100, nodes: 2}\nplacement: disaggregated\n", "s.yaml");
  REQUIRE(!apart);
  CHECK(apart.error()[0].code == "E203");
}

TEST_CASE("auto: dp, else the first open one, takes what the others leave; the rest is the least that is legal") {
  const auto of = [](const std::vector<std::string>& sets) {
    const auto s = load_scenario_text(
        "model: qwen2.5-7b\ncluster: {gpu: h100-sxm-80gb, nodes: 2}\nprofile: verl-fsdp\n"
        "train: {engine: fsdp2, layout: {dp: auto}}\nrollout: {engine: vllm, layout: {dp: auto}}\n"
        "algorithm: {prompts: 128, samples_per_prompt: 8}\n"
        "workload: {prompt_tokens: {mean: 512, max: 1024}, response_tokens: {mean: 2048, max: 8192}}\n",
        "test.yaml", sets);
    if (!s) FAIL(render(s.error()));
    return *s;
  };
  const std::string tokens = "train.micro_batch_tokens=auto";
  const Scenario least = of({tokens, "train.layout.tp=auto", "train.layout.cp=auto", "rollout.layout.tp=auto"});
  CHECK(least.train.layout.dp == 16);
  CHECK(least.train.layout.tp * least.train.layout.cp == 1);
  CHECK(least.train.micro_batch_tokens == 9216);
  // Half of 0.8 x 85 GB is 34 GB: it holds a 7B's 15 GB, and half of a 32B's 66 GB.
  CHECK(least.rollout.layout.tp == 1);
  CHECK(of({tokens, "model=qwen2.5-32b", "rollout.layout.tp=auto"}).rollout.layout.tp == 2);
  CHECK(auto_choices(least) ==
        "train.layout.cp 1, train.layout.tp 1, train.micro_batch_tokens 9216, rollout.layout.tp 1");
  CHECK(auto_choices(of({"train.micro_batch_tokens=9216"})) == "");
  CHECK(of({tokens, "train.layout.cp=2"}).train.micro_batch_tokens == 4608);
  const Scenario taken =
      of({tokens, "train.layout.dp=2", "train.layout.tp=auto", "train.layout.pp=auto", "train.engine=megatron",
          "model=qwen2.5-32b", "profile=verl-megatron", "rollout.layout.tp=auto", "rollout.layout.dp=4"});
  CHECK(taken.train.layout.tp == 8);
  CHECK(taken.train.layout.pp == 1);
  CHECK(taken.rollout.layout.tp == 4);
  // What is resolved is the same scenario, with numbers.
  const auto again = load_scenario_text(resolved_yaml(least), "again.yaml");
  REQUIRE(again);
  CHECK(*again == least);
  CHECK(auto_choices(*again) == "");
}

TEST_CASE("--set changes one key of a catalogue entry, makes missing maps, and the last one wins") {
  const Scenario s =
      loaded(design_example, {"cluster.gpu.memory_gib=40", "model.num_hidden_layers=2", "optimizer.lr=1e-4",
                              "optimizer.lr=2e-4", "cluster.gpu.tflops.bf16={value: 700, source: mine}"});
  CHECK(s.cluster.gpu.memory_bytes == std::int64_t{40} << 30);
  CHECK(s.cluster.gpu.nvlink_bandwidth.value == 450e9);
  CHECK(s.cluster.gpu.flops.at("bf16") == Sourced{700e12, "mine"});
  CHECK(s.model.layers == 2);
  CHECK(s.model.hidden == 3584);
  CHECK(s.optimizer.lr == 2e-4);
  CHECK(loaded(design_example, {"cluster.gpu=b200-sxm-180gb"}).cluster.gpu.name == "b200-sxm-180gb");
}

TEST_CASE("relative paths count from the scenario's folder, then from the working directory") {
  namespace fs = std::filesystem;
  const fs::path folder = fs::temp_directory_path() / ("hotbunk_paths." + std::to_string(::getpid()));
  fs::create_directories(folder / "below");
  for (const char* name : {"below/data.jsonl", "below/mine.yaml", "below/a100-sxm-80gb", "elsewhere.jsonl"})
    std::ofstream(folder / name) << "[1, 2]\n";
  const auto load = [&](const std::string& data, const std::string& calibration) {
    std::ofstream(folder / "below/scenario.yaml")
        << "model: qwen2.5-0.5b\nalgorithm: {name: sft}\ntask: {data: " << data
        << "}\ncluster: {calibration: " << calibration << "}\n";
    return load_scenario((folder / "below/scenario.yaml").string());
  };
  const fs::path before = fs::current_path();
  fs::current_path(folder);
  const auto beside = load("data.jsonl", "mine.yaml"), working = load("elsewhere.jsonl", "a100-sxm-80gb"),
             nowhere = load("nowhere.jsonl", folder / "below/mine.yaml");
  fs::current_path(before);
  fs::remove_all(folder);
  for (const auto* s : {&beside, &working, &nowhere}) {
    INFO((*s ? "" : render(s->error())));
    REQUIRE(*s);
  }
  CHECK(beside->task.data == (folder / "below/data.jsonl").string());
  CHECK(beside->cluster.calibration == (folder / "below/mine.yaml").string());
  CHECK(working->task.data == "elsewhere.jsonl");
  CHECK(working->cluster.calibration == "a100-sxm-80gb");  // the catalogue's, whatever lies beside the scenario
  CHECK(nowhere->task.data == "nowhere.jsonl");
  CHECK(nowhere->cluster.calibration == (folder / "below/mine.yaml").string());
}

TEST_CASE("every GPU of the catalogue loads and says where each number comes from") {
  REQUIRE(catalog_names("gpus").size() >= 11);
  for (const auto& name : catalog_names("gpus")) {
    INFO(name);
    const Scenario s = loaded(design_example, {"cluster.gpu=" + name, "cluster.gpus_per_node=8"});
    CHECK(s.cluster.gpu.name == name);
    CHECK(s.cluster.gpu.memory_bytes > 0);
    CHECK_FALSE(s.cluster.gpu.memory_bandwidth.source.empty());
    CHECK_FALSE(s.cluster.network_bandwidth.source.empty());
    REQUIRE(s.cluster.gpu.peak_flops("bf16") > 0);
    for (const auto& [precision, flops] : s.cluster.gpu.flops) CHECK_FALSE(flops.source.empty());
  }
}

TEST_CASE("BACKGROUND's worked configurations are valid scenarios") {
  loaded(design_example, {"train.layout={dp: 2, ulysses: 4}", "rollout.layout={tp: 2, dp: 4}"});
  const std::string common = "algorithm: {prompts: 128}\ntrain: {engine: megatron, micro_batch_tokens: 16384}\n";
  loaded("model: qwen2.5-32b\ncluster: {gpu: h100-sxm-80gb, nodes: 4}\n" + common,
         {"train.layout={tp: 4, pp: 2, dp: 4, sp: true}", "rollout.layout={tp: 4, dp: 8}"});
  loaded("model: llama-3.1-70b\ncluster: {gpu: h100-sxm-80gb, nodes: 4}\n" + common,
         {"train.layout={tp: 4, pp: 2, dp: 4, sp: true}", "rollout.layout={tp: 4, dp: 8}"});
  loaded("model: deepseek-v3\ncluster: {gpu: h800-sxm-80gb, nodes: 16}\n" + common,
         {"train.layout={tp: 8, pp: 4, cp: 4, ep: 32, etp: 1}", "train.pipeline_split=[16, 15, 15, 15]",
          "rollout.layout={tp: 64, ep: 64, dp: 2, attention_dp: 8}"});
}

TEST_CASE("the resolved scenario loads back to the identical one") {
  for (const Scenario& s :
       {loaded(design_example), loaded(tiny), loaded(design_example, {"cluster.gpu=local-cpu"}),
        loaded(design_example, {"model=deepseek-v3", "train.layout={dp: 8}", "rollout.layout={tp: 8}"})}) {
    const std::string text = resolved_yaml(s);
    INFO(text);
    const Scenario again = loaded(text);
    CHECK(again == s);
    CHECK(resolved_yaml(again) == text);
  }
}

namespace {

/// A random legal value of a key, as --set text; empty: leave it alone (keys whose values other keys must match).
std::string random_value(const ScenarioKey& key) {
  if (key.path.starts_with("train.lora") || key.path.starts_with("train.layout") ||
      key.path.starts_with("rollout.layout") || key.path.starts_with("workload") || key.path.ends_with("tokens") ||
      key.path == "train.pipeline_split" || key.path == "algorithm.mini_batches" || key.path == "algorithm.kl_coef" ||
      key.path == "cluster.gpu.base" || key.path.starts_with("cluster.device_memory") ||
      key.path.starts_with("optimizer.beta") || key.path == "rollout.top_p" || key.path == "cluster.nodes" ||
      key.path == "cluster.gpus_per_node" || key.path == "cluster.ranks_per_device" || key.path == "placement" ||
      key.path == "train.offload" || key.path == "transition" || key.path == "sync.every" || key.path == "task.data" ||
      key.path == "optimizer.momentum" || key.path == "optimizer.cpu_fraction" || key.path == "rollout.engine" ||
      key.path == "rollout.temperature" || key.path.starts_with("train.wrap") ||
      key.path.starts_with("train.expert_") || key.path.starts_with("train.router_") ||
      key.path.starts_with("train.num_layers_in_") || key.path.starts_with("train.account_for_"))
    return "";
  const double unit = *rc::gen::inRange(0, 1 << 20) / static_cast<double>((1 << 20) - 1);
  const double number = key.low + unit * unit * unit * (key.high - key.low);
  switch (key.type) {
    case KeyType::integer:
      return std::to_string(static_cast<std::int64_t>(number));
    case KeyType::real:
      return yaml_of(number);
    case KeyType::boolean:
      return *rc::gen::arbitrary<bool>() ? "true" : "false";
    case KeyType::choice:
      return *rc::gen::elementOf(key.choices);
    case KeyType::text:
      return yaml_text(*rc::gen::suchThat(rc::gen::string<std::string>(), is_utf8));
    case KeyType::sourced:
      return yaml_of(Sourced{number, "a \"source\": 5% # not a comment"});
    case KeyType::integers:
    case KeyType::steps:
    case KeyType::slowdowns:
      break;
  }
  return "";
}

}  // namespace

TEST_CASE("property: any legal values survive the resolved form") {
  CHECK(rc::check([] {
    std::vector<std::string> overrides;
    for (const auto& key : scenario_keys())
      if (const std::string value = random_value(key); !value.empty() && *rc::gen::inRange(0, 3) == 0)
        overrides.push_back(key.path + "=" + value);
    const auto s = load_scenario_text(design_example, "test.yaml", overrides);
    if (!s) RC_LOG() << render(s.error());
    RC_ASSERT(s.has_value());
    const std::string text = resolved_yaml(*s);
    RC_LOG() << text;
    const auto again = load_scenario_text(text, "test.yaml");
    if (!again) RC_LOG() << render(again.error());
    RC_ASSERT(again.has_value());
    RC_ASSERT(*again == *s);
  }));
}

TEST_CASE("FSDP1's wrap policies are read, printed where they are set, and not spoken of where they are not") {
  CHECK(resolved_yaml(loaded(design_example)).find("wrap") == std::string::npos);
  const Scenario s = loaded(design_example, {"train.engine=fsdp1", "train.offload=none",
                                             "train.wrap={policy: names, names: [model.layers.*, '*.mlp']}"});
  CHECK(s.train.wrap.policy == WrapPolicy::names);
  CHECK(patterns_of(s.train.wrap) == std::vector<std::string>{"model.layers.*", "*.mlp"});
  CHECK(loaded(resolved_yaml(s)) == s);
}

TEST_CASE("disturbances are read, printed where they are set, and not spoken of where they are not") {
  const Scenario calm = loaded(design_example);
  CHECK(calm.disturbances.none());
  CHECK(resolved_yaml(calm).find("disturbances") == std::string::npos);
  CHECK(resolved_json(calm).find("disturbances") == std::string::npos);
  const Scenario s = loaded(
      design_example, {"disturbances={slow_ranks: [{rank: 3, factor: 1.5}], slow_nodes: [{node: 0, factor: 1.2}], "
                       "slow_links: [{node: 0, factor: 2}, {rank: 1, link: pcie, factor: 3.5}], jitter: {relative: "
                       "0.05, seed: 7}}"});
  CHECK(s.disturbances.slow_ranks == std::vector<Slowdown>{{.rank = 3, .factor = 1.5}});
  CHECK(s.disturbances.slow_nodes == std::vector<Slowdown>{{.node = 0, .factor = 1.2}});
  CHECK(s.disturbances.slow_links ==
        std::vector<Slowdown>{{.node = 0, .factor = 2}, {.rank = 1, .link = LinkKind::pcie, .factor = 3.5}});
  CHECK(s.disturbances.jitter == JitterSpec{0.05, 7});
  CHECK_FALSE(s.disturbances.none());
  const std::string text = resolved_yaml(s);
  CHECK(text.find("  slow_links: [{node: 0, factor: 2}, {rank: 1, link: pcie, factor: 3.5}]") != std::string::npos);
  CHECK(loaded(text) == s);
  CHECK(resolved_json(s).find("\"link\": \"pcie\"") != std::string::npos);
}

TEST_CASE("every problem of a file is reported, not only the first") {
  const auto s = load_scenario_text("model: qwen2.5-7b\nseeed: 1\nsteps: many\ntrain: {offload: sleepy}\n", "x.yaml");
  REQUIRE_FALSE(s);
  CHECK(s.error().size() == 3);
}

TEST_CASE("what today's backends execute, and why not") {
  CHECK(unsupported_to_execute(loaded(tiny)).empty());
  const auto reasons = unsupported_to_execute(loaded(design_example));
  CHECK(reasons.size() == 1);  // rollout.engine sglang
  for (const char* change : {"train.engine=megatron", "sync.mode=direct", "algorithm.name=ppo", "profile=verl-fsdp",
                             "rollout.engine=vllm", "optimizer.name=muon"}) {
    INFO(change);
    CHECK(unsupported_to_execute(loaded(tiny, {change})).size() == 1);
  }
  CHECK(unsupported_to_execute(loaded(tiny, {"train.offload=layerwise"})).empty());
  CHECK(unsupported_to_execute(loaded(tiny, {"train.engine=zero1", "optimizer.cpu_fraction=0.5"})).empty());
}

TEST_CASE("docs/scenario.md holds the table of keys") {
  const std::filesystem::path page = std::filesystem::path(source_folder) / "docs/scenario.md";
  const auto text = read_file(page);
  REQUIRE(text);
  const std::string begin = "<!-- keys: begin -->\n", end = "<!-- keys: end -->\n";
  const auto from = text->find(begin), to = text->find(end);
  REQUIRE(from != std::string::npos);
  REQUIRE(to != std::string::npos);
  const std::string expected = text->substr(0, from) + begin + scenario_reference() + "\n" + text->substr(to);
  if (std::getenv("HOTBUNK_UPDATE") != nullptr) REQUIRE(write_file_atomic(page, expected));
  INFO("HOTBUNK_UPDATE=1 writes the page from the table");
  CHECK((std::getenv("HOTBUNK_UPDATE") != nullptr || *text == expected));
}

TEST_CASE("a framework's profile sets the order and the bucket where the scenario is silent") {
  const auto loaded = [](const char* text) {
    auto s = load_scenario_text(std::string("model: qwen2.5-7b\ncluster: {gpu: h100-sxm-80gb, gpus_per_node: 8}\n"
                                            "train: {layout: {dp: 8}, micro_batch_tokens: 16384}\n"
                                            "rollout: {engine: sglang, layout: {tp: 4, dp: 2}}\n") +
                                    text,
                                "scenario.yaml");
    REQUIRE(s);
    return *s;
  };
  CHECK(loaded("").transition == "hotbunk");
  CHECK(loaded("profile: verl-fsdp\n").transition == "verl");
  CHECK(loaded("profile: verl-fsdp\n").sync.bucket_bytes == std::int64_t{2048} << 20);
  CHECK(loaded("profile: slime-fsdp\n").transition == "slime");
  const Scenario own = loaded("profile: slime-fsdp\ntransition: auto\nsync: {bucket_mib: 64}\n");
  CHECK(own.transition == "auto");
  CHECK(own.sync.bucket_bytes == 64 << 20);
}

TEST_CASE("GPUs go by as many words as tell them apart, models by their names on the hub") {
  using Names = std::vector<std::string>;
  CHECK(catalog_matches("gpus", "h100") == Names{"h100-sxm-80gb"});
  CHECK(catalog_matches("gpus", "NVIDIA H100 80GB") == Names{"h100-sxm-80gb"});
  CHECK(catalog_matches("gpus", "H20") == Names{"h20-sxm-96gb"});  // not h200
  CHECK(catalog_matches("gpus", "a100") == Names{"a100-sxm-40gb", "a100-sxm-80gb"});
  CHECK(catalog_matches("gpus", "80gb h100").empty());  // words in their order
  CHECK(catalog_matches("gpus", "nvidia").empty());
  CHECK(catalog_matches("gpus", "").empty());
  for (const std::string& gpu : catalog_names("gpus")) CHECK(catalog_matches("gpus", gpu) == Names{gpu});

  CHECK(catalog_model_of_hub("Qwen/Qwen2.5-32B-Instruct") == "qwen2.5-32b");
  CHECK(catalog_model_of_hub("qwen2.5-32b-instruct") == "qwen2.5-32b");
  CHECK(catalog_model_of_hub("deepseek-ai/DeepSeek-R1") == "deepseek-v3");
  CHECK(catalog_model_of_hub("Qwen/Qwen2.5-Math-1.5B-Instruct") == "qwen2.5-math-1.5b");
  CHECK(catalog_model_of_hub("Qwen/Qwen2.5-Math-72B").empty());
  // Every name is of a model that is there, and of one only.
  const auto text = read_file(catalog_root() / "hub_names.yaml", 1 << 20);
  REQUIRE(text);
  const auto names = parse_yaml(*text, "hub_names.yaml");
  REQUIRE(names);
  CHECK(names->entries.size() > 20);
  for (const YamlEntry& model : names->entries) {
    CHECK_FALSE(catalog_file("models", model.key).empty());
    CHECK_FALSE(model.value.items.empty());
    for (const YamlNode& name : model.value.items) CHECK(catalog_model_of_hub(name.text) == model.key);
  }
  const auto named = load_scenario_text(
      "model: Qwen/Qwen2.5-7B\ncluster: {gpu: h100, gpus_per_node: 8}\ntrain: {layout: {dp: 8}}\n"
      "rollout: {layout: {tp: 4, dp: 2}}\n",
      "scenario.yaml");
  REQUIRE(named);
  CHECK(named->model.name == "qwen2.5-7b");
  CHECK(named->model.hub_name == "Qwen/Qwen2.5-7B");
  CHECK(named->cluster.gpu.name == "h100-sxm-80gb");
}

}  // namespace hotbunk
