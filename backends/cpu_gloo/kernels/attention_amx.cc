#include "backends/cpu_gloo/kernels/attention_amx.h"

#include "backends/cpu_gloo/kernels/amx.h"

#if defined(HOTBUNK_HAS_AMX)
#include <cmath>
#include <utility>

#include "backends/cpu_gloo/kernels/attention_tasks.h"
#include "backends/cpu_gloo/kernels/gemm.h"
#include "backends/cpu_gloo/kernels/parallel.h"

namespace hotbunk::kernels {
namespace {

using amx::Pair;

constexpr int kScratchSlot = 3;

bool applies(DType dtype, const HeadShape& shape) {
  return dtype == DType::bf16 && shape.head_dim % 32 == 0 && bf16_products() == Bf16Products::amx && amx::request();
}

/// The hardware's rounding to bf16 (it flushes denormals: weights that small are zero to every sum they enter).
HB_INLINE Vh rounded(Vf x) { return std::bit_cast<Vh>(_mm512_cvtneps_pbh(std::bit_cast<__m512>(x))); }
HB_INLINE void store_bits(bf16* p, Vh bits) { std::memcpy(static_cast<void*>(p), &bits, sizeof bits); }

/// Carves 64-byte aligned arrays from a thread's scratch memory; with a null base it only counts.
class Carver {
 public:
  explicit Carver(char* base) : base_(base) {}
  template <class T>
  T* take(std::int64_t n) {
    const std::int64_t at = std::exchange(used_, used_ + round_up(n * static_cast<std::int64_t>(sizeof(T)), 64));
    return base_ ? reinterpret_cast<T*>(base_ + at) : nullptr;
  }
  std::int64_t used() const { return used_; }

