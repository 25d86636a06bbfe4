// What is proposed is tried: levers do what they say, remedies cure, and neither asks for what the system lacks.
#include "planner/answers/remedies.h"

#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <random>
#include <utility>

#include "lowering/lower.h"
#include "planner/answers/choices.h"
#include "planner/answers/levers.h"
#include "planner/answers/lint.h"
#include "planner/answers/solve.h"
#include "planner/search/lacking.h"
#include "tests/paths.h"
#include "tests/planner/pricers.h"

namespace hotbunk {
namespace {

class LaunchDraw {
 public:
  explicit LaunchDraw(std::uint64_t seed) : bits_(seed) {}
  template <class T>
  T of(const std::vector<T>& values) {
    return values[bits_() % values.size()];
  }
  std::string word(const std::vector<std::string>& values) { return of(values); }
  std::int64_t number(const std::vector<std::int64_t>& values) { return of(values); }

 private:
  std::mt19937_64 bits_;
};

/// Colocated RL of the systems that people run; sizes that do not divide are left to the loader to refuse.
std::string drawn_launch(LaunchDraw& draw) {
  const std::string profile =
      draw.word({"verl-fsdp", "verl-megatron", "slime-fsdp", "slime-megatron", "nemo-megatron", "openrlhf", "hotbunk"});
  const bool megatron = profile.ends_with("megatron");
  const std::int64_t nodes = draw.number({1, 1, 2, 4}), world = 8 * nodes;
  const std::int64_t tp = megatron ? draw.number({1, 2, 4}) : 1, pp = megatron ? draw.number({1, 1, 2, 4}) : 1,
                     ulysses = profile == "verl-fsdp" ? draw.number({1, 1, 2}) : 1,
                     engine_tp = draw.number({1, 2, 4, 8});
  std::string text = fmt::format("model: {}\nprofile: {}\ncluster: {{gpu: {}, nodes: {}, host_memory_gib: {}}}\n",
                                 draw.word({"qwen2.5-7b", "qwen2.5-32b", "llama-3.1-70b", "qwen3-30b-a3b"}), profile,
                                 draw.word({"h100-sxm-80gb", "h20-sxm-96gb"}), nodes, draw.number({512, 1024, 2048}));
  text += fmt::format(
      "train: {{engine: {}, layout: {{dp: {}, tp: {}, pp: {}, ulysses: {}, sp: {}}}, recompute: {}, offload: {}, "
      "micro_batch_tokens: {}}}\n",
      megatron ? "megatron" : "fsdp2", world / (tp * pp * ulysses), tp, pp, ulysses, tp > 1,
      draw.word({"none", "full"}), draw.word({"sleep", "sleep", "none"}), draw.number({10240, 20480, 40960}));
  text += fmt::format("rollout: {{engine: {}, layout: {{tp: {}, dp: {}}}, memory_fraction: {}}}\n",
                      draw.word({"sglang", "vllm"}), engine_tp, world / engine_tp,
                      draw.word({"0.3", "0.6", "0.9", "0.99"}));
  text += fmt::format("algorithm: {{prompts: {}, samples_per_prompt: 8, mini_batches: {}, reference: {}}}\n",
                      draw.number({64, 256}), draw.number({1, 4}), draw.word({"true", "false"}));
  text += "workload: {prompt_tokens: {mean: 512, max: 2048}, response_tokens: {mean: 1600, max: 8192}}\n";
  return text;
}

/// What explain() says of a scenario's point: its plan's price where it is lowered, else the estimate, for which
/// nothing else need be worked out.
std::pair<RlPoint, RlPrice> explained(const ScenarioPricer& s) {
  if (why_not_lowered(s.scenario()).empty()) {
    const Explanation e = explain(s);
    return {e.point, e.price};
  }
  const RlPoint point = s.point();
  return {point, s.price(point)};
}

}  // namespace

TEST_CASE("300 random scenarios: every lever does what it says, every remedy cures, nothing asks for what is lacking") {
  LaunchDraw draw(300);
  int scenarios = 0, levers = 0, cured = 0, hopeless = 0;
  for (int round = 0; round < 3000 && scenarios < 300; ++round) {
    const std::string text = drawn_launch(draw);
    const auto s = load_scenario_text(text, "drawn.yaml");
    if (!s) continue;
    ++scenarios;
    const auto pricer = pricer_for(*s);
    const Explanation e = explain(*pricer);
    INFO(text);
    const Capabilities& can = pricer->train().framework().can;
    for (const Lever& lever : e.levers) {
      INFO(lever.change);
      const auto [point, price] = explained(*pricer_of_text(text, lever.flags));
      REQUIRE(price.fits == lever.fits);
      REQUIRE(price.iteration_seconds - e.price.iteration_seconds == Approx(lever.seconds).margin(1e-6));
      REQUIRE(lacks_no_more(*s, e.point, point, can));
      ++levers;
    }
    if (!e.unpriced && e.price.fits) {
      REQUIRE(e.remedy.empty());
      continue;
    }
    if (e.unpriced && e.unpriced->code != "E301") continue;
    const auto remedy = remedy_of(*pricer, e.point);
    if (!remedy) {
      ++hopeless;
      REQUIRE_THAT(e.remedy, Catch::StartsWith("no change of one key cures it"));
      continue;
    }
    const Explanation after = explain(*pricer_of_text(text, remedy->flags));
    REQUIRE_FALSE(after.unpriced.has_value());
    REQUIRE(after.price.fits);
    REQUIRE(lacks_no_more(*s, e.point, after.point, can));
    REQUIRE_THAT(e.remedy, Catch::Contains("--set " + remedy->flags[0]));
    ++cured;
  }
  CAPTURE(scenarios, levers, cured, hopeless);
  CHECK(scenarios == 300);
  CHECK(levers > 2000);
  CHECK(cured > 30);
}

TEST_CASE("levers go both ways: a share of the device that is too small is raised") {
  const char* text =
      "model: qwen2.5-7b\nprofile: verl-fsdp\ncluster: {gpu: h100-sxm-80gb}\n"
      "train: {engine: fsdp2, layout: {dp: 8}, micro_batch_tokens: 16384, recompute: full}\n"
      "rollout: {engine: vllm, layout: {tp: 1, dp: 8}, memory_fraction: 0.3}\n"
      "algorithm: {prompts: 512, samples_per_prompt: 8}\n"
      "workload: {prompt_tokens: {mean: 512, max: 1024}, response_tokens: {mean: 2048, max: 8192}}\n";
  const Explanation e = explain(*pricer_of_text(text));
  const auto up = std::ranges::find(e.levers, "rollout.memory_fraction + 0.1", &Lever::change);
  REQUIRE(up != e.levers.end());
  CHECK(up->seconds < 0);
  CHECK(up->flags == std::vector<std::string>{"rollout.memory_fraction=0.4"});
}

TEST_CASE("an engine that cannot start is told so as what it lacks, not as training's state") {
  const char* text =
      "model: qwen2.5-7b\nprofile: verl-fsdp\ncluster: {gpu: h100-sxm-80gb}\n"
      "train: {engine: fsdp2, layout: {dp: 8}, micro_batch_tokens: 16384, recompute: full, offload: none}\n"
      "rollout: {engine: vllm, layout: {tp: 2, dp: 4}, memory_fraction: 0.9}\n"
      "workload: {prompt_tokens: {mean: 512, max: 1024}, response_tokens: {mean: 2048, max: 8192}}\n";
  const auto pricer = pricer_of_text(text);
  const Explanation e = explain(*pricer);
  REQUIRE_FALSE(e.price.fits);
  const auto rollout = std::ranges::find(e.memory.children, "rollout", &CostNode::name);
  REQUIRE(rollout != e.memory.children.end());
  const auto beside = std::ranges::find(rollout->children, "beside the engine", &CostNode::name);
  REQUIRE(beside != rollout->children.end());
  const auto state = std::ranges::find(beside->children, "training's state", &CostNode::name),
             lacking = std::ranges::find(beside->children, "not there", &CostNode::name);
  REQUIRE(state != beside->children.end());
  REQUIRE(lacking != beside->children.end());
  // 12 B each of 7.6e9 parameters over 8 ranks: master copy and moments.
  CHECK(state->bytes == Approx(12.0 * 7'615'616'512 / 8).epsilon(0.01));
  CHECK(lacking->bytes > 0);
  CHECK_FALSE(e.remedy.empty());
}

TEST_CASE("no winner, no row of the front and no near miss uses what its system lacks") {
  struct Case {
    const char *profile, *engine, *rollout;
    std::int64_t nodes, gpus;
  };
  for (const Case& c : {Case{"verl-fsdp", "fsdp2", "vllm", 1, 8}, Case{"verl-fsdp", "fsdp1", "sglang", 2, 8},
                        Case{"verl-megatron", "megatron", "vllm", 2, 8},
                        Case{"slime-megatron", "megatron", "sglang", 1, 8}, Case{"slime-fsdp", "fsdp2", "sglang", 1, 8},
                        Case{"nemo-megatron", "megatron", "vllm", 2, 8}, Case{"verl-fsdp", "fsdp2", "vllm", 7, 8}}) {
    const std::string text = fmt::format(
        "model: qwen2.5-7b\nprofile: {}\ncluster: {{gpu: h100-sxm-80gb, nodes: {}, gpus_per_node: {}}}\n"
        "train: {{engine: {}, layout: {{dp: {}}}, micro_batch_tokens: 20480, recompute: full}}\n"
        "rollout: {{engine: {}, layout: {{tp: 1, dp: {}}}, memory_fraction: 0.6}}\n"
        "algorithm: {{prompts: 112, samples_per_prompt: 8}}\n"
        "workload: {{prompt_tokens: {{mean: 512, max: 1024}}, response_tokens: {{mean: 2048, max: 8192}}}}\n",
        c.profile, c.nodes, c.gpus, c.engine, c.nodes * c.gpus, c.rollout, c.nodes * c.gpus);
    INFO(text);
    const auto pricer = pricer_of_text(text);
    const Capabilities& can = pricer->train().framework().can;
    REQUIRE(lacking(pricer->scenario(), pricer->point(), can).empty());
    const auto found = choose(*pricer, {.top = 10, .budget = 200'000});
    REQUIRE(found.has_value());
    REQUIRE_FALSE(found->rows.empty());
    for (const auto* rows : {&found->rows, &found->pareto, &found->infeasible})
      for (const ChoiceRow& row : *rows) {
        INFO(describe(row.point));
        CHECK(lacking(pricer->scenario(), row.point, can).empty());
        for (const std::int64_t cut : {row.point.train.cp, row.point.train.ulysses})
          CHECK((c.gpus % cut == 0 || cut % c.gpus == 0));
      }
  }
}

TEST_CASE("what a system lacks is said by key") {
  const auto lacks = [](const std::vector<std::string>& sets) {
    const auto pricer = pricer_of_text(
        "model: qwen2.5-7b\nprofile: verl-fsdp\ncluster: {gpu: h100-sxm-80gb}\n"
        "train: {engine: fsdp2, layout: {dp: 8}, micro_batch_tokens: 20480, recompute: full}\n"
        "rollout: {engine: vllm, layout: {tp: 2, dp: 4}, memory_fraction: 0.6}\n"
        "workload: {prompt_tokens: {mean: 512, max: 1024}, response_tokens: {mean: 2048, max: 8192}}\n",
        sets);
    std::vector<std::string> keys;
    for (const Lack& l : lacking(pricer->scenario(), pricer->point(), pricer->train().framework().can))
      keys.push_back(l.key);
    return keys;
  };
  using Keys = std::vector<std::string>;
  CHECK(lacks({}).empty());
  CHECK(lacks({"sync.mode=direct"}) == Keys{"sync.mode"});
  CHECK(lacks({"train.layout={dp: 4, cp: 2}"}) == Keys{"train.layout.cp"});
  CHECK(lacks({"train.layout={dp: 4, ulysses: 2}"}).empty());
  CHECK(lacks({"rollout.layout={tp: 2, pp: 2, dp: 2}"}) == Keys{"rollout.layout.pp"});
  CHECK(lacks({"transition=slime"}) == Keys{"transition"});
  CHECK(lacks({"train.offload=none"}).empty());
  CHECK(lacks({"train.recompute=selective"}) == Keys{"train.recompute"});
  CHECK(lacks({"rollout.layout.order=strided"}) == Keys{"rollout.layout.order"});
  CHECK(lacks({"profile=slime-fsdp", "transition=slime", "train.offload=none", "rollout.engine=sglang"}) ==
        Keys{"transition"});
  // slime's FSDP shards over dp alone, whatever cp is.
  const auto of_slime = [&](const char* layout) {
    return lacks({"profile=slime-fsdp", "transition=slime", "train.offload=sleep", "rollout.engine=sglang",
                  fmt::format("train.layout={{{}}}", layout)});
  };
  CHECK(of_slime("dp: 4, cp: 2, shard_over: [dp]").empty());
  CHECK(of_slime("dp: 8, shard_over: [dp]").empty());
  CHECK(of_slime("dp: 8").empty());
  for (const char* layout : {"dp: 4, cp: 2", "dp: 4, cp: 2, shard_over: [cp]", "dp: 4, cp: 2, fsdp: 4",
                             "dp: 8, fsdp: 4", "dp: 4, cp: 2, fsdp: 2, shard_over: [dp]"}) {
    CAPTURE(layout);
    CHECK(of_slime(layout) == Keys{"train.layout.shard_over"});
  }
}

TEST_CASE("transition auto copies nothing out and back within an iteration") {
  const char* text =
      "model: qwen2.5-7b\ncluster: {gpu: h100-sxm-80gb}\n"
      "train: {engine: fsdp2, layout: {dp: 8}, micro_batch_tokens: 16384, recompute: full}\n"
      "rollout: {engine: vllm, layout: {tp: 2, dp: 4}, memory_fraction: 0.6}\n"
      "workload: {prompt_tokens: {mean: 512, max: 1024}, response_tokens: {mean: 2048, max: 8192}}\n";
  const auto copied = [&](const char* order) {
    const auto pricer = pricer_of_text(text, {fmt::format("transition={}", order)});
    const RlPoint p = pricer->point();
    const RlModel::Parts of = pricer->rl().parts(p);
    const ShiftBytes held = pricer->rl().shift_bytes(p, of.train, of.rollout, 0.0);
    return price_shift(p.transition, held).down / (held.params + held.optimizer);
  };
  CHECK(copied("auto") <= 1.0 + 1e-9);  // what stays awake is not copied at all
  CHECK(copied("verl") > 1.1);          // its own order has the parameters up once more for the update
}

TEST_CASE("deep stages are interleaved layer by layer where that is faster") {
  const TrainSpace space = default_train_space(
      pricer_of_text(
          "model: llama-3.1-70b\nprofile: verl-megatron\n"
          "cluster: {gpu: h100-sxm-80gb, nodes: 8}\ntrain: {engine: megatron, layout: {dp: 4, tp: 4, pp: 4}, "
          "micro_batch_tokens: 9216}\nrollout: {engine: vllm, layout: {tp: 8, dp: 8}, memory_fraction: 0.6}\n")
          ->train()
          .model(),
      64, 8, 512, TrainEngine::megatron);
  // 80 layers: 20 of a stage of four, as Megatron's users run them.
  for (const std::int64_t chunks : {10, 20}) CHECK(std::ranges::find(space.vpp, chunks) != space.vpp.end());
}

TEST_CASE("lint finds by rule what its rules are for") {
  const auto findings = [](const std::vector<std::string>& sets) {
    const auto pricer = pricer_of_text(
        "model: qwen2.5-7b\nprofile: verl-fsdp\ncluster: {gpu: h100-sxm-80gb, host_memory_gib: 2048}\n"
        "train: {engine: fsdp2, layout: {dp: 8}, micro_batch_tokens: 20480, recompute: full}\n"
        "rollout: {engine: vllm, layout: {tp: 2, dp: 4}, memory_fraction: 0.6}\n"
        "algorithm: {prompts: 256, samples_per_prompt: 8}\n"
        "workload: {prompt_tokens: {mean: 512, max: 1024}, response_tokens: {mean: 2048, max: 8192}}\n",
        sets);
    return lint(*pricer);
  };
  const auto codes = [&](const std::vector<std::string>& sets) {
    std::vector<std::string> out;
    for (const Finding& f : findings(sets)) out.push_back(f.code);
    return out;
  };
  const auto has = [&](const char* code, const std::vector<std::string>& sets) {
    const auto found = codes(sets), before = codes({});
    INFO(code);
    return std::ranges::find(found, code) != found.end() && std::ranges::find(before, code) == before.end();
  };
  CHECK(has("L01", {"sync.bucket_mib=256"}));
  CHECK(has("L02", {"algorithm={prompts: 255, samples_per_prompt: 1}"}));
  CHECK(has("L03", {"transition=[sleep_optimizer, sleep_train, wake_rollout, wake_kv, wake_params, sync, sleep_train, "
                    "rollout, sleep_rollout, wake_train]"}));
  CHECK(has("L05", {"algorithm.mini_batches=64", "train.micro_batch_tokens=204800"}));
  CHECK(has("L06", {"train.micro_batch_tokens=81920"}));
  CHECK(has("L06", {"train.logprob_micro_batch_tokens=163840"}));
  // What a training's logits are cured by is what the system has: chunks, or half a micro-batch.
  const auto training_help = [&](const std::vector<std::string>& sets) {
    for (const Finding& f : findings(sets))
      if (f.code == "L06" && f.what.find("log-prob") == std::string::npos) return f.help;
    return std::string("no finding");
  };
  CHECK(training_help({"train.micro_batch_tokens=81920"}) == "train.micro_batch_tokens: 40960");
  CHECK(training_help({"train.micro_batch_tokens=81920", "profile=hotbunk", "rollout.engine=hotbunk"}) ==
        "train.loss_chunk_tokens: 10240");
  // Half of it, and no less than the longest sample: 1,024 + 8,192.
  const auto help = [&](int tokens, const char* vocabulary) {
    for (const Finding& f : findings({"train.logprob_micro_batch_tokens=" + std::to_string(tokens), vocabulary}))
      if (f.code == "L06" && f.what.find("log-prob") != std::string::npos) return f.help;
    return std::string("no finding");
  };
  CHECK(help(163840, "model.vocab_size=152064") == "train.logprob_micro_batch_tokens: 81920");
  const char* wide = "model.vocab_size=2000000";
  CHECK(help(12000, wide) == "train.logprob_micro_batch_tokens: 9216");
  CHECK(help(9216, wide) == "");
  CHECK(has("L07", {"cluster.host_memory_gib=128"}));
  CHECK(has("L08", {"model=llama-3.1-70b", "cluster.nodes=2", "train.layout.dp=16", "rollout.layout={tp: 16, dp: 1}"}));
  CHECK(has("L09", {"rollout.memory_fraction=0.98"}));
  CHECK(has("L10", {"sync.mode=direct"}));
  CHECK(has("L10", {"train.make_vocab_size_divisible_by=128"}));
  CHECK_FALSE(has("L10", {"train.make_vocab_size_divisible_by=1"}));  // as many whole rows on every rank: so it is
  CHECK(has("L11", {"rollout.memory_fraction=0.35", "rollout.layout={tp: 1, dp: 8}"}));
  CHECK(has("L12", {"algorithm.max_staleness=1"}));
  CHECK(has("L13", {"rollout.memory_fraction=0.99"}));
  CHECK(has("L14", {"train.padding=micro-batch"}));
  for (const LintRule& rule : lint_rules()) CHECK(std::string(rule.source) != "");
}

TEST_CASE("lint of a launch: expandable segments beside sleep") {
  const auto found = [](const std::vector<std::string>& sets, const LaunchHabits& habits) {
    const auto pricer = pricer_of_text(
        "model: qwen2.5-7b\nprofile: verl-fsdp\ncluster: {gpu: h100-sxm-80gb, nodes: 1}\n"
        "train: {engine: fsdp2, layout: {dp: 8}, micro_batch_sequences: 4, micro_batch_tokens: 16384}\n"
        "rollout: {engine: vllm, layout: {tp: 1, dp: 8}}\nworkload: {prompt_tokens: {mean: 512, max: 1024}, "
        "response_tokens: {mean: 1024, max: 3072, cv: 0.5}}\n",
        sets);
    return lint_launch(*pricer, habits);
  };
  CHECK(found({}, {}).empty());
  const LaunchHabits expandable{.expandable = "expandable_segments:True (run.sh:3)"};
  const std::vector<Finding> sleeps = found({}, expandable);
  REQUIRE(sleeps.size() == 1);
  CHECK(sleeps[0].code == "L15");
  CHECK_THAT(sleeps[0].what, Catch::Contains("(run.sh:3)"));
  CHECK(found({"rollout.sleep=false"}, expandable).empty());
}

TEST_CASE("Megatron's own arguments pad a vocabulary, and nobody else's do") {
  const auto lacks = [](const std::string& profile, const char* engine) {
    const auto pricer = pricer_of_text(
        fmt::format("model: qwen2.5-7b\nprofile: {}\ncluster: {{gpu: h100-sxm-80gb}}\n"
                    "train: {{engine: {}, layout: {{dp: 8}}, micro_batch_tokens: 20480, recompute: full, "
                    "make_vocab_size_divisible_by: 128}}\nrollout: {{engine: vllm, layout: {{tp: 2, dp: 4}}}}\n"
                    "workload: {{prompt_tokens: {{mean: 512, max: 1024}}, response_tokens: {{mean: 2048, max: 8192}}}}",
                    profile, engine));
    std::string out;
    for (const Lack& l : lacking(pricer->scenario(), pricer->point(), pricer->train().framework().can))
      if (l.key == "train.make_vocab_size_divisible_by") out = l.what;
    return out;
  };
  for (const char* profile : {"verl-fsdp", "slime-fsdp", "torchtitan", "torchtitan-compile", "openrlhf"}) {
    CAPTURE(profile);
    CHECK(lacks(profile, "fsdp2") == "vocabulary padded to 128 rows on each rank");
  }
  for (const char* profile : {"verl-megatron", "nemo-megatron"}) {
    CAPTURE(profile);
    CHECK(lacks(profile, "megatron") == "vocabulary padded to 128 rows on each rank");
  }
  for (const char* profile : {"megatron", "megatron-bridge", "slime-megatron"}) {
    CAPTURE(profile);
    CHECK(lacks(profile, "megatron").empty());
  }
  CHECK(lacks("hotbunk", "fsdp2").empty());
}

TEST_CASE("solve finds the edge of one key, and what stands beyond it") {
  const auto scenario = std::filesystem::path(source_folder) / "scenarios/qwen2.5-7b-colocated.yaml";
  const auto solved = solve(scenario, {}, "rollout.memory_fraction", catalog_root());
  REQUIRE(solved.has_value());
  REQUIRE_FALSE(solved->value.empty());
  const auto fits = [&](const std::string& value) {
    const auto s = load_scenario(scenario, {"rollout.memory_fraction=" + value});
    REQUIRE(s.has_value());
    const auto pricer = pricer_for(*s);
    return pricer->price(pricer->point()).fits && !pricer->why_unpriced(pricer->point());
  };
  CHECK(fits(solved->value));
  if (!solved->beyond.empty()) CHECK_FALSE(fits(solved->beyond));
  CHECK(std::stod(solved->value) > 0.8);
  // What is no scenario is an edge, too: a micro-batch holds the longest sequence.
  const auto longest = solve(scenario, {}, "workload.response_tokens.max", catalog_root());
  REQUIRE(longest.has_value());
  CHECK(longest->beyond.size() > 0);
  CHECK_FALSE(solve(scenario, {}, "model", catalog_root()).has_value());
  // Micro-batches of sequences have room for as many of the longest, whatever that is: memory is the edge, not tokens.
  const std::vector<std::string> by_sequences = {"train.micro_batch_sequences=2",
                                                 "train.micro_batch_tokens=" + std::to_string(2 * (1024 + 8192) / 2),
                                                 "rollout.memory_fraction=0.3"};
  const auto own = load_scenario(scenario, by_sequences);
  REQUIRE(own.has_value());
  REQUIRE(own->train.layout.sharers() == 2);
  REQUIRE(own->workload.longest() == 1024 + 8192);
  const auto follows = solve(scenario, by_sequences, "workload.response_tokens.max", catalog_root());
  REQUIRE(follows.has_value());
  CHECK(std::stod(follows->value) > 2 * 8192);
  CHECK(follows->beside ==
        "train.micro_batch_tokens=" + std::to_string(1024 + static_cast<std::int64_t>(std::stod(follows->value))));
  CHECK_THAT(render(*follows), Catch::Contains("--set " + follows->beside));
  // Under one cap on both a longer response has no end of its own.
  const auto capped = solve(scenario, {"workload.max_tokens=9000"}, "workload.response_tokens.max", catalog_root());
  REQUIRE_FALSE(capped.has_value());
  CHECK_THAT(capped.error()[0].help, Catch::Contains("--set workload.max_tokens=0"));
  CHECK(solve(scenario, {"workload.max_tokens=0"}, "workload.response_tokens.max", catalog_root()).has_value());
}

TEST_CASE("levers leave shard_over what it says, name it where they change it, and a shell takes their flags") {
  const auto pricer = pricer_of_text(
      "model: qwen2.5-7b\ncluster: {gpu: h100-sxm-80gb, nodes: 1, gpus_per_node: 8}\n"
      "train: {engine: fsdp2, layout: {dp: 4, cp: 2, shard_over: [dp]}, micro_batch_tokens: 8192, recompute: full}\n"
      "rollout: {engine: sglang, layout: {tp: 4, dp: 2}}\nalgorithm: {prompts: 128, samples_per_prompt: 8}\n"
      "workload: {prompt_tokens: {mean: 512, max: 1024}, response_tokens: {mean: 2048, max: 4096}}\n");
  const std::string over_all = "train.layout.shard_over = \"\"";
  std::vector<std::string> names;
  for (const auto& [name, point] : neighbours(*pricer, pricer->point())) {
    CAPTURE(name);
    names.push_back(name);
    const TrainLayout then = with_point(pricer->scenario(), point).train.layout;
    CHECK(then.fsdp == -1);
    CHECK(then.shard_over == (name == over_all ? "" : "dp"));
  }
  for (const std::string& name : {over_all, std::string("train.layout.tp doubled, dp halved"),
                                  std::string("train.layout.cp doubled, dp halved")}) {
    CAPTURE(name, names);
    CHECK(std::ranges::count(names, name) == 1);
  }
  Lever wide;
  wide.flags = {"train.layout.shard_over=\"\""};
  CHECK_THAT(remedy_text(wide), Catch::StartsWith("--set 'train.layout.shard_over=\"\"': "));
}

}  // namespace hotbunk
