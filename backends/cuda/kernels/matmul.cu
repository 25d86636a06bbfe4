// Matrix products on mma.sync, the fallback and the oracle of cuBLASLt. C[M,N] (+)= A B with
//   nt: A[M,K] row-major, B[N,K] row-major   (linear: x w^T)
//   nn: A[M,K], B[K,N]                       (linear_dgrad: dy w)
//   tn: A[K,M], B[K,N]                       (linear_wgrad: dy^T x)
// bf16 in, fp32 sums, a fixed order of k whatever M and N: a row's bits do not depend on how many rows there are.
// A block of 4 warps computes 64 x 64, k in steps of 64 through shared memory, two stages by cp.async where rows are
// 16-byte aligned and plain loads elsewhere. Rows of a stage are padded to 72 elements: the 144 bytes of a row move the
// next one by one group of four banks, so that neither ldmatrix nor the copies meet a bank twice.
#include "common.cuh"

namespace {

constexpr int tile = 64, step = 64, pitch = step + 8;

HB_DEVICE uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

HB_DEVICE void load_matrix(uint32_t (&r)[4], const bf16* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(p))
               : "memory");
}

HB_DEVICE void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

HB_DEVICE void copy_async(bf16* to, const bf16* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
               : "memory");
}
HB_DEVICE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int left>
HB_DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
}

/// Brings rows [row0, row0 + tile) and columns [k0, k0 + step) of a row-major matrix [rows, K] to shared memory, zeros
/// beyond its ends.
HB_DEVICE void fetch(bf16 (*to)[pitch], const bf16* from, int rows, int K, int row0, int k0, bool wide) {
  if (wide) {
    for (int at = threadIdx.x; at < tile * step / 8; at += blockDim.x) {
      const int r = at / (step / 8), c = at % (step / 8) * 8;
      const bool here = row0 + r < rows && k0 + c < K;
      copy_async(&to[r][c], from + (here ? size_t(row0 + r) * K + k0 + c : 0), here ? 16 : 0);
    }
    return;
  }
  for (int at = threadIdx.x; at < tile * step; at += blockDim.x) {
    const int r = at / step, c = at % step;
    const bool here = row0 + r < rows && k0 + c < K;
    to[r][c] = here ? from[size_t(row0 + r) * K + k0 + c] : bf16(0.0f);
  }
}

/// The same of a matrix [K, rows], transposed on the way.
HB_DEVICE void fetch_transposed(bf16 (*to)[pitch], const bf16* from, int rows, int K, int row0, int k0) {
  for (int at = threadIdx.x; at < tile * step; at += blockDim.x) {
    const int c = at / tile, r = at % tile;
    const bool here = row0 + r < rows && k0 + c < K;
    to[r][c] = here ? from[size_t(k0 + c) * rows + row0 + r] : bf16(0.0f);
  }
}

template <bool transposed_a, bool transposed_b, class C>
HB_DEVICE void matmul(const bf16* a, const bf16* b, const bf16* bias, C* c, int M, int N, int K, int accumulate) {
  __shared__ __align__(16) bf16 as[2][tile][pitch], bs[2][tile][pitch];
  const int row0 = blockIdx.y * tile, column0 = blockIdx.x * tile;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int warp_row = warp / 2 * 32, warp_column = warp % 2 * 32;
  // A parameter inside a gathered unit begins at any element.
  const bool wide = K % 8 == 0 && (reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b)) % 16 == 0;
  float sum[2][4][4] = {};
  const auto bring = [&](int stage, int k0) {
    if (transposed_a) fetch_transposed(as[stage], a, M, K, row0, k0);
    else fetch(as[stage], a, M, K, row0, k0, wide);
    if (transposed_b) fetch_transposed(bs[stage], b, N, K, column0, k0);
    else fetch(bs[stage], b, N, K, column0, k0, wide);
    commit();
  };
  const int steps = (K + step - 1) / step;
  bring(0, 0);
  for (int s = 0; s < steps; ++s) {
    if (s + 1 < steps) bring((s + 1) & 1, (s + 1) * step);
    else commit();
    wait_for_copies<1>();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < step; k += 16) {
      uint32_t fa[2][4], fb[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) load_matrix(fa[i], &as[s & 1][warp_row + 16 * i + lane % 16][k + lane / 16 * 8]);
#pragma unroll
      for (int j = 0; j < 2; ++j)
        load_matrix(fb[j], &bs[s & 1][warp_column + 16 * j + lane % 8 + lane / 16 * 8][k + lane / 8 % 2 * 8]);
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) multiply(sum[i][j], fa[i], fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = row0 + warp_row + 16 * i + lane / 4 + e / 2 * 8;
        const int n = column0 + warp_column + 8 * j + lane % 4 * 2 + e % 2;
        if (r >= M || n >= N) continue;
        float x = sum[i][j][e] + (bias != nullptr ? load(bias + n) : 0.0f);
        C* to = c + size_t(r) * N + n;
        if (accumulate) x += load(to);
        store(to, x);
      }
}

}  // namespace

/// 128 threads; grid (ceil(N / 64), ceil(M / 64)).
#define HB_MATMUL(C, name)                                                                                          \
  extern "C" __global__ void __launch_bounds__(128)                                                                 \
      matmul_nt_bf16_##name(const bf16* a, const bf16* b, const bf16* bias, C* c, int M, int N, int K, int accumulate) { \
    matmul<false, false>(a, b, bias, c, M, N, K, accumulate);                                                       \
  }                                                                                                                 \
  extern "C" __global__ void __launch_bounds__(128)                                                                 \
      matmul_nn_bf16_##name(const bf16* a, const bf16* b, const bf16* bias, C* c, int M, int N, int K, int accumulate) { \
    matmul<false, true>(a, b, bias, c, M, N, K, accumulate);                                                        \
  }                                                                                                                 \
  extern "C" __global__ void __launch_bounds__(128)                                                                 \
      matmul_tn_bf16_##name(const bf16* a, const bf16* b, const bf16* bias, C* c, int M, int N, int K, int accumulate) { \
    matmul<true, true>(a, b, bias, c, M, N, K, accumulate);                                                         \
  }
HB_MATMUL(bf16, bf16)
HB_MATMUL(float, f32)
