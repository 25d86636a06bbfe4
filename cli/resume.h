// `run --resume DIR`: which checkpoint a run goes on from, whether it still is the same computation, and what of the
// earlier part's files stays.
#pragma once
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "cli/command.h"
#include "rl/checkpoint.h"

namespace hotbunk {

/// Before oneDNN's version in Arithmetic::instruction_sets, which earlier checkpoints have not.
inline constexpr const char* onednn_version_mark = ", oneDNN ";

struct ResumePoint {
  SavedCheckpoint checkpoint;
  /// The run that wrote it; nothing where the checkpoint does not lie in a run folder.
  std::optional<RunFolder> run;
};

/// A key of the scenario that no step's computation reads: a run may go on with another value (name, steps,
/// checkpoint_every, run.*; task.data, whose content decides).
bool is_of_the_run(const std::string& key);

/// All steps are done, and the run ended before it had written what its end leaves: final, traces, summary, report.
bool only_its_end_is_left(const ResumePoint&, const Scenario& now);

/// `dir`: a run folder, whose furthest checkpoint is taken, or a checkpoint. E422 when there is none; E423.
Result<ResumePoint> find_resume(const std::filesystem::path& dir);

/// The checkpoint's own scenario with --set on top: what `run --resume DIR` without a scenario file runs.
Result<Scenario> scenario_of(const ResumePoint&, const std::vector<std::string>& sets);

/// What the scenario leaves to cost (train.context_exchange: auto) is what the checkpoint's run had chosen, so that its
/// own scenario file goes on bit for bit; where that had nothing to choose (cp 1), it stays open.
Status take_choices(const ResumePoint&, Scenario& now);

/// E424 with every difference that would change the computation, and when nothing is left to do or data and initial
/// weights are not those of the checkpoint any more. Warnings, which are no failure, come back: another layout, no
/// moments, another arithmetic than that of the process that wrote the checkpoint (E425).
Result<Diagnostics> check_resume(const ResumePoint&, const Scenario& now, const Arithmetic&);

/// E422 when the run would go on in a folder whose furthest checkpoint is another one: what is later would be lost.
Status check_target(const ResumePoint&, const RunFolder& target);

}  // namespace hotbunk
