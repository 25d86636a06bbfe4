// Activations: gated ones, gate_up[T,2I] -> act[T,I] = f(gate) g(up), and gelu, which has no gate; with their backward.
//   swiglu          silu(gate) up
//   geglu           gelu(gate) up, gelu by tanh
//   clamped_swiglu  with gate bent to at most limit and up to ±limit: gate sigmoid(alpha gate) (up + 1)
#include "common.cuh"

namespace {

HB_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

/// A function and its slope there.
struct Activated {
  float value, slope;
};
HB_DEVICE Activated silu(float g) {
  const float s = sigmoid(g), value = g * s;
  return {value, s + value * (1.0f - s)};
}
/// 1/2 (1 + tanh u) is the sigmoid of 2 u.
HB_DEVICE Activated gelu(float g) {
  constexpr float twice = 1.5957691216057308f, cubic = 0.044715f;  // 2 sqrt(2 / pi)
  const float s = sigmoid(twice * g * (1.0f + cubic * g * g)), value = g * s;
  return {value, s + value * (1.0f - s) * twice * (1.0f + 3.0f * cubic * g * g)};
}

struct Swiglu {
  HB_DEVICE Activated gate(float g) const { return silu(g); }
  HB_DEVICE Activated up(float u) const { return {u, 1.0f}; }
};
struct Geglu {
  HB_DEVICE Activated gate(float g) const { return gelu(g); }
  HB_DEVICE Activated up(float u) const { return {u, 1.0f}; }
};
/// What the limit clamps has no slope.
struct ClampedSwiglu {
  float limit, alpha;
  HB_DEVICE Activated gate(float g) const {
    const float bent = fminf(g, limit), s = sigmoid(alpha * bent), value = bent * s;
    return {value, g > limit ? 0.0f : s + alpha * value * (1.0f - s)};
  }
  HB_DEVICE Activated up(float u) const {
    return {fmaxf(fminf(u, limit), -limit) + 1.0f, u > limit || u < -limit ? 0.0f : 1.0f};
  }
};

/// Calls visit(element of [T,I], where its gate is; its up is I further) for the elements of this thread.
template <class Visit>
HB_DEVICE void each(int T, int I, Visit visit) {
  const int64_t n = int64_t(T) * I, begin = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  int64_t row = begin / I;
  int column = int(begin % I);
  const int64_t rows_on = stride / I;
  const int columns_on = int(stride % I);
  for (int64_t at = begin; at < n; at += stride) {
    visit(at, at + row * I);
    row += rows_on, column += columns_on;
    if (column >= I) column -= I, ++row;
  }
}

template <class E, class Gated>
HB_DEVICE void gated(const E* gate_up, E* act, int T, int I, Gated by) {
  each(T, I, [&](int64_t at, int64_t gate) {
    store(act + at, by.gate(load(gate_up + gate)).value * by.up(load(gate_up + gate + I)).value);
  });
}

template <class E, class Gated>
HB_DEVICE void gated_backward(const E* dact, const E* gate_up, E* dgate_up, int T, int I, Gated by) {
  each(T, I, [&](int64_t at, int64_t gate) {
    const float d = load(dact + at);
    const Activated g = by.gate(load(gate_up + gate)), u = by.up(load(gate_up + gate + I));
    store(dgate_up + gate, d * u.value * g.slope);
    store(dgate_up + gate + I, d * g.value * u.slope);
  });
}

}  // namespace

#define HB_GATED(E, kind, Kind, name)                                                                              \
  extern "C" __global__ void kind##_##name(const E* gate_up, E* act, int T, int I) {                               \
    gated(gate_up, act, T, I, Kind{});                                                                             \
  }                                                                                                                \
  extern "C" __global__ void kind##_backward_##name(const E* dact, const E* gate_up, E* dgate_up, int T, int I) {  \
    gated_backward(dact, gate_up, dgate_up, T, I, Kind{});                                                         \
  }
HB_GATED(float, swiglu, Swiglu, f32)
HB_GATED(bf16, swiglu, Swiglu, bf16)
HB_GATED(float, geglu, Geglu, f32)
HB_GATED(bf16, geglu, Geglu, bf16)

#define HB_ACTIVATIONS(E, name)                                                                                    \
  extern "C" __global__ void clamped_swiglu_##name(const E* gate_up, E* act, int T, int I, float limit,            \
                                                   float alpha) {                                                  \
    gated(gate_up, act, T, I, ClampedSwiglu{limit, alpha});                                                        \
  }                                                                                                                \
  extern "C" __global__ void clamped_swiglu_backward_##name(const E* dact, const E* gate_up, E* dgate_up, int T,   \
                                                            int I, float limit, float alpha) {                     \
    gated_backward(dact, gate_up, dgate_up, T, I, ClampedSwiglu{limit, alpha});                                    \
  }                                                                                                                \
  extern "C" __global__ void gelu_##name(const E* x, E* y, int T, int I) {                                         \
    each(T, I, [&](int64_t at, int64_t) { store(y + at, gelu(load(x + at)).value); });                             \
  }                                                                                                                \
  extern "C" __global__ void gelu_backward_##name(const E* dy, const E* x, E* dx, int T, int I) {                  \
    each(T, I, [&](int64_t at, int64_t) { store(dx + at, load(dy + at) * gelu(load(x + at)).slope); });            \
  }
HB_ACTIVATIONS(float, f32)
HB_ACTIVATIONS(bf16, bf16)
