// Kernels that some families of models need, over random shapes against fp64: activations, rotations of parts of a
// head, layer_norm, biases and caps, adapters, attention sinks, latent attention.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <functional>

#include "backends/cuda/kernels/attention.h"
#include "tests/cuda_kernels/kernel_device.h"

using namespace hotbunk;
using namespace hotbunk::ptx;

namespace {

std::uint32_t up(std::int64_t n, std::int64_t each) { return static_cast<std::uint32_t>((n + each - 1) / each); }
std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }
template <class E>
std::vector<double> wide(const std::vector<E>& x) {
  std::vector<double> out;
  for (const E e : x) out.push_back(value(e));
  return out;
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double silu(double x) { return x * sigmoid(x); }
double gelu(double x) { return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }
/// The slope of f, by a difference: of fp64, good to 1e-9.
template <class F>
double slope(F f, double x) {
  return (f(x + 1e-5) - f(x - 1e-5)) / 2e-5;
}

}  // namespace

TEMPLATE_TEST_CASE("gated activations and their backward", "[kernels][families]", float, Bf16) {
  using E = TestType;
  Device d("activations");
  const float limit = 2.53f, alpha = 1.702f;  // a limit that no number in bf16 is near
  struct Gated {
    const char* name;
    std::function<double(double)> gate, up;
  };
  const std::vector<Gated> all = {{"swiglu", silu, [](double u) { return u; }},
                                  {"geglu", gelu, [](double u) { return u; }},
                                  {"clamped_swiglu",
                                   [&](double g) {
                                     const double bent = std::min<double>(g, limit);
                                     return bent * sigmoid(alpha * bent);
                                   },
                                   [&](double u) { return std::clamp<double>(u, -limit, limit) + 1; }}};
  for (const Gated& by : all)
    for (std::uint64_t seed = 1; seed <= 3; ++seed) {
      INFO(by.name << ", seed " << seed);
      Draw draw(seed);
      const int T = draw.between(1, 7), I = draw.between(1, 90);
      const auto n = size(T * I);
      Array<E> x(d.memory, "gate_up", draw.numbers<E>(2 * n, 6.0)), dact(d.memory, "dact", draw.numbers<E>(n));
      Array<E> act(d.memory, "act", n), dx(d.memory, "dgate_up", 2 * n);
      const std::string name = by.name, forward = name + "_" + suffix<E>, backward = name + "_backward_" + suffix<E>;
      if (name == "clamped_swiglu") {
        d.run(forward, {3}, 64, x.begin(), act.begin(), T, I, limit, alpha);
        d.run(backward, {3}, 64, dact.begin(), x.begin(), dx.begin(), T, I, limit, alpha);
      } else {
        d.run(forward, {3}, 64, x.begin(), act.begin(), T, I);
        d.run(backward, {3}, 64, dact.begin(), x.begin(), dx.begin(), T, I);
      }
      std::vector<double> wanted(n), wanted_dx(2 * n);
      for (std::size_t i = 0; i < n; ++i) {
        const std::size_t at = i / size(I) * size(2 * I) + i % size(I), up = at + size(I);
        const double g = value(x[at]), u = value(x[up]), dy = value(dact[i]);
        wanted[i] = by.gate(g) * by.up(u);
        wanted_dx[at] = dy * by.up(u) * slope(by.gate, g);
        wanted_dx[up] = dy * by.gate(g) * slope(by.up, u);
      }
      near(act.values(), wanted, 1e-6 + unit<E>, 1e-6);
      near(dx.values(), wanted_dx, 1e-5 + unit<E>, 1e-5);
    }
}