 private:
  char* base_;
  std::int64_t used_ = 0;
};

struct ForwardTiles {
  Pair* k;  // [L/64] tiles [d/2][64]: pairs of dimensions
  Pair* v;  // [L/2][d]: pairs of tokens
  bf16 *q, *rows, *p;
  float *s, *o;
  SoftmaxState state;
  ForwardTiles(Carver& c, std::int64_t length, std::int64_t d)
      : k(c.take<Pair>(length * d / 2)),
        v(c.take<Pair>(length * d / 2)),
        q(c.take<bf16>(kBlock * d)),
        rows(c.take<bf16>(kBlock * d)),
        p(c.take<bf16>(kBlock * kBlock)),
        s(c.take<float>(kBlock * kBlock)),
        o(c.take<float>(kBlock * d)),
        state{c.take<float>(kBlock), c.take<float>(kBlock), c.take<float>(kBlock)} {}
};

void query_tile(const ForwardTiles& t, std::int64_t block, std::int64_t rows, std::int64_t d, float scale) {
  t.state.reset();
  for (std::int64_t j = 0; j <= block; ++j) {
    amx::gemm(kBlock, kBlock, d, t.q, d, t.k + j * d / 2 * kBlock, kBlock, t.s, kBlock, false);
    for (std::int64_t r0 = 0; r0 < rows; r0 += kLanes) {
      bf16* p = t.p + r0 * kBlock;
      softmax_step(t.s + r0 * kBlock, r0, kLanes, kBlock, {SeenKeys::from_first, j == block ? r0 + 1 : kBlock, 1},
                   scale, t.state, [&](std::int64_t r, std::int64_t c, Vf x) HB_FORCE_INLINE {
                     store_bits(p + r * kBlock + c, rounded(x));
                   });
    }
    if (j > 0) shrink_rows(t.state.shrink, t.o, rows, d);
    amx::gemm(kBlock, d, kBlock, t.p, kBlock, t.v + j * kBlock / 2 * d, d, t.o, d, j > 0);
  }
}

void forward_task(const AttentionTask& task, const ForwardTiles& t, ConstMatrix qkv, const HeadShape& shape,
                  float scale, Matrix o, float* lse) {
  const amx::Tiles tiles;
  const std::int64_t d = shape.head_dim, group = shape.num_heads / shape.num_kv_heads;
  std::fill_n(t.p, kBlock * kBlock, bf16{});  // rows past the last token stay zero
  for (std::int64_t j = 0; j < task.last_block; ++j) {
    const bf16* first = row<bf16>(qkv, task.begin + j * kBlock) + task.kv_head * d;
    const std::int64_t n = std::min(kBlock, task.length - j * kBlock);
    amx::pack_rows(first + shape.k_offset(), qkv.ld, n, kBlock, d, t.rows);
    amx::pair_columns(t.rows, kBlock, d, t.k + j * d / 2 * kBlock, kBlock);
    amx::pack_rows(first + shape.v_offset(), qkv.ld, n, kBlock, d, t.rows);
    amx::pair_rows(t.rows, kBlock, d, t.v + j * kBlock / 2 * d);
  }
  for (std::int64_t head = task.kv_head * group; head < (task.kv_head + 1) * group; ++head)
    for (std::int64_t block = task.first_block; block < task.last_block; ++block) {
      const std::int64_t token = task.begin + block * kBlock;
      const std::int64_t rows = std::min(kBlock, task.length - block * kBlock);
      amx::pack_rows(row<bf16>(qkv, token) + head * d, qkv.ld, rows, kBlock, d, t.q);
      query_tile(t, block, rows, d, scale);
      for (std::int64_t r = 0; r < rows; ++r) {
        unpack_rows(t.o + r * d, d, 1, d, 1.0f / t.state.sum[r], row<bf16>(o, token + r) + head * d, o.ld);
        lse[(token + r) * shape.num_heads + head] = t.state.max[r] + std::log(t.state.sum[r]);
      }
    }
}

/// Backward works on transposed scores, [keys][queries]: log-sum-exp and D are then vectors along a row, Pᵀ and dSᵀ
/// are left operands as they stand, and dQᵀ = Kᵀ·dSᵀ needs dSᵀ only as pairs of rows.
struct BackwardTiles {
  bf16 *k, *v, *k_t;             // [L][d], [L][d], [L/64] tiles [d][64]
  float *dk, *dv;                // [L][d]
  bf16 *q, *d_o;                 // [L][d], of one query head
  Pair *q_columns, *do_columns;  // [L/64] tiles [d/2][64]
  Pair *q_rows, *do_rows;        // [L/2][d]
  float* dq_t;                   // [L/64] tiles [d][64]
  float *lse, *d_rows;           // [L]
  float *s, *dp;                 // [64 keys][64 queries]
  bf16 *p, *ds;
  Pair* ds_rows;  // [32][64]
  BackwardTiles(Carver& c, std::int64_t length, std::int64_t d)
      : k(c.take<bf16>(length * d)),
        v(c.take<bf16>(length * d)),
        k_t(c.take<bf16>(length * d)),
        dk(c.take<float>(length * d)),
        dv(c.take<float>(length * d)),
        q(c.take<bf16>(length * d)),
        d_o(c.take<bf16>(length * d)),
        q_columns(c.take<Pair>(length * d / 2)),
        do_columns(c.take<Pair>(length * d / 2)),
        q_rows(c.take<Pair>(length * d / 2)),
        do_rows(c.take<Pair>(length * d / 2)),
        dq_t(c.take<float>(length * d)),
        lse(c.take<float>(length)),
        d_rows(c.take<float>(length)),
        s(c.take<float>(kBlock * kBlock)),
        dp(c.take<float>(kBlock * kBlock)),
        p(c.take<bf16>(kBlock * kBlock)),
        ds(c.take<bf16>(kBlock * kBlock)),
        ds_rows(c.take<Pair>(kBlock * kBlock / 2)) {}
};

/// Pᵀ and dSᵀ (times scale) of one tile, rounded to bf16, from scores and dP; zero where the key is after the query.
void weights_tile(const BackwardTiles& t, const float* lse, const float* d_rows, bool diagonal, float scale) {
  for (std::int64_t key = 0; key < kBlock; key += 2)
    for (std::int64_t i = 0; i < kBlock; i += kLanes) {
      const Vf shift = load(lse + i), mean = load(d_rows + i);
      Vh ds[2];
      for (std::int64_t odd = 0; odd < 2; ++odd) {
        const std::int64_t at = (key + odd) * kBlock + i;
        Vf p = exp(load(t.s + at) * scale - shift);
        if (diagonal)
          p = lane_numbers() + static_cast<std::int32_t>(i) < static_cast<std::int32_t>(key + odd) ? Vf{} : p;
        store_bits(t.p + at, rounded(p));
        ds[odd] = rounded(p * (load(t.dp + at) - mean) * scale);
        store_bits(t.ds + at, ds[odd]);
      }
      amx::store_pairs(t.ds_rows + key / 2 * kBlock + i, ds[0], ds[1]);
    }
}

void tile_pair(const BackwardTiles& t, std::int64_t i, std::int64_t j, std::int64_t d, float scale) {
  const std::int64_t keys = j * kBlock * d, queries = i * kBlock * d;  // offsets of the tiles
  amx::gemm(kBlock, kBlock, d, t.k + keys, d, t.q_columns + queries / 2, kBlock, t.s, kBlock, false);
  amx::gemm(kBlock, kBlock, d, t.v + keys, d, t.do_columns + queries / 2, kBlock, t.dp, kBlock, false);
  weights_tile(t, t.lse + i * kBlock, t.d_rows + i * kBlock, i == j, scale);
  amx::gemm(kBlock, d, kBlock, t.p, kBlock, t.do_rows + queries / 2, d, t.dv + keys, d, true);
  amx::gemm(kBlock, d, kBlock, t.ds, kBlock, t.q_rows + queries / 2, d, t.dk + keys, d, true);
  amx::gemm(d, kBlock, kBlock, t.k_t + keys, kBlock, t.ds_rows, kBlock, t.dq_t + queries, kBlock, true);
}

struct BackwardOperands {
  ConstMatrix qkv, o, d_o;
  const float* lse;
  Matrix dqkv;
  HeadShape shape;
  float scale;
};

/// Packs one query head of the sequence (queries, d_o, D and log-sum-exp) and clears its dQ.
void pack_head(const BackwardOperands& x, const BackwardTiles& t, std::int64_t begin, std::int64_t length,
               std::int64_t head) {
  const std::int64_t d = x.shape.head_dim, padded = round_up(length, kBlock);
  const bf16* d_o = row<bf16>(x.d_o, begin) + head * d;
  amx::pack_rows(row<bf16>(x.qkv, begin) + head * d, x.qkv.ld, length, padded, d, t.q);
  amx::pack_rows(d_o, x.d_o.ld, length, padded, d, t.d_o);
  for (std::int64_t at = 0; at < padded * d; at += kBlock * d) {
    amx::pair_columns(t.q + at, kBlock, d, t.q_columns + at / 2, kBlock);
    amx::pair_columns(t.d_o + at, kBlock, d, t.do_columns + at / 2, kBlock);
  }
  amx::pair_rows(t.q, padded, d, t.q_rows);
  amx::pair_rows(t.d_o, padded, d, t.do_rows);
  std::fill_n(t.dq_t, padded * d, 0.0f);
  std::fill_n(t.lse + length, padded - length, 0.0f);  // padding: p = 1 meets d_o = 0 and dp − D = 0
  std::fill_n(t.d_rows + length, padded - length, 0.0f);
  for (std::int64_t r = 0; r < length; ++r) {
    const bf16* o = row<bf16>(x.o, begin + r) + head * d;
    Vf sum{};
    for (std::int64_t c = 0; c < d; c += kLanes) sum += load(o + c) * load(t.d_o + r * d + c);
    t.d_rows[r] = sum_lanes(sum);
    t.lse[r] = x.lse[(begin + r) * x.shape.num_heads + head];
  }
}

/// dq[length][d] (row stride ld) from the transposed tiles.
void unpack_transposed(const float* dq_t, std::int64_t length, std::int64_t d, bf16* dq, std::int64_t ld) {
  for (std::int64_t r0 = 0; r0 < length; r0 += kLanes)
    for (std::int64_t c0 = 0; c0 < d; c0 += kLanes) {
      const float* tile = dq_t + (r0 / kBlock * d + c0) * kBlock + r0 % kBlock;
      Vf rows[kLanes];
      for (int c = 0; c < kLanes; ++c) rows[c] = load(tile + c * kBlock);
      transpose(rows);
      for (std::int64_t r = 0; r < std::min<std::int64_t>(kLanes, length - r0); ++r)
        store(dq + (r0 + r) * ld + c0, rows[r]);
    }
}

void backward_task(const BackwardOperands& x, const BackwardTiles& t, const AttentionTask& task) {
  const amx::Tiles tiles;
  const std::int64_t d = x.shape.head_dim, group = x.shape.num_heads / x.shape.num_kv_heads;
  const std::int64_t length = task.length, padded = round_up(length, kBlock), blocks = padded / kBlock;
  const std::int64_t k_column = x.shape.k_offset() + task.kv_head * d;
  const std::int64_t v_column = x.shape.v_offset() + task.kv_head * d;
  const bf16* first = row<bf16>(x.qkv, task.begin);
  bf16* out = row<bf16>(x.dqkv, task.begin);
  amx::pack_rows(first + k_column, x.qkv.ld, length, padded, d, t.k);
  amx::pack_rows(first + v_column, x.qkv.ld, length, padded, d, t.v);
  for (std::int64_t at = 0; at < padded * d; at += kBlock * d)
    amx::transpose_rows(t.k + at, kBlock, d, t.k_t + at, kBlock);
  std::fill_n(t.dk, padded * d, 0.0f);
  std::fill_n(t.dv, padded * d, 0.0f);
  for (std::int64_t head = task.kv_head * group; head < (task.kv_head + 1) * group; ++head) {
    pack_head(x, t, task.begin, length, head);
    for (std::int64_t j = 0; j < blocks; ++j)
      for (std::int64_t i = j; i < blocks; ++i) tile_pair(t, i, j, d, x.scale);
    unpack_transposed(t.dq_t, length, d, out + head * d, x.dqkv.ld);
  }
  unpack_rows(t.dk, d, length, d, 1.0f, out + k_column, x.dqkv.ld);
  unpack_rows(t.dv, d, length, d, 1.0f, out + v_column, x.dqkv.ld);
}

/// Every thread's tiles in one piece of scratch memory: run(tiles, task) for every task.
template <class AllTiles, class Run>
void run_tasks(KernelContext& ctx, const AttentionTasks& all, std::int64_t d, Run&& run) {
  const std::int64_t length = round_up(all.longest, kBlock);
  Carver count(nullptr);
  AllTiles{count, length, d};
  const std::int64_t share = count.used();
  auto* scratch = static_cast<char*>(ctx.scratch(kScratchSlot, static_cast<std::size_t>(share * ctx.num_threads())));
  parallel_tasks(ctx, std::ssize(all.tasks), all.worth_team, [&](std::int64_t i, int thread) {
    Carver carver(scratch + thread * share);
    run(AllTiles(carver, length, d), all.tasks[static_cast<std::size_t>(i)]);
  });
}

}  // namespace

bool attention_forward_amx(KernelContext& ctx, ConstMatrix qkv, HeadShape shape,
                           std::span<const std::int32_t> cu_seqlens, float scale, Matrix o, float* lse) {
  if (!applies(qkv.dtype, shape)) return false;
  run_tasks<ForwardTiles>(ctx, make_attention_tasks(shape, cu_seqlens, ctx.num_threads(), true), shape.head_dim,
                          [&](const ForwardTiles& tiles, const AttentionTask& task) {
                            forward_task(task, tiles, qkv, shape, scale, o, lse);
                          });
  return true;
}

bool attention_backward_amx(KernelContext& ctx, ConstMatrix qkv, ConstMatrix o, ConstMatrix d_o, const float* lse,
                            HeadShape shape, std::span<const std::int32_t> cu_seqlens, float scale, Matrix dqkv) {
  if (!applies(qkv.dtype, shape)) return false;
  const BackwardOperands operands{qkv, o, d_o, lse, dqkv, shape, scale};
  run_tasks<BackwardTiles>(
      ctx, make_attention_tasks(shape, cu_seqlens, ctx.num_threads(), false), shape.head_dim,
      [&](const BackwardTiles& tiles, const AttentionTask& task) { backward_task(operands, tiles, task); });
  return true;
}

}  // namespace hotbunk::kernels

#else

namespace hotbunk::kernels {

bool attention_forward_amx(KernelContext&, ConstMatrix, HeadShape, std::span<const std::int32_t>, float, Matrix,
                           float*) {
  return false;
}
bool attention_backward_amx(KernelContext&, ConstMatrix, ConstMatrix, ConstMatrix, const float*, HeadShape,
                            std::span<const std::int32_t>, float, Matrix) {
  return false;
}

}  // namespace hotbunk::kernels
#endif
