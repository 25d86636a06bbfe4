// AdamW over flat fp32 shards, from gradients in fp32 or bf16, and the global gradient norm.
#pragma once
#include "backends/cpu_gloo/kernels/context.h"

namespace hotbunk::kernels {

struct AdamWConfig {
  float lr = 1e-3f;
  float beta1 = 0.9f;
  float beta2 = 0.999f;
  float eps = 1e-8f;
  float weight_decay = 0.01f;  // decoupled: p *= 1 − lr·weight_decay
  std::int64_t step = 1;       // counts from 1
};

/// One step as torch.optim.AdamW: p, m (exp_avg), v (exp_avg_sq) of n fp32 elements are updated from g·grad_scale (g
/// widened). grad_scale: one fp32 (the clip coefficient), nullptr = 1; no finite one: there is no step, all stays as it
/// is (params_out too); params_out: bf16 copy of the new p, nullptr = none.
void adamw_step(KernelContext&, const AdamWConfig&, float* p, ConstVector g, float* m, float* v, std::int64_t n,
                const float* grad_scale, bf16* params_out);

/// Σ x² in double, in blocks of fixed size: same bits for every number of threads.
double sum_of_squares(KernelContext&, ConstVector x, std::int64_t n);

/// min(1, max_norm / (norm + 1e-6)) as torch.nn.utils.clip_grad_norm_; NaN where the norm is no finite number.
float clip_coefficient(double norm, double max_norm);

}  // namespace hotbunk::kernels
