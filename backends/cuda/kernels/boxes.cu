// copy_boxes: strided 2-D copies, one box after another, with a cast between fp32 and bf16, or of elements of 1, 2, 4 or 8
// bytes as they are. hash_boxes: the sum of element_hash (base/hash.h) over boxes.
#include "common.cuh"

namespace {

struct Box {
  int64_t src_offset, src_pitch, dst_offset, dst_pitch, rows, cols;  // elements
};

/// Calls visit(element of src, element of dst) for those of this thread. Block y is a box, blocks x share its elements.
template <class Visit>
HB_DEVICE void each_element(const Box* boxes, Visit visit) {
  const Box b = boxes[blockIdx.y];
  const int64_t n = b.rows * b.cols;
  for (int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; at < n; at += int64_t(gridDim.x) * blockDim.x) {
    const int64_t i = at / b.cols, j = at - i * b.cols;
    visit(b.src_offset + i * b.src_pitch + j, b.dst_offset + i * b.dst_pitch + j);
  }
}

template <class S, class D>
HB_DEVICE void copy_boxes(const S* src, D* dst, const Box* boxes) {
  each_element(boxes, [&](int64_t from, int64_t to) { store(dst + to, load(src + from)); });
}

template <class T>
HB_DEVICE void move_boxes(const T* src, T* dst, const Box* boxes) {
  each_element(boxes, [&](int64_t from, int64_t to) { dst[to] = src[from]; });
}

HB_DEVICE uint64_t element_hash(uint64_t index, uint64_t bits) {
  uint64_t z = (index + 1) * 0x9e3779b97f4a7c15u + bits;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

HB_DEVICE uint64_t bits_of(float x) { return __float_as_uint(x); }
HB_DEVICE uint64_t bits_of(bf16 x) { return __bfloat16_as_ushort(x); }

/// An element as another dtype; one that has it already is taken as it is.
HB_DEVICE void convert(float x, float& y) { y = x; }
HB_DEVICE void convert(bf16 x, bf16& y) { y = x; }
HB_DEVICE void convert(float x, bf16& y) { store(&y, x); }
HB_DEVICE void convert(bf16 x, float& y) { y = load(&x); }

/// sum[0] += over all boxes; the order of an integer sum is of no importance.
template <class S, class D>
HB_DEVICE void hash_boxes(const S* src, unsigned long long* sum, const Box* boxes) {
  unsigned long long mine = 0;
  each_element(boxes, [&](int64_t from, int64_t index) {
    D element;
    convert(src[from], element);
    mine += element_hash(uint64_t(index), bits_of(element));
  });
#pragma unroll
  for (int m = 16; m > 0; m >>= 1) mine += __shfl_xor_sync(0xffffffffu, mine, m);
  if ((threadIdx.x & 31) == 0) atomicAdd(sum, mine);
}

}  // namespace

#define HB_BOXES(S, D, name) \
  extern "C" __global__ void copy_boxes_##name(const S* src, D* dst, const Box* boxes) { copy_boxes(src, dst, boxes); }
HB_BOXES(float, bf16, f32_bf16)
HB_BOXES(bf16, float, bf16_f32)

#define HB_MOVE(T, bytes) \
  extern "C" __global__ void move_boxes_##bytes(const T* src, T* dst, const Box* boxes) { move_boxes(src, dst, boxes); }
HB_MOVE(uint8_t, 1)
HB_MOVE(uint16_t, 2)
HB_MOVE(uint32_t, 4)
HB_MOVE(uint64_t, 8)

#define HB_HASH(S, D, name)                                                                                   \
  extern "C" __global__ void hash_boxes_##name(const S* src, unsigned long long* sum, const Box* boxes) {     \
    hash_boxes<S, D>(src, sum, boxes);                                                                        \
  }
HB_HASH(float, float, f32_f32)
HB_HASH(float, bf16, f32_bf16)
HB_HASH(bf16, float, bf16_f32)
HB_HASH(bf16, bf16, bf16_bf16)