TEMPLATE_TEST_CASE("gelu without a gate, biases, factors and caps", "[kernels][families]", float, Bf16) {
  using E = TestType;
  Device d("activations"), e("elementwise");
  Draw draw(5);
  const int T = 5, N = 37;
  const auto n = size(T * N);
  Array<E> x(d.memory, "x", draw.numbers<E>(n, 5.0)), dy(d.memory, "dy", draw.numbers<E>(n)), y(d.memory, "y", n),
      dx(d.memory, "dx", n);
  d.run(std::string("gelu_") + suffix<E>, {2}, 64, x.begin(), y.begin(), T, N);
  d.run(std::string("gelu_backward_") + suffix<E>, {2}, 64, dy.begin(), x.begin(), dx.begin(), T, N);
  std::vector<double> wanted, wanted_dx;
  for (std::size_t i = 0; i < n; ++i) {
    wanted.push_back(gelu(value(x[i])));
    wanted_dx.push_back(value(dy[i]) * slope(gelu, value(x[i])));
  }
  near(y.values(), wanted, 1e-6 + unit<E>, 1e-6);
  near(dx.values(), wanted_dx, 1e-5 + unit<E>, 1e-5);

  Array<E> z(e.memory, "x", x.values()), b(e.memory, "b", draw.numbers<E>(size(N)));
  const std::vector<double> bias = wide(b.values());
  e.run(std::string("add_bias_") + suffix<E>, {2}, 64, z.begin(), b.begin(), N, std::int64_t{T * N});
  e.run(std::string("scale_") + suffix<E>, {2}, 64, b.begin(), 0.3f, std::int64_t{N});
  std::vector<double> biased, times;
  for (std::size_t i = 0; i < n; ++i) biased.push_back(value(x[i]) + bias[i % size(N)]);
  for (const double v : bias) times.push_back(v * 0.3f);
  near(z.values(), biased, unit<E>, 1e-7);
  near(b.values(), times, unit<E>, 0);
  Array<float> logits(e.memory, "logits", draw.numbers<float>(n, 9.0));
  std::vector<double> capped;
  for (const float v : logits.values()) capped.push_back(3 * std::tanh(v / 3.0));
  e.run("softcap", {2}, 64, logits.begin(), 3.0f, std::int64_t{T * N});
  near(logits.values(), capped, 1e-6, 1e-7);
}

TEMPLATE_TEST_CASE("rope turns whole heads, the first numbers of each or the last, and turns back",
                   "[kernels][families]", float, Bf16) {
  using E = TestType;
  Device d("rope");
  Draw draw(7);
  const int T = 5, D = 16;
  struct Way {
    int heads, width, turned;  // heads that turn; of a row's numbers
    bool neighbours;
    float amplitude;
  };
  // One value head stays.
  for (const Way& w : {Way{3, 4 * D, D, false, 1.0f}, {3, 4 * D, 6, false, 1.25f}, {3, 3 * D, 10, true, 0.8f}}) {
    INFO(w.turned << " numbers turn");
    const std::string name = std::string(w.neighbours ? "rope_neighbours_" : "rope_") + suffix<E>;
    Array<E> x(d.memory, "qkv", draw.numbers<E>(size(T * w.width)));
    Array<std::int32_t> positions(d.memory, "positions", std::vector<std::int32_t>{0, 1, 2, 77, 1000});
    std::vector<float> frequencies;
    for (int j = 0; j < w.turned / 2; ++j)
      frequencies.push_back(static_cast<float>(std::pow(1e4, -2.0 * j / w.turned)));
    Array<float> inv(d.memory, "inv_freq", frequencies);
    const auto before = x.values();
    d.run(name, {T}, 64, x.begin(), positions.begin(), inv.begin(), w.heads, w.width, D, w.turned, w.amplitude, 1.0f);
    std::vector<double> wanted = wide(before);
    for (int t = 0; t < T; ++t)
      for (int h = 0; h < w.heads; ++h)
        for (int j = 0; j < w.turned / 2; ++j) {
          const double angle = static_cast<float>(positions[size(t)]) * frequencies[size(j)];
          const int head = t * w.width + h * D, first = head + (w.neighbours ? D - w.turned + 2 * j : j);
          const std::size_t low = size(first), high = size(first + (w.neighbours ? 1 : w.turned / 2));
          const double c = w.amplitude * std::cos(angle), s = w.amplitude * std::sin(angle);
          wanted[low] = value(before[low]) * c - value(before[high]) * s;
          wanted[high] = value(before[high]) * c + value(before[low]) * s;
        }
    near(x.values(), wanted, unit<E>, 1.2e-4);  // an angle of 1000 is rounded to 2^-15
    d.run(name, {T}, 64, x.begin(), positions.begin(), inv.begin(), w.heads, w.width, D, w.turned, 1 / w.amplitude,
          -1.0f);
    near(x.values(), wide(before), 2 * unit<E>, 3 * unit<E> + 1e-6);
  }
}

