// The kernels of a whole training and rollout step beside those of kernels_test.cc, against the same formulas in fp64.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

#include "backends/cuda/kernels/many.h"
#include "base/hash.h"
#include "tests/cuda_kernels/kernel_device.h"

using namespace hotbunk;
using namespace hotbunk::ptx;

namespace {

std::uint32_t blocks_of(std::int64_t n, std::int64_t each) { return static_cast<std::uint32_t>((n + each - 1) / each); }

struct Box {
  std::int64_t src_offset, src_pitch, dst_offset, dst_pitch, rows, cols;
};

}  // namespace

TEST_CASE("fp32 matrix products, whole and ragged tiles; a row does not depend on how many rows there are",
          "[kernels]") {
  Device d("matmul_f32");
  const std::vector<std::array<int, 3>> shapes = {{32, 64, 16}, {1, 5, 8}, {70, 33, 41}, {17, 129, 3}};
  std::uint64_t seed = 1;
  for (const auto& [M, N, K] : shapes)
    for (const char* form : {"nt", "nn", "tn"}) {
      INFO(form << " " << M << " x " << N << " x " << K);
      Draw draw(seed++);
      const auto m = static_cast<std::size_t>(M), n = static_cast<std::size_t>(N), k = static_cast<std::size_t>(K);
      const bool accumulate = seed % 2 == 0, has_bias = seed % 3 == 0;
      Array<float> a(d.memory, "a", draw.numbers<float>(m * k)), b(d.memory, "b", draw.numbers<float>(n * k)),
          bias(d.memory, "bias", draw.numbers<float>(n)), c(d.memory, "c", draw.numbers<float>(m * n));
      const auto before = c.values();
      const auto run = [&](int rows) {
        d.run(std::string("matmul_") + form + "_f32_f32", {blocks_of(N, 64), blocks_of(rows, 32)}, 32, a.begin(),
              form[0] == 't' ? rows : K, b.begin(), has_bias ? bias.begin() : nullptr, c.begin(), N, rows, N, K,
              int{accumulate});
      };
      run(M);
      std::vector<double> wanted(m * n);
      for (std::size_t r = 0; r < m; ++r)
        for (std::size_t q = 0; q < n; ++q) {
          double sum = (accumulate ? value(before[r * n + q]) : 0.0) + (has_bias ? value(bias[q]) : 0.0);
          for (std::size_t x = 0; x < k; ++x)
            sum += value(a[form[0] == 'n' ? r * k + x : x * m + r]) * value(b[form[1] == 't' ? q * k + x : x * n + q]);
          wanted[r * n + q] = sum;
        }
      near(c.values(), wanted, 1e-6, 1e-6 * std::sqrt(K));
      if (form[0] != 'n') continue;
      const std::vector<float> whole(c.begin(), c.begin() + N);
      std::copy(before.begin(), before.end(), c.begin());
      run(1);
      CHECK(std::vector<float>(c.begin(), c.begin() + N) == whole);
    }
}

