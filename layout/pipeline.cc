#include "layout/pipeline.h"

namespace hotbunk {

Result<std::vector<StageChunk>> split_pipeline(const PipelineSplit& split) {
  const auto counts = pipeline_counts(split);
  if (!counts) return fail(counts.error());
  std::vector<StageChunk> chunks;
  std::int64_t begin = 0;
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(counts->size()); ++i) {
    const std::int64_t count = (*counts)[static_cast<std::size_t>(i)];
    chunks.push_back({i % split.stages, i / split.stages, {begin, begin + count}});
    begin += count;
  }
  return chunks;
}

}  // namespace hotbunk