TEMPLATE_TEST_CASE("layer_norm and its backward", "[kernels][families]", float, Bf16) {
  using E = TestType;
  Device d("layer_norm");
  const std::string e = suffix<E>;
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    Draw draw(seed);
    const int T = draw.between(1, 5), H = draw.between(2, 300) + (seed % 2 == 0 ? 256 : 0);
    const auto rows = static_cast<std::uint32_t>(T), threads = static_cast<std::uint32_t>(64 * draw.between(1, 4));
    const bool fused = seed % 2 == 0, accumulate = seed % 3 == 0;
    const std::size_t n = size(T * H), h = size(H);
    const float eps = 1e-5f;
    Array<E> x(d.memory, "x", draw.numbers<E>(n)), r(d.memory, "residual", draw.numbers<E>(n)),
        w(d.memory, "w", draw.numbers<E>(h)), b(d.memory, "b", draw.numbers<E>(h)), y(d.memory, "y", n),
        sum(d.memory, "sum", n);
    Array<float> rstd(d.memory, "rstd", size(T));
    d.run("layer_norm_" + e, {rows}, threads, x.begin(), fused ? r.begin() : nullptr, w.begin(), b.begin(), y.begin(),
          rstd.begin(), fused ? sum.begin() : nullptr, H, eps);
    std::vector<E> s = x.values();
    for (std::size_t i = 0; i < n && fused; ++i)
      s[i] = rounded<E>(static_cast<float>(value(x[i])) + static_cast<float>(value(r[i])));
    if (fused) CHECK(sum.values() == s);
    Array<E> dy(d.memory, "dy", draw.numbers<E>(n)), dx(d.memory, "dx", draw.numbers<E>(n)), kept(d.memory, "x", s);
    constexpr int each = 2;  // rows of a part
    const auto parts = up(T, each);
    Array<float> both(d.memory, "parts", 2 * parts * h);
    const auto dx0 = dx.values();
    const auto dw0 = draw.numbers<float>(h), db0 = draw.numbers<float>(h);
    // By 32 threads, columns beyond the 256th are held by nobody.
    const auto backward = [&](E* from, E* to, float* of_weights, int adds) {
      d.run("layer_norm_backward_" + e, {parts}, fused ? 32 : threads, from, kept.begin(), w.begin(), rstd.begin(), to,
            of_weights, T, H, each, adds);
    };
    backward(dy.begin(), dx.begin(), both.begin(), accumulate);
    Array<E> over(d.memory, "dy and dx", dy.values());
    Array<float> again(d.memory, "parts", both.size());
    backward(over.begin(), over.begin(), again.begin(), 0);  // in place
    CHECK(again.values() == both.values());
    if (!accumulate) CHECK(over.values() == dx.values());
    std::vector<double> wanted(n), wanted_rstd, wanted_dx(n), wanted_dw(h), wanted_db(h);
    for (std::size_t j = 0; j < h && accumulate; ++j) wanted_dw[j] = dw0[j], wanted_db[j] = db0[j];
    for (std::size_t at = 0; at < n; at += h) {
      double mean = 0, squares = 0, of_mean = 0, dot = 0;
      for (std::size_t j = at; j < at + h; ++j) mean += value(s[j]) / H;
      for (std::size_t j = at; j < at + h; ++j) squares += (value(s[j]) - mean) * (value(s[j]) - mean);
      const double q = 1 / std::sqrt(squares / H + eps);
      wanted_rstd.push_back(q);
      for (std::size_t j = 0; j < h; ++j) {
        const double g = value(dy[at + j]) * value(w[j]);
        of_mean += g / H, dot += g * (value(s[at + j]) - mean) * q / H;
      }
      for (std::size_t j = 0; j < h; ++j) {
        const double normed = (value(s[at + j]) - mean) * q, g = value(dy[at + j]);
        wanted[at + j] = normed * value(w[j]) + value(b[j]);
        wanted_dx[at + j] = q * (g * value(w[j]) - of_mean - normed * dot) + (accumulate ? value(dx0[at + j]) : 0.0);
        wanted_dw[j] += g * normed, wanted_db[j] += g;
      }
    }
    near(rstd.values(), wanted_rstd, 2e-5, 0);
    near(y.values(), wanted, 2e-5 + unit<E>, 1e-5);
    near(dx.values(), wanted_dx, 2e-5 + unit<E>, 5e-5);
    const std::vector<float> none(h);
    near(summed(both.begin(), parts, accumulate ? dw0 : none), wanted_dw, 2e-5, 5e-5);
    near(summed(both.begin() + parts * h, parts, accumulate ? db0 : none), wanted_db, 1e-6, 1e-6);
  }
}