TEMPLATE_TEST_CASE("qk_norm and its backward: heads by weights of their own, values as they are", "[kernels]", float,
                   Bf16) {
  using E = TestType;
  Device d("norm");
  Draw draw(3);
  const int T = 3, a = 4, k = 2, D = 40, heads = a + 2 * k;
  const auto n = static_cast<std::size_t>(T * heads * D);
  Array<E> x(d.memory, "x", draw.numbers<E>(n)), dy(d.memory, "dy", draw.numbers<E>(n)),
      qw(d.memory, "qw", draw.numbers<E>(D)), kw(d.memory, "kw", draw.numbers<E>(D)), y(d.memory, "y", n);
  constexpr int each = 2, n_parts = 2;  // rows of a part
  Array<float> rstd(d.memory, "rstd", T * (a + k)), parts(d.memory, "parts", 2 * n_parts * D);
  const auto g = dy.values();
  const float eps = 1e-5f, offset = 1.0f;
  const std::string e = suffix<E>;
  d.run("qk_norm_" + e, {blocks_of(T * heads, 4)}, 128, x.begin(), qw.begin(), kw.begin(), y.begin(), rstd.begin(), T,
        a, k, D, eps, offset);
  Array<E> frozen(d.memory, "dx of frozen weights", n);
  float* no_parts = nullptr;
  d.run("qk_norm_backward_" + e, {n_parts}, 64, dy.begin(), x.begin(), qw.begin(), kw.begin(), rstd.begin(),
        frozen.begin(), no_parts, T, a, k, D, each, offset);
  d.run("qk_norm_backward_" + e, {n_parts}, 128, dy.begin(), x.begin(), qw.begin(), kw.begin(), rstd.begin(),
        dy.begin(), parts.begin(), T, a, k, D, each, offset);
  CHECK(frozen.values() == dy.values());
  std::vector<double> wanted(n), wanted_dx(n), wanted_dqw(D), wanted_dkw(D);
  for (std::size_t row = 0; row < static_cast<std::size_t>(T * heads); ++row) {
    const std::size_t head = row % heads, at = row * D;
    if (head >= a + k) {
      for (std::size_t j = at; j < at + D; ++j) wanted[j] = value(x[j]), wanted_dx[j] = value(g[j]);
      continue;
    }
    auto& w = head < a ? qw : kw;
    double squares = 0, dot = 0;
    for (std::size_t j = 0; j < D; ++j) squares += value(x[at + j]) * value(x[at + j]);
    for (std::size_t j = 0; j < D; ++j) dot += value(g[at + j]) * (value(w[j]) + offset) * value(x[at + j]);
    const double r = 1 / std::sqrt(squares / D + eps);
    for (std::size_t j = 0; j < D; ++j) {
      wanted[at + j] = value(x[at + j]) * r * (value(w[j]) + offset);
      wanted_dx[at + j] = value(g[at + j]) * (value(w[j]) + offset) * r - value(x[at + j]) * dot / D * r * r * r;
      (head < a ? wanted_dqw : wanted_dkw)[j] += value(g[at + j]) * value(x[at + j]) * r;
    }
  }
  near(y.values(), wanted, 1e-5 + unit<E>, 0);
  near(dy.values(), wanted_dx, 1e-5 + unit<E>, 2e-5);
  near(summed(parts.begin(), n_parts, std::vector<float>(D)), wanted_dqw, 1e-5, 1e-5);
  near(summed(parts.begin() + n_parts * D, n_parts, std::vector<float>(D)), wanted_dkw, 1e-5, 1e-5);
}

TEST_CASE("sums, casts, rows and columns", "[kernels]") {
  Device d("elementwise");
  Draw draw(4);
  const std::int64_t n = 77;
  Array<float> x(d.memory, "x", draw.numbers<float>(n)), z(d.memory, "z", n), wide(d.memory, "wide", n);
  Array<Bf16> y(d.memory, "y", draw.numbers<Bf16>(n)), narrow(d.memory, "narrow", n);
  d.run("add_f32_bf16", {2}, 32, x.begin(), y.begin(), z.begin(), n);
  d.run("cast_f32_bf16", {2}, 32, x.begin(), narrow.begin(), n);
  d.run("cast_bf16_f32", {2}, 32, y.begin(), wide.begin(), n);
  for (std::size_t i = 0; i < n; ++i) {
    CHECK(z[i] == x[i] + from_bf16(y[i]));
    CHECK(narrow[i] == ptx::to_bf16(x[i]));
    CHECK(wide[i] == from_bf16(y[i]));
  }
  Array<std::int32_t> rows(d.memory, "rows", std::vector<std::int32_t>{6, 0, 6});
  Array<float> taken(d.memory, "taken", 3 * 11);
  d.run("gather_rows_4", {3}, 32, x.begin(), rows.begin(), taken.begin(), 11);
  for (std::size_t i = 0; i < 33; ++i) CHECK(taken[i] == x[static_cast<std::size_t>(rows[i / 11]) * 11 + i % 11]);
  Array<float> db(d.memory, "db", std::vector<float>(11, 1.0f));
  Array<float> parts(d.memory, "parts", 3 * 11);  // of three rows each
  d.run("column_parts_bf16", {1, 3}, 32, y.begin(), parts.begin(), 7, 11, 3);
  d.run("column_sums_f32", {1}, 64, parts.begin(), db.begin(), 3, 11, 1);
  std::vector<double> wanted(11, 1.0);
  for (std::size_t i = 0; i < n; ++i) wanted[i % 11] += value(y[i]);
  near(db.values(), wanted, 1e-6, 1e-7);
}

