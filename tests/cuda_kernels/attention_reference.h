// Causal attention of packed sequences and its gradients in fp64: by the oracle that drawn ops are held to.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "backends/cuda/kernels/attention.h"
#include "tests/conformance/oracle.h"
#include "tests/cuda_kernels/kernel_device.h"

namespace hotbunk::ptx {

/// Heads, key-value heads and numbers of a head; where sequences begin; numbers of a value where they are others, and
/// how far a query sees and what scores are capped at, where that is said.
struct Shape {
  int a, k, d;
  std::vector<std::int32_t> cu;
  int v = 0, window = 0;
  float softcap = 0.0f;
  int T() const { return cu.back(); }
  int S() const { return static_cast<int>(cu.size()) - 1; }
  int of_value() const { return v > 0 ? v : d; }
  int of_keys() const { return k * (d + of_value()); }  // of a row, keys and values
  int width() const { return a * d + of_keys(); }
  AttentionHeads heads() const { return {a, k, d, of_value()}; }
  ScoreOptions scores(float scale) const { return {scale, softcap, window}; }
};

namespace detail {

template <class E>
conformance::Numbers numbers(std::vector<std::int64_t> shape, const std::vector<E>& of) {
  std::vector<double> values;
  for (const E& x : of) {
    if constexpr (std::is_same_v<E, double>) values.push_back(x);
    else values.push_back(value(x));
  }
  return {std::is_same_v<E, Bf16> ? DType::bf16 : DType::f32, std::move(shape), std::move(values)};
}
inline conformance::Numbers offsets(const Shape& s) {
  return {DType::i32, {s.S() + 1}, std::vector<double>(s.cu.begin(), s.cu.end())};
}
/// The op on these inputs; its outputs are of these shapes.
inline std::vector<conformance::Wanted> evaluated(
    OpKind kind, const Shape& s, double scale, const std::vector<conformance::Numbers>& inputs,
    const std::vector<std::pair<DType, std::vector<std::int64_t>>>& outputs) {
  conformance::OpCase c{kind, {}, {}, {}, {}};
  c.attrs = {{Attr::heads, std::int64_t{s.a}},
             {Attr::kv_heads, std::int64_t{s.k}},
             {Attr::head_dim, std::int64_t{s.d}},
             {Attr::value_dim, std::int64_t{s.of_value()}},
             {Attr::window, std::int64_t{s.window}},
             {Attr::softcap, static_cast<double>(s.softcap)},
             {Attr::scale, scale}};
  std::vector<conformance::Numbers> given = inputs;
  for (std::size_t i = 0; i < inputs.size(); ++i)
    c.inputs.push_back(i), c.operands.push_back({"", inputs[i].dtype(), {}, {}});
  for (const auto& [dtype, shape] : outputs) {
    std::int64_t n = 1;
    for (const std::int64_t extent : shape) n *= extent;
    c.outputs.push_back(c.operands.size()), c.operands.push_back({"", dtype, shape, {}});
    given.emplace_back(dtype, shape, std::vector<double>(static_cast<std::size_t>(n)));
  }
  return conformance::expected(c, given, 0);
}

}  // namespace detail

inline std::vector<double> values_of(const conformance::Wanted& wanted) {
  std::vector<double> out;
  for (const conformance::Bounded& b : wanted.numbers) out.push_back(b.value);
  return out;
}

/// Attention in fp64, with how far a kernel may be from it: o[T, a v] in E, lse[T, a].
struct Attended {
  conformance::Wanted o, lse;
};
template <class E>
Attended attention_of(const Shape& s, const std::vector<E>& x, double scale) {
  auto found = detail::evaluated(
      OpKind::attention, s, scale,
      {detail::numbers(std::vector<std::int64_t>{s.T(), s.width()}, x), detail::offsets(s)},
      {{std::is_same_v<E, Bf16> ? DType::bf16 : DType::f32, {s.T(), s.a * s.of_value()}}, {DType::f32, {s.T(), s.a}}});
  return {std::move(found[0]), std::move(found[1])};
}
/// Its gradients dx[T, width], of the o and log-sum-exps that a kernel reads.
template <class E, class O, class L>
conformance::Wanted attention_gradient_of(const Shape& s, const std::vector<E>& x, const std::vector<E>& g,
                                          const std::vector<O>& o, const std::vector<L>& lse, double scale) {
  const std::vector<std::int64_t> of_x = {s.T(), s.width()}, of_o = {s.T(), s.a * s.of_value()}, of_lse = {s.T(), s.a};
  auto found = detail::evaluated(OpKind::attention_backward, s, scale,
                                 {detail::numbers(of_o, g), detail::numbers(of_x, x), detail::numbers(of_o, o),
                                  detail::numbers(of_lse, lse), detail::offsets(s)},
                                 {{std::is_same_v<E, Bf16> ? DType::bf16 : DType::f32, of_x}});
  return std::move(found[0]);
}
template <class E>
void near(const std::vector<E>& got, const conformance::Wanted& wanted) {
  REQUIRE(got.size() == wanted.numbers.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    const conformance::Bounded& b = wanted.numbers[i];
    INFO("element " << i << ": " << value(got[i]) << ", not " << b.value << " to within " << b.error);
    REQUIRE(std::abs(value(got[i]) - b.value) <= b.error);
  }
}

}  // namespace hotbunk::ptx
