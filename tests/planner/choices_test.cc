#include "planner/answers/choices.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include "base/format.h"
#include "lowering/lower.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "spec/validate.h"
#include "tests/json.h"
#include "tests/paths.h"
#include "tests/planner/pricers.h"
#include "trace/static_memory.h"

namespace hotbunk {
namespace {

const char* const seven_b =
    "name: qwen\nmodel: qwen2.5-7b\ncluster: {gpu: {base: h100-sxm-80gb, price_per_hour: 2}, nodes: 1, gpus_per_node: "
    "8}\n"
    "train: {engine: fsdp2, layout: {dp: 4, cp: 2}, recompute: full, micro_batch_tokens: 16384}\n"
    "rollout: {engine: sglang, layout: {tp: 4, dp: 2}, memory_fraction: 0.8}\n"
    "algorithm: {name: grpo, prompts: 64, samples_per_prompt: 8, reference: true}\n"
    "workload: {prompt_tokens: {mean: 501, max: 1024}, response_tokens: {mean: 1535, max: 4096}}\n";

const char* const moe_megatron =
    "model: qwen3-30b-a3b\ncluster: {gpu: h100-sxm-80gb, nodes: 2}\nprofile: verl-megatron\n"
    "train: {engine: megatron, layout: {dp: 2, tp: 4, pp: 2, ep: 4, sp: true}, recompute: full, micro_batch_tokens: "
    "8192}\n"
    "rollout: {engine: sglang, layout: {tp: 4, dp: 4}}\nalgorithm: {prompts: 128, samples_per_prompt: 8}\n"
    "workload: {prompt_tokens: {mean: 512, max: 1024}, response_tokens: {mean: 2048, max: 6144}}\n";

Scenario scenario_in(const std::string& text, const std::vector<std::string>& sets = {}) {
  return scenario_of_text(text, sets);
}

Choices choices_of(const Scenario& s, const ChoiceOptions& options = {}) {
  auto c = choose(*pricer_for(s), options);
  if (!c) FAIL(render(c.error()));
  return *c;
}

}  // namespace

TEST_CASE("layouts beside an engine of ours whose context ranks have whole experts are ranked") {
  const auto s =
      load_scenario(std::string(source_folder) + "/scenarios/moe-cpu.yaml", {"rollout.layout={tp: 1, cp: 2, dp: 2}"});
  if (!s) FAIL(render(s.error()));
  CHECK(!choices_of(*s).rows.empty());
}

TEST_CASE("the flags of every row are taken by the loader and price to the row's numbers") {
  const struct {
    const char* text;
    std::vector<std::string> sets;
  } cases[] = {{seven_b, {}},
               {seven_b, {"algorithm.max_staleness=1", "rollout.layout.order=auto", "transition=auto"}},
               {seven_b, {"train.offload=layerwise"}},
               {seven_b, {"placement=disaggregated", "train.layout={dp: 4}", "rollout.layout={tp: 2, dp: 2}"}},
               {seven_b,
                {"cluster.nodes=2", "train.layout={dp: 8, fsdp: 4, cp: 2}", "rollout.layout={tp: 4, dp: 4}",
                 "train.reshard_after_forward=false", "cluster.network_gb_per_s=1", "profile=torchtitan"}},
               {seven_b, {"train.layout={dp: 8, fsdp: 8}", "profile=verl-fsdp"}},
               {moe_megatron, {}},
               {moe_megatron, {"model=qwen2.5-32b", "train.layout.ep=1", "train.layout.fsdp=2"}}};
  int rows = 0, placements = 0, groups = 0, tensors = 0, once = 0;
  for (const auto& c : cases)
    for (const Objective objective : {Objective::seconds, Objective::memory}) {
      const Scenario s = scenario_in(c.text, c.sets);
      const Choices found = choices_of(s, {.objective = objective, .top = 8});
      CHECK(!found.pareto.empty());
      for (const auto* list : {&found.rows, &found.infeasible, &found.pareto})
        for (const ChoiceRow& row : *list) {
          std::vector<std::string> sets = c.sets;
          sets.insert(sets.end(), row.flags.begin(), row.flags.end());
          INFO(describe(row.point) << "\n" << json_text(nlohmann::json(row.flags)));
          const auto again = load_scenario_text(c.text, "test.yaml", sets);
          if (!again) FAIL(render(again.error()));
          const auto pricer = pricer_for(*again);
          const RlPrice price = pricer->price(pricer->point());
          CHECK(price.iteration_seconds == Approx(row.price.iteration_seconds).epsilon(1e-12));
          CHECK(price.peak_bytes() == Approx(row.price.peak_bytes()).epsilon(1e-12));
          CHECK(price.host_bytes == Approx(row.price.host_bytes).epsilon(1e-12));
          // No sequence more than the batch: the busiest data rank has its share, rounded up.
          const TrainPoint& t = row.point.train;
          const std::int64_t batch = s.algorithm.prompts * s.algorithm.samples_per_prompt / s.algorithm.mini_batches;
          CHECK(t.sequences() == (batch + t.dp - 1) / t.dp);
          // What was left to the planner is spelled out, also for the scenario's own layout.
          const bool spelled = s.transition == "auto";
          CHECK((spelled || row.own == row.flags.empty()));
          groups += t.fsdp > 0 ? 1 : 0;
          tensors += t.sharding == Sharding::fsdp && t.tp > 1 ? 1 : 0;
          once += t.reshard_after_forward ? 0 : 1;
          placements += row.point.placement == PlacementMode::disaggregated ? 1 : 0;
          ++rows;
        }
    }
  CHECK(rows > 100);
  CHECK(placements > 0);
  CHECK(groups > 10);
  CHECK(tensors > 10);
  CHECK(once > 0);
}

TEST_CASE("FSDP and Megatron in one ranking: rows of both trainers, each selected by its flags") {
  for (const auto& [profile, engine] :
       {std::pair{"verl-fsdp", "fsdp2"}, {"verl-megatron", "megatron"}, {"slime-fsdp", "fsdp2"}}) {
    const std::string text = fmt::format(
        "model: qwen2.5-32b\nprofile: {}\ncluster: {{gpu: h100-sxm-80gb, nodes: 2}}\n"
        "train: {{engine: {}, layout: {{dp: auto}}, micro_batch_tokens: 9216, recompute: full}}\n"
        "rollout: {{engine: {}, layout: {{tp: 4, dp: auto}}, memory_fraction: 0.6}}\n"
        "algorithm: {{prompts: 128, samples_per_prompt: 8}}\n"
        "workload: {{prompt_tokens: {{mean: 512, max: 1024}}, response_tokens: {{mean: 2048, max: 8192}}}}\n",
        profile, engine, std::string(profile).starts_with("slime") ? "sglang" : "vllm");
    INFO(text);
    const auto pricer = pricer_of_text(text);
    const auto found = choose_trainer(*pricer, {.top = 8, .budget = 100'000}),
               alone = choose(*pricer, {.top = 8, .budget = 100'000});
    REQUIRE((found && alone));
    REQUIRE_FALSE(found->rows.empty());
    CHECK(found->other_trainer == with_other_trainer(pricer->scenario())->profile);
    CHECK(found->points > alone->points);
    CHECK(found->rows.front().price.iteration_seconds <= alone->rows.front().price.iteration_seconds);
    int others = 0;
    double before = 0;
    for (const ChoiceRow& row : found->rows) {
      if (!row.price.fits) continue;
      INFO(describe(row));
      CHECK(row.price.iteration_seconds >= before);
      before = row.price.iteration_seconds;
      others += row.profile.empty() ? 0 : 1;
      const auto there = pricer_of_text(text, row.flags);
      CHECK(there->scenario().profile == (row.profile.empty() ? profile : row.profile));
      const RlPrice price = there->price(there->point());
      CHECK(price.fits);
      CHECK(price.iteration_seconds == Approx(row.price.iteration_seconds).epsilon(1e-9));
      CHECK(price.peak_bytes() == Approx(row.price.peak_bytes()).epsilon(1e-9));
    }
    // The best of each stands there, wherever it ranks.
    const auto mine =
        std::ranges::count_if(found->rows, [](const ChoiceRow& r) { return r.profile.empty() && !r.own; });
    CHECK((others > 0 && mine > 0));
  }
  // NeMo-RL has both, too; others have one trainer, and what executes has one.
  const auto other = [](const std::string& profile, const std::string& engine) {
    return with_other_trainer(scenario_of_text("model: qwen2.5-7b\nprofile: " + profile + "\ntrain: {engine: " +
                                               engine + "}\ncluster: {gpu: h100-sxm-80gb, gpus_per_node: 1}\n"));
  };
  CHECK(other("nemo-megatron", "megatron")->profile == "nemo-fsdp");
  CHECK(other("nemo-fsdp", "fsdp2")->profile == "nemo-megatron");
  CHECK_FALSE(other("openrlhf", "fsdp1").has_value());
  CHECK_FALSE(other("hotbunk", "fsdp2").has_value());
}

TEST_CASE("on a slow network the search finds shard groups, and never less than what it is asked about") {
  // 64 ranks gather every unit over 1 GB/s; groups of a node gather inside it.
  const std::vector<std::string> slow = {"cluster.nodes=8", "train.layout={dp: 64}", "rollout.layout={tp: 4, dp: 16}",
                                         "cluster.network_gb_per_s=1", "algorithm.prompts=1024"};
  const Choices found = choices_of(scenario_in(seven_b, slow));
  REQUIRE(!found.rows.empty());
  REQUIRE(found.complete);
  CHECK(found.rows[0].point.train.fsdp > 0);
  const auto asked = [&](std::vector<std::string> more) {
    std::vector<std::string> sets = slow;
    sets.insert(sets.end(), more.begin(), more.end());
    const auto pricer = pricer_for(scenario_in(seven_b, sets));
    return pricer->price(pricer->point());
  };
  for (const char* group : {"2", "4", "8", "16", "32", "64"})
    for (const char* reshard : {"true", "false"}) {
      const RlPrice price =
          asked({fmt::format("train.layout.fsdp={}", group), fmt::format("train.reshard_after_forward={}", reshard),
                 "train.micro_batch_tokens=20480", "train.offload=none", "rollout.memory_fraction=0.6"});
      if (price.fits) CHECK(found.rows[0].price.iteration_seconds <= price.iteration_seconds);
    }
  // A group that divides is in the space already.
  std::vector<std::string> grouped = slow;
  grouped.emplace_back("train.layout.fsdp=16");
  CHECK(choices_of(scenario_in(seven_b, grouped), {.top = 1}).points == found.points);
}

TEST_CASE("no two rows are one layout under two names") {
  for (const auto& [text, sets] : std::vector<std::pair<const char*, std::vector<std::string>>>{
           {moe_megatron, {"model=qwen2.5-32b", "train.layout.ep=1"}},
           {moe_megatron, {"algorithm.max_staleness=1"}},
           {seven_b, {"algorithm.name=sft", "algorithm.samples_per_prompt=1"}},
           {seven_b, {}}}) {
    const Choices c = choices_of(scenario_in(text, sets), {.top = 10});
    REQUIRE(c.rows.size() > 1);
    for (std::size_t i = 0; i < c.rows.size(); ++i)
      for (std::size_t k = 0; k < i; ++k) {
        // Variants of one layout, in their micro-batches or recomputation, are one row; the scenario's own is besides.
        if (!c.rows[i].own && !c.rows[k].own) CHECK_FALSE(same_layout(c.rows[i].point, c.rows[k].point));
        TrainPoint a = c.rows[i].point.train, b = c.rows[k].point.train;
        a.sharding = b.sharding, a.fsdp = a.shard_ranks(), b.fsdp = b.shard_ranks();
        if (a.data_ranks() == 1) CHECK_FALSE((a == b && c.rows[i].point.rollout == c.rows[k].point.rollout));
        // The engine is the scenario's: another would not load every layout.
        for (const std::string& flag : c.rows[i].flags) CHECK(flag.find("train.engine") == std::string::npos);
      }
  }
  const Scenario one = scenario_in(moe_megatron, {"model=qwen2.5-7b", "cluster.nodes=1", "cluster.gpus_per_node=1",
                                                  "train.layout={dp: 1}", "rollout.layout={dp: 1}"});
  const auto pricer = pricer_for(one);
  TrainSpace space = default_train_space(one.model, 1, 1, 8, TrainEngine::megatron);
  space.sharding = {Sharding::zero1, Sharding::replicated};
  const TrainSearch twice = search_train(pricer->train(), space, {.keep = 1, .device_bytes = 1e12});
  space.sharding = {Sharding::replicated};
  CHECK(twice.priced == search_train(pricer->train(), space, {.keep = 1, .device_bytes = 1e12}).priced);
}

TEST_CASE("an engine with pipeline stages is priced, ranked and selected by its flags") {
  const Scenario s = scenario_in(seven_b, {"rollout.layout={tp: 2, pp: 2, dp: 2}", "rollout.engine=sglang"});
  const auto pricer = pricer_for(s);
  CHECK_FALSE(pricer->why_unpriced(pricer->point()).has_value());
  CHECK(pricer->price(pricer->point()).iteration_seconds > 0);
  CHECK_THAT(describe(pricer->point()), Catch::Contains("tp 2 pp 2"));
  RlPoint p = pricer->point();
  p.rollout.pp = 4, p.rollout.engines = 1;
  const std::vector<std::string> flags = flags_of(s, p);
  CHECK_THAT(json_text(nlohmann::json(flags)), Catch::Contains("rollout.layout.pp=4"));
  std::vector<std::string> sets = {"rollout.layout={tp: 2, pp: 2, dp: 2}", "rollout.engine=sglang"};
  sets.insert(sets.end(), flags.begin(), flags.end());
  const auto there = pricer_for(scenario_in(seven_b, sets));
  CHECK(there->point() == p);
  CHECK(there->price(p).iteration_seconds == pricer->price(p).iteration_seconds);
  // What is not executed says so; more stages than layers have no price.
  CHECK_THAT(json_text(nlohmann::json(unsupported_to_execute(s))), Catch::Contains("rollout.engine sglang"));
  p.rollout.pp = 56;
  CHECK(pricer->why_unpriced(p)->code == "E263");
}

TEST_CASE("671B with three leading dense layers: deep pipelines cost what their flags say") {
  const std::string text =
      "model: deepseek-v3\nprofile: verl-megatron\nsync: {mode: bucketed}\n"
      "train: {engine: megatron, recompute: full, offload: sleep, micro_batch_tokens: 16384}\n"
      "algorithm: {prompts: 128, samples_per_prompt: 8, reference: false}\n"
      "workload: {prompt_tokens: {mean: 512, max: 1024}, response_tokens: {mean: 2048, max: 8192}}\n"
      "rollout: {engine: sglang, memory_fraction: 0.6}\n";
  for (const char* gpu : {"h200-sxm-141gb", "h800-sxm-80gb"})
    for (const std::int64_t pp : {16, 32, 61}) {
      // One pipeline stage per node; the base layout is one that the loader takes on as many nodes.
      const std::vector<std::string> base = {fmt::format("cluster={{gpu: {}, nodes: {}}}", gpu, pp),
                                             fmt::format("train.layout={{dp: {}, tp: 8, ep: 8, sp: true}}", pp),
                                             fmt::format("rollout.layout={{tp: 8, dp: {}}}", pp)};
      const Scenario s = scenario_in(text, base);
      const auto here = pricer_for(s);
      RlPoint p = here->point();
      p.train.dp = 1, p.train.pp = pp;
      p.train.set_sequences(1024);
      std::vector<std::string> sets = base;
      for (const std::string& flag : flags_of(s, p)) sets.push_back(flag);
      const auto there = pricer_for(scenario_in(text, sets));
      REQUIRE(there->point() == p);
      const TrainPrice searched = here->train().price(p.train), applied = there->train().price(p.train);
      INFO(gpu << " pp " << pp);
      REQUIRE(searched.valid);
      CHECK(searched.step_seconds == Approx(applied.step_seconds).epsilon(1e-12));
      CHECK(searched.total_bytes() == Approx(applied.total_bytes()).epsilon(1e-12));
      CHECK(searched.expert_payload == Approx(applied.expert_payload).epsilon(1e-12));
      // 61 layers: over 16 stages 4 on most, 12 of which are all MoE and longer than the ends; over 32 two; over 61
      // one. A rank holds 256 / 8 experts of 3 x 7168 x 2048 = 44.04e6 elements a layer, 18 B each as they exist once.
      const double layers = pp == 16 ? 4 : pp == 32 ? 2 : 1;
      CHECK(searched.state_bytes > layers * 32 * 3 * 7168 * 2048 * 18);
      CHECK(searched.state_bytes < layers * 32 * 3 * 7168 * 2048 * 18 * 1.25);
    }
}

TEST_CASE("a batch smaller than a micro-batch trains its own sequences") {
  // 8 samples on dp 4 are 2 sequences each, 48 are 12: both in one micro-batch, whose buffer would hold 16.
  const auto few = pricer_for(scenario_in(seven_b, {"algorithm.prompts=1"})),
             more = pricer_for(scenario_in(seven_b, {"algorithm.prompts=6"}));
  const TrainPoint a = few->point().train, b = more->point().train;
  CHECK((a.micro_batch == 2 && a.micro_batches == 1 && a.sequences() == 2));
  CHECK((b.micro_batch == 12 && b.micro_batches == 1 && b.sequences() == 12));
  const TrainPrice x = few->train().price(a), y = more->train().price(b);
  CHECK(6 * x.tokens == Approx(y.tokens));
  CHECK(x.seconds[static_cast<std::size_t>(Term::compute)] < 0.25 * y.seconds[static_cast<std::size_t>(Term::compute)]);
  // Bytes are those of the longest that may come: twice 1024 + 4096 tokens, and twelve of them are more than the
  // buffer.
  CHECK(few->train().fullest_tokens(a) == 2 * 5120);
  CHECK(more->train().fullest_tokens(b) == 2 * 16384);
  CHECK(3.2 * x.activation_bytes == Approx(y.activation_bytes).epsilon(0.05));
}

TEST_CASE("memory is that of a full micro-batch, time that of a mean one, and a spread of lengths costs attention") {
  const auto train = [](const std::vector<std::string>& sets) {
    const auto p = pricer_for(scenario_in(seven_b, sets));
    return p->train().price(p->point().train);
  };
  // A mean sequence has 2036 tokens: 16 of them fit into 2 x 16384 as into 2 x 17000, but the logits are longer.
  const TrainPrice x = train({}), y = train({"train.micro_batch_tokens=17000"});
  CHECK(x.step_seconds == y.step_seconds);
  CHECK(y.activation_bytes == Approx(x.activation_bytes * 17000 / 16384));
  // Fixed lengths see (2036 + 1) / 2 keys. With cv 1 of both parts (their maxima far away) a sequence's square is
  // 2036^2 + 501^2 + 1535^2 on average, so a token sees (3172 + 1) / 2.
  const auto keys = [](const char* spread) {
    return train_setting_of(
               scenario_in(seven_b, {fmt::format("workload.prompt_tokens={{mean: 501, max: 10000, {}}}", spread),
                                     fmt::format("workload.response_tokens={{mean: 1535, max: 30000, {}}}", spread),
                                     "train.micro_batch_tokens=40000", "rollout.max_prefill_tokens=10000"}))
        .mean_keys;
  };
  CHECK(keys("distribution: fixed") == 0.5 * 2037);
  CHECK(keys("distribution: lognormal, cv: 1") ==
        Approx(0.5 * (1 + (2036.0 * 2036 + 501.0 * 501 + 1535.0 * 1535) / 2036)));
}

TEST_CASE("the ranking has the scenario's own layout in its place and says why the winner wins") {
  // 79.19 GiB hold the fastest layout of all; 60 do not.
  const Choices c = choices_of(scenario_in(seven_b, {"cluster.device_memory_mib=61440"}), {.top = 4});
  int own = 0;
  double last = 0;
  for (const ChoiceRow& r : c.rows) {
    own += r.own ? 1 : 0;
    if (!r.price.fits) continue;
    CHECK(r.price.iteration_seconds >= last);
    last = r.price.iteration_seconds;
  }
  CHECK(own == 1);
  CHECK(c.rows.size() >= 4);
  const std::string text = render(c);
  CHECK_THAT(text, Catch::Contains("yours") && Catch::Contains("Why 1 is better than yours") &&
                       Catch::Contains("train -") && Catch::Contains("--set train.recompute=") &&
                       Catch::Contains("too much at"));
  const auto doc = json_from<nlohmann::json>(to_json(c));
  CHECK(doc["best"].size() == c.rows.size());
  CHECK(doc["best"][0]["fits"] == true);
  CHECK(doc["complete"] == true);
  // Near misses: one per layout, none by more than the device.
  for (std::size_t i = 0; i < c.infeasible.size(); ++i) {
    CHECK(c.infeasible[i].bytes_over <= 79.19 * gib);
    for (std::size_t k = 0; k < i; ++k) CHECK_FALSE(same_layout(c.infeasible[i].point, c.infeasible[k].point));
  }
  // Headroom is kept by all rows but the scenario's own.
  const Choices spare = choices_of(scenario_in(seven_b), {.headroom = 0.4, .top = 4});
  for (const ChoiceRow& r : spare.rows)
    if (r.price.fits) CHECK(r.price.peak_bytes() <= 0.6 * 79.19 * gib);
}

TEST_CASE("objectives: each is best in its own, money needs a price") {
  const Scenario s = scenario_in(seven_b);
  for (std::size_t i = 0; i < num_objectives; ++i) {
    const auto objective = static_cast<Objective>(i);
    CHECK(objective_named(std::string(name_of(objective))) == objective);
    const Choices mine = choices_of(s, {.objective = objective, .top = 1});
    const auto pricer = pricer_for(s);
    for (std::size_t k = 0; k < num_objectives; ++k) {
      const Choices other = choices_of(s, {.objective = static_cast<Objective>(k), .top = 1});
      CHECK(objective_of(objective, pricer->rl(), mine.rows[0].point, mine.rows[0].price) <=
            objective_of(objective, pricer->rl(), other.rows[0].point, other.rows[0].price));
    }
  }
  const Choices c = choices_of(s, {.objective = Objective::money, .top = 1});
  // 8 GPUs x seconds / 3600 x 2 per hour, for 512 samples, scaled to a million.
  CHECK(c.rows[0].money == Approx(8 * c.rows[0].price.iteration_seconds / 3600 * 2 / 512 * 1e6));
  const auto without =
      choose(*pricer_for(scenario_in(seven_b, {"cluster.gpu.price_per_hour=0"})), {.objective = Objective::money});
  REQUIRE_FALSE(without.has_value());
  CHECK(without.error()[0].code == "E262");
  CHECK_FALSE(objective_named("second").has_value());
}

TEST_CASE("disaggregated: one step off hides the shorter side, on policy adds them") {
  const std::vector<std::string> split = {"placement=disaggregated", "train.layout={dp: 4}",
                                          "rollout.layout={tp: 2, dp: 2}"};
  auto off = split;
  off.emplace_back("algorithm.max_staleness=1");
  const auto on_policy = pricer_for(scenario_in(seven_b, split)), one_off = pricer_for(scenario_in(seven_b, off));
  const RlPrice a = on_policy->price(on_policy->point()), b = one_off->price(one_off->point());
  const auto at = [&](const RlPrice& p, RlPhase phase) { return p.seconds[static_cast<std::size_t>(phase)]; };
  const double rollout = at(a, RlPhase::rollout), sync = at(a, RlPhase::sync);
  const double training = at(a, RlPhase::train) + at(a, RlPhase::reference) + at(a, RlPhase::old_logprobs);
  CHECK(a.iteration_seconds == Approx(rollout + training + sync));
  CHECK(b.iteration_seconds == Approx(std::max(rollout, training) + sync));
  CHECK(at(a, RlPhase::sleep) == 0);
  CHECK(on_policy->point().gpus() == 8);
  const Explanation e = explain(*one_off);
  double sum = 0;
  for (const CostNode& part : e.time.children) sum += part.seconds;
  CHECK(sum == Approx(b.iteration_seconds));
}

TEST_CASE("impossible inputs get a reason") {
  const auto reason = [](const std::vector<std::string>& sets, std::int64_t budget = 0) {
    return choices_of(scenario_in(seven_b, sets), {.budget = budget}).reason;
  };
  CHECK_THAT(reason({"cluster.device_memory_gib=1"}), Catch::Contains("no rollout layout holds"));
  // Muon steps on the GPU: nothing of it streams from the host.
  const std::vector<std::string> tight = {"cluster.device_memory_gib=12", "optimizer.name=muon"};
  CHECK_THAT(reason(tight), Catch::Contains("none of") && Catch::Contains("a device has"));
  CHECK_THAT(reason({"cluster.host_memory_gib=0.1", "cluster.device_memory_gib=24"}), Catch::Contains("none of"));
  CHECK_THAT(reason({"model=deepseek-v3", "cluster.gpu.base=h800-sxm-80gb"}), Catch::Contains("no rollout layout"));
  // Sizes far beyond any job: numbers stay finite, the answer stays an answer.
  const Choices huge =
      choices_of(scenario_in(seven_b, {"algorithm.prompts=16777216", "algorithm.samples_per_prompt=65536"}));
  for (const ChoiceRow& r : huge.rows) CHECK(std::isfinite(r.price.iteration_seconds));
  CHECK(!huge.rows.empty());
  CHECK_THAT(render(choices_of(scenario_in(seven_b, tight))), Catch::Contains("none of"));
  for (const char* set : {"cluster.nodes=0", "cluster.gpus_per_node=0", "cluster.gpus_per_node=-8", "train.layout.dp=0",
                          "cluster.nodes=99999999999999999999", "rollout.memory_fraction=0"})
    CHECK_FALSE(load_scenario_text(seven_b, "test.yaml", {set}).has_value());
}

TEST_CASE("where the scenario is lowered, every row executes and takes what its plan maps") {
  const std::string text =
      "model: {architectures: [LlamaForCausalLM], hidden_size: 32, intermediate_size: 96, num_hidden_layers: 2,\n"
      "  num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 64, max_position_embeddings: 64}\n"
      "cluster: {gpu: local-cpu, ranks_per_device: 4, device_memory_mib: 8}\n"
      "train: {layout: {dp: 4}, micro_batch_tokens: 64, precision: {params: fp32}}\n"
      "rollout: {engine: hotbunk, layout: {tp: 2, dp: 2}, max_running_requests: 8, block_tokens: 4}\n"
      "algorithm: {prompts: 8, samples_per_prompt: 4}\n"
      "workload: {prompt_tokens: {mean: 8, max: 8}, response_tokens: {mean: 8, max: 8}}\n";
  const Choices c = choices_of(scenario_in(text), {.top = 4});
  REQUIRE(c.lowered);
  REQUIRE(c.rows.size() >= 2);
  REQUIRE(!c.infeasible.empty());
  for (const auto* list : {&c.rows, &c.infeasible, &c.pareto})
    for (const ChoiceRow& row : *list) {
      INFO(describe(row.point));
      const Scenario there = scenario_in(text, row.flags);
      const auto plan = lower(there);
      REQUIRE(plan);
      const FitReport fit = check_fit(*plan);
      CHECK(fit.fits == row.price.fits);
      CHECK(fit.mapped_peak_bytes == static_cast<std::int64_t>(row.price.peak_bytes()));
    }
  for (const ChoiceRow& row : c.beyond) CHECK_FALSE(unsupported_to_execute(scenario_in(text, row.flags)).empty());
}

TEST_CASE("with a budget the cuts that estimates promise are lowered: the best of all cuts, or 1 % from it") {
  const std::string text =
      "model: qwen2.5-7b\ncluster: {gpu: h100-sxm-80gb, nodes: 1, gpus_per_node: 8}\n"
      "train: {layout: {dp: 8}, micro_batch_tokens: 16384, recompute: full, offload: sleep}\n"
      "rollout: {engine: hotbunk, layout: {tp: 4, dp: 2}, memory_fraction: 0.8}\n"
      "algorithm: {prompts: 128, samples_per_prompt: 8}\n"
      "workload: {prompt_tokens: {mean: 512, max: 1024}, response_tokens: {mean: 2048, max: 8192}}\n";
  const std::vector<std::vector<std::string>> all_sets = {
      {},
      {"train.engine=zero1"},
      {"workload.response_tokens={mean: 8192, max: 32768}", "train.micro_batch_tokens=33792"},
      {"train.engine=zero2"}};
  int exact = 0;
  for (const auto& sets : all_sets) {
    const Scenario s = scenario_in(text, sets);
    const Choices some = choices_of(s, {.budget = 2'000'000, .front = false}), all = choices_of(s, {.front = false});
    INFO(fmt::format("{}: {} beside {}", fmt::join(sets, ", "), describe(some.rows.at(0).point),
                     describe(all.rows.at(0).point)));
    REQUIRE(some.lowered);
    CHECK(all.cuts.empty());
    CHECK(some.cuts.size() <= 8);
    CHECK(some.cuts[0] == TrainCut::of(rl_point_of(s).train));
    CHECK(some.points < all.points);
    for (const ChoiceRow& row : some.rows) CHECK(std::ranges::count(some.cuts, TrainCut::of(row.point.train)) == 1);
    CHECK(some.rows[0].price.iteration_seconds <= 1.01 * all.rows[0].price.iteration_seconds);
    exact += some.rows[0].price.iteration_seconds == all.rows[0].price.iteration_seconds ? 1 : 0;
  }
  CHECK(exact >= 3);
}

}  // namespace hotbunk
