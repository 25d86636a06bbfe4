// copy_boxes: strided 2-D copies with a cast, one box after another; dst may be another dtype than src.
#include "common.cuh"

namespace {

struct Box {
  int64_t src_offset, src_pitch, dst_offset, dst_pitch, rows, cols;  // elements
};

/// Block y is a box, blocks x share its elements.
template <class S, class D>
HB_DEVICE void copy_boxes(const S* src, D* dst, const Box* boxes) {
  const Box b = boxes[blockIdx.y];
  const int64_t n = b.rows * b.cols;
  for (int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; at < n; at += int64_t(gridDim.x) * blockDim.x) {
    const int64_t i = at / b.cols, j = at - i * b.cols;
    store(dst + b.dst_offset + i * b.dst_pitch + j, load(src + b.src_offset + i * b.src_pitch + j));
  }
}

}  // namespace

#define HB_BOXES(S, D, name) \
  extern "C" __global__ void copy_boxes_##name(const S* src, D* dst, const Box* boxes) { copy_boxes(src, dst, boxes); }
HB_BOXES(float, float, f32_f32)
HB_BOXES(float, bf16, f32_bf16)
HB_BOXES(bf16, float, bf16_f32)
HB_BOXES(bf16, bf16, bf16_bf16)