TEMPLATE_TEST_CASE("products over columns of a wider activation, and an adapter merged into its matrix",
                   "[kernels][families]", float, Bf16) {
  using E = TestType;
  const bool f32 = std::is_same_v<E, float>;
  Device d(f32 ? "matmul_f32" : "matmul"), m("lora");
  const std::string e = suffix<E>;
  const int T = 5, wide_n = 30, begin = 7, n = 19, r = 8;
  Draw draw(3);
  Array<E> u(d.memory, "u", draw.numbers<E>(size(T * r))), b(d.memory, "b", draw.numbers<E>(size(n * r))),
      y(d.memory, "y", draw.numbers<E>(size(T * wide_n))), du(d.memory, "du", size(T * r));
  Array<float> db(d.memory, "db", size(n * r));
  const auto before = wide(y.values());
  const std::uint32_t threads = f32 ? 32 : 128;
  const E* none = nullptr;
  d.run("matmul_nn_" + e + "_" + e, {1, 1}, threads, y.begin() + begin, wide_n, b.begin(), none, du.begin(), r, T, r, n,
        0);
  d.run("matmul_tn_" + e + "_f32", {1, 1}, threads, y.begin() + begin, wide_n, u.begin(), none, db.begin(), r, n, r, T,
        0);
  d.run("matmul_nt_" + e + "_" + e, {1, 1}, threads, u.begin(), r, b.begin(), none, y.begin() + begin, wide_n, T, n, r,
        1);
  std::vector<double> wanted = before, wanted_du(size(T * r)), wanted_db(size(n * r));
  for (int t = 0; t < T; ++t)
    for (int j = 0; j < n; ++j)
      for (int k = 0; k < r; ++k) {
        const std::size_t at = size(t * wide_n + begin + j), uk = size(t * r + k), bk = size(j * r + k);
        wanted[at] += value(u[uk]) * value(b[bk]);
        wanted_du[uk] += before[at] * value(b[bk]);
        wanted_db[bk] += before[at] * value(u[uk]);
      }
  near(y.values(), wanted, unit<E>, 1e-5);
  near(du.values(), wanted_du, unit<E>, 1e-5);
  near(db.values(), wanted_db, 1e-6, 1e-5);

  Array<E> w(m.memory, "w", draw.numbers<E>(size(n * T))), left(m.memory, "b", b.values()),
      right(m.memory, "a", draw.numbers<E>(size(r * T)));
  Array<float> merged(m.memory, "y", w.size());
  m.run("lora_merge_" + e + "_" + e + "_f32", {1}, 64, w.begin(), left.begin(), right.begin(), merged.begin(), n, T, r,
        0.5f);
  std::vector<double> whole;
  for (int i = 0; i < n * T; ++i) {
    double sum = 0;
    for (int k = 0; k < r; ++k) sum += value(left[size(i / T * r + k)]) * value(right[size(k * T + i % T)]);
    whole.push_back(value(w[size(i)]) + 0.5 * sum);
  }
  near(merged.values(), whole, 1e-6, 1e-6);
}

