// Backward of tiled attention: scores are formed again from q, k and the saved log-sum-exp, tile by tile.
//   P = exp(S − lse)   dV += Pᵀ·dO   dP = dO·Vᵀ   dS = P∘(dP − D), D = rowsum(dO∘O)   dK += dSᵀ·Q   dQ += dS·K
#include <cmath>
#include <utility>
#include <vector>

#include "backends/cpu_gloo/kernels/attention.h"
#include "backends/cpu_gloo/kernels/attention_amx.h"
#include "backends/cpu_gloo/kernels/attention_tasks.h"
#include "backends/cpu_gloo/kernels/parallel.h"

namespace hotbunk::kernels {
namespace {

constexpr int kScratchSlot = 3;

/// One thread's buffers for one sequence and kv head; [L][…] are whole sequences.
struct Tiles {
  float *k_t, *v_t;             // [L/kBlock] tiles of [d][kBlock]
  float *k, *dk, *dv;           // [L][dp], dv [L][vp]
  float *q, *d_o, *dq;          // [L][dp], d_o [L][vp], of one query head; q is scaled
  float *lse, *d_rows;          // [L]
  float *p, *ds;                // [kBlock][kBlock]
  std::int64_t d, v_d, dp, vp;  // of keys and of values, and rounded up to whole vectors
  static std::int64_t floats(std::int64_t max_length, const HeadShape& shape) {
    const std::int64_t of_keys = shape.head_dim + 4 * round_up(shape.head_dim, kLanes),
                       of_values = shape.dv() + 2 * round_up(shape.dv(), kLanes);
    return round_up(max_length, kBlock) * (of_keys + of_values + 2) + 2 * kBlock * kBlock;
  }
  Tiles(float* base, std::int64_t max_length, const HeadShape& shape)
      : d(shape.head_dim), v_d(shape.dv()), dp(round_up(d, kLanes)), vp(round_up(v_d, kLanes)) {
    const std::int64_t length = round_up(max_length, kBlock);
    const auto take = [&](std::int64_t n) { return std::exchange(base, base + n); };
    k_t = take(length * d), v_t = take(length * v_d), p = take(kBlock * kBlock), ds = take(kBlock * kBlock);
    k = take(length * dp), dk = take(length * dp), dv = take(length * vp);
    q = take(length * dp), d_o = take(length * vp), dq = take(length * dp);
    lse = take(length), d_rows = take(length);
  }
};

/// Keys of tile j against the queries of tile i ≥ j.
void tile_pair(const Tiles& t, std::int64_t i, std::int64_t j, std::int64_t rows, const Scores& scores) {
  const bool diagonal = i == j;
  const std::int64_t d = t.d, v_d = t.v_d, dp = t.dp, vp = t.vp;
  const float* q = t.q + i * kBlock * dp;
  const float* d_o = t.d_o + i * kBlock * vp;
  const float* k_t = t.k_t + j * kBlock * d;
  const float* v_t = t.v_t + j * kBlock * v_d;
  for_row_groups(rows, diagonal, [&](std::int64_t r0, std::int64_t n, std::int64_t keys) {
    const std::int64_t width = round_up(keys, kLanes);
    float* p = t.p + r0 * kBlock;
    float* ds = t.ds + r0 * kBlock;
    gemm_small(n, width, d, q + r0 * dp, dp, 1, k_t, kBlock, p, kBlock, false);
    gemm_small(n, width, v_d, d_o + r0 * vp, vp, 1, v_t, kBlock, ds, kBlock, false);
    for (std::int64_t r = 0; r < n; ++r) {
      const std::int64_t token = i * kBlock + r0 + r;
      const std::int64_t hidden = std::clamp<std::int64_t>(scores.first_seen(token) - j * kBlock, 0, width),
                         visible = diagonal ? r0 + r + 1 : width;
      if (scores.softcap > 0.0f)
        capped_probabilities_row(p + r * kBlock, ds + r * kBlock, hidden, visible, width, t.lse[token], t.d_rows[token],
                                 scores.softcap);
      else probabilities_row(p + r * kBlock, ds + r * kBlock, hidden, visible, width, t.lse[token], t.d_rows[token]);
    }
    gemm_small(n, dp, keys, ds, kBlock, 1, t.k + j * kBlock * dp, dp, t.dq + (i * kBlock + r0) * dp, dp, true);
  });
  float* dk = t.dk + j * kBlock * dp;
  float* dv = t.dv + j * kBlock * vp;
  const std::int64_t keys = diagonal ? rows : kBlock;
  for (std::int64_t c0 = 0; c0 < keys; c0 += diagonal ? kGroup : kBlock) {  // on the diagonal, only rows from c0 on
    const std::int64_t n = std::min(diagonal ? kGroup : kBlock, keys - c0);
    const std::int64_t r0 = diagonal ? c0 : 0;
    const float* p = t.p + r0 * kBlock + c0;
    const float* ds = t.ds + r0 * kBlock + c0;
    gemm_small(n, vp, rows - r0, p, 1, kBlock, d_o + r0 * vp, vp, dv + c0 * vp, vp, true);
    gemm_small(n, dp, rows - r0, ds, 1, kBlock, q + r0 * dp, dp, dk + c0 * dp, dp, true);
  }
}

struct Operands {
  ConstMatrix qkv, o, d_o;
  const float* lse;
  Matrix dqkv;
  HeadShape shape;
  Scores scores;
};

template <class E>
void run_pair(const Operands& x, const Tiles& t, std::int64_t begin, std::int64_t length, std::int64_t kv_head) {
  const std::int64_t d = t.d, v_d = t.v_d, dp = t.dp, vp = t.vp;
  const std::int64_t group = x.shape.num_heads / x.shape.num_kv_heads;
  const std::int64_t blocks = (length + kBlock - 1) / kBlock;
  const std::int64_t k_column = x.shape.k_offset() + kv_head * d, v_column = x.shape.v_offset() + kv_head * v_d;
  const E* first = row<E>(x.qkv, begin);
  pack_transposed(first + k_column, x.qkv.ld, length, d, t.k_t);
  pack_transposed(first + v_column, x.qkv.ld, length, v_d, t.v_t);
  pack_rows(first + k_column, x.qkv.ld, length, d, 1.0f, t.k, dp);
  std::fill_n(t.dk, length * dp, 0.0f);
  std::fill_n(t.dv, length * vp, 0.0f);
  for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const E* d_o = row<E>(x.d_o, begin) + head * v_d;
    pack_rows(first + head * d, x.qkv.ld, length, d, x.scores.scale, t.q, dp);
    pack_rows(d_o, x.d_o.ld, length, v_d, 1.0f, t.d_o, vp);
    std::fill_n(t.dq, length * dp, 0.0f);
    for (std::int64_t r = 0; r < length; ++r) {
      t.d_rows[r] = dot(d_o + r * x.d_o.ld, row<E>(x.o, begin + r) + head * v_d, v_d);
      t.lse[r] = x.lse[(begin + r) * x.shape.num_heads + head];
    }
    for (std::int64_t j = 0; j < blocks; ++j)
      for (std::int64_t i = j; i < blocks && x.scores.first_seen(i * kBlock) < (j + 1) * kBlock; ++i)
        tile_pair(t, i, j, std::min(kBlock, length - i * kBlock), x.scores);
    unpack_rows(t.dq, dp, length, d, x.scores.scale, row<E>(x.dqkv, begin) + head * d, x.dqkv.ld);
  }
  unpack_rows(t.dk, dp, length, d, 1.0f, row<E>(x.dqkv, begin) + k_column, x.dqkv.ld);
  unpack_rows(t.dv, vp, length, v_d, 1.0f, row<E>(x.dqkv, begin) + v_column, x.dqkv.ld);
}

}  // namespace

