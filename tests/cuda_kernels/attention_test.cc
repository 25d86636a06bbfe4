// Attention over packed sequences and over a paged pool, against fp64; and bit for bit the same for training, prefill
// and decode (P5).
#include <catch2/catch.hpp>
#include <cmath>

#include "tests/cuda_kernels/kernel_device.h"

using namespace hotbunk;
using namespace hotbunk::ptx;

namespace {

struct Shape {
  int a, k, d;
  std::vector<std::int32_t> cu;
  int T() const { return cu.back(); }
  int S() const { return static_cast<int>(cu.size()) - 1; }
  int width() const { return (a + 2 * k) * d; }
};

const std::vector<Shape> shapes = {{2, 1, 8, {0, 5}}, {4, 2, 40, {0, 1, 7, 12}}, {3, 3, 64, {0, 4, 4, 9}}};

std::uint32_t blocks_of(std::int64_t warps) { return static_cast<std::uint32_t>((warps + 1) / 2); }  // of 64 threads

/// Outputs and gradients of attention in fp64.
template <class E>
struct Reference {
  std::vector<double> o, lse, dx;
  Reference(const Shape& s, const std::vector<E>& x, const std::vector<E>& g, double scale)
      : o(static_cast<std::size_t>(s.T() * s.a * s.d)), lse(static_cast<std::size_t>(s.T() * s.a)), dx(x.size()) {
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
          double delta = 0;
          for (int u = begin; u <= t; ++u) p[static_cast<std::size_t>(u - begin)] /= sum;
          for (int j = 0; j < s.d; ++j) {
            for (int u = begin; u <= t; ++u)
              o[out(j)] += p[static_cast<std::size_t>(u - begin)] * value(x[at(u, val, j)]);
            delta += o[out(j)] * value(g[out(j)]);
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
            }
          }
        }
  }
};

}  // namespace

TEMPLATE_TEST_CASE("attention of packed sequences, and its backward", "[kernels]", float, Bf16) {
  using E = TestType;
  const std::string name = suffix<E>;
  Device d("attention");
  for (const Shape& s : shapes) {
    Draw draw(static_cast<std::uint64_t>(s.d));
    const float scale = 1.0f / std::sqrt(static_cast<float>(s.d));
    const auto T = static_cast<std::size_t>(s.T()), a = static_cast<std::size_t>(s.a),
               ad = a * static_cast<std::size_t>(s.d);
    Array<E> x(d.memory, "x", draw.numbers<E>(T * static_cast<std::size_t>(s.width()), 2.0)),
        g(d.memory, "do", draw.numbers<E>(T * ad));
    Array<E> o(d.memory, "o", T * ad), dx(d.memory, "dx", x.size());
    Array<float> lse(d.memory, "lse", T * a), delta(d.memory, "delta", T * a);
    Array<std::int32_t> cu(d.memory, "cu_seqlens", s.cu);
    d.run("attention_" + name, {blocks_of(s.T() * s.a)}, 64, x.begin(), cu.begin(), o.begin(), lse.begin(), s.T(),
          s.S(), s.a, s.k, s.d, scale);
    d.run("attention_query_backward_" + name, {blocks_of(s.T() * s.a)}, 64, g.begin(), x.begin(), o.begin(),
          lse.begin(), cu.begin(), dx.begin(), delta.begin(), s.T(), s.S(), s.a, s.k, s.d, scale);
    d.run("attention_key_backward_" + name, {blocks_of(s.T() * s.k)}, 64, g.begin(), x.begin(), lse.begin(),
          delta.begin(), cu.begin(), dx.begin(), s.T(), s.S(), s.a, s.k, s.d, scale);
    const Reference<E> wanted(s, x.values(), g.values(), scale);
    near(o.values(), wanted.o, 1e-5 + unit<E>, 1e-5);
    near(lse.values(), wanted.lse, 1e-5, 1e-5);
    // delta is formed from the rounded o: a rounding of it, times |do| |v| d, on top.
    near(dx.values(), wanted.dx, 1e-5 + unit<E>, 1e-5 + 4 * unit<E>);
  }
}

TEMPLATE_TEST_CASE("prefill in chunks and decode give the bits of the whole sequence", "[kernels]", float, Bf16) {
  using E = TestType;
  const std::string name = suffix<E>;
  Device d("attention");
  const Shape s{4, 2, 24, {0, 9}};
  const int block_tokens = 4, max_blocks = 4;
  const float scale = 0.2f;
  Draw draw(1);
  const auto ad = static_cast<std::size_t>(s.a * s.d), width = static_cast<std::size_t>(s.width());
  Array<E> x(d.memory, "x", draw.numbers<E>(9 * width)), whole(d.memory, "o", 9 * ad);
  Array<float> lse(d.memory, "lse", 9 * 4);
  Array<std::int32_t> cu(d.memory, "cu_seqlens", s.cu);
  d.run("attention_" + name, {18}, 64, x.begin(), cu.begin(), whole.begin(), lse.begin(), 9, 1, s.a, s.k, s.d, scale);
  // The pool's blocks in no order; chunks of 4 and 3 rows, then two decode steps of one.
  Array<E> pool(d.memory, "pool", static_cast<std::size_t>(5 * 2 * block_tokens * s.k * s.d));
  Array<std::int32_t> table(d.memory, "table", std::vector<std::int32_t>{3, 0, 4, 1});
  std::vector<E> got;
  for (const auto& [from, rows] : std::vector<std::pair<int, int>>{{0, 4}, {4, 3}, {7, 1}, {8, 1}}) {
    std::vector<std::int32_t> slots;
    for (int t = from; t < from + rows; ++t)
      slots.push_back(table[static_cast<std::size_t>(t / block_tokens)] * block_tokens + t % block_tokens);
    Array<std::int32_t> where(d.memory, "slots", slots), chunk(d.memory, "cu", std::vector<std::int32_t>{0, rows}),
        length(d.memory, "lengths", std::vector<std::int32_t>{from + rows});
    Array<E> part(d.memory, "part",
                  std::vector<E>(x.begin() + from * s.width(), x.begin() + (from + rows) * s.width())),
        o(d.memory, "o", static_cast<std::size_t>(rows) * ad);
    d.run("kv_write_" + name, {static_cast<std::uint32_t>(rows)}, 32, part.begin(), where.begin(), pool.begin(), s.a,
          s.k, s.d, block_tokens);
    d.run("paged_attention_" + name, {blocks_of(rows * s.a)}, 64, part.begin(), pool.begin(), chunk.begin(),
          table.begin(), length.begin(), o.begin(), rows, 1, s.a, s.k, s.d, block_tokens, max_blocks, scale);
    const auto values = o.values();
    got.insert(got.end(), values.begin(), values.end());
  }
  CHECK(got == whole.values());
}
