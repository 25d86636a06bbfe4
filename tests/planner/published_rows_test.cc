// Rows beside the published ones: other layouts, words and formats of the same sources are priced by the same physics.
#include <catch2/catch.hpp>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/file.h"
#include "own_tables.h"
#include "planner/train/train_model.h"
#include "planner/validate/validate_tables.h"
#include "tests/json.h"
#include "tests/paths.h"

namespace hotbunk {
namespace {

CostModel cost_on(const std::string& gpu, const std::string& profile = "") {
  ValidationContext context(catalog_root());
  auto cost = context.cost(gpu, 8, 0.0, profile);
  REQUIRE(cost.has_value());
  return *cost;
}

}  // namespace

TEST_CASE("FlashAttention-2 has half of the libraries' rate on Hopper, and all of it where there is no other") {
  const auto rate = [](const CostModel& m, bool backward, AttentionKernel kernel) {
    return 1e15 / m.attention_seconds(1e15, 8192, 0, backward, m.peak_flops("bf16"), kernel) / 1e12;
  };
  const CostModel h100 = cost_on("h100-sxm-80gb");
  // Figures 5 and 6 of the FlashAttention-3 paper at 16k, whose causal queries see 8k keys on average; of steps that go
  // on, at the clock that they run at.
  const double clock = h100.hardware().sustained_clock.value;
  CHECK(rate(h100, false, AttentionKernel::flash2) == Approx(335 * clock).epsilon(0.02));
  CHECK(rate(h100, true, AttentionKernel::flash2) == Approx(322 * clock).epsilon(0.03));
  CHECK(rate(h100, false, AttentionKernel::library) > 1.7 * rate(h100, false, AttentionKernel::flash2));
  for (const char* gpu : {"a100-sxm-80gb", "b200-sxm-180gb"}) {
    INFO(gpu);
    const CostModel m = cost_on(gpu);
    CHECK(rate(m, false, AttentionKernel::flash2) == Approx(rate(m, false, AttentionKernel::library)).epsilon(0.03));
  }
  // The card of 500 W: everything that clocks drive by the same share, memory by its own rate.
  const CostModel capped = cost_on("h100-sxm-80gb", "h100-96gb-500w");
  const double share = std::pow(500.0 / 700.0, 0.4);
  CHECK(rate(capped, true, AttentionKernel::flash2) / rate(h100, true, AttentionKernel::flash2) ==
        Approx(share).epsilon(0.003));
  CHECK(h100.gemm_seconds(8192, 8192, 8192, DType::bf16) / capped.gemm_seconds(8192, 8192, 8192, DType::bf16) ==
        Approx(share).epsilon(0.003));
  CHECK(h100.memory_seconds(1e12) / capped.memory_seconds(1e12) == Approx(2.4 / 3.35).epsilon(0.003));
}

// What fits on whole steps made up for before: attention slower forward than backward, 11 us of device time a kernel.
TEST_CASE("what a profile says of a chip is what microbenchmarks of it say") {
  for (const char* gpu : {"a100-sxm-80gb", "h100-sxm-80gb", "b200-sxm-180gb"}) {
    INFO(gpu);
    const Hardware h = cost_on(gpu).hardware();
    CHECK(h.attention.forward.value > h.attention.backward.value);
    CHECK(h.kernel_overhead.value <= 5e-6);
    CHECK(h.sustained_clock.value > 0.7);
  }
  // An H20's tensor cores reach their peak, at a quarter of H100's rate: products of 8,192 138.6 TF/s, of 10,240 142.3.
  const CostModel h20 = cost_on("h20-sxm-96gb");
  const auto reached = [&](double n) { return 2 * n * n * n / h20.gemm_seconds(n, n, n, DType::bf16) / 1e12; };
  CHECK(reached(8192) == Approx(138.6).epsilon(0.03));
  CHECK(reached(10240) == Approx(142.25).epsilon(0.04));
  // Attention, heads of 128, 2,048 keys: cuDNN 129.1 TF/s, FlashAttention-2 83.7; causal, 1,024 on average, 107.8
  // and 65.9.
  const auto attends = [&](double keys, AttentionKernel kernel) {
    return 1e15 / h20.attention_seconds(1e15, keys, 0, false, h20.peak_flops("bf16"), kernel) / 1e12;
  };
  CHECK(attends(1024, AttentionKernel::library) == Approx(107.8).epsilon(0.03));
  CHECK(attends(1024, AttentionKernel::flash2) == Approx(65.9).epsilon(0.03));
  // cuBLAS, bf16: 780 to 795 of 989 TF/s; on B200 no fit.
  CHECK(cost_on("h100-sxm-80gb").hardware().gemm.efficiency.value == Approx(0.795).epsilon(0.01));
  CHECK_THAT(cost_on("b200-sxm-180gb").hardware().gemm.efficiency.source, Catch::Contains("microbenchmark"));
  const auto te = framework_named("megatron-te", catalog_root());
  REQUIRE(te.has_value());
  CHECK(te->kernel_overhead.value <= 5e-6);  // 0: the hardware's
  CHECK(te->step_seconds.value > 0.0);       // the host's time is the host's
}

TEST_CASE("context parallelism as PyTorch has it: the gather hides behind one block, merging is extra") {
  FrameworkProfile ring, gathered;
  gathered.gathered_context = true;
  const CostModel cost = cost_on("h100-sxm-80gb");
  ValidationContext context(catalog_root());
  const auto llama = context.model("llama-3.1-8b");
  REQUIRE(llama.has_value());
  const auto layer = [&](const FrameworkProfile& f, std::int64_t cp, std::int64_t sequence) {
    return TrainModel(*llama, {.sequence = sequence}, cost, f).dense_layer({.cp = cp});
  };
  // Long enough for everything but the last pass of gradients to hide: K and V of 32,768 tokens in fp32, 8 heads of
  // 128.
  const LayerCost far = layer(gathered, 2, 65536);
  CHECK(far.context_forward == 0.0);
  const double pass = cost.collective_seconds(OpKind::send, {2, 1, 1}, 4.0 * 32768 * 8 * 2 * 128);
  CHECK(far.context_backward == Approx(pass));
  CHECK(layer(ring, 2, 65536).context_backward == 0.0);
  // One merge of 32,768 x 4096 elements: two casts of 6 B, 32 B, and the cast back.
  const double merging = far.forward - layer(ring, 2, 65536).forward;
  CHECK(merging ==
        Approx(cost.memory_seconds((2 * 6 + 32 + 6) * 32768.0 * 4096) + cost.hardware().kernel_overhead.value));
  // Of short sequences the gather is longer than the rank's own block.
  CHECK(layer(gathered, 8, 8192).context_forward > 0.0);
  FrameworkProfile repeated = gathered;
  repeated.repeated_kv = true;
  CHECK(layer(repeated, 2, 65536).context_payload == Approx(4.0 * far.context_payload));  // 32 heads instead of 8
}

TEST_CASE("torchtitan away from the card that it was measured on") {
  const auto rate = [](std::map<std::string, std::string> sets, const std::string& table = "") {
    return priced("torchtitan", sets, table);
  };
  std::map<std::string, std::string> compiled = {{"precision", "bf16 compile"}};
  const double capped = rate(compiled);
  compiled["hardware"] = "H100-80GB";
  // 700 W and HBM3 give clocks of 1 / 0.874 and memory of 1.4; nothing gives more than both.
  CHECK(rate(compiled) > capped / 0.9);
  CHECK(rate(compiled) < 1.3 * capped);
  // The published float8 row: bf16 products can only be slower.
  std::map<std::string, std::string> along = {
      {"parallelism", "FSDP4 CP2"}, {"seq", "65536"}, {"local_batch", "1"},
      {"global_batch", ""},         {"AC", "full"},   {"precision", "bf16 compile"}};
  const double wide = rate(along);
  CHECK(wide < 2540);
  CHECK(wide > 0.7 * 2540);
  along["precision"] = "float8 compile";
  CHECK(rate(along, "torchtitan_float8") > wide);
  CHECK_THAT(fate("torchtitan", along).why, Catch::Contains("torchtitan_float8"));
  CHECK_THAT(fate("torchtitan", {{"precision", "float8"}, {"hardware", "A100"}}, "torchtitan_float8").why,
             Catch::Contains("no fp8 products"));
}

TEST_CASE("torchtitan's pipeline schedules by their names") {
  std::map<std::string, std::string> row = {{"model", "Llama3.1-405B"}, {"GPUs", "512"},         {"seq", "8192"},
                                            {"local_batch", "32"},      {"global_batch", "256"}, {"AC", "full"}};
  const auto named = [&](const char* parallelism) {
    row["parallelism"] = parallelism;
    return priced("torchtitan", row);
  };
  const double plain = named("FSDP8 TP8 PP8");
  CHECK(named("FSDP8 TP8 PP8 1F1B") == plain);
  // Chunks divide the bubble, weight gradients fill it.
  CHECK(named("FSDP8 TP8 PP8 Interleaved1F1B") > 1.1 * plain);
  CHECK(named("Interleaved 1F1B FSDP8 TP8 PP8") == named("FSDP8 TP8 PP8 Interleaved1F1B"));
  CHECK(named("FSDP8 TP8 PP8 ZBV") > 1.1 * plain);
  CHECK_THAT(fate("torchtitan", {{"parallelism", "FSDP8 Interleaved1F1B"}}).why, Catch::Contains("without a pipeline"));
  CHECK_FALSE(fate("torchtitan", {{"parallelism", "FSDP8 2F2B"}}).why.empty());
}

TEST_CASE("SC'21: the script's micro-batch is the script's runs' alone") {
  const std::map<std::string, std::string> as_published = {{"heads", "32"}, {"hidden", "4096"}, {"layers", "36"},
                                                           {"TP", "4"},     {"GPUs", "128"},    {"PP", "1"}};
  const double once = priced("megatron_sc21_weak_scaling", as_published);
  // Of 16 sequences a pipeline of two would have one micro-batch: half of it idle. Who splits so takes smaller ones.
  auto piped = as_published;
  piped["TP"] = piped["PP"] = "2";
  CHECK(priced("megatron_sc21_weak_scaling", piped) > 0.85 * once);
  CHECK(priced("megatron_sc21_weak_scaling", piped) < 1.15 * once);
}

TEST_CASE("Megatron-Bridge's words for models and formats") {
  std::map<std::string, std::string> row = {{"release", "26.06"}, {"task", "pre-training"}, {"system", "DGX-GB300"}};
  const auto with = [&](const char* model, const char* precision) {
    row["model"] = model, row["precision"] = precision;
    return priced("megatron_bridge", row);
  };
  for (const char* model : {"DeepSeekV3", "Kimi_K2"}) {
    INFO(model);
    CHECK(with(model, "NVFP4") >= with(model, "MXFP8"));
    CHECK(with(model, "MXFP8") >= with(model, "FP8"));
  }
  CHECK(with("DeepSeekV3", "FP8-CS") == with("DeepSeekV3", "FP8"));
  CHECK(with("DeepSeekV3", "FP8_MX") == with("DeepSeekV3", "MXFP8"));
  CHECK(with("Kimi_K2.5", "BF16") == with("Kimi_K2", "BF16"));
  // 24 layers instead of 36, of the same width and experts per token.
  row["pp"] = "1", row["vpp"] = "n/a", row["gpus"] = "64", row["ep"] = "16", row["gbs"] = "1280", row["mbs"] = "4";
  CHECK(with("GPT-OSS 20B", "BF16") > 1.2 * with("GPT OSS 120B", "BF16"));
  CHECK(with("Qwen3_VL_30B_a3B", "MXFP8") == with("Qwen3_30B_a3B", "MXFP8"));
  const auto why = [&](const char* model, const char* precision) {
    row["model"] = model, row["precision"] = precision;
    return fate("megatron_bridge", row).why;
  };
  CHECK_THAT(why("DeepSeekV3.2", "MXFP8"), Catch::Contains("sparse attention"));
  CHECK_THAT(why("Qwen3.5_VL_35B_a3B", "MXFP8"), Catch::Contains("linear attention"));
  CHECK_THAT(why("DeepSeekV3", "FP8-SC"), Catch::Contains("128 x 128"));
  CHECK_THAT(why("DeepSeekV3", "INT8"), Catch::Contains("'INT8' is not known"));
}

TEST_CASE("names of a model's variants, a layer's total, experts beyond a stage") {
  const auto update = [](const char* model, const char* precision = "bf16") {
    return priced("weight_sync", {{"model", model}, {"precision", precision}, {"payload_gb", ""}});
  };
  CHECK(update("Qwen3-30B-A3B-Instruct-2507") == update("Qwen3-30B-A3B"));
  CHECK(update("Kimi-K2-Instruct", "fp8") == update("Kimi-K2", "fp8"));
  CHECK(update("Qwen3-235B-A22B-FP8", "fp8") == update("Qwen3-235B-A22B", "fp8"));
  CHECK(update("GLM-4.5") > 2.0 * update("GLM-4.5-Air"));
  CHECK_THAT(fate("weight_sync", {{"model", "GLM-9-Instruct"}}).why, Catch::Contains("not in the catalogue"));

  const auto layer = [](const char* quantity) {
    return priced("korthikanti_a100", {{"quantity", quantity}}, "korthikanti_a100_layer");
  };
  CHECK(layer("layer_total") == Approx(layer("layer_forward") + layer("layer_backward")));

  CHECK_THAT(fate("simumax_b200", {{"ep", "8"}}).why,
             Catch::Contains("4 ranks of a pipeline stage % (ep 8 x etp 1 = 8) = 4"));
}

TEST_CASE("a table that cannot be read costs no other table") {
  const Folder folder;
  const Cells good = read_cells(published / "llama3_405b.csv");
  for (const bool ragged : {true, false}) {
    const std::string text =
        ragged ? "system,GPUs\nMegatron-LM,256,extra\nMegatron-LM,256\na,b,c\n" : "system,GPUs\na,1\n";
    const auto v = folder.validate("llama3_405b", good, "megascale_175b.csv", text);
    REQUIRE(v.has_value());
    REQUIRE(v->tables.size() == 1);
    CHECK(v->tables[0].rows.size() == 1);
    REQUIRE(v->unreadable.size() >= 2);  // every ragged row, every missing column
    CHECK(v->unreadable[0].code == (ragged ? "E106" : "E107"));
    CHECK(v->unreadable[0].where.line == (ragged ? 2 : 1));
    CHECK_THAT(v->unreadable[0].where.file, Catch::Contains("megascale_175b.csv"));
    CHECK_THAT(render(*v),
               Catch::Contains("llama3_405b") && Catch::Contains("not be read, see the errors: megascale_175b.csv\n"));
    const auto doc = json_from<nlohmann::json>(to_json(*v));
    CHECK(doc["tables"].size() == 1);
    CHECK(doc["unreadable"][0]["line"] == (ragged ? 2 : 1));
  }
  CHECK_FALSE(folder.validate_text("megascale_175b", "a,b\n1\n").has_value());
}

TEST_CASE("docs/validation.md says what validate computes") {
  const auto v = validate_published(published, catalog_root());
  REQUIRE(v.has_value());
  std::ifstream in(fs::path(source_folder) / "docs" / "validation.md");
  std::stringstream text;
  text << in.rdbuf();
  const auto percent = [](const ValidationTable& t, double error, bool sign) {
    if (t.rows.empty()) return std::string("-");
    return sign ? fmt::format("{:+.2f} %", 100.0 * error) : fmt::format("{:.2f} %", 100.0 * error);
  };
  for (const ValidationTable& t : v->tables) {
    std::string peers;
    for (const PeerFigure& p : t.peers)
      peers += fmt::format("{}{} {:.2f} %", peers.empty() ? "" : ", ", p.tool, 100.0 * p.mean_abs_error);
    INFO("`hotbunk validate --json | scripts/validation_page.py docs` writes the page");
    CHECK_THAT(
        text.str(),
        Catch::Contains(fmt::format(
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} |\n", t.name, t.quantity, t.rows.size(), t.skipped.size(),
            percent(t, t.mean_abs_error(), false), percent(t, t.max_abs_error(), false), percent(t, t.bias(), true),
            t.left_out.rows.empty() ? "" : fmt::format("{:.2f} %", 100.0 * t.left_out.mean_abs_error()), peers)));
  }
  const auto readme = read_file(fs::path(source_folder) / "README.md");
  REQUIRE(readme);
  const auto rl = std::ranges::find(v->tables, "rl_iterations", &ValidationTable::name);
  REQUIRE(rl != v->tables.end());
  CHECK_THAT(*readme, Catch::Contains(fmt::format(
                          "{:.1f} % off in the mean over {} published ones of NeMo-RL, {:.1f} % where",
                          100.0 * rl->mean_abs_error(), rl->rows.size(), 100.0 * rl->left_out.mean_abs_error())));
}

}  // namespace hotbunk
