// Launches of latent attention (kernels/latent.cu).
#pragma once
#include "backends/cuda/op_launches.h"

namespace hotbunk::cuda {

void run_latent_norm(const CudaCall&);
void run_latent_norm_backward(const CudaCall&);
void run_latent_heads(const CudaCall&);
void run_latent_heads_backward(const CudaCall&);
void run_latent_write(const CudaCall&);
/// Some sequences at a time, as many as a stream's scratch has room for: their keys and values are made of what the
/// pool keeps, as training's linear layer makes them, and attended as paged attention does.
void run_latent_attention(const CudaCall&);

/// Keys and values of the sequences that a latent_attention works on at once; 0 of other kinds.
std::int64_t latent_scratch_bytes(const Op&);

}  // namespace hotbunk::cuda
