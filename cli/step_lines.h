// What a run knows of its finished steps, on disk while it goes on: a line per step and file. A killed run leaves them,
// a resumed one goes on behind the lines of the steps that it does not run again.
#pragma once
#include <fstream>
#include <string>
#include <vector>

#include "cli/command.h"
#include "cli/resume.h"

namespace hotbunk {

class TrainingDriver;

/// Lines of the steps before a resumed run's first.
struct EarlierLines {
  std::string metrics, lengths, sync_hashes;
};
/// Of the run folder of the checkpoint; empty where there is none.
EarlierLines earlier_lines(const ResumePoint&);

class StepLines {
 public:
  /// Writes the earlier lines; what the files held else is gone.
  StepLines(const RunFolder&, const EarlierLines&);
  /// A step is done. Its lines reach the files now, so `tail -f` follows a run.
  void add(const StepMetrics&, const TrainingDriver&, DType rollout_dtype);

 private:
  RunFolder folder_;
  std::ofstream metrics_, lengths_, sync_hashes_;  // the last is open once there is a hash
};

}  // namespace hotbunk
