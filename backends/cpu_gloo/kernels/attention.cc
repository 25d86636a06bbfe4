// Forward: the online softmax of FlashAttention (Dao et al., 2022; Milakov & Gimelshein, 2018) on fp32 tiles.
#include "backends/cpu_gloo/kernels/attention.h"

#include <cmath>
#include <vector>

#include "backends/cpu_gloo/kernels/attention_amx.h"
#include "backends/cpu_gloo/kernels/attention_step.h"
#include "backends/cpu_gloo/kernels/attention_tasks.h"
#include "backends/cpu_gloo/kernels/parallel.h"

namespace hotbunk::kernels {
namespace {

constexpr int kScratchSlot = 3;

template <class E>
void run_task(const AttentionTask& task, const AttentionTile& t, ConstMatrix qkv, HeadShape shape, const Scores& scores,
              Matrix o, float* lse) {
  const std::int64_t d = shape.head_dim, dv = shape.dv(), dp = t.dp;
  const std::int64_t group = shape.num_heads / shape.num_kv_heads;
  const std::int64_t keys = std::min(task.length, task.last_block * kBlock);
  const E* first = row<E>(qkv, task.begin);
  pack_transposed(first + shape.k_offset() + task.kv_head * d, qkv.ld, keys, d, t.k_t);
  pack_rows(first + shape.v_offset() + task.kv_head * dv, qkv.ld, keys, dv, 1.0f, t.v, dp);
  for (std::int64_t head = task.kv_head * group; head < (task.kv_head + 1) * group; ++head) {
    for (std::int64_t block = task.first_block; block < task.last_block; ++block) {
      const std::int64_t token = task.begin + block * kBlock;
      const std::int64_t rows = std::min(kBlock, task.length - block * kBlock);
      pack_rows(row<E>(qkv, token) + head * d, qkv.ld, rows, d, scores.scale, t.q, d);
      const std::int64_t first_seen = scores.first_seen(block * kBlock) / kBlock;
      for (std::int64_t j = first_seen; j <= block; ++j)
        attend_block(t, rows, d, t.k_t + j * kBlock * d, t.v + j * kBlock * dp,
                     seen_keys(scores, block * kBlock, j * kBlock, 1), scores.softcap, j == first_seen);
      for (std::int64_t r = 0; r < rows; ++r) {
        unpack_rows(t.o + r * dp, dp, 1, dv, 1.0f / t.state.sum[r], row<E>(o, token + r) + head * dv, o.ld);
        lse[(token + r) * shape.num_heads + head] = t.state.max[r] + std::log(t.state.sum[r]);
      }
    }
  }
}

}  // namespace

void attention_forward(KernelContext& ctx, ConstMatrix qkv, HeadShape shape, std::span<const std::int32_t> cu_seqlens,
                       Scores scores, Matrix o, float* lse) {
  HB_CHECK(qkv.dtype == o.dtype, "attention: {} to {}", name_of(qkv.dtype), name_of(o.dtype));
  HB_CHECK(scores.scale > 0.0f, "scale {}", scores.scale);  // the largest score is the largest product
  HB_CHECK(shape.num_kv_heads > 0 && shape.num_heads % shape.num_kv_heads == 0, "{} heads over {} kv heads",
           shape.num_heads, shape.num_kv_heads);
  if (scores.is_scaled_alone() && shape.dv() == shape.head_dim &&
      attention_forward_amx(ctx, qkv, shape, cu_seqlens, scores.scale, o, lse))
    return;
  const AttentionTasks work = make_attention_tasks(shape, cu_seqlens, ctx.num_threads(), true);
  const std::int64_t d = shape.head_dim, dp = round_up(shape.dv(), kLanes);
  const std::int64_t share = round_up(AttentionTile::floats(work.longest, d, dp), 1024);
  auto* scratch =
      static_cast<float*>(ctx.scratch(kScratchSlot, static_cast<std::size_t>(share * ctx.num_threads()) * 4));
  with_float_type(qkv.dtype, [&](auto tag) {
    parallel_tasks(ctx, std::ssize(work.tasks), work.worth_team, [&](std::int64_t i, int thread) {
      const AttentionTile tiles(scratch + thread * share, work.longest, d, dp);
      run_task<decltype(tag)>(work.tasks[static_cast<std::size_t>(i)], tiles, qkv, shape, scores, o, lse);
    });
  });
}

}  // namespace hotbunk::kernels
