// Gradients of weights and of inputs from bf16: what they read is widened on its way into the order in which tiles read
// it, which operands that are widened before are put into anyway. Internal to gemm.cc.
#pragma once
#include "backends/cpu_gloo/kernels/onednn.h"

namespace hotbunk::kernels {

/// c[M,N] (+)= a[M,K] · b[K,N] with rows of b behind each other, K > 0, no bias. Sums are fp32 and rounded once, the
/// same for any number of threads: a chain of fused multiply-adds per 256 of K (192 where vectors are of 16), chains
/// added in their order.
void gradient_gemm(KernelContext&, const MatmulShape&, const void* a, const void* b, void* c);

}  // namespace hotbunk::kernels
