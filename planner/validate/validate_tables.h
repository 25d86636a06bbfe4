// The tables of validate.h, one function per file of data/published/. Internal to the planner.
#pragma once
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "planner/train/train_model.h"
#include "planner/validate/published.h"
#include "planner/validate/validate.h"

namespace hotbunk {

/// Clusters, models and profiles from the catalogue, loaded once.
class ValidationContext {
 public:
  explicit ValidationContext(std::filesystem::path catalogue) : catalogue_(std::move(catalogue)) {}

  /// `network`: bytes/s per GPU between nodes, 0: the catalogue's. `profile`: another than the GPU's own. `per_node`:
  /// GPUs of one NVLink domain.
  Result<CostModel> cost(const std::string& gpu, std::int64_t gpus, double network = 0.0,
                         const std::string& profile = "", std::int64_t per_node = 8);
  /// What a process can allocate on a GPU that `cost` was asked for.
  double memory_bytes(const std::string& gpu) const { return static_cast<double>(clusters_.at(gpu).gpu.memory_bytes); }
  Result<ModelSpec> model(const std::string& name);
  /// The catalogue's name for what a table's cell calls a GPU ("DGX-GB200", "A100-80GB Selene") or a model
  /// ("LLAMA3_70B", "Llama3-405B (126 layers)"); the reader is told when there is none.
  std::string gpu_named(CellReader&, const std::string& cell) const;
  std::string model_named(CellReader&, const std::string& cell) const;
  Result<FrameworkProfile> framework(const std::string& name);
  const std::filesystem::path& catalogue() const { return catalogue_; }

  // What the rows so far have priced: what else knows their layouts (the simulator) is held to them by tests.
  struct TrainedRow {
    TrainModel model;
    TrainPoint point;
  };
  std::vector<TrainedRow> trained;
  struct IterationRow {
    std::string label;
    Scenario scenario;
  };
  std::vector<IterationRow> iterations;

 private:
  std::filesystem::path catalogue_;
  std::map<std::string, ClusterSpec> clusters_;
  std::map<std::string, Hardware> hardware_;
  std::map<std::string, ModelSpec> models_;
  std::map<std::string, FrameworkProfile> frameworks_;
};

/// "Qwen3_30B_a3B" and "qwen3-30b-a3b" -> QWEN330BA3B.
std::string letters_of(const std::string& text);
/// "Llama-3.1-8B-Instruct", "Qwen3-30B-A3B-FP8" without the last word.
std::string without_variant(const std::string& model);

/// GPT-3 architecture: 4 h MLP with GELU, layer norms, biases, learned positions, tied embeddings.
ModelSpec gpt_model(std::int64_t layers, std::int64_t hidden, std::int64_t heads, std::int64_t vocab,
                    std::int64_t sequence);

/// "FSDP32 TP8", "FSDP 4, CP 2", "HSDP 2x4" -> {FSDP: {32}, TP: {8}} and so on. Anything else is not understood.
using Degrees = std::map<std::string, std::vector<std::int64_t>>;
Degrees degrees(CellReader&, const std::string& text);

/// The row's layout priced, and noted in the context; without a price, and the reader told why, where its sizes do not
/// divide.
TrainPrice price_of(CellReader&, ValidationContext&, const TrainModel&, const TrainPoint&);

/// A row's place in a table: its prediction, or the reason why it has none.
void put(ValidationTable&, const std::string& label, const CellReader&, double measured, double predicted);
/// The measurement is read from the column.
void put(ValidationTable&, const std::string& label, CellReader, const std::string& column, double predicted);

/// scenarios/catalog/left_out.csv (scripts/fit_profiles.py --write): puts its predictions beside those of the tables. A
/// row whose fitted prediction is no longer what it says there is skipped as stale. E106, E107.
Status add_left_out(const std::filesystem::path& csv, std::vector<ValidationTable>&);

using TableResult = Result<std::vector<ValidationTable>>;
/// The context knows the rows' layouts behind it.
Result<Validation> validate_published(const std::filesystem::path& data, ValidationContext&);
TableResult validate_korthikanti(const CsvTable&, ValidationContext&);
TableResult validate_sc21_scaling(const CsvTable&, ValidationContext&);
TableResult validate_sc21_zero3(const CsvTable&, ValidationContext&);
TableResult validate_megatron_h100(const CsvTable&, ValidationContext&);
TableResult validate_llama3_405b(const CsvTable&, ValidationContext&);
TableResult validate_megascale(const CsvTable&, ValidationContext&);
TableResult validate_vtrain(const CsvTable&, ValidationContext&, const std::string& name);
TableResult validate_simumax(const CsvTable&, ValidationContext&);
TableResult validate_torchtitan(const CsvTable&, ValidationContext&);
TableResult validate_megatron_bridge(const CsvTable&, ValidationContext&);
TableResult validate_weight_sync(const CsvTable&, ValidationContext&);
TableResult validate_rl_iterations(const CsvTable&, ValidationContext&);
TableResult validate_rl_phases(const CsvTable&, ValidationContext&);
/// `launches`: the folder with the launches' scenarios.
TableResult validate_rl_phase_seconds(const CsvTable&, ValidationContext&, const std::filesystem::path& launches);
TableResult validate_rl_launch_memory(const CsvTable&, ValidationContext&, const std::filesystem::path& launches);

}  // namespace hotbunk
