// split_heads: x[T,Q] -> y[W,T,Q'], for each part its query heads and the KV heads that they attend to. merge_heads
// goes back; a KV head that several parts have is their sum in the parts' order. a, k, d, v: all heads, and the widths of
// queries and keys, and of values; parts divides a, and k or is a multiple of it; k = 0: query heads alone.
#include "common.cuh"

namespace {

/// Elements of a part's row: of its query heads, of its key heads, of their values.
struct PartOfHeads {
  int queries, keys, values;
  HB_DEVICE PartOfHeads(int a, int k, int d, int v, int parts) : queries(a / parts * d) {
    const int heads = k == 0 ? 0 : k < parts ? 1 : k / parts;
    keys = heads * d, values = heads * v;
  }
  HB_DEVICE int width() const { return queries + keys + values; }
};

template <class E>
HB_DEVICE void split_heads(const E* x, E* y, int T, int a, int k, int d, int v, int parts) {
  const PartOfHeads part(a, k, d, v, parts);
  const int width = part.width(), whole = (a + k) * d + k * v;
  const int64_t n = int64_t(parts) * T * width;
  for (int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; at < n; at += int64_t(gridDim.x) * blockDim.x) {
    const int64_t line = at / width;
    const int r = int(line / T), t = int(line - int64_t(r) * T), c = int(at - line * width);
    int from = r * part.queries + c;
    if (c >= part.queries) {
      const int j = c - part.queries, head = int(int64_t(r) * k / parts);  // the part's first KV head
      from = j < part.keys ? (a + head) * d + j : (a + k) * d + head * v + j - part.keys;
    }
    y[at] = x[int64_t(t) * whole + from];
  }
}

template <class E>
HB_DEVICE void merge_heads(const E* y, E* x, int T, int a, int k, int d, int v, int parts) {
  const PartOfHeads part(a, k, d, v, parts);
  const int width = part.width(), whole = (a + k) * d + k * v, sharers = k > 0 && k < parts ? parts / k : 1;
  const int64_t n = int64_t(T) * whole;
  for (int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; at < n; at += int64_t(gridDim.x) * blockDim.x) {
    const int t = int(at / whole), c = int(at - int64_t(t) * whole);
    if (c < a * d) {
      const int r = c / part.queries;
      x[at] = y[(int64_t(r) * T + t) * width + c - r * part.queries];
      continue;
    }
    const bool value = c >= (a + k) * d;
    const int j = c - (value ? a + k : a) * d, of_part = value ? part.values : part.keys;
    const int group = j / of_part, r = group * sharers;
    const int64_t column = part.queries + (value ? part.keys : 0) + j - group * of_part;
    float sum = load(y + (int64_t(r) * T + t) * width + column);
    for (int i = 1; i < sharers; ++i) sum += load(y + (int64_t(r + i) * T + t) * width + column);
    store(x + at, sum);
  }
}

}  // namespace

#define HB_HEADS(E, name)                                                                                         \
  extern "C" __global__ void split_heads_##name(const E* x, E* y, int T, int a, int k, int d, int v, int parts) { \
    split_heads(x, y, T, a, k, d, v, parts);                                                                      \
  }                                                                                                               \
  extern "C" __global__ void merge_heads_##name(const E* y, E* x, int T, int a, int k, int d, int v, int parts) { \
    merge_heads(y, x, T, a, k, d, v, parts);                                                                      \
  }
HB_HEADS(float, f32)
HB_HEADS(bf16, bf16)
