// What rank 0 of a run writes while it goes on (cli/step_lines.h): a run that is killed leaves the lines of all
// finished steps, and nothing waits in memory for the end.
//   metrics.jsonl      a line per step (reports/metrics_jsonl.h)
//   lengths.jsonl      a line per step (exec/lengths.h): what a simulation needs to replay the run
//   sync_hashes.jsonl  with sync.verify a line per step (rl/sync_hashes.h); the tensors' own hashes in some of them
//   samples.jsonl      of some steps, a line per sample (rl/sample_records.h)
#pragma once
#include <functional>
#include <memory>
#include <optional>

#include "cli/command.h"
#include "cli/step_lines.h"
#include "reports/metrics_jsonl.h"
#include "rl/training_driver.h"
#include "runtime/rank_backend.h"

namespace hotbunk {

struct RunOutputOptions {
  std::int32_t after_step = 0;                  // of a run that goes on: lines up to here stay
  std::optional<RunFolder> earlier{};           // where they are, if not in the run's own folder
  std::optional<std::int32_t> samples_every{};  // as writes_samples takes it
  std::function<void(const StepFigures&)> on_step{};
};

class RunOutputs {
 public:
  static constexpr std::size_t samples_of_a_step = 8;
  static constexpr std::int64_t most_sample_bytes = std::int64_t{32} << 20;  // of samples.jsonl

  RunOutputs(const Job& job, RunOutputOptions options) : job_(job), options_(std::move(options)) {}
  /// Opens the files, before the first step. E103.
  Status open(const RunFolder&);

  /// Listens to a driver that is made with these options.
  static void observe(const std::shared_ptr<RunOutputs>&, DriverOptions&);
  /// Writes the lines of a step that has ended (RunOptions::on_step_end). E103.
  Status step_ended(std::int32_t step, RankBackend&, TrainingDriver&);

 private:
  /// The lines of a resumed run's earlier part, where it goes on in another folder.
  Status bring_earlier(const std::filesystem::path&) const;
  Status write_sync(std::int32_t step);
  Status write_samples(std::int32_t step, TrainingDriver&);

  const Job& job_;
  const RunOutputOptions options_;
  std::optional<StepLines> metrics_, lengths_, hashes_, samples_;
  std::string digest_;  // of all verified syncs so far
  bool samples_full_ = false;
  // Of the step that goes on.
  StepMetrics figures_;
  SampleLengths sample_lengths_;
  std::optional<TensorHashes> tensors_;
};

}  // namespace hotbunk