void attention_backward(KernelContext& ctx, ConstMatrix qkv, ConstMatrix o, ConstMatrix d_o, const float* lse,
                        HeadShape shape, std::span<const std::int32_t> cu_seqlens, Scores scores, Matrix dqkv) {
  HB_CHECK(qkv.dtype == o.dtype && qkv.dtype == d_o.dtype && qkv.dtype == dqkv.dtype,
           "attention_backward: mixed dtypes");
  HB_CHECK(shape.num_kv_heads > 0 && shape.num_heads % shape.num_kv_heads == 0, "{} heads over {} kv heads",
           shape.num_heads, shape.num_kv_heads);
  if (scores.is_scaled_alone() && shape.dv() == shape.head_dim &&
      attention_backward_amx(ctx, qkv, o, d_o, lse, shape, cu_seqlens, scores.scale, dqkv))
    return;
  const AttentionTasks work = make_attention_tasks(shape, cu_seqlens, ctx.num_threads(), false);
  const std::int64_t share = round_up(Tiles::floats(work.longest, shape), 1024);
  auto* scratch =
      static_cast<float*>(ctx.scratch(kScratchSlot, static_cast<std::size_t>(share * ctx.num_threads()) * 4));
  const Operands operands{qkv, o, d_o, lse, dqkv, shape, scores};
  with_float_type(qkv.dtype, [&](auto tag) {
    parallel_tasks(ctx, std::ssize(work.tasks), work.worth_team, [&](std::int64_t i, int thread) {
      const AttentionTask& task = work.tasks[static_cast<std::size_t>(i)];
      const Tiles tiles(scratch + thread * share, work.longest, shape);
      run_pair<decltype(tag)>(operands, tiles, task.begin, task.length, task.kv_head);
    });
  });
}

}  // namespace hotbunk::kernels
