// oneDNN matmul behind the GEMM interface: primitives cached per shape. Internal to the kernels (and their tests).
#pragma once
#include <array>
#include <map>
#include <oneapi/dnnl/dnnl.hpp>

#include "backends/cpu_gloo/kernels/context.h"

namespace hotbunk::kernels {

/// c[M,N] (+)= a[M,K] · b[K,N] (+ bias[N], fp32). a and b have strides {between rows, between columns}, one of them 1;
/// same dtype. With `b_pairs` b lies in blocks of so many columns (64 or 32), [K/2][b_pairs][2] each (PackedOrder), and
/// has no strides.
struct MatmulShape {
  std::int64_t M = 0, N = 0, K = 0;
  std::array<std::int64_t, 2> a_strides{};
  std::array<std::int64_t, 2> b_strides{};
  std::int64_t ldc = 0;
  DType in = DType::f32;
  DType out = DType::f32;
  bool accumulate = false;
  bool bias = false;
  std::int64_t b_pairs = 0;
  auto operator<=>(const MatmulShape&) const = default;
};

struct KernelContext::Onednn {
  struct Entry {
    dnnl::matmul::primitive_desc desc;  // empty: oneDNN cannot do this shape on this CPU
    dnnl::matmul primitive;
  };
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  std::map<MatmulShape, Entry> matmuls;
};

/// False (and nothing written) where oneDNN has no kernel for these dtypes on this CPU, or of pairs none that is fast:
/// it wants rows of a and c behind each other.
bool try_matmul(KernelContext&, const MatmulShape&, const void* a, const void* b, const float* bias, void* c);

/// Whether oneDNN has a fast kernel of this CPU that reads bf16 in blocks of pairs, and reads them right.
bool has_pairs_matmul();

/// The same in fp32, bf16 operands widened first: what bf16 falls back to.
void matmul_widened(KernelContext&, MatmulShape, const void* a, const void* b, const float* bias, void* c);

}  // namespace hotbunk::kernels
