// cuBLASLt as a table of its entry points, opened at run time as the driver and NCCL are: neither its header nor its
// library is needed to build. The double of fake/ fills the same table.
//
// Types and numbers are cuBLASLt's (cublasLt.h of CUDA 12 and 13; tests/cuda_backend compares them where the header
// is).
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "backends/cuda/driver.h"
#include "base/diagnostic.h"

namespace hotbunk::cuda {

using BlasStatus = int;  // 0: success; blas::not_supported
using BlasHandle = struct BlasHandleOpaque*;
using BlasDesc = struct BlasDescOpaque*;
using BlasLayout = struct BlasLayoutOpaque*;
using BlasPreference = struct BlasPreferenceOpaque*;
struct BlasAlgo {
  std::uint64_t data[8];
};
struct BlasHeuristic {
  BlasAlgo algo;
  std::size_t workspace_bytes;
  BlasStatus state;
  float waves;
  int reserved[4];
};

namespace blas {
inline constexpr BlasStatus not_supported = 15;  // a search found no kernel
inline constexpr int compute_32f = 68, type_f32 = 0, type_bf16 = 14, op_n = 0, op_t = 1;
// attributes of a product
inline constexpr int desc_transa = 3, desc_transb = 4, desc_epilogue = 7, desc_bias_pointer = 8;
inline constexpr std::int32_t epilogue_bias = 4;
// attributes of a search
inline constexpr int pref_max_workspace_bytes = 1, pref_reduction_scheme_mask = 3, pref_min_alignment_a_bytes = 5,
                     pref_min_alignment_b_bytes = 6, pref_min_alignment_c_bytes = 7, pref_min_alignment_d_bytes = 8;
/// Sums over K are not cut.
inline constexpr std::uint32_t reduction_none = 0;
/// Parts of a sum over K are stored in fp32 and added by a kernel of their own: in a fixed order.
inline constexpr std::uint32_t reduction_compute_type = 2;
}  // namespace blas

// clang-format off
#define HB_BLAS_ENTRIES(X)                                                                                          \
  X(cublasLtGetVersion, std::size_t())                                                                              \
  X(cublasLtGetStatusString, const char*(BlasStatus))                                                               \
  X(cublasLtCreate, BlasStatus(BlasHandle*))                                                                        \
  X(cublasLtDestroy, BlasStatus(BlasHandle))                                                                        \
  X(cublasLtMatmulDescCreate, BlasStatus(BlasDesc*, int compute, int scale_type))                                   \
  X(cublasLtMatmulDescDestroy, BlasStatus(BlasDesc))                                                                \
  X(cublasLtMatmulDescSetAttribute, BlasStatus(BlasDesc, int attribute, const void*, std::size_t))                  \
  X(cublasLtMatrixLayoutCreate, BlasStatus(BlasLayout*, int type, std::uint64_t rows, std::uint64_t cols, std::int64_t ld)) \
  X(cublasLtMatrixLayoutDestroy, BlasStatus(BlasLayout))                                                            \
  X(cublasLtMatmulPreferenceCreate, BlasStatus(BlasPreference*))                                                    \
  X(cublasLtMatmulPreferenceDestroy, BlasStatus(BlasPreference))                                                    \
  X(cublasLtMatmulPreferenceSetAttribute, BlasStatus(BlasPreference, int attribute, const void*, std::size_t))      \
  X(cublasLtMatmulAlgoGetHeuristic, BlasStatus(BlasHandle, BlasDesc, BlasLayout a, BlasLayout b, BlasLayout c,      \
                                               BlasLayout d, BlasPreference, int asked, BlasHeuristic*, int* found))\
  X(cublasLtMatmul, BlasStatus(BlasHandle, BlasDesc, const void* alpha, const void* a, BlasLayout, const void* b,   \
                               BlasLayout, const void* beta, const void* c, BlasLayout, void* d, BlasLayout,        \
                               const BlasAlgo*, void* workspace, std::size_t, CUstream))
// clang-format on

struct BlasLt {
#define HB_BLAS_POINTER(name, ...) \
  using name##_type = __VA_ARGS__; \
  name##_type* name = nullptr;
  HB_BLAS_ENTRIES(HB_BLAS_POINTER)
#undef HB_BLAS_POINTER
};

/// "13.1.0" of 130100.
std::string blas_version_text(std::size_t version);

/// cuBLASLt of this machine: of CUDA 13, else of CUDA 12. E643 with the reason when the library or one of its entry
/// points is not there. `library`: that one alone.
Result<BlasLt> open_blas(const std::string& library = "");

}  // namespace hotbunk::cuda
