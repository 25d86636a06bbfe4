// Whole iterations of RL systems: each row becomes a scenario, and is priced as `explain` prices it.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "planner/answers/answers.h"
#include "planner/validate/validate_tables.h"
#include "spec/loader.h"

namespace hotbunk {
namespace {

/// What the performance recipes of NeMo-RL say of a model beside the table's columns
/// (examples/configs/recipes/llm/performance, 0.4 and 0.5): samples of a prompt, activation checkpointing, layers of
/// the first and last pipeline stage (0: even).
struct Recipe {
  std::int64_t samples_per_prompt = 32;
  bool checkpointing = true;
  std::map<std::int64_t, std::pair<std::int64_t, std::int64_t>> ends;  // by pp
};

Recipe recipe_of(const std::string& model) {
  if (model == "deepseek-v3") return {16, true, {{16, {3, 2}}, {8, {7, 6}}}};
  if (model == "qwen3-235b-a22b") return {32, true, {{8, {11, 11}}, {4, {23, 23}}}};
  return {32, model != "qwen3-32b", {}};
}

/// "pipeline_split: [3, 4, …, 2]" where the ends are not as the others.
std::string split_text(const Recipe& recipe, std::int64_t layers, std::int64_t pp) {
  const auto at = recipe.ends.find(pp);
  if (at == recipe.ends.end() || pp < 3) return "";
  const auto [first, last] = at->second;
  if ((layers - first - last) % (pp - 2) != 0) return "";
  std::vector<std::int64_t> split(static_cast<std::size_t>(pp), (layers - first - last) / (pp - 2));
  split.front() = first, split.back() = last;
  return fmt::format(", pipeline_split: [{}]", fmt::join(split, ", "));
}

// OpenMathInstruct-2 questions with the recipe's template: stated, the sources give whole sequences alone.
constexpr double prompt_tokens = 150;
constexpr double response_cv = 0.6;  // stated

struct Row {
  std::string gpu, model;
  std::int64_t gpus, samples, batch, longest, layers;
  double mean;
  bool off, fp8;
  std::int64_t generation_tp, generation_pp, tp, cp, ep, pp;
};

std::string scenario_text(const Row& r) {
  const Recipe recipe = recipe_of(r.model);
  const std::int64_t side = r.off ? r.gpus / 2 : r.gpus;  // half of them train, half generate
  const std::int64_t domain = r.gpu == "gb200-nvl72" ? std::min<std::int64_t>(r.gpus, 64) : 8;
  const double most = static_cast<double>(r.longest) - prompt_tokens;
  return fmt::format(
      "model: {}\nprofile: nemo-megatron\nplacement: {}\ncluster: {{gpu: {}, nodes: {}, gpus_per_node: {}}}\n"
      "train: {{engine: megatron, layout: {{dp: {}, cp: {}, tp: {}, pp: {}, ep: {}, sp: {}}}, micro_batch_tokens: {}, "
      "recompute: {}, precision: {{grads: bf16}}{}, offload: {}}}\n"
      "rollout: {{engine: vllm, layout: {{tp: {}, pp: {}, dp: {}}}, memory_fraction: {}, dtype: {}}}\n"
      "algorithm: {{name: grpo, prompts: {}, samples_per_prompt: {}, mini_batches: {}, reference: true, "
      "max_staleness: {}}}\n"
      "workload: {{prompt_tokens: {{mean: {}, max: {}, distribution: fixed}}, response_tokens: {{mean: {:.0f}, max: "
      "{:.0f}, cv: {}}}}}\n",
      r.model, r.off ? "disaggregated" : "colocated", r.gpu, r.gpus / domain, domain, side / (r.cp * r.tp * r.pp), r.cp,
      r.tp, r.pp, r.ep, r.tp > 1, TrainLayout{.cp = r.cp}.share_of(r.longest), recipe.checkpointing ? "full" : "none",
      split_text(recipe, r.layers, r.pp), r.off ? "none" : "sleep", r.generation_tp, r.generation_pp,
      side / (r.generation_tp * r.generation_pp), r.off ? 0.8 : 0.6, r.fp8 ? "fp8" : "bf16",
      r.samples / recipe.samples_per_prompt, recipe.samples_per_prompt, r.samples / r.batch, r.off ? 1 : 0,
      prompt_tokens, prompt_tokens, std::clamp(r.mean - prompt_tokens, 1.0, most), most, response_cv);
}

}  // namespace

TableResult validate_rl_iterations(const CsvTable& csv, ValidationContext& context) {
  ValidationTable out{"rl_iterations",
                      "iteration time",
                      "s",
                      "profile nemo-megatron; samples per prompt, checkpointing and stages from the release's recipes; "
                      "prompts of 150 tokens, responses lognormal with cv 0.6 up to the longest",
                      {},
                      {},
                      {}};
  if (auto has =
          csv.require({"release", "hardware", "precision", "algorithm", "model", "policy", "max_sequence",
                       "mean_sequence", "gpus", "samples_per_iteration", "train_batch", "generation_tp",
                       "generation_pp", "training_tp", "training_cp", "training_ep", "training_pp", "step_seconds"});
      !has)
    return fail(has.error());
  for (std::size_t i = 0; i < csv.size(); ++i) {
    CellReader cells(csv.row(i));
    const std::string label =
        fmt::format("{} {} {} {} {} on {}", cells.text("release"), cells.text("algorithm"), cells.text("model"),
                    cells.text("policy"), cells.text("precision"), cells.text("gpus"));
    const std::string &policy = cells.text("policy"), &precision = cells.text("precision");
    if (policy != "On policy" && policy != "1-step Off") cells.refuse(fmt::format("policy '{}' is not known", policy));
    if (precision != "bf16" && precision != "fp8")
      cells.refuse(fmt::format("precision '{}' is bf16 or fp8", precision));
    if (cells.text("algorithm") != "grpo")
      cells.refuse("dynamic sampling: how many batches a step draws the source does not say");
    Row row{.gpu = context.gpu_named(cells, cells.text("hardware")),
            .model = context.model_named(cells, cells.text("model")),
            .gpus = cells.count("gpus"),
            .samples = cells.count("samples_per_iteration"),
            .batch = cells.count("train_batch"),
            .longest = cells.count("max_sequence"),
            .layers = 1,
            .mean = cells.measured("mean_sequence"),
            .off = policy == "1-step Off",
            .fp8 = precision == "fp8",
            .generation_tp = cells.count("generation_tp"),
            .generation_pp = cells.count("generation_pp"),
            .tp = cells.count("training_tp"),
            .cp = cells.count("training_cp"),
            .ep = cells.count("training_ep"),
            .pp = cells.count("training_pp")};
    auto model = context.model(row.model);
    if (!model) return fail(model.error());
    row.layers = model->layers;
    double seconds = 0.0;
    if (cells.usable()) {
      const std::int64_t side = row.off ? row.gpus / 2 : row.gpus;
      if (side % (row.tp * row.cp * row.pp) != 0 || side % (row.generation_tp * row.generation_pp) != 0)
        cells.refuse(fmt::format("{} GPUs do not divide by the layouts", side));
      else if (auto scenario = load_scenario_text(scenario_text(row), "rl_iterations"); !scenario)
        cells.refuse(scenario.error().front().message);
      else if (auto pricer = ScenarioPricer::make(*scenario, context.catalogue()); !pricer)
        cells.refuse(pricer.error().front().message);
      else if (seconds = (*pricer)->price((*pricer)->point()).iteration_seconds; seconds <= 0.0)
        cells.refuse("the rollout does not hold its weights and one sequence");
      else context.iterations.push_back({label, std::move(*scenario)});
    }
    put(out, label, cells, "step_seconds", seconds);
  }
  return std::vector<ValidationTable>{out};
}

}  // namespace hotbunk
