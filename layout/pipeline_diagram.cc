#include "layout/pipeline_diagram.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "base/check.h"

namespace hotbunk {
namespace {

/// The passes of one stage in its order, without times.
std::vector<PlayedPass> passes_of(const Pipeline& p, std::int64_t stage, std::int64_t micro_batches) {
  using enum PipelineBlock;
  std::vector<PlayedPass> out;
  std::int64_t forwards = 0, backwards = 0, gradients = 0;
  const auto chunk_of = [&](std::int64_t pass) {
    const std::int64_t row = p.stages * p.chunks, first = pass / row * p.stages;
    return pass % row / std::min(p.stages, micro_batches - first);
  };
  for (const PipelineStep& s : pipeline_steps(p, stage, micro_batches, p.fills(micro_batches * p.chunks))) {
    const bool ahead = s.block == fill && s.number < p.warm_up(stage);
    if (s.block == forward || ahead) out.push_back({forward, s.micro, chunk_of(forwards++)});
    if (s.block == backward || s.block == drain)
      out.push_back({backward, s.micro, p.chunks - 1 - chunk_of(backwards++)});
    if (s.weights || s.block == weights) out.push_back({weights, gradients++, 0});
  }
  return out;
}

using Key = std::tuple<PipelineBlock, std::int64_t, std::int64_t, std::int64_t>;  // and stage, chunk, micro-batch

/// What has to be over before a pass begins, on other stages and on its own.
std::vector<Key> needs(const Pipeline& p, std::int64_t stage, const PlayedPass& pass) {
  using enum PipelineBlock;
  const bool first = stage == 0, last = stage + 1 == p.stages;
  switch (pass.what) {
    case forward:
      if (!first) return {{forward, stage - 1, pass.chunk, pass.micro}};
      if (pass.chunk > 0) return {{forward, p.stages - 1, pass.chunk - 1, pass.micro}};
      return {};
    case backward:
      if (!last) return {{backward, stage + 1, pass.chunk, pass.micro}};
      if (pass.chunk + 1 < p.chunks) return {{backward, 0, pass.chunk + 1, pass.micro}};
      return {{forward, stage, pass.chunk, pass.micro}};
    default:
      return {{backward, stage, pass.chunk, pass.micro}};
  }
}

std::string label_of(const Pipeline& p, const PlayedPass& pass) {
  std::string out = std::to_string(pass.micro);
  if (p.chunks > 1) out += static_cast<char>('a' + pass.chunk % 26);
  if (pass.what == PipelineBlock::backward) out += '\'';
  if (pass.what == PipelineBlock::weights) out += '"';
  return out;
}

}  // namespace

PlayedPipeline play_pipeline(const Pipeline& p, std::int64_t micro_batches) {
  PlayedPipeline out;
  for (std::int64_t s = 0; s < p.stages; ++s) out.stages.push_back(passes_of(p, s, micro_batches));
  const auto units_of = [&](const PlayedPass& pass) {
    return pass.what == PipelineBlock::backward && !p.defers_weights() ? 2 : 1;
  };
  std::map<Key, std::int64_t> ended;
  std::vector<std::size_t> at(out.stages.size(), 0);
  std::vector<std::int64_t> now(out.stages.size(), 0);
  std::int64_t worked = 0;
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t s = 0; s < out.stages.size(); ++s)
      for (; at[s] < out.stages[s].size(); ++at[s], moved = true) {
        PlayedPass& pass = out.stages[s][at[s]];
        std::int64_t begin = now[s];
        bool ready = true;
        for (const Key& need : needs(p, static_cast<std::int64_t>(s), pass)) {
          const auto found = ended.find(need);
          ready = ready && found != ended.end();
          if (ready) begin = std::max(begin, found->second);
        }
        if (!ready) break;
        pass.begin = begin, pass.end = now[s] = begin + units_of(pass);
        worked += units_of(pass);
        ended[{pass.what, static_cast<std::int64_t>(s), pass.chunk, pass.micro}] = pass.end;
        out.units = std::max(out.units, pass.end);
      }
  }
  for (std::size_t s = 0; s < out.stages.size(); ++s)
    HB_CHECK(at[s] == out.stages[s].size(), "stage {} of {} waits for ever", s, p.stages);
  if (out.units > 0) out.bubble = 1.0 - static_cast<double>(worked) / static_cast<double>(out.units * p.stages);
  return out;
}

std::string pipeline_diagram(const Pipeline& p, std::int64_t micro_batches) {
  const PlayedPipeline played = play_pipeline(p, micro_batches);
  std::size_t unit = 0;
  for (const auto& stage : played.stages)
    for (const PlayedPass& pass : stage) unit = std::max(unit, label_of(p, pass).size() + 1);
  const int number = static_cast<int>(std::to_string(p.stages - 1).size());
  std::string out;
  for (std::size_t s = 0; s < played.stages.size(); ++s) {
    std::string line = fmt::format("  stage {:>{}}  ", s, number);
    std::int64_t now = 0;
    for (const PlayedPass& pass : played.stages[s]) {
      for (; now < pass.begin; ++now) line += fmt::format("{:<{}}", ".", unit);
      line += fmt::format("{:<{}}", label_of(p, pass), unit * static_cast<std::size_t>(pass.end - pass.begin));
      now = pass.end;
    }
    for (; now < played.units; ++now) line += fmt::format("{:<{}}", ".", unit);
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

}  // namespace hotbunk
