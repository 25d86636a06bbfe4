#include "cli/step_lines.h"

#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/file.h"
#include "rl/training_driver.h"

namespace hotbunk {

EarlierLines earlier_lines(const ResumePoint& from) {
  if (!from.run) return {};
  const std::int64_t step = from.checkpoint.state.step;
  std::error_code ignored;
  // A run that ended has the first, one that was killed the second.
  const bool ended = std::filesystem::exists(from.run->metrics(), ignored);
  return {.metrics = lines_up_to(ended ? from.run->metrics() : from.run->steps_so_far(), step),
          .lengths = lines_up_to(from.run->lengths(), step),
          .sync_hashes = lines_up_to(from.run->sync_hashes(), step)};
}

namespace {

/// At once: a kill between the lines' going and their coming back would lose them.
std::ofstream continued(const std::filesystem::path& path, const std::string& earlier) {
  if (auto s = write_file_atomic(path, earlier); !s) throw RuntimeFailure(render(s.error()));
  return std::ofstream(path, std::ios::app);
}

}  // namespace

StepLines::StepLines(const RunFolder& folder, const EarlierLines& earlier)
    : folder_(folder),
      metrics_(continued(folder.steps_so_far(), earlier.metrics)),
      lengths_(continued(folder.lengths(), earlier.lengths)) {
  if (!earlier.sync_hashes.empty()) sync_hashes_ = continued(folder.sync_hashes(), earlier.sync_hashes);
  // An ended run's own file would be taken for what is known of this one, were it killed.
  std::error_code ignored;
  std::filesystem::remove(folder.metrics(), ignored);
}

void StepLines::add(const StepMetrics& m, const TrainingDriver& driver, DType rollout_dtype) {
  nlohmann::ordered_json line = {{"step", m.step}};
  for (const auto& [name, value] : m.values) line[name] = value;
  metrics_ << line.dump() + '\n' << std::flush;
  lengths_ << lengths_line(m.step, driver.trained_lengths(m.step)) << std::flush;
  const auto hashes = driver.sync_hashes().find(m.step);
  if (hashes == driver.sync_hashes().end()) return;
  if (!sync_hashes_.is_open()) sync_hashes_ = continued(folder_.sync_hashes(), "");
  sync_hashes_ << sync_hashes_line(rollout_dtype, m.step, hashes->second) << std::flush;
}

}  // namespace hotbunk
