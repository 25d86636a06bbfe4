// import(export(x)) = x for every key that a system has. Long: the launches that together say every key stand here.
#include "interop/export.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "spec/catalog.h"
#include "spec/loader.h"
#include "spec/model_config.h"
#include "spec/pipeline_split.h"
#include "tests/interop/launches.h"

namespace hotbunk {
namespace {

struct Base {
  std::string system, text;
};

const std::string workload =
    "workload: {prompt_tokens: {mean: 256, max: 1024}, response_tokens: {mean: 1024, max: 3072}}\n";
const std::string machines = "cluster: {gpu: h100-sxm-80gb, nodes: 2, gpus_per_node: 8}\n";

std::vector<Base> bases() {
  return {
      {"verl",
       "model: qwen2.5-7b\nprofile: verl-fsdp\ntrain: {engine: fsdp1, layout: {dp: auto}, micro_batch_tokens: 16384}\n"
       "rollout: {engine: vllm, layout: {tp: 2, dp: auto}}\nalgorithm: {prompts: 64, samples_per_prompt: 8}\n" +
           machines + workload},
      {"verl",
       "model: qwen3-30b-a3b\nprofile: verl-megatron\ntrain: {engine: megatron, layout: {dp: auto, tp: 2, pp: 2, sp: "
       "true}, micro_batch_tokens: 16384}\n"
       "rollout: {engine: vllm, layout: {tp: 2, dp: auto}}\nalgorithm: {prompts: 64, samples_per_prompt: 8}\n" +
           machines + workload},
      {"slime",
       "model: qwen3-30b-a3b\nprofile: slime-megatron\ntrain: {engine: megatron, layout: {dp: auto, tp: 2, pp: 2}, "
       "micro_batch_tokens: 16384}\n"
       "rollout: {engine: sglang, layout: {tp: 2, dp: auto}}\nalgorithm: {prompts: 64, samples_per_prompt: 8}\n" +
           machines + workload},
      {"nemo-rl",
       "model: qwen3-30b-a3b\nprofile: nemo-megatron\ntrain: {engine: megatron, layout: {dp: auto, tp: 2, pp: 2}, "
       "micro_batch_tokens: 16384}\n"
       "rollout: {engine: vllm, layout: {tp: 2, dp: auto}}\nalgorithm: {prompts: 64, samples_per_prompt: 8, reference: "
       "true}\n" +
           machines + workload},
      {"megatron",
       "model: llama-3.1-8b\nprofile: megatron\nalgorithm: {name: sft, prompts: 64}\ntrain: {engine: megatron, "
       "offload: none, layout: {dp: auto, tp: 2, pp: 2}, micro_batch_sequences: 1, micro_batch_tokens: 4096}\n" +
           machines +
           "workload: {prompt_tokens: {mean: 1, max: 1, distribution: fixed}, response_tokens: {mean: 4095, max: 4095, "
           "distribution: fixed}}\n"},
      {"verl",
       "model: qwen3-4b\nprofile: verl-fsdp\ntrain: {engine: fsdp2, layout: {dp: auto}, micro_batch_tokens: 16384}\n"
       "rollout: {engine: vllm, layout: {tp: 2, dp: auto}}\nalgorithm: {prompts: 64, samples_per_prompt: 8}\n" +
           machines + workload},
      {"nemo-rl",
       "model: qwen3-4b\nprofile: nemo-fsdp\ntrain: {engine: fsdp2, layout: {dp: auto}, micro_batch_tokens: 16384}\n"
       "rollout: {engine: vllm, layout: {tp: 2, dp: auto}}\nalgorithm: {prompts: 64, samples_per_prompt: 8, reference: "
       "true}\n" +
           machines + workload},
      {"megatron",
       "model: qwen3-30b-a3b\nprofile: megatron\nalgorithm: {name: sft, prompts: 64}\ntrain: {engine: megatron, "
       "offload: none, layout: {dp: auto, tp: 2, pp: 2}, micro_batch_sequences: 1, micro_batch_tokens: 4096}\n" +
           machines +
           "workload: {prompt_tokens: {mean: 1, max: 1, distribution: fixed}, response_tokens: {mean: 4095, max: 4095, "
           "distribution: fixed}}\n"},
  };
}

/// Values to try of a key beside what the base has, with what must change with them.
std::vector<std::vector<std::string>> variants(const ScenarioKey& key, const Scenario& base) {
  if (key.path == "train.pipeline_split") return {{"train.pipeline_split=[22, 26]"}};
  if (key.path == "train.num_layers_in_first_pipeline_stage" || key.path == "train.num_layers_in_last_pipeline_stage")
    return {{key.path + "=4"}};
  if (key.path.starts_with("train.account_for_")) {
    const std::vector<std::string> both = {"train.account_for_embedding_in_pipeline_split=true",
                                           "train.account_for_loss_in_pipeline_split=true"};
    const std::int64_t of_stage = (base.model.layers + 2) / base.train.layout.pp;
    std::int64_t chunks = 2;
    while (of_stage % chunks != 0) ++chunks;
    std::vector<std::string> virtual_stages = both;
    virtual_stages.push_back(fmt::format("train.layout.vpp={}", chunks));
    virtual_stages.emplace_back("train.pipeline_schedule=interleaved");
    return {both, virtual_stages};
  }
  if (key.path == "train.pipeline_schedule" || key.path == "train.layout.vpp")
    return {{"train.layout.vpp=2", "train.pipeline_schedule=interleaved"}};
  if (key.path == "placement")
    return {{"placement=disaggregated", "train.layout.dp=auto", "rollout.layout.dp=4", "train.offload=none"}};
  if (key.path == "algorithm.max_staleness")
    return {{"algorithm.max_staleness=1", "placement=disaggregated", "train.layout.dp=auto", "rollout.layout.dp=4",
             "train.offload=none"}};
  if (key.path == "train.layout.fsdp" && base.train.engine == TrainEngine::megatron)
    return {{"train.layout.fsdp=2"}, {"train.layout.fsdp=1"}};
  if (key.path == "transition")
    return {{"transition=[sleep_train, wake_rollout, wake_params, sync, sleep_train, wake_kv, rollout, sleep_rollout, "
             "wake_train]"},
            {"transition=[sleep_optimizer, wake_rollout, sync, wake_kv, rollout, sleep_rollout, wake_train]"}};
  if (key.path == "workload.max_tokens") return {{"workload.max_tokens=3500"}};
  const bool nemo = base.profile.starts_with("nemo-");  // packs tokens, or takes sequences and pads them
  if (key.path == "train.micro_batch_sequences")
    return {{"train.micro_batch_sequences=3", "train.micro_batch_tokens=12288",
             nemo ? "train.padding=batch" : "train.padding=none"}};
  if (key.path == "train.padding" && nemo)
    return {{"train.padding=batch", "train.micro_batch_sequences=3", "train.micro_batch_tokens=12288"},
            {"train.padding=micro-batch"}};
  if (key.path == "algorithm.kl_coef") return {{"algorithm.kl_coef=0.25", "algorithm.reference=true"}};
  if (key.path == "train.precision.master" || key.path == "train.precision.moments")
    return {{"train.precision.master=bf16", "train.precision.moments=bf16"}};
  if (key.path == "train.recompute_modules") {
    if (base.train.engine != TrainEngine::megatron) return {};  // FSDP's say nothing of modules
    return {{"train.recompute_modules=[core_attn, moe_act]", "train.recompute=selective"}};
  }
  const std::string rank = "train.lora.rank=16", attention = "train.lora.targets=[q_proj, k_proj, v_proj, o_proj]";
  if (key.path == "train.lora.rank") return {{rank}, {rank, attention}};
  if (key.path == "train.lora.alpha") return {{"train.lora.alpha=48", rank}, {"train.lora.alpha=48", rank, attention}};
  if (key.path == "train.lora.targets")
    return {{"train.lora.targets=[q_proj, v_proj]", rank}, {"train.lora.targets=[o_proj]", rank}, {attention, rank}};
  if (key.path == "train.lora.adapter")
    return {{"train.lora.adapter=/adapters/first", rank}, {"train.lora.adapter=/adapters/first", rank, attention}};
  if (key.path == "rollout.layout.ep") return {{"rollout.layout.ep=2"}};
  if (key.path == "train.engine" || key.path == "profile" || key.path == "algorithm.name") return {};
  if (key.path == "rollout.layout.attention_dp") return {{"rollout.layout.attention_dp=2"}};
  std::vector<std::vector<std::string>> out;
  const auto add = [&](const std::string& value) { out.push_back({key.path + "=" + value}); };
  const std::string now = yaml_of(key.get(base));
  if (key.type == KeyType::boolean) add(now == "true" ? "false" : "true");
  else if (key.type == KeyType::choice) {
    for (const std::string& choice : key.choices) add(choice);
  } else if (key.type == KeyType::integer || key.type == KeyType::real) {
    const double value = std::stod(now == "null" ? "1" : now);
    for (const double more : {2 * value, value / 2, value + 1, 1.0, 0.25})
      if (key.type == KeyType::real || more == std::floor(more)) add(fmt::format("{}", more));
  }
  return out;
}

Scenario read_back(const std::string& system, const ExportedLaunch& launch) {
  const auto script = parse_shell_script(launch.text, "export", {});
  if (!script) FAIL(render(script.error()));
  REQUIRE(script->commands.size() == 1);
  LaunchSource source;
  for (const ShellWord& word : script->commands[0]) {
    CHECK(word.undefined.empty());
    source.words.push_back(word.text);
  }
  if (system == "nemo-rl")
    source.words.erase(source.words.begin(), source.words.begin() + 5);  // its own base is not here
  return import_of(system, source).scenario;
}

bool names(const std::vector<std::string>& unsaid, const std::string& key) {
  return std::ranges::any_of(unsaid, [&](const std::string& what) { return what.find(key) != std::string::npos; });
}

/// What a system cannot say of a key that it has otherwise: other values of it, or under another engine. By system and
/// model.
const std::set<std::string>& may_lack(const std::string& name) {
  static const std::map<std::string, std::set<std::string>> lacking = {
      {"verl qwen2.5-7b",
       {"train.recompute",
        "train.layout.tp",
        "train.layout.pp",
        "train.layout.cp",
        "train.layout.vpp",
        "train.layout.ep",
        "train.layout.sp",
        "train.layout.etp",
        "train.pipeline_split",
        "train.pipeline_schedule",
        "train.account_for_embedding_in_pipeline_split",
        "train.account_for_loss_in_pipeline_split",
        "optimizer.cpu_fraction",
        "train.offload",
        "train.precision.moments",
        "train.precision.master",
        "rollout.engine",
        "rollout.dtype",
        "rollout.kv_cache_dtype",
        "sync.every",
        "train.padding",
        "rollout.layout.attention_dp"}},
      {"verl qwen3-4b",
       {"rollout.layout.attention_dp", "optimizer.cpu_fraction", "rollout.dtype", "rollout.kv_cache_dtype",
        "rollout.engine", "train.layout.cp", "train.layout.pp", "train.layout.tp", "train.padding", "train.recompute",
        "train.account_for_embedding_in_pipeline_split", "train.account_for_loss_in_pipeline_split"}},
      {"verl qwen3-30b-a3b",
       {"train.padding", "train.layout.ulysses", "train.layout.fsdp", "train.precision.master",
        "train.precision.moments", "train.reshard_after_forward", "train.pipeline_schedule", "rollout.engine",
        "rollout.dtype", "rollout.kv_cache_dtype", "train.offload", "sync.every"}},
      {"slime qwen3-30b-a3b", {"optimizer.name", "train.pipeline_schedule", "rollout.kv_cache_dtype"}},
      {"nemo-rl qwen3-30b-a3b",
       {"train.padding", "train.offload", "train.precision.grads", "train.pipeline_schedule", "train.layout.fsdp",
        "train.logprob_micro_batch_sequences", "rollout.engine", "rollout.dtype", "rollout.kv_cache_dtype",
        "train.lora.targets"}},
      {"nemo-rl qwen3-4b",
       {"optimizer.beta1", "optimizer.beta2", "optimizer.cpu_fraction", "optimizer.warmup_steps", "rollout.dtype",
        "rollout.kv_cache_dtype", "rollout.engine", "train.account_for_embedding_in_pipeline_split",
        "train.account_for_loss_in_pipeline_split", "train.layout.fsdp", "train.layout.pp",
        "train.logprob_micro_batch_sequences", "train.offload", "train.padding", "train.precision.grads",
        "train.recompute"}},
      {"megatron qwen3-30b-a3b", {"optimizer.name", "train.precision.grads", "train.precision.gemm"}},
      {"megatron llama-3.1-8b",
       {"optimizer.name", "train.precision.grads", "train.precision.gemm", "train.pipeline_schedule"}}};
  return lacking.at(name);
}

/// Every key that a system has, each with other values that the rules allow: of a system's scenario what is set, the
/// scenario and its launch.
struct Variant {
  std::string system, name;  // "verl", "verl qwen2.5-7b"
  std::string path;          // the key
  std::vector<std::string> sets;
  Scenario plain, scenario;
  ExportedLaunch launch;
};
template <class Use>
void each_variant(const Use& use) {
  for (const Base& base : bases()) {
    const LaunchTable table = table_of(base.system);
    const auto plain = load_scenario_text(base.text, "base.yaml");
    if (!plain) FAIL(render(plain.error()));
    for (const std::string& path : exported_keys(table))
      for (const auto& sets : variants(*find_scenario_key(path), *plain))
        if (const auto scenario = load_scenario_text(base.text, "base.yaml", sets))
          use(Variant{base.system, base.system + " " + plain->model.name, path, sets, *plain, *scenario,
                      export_launch(table, *scenario)},
              exported_keys(table));
  }
}

/// What the value is tried beside may be more than the system has.
bool tried_beside_more(const Variant& v, const std::set<std::string>& keys) {
  return std::ranges::any_of(v.sets, [&](const std::string& set) {
    const std::string other = set.substr(0, set.find('='));
    return other != v.path && !keys.contains(other) && names(v.launch.unsaid, other);
  });
}

void check_read_back(const Variant& v, const std::set<std::string>& keys) {
  const Scenario back = read_back(v.system, v.launch);
  for (const std::string& key : keys) {
    INFO(key);
    // Layers of the ends and a list are two ways to say one split.
    if (key == "train.pipeline_split" || key.ends_with("_pipeline_stage"))
      CHECK(split_layers(back) == split_layers(v.scenario));
    else CHECK(value_of(back, key) == value_of(v.scenario, key));
  }
  // The same model, by the name that the system can load it by.
  ModelSpec model = back.model;
  model.hub_name = v.scenario.model.hub_name;
  CHECK(model == v.scenario.model);
}

}  // namespace

TEST_CASE("import(export(x)) = x for every key that the system has") {
  std::map<std::string, std::set<std::string>> kept;  // by system and model: keys that took another value and kept it
  each_variant([&](const Variant& v, const std::set<std::string>& keys) {
    INFO(v.name << ": " << v.sets[0] << "\n" << v.launch.text);
    if (tried_beside_more(v, keys)) return;
    const bool lacks = names(v.launch.unsaid, v.path);
    CHECK((!lacks || may_lack(v.name).contains(v.path)));
    if (lacks) return;
    check_read_back(v, keys);
    if (value_of(v.scenario, v.path) != value_of(v.plain, v.path)) kept[v.name].insert(v.path);
  });
  CHECK(kept.size() == bases().size());
  for (const auto& [name, keys] : kept) {
    INFO(name << fmt::format("\nkept: {}", fmt::join(keys, ", ")));
    CHECK(keys.size() >= (name.starts_with("megatron") ? 15U : 24U));
  }
}

TEST_CASE("whatever an import takes, some launch says; of two ways to say one thing, the other one") {
  std::map<std::string, std::set<std::string>> written;  // by system, keys of its launches
  each_variant([&](const Variant& v, const std::set<std::string>&) {
    for (const auto& [key, value] : v.launch.arguments) written[v.system].insert(key);
  });
  REQUIRE(written.size() == 4);
  const std::set<std::string> other_words = {
      "task",          "layers",
      "hidden",        "heads",
      "kv_heads",      "head_dim",
      "ffn",           "vocab",
      "experts",       "expert_ffn",
      "positions",     "experts_per_token",
      "swiglu",        "unspelled",
      "max_positions", "untied",
      "qkv_bias",      "rotary_base",
      "norm_epsilon",  "recompute_activations"};  // a model's name, and granularity, say them
  const std::set<std::string> others = {
      "policy.dynamic_batching.train_mb_tokens",    // as sequence_packing's: planned without padding either way
      "policy.dynamic_batching.logprob_mb_tokens",  // the same
      "num-steps-per-rollout",                      // global-batch-size says it
      "kl-coef",                                    // kl-loss-coef: the same pass
      "async_training.require_batches",             // the product of it and the mini-batch is train_batch_size
  };
  for (const auto& [system, keys] : written)
    for (const LaunchKey& row : table_of(system).keys) {
      const bool taken = !row.role.empty() || std::ranges::any_of(row.to, [](const KeyTarget& to) {
        return to.words.empty() || std::ranges::any_of(to.words, [](const auto& w) { return w.second != "null"; });
      });
      INFO(system << " " << row.key);
      CHECK((!taken || keys.contains(row.key) || other_words.contains(row.role) || others.contains(row.key)));
    }
}

TEST_CASE("a launch names what its system can load: the hub's name, and the scenario's own where it has one") {
  for (const Base& base : bases()) {
    const LaunchTable table = table_of(base.system);
    const ExportedLaunch plain = export_launch(table, *load_scenario_text(base.text, "base.yaml"));
    INFO(base.system << '\n' << plain.text);
    const auto plain_model = load_scenario_text(base.text, "base.yaml")->model;
    const std::string hub = hub_name_of(plain_model.name);
    REQUIRE_FALSE(hub.empty());
    CHECK_THAT(plain.text, Catch::Contains(hub) && !Catch::Contains(plain_model.name));
    const Scenario back = read_back(base.system, plain);
    CHECK(back.model.hub_name == hub);
    CHECK(export_launch(table, back).text == plain.text);
  }
  const auto instruct = load_scenario_text(
      "model: Qwen/Qwen2.5-7B-Instruct\nprofile: verl-fsdp\ntrain: {engine: fsdp2, layout: {dp: auto}, "
      "micro_batch_tokens: 16384}\nrollout: {engine: vllm, layout: {tp: 1, dp: auto}}\n" +
          machines + workload,
      "instruct.yaml");
  if (!instruct) FAIL(render(instruct.error()));
  const ExportedLaunch launch = export_launch(table_of("verl"), *instruct);
  CHECK_THAT(launch.text, Catch::Contains("model.path=Qwen/Qwen2.5-7B-Instruct"));
  CHECK(read_back("verl", launch).model == instruct->model);
}

TEST_CASE("adapters: all of a family's matrices are all-linear, whatever they are called") {
  std::vector<std::string> sets = {
      "model=gpt2", "workload={prompt_tokens: {mean: 64, max: 256}, response_tokens: {mean: 256, max: 512}}",
      "train.lora={rank: 8, targets: [c_attn, c_proj, c_fc]}"};
  const auto targets = [&] {
    const auto s = load_scenario_text(bases()[0].text, "base.yaml", sets);
    if (!s) FAIL(render(s.error()));
    return read_back("verl", export_launch(table_of("verl"), *s)).model.lora.targets;
  };
  CHECK(targets() == "all-linear");
  sets.back() = "train.lora={rank: 8, targets: [c_proj, c_attn]}";
  CHECK(targets() == "c_attn-c_proj");
}

TEST_CASE("slime's FSDP has one shard group: over dp, which an import says of context parallelism") {
  const auto exported = [](const char* layout) {
    const auto s = load_scenario_text(
        fmt::format(
            "model: qwen2.5-7b\nprofile: slime-fsdp\ntrain: {{engine: fsdp2, layout: {{{}}}, micro_batch_tokens: "
            "16384}}\nrollout: {{engine: sglang, layout: {{tp: 2, dp: auto}}}}\n"
            "algorithm: {{prompts: 64, samples_per_prompt: 8}}\n",
            layout) +
            machines + workload,
        "slime.yaml");
    if (!s) FAIL(render(s.error()));
    const ExportedLaunch launch = export_launch(table_of("slime"), *s);
    std::string unsaid;
    for (const std::string& key : launch.unsaid)
      if (key.starts_with("train.layout.")) unsaid += key;
    return std::pair(read_back("slime", launch).train.layout, std::pair(s->train.layout, unsaid));
  };
  for (const char* layout : {"dp: auto", "dp: auto, cp: 2, shard_over: [dp]"}) {
    CAPTURE(layout);
    const auto [read, own] = exported(layout);
    CHECK(read == own.first);
    CHECK(own.second.empty());
  }
  const auto [read, own] = exported("dp: auto, cp: 2");
  CHECK(read.shard_over == "dp");
  CHECK_THAT(own.second, Catch::StartsWith("train.layout.shard_over"));
}

TEST_CASE("adapters: verl and NeMo-RL have arguments for them; slime and Megatron-LM refuse") {
  const auto launch = [](std::size_t base, const std::vector<std::string>& sets) {
    const auto s = load_scenario_text(bases()[base].text, "base.yaml", sets);
    if (!s) FAIL(render(s.error()));
    return export_launch(table_of(bases()[base].system), *s).text;
  };
  const std::vector<std::string> attention = {
      "train.lora={rank: 16, alpha: 48, targets: [q_proj, k_proj, v_proj, o_proj]}"};
  // PEFT under FSDP, Megatron-Bridge under Megatron: verl has keys for each, and reads the others' not.
  CHECK_THAT(launch(0, attention),
             Catch::Contains("model.lora_rank=16") && Catch::Contains("model.lora_alpha=48") &&
                 Catch::Contains("'actor_rollout_ref.model.target_modules=[q_proj,k_proj,v_proj,o_proj]'") &&
                 Catch::Contains("model.lora.merge=true") && Catch::Contains("load_format=safetensors") &&
                 !Catch::Contains("model.lora.rank"));
  CHECK_THAT(launch(0, {"train.lora.rank=8"}), Catch::Contains("model.target_modules=all-linear"));
  CHECK_THAT(launch(0, {"model=deepseek-v2", "train.lora={rank: 8, targets: [q_a_proj, kv_b_proj]}"}),
             Catch::Contains("model.target_modules=[q_a_proj,kv_b_proj]"));
  CHECK_THAT(launch(1, attention), Catch::Contains("model.lora.rank=16") && Catch::Contains("type=canonical_lora") &&
                                       Catch::Contains("[linear_q,linear_k,linear_v,linear_proj]") &&
                                       !Catch::Contains("lora_rank"));
  CHECK_THAT(launch(3, attention), Catch::Contains("megatron_cfg.peft.enabled=true") &&
                                       Catch::Contains("peft.dim=16") && Catch::Contains("[linear_qkv,linear_proj]"));
  // Its module of q, k and v has them all.
  CHECK_THAT(launch(3, {"train.lora={rank: 16, targets: [q_proj]}"}),
             Catch::Contains("# NeMo-RL has no key for train.lora.targets: q_proj; this says q_proj-k_proj-v_proj"));
  // Latent attention's modules have names of their own, o_proj's not.
  for (const std::size_t base : {1U, 3U}) {
    CHECK_THAT(launch(base, {"model=deepseek-v2", "train.lora={rank: 8, targets: [q_a_proj, kv_b_proj]}"}),
               Catch::Contains("target_modules=[linear_q_down_proj,linear_kv_up_proj]") &&
                   !Catch::Contains("no key for train.lora"));
    CHECK_THAT(
        launch(base, {"model=deepseek-v2", "train.lora={rank: 8, targets: [q_b_proj, kv_a_proj_with_mqa, o_proj]}"}),
        Catch::Contains("target_modules=[linear_q_up_proj,linear_kv_down_proj,linear_proj]") &&
            !Catch::Contains("no key for train.lora"));
  }
  // GPT-2's matrices have none: a list without them would be empty, which is all modules.
  const std::vector<std::string> gpt2 = {
      "model=gpt2", "workload={prompt_tokens: {mean: 64, max: 256}, response_tokens: {mean: 256, max: 512}}"};
  for (const auto& [base, targets, lost] :
       {std::tuple{1U, "[c_attn]", "c_attn"}, {3U, "[c_fc, c_proj]", "c_proj, c_fc"}}) {
    std::vector<std::string> sets = gpt2;
    sets.push_back(fmt::format("train.lora={{rank: 8, targets: {}}}", targets));
    const auto adapted = load_scenario_text(bases()[base].text, "base.yaml", sets);
    if (!adapted) FAIL(render(adapted.error()));
    const auto why = why_not_exported(table_of(bases()[base].system), *adapted);
    REQUIRE(why.has_value());
    CHECK(why->code == "E156");
    CHECK_THAT(why->message, Catch::EndsWith(fmt::format("adapters of gpt2's {}", lost)));
  }
  for (const std::size_t base : {0U, 1U, 3U})
    CHECK_THAT(launch(base, {}), !Catch::Contains("lora") && !Catch::Contains("peft"));
  for (const auto& [base, name] : {std::pair{2U, "slime"}, {4U, "Megatron-LM"}}) {
    const LaunchTable table = table_of(bases()[base].system);
    const auto plain = load_scenario_text(bases()[base].text, "base.yaml"),
               adapted = load_scenario_text(bases()[base].text, "base.yaml", attention);
    REQUIRE((plain && adapted));
    CHECK_FALSE(why_not_exported(table, *plain).has_value());
    const auto why = why_not_exported(table, *adapted);
    REQUIRE(why.has_value());
    CHECK(why->code == "E156");
    CHECK_THAT(why->message, Catch::StartsWith(std::string(name) + " trains no adapters"));
  }
}

TEST_CASE("what a system cannot say is told, not dropped") {
  const auto s =
      load_scenario_text(bases()[2].text, "base.yaml",
                         {"sync.mode=direct", "rollout.block_tokens=32", "train.layout.order=tp-cp-ep-pp-dp"});
  REQUIRE(s);
  const ExportedLaunch launch = export_launch(table_of("slime"), *s);
  for (const char* key : {"sync.mode", "rollout.block_tokens", "train.layout.order"}) CHECK(names(launch.unsaid, key));
  CHECK_THAT(launch.text, Catch::Contains("# slime has no key for sync.mode: direct"));
}

TEST_CASE("a model that no catalogue has is written as Megatron's sizes, and read back the same") {
  const std::vector<Base> all = bases();
  const Base& base = *std::ranges::find(all, "megatron", &Base::system);
  const std::string rest = base.text.substr(base.text.find('\n'));
  for (
      const char* model :
      {"{model_type: llama, num_hidden_layers: 8, hidden_size: 1024, intermediate_size: 2816, num_attention_heads: 16, "
       "num_key_value_heads: 4, vocab_size: 32000, max_position_embeddings: 8192, tie_word_embeddings: false}",
       "{model_type: qwen3_moe, num_hidden_layers: 8, hidden_size: 1024, intermediate_size: 2816, num_attention_heads: "
       "16, num_key_value_heads: 4, head_dim: 128, vocab_size: 32000, max_position_embeddings: 8192, "
       "num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 704, tie_word_embeddings: true}",
       "{model_type: mixtral, num_hidden_layers: 8, hidden_size: 1024, intermediate_size: 2816, num_attention_heads: "
       "16, num_key_value_heads: 16, vocab_size: 32000, max_position_embeddings: 8192, num_local_experts: 8, "
       "num_experts_per_tok: 2, tie_word_embeddings: false}",
       "{model_type: gpt2, n_layer: 8, n_embd: 1024, n_head: 16, n_inner: 4096, n_positions: 4096, vocab_size: "
       "50257}",
       // A rotary base, biases of q, k and v, a head of GPT-2's own.
       "{model_type: llama, num_hidden_layers: 8, hidden_size: 1024, intermediate_size: 2816, num_attention_heads: 16, "
       "num_key_value_heads: 4, vocab_size: 32000, max_position_embeddings: 8192, rope_theta: 500000}",
       "{model_type: qwen2, num_hidden_layers: 8, hidden_size: 1024, intermediate_size: 2816, num_attention_heads: 16, "
       "num_key_value_heads: 4, vocab_size: 32000, max_position_embeddings: 8192, rope_theta: 1000000}",
       "{model_type: gpt2, n_layer: 8, n_embd: 1024, n_head: 16, n_inner: 4096, n_positions: 4096, vocab_size: 50257, "
       "tie_word_embeddings: false}"}) {
    const auto scenario = load_scenario_text("model: " + std::string(model) + rest, "custom.yaml");
    if (!scenario) FAIL(render(scenario.error()));
    const ExportedLaunch launch = export_launch(table_of("megatron"), *scenario);
    INFO(launch.text);
    CHECK(launch.text.find("--hf-checkpoint") == std::string::npos);
    CHECK(launch.text.find("--bf16") != std::string::npos);  // Megatron-LM's default is fp32
    CHECK((launch.text.find("--group-query-attention") != std::string::npos) ==
          (scenario->model.kv_heads < scenario->model.heads));
    CHECK(launch.unsaid.empty());
    CHECK(read_back("megatron", launch).model == scenario->model);
  }
}

TEST_CASE("export names every key of the model that the launch cannot say") {
  const std::vector<Base> all = bases();
  const std::string sizes =
      "num_hidden_layers: 8, hidden_size: 1024, intermediate_size: 2816, num_attention_heads: 16, num_key_value_heads: "
      "4, vocab_size: 32000, max_position_embeddings: 8192";
  struct Case {
    std::string model, key;  // what is unsaid of it
  };
  for (const char* system : {"megatron", "slime"}) {
    const Base& base = *std::ranges::find(all, system, &Base::system);
    const auto unsaid_of = [&](const std::string& model) {
      const auto scenario =
          load_scenario_text("model: " + model + base.text.substr(base.text.find('\n')), "custom.yaml");
      if (!scenario) FAIL(render(scenario.error()));
      return export_launch(table_of(system), *scenario);
    };
    for (const Case& c : std::vector<Case>{
             {"{model_type: llama, " + sizes + ", attention_bias: true}", "model.attention_bias: true"},
             {"{model_type: llama, " + sizes + ", rope_theta: 10000.5}", "model.rope_parameters.rope_theta: 10000.5"},
             {"{model_type: llama, " + sizes + ", rope_scaling: {rope_type: linear, factor: 4.0}}",
              "model.rope_parameters.factor: 4.0"},
             {"{base: llama-3.1-8b, num_hidden_layers: 4}", "model.rope_parameters.rope_type: \"llama3\""}}) {
      const ExportedLaunch launch = unsaid_of(c.model);
      INFO(c.model << "\n" << launch.text);
      CHECK(names(launch.unsaid, c.key));
      CHECK_THAT(launch.text, Catch::Contains(" has no key for " + c.key));
    }
    // Nothing but the folder, which Megatron-LM does without.
    const ExportedLaunch own = unsaid_of("{model_type: llama, " + sizes + ", rope_theta: 500000}");
    INFO(own.text);
    CHECK_FALSE(names(own.unsaid, "model."));
    CHECK_THAT(own.text, Catch::Contains("--rotary-base 500000"));
    CHECK(names(own.unsaid, "--hf-checkpoint FOLDER") == (std::string(system) == "slime"));
  }
}

TEST_CASE("a folder with weights is slime's checkpoint, beside Megatron's sizes") {
  const std::vector<Base> all = bases();
  const Base& base = *std::ranges::find(all, "slime", &Base::system);
  const auto folder = std::filesystem::temp_directory_path() / fmt::format("hotbunk-export-{}", ::getpid());
  std::filesystem::create_directories(folder);
  const std::string model =
      "{model_type: llama, num_hidden_layers: 8, hidden_size: 1024, intermediate_size: 2816, num_attention_heads: 16, "
      "vocab_size: 32000, max_position_embeddings: 8192, rope_theta: 500000";
  const auto plain = load_scenario_text("model: " + model + "}" + base.text.substr(base.text.find('\n')), "own.yaml");
  REQUIRE(plain.has_value());
  std::ofstream(folder / "config.json") << config_text(plain->model, DType::bf16);
  const auto scenario = load_scenario_text(
      fmt::format("model: {}, weights: {}}}{}", model, folder.string(), base.text.substr(base.text.find('\n'))),
      "own.yaml");
  if (!scenario) FAIL(render(scenario.error()));
  const ExportedLaunch launch = export_launch(table_of("slime"), *scenario);
  INFO(launch.text);
  CHECK_THAT(launch.text, Catch::Contains("--hf-checkpoint " + folder.string() + " "));
  CHECK_THAT(launch.text, Catch::Contains("--num-layers 8"));
  CHECK_FALSE(names(launch.unsaid, "model"));
  std::filesystem::remove_all(folder);
}

TEST_CASE("what only trains is no launch of a system that rolls out") {
  const std::vector<Base> all = bases();
  const Base& base = *std::ranges::find(all, "megatron", &Base::system);
  const auto trains = load_scenario_text(base.text, "base.yaml");
  REQUIRE(trains.has_value());
  CHECK_FALSE(why_not_exported(table_of("megatron"), *trains).has_value());
  for (const char* system : {"verl", "slime", "nemo-rl"}) {  // they would have trained by PPO, or by GRPO
    const auto why = why_not_exported(table_of(system), *trains);
    REQUIRE(why.has_value());
    CHECK(why->code == "E156");
    CHECK_THAT(why->message, Catch::Contains("trains on data alone"));
  }
}

TEST_CASE("export names no key that the launch gives all the same") {
  // Tokens that follow from sequences; a transport, where nothing is rolled out.
  const std::vector<Base> all = bases();
  const Base& base = *std::ranges::find(all, "megatron", &Base::system);
  const auto scenario = load_scenario_text(base.text, "base.yaml");
  REQUIRE(scenario.has_value());
  CHECK(export_launch(table_of("megatron"), *scenario).unsaid.empty());
}

}  // namespace hotbunk
