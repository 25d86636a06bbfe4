// What a user sees of a run while it goes on: a line per step on stderr. A terminal shows the latest in place, never
// wider than it is; a pipe or a file gets the first, about a hundred in between and the last.
#pragma once
#include <cstdint>
#include <string>

#include "reports/metrics_jsonl.h"

namespace hotbunk {

class RunConsole {
 public:
  RunConsole(const Scenario&, std::int32_t first_step, bool terminal);

  /// "step 12/110  0.085 s  1,204 tokens/s  reward 0.0566  response 4.0  loss -0.0346  grad norm 0.772  memory 5.1 MiB
  /// 8 s left". tokens/s of all ranks; response: mean tokens; memory: highest live bytes of the rank's device so far.
  /// What a run does not have is left out. width > 0: fields go, the less important first, until the line is as short.
  std::string line(const StepFigures&, int width = 0) const;
  /// Prints it, where its turn is.
  void show(const StepFigures&);

 private:
  bool shown_in_pipe(std::int32_t step) const;

  const Scenario& scenario_;
  const std::int32_t first_step_;
  const bool terminal_;
  double pace_s_ = 0.0;  // seconds of a step, the latest ones weighing most
};

}  // namespace hotbunk
