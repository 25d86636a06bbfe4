// RMSNorm and LayerNorm over rows, and over the heads of packed qkv rows (Qwen3's QK-norm).
#pragma once
#include "backends/cpu_gloo/kernels/context.h"
#include "backends/cpu_gloo/kernels/heads.h"

namespace hotbunk::kernels {

/// y[t] = x[t] · rstd[t] · w,  rstd[t] = 1/√(mean(x[t]²) + eps).  x, y: [T, h] fp32 or bf16; w: [h]; rstd: fp32 [T].
/// y may be x. Rounded once, from fp32. `offset`: by w + offset in the place of w, here and in what follows.
void rmsnorm_forward(KernelContext&, ConstMatrix x, ConstVector w, Matrix y, float* rstd, std::int64_t T,
                     std::int64_t h, float eps, float offset = 0.0f);

/// The residual stream's step fused with the norm after it: sum = x + delta; y = rmsnorm(sum).
/// The norm reads `sum` as stored (after rounding to its dtype). x, delta, sum, y: [T, h]; sum may be x or delta.
void add_rmsnorm_forward(KernelContext&, ConstMatrix x, ConstMatrix delta, ConstVector w, Matrix sum, Matrix y,
                         float* rstd, std::int64_t T, std::int64_t h, float eps, float offset = 0.0f);

/// dx (+)= rstd·(dy·w − x·rstd²·mean(dy·w·x)),  dw (+)= Σ_t dy·x·rstd.   dw: fp32 [h]; nullptr = frozen weight.
/// dw is summed in fixed blocks of tokens: same bits for every number of threads. dx may be dy.
void rmsnorm_backward(KernelContext&, ConstMatrix x, ConstVector w, const float* rstd, ConstMatrix dy, Matrix dx,
                      Write dx_write, float* dw, Write dw_write, std::int64_t T, std::int64_t h, float offset = 0.0f);

/// y[t] = (x[t] − mean(x[t])) · rstd[t] · w + b,  rstd[t] = 1/√(mean((x[t] − mean(x[t]))²) + eps).  Shapes and dtypes
/// as of rmsnorm_forward; w, b: [h], of one dtype. y may be x.
void layernorm_forward(KernelContext&, ConstMatrix x, ConstVector w, ConstVector b, Matrix y, float* rstd,
                       std::int64_t T, std::int64_t h, float eps);

/// With x̂ = (x − mean(x))·rstd:  dx (+)= rstd·(dy·w − mean(dy·w) − x̂·mean(dy·w·x̂)),  dw (+)= Σ_t dy·x̂,  db (+)= Σ_t dy.
/// dw, db: fp32 [h], summed as rmsnorm_backward does, both as `dw_write` says. dx may be dy.
void layernorm_backward(KernelContext&, ConstMatrix x, ConstVector w, const float* rstd, ConstMatrix dy, Matrix dx,
                        Write dx_write, float* dw, float* db, Write dw_write, std::int64_t T, std::int64_t h);

/// RMSNorm of every q head (weight q_norm[d]) and k head (k_norm[d]) of packed rows qkv[T, (a+2k)·d], to `out` of the
/// same shape, v copied; out may be qkv. rstd: fp32 [T, a+k].
void qk_norm_forward(KernelContext&, ConstMatrix qkv, ConstVector q_norm, ConstVector k_norm, Matrix out, float* rstd,
                     std::int64_t T, HeadShape, float eps, float offset = 0.0f);

/// dqkv = gradient at the norm's input from dout at its output (v copied); dqkv may be dout. qkv is the norm's *input*.
/// dq_norm, dk_norm: fp32 [d], accumulated or written as `dw_write` says; nullptr = frozen weight.
void qk_norm_backward(KernelContext&, ConstMatrix qkv, ConstVector q_norm, ConstVector k_norm, const float* rstd,
                      ConstMatrix dout, Matrix dqkv, float* dq_norm, float* dk_norm, Write dw_write, std::int64_t T,
                      HeadShape, float offset = 0.0f);

}  // namespace hotbunk::kernels
