// bf16 attention on AMX tiles: same interface as attention.h, taken by it where it applies. Internal to the kernels.
#pragma once
#include "backends/cpu_gloo/kernels/attention.h"

namespace hotbunk::kernels {

/// Both return false, and have done nothing, unless the tensors are bf16, the head dimension a multiple of 32, and
/// build, CPU and kernel have AMX. Weights (P) and their gradient (dS) are rounded to bf16 between the products, as GPU
/// kernels do; sums are fp32.
bool attention_forward_amx(KernelContext&, ConstMatrix qkv, HeadShape, std::span<const std::int32_t> cu_seqlens,
                           float scale, Matrix o, float* lse);
bool attention_backward_amx(KernelContext&, ConstMatrix qkv, ConstMatrix o, ConstMatrix d_o, const float* lse,
                            HeadShape, std::span<const std::int32_t> cu_seqlens, float scale, Matrix dqkv);

}  // namespace hotbunk::kernels
