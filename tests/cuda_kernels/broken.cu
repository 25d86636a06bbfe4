// Kernels with one bug each, as people write them; broken_test.cc says which check finds which.
#include "backends/cuda/kernels/common.cuh"

/// A reduction whose second barrier is missing: the next round's partial sums meet the last one's readers.
extern "C" __global__ void missing_barrier(const float* x, float* y, int n) {
  __shared__ float part[32];
  for (int round = 0; round < 2; ++round) {
    float v = threadIdx.x < n ? x[threadIdx.x] + round : 0.0f;
    v = warp_sum(v);
    if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = v;
    __syncthreads();
    float total = 0;
    for (int w = 0; w < blockDim.x / 32; ++w) total += part[w];
    if (threadIdx.x == 0) y[round] = total;
  }
}

/// The last block runs over the end.
extern "C" __global__ void missing_bound(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = 2.0f * x[i];
}

/// Adds up a warp by shuffles that start at 8: half of the lanes are left out.
extern "C" __global__ void wrong_lane(const float* x, float* y, int n) {
  float v = threadIdx.x < n ? x[threadIdx.x] : 0.0f;
  for (int m = 8; m > 0; m >>= 1) v += __shfl_xor_sync(0xffffffffu, v, m);
  if (threadIdx.x == 0) y[0] = v;
}

/// A shuffle under a branch that only some lanes take.
extern "C" __global__ void divergent_shuffle(const float* x, float* y, int n) {
  float v = x[threadIdx.x];
  if (threadIdx.x < 20) v += __shfl_down_sync(0xffffffffu, v, 1);
  y[threadIdx.x] = v;
}

/// Rows of n elements, read with a pitch of n - 1.
extern "C" __global__ void wrong_stride(const float* x, float* y, int n) {
  float sum = 0;
  for (int j = threadIdx.x; j < n; j += 32) sum += x[blockIdx.x * (n - 1) + j];
  sum = warp_sum(sum);
  if (threadIdx.x == 0) y[blockIdx.x] = sum;
}

/// Neighbours of a warp exchange through shared memory as if lanes ran in lock step.
extern "C" __global__ void race_in_warp(const float* x, float* y, int n) {
  __shared__ volatile float s[32];
  s[threadIdx.x] = x[threadIdx.x];
  y[threadIdx.x] = s[(threadIdx.x + 1) & 31];
}

/// The accumulator of the first micro-batch was never zeroed.
extern "C" __global__ void uninitialised(const float* x, float* y, int n) {
  const int i = threadIdx.x;
  if (i < n) y[i] += x[i];
}

/// Four floats at a time from an address that is a multiple of four bytes only.
extern "C" __global__ void misaligned(const float* x, float* y, int n) {
  const float4 v = *reinterpret_cast<const float4*>(x + 1 + 4 * threadIdx.x);
  y[threadIdx.x] = v.x + v.y + v.z + v.w;
}

/// bf16 written where fp32 is read: the upper half of each word is never written.
extern "C" __global__ void wrong_dtype(const float* x, void* y, int n) {
  if (threadIdx.x < n) static_cast<bf16*>(y)[2 * threadIdx.x] = __float2bfloat16(x[threadIdx.x]);
}
extern "C" __global__ void reads_fp32(const float* y, float* z, int n) {
  if (threadIdx.x < n) z[threadIdx.x] = y[threadIdx.x];
}

/// Whole vectors of four only: what is left of the row is dropped.
extern "C" __global__ void dropped_tail(const float* x, float* y, int n) {
  for (int j = threadIdx.x; j < n / 4; j += blockDim.x)
    for (int k = 0; k < 4; ++k) y[4 * j + k] = x[4 * j + k];
}

/// Sums with atomics: right but for the order, which depends on which block comes first.
extern "C" __global__ void unordered_sum(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) atomicAdd(y, x[i]);
}

/// Every thread of the block writes the row that only one of them should.
extern "C" __global__ void overlapping_boxes(const float* x, float* y, int n) {
  __shared__ float s[64];
  s[threadIdx.x / 2] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x / 2];
}

/// Reads what cp.async brings before it waited for it.
extern "C" __global__ void missing_wait(const float* x, float* y, int n) {
  __shared__ __align__(16) float s[128];
  const uint32_t to = uint32_t(__cvta_generic_to_shared(s + 4 * threadIdx.x));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(x + 4 * threadIdx.x) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  y[threadIdx.x] = s[4 * threadIdx.x];
}

/// A barrier inside a branch on the thread's number.
extern "C" __global__ void divergent_barrier(const float* x, float* y, int n) {
  if (threadIdx.x < n) {
    y[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
  }
}
