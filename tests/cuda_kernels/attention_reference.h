// Causal attention of packed sequences and its gradients in fp64.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "backends/cuda/kernels/attention.h"
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

/// Outputs and gradients of attention in fp64; and the sums of what they are made of, each taken as positive, which a
/// rounding of p or ds moves them by a part of.
template <class E>
struct Reference {
  std::vector<double> o, lse, dx, o_parts, dx_parts;
  Reference(const Shape& s, const std::vector<E>& x, const std::vector<E>& g, double scale)
      : o(static_cast<std::size_t>(s.T() * s.a * s.of_value())),
        lse(static_cast<std::size_t>(s.T() * s.a)),
        dx(x.size()),
        o_parts(o.size()),
        dx_parts(x.size()) {
    const int v_d = s.of_value();
    const auto at = [&](int t, int column, int j) { return static_cast<std::size_t>(t * s.width() + column + j); };
    for (int q = 0; q < s.S(); ++q)
      for (int t = s.cu[static_cast<std::size_t>(q)]; t < s.cu[static_cast<std::size_t>(q) + 1]; ++t)
        for (int h = 0; h < s.a; ++h) {
          const int begin = s.cu[static_cast<std::size_t>(q)], kv = h / (s.a / s.k);
          const int first = s.window > 0 ? std::max(begin, t - s.window + 1) : begin;
          const int query = h * s.d, key = (s.a + kv) * s.d, val = (s.a + s.k) * s.d + kv * v_d;
          const auto out = [&](int j) { return static_cast<std::size_t>((t * s.a + h) * v_d + j); };
          std::vector<double> p, slope;
          double sum = 0;
          for (int u = first; u <= t; ++u) {
            double score = 0;
            for (int j = 0; j < s.d; ++j) score += value(x[at(t, query, j)]) * value(x[at(u, key, j)]);
            score *= scale;
            const double capped = s.softcap > 0 ? std::tanh(score / s.softcap) : 0.0;
            p.push_back(std::exp(s.softcap > 0 ? s.softcap * capped : score));
            slope.push_back(1 - capped * capped);
            sum += p.back();
          }
          lse[static_cast<std::size_t>(t * s.a + h)] = std::log(sum);
          double delta = 0, delta_parts = 0;
          for (double& pu : p) pu /= sum;
          for (int j = 0; j < v_d; ++j) {
            for (int u = first; u <= t; ++u) {
              const double part = p[static_cast<std::size_t>(u - first)] * value(x[at(u, val, j)]);
              o[out(j)] += part, o_parts[out(j)] += std::abs(part);
            }
            delta += o[out(j)] * value(g[out(j)]), delta_parts += std::abs(o[out(j)] * value(g[out(j)]));
          }
          for (int u = first; u <= t; ++u) {
            const double pu = p[static_cast<std::size_t>(u - first)], bent = slope[static_cast<std::size_t>(u - first)];
            double dp = 0;
            for (int j = 0; j < v_d; ++j) dp += value(g[out(j)]) * value(x[at(u, val, j)]);
            const double ds = pu * (dp - delta) * bent * scale, most = pu * (std::abs(dp) + delta_parts) * scale;
            for (int j = 0; j < s.d; ++j) {
              dx[at(t, query, j)] += ds * value(x[at(u, key, j)]);
              dx[at(u, key, j)] += ds * value(x[at(t, query, j)]);
              dx_parts[at(t, query, j)] += most * std::abs(value(x[at(u, key, j)]));
              dx_parts[at(u, key, j)] += most * std::abs(value(x[at(t, query, j)]));
            }
            for (int j = 0; j < v_d; ++j) {
              dx[at(u, val, j)] += pu * value(g[out(j)]);
              dx_parts[at(u, val, j)] += pu * std::abs(value(g[out(j)]));
            }
          }
        }
  }
};

}  // namespace hotbunk::ptx
