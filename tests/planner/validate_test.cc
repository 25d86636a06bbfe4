// Published tables through the validator, and the mechanisms of framework profiles that they need.
#include "planner/validate/validate.h"

#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>

#include "base/file.h"
#include "planner/answers/stated_error.h"
#include "planner/validate/validate_tables.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "tests/paths.h"

namespace hotbunk {
namespace {

/// A step of a small GPT on `gpus` A100, with the profile's settings changed.
TrainPrice step_of(std::int64_t gpus, const TrainPoint& p, const FrameworkProfile& frame) {
  ValidationContext context(catalog_root());
  const auto cost = context.cost("a100-sxm-80gb", gpus);
  REQUIRE(cost.has_value());
  return TrainModel(gpt_model(8, 4096, 32, 51200, 2048), {.sequence = 2048, .state = {2, 2, 4, 8}}, *cost, frame)
      .price(p);
}

/// A constant of a file of the catalogue, and what stands in its place.
struct OtherConstant {
  const char *file, *key, *value;
};

/// rl_phase_seconds as a copy of the catalogue with other constants predicts it, in a folder that is made anew.
ValidationTable phases_with(const std::filesystem::path& folder, const std::vector<OtherConstant>& others) {
  namespace fs = std::filesystem;
  fs::remove_all(folder);
  fs::create_directories(folder / "data");
  fs::copy(catalog_root(), folder / "catalog", fs::copy_options::recursive);
  const fs::path data = fs::path(source_folder) / "data" / "published";
  fs::copy(data / "rl_phase_seconds.csv", folder / "data");
  fs::copy(data / "launches", folder / "data" / "launches", fs::copy_options::recursive);
  for (const auto& [file, key, value] : others) {
    const fs::path path = folder / "catalog" / file;
    const auto before = read_file(path, std::int64_t{1} << 20);
    REQUIRE(before.has_value());
    const std::string entry = std::string(key) + ": {value: ";
    const std::size_t at = before->find(entry);
    REQUIRE(at != std::string::npos);
    const std::size_t from = at + entry.size();
    std::ofstream(path) << before->substr(0, from) << value << before->substr(before->find(',', from));
  }
  const auto v = validate_published(folder / "data", folder / "catalog");
  if (!v) FAIL(render(v.error()));
  const auto t = std::ranges::find(v->tables, "rl_phase_seconds", &ValidationTable::name);
  REQUIRE(t != v->tables.end());
  fs::remove_all(folder);
  return *t;
}

/// Mean absolute error of a phase's rows ("verl-7203-8xh800 rollout") of launches under a framework profile.
double mean_error(const ValidationTable& t, const std::string& framework, const std::string& phase) {
  double sum = 0.0, rows = 0.0;
  for (const PredictedRow& r : t.rows) {
    const std::size_t blank = r.label.find(' ');
    if (r.label.substr(blank + 1) != phase) continue;
    const auto launched = load_scenario((std::filesystem::path(source_folder) / "data" / "published" / "launches" /
                                         (r.label.substr(0, blank) + ".yaml"))
                                            .string());
    REQUIRE(launched.has_value());
    if (launched->profile == framework) sum += std::abs(r.error()), ++rows;
  }
  REQUIRE(rows > 0.0);
  return sum / rows;
}

double seconds(const TrainPrice& price, Term t) { return price.seconds[static_cast<std::size_t>(t)]; }

}  // namespace

TEST_CASE("gradients added by a pass of their own cost three passes over them, from the second micro-batch on") {
  FrameworkProfile fused, unfused;
  fused.launch_seconds = unfused.launch_seconds = {1e-9, "test"};
  unfused.fused_accumulation = false;
  const auto added = [&](std::int64_t micro_batches) {
    const TrainPoint p{.sharding = Sharding::replicated, .micro_batch = 1, .micro_batches = micro_batches};
    return seconds(step_of(1, p, unfused), Term::compute) - seconds(step_of(1, p, fused), Term::compute);
  };
  CHECK(added(1) == Approx(0.0).margin(1e-9));
  // 8 layers of four products and the head: 8 x 12 h^2 + h V elements, read twice and written once in 2 bytes; and 33
  // kernels.
  ValidationContext context(catalog_root());
  const auto cost = context.cost("a100-sxm-80gb", 1);
  REQUIRE(cost.has_value());
  const double h = 4096.0, elements = 8.0 * 12.0 * h * h + h * 51200.0;
  const double once = cost->memory_seconds(3.0 * 2.0 * elements) + 33.0 * cost->hardware().kernel_overhead.value;
  CHECK(added(5) == Approx(4.0 * once));
}

TEST_CASE("collectives tensor by tensor: latency for each, and a copy for every rank of the group") {
  FrameworkProfile flat, listed;
  flat.launch_seconds = listed.launch_seconds = {1e-5, "test"};
  listed.rank_launches = {1, "test"};
  const TrainPoint p{.dp = 64, .sharding = Sharding::zero3, .micro_batch = 1, .micro_batches = 1};
  const auto data = [&](const FrameworkProfile& f) { return seconds(step_of(64, p, f), Term::data); };
  // Two gathers and a reduction of each of 8 layers, 64 copies of 10 us in each.
  CHECK(data(listed) - data(flat) == Approx(3.0 * 8.0 * 64.0 * 1e-5));
  listed.unit_tensors = {4, "test"};
  FrameworkProfile each = flat;
  each.unit_tensors = {4, "test"};
  CHECK(data(listed) - data(each) == Approx(4.0 * 3.0 * 8.0 * 64.0 * 1e-5));
  CHECK(data(each) > data(flat));
  // The share of the link's rate slows the bytes, not the latency.
  FrameworkProfile slow = each;
  slow.data_rate = {0.5, "test"};
  CHECK(data(slow) > 1.5 * data(each));
  CHECK(data(slow) < 2.0 * data(each));
}

TEST_CASE("published tables: accuracy holds") {
  const auto data = std::filesystem::path(source_folder) / "data" / "published";
  const auto v = validate_published(data, catalog_root());
  if (!v) FAIL(render(v.error()));
  // What is asked for, or tighter where docs/validation.md states less: a model that gets worse fails here.
  struct Bound {
    double mean, max = 1e9, bias = 1e9;
  };
  const std::map<std::string, Bound> bounds = {{"korthikanti_a100", {0.01, 0.03}},
                                               {"korthikanti_a100_layer", {0.04, 0.07}},
                                               {"korthikanti_a100_activations", {0.002}},
                                               {"korthikanti_a100_states", {0.002}},
                                               {"simumax_b200", {0.035, 0.09}},
                                               {"simumax_b200_memory", {0.005, 0.012}},
                                               {"simumax_b200_stages", {0.005}},
                                               {"simumax_b200_reserved", {0.045}},
                                               {"vtrain_a100_multi_node", {0.095}},
                                               {"vtrain_a100_single_node", {0.075}},
                                               {"megatron_sc21_weak_scaling", {0.025, 0.05, 0.025}},
                                               {"megatron_sc21_zero3_vs_ptd", {0.035, 0.06, 0.02}},
                                               {"megatron_readme_h100", {0.04, 0.08}},
                                               {"llama3_405b", {0.06}},
                                               {"megascale_175b", {0.05, 0.08, 0.03}},
                                               {"torchtitan", {0.02, 0.04}},
                                               {"torchtitan_memory", {0.04}},
                                               {"megatron_bridge", {0.18}},
                                               {"weight_sync", {0.07, 0.10}}};
  for (const auto& [name, bound] : bounds) {
    bool found = false;
    for (const ValidationTable& t : v->tables)
      if (t.name == name) {
        found = true;
        INFO(name);
        CHECK(t.mean_abs_error() <= bound.mean);
        CHECK(t.max_abs_error() <= bound.max);
        CHECK(std::abs(t.bias()) <= bound.bias);
        CHECK(!t.rows.empty());
      }
    CHECK(found);
  }
  CHECK_THAT(to_json(*v), Catch::Contains("hotbunk.validate/1"));
  CHECK_FALSE(validate_published("/nowhere", catalog_root()).has_value());
}

TEST_CASE("rows that a fit left out are shown, are not stale, and hold what is asked of them") {
  const auto v = validate_published(std::filesystem::path(source_folder) / "data" / "published", catalog_root());
  REQUIRE(v.has_value());
  // Errors asked of rows that nobody fitted, and the rows that there are.
  struct Asked {
    double mean;
    std::size_t rows;
  };
  const std::map<std::string, Asked> asked = {{"megatron_readme_h100", {0.06, 5}}, {"simumax_b200", {0.04, 16}},
                                              {"torchtitan", {0.08, 3}},           {"rl_iterations", {0.22, 22}},
                                              {"megatron_bridge", {0.20, 59}},     {"weight_sync", {0.20, 4}}};
  for (const auto& [name, bound] : asked) {
    INFO(name);
    const auto t = std::ranges::find(v->tables, name, &ValidationTable::name);
    REQUIRE(t != v->tables.end());
    CHECK(t->left_out.rows.size() == bound.rows);
    CHECK(t->left_out.mean_abs_error() <= bound.mean);
    CHECK(t->left_out.mean_abs_error() >= 0.5 * t->mean_abs_error());  // no better than rows that were fitted
    for (const SkippedRow& r : t->left_out.skipped) CHECK_THAT(r.why, !Catch::Contains("stale"));
    CHECK_THAT(render(*v), Catch::Contains("left out of " + name));
    // By model or configuration: a row's neighbours say what it is.
    if (name != "torchtitan" && name != "weight_sync") CHECK(t->left_out.how == "all rows of a model");
  }
  // Of the weight updates one system alone measured eleven: they are named.
  const auto sync = std::ranges::find(v->tables, "weight_sync", &ValidationTable::name);
  CHECK(sync->left_out.skipped.size() == 11);
  CHECK_THAT(render(*v), Catch::Contains("checkpoint-engine alone measured it"));
}

TEST_CASE("weight updates are predicted without their configuration, too: all rows, of those that have another one") {
  const auto v = validate_published(std::filesystem::path(source_folder) / "data" / "published", catalog_root());
  REQUIRE(v.has_value());
  const auto t = std::ranges::find(v->tables, "weight_sync_configurations", &ValidationTable::name);
  REQUIRE(t != v->tables.end());
  CHECK(t->rows.size() == 15);
  REQUIRE(t->left_out.rows.size() == 15);
  CHECK(t->left_out.skipped.empty());
  CHECK(t->left_out.how == "all rows of a configuration");
  // --rows shows a row as predicted once, in weight_sync; beside it that nobody else measured it, and what a refit
  // without its configuration says.
  const std::string text = render(*v), label = "checkpoint-engine broadcast Kimi-K2 to 256 ";
  std::size_t shown = 0;
  for (auto at = text.find(label); at != std::string::npos; at = text.find(label, at + 1)) ++shown;
  CHECK(shown == 3);
  CHECK(t->left_out.mean_abs_error() <= 0.20);
  // slime measured three mechanisms once each: these are predicted by the next one of its history, all others by
  // constants of the same mechanism.
  double sum = 0.0, rows = 0.0, worst = 0.0;
  for (const PredictedRow& r : t->left_out.rows) {
    const bool once = r.label.starts_with("slime") && !r.label.starts_with("slime flattened");
    if (once) worst = std::max(worst, std::abs(r.error()));
    else sum += std::abs(r.error()), ++rows;
  }
  CHECK(rows == 12);
  CHECK(sum / rows <= 0.11);
  CHECK(worst > 0.5);
}

TEST_CASE("phases of launches: all within 25 %") {
  const auto v = validate_published(std::filesystem::path(source_folder) / "data" / "published", catalog_root());
  REQUIRE(v.has_value());
  const auto t = std::ranges::find(v->tables, "rl_phase_seconds", &ValidationTable::name);
  REQUIRE(t != v->tables.end());
  // verl's DeepSeek-V3: rollout, training by its MFU, all. Of runs whose lengths their own training gives: rollout,
  // log-probs, all. verl's Qwen3.5-9B: rollout and update; its training passes wait for what nothing prices.
  REQUIRE(t->rows.size() == 3 + 3 + 3 + 3 + 3 + 2);
  for (const PredictedRow& r : t->rows) {
    INFO(r.label << ": " << r.predicted << " of " << r.measured);
    CHECK(std::abs(r.error()) <= 0.25);
  }
  CHECK(t->mean_abs_error() <= 0.12);
  CHECK(std::abs(t->bias()) <= 0.05);
  const std::vector<ValidationTable> parts = t->parts();
  std::size_t rows = 0;
  for (const ValidationTable& part : parts) rows += part.rows.size();
  CHECK(rows == t->rows.size());
  CHECK(parts.size() == 5);  // rollout, train, iteration, old_logprobs, sync
  const std::string text = render(*v, false);
  for (const ValidationTable& part : parts) CHECK_THAT(text, Catch::Contains("  " + part.name + " "));
  // A row that gives a run's lengths is not predicted with them.
  const auto why = [&](const std::string& label) {
    const auto at = std::ranges::find(t->skipped, label, &SkippedRow::label);
    return at == t->skipped.end() ? std::string() : at->why;
  };
  for (const char* run : {"verl-qwen2.5-math-7b-32xh20", "verl-qwen2.5-math-7b-64xh20", "verl-qwen2.5-math-7b-128xh20",
                          "verl-qwen3-30b-a3b-128xh20"})
    CHECK_THAT(why(std::string(run) + " train"), Catch::Contains("gives the launch's mean response"));
  CHECK_THAT(why("verl-qwen3-30b-a3b-128xh20 reference"), Catch::Contains("gives the launch's recomputation"));
  CHECK_THAT(why("verl-7203-8xh800 old_logprobs"), Catch::Contains("cuDNN build a graph"));
  CHECK_THAT(why("verl-qwen2.5-math-7b-32xh20-async train"), Catch::Contains("no prompt and response lengths"));
  // Of a device and of a host.
  const auto memory = std::ranges::find(v->tables, "rl_launch_memory", &ValidationTable::name);
  REQUIRE(memory != v->tables.end());
  REQUIRE(memory->rows.size() == 3);
  CHECK(memory->mean_abs_error() <= 0.10);
  CHECK(memory->max_abs_error() <= 0.20);  // Qwen3.5 without its vision tower and images
  CHECK(memory->skipped.empty());
}

TEST_CASE("stated errors are the means of their rows, by constants found without them") {
  const auto folder = std::filesystem::temp_directory_path() / ("hotbunk_stated_" + std::to_string(::getpid()));
  // What the 30B alone gives, and the 7B alone; 78 us are what a source says, 60 were chosen with two rows in sight.
  const ValidationTable of_7b =
      phases_with(folder, {{"frameworks/verl-fsdp.yaml", "logprob_token_seconds", "7.25e-8"},
                           {"frameworks/verl-fsdp.yaml", "sample_seconds", "1.7e-3"},
                           {"frameworks/verl-megatron.yaml", "logprob_token_seconds", "7.25e-8"}});
  const ValidationTable of_others =
      phases_with(folder, {{"frameworks/verl-megatron.yaml", "logprob_token_seconds", "1.43e-7"},
                           {"frameworks/verl-megatron.yaml", "sample_seconds", "1.3e-3"},
                           {"frameworks/verl-fsdp.yaml", "logprob_token_seconds", "1.43e-7"},
                           {"engines/vllm.yaml", "eager_kernel_seconds", "7.8e-5"}});
  // Those are what the one fits: the 30B's one row, and of the 7B's three the middle one, where their mean is least.
  CHECK(mean_error(of_7b, "verl-megatron", "old_logprobs") <= 0.005);
  const auto row = [](const ValidationTable& t, const std::string& label) {
    const auto at = std::ranges::find(t.rows, label, &PredictedRow::label);
    REQUIRE(at != t.rows.end());
    return at->error();
  };
  CHECK(std::abs(row(of_others, "verl-qwen2.5-math-7b-64xh20 old_logprobs")) <= 0.005);
  const auto stated = [](const std::optional<Sourced>& error) {
    REQUIRE(error.has_value());
    return Approx(error->value).margin(0.0006);  // three decimals
  };
  const auto of_phase = [&](RlPhase phase, const char* framework) {
    return stated(phase_error(phase, "h20-sxm-96gb", framework, SyncMechanism::bucketed));
  };
  for (const auto& [framework, table] : {std::pair("verl-fsdp", &of_7b), {"verl-megatron", &of_others}}) {
    INFO(framework);
    CHECK(mean_error(*table, framework, "iteration") == stated(iteration_error(framework)));
    CHECK(mean_error(*table, framework, "rollout") == of_phase(RlPhase::rollout, framework));
    CHECK(mean_error(*table, framework, "old_logprobs") == of_phase(RlPhase::old_logprobs, framework));
  }
  CHECK(mean_error(of_others, "verl-megatron", "train") == of_phase(RlPhase::train, "verl-megatron"));
  // What a refit left out.
  const auto v = validate_published(std::filesystem::path(source_folder) / "data" / "published", catalog_root());
  REQUIRE(v.has_value());
  const auto left_out = [&](const std::vector<std::string>& tables) {
    double sum = 0.0, rows = 0.0;
    for (const std::string& name : tables) {
      const auto t = std::ranges::find(v->tables, name, &ValidationTable::name);
      REQUIRE(t != v->tables.end());
      for (const PredictedRow& r : t->left_out.rows) sum += std::abs(r.error()), ++rows;
    }
    return sum / rows;
  };
  const auto of_training = [&](const char* gpu) {
    return stated(phase_error(RlPhase::train, gpu, "megatron", SyncMechanism::bucketed));
  };
  CHECK(left_out({"rl_iterations"}) == stated(iteration_error("nemo-megatron")));
  CHECK(left_out({"megatron_readme_h100", "llama3_405b"}) == of_training("h100-sxm-80gb"));
  CHECK(left_out({"simumax_b200"}) == of_training("b200-sxm-180gb"));
  double a100 = 0.0;  // each table with the same weight, as it was fitted
  for (const char* table :
       {"korthikanti_a100", "korthikanti_a100_layer", "megatron_sc21_weak_scaling", "vtrain_a100_multi_node"})
    a100 += left_out({table}) / 4.0;
  CHECK(a100 == of_training("a100-sxm-80gb"));
  const auto updates = std::ranges::find(v->tables, "weight_sync", &ValidationTable::name);
  REQUIRE(updates != v->tables.end());
  const auto mean_of = [](const std::vector<PredictedRow>& rows, const std::string& system) {
    double sum = 0.0, count = 0.0;
    for (const PredictedRow& r : rows)
      if (r.label.starts_with(system)) sum += std::abs(r.error()), ++count;
    return sum / count;
  };
  const auto of_sync = [&](SyncMechanism mechanism) {
    return stated(phase_error(RlPhase::sync, "h100-sxm-80gb", "megatron", mechanism));
  };
  CHECK(mean_of(updates->left_out.rows, "NeMo-RL nccl_reshard") == of_sync(SyncMechanism::shard_to_shard));
  CHECK(mean_of(updates->left_out.rows, "slime flattened") == of_sync(SyncMechanism::flattened_buckets));
  CHECK(mean_of(updates->rows, "checkpoint-engine broadcast") == of_sync(SyncMechanism::broadcast));
}

TEST_CASE("what only trains has the error of an optimizer step, whatever is known of RL iterations") {
  const auto said = [](const std::string& profile, const std::string& engine, const std::string& name) {
    auto s = load_scenario_text(
        "model: llama-3.1-8b\ncluster: {gpu: h100-sxm-80gb}\nprofile: " + profile + "\ntrain: {engine: " + engine +
            ", offload: none, micro_batch_tokens: 8192, layout: {dp: 8}}\nrollout: {engine: vllm, "
            "layout: {dp: 8}}\nalgorithm: {name: " +
            name + ", prompts: 64}\n",
        "t.yaml");
    if (!s) FAIL(render(s.error()));
    return iteration_error(*s);
  };
  const auto step = phase_error(RlPhase::train, "h100-sxm-80gb", "", SyncMechanism::bucketed);
  REQUIRE(step.has_value());
  CHECK(said("torchtitan", "fsdp2", "sft")->value == step->value);        // it was unvalidated
  CHECK(said("nemo-megatron", "megatron", "sft")->value == step->value);  // it was that of RL iterations
  CHECK(said("nemo-megatron", "megatron", "grpo")->value == iteration_error("nemo-megatron")->value);
}

TEST_CASE("a left-out prediction whose fit is another by now is stale, and is not shown as an error") {
  const auto folder = std::filesystem::temp_directory_path() / ("hotbunk_left_out_" + std::to_string(::getpid()));
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "left_out.csv") << "table,row,without,fitted,predicted\n"
                                            "t,a,all rows of X,10,12\nt,b; c,all rows of Y,10,12\nother,a,x,1,1\n";
  std::vector<ValidationTable> tables = {{.name = "t",
                                          .quantity = "",
                                          .unit = "",
                                          .setting = "",
                                          .rows = {{"a", 8, 10}, {"b, c", 8, 11}},
                                          .skipped = {},
                                          .peers = {}}};
  REQUIRE(add_left_out(folder / "left_out.csv", tables).has_value());
  REQUIRE(tables[0].left_out.rows.size() == 1);
  CHECK(tables[0].left_out.how == "all rows of a model");
  CHECK(tables[0].left_out.mean_abs_error() == Approx(0.5));  // 12 for 8
  REQUIRE(tables[0].left_out.skipped.size() == 1);
  CHECK_THAT(tables[0].left_out.skipped[0].why, Catch::Contains("stale: fitted then 10, now 11"));
  std::ofstream(folder / "left_out.csv") << "table,row\nt,a\n";
  CHECK(add_left_out(folder / "left_out.csv", tables).error()[0].code == "E107");
  std::filesystem::remove_all(folder);
}

TEST_CASE("tables of figures") {
  const auto t = CsvTable::parse("a,b\n1,661[^x]\n-,\n", "t.csv");
  REQUIRE(t.has_value());
  CHECK(t->size() == 2);
  CHECK(t->row(0).number("b") == 661.0);
  CHECK(t->row(1).number("a", 7.0) == 7.0);
  CHECK(t->row(0).text("c").empty());
  const auto ragged = CsvTable::parse("a,b\n1\n", "t.csv");
  REQUIRE_FALSE(ragged.has_value());
  CHECK(ragged.error()[0].where.line == 2);
}

}  // namespace hotbunk
