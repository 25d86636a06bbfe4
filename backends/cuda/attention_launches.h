// Launches of attention: rows or tiles (kernels/attention.cu, attention_tiled.cu), and of context-parallel ranks.
#pragma once
#include "backends/cuda/op_launches.h"

namespace hotbunk::cuda {

void run_attention(const CudaCall&);
void run_attention_backward(const CudaCall&);
void run_kv_write(const CudaCall&);
void run_paged_attention(const CudaCall&);

void run_take_kv(const CudaCall&);
void run_merge_qkv(const CudaCall&);
void run_context_attention(const CudaCall&);
void run_context_attention_backward(const CudaCall&);

}  // namespace hotbunk::cuda
