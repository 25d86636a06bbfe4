// What every kernel shares: numbers in and out of memory, sums over a warp and a block in one fixed order.
//
// Kernels are extern "C", one name per dtype (…_f32, …_bf16), so that a launch needs no mangled names. Sums are fp32
// (fp64 where the header of a kernel says so), in an order that depends on the block's size alone: a row's result does
// not change with the number of rows.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

using bf16 = __nv_bfloat16;

#define HB_DEVICE __device__ __forceinline__

HB_DEVICE float load(const float* p) { return *p; }
HB_DEVICE float load(const bf16* p) { return __bfloat162float(*p); }
HB_DEVICE void store(float* p, float x) { *p = x; }
HB_DEVICE void store(bf16* p, float x) { *p = __float2bfloat16_rn(x); }

/// Sum over a warp, the same in every lane: a butterfly, whose order is the same for each of them.
template <class T>
HB_DEVICE T warp_sum(T x) {
#pragma unroll
  for (int m = 16; m > 0; m >>= 1) x += __shfl_xor_sync(0xffffffffu, x, m);
  return x;
}
HB_DEVICE float warp_max(float x) {
#pragma unroll
  for (int m = 16; m > 0; m >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, m));
  return x;
}

/// Sum over a block, the same in every thread. `part`: shared, 32 elements; free again when all have returned.
template <class T>
HB_DEVICE T block_sum(T x, T* part) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (blockDim.x + 31) >> 5;
  x = warp_sum(x);
  if (lane == 0) part[warp] = x;
  __syncthreads();
  T total = 0;
  for (int w = 0; w < warps; ++w) total += part[w];
  __syncthreads();
  return total;
}
HB_DEVICE float block_max(float x, float* part) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (blockDim.x + 31) >> 5;
  x = warp_max(x);
  if (lane == 0) part[warp] = x;
  __syncthreads();
  float most = part[0];
  for (int w = 1; w < warps; ++w) most = fmaxf(most, part[w]);
  __syncthreads();
  return most;
}

/// n segments of size(i) items each, cut into tiles of `each` items one segment after another: the segment of the tile
/// of this number, and that tile's first item in it; -1 behind the last tile. The same in every lane; a whole warp asks.
template <class Size>
HB_DEVICE int segment_of_tile(int number, int n, int each, Size size, int& first) {
  const int lane = threadIdx.x & 31, per = (n + 31) / 32;
  const int begin = min(lane * per, n), end = min(begin + per, n);
  int mine = 0;
  for (int i = begin; i < end; ++i) mine += (size(i) + each - 1) / each;
  int upto = mine;
#pragma unroll
  for (int m = 1; m < 32; m <<= 1) {
    const int further = __shfl_up_sync(0xffffffffu, upto, m);
    if (lane >= m) upto += further;
  }
  int segment = -1, at = 0, left = number - (upto - mine);
  if (left >= 0 && left < mine)
    for (int i = begin; i < end && segment < 0; ++i) {
      const int tiles = (size(i) + each - 1) / each;
      if (left < tiles) segment = i, at = left * each;
      left -= tiles;
    }
  const unsigned found = __ballot_sync(0xffffffffu, segment >= 0);
  const int source = found == 0 ? 0 : 31 - __clz(int(found));  // one lane at most has it
  first = __shfl_sync(0xffffffffu, at, source);
  return __shfl_sync(0xffffffffu, segment, source);
}
