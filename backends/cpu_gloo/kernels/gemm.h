// Linear layers: one GEMM interface for forward, input gradient and weight gradient, fp32 or bf16 operands.
//
// Weights are row-major [N, K] (out_features, in_features) as Hugging Face stores them; T = number of tokens (rows).
// Both operands have the same dtype; the output is fp32 or bf16 whatever theirs. Sums are formed in fp32 and rounded
// once. All of T, N, K may be 0 (K = 0 with `overwrite` writes zeros, or the bias).
//
// Which path runs (gemm.cc; measured in bench/kernels.cc, docs/benchmarks.md):
//   forward, fp32     own kernel (row_gemm.h). *Row-invariant*: row t's result has the same bits whatever T is,
//                     whichever other rows there are, and however many threads run; so rollout and training compute
//                     the same.
//   gradients, fp32   oneDNN: AVX-512 or AVX2. Not row-invariant.
//   bf16              as the context's product_paths() say, by T and pass: an own kernel, that of fp32 forward and
//                     gradient_gemm.h; oneDNN on the machine's own bf16 unit, which is not row-invariant (its blocking
//                     depends on T and on the number of threads); or oneDNN in fp32. By the machine's rule
//                     T ≤ kSkinnyRows is the own kernel's.
// Forward, weights that are read many times may lie in the order that these kernels read (prepack.h).
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "backends/cpu_gloo/kernels/context.h"

namespace hotbunk::kernels {

/// Up to here weights are streamed once from memory, above them arranged in blocks.
inline constexpr std::int64_t kSkinnyRows = 16;

/// Makes what a process makes with its first product (oneDNN's kernels, some 30 ms of CPU time). Starts no thread: a
/// process that forks ranks calls it before, and each of them has it.
void prepare_products();

/// y[T,N] (+)= x[T,K] · w[N,K]ᵀ (+ bias[N]). The bias may be absent; it has its own dtype. Prepacked, w is what
/// prepack() left of rows behind each other (w.ld = K), and where the result is row-invariant its bits are those of
/// rows.
void linear_forward(KernelContext&, ConstMatrix x, ConstMatrix w, ConstVector bias, Matrix y, std::int64_t T,
                    std::int64_t N, std::int64_t K, Write = Write::overwrite, WeightOrder = WeightOrder::rows);

/// dx[T,K] (+)= dy[T,N] · w[N,K].
void linear_dgrad(KernelContext&, ConstMatrix dy, ConstMatrix w, Matrix dx, std::int64_t T, std::int64_t N,
                  std::int64_t K, Write);

/// dw[N,K] (+)= dy[T,N]ᵀ · x[T,K].
void linear_wgrad(KernelContext&, ConstMatrix dy, ConstMatrix x, Matrix dw, std::int64_t T, std::int64_t N,
                  std::int64_t K, Write);

/// db[N] (+)= Σ_t dy[t, N], fp32. Same bits for every number of threads.
void bias_grad(KernelContext&, ConstMatrix dy, float* db, std::int64_t T, std::int64_t N, Write);

/// "AVX512_CORE_BF16": what oneDNN computes with here, fp32 too, whose bits it decides. The CPU's, or what
/// `ONEDNN_MAX_CPU_ISA` lowers it to, whose words these are.
std::string onednn_instruction_set();

/// "2.6.3": another version may sum in another order.
std::string onednn_version();

/// "AVX-512", "AVX-512 with AMX", "AVX2" or "baseline": what our own kernels were compiled for.
std::string_view compiled_instruction_set();

}  // namespace hotbunk::kernels
