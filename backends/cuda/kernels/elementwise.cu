// add, cast, scale, softcap, add_bias, gradients of biases and norms, gather_rows, and the reductions of the local
// transport.
#include "common.cuh"

namespace {

/// Calls visit(i) for the elements of this thread, grid-stride.
template <class Visit>
HB_DEVICE void each(int64_t n, Visit visit) {
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x)
    visit(i);
}

constexpr int most_ranks = 32;
struct Sources {
  const void* rank[most_ranks];
};

template <class T>
HB_DEVICE T larger_or_nan(T a, T b) {
  return a != a ? a : b != b ? b : a > b ? a : b;
}

}  // namespace

/// z = x + y; z may be x.
#define HB_ADD(X, Y, name)                                                         \
  extern "C" __global__ void add_##name(const X* x, const Y* y, X* z, int64_t n) { \
    each(n, [&](int64_t i) { store(z + i, load(x + i) + load(y + i)); });          \
  }
HB_ADD(float, float, f32_f32)
HB_ADD(float, bf16, f32_bf16)
HB_ADD(bf16, float, bf16_f32)
HB_ADD(bf16, bf16, bf16_bf16)

extern "C" __global__ void cast_f32_bf16(const float* x, bf16* y, int64_t n) {
  each(n, [&](int64_t i) { store(y + i, x[i]); });
}
extern "C" __global__ void cast_bf16_f32(const bf16* x, float* y, int64_t n) {
  each(n, [&](int64_t i) { y[i] = load(x + i); });
}

/// x times factor, in place; x[t,:] += b, of N columns.
#define HB_IN_PLACE(E, name)                                                       \
  extern "C" __global__ void scale_##name(E* x, float factor, int64_t n) {         \
    each(n, [&](int64_t i) { store(x + i, load(x + i) * factor); });               \
  }                                                                                \
  extern "C" __global__ void add_bias_##name(E* x, const E* b, int N, int64_t n) { \
    each(n, [&](int64_t i) { store(x + i, load(x + i) + load(b + i % N)); });      \
  }
HB_IN_PLACE(float, f32)
HB_IN_PLACE(bf16, bf16)

/// counts[0] += of how many 16-bit words of a and b the bits differ, counts[1] += how many of a are not 0.
extern "C" __global__ void differing_halves(const uint16_t* a, const uint16_t* b, int64_t n, int32_t* counts) {
  int different = 0, set = 0;
  each(n, [&](int64_t i) { different += a[i] != b[i] ? 1 : 0, set += a[i] != 0 ? 1 : 0; });
  different = warp_sum(different), set = warp_sum(set);
  if ((threadIdx.x & 31) != 0) return;
  if (different != 0) atomicAdd(counts, different);
  if (set != 0) atomicAdd(counts + 1, set);
}

/// cap tanh(x / cap), in place.
extern "C" __global__ void softcap(float* x, float cap, int64_t n) {
  each(n, [&](int64_t i) { x[i] = cap * tanhf(x[i] / cap); });
}

/// y[s,:] = x[rows[s],:], elements of 2 or 4 bytes. One block per row of y.
#define HB_GATHER(T, bytes)                                                                      \
  extern "C" __global__ void gather_rows_##bytes(const T* x, const int32_t* rows, T* y, int H) { \
    const size_t from = size_t(rows[blockIdx.x]) * H, to = size_t(blockIdx.x) * H;               \
    for (int j = threadIdx.x; j < H; j += blockDim.x) y[to + j] = x[from + j];                   \
  }
HB_GATHER(uint16_t, 2)
HB_GATHER(uint32_t, 4)

/// Parts of column sums, [blocks y, N], of `each` rows of x[T,N]: a thread per column, rows in order, fp64 inside.
#define HB_COLUMN_PARTS(E, name)                                                                                \
  extern "C" __global__ void column_parts_##name(const E* x, float* parts, int T, int N, int each) {            \
    const int j = blockIdx.x * blockDim.x + threadIdx.x, begin = blockIdx.y * each, end = min(begin + each, T); \
    if (j >= N) return;                                                                                         \
    double sum = 0;                                                                                             \
    for (int t = begin; t < end; ++t) sum += load(x + size_t(t) * N + j);                                       \
    parts[size_t(blockIdx.y) * N + j] = float(sum);                                                             \
  }
HB_COLUMN_PARTS(float, f32)
HB_COLUMN_PARTS(bf16, bf16)

/// sums[j] (+)= sum over the parts[n,N], fp64 inside: a gradient of a weight, rounded once. A block has 32 columns and
/// at most 8 warps; a warp has every so-manyth part in order, and then come the warps in order.
#define HB_COLUMN_SUMS(G, name)                                                                              \
  extern "C" __global__ void column_sums_##name(const float* parts, G* sums, int n, int N, int accumulate) { \
    __shared__ double of_warps[8 * 32];                                                                      \
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;                     \
    const int j = blockIdx.x * 32 + lane;                                                                    \
    double sum = 0;                                                                                          \
    if (j < N)                                                                                               \
      for (int p = warp; p < n; p += warps) sum += parts[size_t(p) * N + j];                                 \
    of_warps[threadIdx.x] = sum;                                                                             \
    __syncthreads();                                                                                         \
    if (warp > 0 || j >= N) return;                                                                          \
    double total = accumulate ? load(sums + j) : 0.0;                                                        \
    for (int w = 0; w < warps; ++w) total += of_warps[32 * w + lane];                                        \
    store(sums + j, float(total));                                                                           \
  }
HB_COLUMN_SUMS(float, f32)
HB_COLUMN_SUMS(bf16, bf16)

/// to[i] = sum over ranks 0 … of source.rank[r][i], in this order; bf16 summed in fp32 and rounded once. `to` may be
/// one of the sources.
#define HB_SUM(E, A, name, in, out)                                                                                \
  extern "C" __global__ void sum_ranks_##name(const __grid_constant__ Sources from, int ranks, E* to, int64_t n) { \
    each(n, [&](int64_t i) {                                                                                       \
      A sum = in(static_cast<const E*>(from.rank[0]) + i);                                                         \
      for (int r = 1; r < ranks; ++r) sum += in(static_cast<const E*>(from.rank[r]) + i);                          \
      out(to + i, sum);                                                                                            \
    });                                                                                                            \
  }                                                                                                                \
  extern "C" __global__ void max_ranks_##name(const __grid_constant__ Sources from, int ranks, E* to, int64_t n) { \
    each(n, [&](int64_t i) {                                                                                       \
      A most = in(static_cast<const E*>(from.rank[0]) + i);                                                        \
      for (int r = 1; r < ranks; ++r) most = larger_or_nan(most, A(in(static_cast<const E*>(from.rank[r]) + i)));  \
      out(to + i, most);                                                                                           \
    });                                                                                                            \
  }
HB_DEVICE int32_t load_word(const int32_t* p) { return *p; }
HB_DEVICE void store_word(int32_t* p, int32_t x) { *p = x; }
HB_SUM(float, float, f32, load, store)
HB_SUM(bf16, float, bf16, load, store)
HB_SUM(int32_t, int32_t, i32, load_word, store_word)