TEMPLATE_TEST_CASE("attention sinks count one more score, and their gradients", "[kernels][families]", float, Bf16) {
  using E = TestType;
  Device d("sinks");
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    Draw draw(seed);
    const int T = draw.between(1, 12), a = draw.between(1, 4), v = draw.between(1, 70);
    const std::size_t n = size(T * a * v), heads = size(a), rows = size(T * a);
    Array<E> o(d.memory, "o", draw.numbers<E>(n)), g(d.memory, "do", draw.numbers<E>(n)),
        sinks(d.memory, "sinks", draw.numbers<E>(heads, 3.0));
    std::vector<float> sums = draw.numbers<float>(rows, 3.0);
    sums.front() = -INFINITY;  // of a slot without a sequence, whose o is zeros
    for (std::size_t j = 0; j < size(v); ++j) o[j] = E{0};
    Array<float> lse(d.memory, "lse", sums), ds(d.memory, "dsinks", draw.numbers<float>(heads));
    const std::vector<double> o0 = wide(o.values());
    const auto ds0 = ds.values();
    const int accumulate = seed % 2 == 0 ? 1 : 0;
    d.run(std::string("attention_sinks_") + suffix<E>, {up(T * a, 2)}, 64, o.begin(), lse.begin(), sinks.begin(), T, a,
          v);
    std::vector<double> wanted(n), wanted_lse, wanted_ds(ds0.begin(), ds0.end());
    if (accumulate == 0) wanted_ds.assign(heads, 0.0);
    for (std::size_t i = 0; i < rows; ++i) {
      const double sink = value(sinks[i % heads]), both = std::log(std::exp(double{sums[i]}) + std::exp(sink));
      wanted_lse.push_back(both);
      for (std::size_t j = i * size(v); j < (i + 1) * size(v); ++j) {
        wanted[j] = o0[j] * std::exp(sums[i] - both);
        wanted_ds[i % heads] -= std::exp(sink - both) * value(g[j]) * value(o[j]);
      }
    }
    near(o.values(), wanted, 1e-5 + unit<E>, 1e-7);
    near(lse.values(), wanted_lse, 1e-6, 1e-6);
    d.run(std::string("attention_sinks_backward_") + suffix<E> + "_f32", {static_cast<std::uint32_t>(a)}, 64, g.begin(),
          o.begin(), lse.begin(), sinks.begin(), ds.begin(), T, a, v, accumulate);
    near(ds.values(), wanted_ds, 1e-5, 1e-5);
  }
}

namespace {

/// a heads of d numbers, the last t of which are rotated, values of v, latents of r; n: not rotated.
struct Latent {
  int a, d, v, r, t;
  int n() const { return d - t; }
  int of_kv() const { return a * (n() + v); }
  int width() const { return a * (2 * d + v); }
  AttentionHeads heads() const { return {a, a, d, v}; }
};

}  // namespace

