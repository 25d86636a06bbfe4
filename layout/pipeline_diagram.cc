#include "layout/pipeline_diagram.h"

#include <fmt/format.h>

#include <algorithm>

namespace hotbunk {
namespace {

std::string label_of(const Pipeline& p, const StageTurn& pass) {
  std::string out = std::to_string(pass.micro);
  if (p.chunks > 1) out += static_cast<char>('a' + pass.chunk % 26);
  if (pass.step == StageStep::backward) out += '\'';
  if (pass.step == StageStep::weights) out += '"';
  return out;
}

}  // namespace

std::string pipeline_diagram(const Pipeline& p, std::int64_t micro_batches) {
  const PlayedPipeline played = play_pipeline(p, micro_batches);
  std::size_t unit = 0;
  for (const auto& stage : played.stages)
    for (const PlayedTurn& t : stage)
      if (t.turn.is_pass()) unit = std::max(unit, label_of(p, t.turn).size() + 1);
  const int number = static_cast<int>(std::to_string(p.stages - 1).size());
  std::string out;
  for (std::size_t s = 0; s < played.stages.size(); ++s) {
    std::string line = fmt::format("  stage {:>{}}  ", s, number);
    std::int64_t now = 0;
    for (const PlayedTurn& t : played.stages[s]) {
      if (!t.turn.is_pass()) continue;
      for (; now < t.begin; ++now) line += fmt::format("{:<{}}", ".", unit);
      line += fmt::format("{:<{}}", label_of(p, t.turn), unit * static_cast<std::size_t>(t.end - t.begin));
      now = t.end;
    }
    for (; now < played.units; ++now) line += fmt::format("{:<{}}", ".", unit);
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

}  // namespace hotbunk
