// Tables of anyone's: whatever their cells hold, every row is predicted or out of scope with its reason.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <catch2/catch.hpp>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "own_tables.h"
#include "planner/validate/validate.h"
#include "planner/validate/validate_tables.h"
#include "spec/catalog.h"
#include "tests/json.h"

namespace hotbunk {
namespace {

/// What is wrong with an answer about `rows` rows; "" when nothing is.
std::string fault_of(const std::string& name, const Result<Validation>& v, std::size_t rows) {
  if (!v) {
    for (const Diagnostic& d : v.error())
      if (d.code != "E107" || d.where.file.empty() || d.where.line != 1 || d.help.empty()) return render(v.error());
    return "";
  }
  std::size_t sum = 0;
  for (const ValidationTable& t : v->tables) {
    sum += t.rows.size() + t.skipped.size();
    for (const PredictedRow& r : t.rows)
      if (!(r.measured > 0.0 && r.predicted > 0.0 && std::isfinite(r.error())))
        return fmt::format("{}: {} measured {} predicted {}", t.name, r.label, r.measured, r.predicted);
    for (const SkippedRow& r : t.skipped)
      if (r.why.empty()) return fmt::format("{}: {} without a reason", t.name, r.label);
    // A row of Korthikanti's file is of one quantity; elsewhere every quantity has every row.
    if (name != "korthikanti_a100" && t.rows.size() + t.skipped.size() != rows)
      return fmt::format("{}: {} rows and {} out of scope of {}", t.name, t.rows.size(), t.skipped.size(), rows);
    if (t.rows.empty() != json_from<nlohmann::json>(to_json({{t}, {}, {}}))["tables"][0]["mean_abs_error"].is_null())
      return t.name + ": an error of no rows";
  }
  if (name == "korthikanti_a100" && sum != rows) return fmt::format("{} of {} rows", sum, rows);
  return "";
}

}  // namespace

TEST_CASE("whatever a column of a published table holds, no row is lost, and nothing crashes") {
  const Folder folder;
  std::size_t runs = 0;
  for (const auto& file : fs::directory_iterator(published)) {
    if (file.path().extension() != ".csv") continue;
    const std::string name = file.path().stem();
    const Cells whole = read_cells(file.path(), 5);
    REQUIRE(whole.size() > 1);
    for (std::size_t column = 0; column < whole[0].size(); ++column) {
      Cells without = whole;
      for (auto& row : without) row.erase(row.begin() + static_cast<std::ptrdiff_t>(column));
      INFO(name << ", column " << whole[0][column]);
      CHECK(fault_of(name, folder.validate(name, without), whole.size() - 1) == "");
      for (const char* cell : {"", "0", "-1", "n/a", "1e30", "1e-30", "0.5", "7", "nan", "inf", "1048576"}) {
        Cells changed = whole;
        for (std::size_t i = 1; i < changed.size(); ++i) changed[i][column] = cell;
        INFO("cell '" << cell << "'");
        CHECK(fault_of(name, folder.validate(name, changed), whole.size() - 1) == "");
        // One row's bad cell is that row's alone.
        changed = whole;
        changed[1][column] = cell;
        CHECK(fault_of(name, folder.validate(name, changed), whole.size() - 1) == "");
        runs += 2;
      }
    }
  }
  CHECK(runs > 2000);
}

TEST_CASE("a table without a column, a header or rows says so") {
  const Folder folder;
  Cells cells = read_cells(published / "vtrain_a100_single_node.csv", 3);
  cells[0][column_of(cells, "hidden size")] = "hiden size";
  const auto misspelt = folder.validate("vtrain_a100_single_node", cells);
  REQUIRE_FALSE(misspelt.has_value());
  CHECK_THAT(misspelt.error()[0].message, Catch::Contains("'hidden size'"));
  CHECK_THAT(misspelt.error()[0].help, Catch::Contains("rename 'hiden size'"));
  CHECK(misspelt.error()[0].where.line == 1);

  const auto nothing = folder.validate_text("torchtitan", "\n\n");
  REQUIRE_FALSE(nothing.has_value());
  CHECK(nothing.error()[0].code == "E107");

  cells = read_cells(published / "korthikanti_a100.csv", 0);
  const auto header = folder.validate("korthikanti_a100", cells);
  REQUIRE(header.has_value());
  CHECK_THAT(render(*header), Catch::Contains("the file has no such row"));
  CHECK_THAT(render(*header), !Catch::Contains("0.00 %"));
  const nlohmann::json document = json_from<nlohmann::json>(to_json(*header));
  for (const auto& t : document["tables"]) {
    CHECK(t["rows"] == 0);
    CHECK(t["bias"].is_null());
  }

  // A folder without a table of a known name is no folder of tables, whatever else lies there.
  const auto unknown = folder.validate("korthikanti", cells);
  REQUIRE_FALSE(unknown.has_value());
  CHECK_THAT(unknown.error()[0].message, Catch::Contains("no published table"));
  CHECK_THAT(unknown.error()[0].notes[0], Catch::Contains("korthikanti_a100.csv"));
  // Beside a known one it is named.
  const auto mixed = folder.validate("korthikanti_a100", cells, "korthikanti.csv");
  REQUIRE(mixed.has_value());
  CHECK_THAT(render(*mixed), Catch::Contains("none of the tables: korthikanti.csv"));
  CHECK(json_from<nlohmann::json>(to_json(*mixed))["ignored_files"][0] == "korthikanti.csv");
}

TEST_CASE("a torchtitan row is priced as the model and layout that it names") {
  const double eight = priced("torchtitan", {});
  // FLOPs per token are as parameters: 8.0, 70.6 and 405.9 billion.
  const std::map<std::string, std::string> large = {
      {"GPUs", "256"}, {"parallelism", "FSDP32 TP8"}, {"AC", "full"}, {"global_batch", "64"}};
  auto seventy = large, most = large;
  seventy["model"] = "Llama3.1-70B", most["model"] = "Llama3.1-405B";
  CHECK(priced("torchtitan", large) < eight);
  CHECK(priced("torchtitan", seventy) < 0.2 * priced("torchtitan", large));
  CHECK(priced("torchtitan", most) < 0.25 * priced("torchtitan", seventy));
  CHECK_THAT(fate("torchtitan", {{"model", "Llama4-Scout"}}).why,
             Catch::Contains("'Llama4-Scout' is not in the catalogue"));
  // Two replicas of four shards hold twice the states of eight shards: 12 bytes of 8.03e9 / 8 once more, because the
  // gradients of a step's only micro-batch are not there yet when memory peaks.
  const std::string memory = "torchtitan_memory";
  const double once = 12.0 * 8.03e9 / 8.0 / (1 << 30);
  CHECK(priced("torchtitan", {{"parallelism", "HSDP 2x4"}}, memory) - priced("torchtitan", {}, memory) ==
        Approx(once).epsilon(0.03));
  // 32 sequences in 8 micro-batches through 8 stages: a bubble of 7 in 15; as one micro-batch it would be 7 in 8.
  most["local_batch"] = "32", most["global_batch"] = "1024";
  auto piped = most;
  piped["parallelism"] = "FSDP4 TP8 PP8", piped["global_batch"] = "128";
  const double share = priced("torchtitan", piped) / priced("torchtitan", most);
  CHECK(share > 0.4);
  CHECK(share < 0.7);
  for (const char* layout : {"HSDP", "FSDP8 XP2", "FSDP0", "FSDP16", "TP3", "8"}) {
    INFO(layout);
    CHECK_FALSE(fate("torchtitan", {{"parallelism", layout}}).why.empty());
  }
  CHECK_THAT(fate("torchtitan", {{"parallelism", "FSDP4 TP2 asyncTP"}}).why, Catch::Contains("asynchronous"));
  CHECK_THAT(fate("torchtitan", {{"AC", "op of 2"}}).why, Catch::Contains("recomputation 'op of 2'"));
  CHECK_FALSE(fate("torchtitan", {{"precision", "float8 compile"}}).why.empty());
}

TEST_CASE("a row's hardware is the catalogue's, or it is out of scope") {
  const auto on = [](const char* hardware) { return priced("megatron_readme_h100", {{"hardware", hardware}}); };
  CHECK(on("A100-80GB Selene") < 0.6 * on("H100"));
  CHECK(on("H200 SXM") > on("H100"));
  CHECK(on("DGX-B200") > 1.3 * on("H200"));
  for (const char* table : {"korthikanti_a100", "megatron_sc21_weak_scaling", "megatron_readme_h100", "llama3_405b",
                            "torchtitan", "weight_sync"})
    for (const char* hardware : {"TPU v5p", "H100 PCIe", "MI300X", ""}) {
      INFO(table << " on " << hardware);
      CHECK_THAT(fate(table, {{"hardware", hardware}}).why, Catch::Contains("not in the catalogue"));
    }
  // The published recipes recompute nothing that counts, whatever the memory: only the rate of the products differs.
  const std::map<std::string, std::string> row = {{"model", "LLAMA3.1_405B"},
                                                  {"precision", "FP8"},
                                                  {"gpus", "256"},
                                                  {"gbs", "1536"},
                                                  {"mbs", "1"},
                                                  {"seq", "8192"},
                                                  {"tp", "4"},
                                                  {"pp", "8"},
                                                  {"cp", "1"},
                                                  {"vpp", "4"},
                                                  {"ep", "n/a"}};
  auto fp8 = row, nvfp4 = row, hopper = row;
  fp8["system"] = nvfp4["system"] = "DGX-B300", hopper["system"] = "DGX-H100";
  nvfp4["precision"] = "NVFP4";
  CHECK(priced("megatron_bridge", nvfp4) > 1.15 * priced("megatron_bridge", fp8));
  CHECK(priced("megatron_bridge", fp8) > 1.5 * priced("megatron_bridge", hopper));
  CHECK_THAT(fate("megatron_bridge", {{"model", "Nemotron_3_Ultra"}}).why, Catch::Contains("Mamba"));
  CHECK_THAT(fate("megatron_bridge", {{"task", "lora"}}).why, Catch::Contains("frozen"));
  CHECK(priced("megatron_bridge", {{"task", "sft"}}) > 0.0);
}

TEST_CASE("the recipes' FSDP: dense models on more than eight replicas gather their layers for every micro-batch") {
  // 64 micro-batches of 128 tokens on each GPU: 8e9 parameters in 2 bytes, gathered twice over a port of less than
  // 100 GB/s each time, take far longer than 6 x 8e9 x 128 FLOPs. Whole on every rank, they are reduced once.
  const auto on = [](const char* gpus, const char* sequences, const char* tp) {
    return priced("megatron_bridge", {{"model", "LLAMA3_8B"},
                                      {"system", "DGX-H100"},
                                      {"precision", "BF16"},
                                      {"gpus", gpus},
                                      {"gbs", sequences},
                                      {"mbs", "1"},
                                      {"seq", "128"},
                                      {"tp", tp},
                                      {"pp", "1"},
                                      {"cp", "1"},
                                      {"vpp", "n/a"},
                                      {"ep", "n/a"}});
  };
  CHECK(on("16", "1024", "1") < 0.5 * on("8", "512", "1"));
  CHECK(on("32", "1024", "2") > 0.5 * on("16", "512", "2"));  // tensor parallelism: no FSDP, whatever the replicas
}

TEST_CASE("rows beside the published ones have a price, or a reason") {
  // MegaScale's two models, and its own system, which is none of ours.
  const double small = priced("megascale_175b", {{"GPUs", "2240"}, {"batch", "2240"}, {"model", "175B TP8 PP8"}});
  CHECK(priced("megascale_175b", {{"GPUs", "2240"}, {"batch", "2240"}, {"model", "530B TP8 PP35"}}) > 2.0 * small);
  CHECK_THAT(fate("megascale_175b", {{"system", "MegaScale"}}).why, Catch::Contains("'MegaScale'"));
  CHECK_THAT(fate("megascale_175b", {{"GPUs", "300"}}).why, Catch::Contains("300 GPUs do not divide by 8 x 8"));
  // Llama 3's long contexts: sixteen times the keys.
  const double long_context =
      priced("llama3_405b", {{"GPUs", "16384"}, {"CP", "16"}, {"DP", "8"}, {"seq", "131072"}, {"batch_per_DP", "16"}});
  CHECK(long_context < priced("llama3_405b", {}));
  CHECK_THAT(fate("llama3_405b", {{"DP", "32"}}).why, Catch::Contains("4096 ranks, the row has 8192 GPUs"));
  // SimuMax cuts any model to its layers.
  std::map<std::string, std::string> cut = {{"model", "mixtral-8x7b"}, {"pp", "1"},          {"dp", "8"}, {"ep", "8"},
                                            {"layers", "4"},           {"dense_layers", "0"}};
  const double four = priced("simumax_b200", cut);
  cut["layers"] = "8";
  CHECK(priced("simumax_b200", cut) > 1.4 * four);
  cut["model"] = "qwen3-30b-a3b";
  priced("simumax_b200", cut);
  cut["ep"] = "3";
  CHECK_THAT(fate("simumax_b200", cut).why, Catch::Contains("128 experts do not divide by ep 3"));
  CHECK(priced("simumax_b200", {{"grad_dtype", "bf16"}}, "simumax_b200_memory") <
        priced("simumax_b200", {}, "simumax_b200_memory"));
  // The papers' models that the table does not print: 530B and 1T, with and without interleaving.
  const std::map<std::string, std::string> trillion = {
      {"model", "1T"}, {"heads", "160"}, {"hidden", "25600"},     {"layers", "128"},
      {"pp", "64"},    {"gpus", "512"},  {"global_batch", "512"}, {"micro_batch", "1"}};
  CHECK(priced("korthikanti_a100", trillion) > 30.0);
  CHECK(priced("megatron_sc21_zero3_vs_ptd", {{"GPUs", "768"}, {"micro_batch", "2"}}) <
        priced("megatron_sc21_zero3_vs_ptd", {}));
  CHECK_THAT(fate("megatron_sc21_zero3_vs_ptd", {{"params_B", "39.1"}}).why, Catch::Contains("39.1B"));
  CHECK_THAT(fate("weight_sync", {{"mechanism", "rsync"}}).why, Catch::Contains("'rsync'"));
  CHECK_THAT(fate("weight_sync", {{"seconds_low", "9"}}).why, Catch::Contains("below seconds_low"));
}

TEST_CASE("a changed figure is seen in its table, and in no other") {
  const Folder folder;
  const Cells as_published = read_cells(published / "korthikanti_a100.csv");
  Cells changed = as_published;
  changed[1][column_of(changed, "value")] = fmt::format("{}", 2.0 * std::stod(changed[1][column_of(changed, "value")]));
  const auto before = folder.validate("korthikanti_a100", as_published),
             after = folder.validate("korthikanti_a100", changed);
  REQUIRE((before && after));
  REQUIRE(before->tables.size() == after->tables.size());
  // The first row is one of the table's n iteration times: its ratio halves, so the bias falls by ratio / 2 / n.
  const ValidationTable& was = before->tables[0];
  const double ratio = was.rows[0].predicted / was.rows[0].measured, n = static_cast<double>(was.rows.size());
  CHECK(after->tables[0].bias() == Approx(was.bias() - ratio / 2.0 / n));
  CHECK(after->tables[0].max_abs_error() > 0.4);
  for (std::size_t i = 1; i < before->tables.size(); ++i)
    CHECK(before->tables[i].mean_abs_error() == after->tables[i].mean_abs_error());
}

}  // namespace hotbunk
