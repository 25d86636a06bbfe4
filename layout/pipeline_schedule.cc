#include "layout/pipeline_schedule.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"

namespace hotbunk {

std::string_view name_of(PipelineSchedule s) {
  constexpr std::string_view names[] = {"1f1b", "gpipe", "zero-bubble"};
  return names[static_cast<std::size_t>(s)];
}

PipelineSchedule schedule_named(std::string_view word) {
  return word == "gpipe"         ? PipelineSchedule::gpipe
         : word == "zero-bubble" ? PipelineSchedule::zero_bubble
                                 : PipelineSchedule::one_f_one_b;
}

Pipeline pipeline_of(const Scenario& s) {
  return {s.train.layout.pp, s.train.layout.vpp, schedule_named(s.train.pipeline_schedule)};
}

namespace {

/// The micro-batch of a pass: interleaved, chunk by chunk through as many micro-batches as there are stages.
std::int64_t micro_of(const Pipeline& p, std::int64_t micro_batches, std::int64_t pass) {
  if (p.chunks == 1) return pass;
  const std::int64_t group = pass / (p.stages * p.chunks), first = group * p.stages;
  return first + pass % (p.stages * p.chunks) % std::min(p.stages, micro_batches - first);
}

}  // namespace

std::vector<PipelineStep> pipeline_steps(const Pipeline& p, std::int64_t stage, std::int64_t micro_batches,
                                         std::int64_t fills) {
  using enum PipelineBlock;
  const std::int64_t passes = micro_batches * p.chunks;
  std::vector<PipelineStep> out;
  const auto add = [&](PipelineBlock block, std::int64_t number, std::int64_t pass) {
    out.push_back({block, number, micro_of(p, micro_batches, pass)});
  };
  if (p.schedule == PipelineSchedule::gpipe) {
    for (const PipelineBlock block : {forward, backward})
      for (std::int64_t i = 0; i < passes; ++i) add(block, 0, i);
    return out;
  }
  HB_CHECK(fills == p.warm_up(0) || passes <= fills, "{} passes through a pipeline of {} fills", passes, fills);
  const std::int64_t own = p.warm_up(stage), filled = std::min(fills, passes);
  const std::int64_t late = std::min(p.defers_weights() ? stage : 0, passes);  // weight gradients
  // What came with the fill of that number is computed at once: interleaved, one more message comes early.
  const bool at_once = own < filled;
  for (std::int64_t k = 0; k < filled; ++k) {
    add(fill, k, k);
    if (k == own) add(forward, 0, own);
  }
  for (std::int64_t i = 0; i < passes; ++i) {
    const std::int64_t left = passes - 1 - i;
    if (i + own < passes && (i > 0 || !at_once)) add(forward, 0, i + own);
    add(left < filled ? drain : backward, left < filled ? left : 0, i);
    out.back().weights = p.defers_weights() && i >= late;
  }
  // Those within a pass count its tokens, so these count the first ones': together each pass once.
  for (std::int64_t i = 0; i < late; ++i) add(weights, 0, i);
  return out;
}

std::vector<PipelineStep> pipeline_blocks(const Pipeline& p, std::int64_t fills) {
  using enum PipelineBlock;
  std::vector<PipelineStep> out = {{.block = begin}};
  for (std::int64_t k = 0; k < fills; ++k) out.push_back({.block = fill, .number = k});
  out.push_back({.block = forward});
  const auto both_forms = [&](PipelineStep s) {
    out.push_back(s);
    s.weights = true;
    if (p.defers_weights()) out.push_back(s);
  };
  both_forms({.block = backward});
  for (std::int64_t k = fills; k-- > 0;) both_forms({.block = drain, .number = k});
  if (p.defers_weights()) out.push_back({.block = weights});
  out.push_back({.block = step});
  return out;
}

std::string_view name_of(PipelineBlock b) {
  constexpr std::string_view names[] = {"begin", "fill", "forward", "backward", "drain", "weights", "step"};
  return names[static_cast<std::size_t>(b)];
}

std::string name_of(const PipelineStep& s) {
  const std::string_view name = name_of(s.block);
  const bool numbered = s.block == PipelineBlock::fill || s.block == PipelineBlock::drain;
  return fmt::format("{}{}{}", name, numbered ? fmt::format(".{}", s.number) : "", s.weights ? ".weights" : "");
}

std::int32_t pipeline_block_index(const Pipeline& p, const PipelineStep& s, std::int64_t fills) {
  const std::int64_t forms = p.defers_weights() ? 2 : 1, form = s.weights ? 1 : 0;
  const auto at = [](std::int64_t index) { return static_cast<std::int32_t>(index); };
  switch (s.block) {
    case PipelineBlock::begin:
      return 0;
    case PipelineBlock::fill:
      return at(1 + s.number);
    case PipelineBlock::forward:
      return at(1 + fills);
    case PipelineBlock::backward:
      return at(2 + fills + form);
    case PipelineBlock::drain:
      return at(2 + fills + forms * (fills - s.number) + form);
    case PipelineBlock::weights:
      return at(2 + fills + forms * (fills + 1));
    case PipelineBlock::step:
      return at(2 + fills + forms * (fills + 1) + (p.defers_weights() ? 1 : 0));
  }
  return -1;
}

}  // namespace hotbunk