TEST_CASE("what several ranks hold: its sum in rank order, and its maximum, a NaN kept", "[kernels]") {
  Device d("elementwise");
  const float nan = std::numeric_limits<float>::quiet_NaN();
  Array<float> a(d.memory, "a", {1.0f, 1e8f, -3.0f, nan}),
      b(d.memory, "b", std::vector<float>{2.0f, 1.0f, -2.0f, 1.0f}),
      c(d.memory, "c", std::vector<float>{4.0f, -1e8f, -1.0f, 2.0f}), to(d.memory, "to", 4);
  Array<Bf16> p(d.memory, "p", std::vector<Bf16>{ptx::to_bf16(256)}),
      q(d.memory, "q", std::vector<Bf16>{ptx::to_bf16(1)});
  struct Sources {
    const void* rank[32];
  } sources{{a.begin(), b.begin(), c.begin()}}, halves{{p.begin(), q.begin(), q.begin()}};
  d.run("sum_ranks_f32", {1}, 32, sources, 3, to.begin(), std::int64_t{4});
  CHECK(to[0] == 7.0f);
  CHECK(to[1] == 0.0f);  // (1e8 + 1) - 1e8 in fp32
  d.run("max_ranks_f32", {1}, 32, sources, 3, to.begin(), std::int64_t{4});
  CHECK(to[2] == -1.0f);
  CHECK(std::isnan(to[3]));
  d.run("sum_ranks_bf16", {1}, 32, halves, 3, p.begin(), std::int64_t{1});
  CHECK(from_bf16(p[0]) == 258.0f);  // rounded after each addition it would stay 256
}

TEST_CASE("boxes move as they are, and hash as the host hashes them", "[kernels]") {
  Device d("boxes");
  const std::vector<Box> boxes = {{3, 20, 0, 7, 4, 7}, {100, 9, 40, 30, 2, 9}};
  Array<Box> list(d.memory, "boxes", boxes);
  Draw draw(9);
  Array<float> src(d.memory, "src", draw.numbers<float>(120));
  Array<Bf16> from(d.memory, "from", std::vector<Bf16>(120, 0x7f81));  // a signalling NaN
  Array<Bf16> to(d.memory, "to", std::vector<Bf16>(120, Bf16{1}));
  d.run("move_boxes_2", {2, 2}, 32, from.begin(), to.begin(), list.begin());
  CHECK(std::count(to.begin(), to.begin() + 120, Bf16{0x7f81}) == 4 * 7 + 2 * 9);  // not quieted
  Array<std::uint64_t> sum(d.memory, "sum", std::vector<std::uint64_t>{5});
  d.run("hash_boxes_f32_bf16", {2, 2}, 64, src.begin(), sum.begin(), list.begin());
  std::uint64_t wanted = 5;
  for (const Box& b : boxes)
    for (std::int64_t i = 0; i < b.rows; ++i)
      for (std::int64_t j = 0; j < b.cols; ++j)
        wanted += element_hash(static_cast<std::uint64_t>(b.dst_offset + i * b.dst_pitch + j),
                               ptx::to_bf16(src[static_cast<std::size_t>(b.src_offset + i * b.src_pitch + j)]));
  CHECK(sum[0] == wanted);
}

