// Elementwise kernels and strided copies; all at memory bandwidth, all independent of the number of threads.
#pragma once
#include <span>

#include "backends/cpu_gloo/kernels/context.h"

namespace hotbunk::kernels {

/// act[t,j] = silu(gate[t,j]) · up[t,j];  gate_up: [T, 2i] with gate in columns [0,i), up in [i,2i); act: [T, i].
void swiglu_forward(KernelContext&, ConstMatrix gate_up, Matrix act, std::int64_t T, std::int64_t i);
/// dgate_up[T, 2i] from dact[T, i]; may be gate_up itself.
void swiglu_backward(KernelContext&, ConstMatrix dact, ConstMatrix gate_up, Matrix dgate_up, std::int64_t T,
                     std::int64_t i);

/// The same with GELU for SiLU, by its tanh form: gelu(g) = g/2 · (1 + tanh(√(2/π) (g + 0.044715 g³))).
/// Source: Hendrycks & Gimpel, Gaussian Error Linear Units (2016); transformers' gelu_pytorch_tanh.
void geglu_forward(KernelContext&, ConstMatrix gate_up, Matrix act, std::int64_t T, std::int64_t i);
void geglu_backward(KernelContext&, ConstMatrix dact, ConstMatrix gate_up, Matrix dgate_up, std::int64_t T,
                    std::int64_t i);

/// act[t,j] = g · sigmoid(alpha g) · (clamp(up[t,j], ±limit) + 1), g = min(gate[t,j], limit). What is clamped has no
/// slope. Source: transformers, GptOssExperts.
struct ClampedGate {
  float limit = 0.0f, alpha = 1.0f;
};
void clamped_swiglu_forward(KernelContext&, ConstMatrix gate_up, Matrix act, std::int64_t T, std::int64_t i,
                            ClampedGate);
void clamped_swiglu_backward(KernelContext&, ConstMatrix dact, ConstMatrix gate_up, Matrix dgate_up, std::int64_t T,
                             std::int64_t i, ClampedGate);

/// y[t,j] = gelu(x[t,j]), the same function without a gate.  x, y: [T, i].
void gelu_forward(KernelContext&, ConstMatrix x, Matrix y, std::int64_t T, std::int64_t i);
/// dx[T, i] from dy[T, i]; may be either input.
void gelu_backward(KernelContext&, ConstMatrix dy, ConstMatrix x, Matrix dx, std::int64_t T, std::int64_t i);

/// x[i] = cap · tanh(x[i] / cap) of n fp32.
void softcap(KernelContext&, float* x, std::int64_t n, float cap);

/// dst[r,c] += src[r,c], each of its own dtype (residual add, gradient accumulation).
void add(KernelContext&, Matrix dst, ConstMatrix src, std::int64_t rows, std::int64_t cols);
/// dst[r,c] += bias[c].
void add_bias(KernelContext&, Matrix dst, ConstVector bias, std::int64_t rows, std::int64_t cols);
/// data[i] *= factor, fp32 or bf16.
void scale(KernelContext&, void* data, DType, std::int64_t n, float factor);
void zero(KernelContext&, void* data, std::int64_t bytes);
/// Plain copy; ranges must not overlap.
void copy(KernelContext&, const void* src, void* dst, std::int64_t bytes);
/// Element by element between fp32 and bf16 (round to nearest even), or a copy where the dtypes are equal.
void cast(KernelContext&, ConstVector src, void* dst, DType dst_dtype, std::int64_t n);

/// A rectangle of `rows` × `cols` elements: row r starts at src_off + r·src_pitch and dst_off + r·dst_pitch (elements).
struct Box {
  std::int64_t src_off = 0;
  std::int64_t src_pitch = 0;
  std::int64_t dst_off = 0;
  std::int64_t dst_pitch = 0;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
};

/// Copies every box from src to dst, cast to dst_dtype. Destinations of different boxes must not overlap; neither must
/// src and dst. Equal dtypes may be any (also integers); otherwise fp32 and bf16.
void copy_boxes(KernelContext&, ConstVector src, void* dst, DType dst_dtype, std::span<const Box> boxes);

/// Sum modulo 2^64 of element_hash (base/hash.h) over the boxes of src, each element cast to `as`; its index is where
/// the box says it lies in dst (P5: sync is exact).
std::uint64_t hash_boxes(KernelContext&, ConstVector src, DType as, std::span<const Box> boxes);

struct NonFinite {
  std::int64_t count = 0;
  std::int64_t first = -1;  // smallest index of a NaN or infinity; −1 = none
};
/// NaN and infinity in n elements of fp32 or bf16.
NonFinite find_nonfinite(KernelContext&, ConstVector x, std::int64_t n);

}  // namespace hotbunk::kernels
