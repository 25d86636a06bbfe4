// Launches of matrix products (kernels/matmul*.cu, or cuBLASLt), and of adapters beside them.
#pragma once
#include "backends/cuda/op_launches.h"

namespace hotbunk::cuda {

void run_linear(const CudaCall&);
void run_linear_dgrad(const CudaCall&);
void run_linear_wgrad(const CudaCall&);
void run_lora_down(const CudaCall&);
void run_lora_up(const CudaCall&);
void run_lora_up_dgrad(const CudaCall&);
void run_lora_up_wgrad(const CudaCall&);
void run_lora_merge(const CudaCall&);

}  // namespace hotbunk::cuda
