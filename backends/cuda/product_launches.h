// Launches of matrix products (kernels/matmul*.cu, or cuBLASLt), and of adapters beside them.
#pragma once
#include "backends/cuda/op_launches.h"

namespace hotbunk::cuda {

void run_linear(const CudaCall&);
/// y = x wᵀ (+ bias) of a fused_linear's weight, x and y wherever they lie.
void multiply_rows(const CudaCall&, CUdeviceptr x, CUdeviceptr bias, DType result, CUdeviceptr y);
void run_linear_dgrad(const CudaCall&);
void run_linear_wgrad(const CudaCall&);
void run_lora_down(const CudaCall&);
void run_lora_up(const CudaCall&);
void run_lora_up_dgrad(const CudaCall&);
void run_lora_up_wgrad(const CudaCall&);
void run_lora_merge(const CudaCall&);

}  // namespace hotbunk::cuda
