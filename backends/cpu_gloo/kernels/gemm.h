// Linear layers: one GEMM interface for forward, input gradient and weight gradient, fp32 or bf16 operands.
//
// Weights are row-major [N, K] (out_features, in_features) as Hugging Face stores them; T = number of tokens (rows).
// Both operands have the same dtype; the output is fp32 or bf16 whatever theirs. Sums are formed in fp32 and rounded
// once. All of T, N, K may be 0 (K = 0 with `overwrite` writes zeros, or the bias).
//
// Which path runs (gemm.cc; measured in bench/kernels.cc):
//   forward, fp32              own kernel (row_gemm.h). *Row-invariant*: row t's result has the same bits whatever T
//   is, forward, T ≤ kSkinnyRows   whichever other rows there are, and however many threads run; so rollout and
//   training
//                              compute the same.
//   everything else            oneDNN: AMX for bf16 where the CPU has it, AVX-512 or AVX2 for fp32. Not row-invariant:
//                              its blocking depends on T and on the number of threads. bf16 on a CPU that oneDNN has no
//                              bf16 kernel for is widened to fp32 first (same results to rounding).
#pragma once
#include "backends/cpu_gloo/kernels/context.h"

namespace hotbunk::kernels {

/// Up to here weights are streamed once from memory, above them arranged in blocks.
inline constexpr std::int64_t kSkinnyRows = 16;

/// y[T,N] (+)= x[T,K] · w[N,K]ᵀ (+ bias[N]). The bias may be absent; it has its own dtype.
void linear_forward(KernelContext&, ConstMatrix x, ConstMatrix w, ConstVector bias, Matrix y, std::int64_t T,
                    std::int64_t N, std::int64_t K, Write = Write::overwrite);

/// dx[T,K] (+)= dy[T,N] · w[N,K].
void linear_dgrad(KernelContext&, ConstMatrix dy, ConstMatrix w, Matrix dx, std::int64_t T, std::int64_t N,
                  std::int64_t K, Write);

/// dw[N,K] (+)= dy[T,N]ᵀ · x[T,K].
void linear_wgrad(KernelContext&, ConstMatrix dy, ConstMatrix x, Matrix dw, std::int64_t T, std::int64_t N,
                  std::int64_t K, Write);

/// db[N] (+)= Σ_t dy[t, N], fp32. Same bits for every number of threads.
void bias_grad(KernelContext&, ConstMatrix dy, float* db, std::int64_t T, std::int64_t N, Write);

/// True where bf16 GEMM runs on AMX tiles (the CPU has them and the kernel grants them).
bool has_amx_bf16();

}  // namespace hotbunk::kernels
