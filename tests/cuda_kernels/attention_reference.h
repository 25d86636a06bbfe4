// Causal attention of packed sequences and its gradients in fp64.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/cuda_kernels/kernel_device.h"

namespace hotbunk::ptx {

/// Heads, key-value heads and numbers of a head; where sequences begin.
struct Shape {
  int a, k, d;
  std::vector<std::int32_t> cu;
  int T() const { return cu.back(); }
  int S() const { return static_cast<int>(cu.size()) - 1; }
  int width() const { return (a + 2 * k) * d; }
};

/// Outputs and gradients of attention in fp64; and the sums of what they are made of, each taken as positive, which a
/// rounding of p or ds moves them by a part of.
template <class E>
struct Reference {
  std::vector<double> o, lse, dx, o_parts, dx_parts;
  Reference(const Shape& s, const std::vector<E>& x, const std::vector<E>& g, double scale)
      : o(static_cast<std::size_t>(s.T() * s.a * s.d)),
        lse(static_cast<std::size_t>(s.T() * s.a)),
        dx(x.size()),
        o_parts(o.size()),
        dx_parts(x.size()) {
    const auto at = [&](int t, int column, int j) {
      return static_cast<std::size_t>(t * s.width() + column * s.d + j);
    };
    for (int q = 0; q < s.S(); ++q)
      for (int t = s.cu[static_cast<std::size_t>(q)]; t < s.cu[static_cast<std::size_t>(q) + 1]; ++t)
        for (int h = 0; h < s.a; ++h) {
          const int begin = s.cu[static_cast<std::size_t>(q)], key = s.a + h / (s.a / s.k), val = key + s.k;
          const auto out = [&](int j) { return static_cast<std::size_t>((t * s.a + h) * s.d + j); };
          std::vector<double> p;
          double sum = 0;
          for (int u = begin; u <= t; ++u) {
            double score = 0;
            for (int j = 0; j < s.d; ++j) score += value(x[at(t, h, j)]) * value(x[at(u, key, j)]);
            p.push_back(std::exp(score * scale));
            sum += p.back();
          }
          lse[static_cast<std::size_t>(t * s.a + h)] = std::log(sum);
          double delta = 0, delta_parts = 0;
          for (int u = begin; u <= t; ++u) p[static_cast<std::size_t>(u - begin)] /= sum;
          for (int j = 0; j < s.d; ++j) {
            for (int u = begin; u <= t; ++u) {
              const double part = p[static_cast<std::size_t>(u - begin)] * value(x[at(u, val, j)]);
              o[out(j)] += part, o_parts[out(j)] += std::abs(part);
            }
            delta += o[out(j)] * value(g[out(j)]), delta_parts += std::abs(o[out(j)] * value(g[out(j)]));
          }
          for (int u = begin; u <= t; ++u) {
            const double pu = p[static_cast<std::size_t>(u - begin)];
            double dp = 0;
            for (int j = 0; j < s.d; ++j) dp += value(g[out(j)]) * value(x[at(u, val, j)]);
            for (int j = 0; j < s.d; ++j) {
              const double ds = pu * (dp - delta) * scale;
              dx[at(t, h, j)] += ds * value(x[at(u, key, j)]);
              dx[at(u, key, j)] += ds * value(x[at(t, h, j)]);
              dx[at(u, val, j)] += pu * value(g[out(j)]);
              const double most = pu * (std::abs(dp) + delta_parts) * scale;
              dx_parts[at(t, h, j)] += most * std::abs(value(x[at(u, key, j)]));
              dx_parts[at(u, key, j)] += most * std::abs(value(x[at(t, h, j)]));
              dx_parts[at(u, val, j)] += pu * std::abs(value(g[out(j)]));
            }
          }
        }
  }
};

}  // namespace hotbunk::ptx
