// Every key of a scenario changes a price somewhere, or docs/planner.md says why it never does.
#include <fmt/format.h>

#include <array>
#include <catch2/catch.hpp>
#include <map>
#include <optional>
#include <sstream>

#include "base/file.h"
#include "planner/answers/answers.h"
#include "planner/answers/plan_answer.h"
#include "planner/train/train_model.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "spec/scenario_keys.h"
#include "tests/paths.h"
#include "tests/planner/pricers.h"

namespace hotbunk {
namespace {

using Sets = std::vector<std::string>;

std::string file_of(const std::string& name) { return fmt::format("{}/scenarios/{}.yaml", source_folder, name); }

/// Seconds, bytes of each moment and of the host, and whether they fit; nothing where the scenario is none.
std::optional<std::array<double, 7>> price_of(const std::string& name, const Sets& sets) {
  const auto s = load_scenario(file_of(name), sets);
  if (!s) return std::nullopt;
  const auto pricer = ScenarioPricer::make(*s, catalog_root());
  if (!pricer) return std::nullopt;
  RlPrice p = (*pricer)->price((*pricer)->point());
  if (p.iteration_seconds <= 0) return std::nullopt;
  use_plan(*s, (*pricer)->train().cost(), p);
  return {{p.iteration_seconds, p.train_bytes, p.rollout_bytes, p.sync_bytes, p.wake_bytes, p.host_bytes,
           p.fits ? 1.0 : 0.0}};
}

struct Base {
  std::string file;
  Sets sets;
  std::optional<Scenario> scenario{};
  std::optional<std::array<double, 7>> price{};
};

/// Between them every part of the closed form is at work.
std::vector<Base> bases() {
  const Sets open = {"train.layout.dp=auto", "rollout.layout.dp=auto"};
  const auto with = [&](const std::string& file, Sets more) {
    more.insert(more.begin(), open.begin(), open.end());
    return Base{file, more};
  };
  const std::string seven = "qwen2.5-7b-colocated";
  const std::string spelled =
      "cluster.gpu={name: mine, memory_gib: 80, memory_gb_per_s: 3000, nvlink_gb_per_s: 400, pcie_gb_per_s: 50, "
      "price_per_hour: 2, tflops: {fp32: 60, tf32: 400, bf16: 900, fp16: 900, fp8: 1800, mxfp8: 1800, nvfp4: 3600}}";
  std::vector<Base> out = {
      with(seven, {}),
      with(seven, {"cluster.nodes=4"}),
      with(seven, {"profile=verl-fsdp", "sync.mode=stream", "train.offload=none"}),
      with(seven, {"rollout.engine=hotbunk", "train.layout.cp=1", "train.recompute=none"}),
      with(seven, {"algorithm.name=ppo", "optimizer.name=adafactor"}),
      with(seven, {"train.offload=layerwise", "train.recompute=selective"}),
      with("qwen2.5-7b-fsdp8", {}),
      with("qwen2.5-32b-megatron", {}),
      with("qwen2.5-32b-megatron",
           {"cluster.network_topology=rail-optimized", "cluster.pod_nodes=2", "cluster.oversubscription=4"}),
      with("deepseek-v3-megatron", {"train.layout.ep=8"}),
      {seven, {"placement=disaggregated", "train.layout={dp: 4}", "rollout.layout={tp: 2, dp: auto}"}},
      {seven, {"placement=disaggregated", "train.layout={dp: auto}", "rollout.layout={tp: 2, dp: 2}"}}};
  for (const char* precision : {"gemm=tf32", "gemm=fp8", "gemm=mxfp8", "gemm=nvfp4", "params=fp32", "params=fp16"})
    out.push_back(with(seven, {spelled, std::string("train.precision.") + precision, "cluster.nodes=4",
                               "cluster.network_gb_per_s=50", "cluster.host_memory_gib=1000"}));
  for (Base& base : out) {
    const auto s = load_scenario(file_of(base.file), base.sets);
    if (!s) FAIL(render(s.error()));
    base.scenario = *s, base.price = price_of(base.file, base.sets);
    REQUIRE(base.price.has_value());
  }
  return out;
}

/// Other values of the key than the scenario's own.
Sets others(const ScenarioKey& key, const Scenario& s) {
  static const std::map<std::string, Sets> texts = {{"transition", {"slime", "verl", "auto"}},
                                                    {"train.recompute_modules", {"[core_attn, mlp]"}},
                                                    {"train.layout.order", {"tp-pp-dp-cp-ep", "dp-cp-ep-tp-pp"}},
                                                    {"train.layout.shard_over", {"[dp]", "[cp]"}},
                                                    {"train.make_vocab_size_divisible_by", {"4096"}},
                                                    {"cluster.calibration", {"a100-sxm-80gb"}},
                                                    {"rollout.kv_cache_tokens", {"200000", "9216"}},
                                                    {"workload.max_tokens", {"4096"}},
                                                    {"train.pipeline_split", {"[30, 34]", "[15, 15, 15, 16]"}},
                                                    {"train.logprob_micro_batch_tokens", {"32768"}}};
  if (const auto at = texts.find(key.path); at != texts.end()) return at->second;
  const KeyValue own = key.get(s);
  const auto number = [&](double x) {
    Sets out;
    for (const double v : {2 * x, x / 2, x + 1, x - 1, x * 0.9, key.low, 1.0, 4.0})
      if (v != x && v >= key.low && v <= key.high)
        out.push_back(key.type == KeyType::integer ? fmt::format("{:.0f}", v) : fmt::format("{}", v));
    return out;
  };
  if (!key.choices.empty()) return key.choices;
  if (const auto* n = std::get_if<std::int64_t>(&own)) return number(static_cast<double>(*n));
  if (const auto* x = std::get_if<double>(&own)) return number(*x);
  if (const auto* x = std::get_if<Sourced>(&own)) return number(x->value);
  if (const auto* b = std::get_if<bool>(&own)) return {*b ? "false" : "true"};
  return {"other"};
}

bool changes_a_price(const ScenarioKey& key, const std::vector<Base>& all) {
  for (const Base& base : all)
    for (const std::string& value : others(key, *base.scenario)) {
      Sets sets = base.sets;
      sets.push_back(key.path + "=" + value);
      if (const auto after = price_of(base.file, sets); after && *after != *base.price) return true;
    }
  return false;
}

/// "| `key` | why |" between the marks.
std::map<std::string, std::string> documented() {
  const auto text = read_file(std::string(source_folder) + "/docs/planner.md");
  REQUIRE(text.has_value());
  const std::size_t begin = text->find("<!-- unpriced keys: begin -->"),
                    end = text->find("<!-- unpriced keys: end -->");
  REQUIRE((begin != std::string::npos && end != std::string::npos));
  std::istringstream lines(text->substr(begin, end - begin));
  std::map<std::string, std::string> out;
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("| `")) continue;
    const std::size_t bar = line.find(" | ", 2);
    std::istringstream keys(line.substr(2, bar - 2));
    for (std::string key; std::getline(keys, key, '`');)
      if (find_scenario_key(key) != nullptr) out[key] = line.substr(bar + 3);
  }
  return out;
}

}  // namespace

