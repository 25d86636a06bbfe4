// swiglu: gate_up[T,2I] -> act[T,I] = silu(gate) up, and its backward.
#include "common.cuh"

namespace {

HB_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

template <class E>
HB_DEVICE void swiglu(const E* gate_up, E* act, int T, int I) {
  const int64_t n = int64_t(T) * I;
  for (int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; at < n; at += int64_t(gridDim.x) * blockDim.x) {
    const int64_t t = at / I, j = at - t * I;
    const float g = load(gate_up + 2 * t * I + j), u = load(gate_up + (2 * t + 1) * I + j);
    store(act + at, g * sigmoid(g) * u);
  }
}

template <class E>
HB_DEVICE void swiglu_backward(const E* dact, const E* gate_up, E* dgate_up, int T, int I) {
  const int64_t n = int64_t(T) * I;
  for (int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; at < n; at += int64_t(gridDim.x) * blockDim.x) {
    const int64_t t = at / I, j = at - t * I;
    const int64_t gate = 2 * t * I + j, up = gate + I;
    const float d = load(dact + at), g = load(gate_up + gate), u = load(gate_up + up);
    const float s = sigmoid(g), silu = g * s;
    store(dgate_up + gate, d * u * (s + silu * (1.0f - s)));
    store(dgate_up + up, d * silu);
  }
}

}  // namespace

#define HB_SWIGLU(E, name)                                                                                         \
  extern "C" __global__ void swiglu_##name(const E* gate_up, E* act, int T, int I) { swiglu(gate_up, act, T, I); } \
  extern "C" __global__ void swiglu_backward_##name(const E* dact, const E* gate_up, E* dgate_up, int T, int I) {  \
    swiglu_backward(dact, gate_up, dgate_up, T, I);                                                                \
  }
HB_SWIGLU(float, f32)
HB_SWIGLU(bf16, bf16)