TEMPLATE_TEST_CASE("latents are normed and rotated, packed into heads, and all of it back", "[kernels][families]",
                   float, Bf16) {
  using E = TestType;
  Device d("latent");
  const std::string e = suffix<E>;
  for (const Latent& l : {Latent{2, 8, 4, 6, 2}, Latent{3, 20, 24, 37, 8}}) {
    Draw draw(static_cast<std::uint64_t>(l.d));
    const int T = 3, wide_x = l.r + l.t;
    const float eps = 1e-6f, amplitude = 1.25f;
    Array<E> x(d.memory, "x", draw.numbers<E>(size(T * wide_x))), w(d.memory, "w", draw.numbers<E>(size(l.r))),
        c(d.memory, "c", size(T * l.r)), s(d.memory, "s", size(T * l.t)), dx(d.memory, "dx", x.size()),
        dc(d.memory, "dc", draw.numbers<E>(c.size())), ds(d.memory, "ds", draw.numbers<E>(s.size()));
    Array<std::int32_t> positions(d.memory, "positions", std::vector<std::int32_t>{0, 3, 50});
    std::vector<float> frequencies;
    for (int j = 0; j < l.t / 2; ++j) frequencies.push_back(static_cast<float>(std::pow(1e4, -2.0 * j / l.t)));
    constexpr int each = 2;  // rows of a part
    Array<float> inv(d.memory, "inv_freq", frequencies), rstd(d.memory, "rstd", size(T)),
        parts(d.memory, "parts", up(T, each) * size(l.r));
    d.run("latent_norm_" + e, {T}, 32, x.begin(), w.begin(), positions.begin(), inv.begin(), c.begin(), s.begin(),
          rstd.begin(), l.r, l.t, eps, amplitude);
    d.run("latent_norm_backward_" + e, {up(T, each)}, 32, dc.begin(), ds.begin(), x.begin(), w.begin(), rstd.begin(),
          positions.begin(), inv.begin(), dx.begin(), parts.begin(), T, l.r, l.t, each, amplitude);
    std::vector<double> wanted_c, wanted_s(s.size()), wanted_dx(x.size()), wanted_dw(size(l.r));
    for (int t = 0; t < T; ++t) {
      const auto at = [&](int j) { return size(t * wide_x + j); };
      double squares = 0, dot = 0;
      for (int j = 0; j < l.r; ++j) {
        squares += value(x[at(j)]) * value(x[at(j)]);
        dot += value(dc[size(t * l.r + j)]) * value(w[size(j)]) * value(x[at(j)]);
      }
      const double q = 1 / std::sqrt(squares / l.r + eps);
      for (int j = 0; j < l.r; ++j) {
        const double g = value(dc[size(t * l.r + j)]);
        wanted_c.push_back(value(x[at(j)]) * q * value(w[size(j)]));
        wanted_dx[at(j)] = g * value(w[size(j)]) * q - value(x[at(j)]) * dot / l.r * q * q * q;
        wanted_dw[size(j)] += g * value(x[at(j)]) * q;
      }
      for (int j = 0; j < l.t / 2; ++j) {
        const double angle = static_cast<float>(positions[size(t)]) * frequencies[size(j)];
        const double cos = amplitude * std::cos(angle), sin = amplitude * std::sin(angle);
        const std::size_t low = size(t * l.t + 2 * j), from = at(l.r + 2 * j);
        wanted_s[low] = value(x[from]) * cos - value(x[from + 1]) * sin;
        wanted_s[low + 1] = value(x[from + 1]) * cos + value(x[from]) * sin;
        wanted_dx[from] = value(ds[low]) * cos + value(ds[low + 1]) * sin;
        wanted_dx[from + 1] = value(ds[low + 1]) * cos - value(ds[low]) * sin;
      }
    }
    near(c.values(), wanted_c, 1e-5 + unit<E>, 0);
    near(s.values(), wanted_s, unit<E>, 1e-5);
    near(dx.values(), wanted_dx, 1e-5 + unit<E>, 2e-5);
    near(summed(parts.begin(), up(T, each), std::vector<float>(size(l.r))), wanted_dw, 1e-5, 1e-5);

    Array<E> q(d.memory, "q", draw.numbers<E>(size(T * l.a * l.d))),
        kv(d.memory, "kv", draw.numbers<E>(size(T * l.of_kv()))), packed(d.memory, "x", size(T * l.width())),
        dq(d.memory, "dq", q.size()), dkv(d.memory, "dkv", kv.size()), shared(d.memory, "ds", s.size());
    d.run("latent_heads_" + e, {T}, 32, q.begin(), kv.begin(), s.begin(), packed.begin(), l.heads(), l.t);
    d.run("latent_heads_backward_" + e, {T}, 32, packed.begin(), dq.begin(), dkv.begin(), shared.begin(), l.heads(),
          l.t);
    CHECK(dq.values() == q.values());  // copies there, and copies back
    CHECK(dkv.values() == kv.values());
    std::vector<double> sums;
    for (const double v : wide(s.values())) sums.push_back(l.a * v);
    near(shared.values(), sums, unit<E>, 1e-6);
    for (int t = 0; t < T; ++t)
      for (int h = 0; h < l.a; ++h)
        for (int j = 0; j < l.t; ++j)
          CHECK(packed[size(t * l.width() + l.a * l.d + h * l.d + l.n() + j)] == s[size(t * l.t + j)]);
  }
}