TEST_CASE("every key changes a price, or the documentation says why it does not") {
  const auto silent = documented();
  const std::vector<Base> all = bases();
  std::string missing, stale;
  for (const ScenarioKey& key : scenario_keys()) {
    if (key.path == "rollout.layout.pp") continue;  // an engine in stages has a price or a reason why not
    if (key.path == "placement") continue;  // moves with the ranks of both sides only: rollout_test.cc, trees_test.cc
    if (key.path.starts_with("train.account_for_")) continue;  // with the number of layers only: the next case
    const bool changes = changes_a_price(key, all);
    if (!changes && !silent.contains(key.path)) missing += key.path + " ";
    if (changes && silent.contains(key.path)) stale += key.path + " ";
  }
  INFO("neither priced nor documented: " << missing << "; documented but priced: " << stale);
  CHECK(missing.empty());
  CHECK(stale.empty());
  CHECK(silent.size() > 10);
}

TEST_CASE("an embedding or a loss that counts as a layer is priced as the split that it comes to") {
  const auto priced = [](const std::string& split) {
    const auto s =
        load_scenario(file_of("qwen2.5-32b-megatron"),
                      Sets{"model={base: qwen2.5-32b, num_hidden_layers: 63}", "train.layout.pp=2", "train." + split});
    if (!s) FAIL(render(s.error()));
    const auto pricer = ScenarioPricer::make(*s, catalog_root());
    REQUIRE(pricer.has_value());
    return (*pricer)->train().price((*pricer)->point().train);
  };
  const TrainPrice embedding = priced("account_for_embedding_in_pipeline_split=true"),
                   loss = priced("account_for_loss_in_pipeline_split=true"), first = priced("pipeline_split=[31, 32]"),
                   last = priced("pipeline_split=[32, 31]");
  CHECK(embedding.seconds == first.seconds);
  CHECK(embedding.peak_bytes == first.peak_bytes);
  CHECK(loss.seconds == last.seconds);
  CHECK(loss.peak_bytes == last.peak_bytes);
  CHECK(embedding.seconds != loss.seconds);
}

