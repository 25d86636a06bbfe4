#include "spec/pipeline_split.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <numeric>
#include <string>
#include <utility>

namespace hotbunk {
namespace {

using Counts = std::vector<std::int64_t>;  // layers per virtual stage, in model order

auto refuse_split(std::string message, std::string note, std::string help) {
  return fail(Diagnostic{"E244", std::move(message), {}, {std::move(note)}, std::move(help)});
}

constexpr const char* help_custom = "give the layers of every stage as a list: train.pipeline_split";

Result<Counts> custom_counts(const PipelineSplit& split) {
  const std::int64_t wanted = split.stages * split.chunks;
  const std::int64_t total = std::accumulate(split.custom.begin(), split.custom.end(), std::int64_t{0});
  if (static_cast<std::int64_t>(split.custom.size()) != wanted || total != split.layers) {
    return refuse_split(
        "the list of layers per stage does not fit the model",
        fmt::format("{} entries [{}] with {} layers in all; wanted: {} stages x {} chunks = {} entries, {} layers",
                    split.custom.size(), fmt::join(split.custom, ", "), total, split.stages, split.chunks, wanted,
                    split.layers),
        "one entry per stage and chunk, in model order");
  }
  return split.custom;
}

// Embedding and loss stand for one layer each on the first and the last virtual stage.
Result<Counts> balanced_counts(const PipelineSplit& split) {
  const std::int64_t parts = split.stages * split.chunks;
  const std::int64_t extra = (split.account_for_embedding ? 1 : 0) + (split.account_for_loss ? 1 : 0);
  const std::int64_t total = split.layers + extra;
  if (total % parts) {
    return refuse_split("the layers do not divide over the pipeline",
                        fmt::format("{} layers + {} for embedding and loss = {}; {} stages x {} chunks = {}",
                                    split.layers, extra, total, split.stages, split.chunks, parts),
                        help_custom);
  }
  Counts counts(static_cast<std::size_t>(parts), total / parts);
  if (split.account_for_embedding) --counts.front();
  if (split.account_for_loss) --counts.back();
  return counts;
}

// The first and last stage as asked, the stages between them equal; each stage's layers spread evenly over its chunks.
Result<Counts> uneven_counts(const PipelineSplit& split) {
  const std::int64_t first = split.first.value_or(0), last = split.last.value_or(0);
  const std::int64_t between = split.stages - (split.first ? 1 : 0) - (split.last ? 1 : 0);
  const std::int64_t remaining = split.layers - first - last;
  const bool balanced = between > 0 ? remaining > 0 && remaining % between == 0 : remaining == 0 && between == 0;
  const std::int64_t middle = balanced && between > 0 ? remaining / between : 0;
  if (!balanced || first % split.chunks || last % split.chunks || middle % split.chunks) {
    return refuse_split("an uneven first or last stage leaves layers that do not divide",
                        fmt::format("{} layers - {} first - {} last = {} for {} stages of {} chunks", split.layers,
                                    first, last, remaining, between, split.chunks),
                        help_custom);
  }
  Counts counts;
  for (std::int64_t chunk = 0; chunk < split.chunks; ++chunk) {
    for (std::int64_t stage = 0; stage < split.stages; ++stage) {
      const bool is_first = stage == 0 && split.first, is_last = stage == split.stages - 1 && split.last;
      counts.push_back((is_first ? first : is_last ? last : middle) / split.chunks);
    }
  }
  return counts;
}

Result<Counts> counts_of(const PipelineSplit& split) {
  const bool uneven = split.first || split.last;
  const bool accounted = split.account_for_embedding || split.account_for_loss;
  if (split.stages < 1 || split.chunks < 1 || split.layers < 1) {
    return refuse_split("a pipeline needs layers, stages and chunks",
                        fmt::format("{} layers, {} stages, {} chunks", split.layers, split.stages, split.chunks), "");
  }
  if ((uneven ? 1 : 0) + (accounted ? 1 : 0) + (split.custom.empty() ? 0 : 1) > 1) {
    return refuse_split(
        "the pipeline split is asked for in two ways",
        "train.num_layers_in_first/last_pipeline_stage, train.account_for_embedding/loss_in_pipeline_split and "
        "train.pipeline_split exclude one another",
        "keep one of them");
  }
  if (!split.custom.empty()) return custom_counts(split);
  return uneven ? uneven_counts(split) : balanced_counts(split);
}

}  // namespace

Result<std::vector<std::int64_t>> pipeline_counts(const PipelineSplit& split) {
  Result<Counts> counts = counts_of(split);
  if (!counts) return counts;
  for (std::size_t i = 0; i < counts->size(); ++i)
    if ((*counts)[i] < 0)
      return refuse_split("a pipeline stage with a negative number of layers",
                          fmt::format("virtual stage {} of [{}]", i, fmt::join(*counts, ", ")), "");
  return counts;
}

PipelineSplit pipeline_split_of(const Scenario& s) {
  const auto asked = [](std::int64_t layers) { return layers > 0 ? std::optional(layers) : std::nullopt; };
  const TrainSpec& t = s.train;
  return {.layers = s.model.layers,
          .stages = t.layout.pp,
          .chunks = t.layout.vpp,
          .first = asked(t.first_stage_layers),
          .last = asked(t.last_stage_layers),
          .custom = t.pipeline_split,
          .account_for_embedding = t.account_for_embedding,
          .account_for_loss = t.account_for_loss};
}

std::vector<std::int64_t> split_layers(const Scenario& s) {
  if (is_even(s.train)) return {};
  const auto counts = pipeline_counts(pipeline_split_of(s));
  return counts ? *counts : s.train.pipeline_split;
}

bool is_even(const TrainSpec& t) {
  return t.pipeline_split.empty() && t.first_stage_layers == 0 && t.last_stage_layers == 0 &&
         !t.account_for_embedding && !t.account_for_loss;
}

void set_split(TrainSpec& t, std::vector<std::int64_t> layers) {
  t.pipeline_split = std::move(layers);
  t.first_stage_layers = t.last_stage_layers = 0;
  t.account_for_embedding = t.account_for_loss = false;
}

}  // namespace hotbunk