TEST_CASE("the clipped loss, its gradient by difference, and its metrics", "[kernels]") {
  Device d("loss");
  const int T = 70;
  Draw draw(2);
  const auto n = static_cast<std::size_t>(T);
  Array<float> logp(d.memory, "new", draw.numbers<float>(n)), old(d.memory, "old", draw.numbers<float>(n)),
      ref(d.memory, "ref", draw.numbers<float>(n)), gain(d.memory, "advantage", draw.numbers<float>(n, 2.0)),
      weight(d.memory, "weight", draw.numbers<float>(n)), entropy(d.memory, "entropy", draw.numbers<float>(n)),
      dlogp(d.memory, "dlogp", n), metrics(d.memory, "metrics", std::vector<float>(16, 1.0f));
  weight[3] = 0.0f;
  logp[3] = std::numeric_limits<float>::quiet_NaN();  // masked: nothing of it counts
  d.run("token_loss", {1}, 64, logp.begin(), old.begin(), ref.begin(), gain.begin(), weight.begin(), entropy.begin(),
        dlogp.begin(), metrics.begin(), T, 0.2f, 0.28f, 0.03f);
  const auto loss = [&](std::size_t t, double x) {
    const double ratio = std::exp(x - old[t]), gap = ref[t] - x;
    return std::max(-gain[t] * ratio,
                    -gain[t] * std::clamp(ratio, 1.0 - static_cast<double>(0.2f), 1.0 + static_cast<double>(0.28f))) +
           static_cast<double>(0.03f) * (std::expm1(gap) - gap);
  };
  double total = 1, most = 1, tokens = 1;
  for (std::size_t t = 0; t < n; ++t) {
    if (t == 3) {
      CHECK(dlogp[t] == 0.0f);
      continue;
    }
    total += weight[t] * loss(t, logp[t]);
    most = std::max(most, std::abs(static_cast<double>(old[t]) - logp[t]));
    ++tokens;
    CHECK(dlogp[t] ==
          Approx(weight[t] * (loss(t, logp[t] + 1e-6) - loss(t, logp[t] - 1e-6)) / 2e-6).epsilon(1e-4).margin(1e-6));
  }
  CHECK(metrics[0] == Approx(total).epsilon(1e-6));
  CHECK(metrics[5] == tokens);
  CHECK(metrics[8] == Approx(most).epsilon(1e-6));
  CHECK(metrics[9] == 1.0f);
  logp[5] = std::numeric_limits<float>::quiet_NaN();
  d.run("token_loss", {1}, 64, logp.begin(), old.begin(), ref.begin(), gain.begin(), weight.begin(), entropy.begin(),
        dlogp.begin(), metrics.begin(), T, 0.2f, 0.28f, 0.03f);
  CHECK(std::isnan(metrics[0]));
  CHECK(std::isnan(metrics[8]));
}

TEST_CASE("the clip coefficient, and no step of the optimizer without a finite one", "[kernels]") {
  Device d("optimizer");
  Array<float> squares(d.memory, "s", std::vector<float>{16.0f}), c(d.memory, "c", 1),
      metrics(d.memory, "metrics", std::vector<float>(16, 0.0f));
  const auto clip = [&](double most) {
    d.run("clip_coefficient", {1}, 1, squares.begin(), c.begin(), metrics.begin(), most, 0, 12, 13);
    return c[0];
  };
  CHECK(clip(8.0) == 1.0f);
  CHECK(clip(1.0) == static_cast<float>(1.0 / (4.0 + 1e-6)));
  CHECK(metrics[12] == 4.0f);
  CHECK(clip(0.0) == 1.0f);
  metrics[0] = std::numeric_limits<float>::infinity();
  CHECK(std::isnan(clip(1.0)));
  Array<float> g(d.memory, "g", std::vector<float>{1.0f}), lr(d.memory, "lr", std::vector<float>{1e-2f, 1.0f}),
      p(d.memory, "p", std::vector<float>{3.0f}), m(d.memory, "m", std::vector<float>{0.5f}),
      v(d.memory, "v", std::vector<float>{0.25f});
  SteppedTensors one{};
  one.g[0] = g.begin(), one.p[0] = p.begin(), one.m[0] = m.begin(), one.v[0] = v.begin();
  one.many.count = one.many.first_block[1] = 1, one.many.n[0] = 1;
  d.run("adamw_f32", {1}, 32, one, lr.begin(), c.begin(), 0.9f, 0.99f, 1e-8f, 0.1f);
  CHECK(p[0] == 3.0f);
  CHECK(m[0] == 0.5f);
  CHECK(v[0] == 0.25f);
}