TEST_CASE("units that are not prefetched are gathered in the open, and one fewer is whole") {
  const auto priced = [](const Sets& sets) {
    const auto s = load_scenario(file_of("qwen2.5-7b-colocated"), sets);
    if (!s) FAIL(render(s.error()));
    const auto pricer = ScenarioPricer::make(*s, catalog_root());
    REQUIRE(pricer.has_value());
    return (*pricer)->train().price((*pricer)->point().train);
  };
  for (const std::string profile : {"hotbunk", "verl-fsdp"}) {
    INFO(profile);
    const std::string framework = "profile=" + profile;
    const TrainPrice with = priced({framework}), without = priced({framework, "train.prefetch=0"}),
                     flat = priced({framework, "train.engine=fsdp1"});
    const auto data = static_cast<std::size_t>(Term::data);
    CHECK(without.seconds[data] > with.seconds[data]);
    CHECK(without.hidden_seconds < with.hidden_seconds);
    CHECK(without.peak_bytes <= with.peak_bytes);
    CHECK(flat.peak_bytes >= with.peak_bytes);
  }
  // Where the layers make the peak, not the loss, what differs is one unit in bf16.
  const Sets layers = {"model={base: qwen2.5-7b, vocab_size: 1024, eos_token_id: 1, bos_token_id: 1}",
                       "profile=verl-fsdp"};
  const auto extra = [&](const std::string& set) {
    Sets sets = layers;
    sets.push_back(set);
    return priced(sets).peak_bytes - priced(layers).peak_bytes;
  };
  const double unit = 2.0 * (2 * 3584 * 3584 + 2 * 512 * 3584 + 3584 + 2 * 512 + 3 * 18944 * 3584 + 2 * 3584);
  CHECK(extra("train.engine=fsdp1") == Approx(unit).epsilon(1e-6));
  CHECK(extra("train.prefetch=0") == Approx(-unit).epsilon(1e-6));
}

TEST_CASE("what has no effect beside the other keys is said") {
  const auto notes_of = [](const char* scenario, const Sets& sets) {
    const auto s = load_scenario(file_of(scenario), sets);
    if (!s) FAIL(render(s.error()));
    const auto pricer = ScenarioPricer::make(*s, catalog_root());
    REQUIRE(pricer.has_value());
    return render(explain(**pricer));
  };
  const auto notes = [&](const Sets& sets) { return notes_of("qwen2.5-7b-colocated", sets); };
  const std::string stale = "algorithm.max_staleness = 1 changes nothing";
  CHECK_THAT(notes({"algorithm.max_staleness=1"}), Catch::Contains(stale) && Catch::Contains("disaggregated"));
  CHECK_THAT(notes({}), !Catch::Contains("changes nothing"));
  CHECK_THAT(notes({"placement=disaggregated", "train.layout={dp: 4}", "rollout.layout={tp: 2, dp: 2}",
                    "algorithm.max_staleness=1"}),
             !Catch::Contains(stale));
  CHECK_THAT(notes({"train.engine=zero1", "train.prefetch=0"}), Catch::Contains("train.prefetch changes nothing"));
  // Rounds of experts' rows are a plan's: an estimate says that it knows none.
  const std::string rounds = "train.expert_capacity = 0.5 changes nothing of this estimate";
  CHECK_THAT(notes_of("qwen3-30b-a3b-megatron", {"train.expert_capacity=0.5"}), Catch::Contains(rounds));
  CHECK_THAT(notes_of("expert-rounds-cpu", {}), !Catch::Contains("changes nothing"));
  CHECK_THAT(notes_of("deepseek-v3-megatron", {"train.router_z_loss_coef=0.001"}),
             Catch::Contains("losses of routers change nothing of this estimate"));
  // Of a plan, which has them: what docs/experts.md says of each layout.
  const auto training = [](const char* layout, const char* coefficient) {
    const auto pricer = pricer_of_text(
        "name: routers\nmodel: qwen3-30b-a3b\ncluster: {gpu: h100-sxm-80gb, nodes: 8, gpus_per_node: 8}\n"
        "train: {engine: fsdp2, micro_batch_tokens: 8192, recompute: full, context_exchange: ring}\n"
        "rollout: {engine: hotbunk, layout: {tp: 2, dp: 32}}\nalgorithm: {prompts: 256, samples_per_prompt: 8}\n"
        "workload: {prompt_tokens: {mean: 512, max: 1024}, response_tokens: {mean: 2048, max: 4096}}\n",
        {fmt::format("train.layout={}", layout), fmt::format("train.router_aux_loss_coef={}", coefficient)});
    RlPrice price;
    REQUIRE(use_plan(pricer->scenario(), pricer->train().cost(), price));
    return price.seconds[static_cast<std::size_t>(RlPhase::train)];
  };
  for (const auto& [layout, percent] : {std::pair{"{dp: 64, ep: 8}", 0.042},
                                        {"{dp: 32, cp: 2, ep: 8}", 0.15},
                                        {"{dp: 16, cp: 4, ep: 8}", 0.20},
                                        {"{dp: 16, cp: 2, ulysses: 2, ep: 8}", 0.27}}) {
    INFO(layout);
    CHECK(100.0 * (training(layout, "0.01") / training(layout, "0") - 1.0) == Approx(percent).epsilon(0.03));
  }
  CHECK_THAT(notes({"train.account_for_loss_in_pipeline_split=true"}),
             Catch::Contains("train.account_for_loss_in_pipeline_split changes nothing"));
  const std::string copies = "train.expert_dispatch = per-rank changes nothing of this estimate";
  CHECK_THAT(notes_of("qwen3-30b-a3b-megatron", {"train.expert_dispatch=per-rank"}), Catch::Contains(copies));
  CHECK_THAT(notes_of("expert-copies-cpu", {}), !Catch::Contains("changes nothing"));
}

}  // namespace hotbunk