TEMPLATE_TEST_CASE("keys and values are made of what the pool keeps, where paged attention finds them",
                   "[kernels][families]", float, Bf16) {
  using E = TestType;
  const bool f32 = std::is_same_v<E, float>;
  Device d("latent"), product(f32 ? "matmul_f32" : "matmul");
  const std::string e = suffix<E>;
  // A latent whose rows are 16 bytes apart and one whose rows are not; more columns than a tile has. Of whole
  // sequences, and of what a rank has that holds every other token.
  for (const auto& [l, share] : {std::pair{Latent{2, 8, 4, 6, 2}, KeyShare{}},
                                 {Latent{3, 24, 16, 24, 8}, {}},
                                 {Latent{2, 8, 4, 6, 2}, {2, 0}}}) {
    Draw draw(static_cast<std::uint64_t>(l.d));
    const int block_tokens = 4, max_blocks = 3, most = block_tokens * max_blocks, S = 2, kept = l.r + l.t;
    const std::vector<std::int32_t> lengths = {5, 9}, tables = {3, 0, 7, 4, 1, 2};
    const int in_block = share.ranks * block_tokens;  // of all ranks
    Array<E> pool(d.memory, "pool", size(8 * block_tokens * kept)),
        w(d.memory, "w", draw.numbers<E>(size(l.of_kv() * l.r))),
        expanded(d.memory, "expanded", size(S * most * l.a * (l.d + l.v)));
    Array<std::int32_t> table(d.memory, "tables", tables), length(d.memory, "lengths", lengths),
        numbers(d.memory, "numbers", size(S));
    for (int s = 0; s < S; ++s) {
      const int n = lengths[size(s)];
      Array<E> c(d.memory, "c", draw.numbers<E>(size(n * l.r))), turned(d.memory, "s", draw.numbers<E>(size(n * l.t)));
      std::vector<std::int32_t> slots;
      for (int p = 0; p < n; ++p)
        slots.push_back(tables[size(s * max_blocks + p / in_block)] * in_block + p % in_block);
      slots.push_back(-1);  // a slot that is idle reads nothing
      Array<std::int32_t> where(d.memory, "slots", slots);
      d.run("latent_write_" + e, {static_cast<std::uint32_t>(n + 1)}, 32, c.begin(), turned.begin(), where.begin(),
            pool.begin(), l.r, l.t, block_tokens, share);
      for (int p = share.place, i = 0; p < n; p += share.ranks, ++i) {
        const E* const row =
            pool.begin() + (tables[size(s * max_blocks + i / block_tokens)] * block_tokens + i % block_tokens) * kept;
        CHECK(std::equal(row, row + l.r, c.begin() + p * l.r));
        CHECK(std::equal(row + l.r, row + kept, turned.begin() + p * l.t));
      }
    }
    const auto begin = [&](int s) { return table.begin() + s * max_blocks; };
    d.run("latent_expand_" + e, {up(l.of_kv(), 64) * S, up(most, f32 ? 32 : 64)}, f32 ? 32 : 128, pool.begin(),
          begin(0), length.begin(), max_blocks, block_tokens, l.r, l.t, share, w.begin(), expanded.begin(), l.heads());
    d.run("latent_share_" + e, {2, S}, 32, pool.begin(), begin(0), length.begin(), max_blocks, block_tokens, l.r, l.t,
          share, expanded.begin(), numbers.begin(), l.heads());
    CHECK(numbers.values() == std::vector<std::int32_t>{0, 1});
    for (int s = 0; s < S; ++s) {
      // As a linear layer over the latents makes them, to the bit (P5).
      const int n = (lengths[size(s)] - share.place + share.ranks - 1) / share.ranks;
      std::vector<E> latents;
      const auto row = [&](int p) {
        return pool.begin() + (begin(s)[p / block_tokens] * block_tokens + p % block_tokens) * kept;
      };
      for (int p = 0; p < n; ++p) latents.insert(latents.end(), row(p), row(p) + l.r);
      Array<E> c(product.memory, "c", latents), same_w(product.memory, "w", w.values()),
          kv(product.memory, "kv", size(n * l.of_kv()));
      const E* none = nullptr;
      product.run("matmul_nt_" + e + "_" + e, {up(l.of_kv(), 64), 1}, f32 ? 32 : 128, c.begin(), l.r, same_w.begin(),
                  none, kv.begin(), l.of_kv(), n, l.of_kv(), l.r, 0);
      const E *keys = expanded.begin() + s * most * l.a * (l.d + l.v), *values = keys + most * l.a * l.d;
      for (int p = 0; p < n; ++p)
        for (int h = 0; h < l.a; ++h) {
          for (int j = 0; j < l.n(); ++j)
            CHECK(keys[(h * most + p) * l.d + j] == kv[size((p * l.a + h) * (l.n() + l.v) + j)]);
          for (int j = 0; j < l.t; ++j) CHECK(keys[(h * most + p) * l.d + l.n() + j] == row(p)[l.r + j]);
          for (int j = 0; j < l.v; ++j)
            CHECK(values[(h * most + p) * l.v + j] == kv[size((p * l.a + h) * (l.n() + l.v) + l.n() + j)]);
        }
      for (std::size_t i = 0; i < kv.size(); ++i) {
        double sum = 0;
        for (int k = 0; k < l.r; ++k)
          sum +=
              value(c[i / size(l.of_kv()) * size(l.r) + size(k)]) * value(w[i % size(l.of_kv()) * size(l.r) + size(k)]);
        CHECK(std::abs(value(kv[i]) - sum) <= unit<E> * std::abs(sum) + 1e-5);
      }
    }
  }
}
