// Launches of attention: rows or tiles (kernels/attention.cu, attention_tiled.cu), its sinks, and of context-parallel
// ranks.
#pragma once
#include "backends/cuda/kernels/attention.h"
#include "backends/cuda/op_launches.h"

namespace hotbunk::cuda {

void run_attention(const CudaCall&);
void run_attention_backward(const CudaCall&);
void run_kv_write(const CudaCall&);
void run_paged_attention(const CudaCall&);

/// Keys and values in blocks, and the sequences to whose last positions the rows of an op's first input belong: S of
/// them, from wherever these addresses begin. Other rows are left alone.
struct PagedKeys {
  AttentionHeads heads;
  CUdeviceptr pool = 0, cu_seqlens = 0, tables = 0, lengths = 0;
  const Tensor& out;
  CUdeviceptr lse = 0;  // none: not asked for
  int S = 0, block_tokens = 0, max_blocks = 0;
};
void attend_paged(const CudaCall&, const PagedKeys&);
/// Rows of a step behind the last of its S sequences, as a rank has them that has fewer tokens than those that it steps
/// with (attention data parallelism), are nobody's: zeros, and -inf in lse.
void clear_idle_rows(const CudaCall&, const PagedKeys&);
void run_attention_sinks(const CudaCall&);
void run_attention_sinks_backward(const CudaCall&);

void run_take_kv(const CudaCall&);
void run_merge_qkv(const CudaCall&);
void run_context_attention(const CudaCall&);
void run_context_attention_backward(const CudaCall&);

}  // namespace hotbunk::cuda
