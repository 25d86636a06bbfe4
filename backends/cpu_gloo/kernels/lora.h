// Low-rank adapters beside a matrix (spec/model.h: LoraSpec): u = f x Aᵀ, y += u Bᵀ, its gradients, and the matrix with
// its adapter in it. A and B are row-major as the files have them: A [r, K], B [n, r]. Products are those of gemm.h,
// with its rules of rounding; of an activation that several adapters share, each has its columns.
#pragma once
#include "backends/cpu_gloo/kernels/context.h"
#include "backends/cpu_gloo/kernels/experts.h"

namespace hotbunk::kernels {

/// Extents of a product: rows, then the two others in the order that each function names.
struct LoraShape {
  std::int64_t rows = 0, first = 0, second = 0;
};

/// u[T,r] = factor · x[T,K] · a[r,K]ᵀ; rounded before the factor and behind it.   {T, K, r}
void lora_down(KernelContext&, ConstMatrix x, ConstMatrix a, float factor, Matrix u, LoraShape);
/// y[T, column … column + n) += u[T,r] · b[n,r]ᵀ.   {T, n, r}
void lora_up(KernelContext&, ConstMatrix u, ConstMatrix b, Matrix y, std::int64_t column, LoraShape);
/// du[T,r] = factor · dy[T, column … column + n) · b[n,r].   {T, n, r}
void lora_up_dgrad(KernelContext&, ConstMatrix dy, ConstMatrix b, std::int64_t column, float factor, Matrix du,
                   LoraShape);
/// db[n,r] (+)= dy[T, column … column + n)ᵀ · u[T,r].   {T, n, r}
void lora_up_wgrad(KernelContext&, ConstMatrix dy, ConstMatrix u, std::int64_t column, Matrix db, LoraShape, Write);

/// The same of rows of experts, each of which has an A and a B of its own, one below the other (experts.h: [N,K] is
/// the matrix that each function takes). Of u and du the rows behind the last expert's are zeros.
void lora_down(KernelContext&, const Experts&, ConstMatrix x, ConstMatrix a, float factor, Matrix u);
void lora_up(KernelContext&, const Experts&, ConstMatrix u, ConstMatrix b, Matrix y, std::int64_t column);
void lora_up_dgrad(KernelContext&, const Experts&, ConstMatrix dy, ConstMatrix b, std::int64_t column, float factor,
                   Matrix du);
void lora_up_wgrad(KernelContext&, const Experts&, ConstMatrix dy, ConstMatrix u, std::int64_t column, Matrix db,
                   Write);

/// y[n,K] = w[n,K] + factor · b[n,r] · a[r,K], each of its own dtype, in fp32 and rounded once. An element's bits
/// depend on its row of w and b and its column of a alone.   {n, K, r}
void lora_merge(KernelContext&, ConstMatrix w, ConstMatrix b, ConstMatrix a, float factor, Matrix y, LoraShape);

}  // namespace hotbunk::kernels
