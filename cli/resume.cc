#include "cli/resume.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "base/shell_quoted.h"
#include "cli/run_folder.h"
#include "rl/manifest.h"
#include "spec/loader.h"
#include "spec/model_config.h"
#include "spec/scenario_keys.h"

namespace hotbunk {
namespace {

namespace fs = std::filesystem;

/// Folders of a run that hold a checkpoint, by step; of one step's the numbered one comes last.
std::vector<SavedCheckpoint> checkpoints_of(const RunFolder& run, Diagnostics& problems) {
  std::vector<SavedCheckpoint> found;
  std::error_code ec;
  for (const auto& entry : fs::directory_iterator(run.checkpoints(), ec)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(".") || !is_checkpoint(entry.path())) continue;
    auto read = read_checkpoint(entry.path());
    if (read) found.push_back(std::move(*read));
    else problems.insert(problems.end(), read.error().begin(), read.error().end());
  }
  std::ranges::sort(found, [](const SavedCheckpoint& a, const SavedCheckpoint& b) {
    return std::pair(a.state.step, a.folder.filename()) < std::pair(b.state.step, b.folder.filename());
  });
  return found;
}

/// What a key of the scenario means to a run that goes on.
enum class Meaning : std::uint8_t { of_the_run, where_it_runs, computation };

Meaning meaning_of(const std::string& key) {
  for (const char* free : {"name", "steps", "checkpoint_every", "task.data"})  // data: its digest decides
    if (key == free) return Meaning::of_the_run;
  if (key.starts_with("run.")) return Meaning::of_the_run;
  if (key == "sync.every") return Meaning::computation;
  // Sums run in another order there, memory is another, and nothing else differs.
  for (const char* where : {"cluster.",
                            "train.engine",
                            "train.wrap.",
                            "train.layout.",
                            "rollout.layout.",
                            "sync.",
                            "train.offload",
                            "train.prefetch",
                            "train.in_place_elements",
                            "train.reshard_after_forward",
                            "train.expert_capacity",
                            "train.expert_dispatch",
                            "train.context_exchange",
                            "train.make_vocab_size_divisible_by",
                            "optimizer.cpu_fraction",
                            "train.pipeline_",
                            "train.num_layers_in_",
                            "train.account_for_",
                            "transition",
                            "rollout.sleep",
                            "rollout.memory_fraction",
                            "rollout.kv_cache_tokens"})
    if (key.starts_with(where)) return Meaning::where_it_runs;
  return Meaning::computation;
}

struct Differences {
  std::vector<std::string> computation, where;
};

Differences differences_of(const Scenario& before, const Scenario& now) {
  Differences out;
  const nlohmann::json a = config_of(before.model, DType::f32), b = config_of(now.model, DType::f32);
  for (const auto& [key, value] : a.items())
    if (!b.contains(key) || b[key] != value)
      out.computation.push_back(fmt::format("model.{}: {} in the checkpoint, {} now", key, json_text(value),
                                            b.contains(key) ? json_text(b[key]) : "none"));
  for (const auto& [key, value] : b.items())
    if (!a.contains(key))
      out.computation.push_back(fmt::format("model.{}: none in the checkpoint, {} now", key, json_text(value)));
  for (const ScenarioKey& key : scenario_keys()) {
    if (!key.in_resolved) continue;
    const KeyValue was = key.get(before), is = key.get(now);
    if (yaml_of(was) == yaml_of(is)) continue;
    const Meaning meaning = meaning_of(key.path);
    if (meaning == Meaning::of_the_run) continue;
    (meaning == Meaning::computation ? out.computation : out.where)
        .push_back(fmt::format("{}: {} in the checkpoint, {} now", key.path, yaml_of(was), yaml_of(is)));
  }
  return out;
}

Diagnostic refused(const ResumePoint& from, std::string message, std::vector<std::string> notes, std::string help) {
  return {.code = "E424",
          .message = std::move(message),
          .where = {from.checkpoint.folder.string()},
          .notes = std::move(notes),
          .help = std::move(help)};
}

Diagnostic warning(const ResumePoint& from, std::string message, std::vector<std::string> notes, std::string help) {
  return {.code = "E425",
          .message = std::move(message),
          .where = {from.checkpoint.folder.string()},
          .notes = std::move(notes),
          .help = std::move(help),
          .severity = Severity::warning};
}

/// E425, in one line; nothing where a side does not say.
std::optional<std::string> other_arithmetic(const Arithmetic& there, const Arithmetic& here) {
  std::vector<std::string> differ;
  const auto compare = [&](const char* what, const std::string& a, const std::string& b) {
    if (!a.empty() && !b.empty() && a != b) differ.push_back(fmt::format("{} {} there, {} here", what, a, b));
  };
  compare("those of bf16 by", there.bf16_products, here.bf16_products);
  const auto without_version = [](const std::string& sets) { return sets.substr(0, sets.find(onednn_version_mark)); };
  if (there.instruction_sets != without_version(here.instruction_sets))
    compare("with", there.instruction_sets, here.instruction_sets);
  if (differ.empty()) return std::nullopt;
  return fmt::format(
      "products are formed in another way there: {}, so it is not bit for bit the uninterrupted run, but equal but for "
      "rounding",
      fmt::join(differ, "; "));
}

/// The bytes behind a path must be those that the run began with.
void check_content(const ResumePoint& from, const char* key, const std::string& path, const std::string& digest,
                   Result<std::string> (*digest_of)(const fs::path&), Diagnostics& problems) {
  if (digest.empty()) return;
  const auto now = digest_of(path);
  if (!now) problems.insert(problems.end(), now.error().begin(), now.error().end());
  else if (*now != digest)
    problems.push_back(refused(from, fmt::format("{} is not what the run began with", key),
                               {fmt::format("{} had xxh3-128 {}, and has {} now", path, digest, *now)},
                               "bring the files back, or start a new run from the checkpoint: --set model=FOLDER"));
}

}  // namespace

