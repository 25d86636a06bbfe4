#include "planner/answers/answers.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>
#include <set>

#include "base/format.h"
#include "exec/lengths.h"
#include "planner/answers/choices.h"
#include "planner/rl/reshard_volume.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "spec/pipeline_split.h"
#include "tests/json.h"

namespace hotbunk {
namespace {

Scenario scenario_of(const std::vector<std::string>& sets = {}) {
  const char* text =
      "name: qwen\nmodel: qwen2.5-7b\ncluster: {gpu: h100-sxm-80gb, nodes: 1, gpus_per_node: 8}\n"
      "train: {engine: fsdp2, layout: {dp: 8}, recompute: full, micro_batch_tokens: 8192}\n"
      "rollout: {engine: sglang, layout: {tp: 4, dp: 2}, memory_fraction: 0.8}\n"
      "algorithm: {name: grpo, prompts: 64, samples_per_prompt: 8, reference: true}\n"
      "workload: {prompt_tokens: {mean: 512, max: 1024}, response_tokens: {mean: 1536, max: 4096}}\n";
  auto s = load_scenario_text(text, "test.yaml", sets);
  if (!s) FAIL(render(s.error()));
  return *s;
}

}  // namespace

TEST_CASE("Qwen2.5-7B from FSDP over 8 to rollout TP4 x 2: the sync oracle") {
  const Scenario s = scenario_of();
  REQUIRE(parameter_count(s.model) == 7'615'616'512);
  // BACKGROUND I: gather-all 12.41 GiB; direct 3.41 on the worst rank contiguous, 2.17 on every rank strided.
  CHECK(7'615'616'512 * 2.0 * 7 / 8 / gib == Approx(12.41).margin(0.005));
  const ReshardCounter counter(s.model);
  const auto most = [&](EngineOrder order) {
    const std::vector<std::int64_t> all = counter.received(fsdp_layout(8), rollout_layout(4, 2, order));
    return 2.0 * static_cast<double>(*std::ranges::max_element(all)) / gib;
  };
  CHECK(most(EngineOrder::contiguous) == Approx(3.41).margin(0.005));
  CHECK(most(EngineOrder::strided) == Approx(2.17).margin(0.005));
}

TEST_CASE("the planner prefers the rank order that moves less") {
  const Scenario s = scenario_of({"sync.mode=direct"});
  const auto pricer = ScenarioPricer::make(s, catalog_root());
  REQUIRE(pricer.has_value());
  RlPoint contiguous = (*pricer)->point(), strided = contiguous;
  contiguous.rollout.strided = false;
  strided.rollout.strided = true;
  const auto sync = [&](const RlPoint& p) {
    return (*pricer)->price(p).seconds[static_cast<std::size_t>(RlPhase::sync)];
  };
  CHECK(sync(strided) < sync(contiguous));
  const auto automatic =
      ScenarioPricer::make(scenario_of({"sync.mode=direct", "rollout.layout.order=auto"}), catalog_root());
  REQUIRE(automatic.has_value());
  CHECK((*automatic)->point().rollout.strided);
}

TEST_CASE("figures that circulate wrong") {
  // BACKGROUND I, of 7e9 parameters; Qwen2.5-7B's are 7.6e9, so each figure is scaled to 7e9.
  const auto pricer = ScenarioPricer::make(scenario_of({"train.micro_batch_tokens=16384"}), catalog_root());
  REQUIRE(pricer.has_value());
  const TrainModel& train = (*pricer)->train();
  const TrainPoint all = (*pricer)->point().train;
  const double phi = static_cast<double>(parameter_count(train.model()));
  TrainPoint quarter = all;  // FSDP over the 4 dp ranks of dp 4 x cp 2
  quarter.dp = 4, quarter.cp = 2, quarter.fsdp = 4;
  const auto held = [&](const TrainPoint& p, PeakTensor t) {
    return train.peak_bytes(p, train.layers(p), 0)[static_cast<std::size_t>(t)] / phi * 7e9;
  };
  // Not 3.5 GB of optimizer per GPU: the two fp32 moments are 14 GB over 4 ranks, 7 GB over 8, with 3.5 GB of master.
  CHECK(held(quarter, PeakTensor::moments) == Approx(14e9).epsilon(0.001));
  CHECK(held(all, PeakTensor::moments) == Approx(7e9).epsilon(0.001));
  CHECK(held(all, PeakTensor::master) == Approx(3.5e9).epsilon(0.001));
  // Not 1.75 GB of parameters either: what a weight update reads of them over 4 ranks is 3.5 GB in bf16.
  const double update = train.price(quarter).source_bytes / train.setting().state.master * train.setting().state.params;
  CHECK(update / phi * 7e9 == Approx(3.5e9).epsilon(0.001));
  // fp32 logits of 16,384 tokens x 152,064: 9.28 GiB per copy.
  const double copies = train.framework().loss_bytes.value / 4.0;
  CHECK(train.head(all).transient_bytes / copies / gib == Approx(9.28).margin(0.005));
  // verl's fp32 master: 16 bytes per parameter over 8 ranks, 15.2 GB per GPU.
  CHECK(train.price(all).state_bytes == Approx(15.23e9).epsilon(0.01));
  // A full gather of 7e9 in bf16 is 14 GB, not 28.
  const RlModel rl(train, rl_setting_of(scenario_of()));
  CHECK(rl.price_rollout({.tp = 1, .engines = 8}).weight_bytes / phi * 7e9 == Approx(14e9).epsilon(0.001));
}

TEST_CASE("KV cache of a rank") {
  // BACKGROUND D2: b 32, s 2048, k 32, d 128, bf16, 32 layers: 8 GiB per rank at TP4.
  Scenario s = scenario_of();
  s.model.kv_heads = 32, s.model.heads = 32, s.model.head_dim = 128, s.model.layers = 32;
  const TrainModel train(s.model, train_setting_of(s), CostModel(hardware_from_datasheet(s.cluster), s.cluster), {});
  const RlModel rl(train, rl_setting_of(s));
  const RolloutPrice r = rl.price_rollout({.tp = 4, .engines = 2});
  CHECK(r.kv_bytes_per_token * 32 * 2048 / gib == Approx(8.0));
}

TEST_CASE("an explanation's parts add up, its levers are legal") {
  const auto pricer = ScenarioPricer::make(scenario_of(), catalog_root());
  REQUIRE(pricer.has_value());
  const Explanation e = explain(**pricer);
  double seconds = 0;
  for (const CostNode& phase : e.time.children) {
    seconds += phase.seconds;
    double parts = 0;
    for (const CostNode& part : phase.children) parts += part.seconds;
    if (!phase.children.empty()) CHECK(parts == Approx(phase.seconds));
  }
  CHECK(seconds == Approx(e.price.iteration_seconds));
  REQUIRE(!e.memory.children.empty());
  double bytes = 0;
  for (const CostNode& part : e.memory.children[0].children) bytes += part.bytes;
  CHECK(bytes == Approx(e.price.train_bytes));
  CHECK(e.levers.size() >= 4);
  // Qwen2.5-7B has 28 heads: the double of 4 is no layout.
  for (const Lever& l : e.levers) {
    INFO(l.change);
    CHECK(l.change != "rollout.layout.tp doubled");
    CHECK_FALSE(l.flags.empty());
    const auto pricer_there = ScenarioPricer::make(scenario_of(l.flags), catalog_root());
    REQUIRE(pricer_there.has_value());
    const RlPrice there = (*pricer_there)->price((*pricer_there)->point());
    CHECK(there.iteration_seconds - e.price.iteration_seconds == Approx(l.seconds).margin(1e-9));
    CHECK(there.fits == l.fits);
  }
  CHECK_THAT(render(e), Catch::Contains("What one change buys"));
  CHECK_THAT(to_json(e), Catch::Contains("hotbunk.explain/1"));
}

TEST_CASE("explain offers one step off to two sets of GPUs, at the price that the key brings") {
  const std::vector<std::string> apart = {"placement=disaggregated", "train.layout.dp=4", "rollout.layout.dp=1",
                                          "train.offload=none"};
  const auto at = [&](std::vector<std::string> sets) {
    sets.insert(sets.end(), apart.begin(), apart.end());
    const auto pricer = ScenarioPricer::make(scenario_of(sets), catalog_root());
    REQUIRE(pricer.has_value());
    return explain(**pricer);
  };
  const Explanation now = at({}), then = at({"algorithm.max_staleness=1"});
  const auto offered = [](const Explanation& e) {
    return std::find_if(e.levers.begin(), e.levers.end(),
                        [](const Lever& l) { return l.change == "algorithm.max_staleness = 1"; });
  };
  REQUIRE(offered(now) != now.levers.end());
  CHECK(offered(now)->seconds < 0);
  CHECK(offered(now)->seconds == Approx(then.price.iteration_seconds - now.price.iteration_seconds));
  CHECK(offered(then) == then.levers.end());
}

TEST_CASE("explain names a tensor that is larger than the sync's bucket") {
  const auto notes = [](const std::vector<std::string>& sets) {
    const auto pricer = ScenarioPricer::make(scenario_of(sets), catalog_root());
    REQUIRE(pricer.has_value());
    return explain(**pricer).notes;
  };
  // 152064 x 3584 bf16 values are 1.015 GiB: 3 buckets of 512 MiB, 0.515 GiB more in one of its own.
  const auto found = notes({"sync.bucket_mib=512"});
  REQUIRE(found.size() == 1);
  CHECK_THAT(found[0], Catch::Contains("model.embed_tokens.weight is 1.02 GiB") && Catch::Contains("fill 3 of 29") &&
                           Catch::Contains("527.50 MiB more"));
  CHECK(notes({"sync.bucket_mib=2048"}).empty());
  CHECK(notes({"sync.mode=direct"}).empty());
}

TEST_CASE("a layout without a price is explained by its arithmetic alone") {
  const struct {
    std::vector<std::string> sets;
    const char *code, *why;
  } cases[] = {
      // 512 samples over dp 2 in micro-batches of 8192 / 2048 = 4: 64, which pp 3 would not divide; pp 2 and 5
      // prompts: 5.
      {{"profile=verl-megatron", "train.engine=megatron", "train.layout={dp: 2, tp: 2, pp: 2, vpp: 2}",
        "algorithm.prompts=5"},
       "E263",
       "interleaving needs micro-batches (5) divisible by pp (2)"},
      // 7,615,616,512 parameters x 2 B / 4 = 3.55 GiB in 0.8 x 100 MiB.
      {{"cluster.device_memory_mib=100"}, "E301", "weights 3.55 GiB + 5120 tokens x 14.0 KiB"},
  };
  for (const auto& c : cases) {
    const auto pricer = ScenarioPricer::make(scenario_of(c.sets), catalog_root());
    REQUIRE(pricer.has_value());
    const Explanation e = explain(**pricer);
    REQUIRE(e.unpriced.has_value());
    CHECK(e.unpriced->code == c.code);
    CHECK(e.levers.empty());
    CHECK_FALSE(e.price.fits);
    CHECK_THAT(render(e), Catch::Contains(c.why) && !Catch::Contains("0 B") && !Catch::Contains("What one change"));
    const auto doc = json_from<nlohmann::json>(to_json(e));
    CHECK(doc["priced"] == false);
    CHECK(doc["why_not"]["code"] == c.code);
    CHECK_FALSE(doc.contains("memory"));
  }
}

TEST_CASE("a shortage of host memory is named") {
  const auto host_line = [](const std::vector<std::string>& sets) {
    const auto pricer = ScenarioPricer::make(scenario_of(sets), catalog_root());
    REQUIRE(pricer.has_value());
    const std::string text = render(explain(**pricer));
    const std::size_t begin = text.find("\n  host: ") + 1;
    REQUIRE(begin > 0);
    return text.substr(begin, text.find('\n', begin) - begin);
  };
  CHECK_THAT(host_line({"train.offload=sleep"}), Catch::Matches("  host: [0-9.]+ GiB of .*: it fits"));
  // 10 GiB of a node over 8 ranks.
  CHECK_THAT(host_line({"train.offload=sleep", "cluster.host_memory_gib=10"}),
             Catch::Matches("  host: [0-9.]+ GiB of 1.25 GiB for a rank: it does not fit, [0-9.]+ GiB too much"));
}

TEST_CASE("calibrated is said where the rates are") {
  const auto at = [](const std::vector<std::string>& sets) {
    const auto pricer = ScenarioPricer::make(scenario_of(sets), catalog_root());
    REQUIRE(pricer.has_value());
    return explain(**pricer);
  };
  for (const std::vector<std::string>& sets : {std::vector<std::string>{},
                                               {"cluster.gpu=h200-sxm-141gb"},
                                               {"cluster.gpu=h20-sxm-96gb"},
                                               {"cluster.gpu=b200-sxm-180gb", "train.precision.gemm=fp8"}}) {
    const Explanation e = at(sets);
    INFO(e.hardware);
    CHECK(e.calibrated == (e.hardware.find("uncalibrated") == std::string::npos));
  }
  CHECK(at({}).calibrated);
  CHECK_FALSE(at({"cluster.gpu=h200-sxm-141gb"}).calibrated);
  CHECK_FALSE(at({"cluster.gpu=h20-sxm-96gb"}).calibrated);  // microbenchmarks of its own, and no step
  CHECK_FALSE(at({"cluster.gpu=h20-sxm-96gb", "cluster.calibration=h20-sxm-96gb"}).calibrated);
  // What was fitted on other chips calibrates none.
  const Explanation other = at({"cluster.calibration=blackwell-te"});
  CHECK_FALSE(other.calibrated);
  CHECK_THAT(other.hardware, Catch::Contains("h100-sxm-80gb on its own rates with what was fitted on b200-sxm-180gb"));
  CHECK(at({"cluster.gpu=b200-sxm-180gb", "cluster.calibration=blackwell-te"}).calibrated);
  CHECK(at({"cluster.calibration=h100-sxm-80gb"}).calibrated);
}

TEST_CASE("sensitivity is of the layout shown") {
  // Direct sync makes the strided order the faster one, which "auto" takes: its sync is the share that NVLink moves.
  const Scenario s = scenario_of({"sync.mode=direct", "rollout.layout.order=auto"});
  const auto automatic = sensitivity(s, catalog_root());
  const auto strided = sensitivity(scenario_of({"sync.mode=direct", "rollout.layout.order=strided"}), catalog_root());
  const auto contiguous =
      sensitivity(scenario_of({"sync.mode=direct", "rollout.layout.order=contiguous"}), catalog_root());
  REQUIRE((automatic && strided && contiguous));
  CHECK(to_json(*automatic) == to_json(*strided));
  CHECK(to_json(*automatic) != to_json(*contiguous));
}

TEST_CASE("the smallest cluster: by every count, in the options given") {
  // 110 GiB of a host take what sleeps of one GPU, 12 B x 7.6e9 and the reference, and not layer-wise offload's 16 B.
  const Scenario s = scenario_of({"cluster.host_memory_gib=110"});
  const auto gpus = [&](const SearchOptions& o) {
    const auto small = smallest_cluster(s, catalog_root(), o, 2);
    REQUIRE(small.has_value());
    CHECK(small->exact);
    CHECK(small->search.best.size() <= o.keep);
    return small->gpus;
  };
  const std::int64_t whole = gpus({.keep = 1}), part = gpus({.keep = 1, .headroom = 0.3});
  CHECK(part > whole);
  const auto lean = smallest_cluster(s, catalog_root(), {.keep = 1, .objective = Objective::memory}, 2);
  const auto fast = smallest_cluster(s, catalog_root(), {.keep = 1}, 2);
  REQUIRE((lean && fast));
  const auto unpriced = smallest_cluster(s, catalog_root(), {.objective = Objective::money}, 2);
  REQUIRE_FALSE(unpriced.has_value());
  CHECK(unpriced.error()[0].code == "E262");
  CHECK(lean->search.best[0].price.peak_bytes() < fast->search.best[0].price.peak_bytes());
  // 72B on whole nodes: each smaller count is searched, none fits.
  const Scenario large = scenario_of({"model=qwen2.5-72b", "cluster.nodes=4", "train.layout.dp=32",
                                      "rollout.layout.dp=8", "cluster.host_memory_gib=1024"});
  const auto small = smallest_cluster(large, catalog_root(), {.keep = 1}, 64);
  REQUIRE(small.has_value());
  REQUIRE(small->gpus > 8);
  for (std::int64_t nodes = 1; nodes < small->nodes; ++nodes) {
    Scenario fewer = large;
    fewer.cluster.nodes = nodes;
    const auto pricer = ScenarioPricer::make(fewer, catalog_root());
    REQUIRE(pricer.has_value());
    const RlSetting& set = (*pricer)->rl().setting();
    CHECK(search_layouts(**pricer, default_rl_space(fewer),
                         {.keep = 1, .device_bytes = set.device_bytes, .host_bytes = set.host_bytes})
              .best.empty());
  }
}

TEST_CASE("SFT searches training alone, and its rows load") {
  const std::vector<std::string> sft = {"algorithm.name=sft", "algorithm.reference=false",
                                        "workload.prompt_tokens={mean: 2048, max: 4096}"};
  const auto pricer = ScenarioPricer::make(scenario_of(sft), catalog_root());
  REQUIRE(pricer.has_value());
  const auto c = choose(**pricer, {.top = 3});
  REQUIRE(c.has_value());
  REQUIRE(c->rows.size() >= 2);
  CHECK(c->points > 0);
  for (const ChoiceRow& r : c->rows) {
    std::vector<std::string> sets = sft;
    sets.insert(sets.end(), r.flags.begin(), r.flags.end());
    const auto there = ScenarioPricer::make(scenario_of(sets), catalog_root());
    REQUIRE(there.has_value());
    CHECK(explain(**there).price.iteration_seconds == Approx(r.price.iteration_seconds));
    CHECK(r.price.seconds[static_cast<std::size_t>(RlPhase::rollout)] == 0);
    CHECK(r.tokens_per_gpu == Approx(64 * (2048 + 1536) / r.price.iteration_seconds / 8));
    // One sequence per prompt, whatever samples_per_prompt says: 64 over the data ranks.
    CHECK(r.point.train.sequences() == (64 + r.point.train.dp - 1) / r.point.train.dp);
  }
  const auto small = smallest_cluster((*pricer)->scenario(), catalog_root(), {.keep = 1}, 1);
  REQUIRE(small.has_value());
  // 16 B of each of 7.6e9 parameters lie in host memory, whose share of a rank is larger than a GPU.
  CHECK(small->gpus == 1);
  REQUIRE_FALSE(small->search.best.empty());
  CHECK(small->search.best[0].point.train.optimizer_on_host);
}

TEST_CASE("SFT is explained under every engine's key: no engine is there to price") {
  for (const char* engine : {"hotbunk", "sglang", "vllm"}) {
    INFO(engine);
    const Scenario s =
        scenario_of({"algorithm.name=sft", "train.layout={dp: 4, cp: 2}", std::string("rollout.engine=") + engine});
    const auto pricer = ScenarioPricer::make(s, catalog_root());
    REQUIRE(pricer.has_value());
    const Explanation e = explain(**pricer);
    CHECK(e.price.iteration_seconds > 0);
    REQUIRE_FALSE(e.links.empty());
    for (const LinkUse& u : e.links) CHECK(u.phase == RlPhase::train);
  }
}

TEST_CASE("layers of a pipeline's ends stay what they are where as many stages are other chunks") {
  const Scenario s =
      scenario_of({"train.engine=zero1", "train.layout={dp: 2, pp: 4}", "train.num_layers_in_first_pipeline_stage=1",
                   "train.pipeline_schedule=1f1b"});  // [1, 9, 9, 9]: in halves they would not divide
  RlPoint p = rl_point_of(s);
  CHECK(with_point(s, p) == s);
  p.train.pp = 2, p.train.vpp = 2;
  const Scenario there = with_point(s, p);
  CHECK(split_layers(there) == std::vector<std::int64_t>{1, 9, 9, 9});
  CHECK(there.train.layout.vpp == 2);
}

TEST_CASE("SFT is priced for the samples that simulation draws, and tells of no rollout") {
  const Scenario s = scenario_of({"algorithm.name=sft", "algorithm.reference=false"});
  double tokens = 0, pairs = 0, samples = 0;
  for (int step = 1; step <= 100; ++step) {
    const SampleLengths drawn = draw_lengths(s, step);
    for (std::size_t i = 0; i < drawn.prompt_tokens.size(); ++i) {
      const auto length = static_cast<double>(drawn.prompt_tokens[i] + drawn.response_tokens[i]);
      tokens += length, pairs += length * (length + 1) / 2, ++samples;
    }
  }
  // 6400 draws with a standard deviation of some 40 % of the mean: half a percent.
  const TrainSetting t = train_setting_of(s);
  CHECK(static_cast<double>(t.sequence) == Approx(tokens / samples).epsilon(0.02));
  CHECK(t.mean_keys == Approx(pairs / tokens).epsilon(0.05));
  const auto pricer = ScenarioPricer::make(s, catalog_root());
  REQUIRE(pricer.has_value());
  CHECK((*pricer)->tokens() == 64 * (512 + 1536));
  CHECK(with_point(s, (*pricer)->point()) == s);
  const auto smallest = smallest_cluster(s, catalog_root(), {.keep = 1}, 1);
  REQUIRE(smallest.has_value());
  for (const std::string& text : {render(explain(**pricer)), render(*choose(**pricer, {.top = 2})), render(*smallest)})
    for (const char* nothing :
         {"| rollout", "engine of", "memory 0.", "| order", "| sync", "transition", "rollout.", "sync."}) {
      INFO(text);
      INFO(nothing);
      CHECK((text.find(nothing) == std::string::npos));
    }
}

TEST_CASE("sensitivity and the smallest cluster") {
  const Scenario s = scenario_of();
  const auto numbers = sensitivity(s, catalog_root());
  REQUIRE(numbers.has_value());
  // Every number that a hardware file may hold has a line, and so has everything that the workload states.
  Hardware hardware = hardware_from_datasheet(s.cluster);
  std::set<std::string> lines;
  for (const Sensitivity& n : *numbers) lines.insert(n.number);
  for (const HardwareNumber& n : numbers_of(hardware)) CHECK(lines.contains(n.key));
  for (const char* key : {"memory bandwidth", "cluster.device_memory", "cluster.host_memory", "algorithm.prompts",
                          "algorithm.samples_per_prompt", "rollout.max_running_requests", "rollout.memory_fraction",
                          "workload.prompt_tokens.mean", "workload.prompt_tokens.max", "workload.response_tokens.mean",
                          "workload.response_tokens.max"})
    CHECK(lines.contains(key));
  for (const Sensitivity& n : *numbers) {
    // More work is slower; a faster machine is not.
    if (n.number == "algorithm.prompts" || n.number == "workload.response_tokens.mean") CHECK(n.plus > 0);
    if (n.number.ends_with("bandwidth") || n.number.ends_with("efficiency")) CHECK(n.plus <= 0);
    if (n.number.ends_with("latency") || n.number == "kernel_overhead") CHECK(n.minus <= 0);
    if (n.number == "peak FLOP/s") {
      CHECK(n.minus > 0);
      CHECK(n.plus < 0);
    }
  }
  const auto streamed = smallest_cluster(s, catalog_root(), {.keep = 1}, 2);
  REQUIRE(streamed.has_value());
  CHECK(streamed->gpus == 1);  // with layer-wise offload, whose 122 GB a host of 2 TiB holds
  CHECK(streamed->search.best[0].point.train.streams_from_host());
  const auto small = smallest_cluster(scenario_of({"cluster.host_memory_gib=110"}), catalog_root(), {.keep = 3}, 2);
  REQUIRE(small.has_value());
  CHECK(small->nodes == 1);
  // 16 bytes of state per parameter (4 gradient, 4 master, 8 moments) over n GPUs of 79.19 GiB and what training adds:
  // fewer than two GPUs are provably too few, and what is answered fits.
  CHECK(small->gpus >= 2);
  CHECK(small->gpus <= 4);
  REQUIRE(!small->search.best.empty());
  CHECK(small->search.best[0].point.gpus() == small->gpus);
}

TEST_CASE("the worked configurations of BACKGROUND I are priced and come out sane") {
  const char* common =
      "algorithm: {name: grpo, prompts: 128, samples_per_prompt: 8}\n"
      "workload: {prompt_tokens: {mean: 512, max: 1024}, response_tokens: {mean: 1536, max: 4096}}\n";
  const struct {
    const char *name, *text;
    bool fits;
  } cases[] = {
      {"7B, FSDP2 with Ulysses 4, rollout TP2",
       "model: qwen2.5-7b\ncluster: {gpu: h100-sxm-80gb, nodes: 1, gpus_per_node: 8}\n"
       "train: {engine: fsdp2, layout: {dp: 2, ulysses: 4}, recompute: full, micro_batch_tokens: 4096}\n"
       "rollout: {layout: {tp: 2, dp: 4}, memory_fraction: 0.7}\n",
       true},
      {"7B, FSDP2 dp4 cp2, rollout 2 x TP4",
       "model: qwen2.5-7b\ncluster: {gpu: h100-sxm-80gb, nodes: 1, gpus_per_node: 8}\n"
       "train: {engine: fsdp2, layout: {dp: 4, cp: 2}, recompute: full, micro_batch_tokens: 4096}\n"
       "rollout: {layout: {tp: 4, dp: 2}, memory_fraction: 0.7}\n",
       true},
      {"32B on 32: TP4 PP2 DP4, rollout TP4",
       "model: qwen2.5-32b\ncluster: {gpu: h100-sxm-80gb, nodes: 4, gpus_per_node: 8}\nprofile: verl-megatron\n"
       "train: {engine: megatron, layout: {dp: 4, tp: 4, pp: 2, sp: true}, recompute: full, micro_batch_tokens: 5120}\n"
       "rollout: {layout: {tp: 4, dp: 8}, memory_fraction: 0.7}\n",
       true},
      {"72B on 32: TP4 PP2 DP4 needs more than 80 GB",
       "model: qwen2.5-72b\ncluster: {gpu: h100-sxm-80gb, nodes: 4, gpus_per_node: 8}\nprofile: verl-megatron\n"
       "train: {engine: megatron, layout: {dp: 4, tp: 4, pp: 2, sp: true}, recompute: full, micro_batch_tokens: 5120}\n"
       "rollout: {layout: {tp: 4, dp: 8}, memory_fraction: 0.7}\n",
       false},
  };
  for (const auto& c : cases) {
    INFO(c.name);
    auto s = load_scenario_text(std::string(c.text) + common, "worked.yaml");
    if (!s) FAIL(render(s.error()));
    const auto pricer = ScenarioPricer::make(*s, catalog_root());
    REQUIRE(pricer.has_value());
    const RlPrice price = (*pricer)->price((*pricer)->point());
    CHECK(price.iteration_seconds > 5.0);
    CHECK(price.iteration_seconds < 3600.0);
    CHECK(price.fits == c.fits);
  }
}

TEST_CASE("profiles of frameworks: all load, mistakes are found") {
  for (const char* name : {"hotbunk",
                           "megatron-sc21",
                           "megatron-a100",
                           "megatron-a100-flash",
                           "megatron-vtrain",
                           "megatron-h100",
                           "megatron-te",
                           "megatron-te-overlap",
                           "megatron-bridge",
                           "megatron-bridge-graphs",
                           "deepspeed-zero3",
                           "torchtitan",
                           "torchtitan-compile",
                           "megatron",
                           "verl-fsdp",
                           "verl-megatron",
                           "slime-fsdp",
                           "slime-megatron",
                           "nemo-fsdp",
                           "nemo-megatron",
                           "openrlhf"})
    CHECK(framework_named(name, catalog_root()).has_value());
  const auto missing = framework_named("megatronn", catalog_root());
  REQUIRE_FALSE(missing.has_value());
  CHECK_THAT(missing.error()[0].help, Catch::Contains("megatron"));
  CHECK_FALSE(parse_framework("schema: hotbunk.framework/1\ndropoot: true\n", "f.yaml").has_value());
  CHECK_FALSE(
      parse_framework("schema: hotbunk.framework/1\nloss_bytes: {value: -1, source: x}\n", "f.yaml").has_value());
  CHECK_FALSE(parse_framework("schema: hotbunk.framework/1\ndropout: perhaps\n", "f.yaml").has_value());
}

}  // namespace hotbunk