namespace {

/// The same draw on the host, one after another.
std::int32_t drawn(const std::vector<float>& x, float uniform, float temperature, int top_k, float top_p) {
  std::vector<std::int32_t> order(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) order[i] = static_cast<std::int32_t>(i);
  const auto by_value = [&](std::int32_t a, std::int32_t b) {
    return x[static_cast<std::size_t>(a)] != x[static_cast<std::size_t>(b)]
               ? x[static_cast<std::size_t>(a)] > x[static_cast<std::size_t>(b)]
               : a < b;
  };
  const float most = *std::max_element(x.begin(), x.end());
  const auto mass_of = [&](std::int32_t i) {
    return static_cast<double>(std::exp((x[static_cast<std::size_t>(i)] - most) * (1.0f / temperature)));
  };
  if (temperature == 0.0f || top_k > 0 || top_p < 1.0f) std::sort(order.begin(), order.end(), by_value);
  if (temperature == 0.0f) return order[0];
  std::size_t kept = top_k > 0 ? std::min(order.size(), static_cast<std::size_t>(top_k)) : order.size();
  double mass = 0;
  for (std::size_t i = 0; i < kept; ++i) mass += mass_of(order[i]);
  if (top_p < 1.0f) {
    double sum = 0;
    std::size_t i = 0;
    while (i < kept && (i == 0 || sum < top_p * mass)) sum += mass_of(order[i++]);
    kept = i, mass = sum;
  }
  double before = 0;
  for (std::size_t i = 0; i < kept; ++i)
    if (before += mass_of(order[i]); before > uniform * mass) return order[i];
  return order[kept - 1];
}

}  // namespace

TEST_CASE("the next token is the host's draw; its log-probability is training's to the bit", "[kernels]") {
  Device d("loss");
  struct Sampling {
    float temperature;
    int top_k;
    float top_p;
  };
  const std::vector<Sampling> samplings = {{1.0f, 0, 1.0f}, {0.7f, 0, 1.0f}, {0.0f, 0, 1.0f},
                                           {1.0f, 3, 1.0f}, {1.3f, 0, 0.8f}, {0.9f, 7, 0.5f}};
  for (const int V : {1, 16, 301})
    for (const Sampling& s : samplings) {
      INFO(V << " tokens, temperature " << s.temperature << ", top_k " << s.top_k << ", top_p " << s.top_p);
      Draw draw(static_cast<std::uint64_t>(V));
      const int S = 9, tp = V > 1 ? 2 : 1, width = (V + tp - 1) / tp + 1;  // padded in the last block
      const std::vector<float> drawn_rows = draw.numbers<float>(static_cast<std::size_t>(S * V), 6.0);
      std::vector<float> split(static_cast<std::size_t>(tp * S * width), 1e9f), rows(static_cast<std::size_t>(S * V));
      const int columns = width;
      for (int r = 0; r < S; ++r)
        for (int j = 0; j < V; ++j) {
          const float x = j % 5 == 4 ? drawn_rows[static_cast<std::size_t>(r * V + j - 1)]  // some are equal
                                     : drawn_rows[static_cast<std::size_t>(r * V + j)];
          rows[static_cast<std::size_t>(r * V + j)] = x;
          split[static_cast<std::size_t>((j / columns * S + r) * columns + j % columns)] = x;
        }
      Array<float> logits(d.memory, "logits", split), uniforms(d.memory, "uniforms", S, true),
          logp(d.memory, "logp", S), plain(d.memory, "rows", rows), again(d.memory, "again", S),
          lse(d.memory, "lse", S), h(d.memory, "h", S);
      for (std::size_t r = 0; r < S; ++r) uniforms[r] = static_cast<float>((draw.number() + 1) / 2);
      uniforms[0] = 0.0f;
      Array<std::int32_t> ids(d.memory, "ids", S);
      d.run("sample", {S}, 128, logits.begin(), uniforms.begin(), ids.begin(), logp.begin(), S, V, width, s.temperature,
            s.top_k, s.top_p);
      for (std::size_t r = 0; r < S; ++r)
        CHECK(ids[r] == drawn({rows.begin() + static_cast<std::ptrdiff_t>(r) * V,
                               rows.begin() + static_cast<std::ptrdiff_t>(r + 1) * V},
                              uniforms[r], s.temperature, s.top_k, s.top_p));
      const float inverse = s.temperature == 0.0f ? 1.0f : 1.0f / s.temperature;
      d.run("log_prob", {S}, 128, plain.begin(), ids.begin(), again.begin(), lse.begin(), h.begin(), V, V, inverse);
      CHECK(logp.values() == again.values());
    }
}