Result<ResumePoint> find_resume(const fs::path& dir) {
  if (is_checkpoint(dir)) {
    auto checkpoint = read_checkpoint(dir);
    if (!checkpoint) return tl::unexpected(checkpoint.error());
    ResumePoint point{std::move(*checkpoint), std::nullopt};
    const fs::path parent = fs::absolute(dir / ".").lexically_normal().parent_path().parent_path();
    if (parent.filename() == "checkpoints") point.run = RunFolder{parent.parent_path()};
    return point;
  }
  Diagnostics problems;
  auto found = checkpoints_of({dir}, problems);
  if (!problems.empty()) return fail(std::move(problems));
  if (!found.empty()) return ResumePoint{std::move(found.back()), RunFolder{dir}};
  const fs::path looked = RunFolder{dir}.checkpoints();
  return fail(Diagnostic{.code = "E422",
                         .message = "there is no checkpoint to resume from",
                         .where = {dir.string()},
                         .notes = {fmt::format("looked for {} and {} there and in the folders of {}",
                                               checkpoint_file::state, checkpoint_file::scenario, looked.string())},
                         .help = "give a run folder or one of its checkpoints; a run that ended before its first "
                                 "checkpoint starts over; checkpoint_every says how often they come"});
}

bool is_of_the_run(const std::string& key) { return meaning_of(key) == Meaning::of_the_run; }

bool only_its_end_is_left(const ResumePoint& from, const Scenario& now) {
  return from.checkpoint.state.step == now.steps && from.run && !has_ended(*from.run);
}

Result<Scenario> scenario_of(const ResumePoint& from, const std::vector<std::string>& sets) {
  return load_scenario(from.checkpoint.folder / checkpoint_file::scenario, sets);
}

Status take_choices(const ResumePoint& from, Scenario& now) {
  if (now.train.context_exchange != ContextExchange::automatic || now.train.layout.cp == 1) return {};
  const auto before = scenario_of(from, {});
  if (!before) return tl::unexpected(before.error());
  now.train.context_exchange = before->train.context_exchange;
  return {};
}

Result<Diagnostics> check_resume(const ResumePoint& from, const Scenario& now, const Arithmetic& arithmetic) {
  const TrainingState& state = from.checkpoint.state;
  const auto before = scenario_of(from, {});
  if (!before) return tl::unexpected(before.error());
  Diagnostics problems, warnings;
  const Differences differ = differences_of(*before, now);
  if (!differ.computation.empty())
    problems.push_back(
        refused(from, "the scenario computes something else than the checkpoint's", differ.computation,
                "resume with the values of the checkpoint (steps, checkpoint_every, engine and layout may "
                "differ), or start a new run from its weights: --set model=FOLDER"));
  if (state.step >= now.steps && !only_its_end_is_left(from, now))
    problems.push_back(refused(from, fmt::format("no step is left: the checkpoint is of step {}", state.step),
                               {fmt::format("steps is {}", now.steps)},
                               state.step == now.steps && from.run
                                   ? fmt::format("the run is whole: `hotbunk report {}` shows it; to train on, set "
                                                 "steps to more than {}",
                                                 shell_quoted(from.run->root.string()), state.step)
                                   : fmt::format("set steps to more than {}", state.step)));
  check_content(from, "task.data", now.task.data, state.data_digest, digest_of_file, problems);
  if (now.algorithm.reference || now.model.lora.on())
    check_content(from, now.model.lora.on() ? "the adapters' model" : "the reference's initial policy",
                  now.model.weights_path, state.initial_digest, digest_of_model, problems);
  if (!problems.empty()) return fail(std::move(problems));
  if (!differ.where.empty())
    warnings.push_back(
        warning(from, "the run goes on elsewhere: equal but for rounding, not bit for bit", differ.where, ""));
  if (auto other = other_arithmetic(state.arithmetic, arithmetic)) warnings.push_back(warning(from, *other, {}, ""));
  if (!from.checkpoint.has_moments)
    warnings.push_back(warning(
        from, fmt::format("the checkpoint has no {}: AdamW's moments start from zero", checkpoint_file::optimizer), {},
        "bring the file back to go on bit for bit"));
  if (now.algorithm.name != AlgorithmName::sft && state.step % now.sync.every != 0)
    warnings.push_back(warning(
        from, "the run goes on with newer weights in the rollout: not bit for bit",
        {fmt::format("step {} syncs, for a checkpoint has no rollout weights; with sync.every {} the run would "
                     "not have",
                     state.step + 1, now.sync.every)},
        fmt::format("to go on bit for bit, resume a checkpoint whose step is a multiple of {}", now.sync.every)));
  return warnings;
}

Status check_target(const ResumePoint& from, const RunFolder& target) {
  Diagnostics problems;
  const auto there = checkpoints_of(target, problems);
  if (!problems.empty()) return fail(std::move(problems));
  if (there.empty() || there.back().state.step <= from.checkpoint.state.step) return {};
  return fail(
      Diagnostic{.code = "E422",
                 .message = fmt::format("{} has a later checkpoint than the one to resume from", target.root.string()),
                 .where = {from.checkpoint.folder.string()},
                 .notes = {fmt::format("it is of step {}, {} is of step {}", from.checkpoint.state.step,
                                       there.back().folder.filename().string(), there.back().state.step)},
                 .help = "give --out another folder, or resume from the later one"});
}

}  // namespace hotbunk
