// Launches of a mixture of experts (kernels/experts.cu, grouped.cu).
#pragma once
#include "backends/cuda/op_launches.h"

namespace hotbunk::cuda {

void run_route(const CudaCall&);
void run_route_backward(const CudaCall&);
void run_expert_counts(const CudaCall&);
void run_router_loss(const CudaCall&);
void run_expert_sort(const CudaCall&);
void run_expert_arrivals(const CudaCall&);
void run_copy_sort(const CudaCall&);
void run_copy_arrivals(const CudaCall&);
void run_dispatch(const CudaCall&);
void run_dispatch_backward(const CudaCall&);
void run_combine(const CudaCall&);
void run_combine_backward(const CudaCall&);
void run_grouped_linear(const CudaCall&);
void run_grouped_linear_dgrad(const CudaCall&);
void run_grouped_linear_wgrad(const CudaCall&);
/// Products of adapters that each expert has (adapts_experts), by the same kernels; u and du without their factor.
void run_expert_lora_down(const CudaCall&);
void run_expert_lora_up(const CudaCall&);
void run_expert_lora_up_dgrad(const CudaCall&);
void run_expert_lora_up_wgrad(const CudaCall&);

/// Numbers that an op's kernels hand to each other.
std::int64_t expert_scratch_bytes(const Op&);
/// "" or why a route of so many experts or groups is not handled.
std::string why_not_routed(const Op&);

}  // namespace hotbunk::cuda
