// How attention's forward is cut into tasks for threads. Internal to the kernels.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "backends/cpu_gloo/kernels/attention_tiles.h"
#include "backends/cpu_gloo/kernels/heads.h"

namespace hotbunk::kernels {

/// The query tiles [first_block, last_block) of one sequence and one kv head.
struct AttentionTask {
  std::int64_t begin = 0;   // first token of the sequence
  std::int64_t length = 0;  // of the sequence
  std::int64_t kv_head = 0;
  std::int64_t first_block = 0;
  std::int64_t last_block = 0;
};

struct AttentionTasks {
  std::vector<AttentionTask> tasks;
  std::int64_t longest = 0;  // sequence
  bool worth_team = false;
};

/// Whole (sequence, kv head) pairs where there are enough of them; few long sequences have their queries cut, at the
/// price of packing the same keys more than once. Results do not depend on the cut.
inline AttentionTasks make_attention_tasks(const HeadShape& shape, std::span<const std::int32_t> cu_seqlens,
                                           int num_threads, bool cut_queries) {
  AttentionTasks out;
  std::int64_t pairs = 0, work = 0;
  for (std::size_t s = 0; s + 1 < cu_seqlens.size(); ++s) {
    const std::int64_t length = cu_seqlens[s + 1] - cu_seqlens[s];
    pairs += (length > 0) * shape.num_kv_heads;
    work += length * length;
    out.longest = std::max(out.longest, length);
  }
  out.worth_team = work > 256;
  if (pairs == 0) return out;
  const std::int64_t pieces = cut_queries ? (4 * num_threads + pairs - 1) / pairs : 1;
  for (std::size_t s = 0; s + 1 < cu_seqlens.size(); ++s) {
    const std::int64_t length = cu_seqlens[s + 1] - cu_seqlens[s];
    const std::int64_t blocks = (length + kBlock - 1) / kBlock;
    const std::int64_t step = std::max<std::int64_t>(1, (blocks + pieces - 1) / pieces);
    for (std::int64_t k = 0; k < shape.num_kv_heads; ++k)
      for (std::int64_t b = 0; b < blocks; b += step)
        out.tasks.push_back({cu_seqlens[s], length, k, b, std::min(blocks, b + step)});
  }
  return out;
}

}  // namespace hotbunk::kernels
