// Kernels against the same formulas in fp64, over random shapes; every check of the executor is on.
#include <array>
#include <catch2/catch.hpp>
#include <cmath>

#include "backends/cuda/kernels/many.h"
#include "tests/cuda_kernels/kernel_device.h"

using namespace hotbunk;
using namespace hotbunk::ptx;

TEMPLATE_TEST_CASE("rms_norm and its backward", "[kernels]", float, Bf16) {
  using E = TestType;
  Device d("norm");
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    Draw draw(seed);
    const int T = draw.between(1, 7), H = draw.between(1, 300) + (seed % 2 == 0 ? 256 : 0);
    const auto threads = static_cast<std::uint32_t>(64 * draw.between(1, 4));
    const bool fused = seed % 2 == 0, accumulate = seed % 3 == 0;
    const float offset = seed > 3 ? 1.0f : 0.0f;
    const auto TH = static_cast<std::size_t>(T * H), h = static_cast<std::size_t>(H), t = static_cast<std::size_t>(T);
    Array<E> x(d.memory, "x", draw.numbers<E>(TH)), r(d.memory, "residual", draw.numbers<E>(TH)),
        w(d.memory, "w", draw.numbers<E>(h));
    Array<E> y(d.memory, "y", TH), sum(d.memory, "sum", TH);
    Array<float> rstd(d.memory, "rstd", t);
    const float eps = 1e-5f;
    d.run(std::string("rms_norm_") + suffix<E>, {static_cast<std::uint32_t>(T)}, threads, x.begin(),
          fused ? r.begin() : nullptr, w.begin(), y.begin(), rstd.begin(), fused ? sum.begin() : nullptr, H, eps,
          offset);
    std::vector<double> wanted_y(TH), wanted_rstd(t);
    std::vector<E> s = x.values();
    for (std::size_t i = 0; i < TH && fused; ++i)
      s[i] = rounded<E>(static_cast<float>(value(x[i])) + static_cast<float>(value(r[i])));
    for (std::size_t row = 0; row < t; ++row) {
      double squares = 0;
      for (std::size_t j = 0; j < h; ++j) squares += value(s[row * h + j]) * value(s[row * h + j]);
      wanted_rstd[row] = 1.0 / std::sqrt(squares / H + eps);
      for (std::size_t j = 0; j < h; ++j)
        wanted_y[row * h + j] = value(s[row * h + j]) * wanted_rstd[row] * (value(w[j]) + offset);
    }
    if (fused) CHECK(sum.values() == s);
    near(rstd.values(), wanted_rstd, 1e-5, 0);
    near(y.values(), wanted_y, 1e-5 + unit<E>, 0);

    Array<E> dy(d.memory, "dy", draw.numbers<E>(TH)), dx(d.memory, "dx", draw.numbers<E>(TH)),
        saved(d.memory, "saved", s);
    const auto dx0 = dx.values();
    const auto dw0 = draw.numbers<float>(h);
    constexpr int each = 3;  // rows of a part
    const auto n = static_cast<std::uint32_t>((T + each - 1) / each);
    Array<float> parts(d.memory, "parts", n * h);
    // By 32 threads, columns beyond the 256th are held by nobody.
    const auto backward = [&](E* from, E* to, float* of_w, int adds) {
      d.run(std::string("rms_norm_backward_") + suffix<E>, {n}, seed % 2 == 0 ? 32 : threads, from, saved.begin(),
            w.begin(), rstd.begin(), to, of_w, T, H, each, offset, adds);
    };
    backward(dy.begin(), dx.begin(), parts.begin(), accumulate);
    Array<E> over(d.memory, "dy and dx", dy.values());
    backward(over.begin(), over.begin(), nullptr, 0);  // in place, of a frozen weight
    if (!accumulate) CHECK(over.values() == dx.values());
    std::vector<double> wanted_dx(TH), wanted_dw(h, 0.0);
    for (std::size_t j = 0; j < h && accumulate; ++j) wanted_dw[j] = dw0[j];
    for (std::size_t row = 0; row < t; ++row) {
      double dot = 0;
      const double q = wanted_rstd[row];
      for (std::size_t j = 0; j < h; ++j)
        dot += value(dy[row * h + j]) * (value(w[j]) + offset) * value(s[row * h + j]);
      for (std::size_t j = 0; j < h; ++j) {
        const std::size_t i = row * h + j;
        wanted_dx[i] = value(dy[i]) * (value(w[j]) + offset) * q - value(s[i]) * dot / H * q * q * q +
                       (accumulate ? value(dx0[i]) : 0.0);
        wanted_dw[j] += value(dy[i]) * value(s[i]) * q;
      }
    }
    near(dx.values(), wanted_dx, 1e-5 + unit<E>, 2e-5);
    near(summed(parts.begin(), n, accumulate ? dw0 : std::vector<float>(h)), wanted_dw, 1e-5, 2e-5);
  }
}

TEMPLATE_TEST_CASE("embedding of a part of the vocabulary, and its scatter-add", "[kernels]", float, Bf16) {
  using E = TestType;
  Device d("embedding");
  Draw draw(3);
  const int T = 6, H = 37, begin = 10, end = 14;
  const float factor = 2.7f;  // rounded to the rows' dtype
  const double times = value(rounded<E>(factor));
  Array<E> table(d.memory, "table", draw.numbers<E>((end - begin) * H)), y(d.memory, "y", T * H),
      dy(d.memory, "dy", draw.numbers<E>(T * H));
  Array<std::int32_t> ids(d.memory, "ids", std::vector<std::int32_t>{10, 13, 9, 14, 13, 12});
  Array<float> dtable(d.memory, "dtable", draw.numbers<float>((end - begin) * H));
  const auto before = dtable.values();
  d.run(std::string("embedding_") + suffix<E>, {T}, 32, table.begin(), ids.begin(), y.begin(), H, begin, end, factor);
  Array<std::int32_t> chain(d.memory, "chain", T);
  d.run("embedding_chain", {1}, 32, ids.begin(), chain.begin(), T);
  CHECK(chain.values() == std::vector<std::int32_t>{6, 4, 6, 6, ~6, 6});
  d.run(std::string("embedding_backward_") + suffix<E> + "_f32", {T}, 32, ids.begin(), chain.begin(), dy.begin(),
        dtable.begin(), T, H, begin, end, factor);
  std::vector<double> wanted(before.begin(), before.end());
  for (std::size_t t = 0; t < T; ++t)
    for (std::size_t j = 0; j < H; ++j) {
      const bool here = ids[t] >= begin && ids[t] < end;
      const std::size_t row = here ? static_cast<std::size_t>(ids[t] - begin) : 0;
      CHECK(value(y[t * H + j]) == (here ? value(rounded<E>(value(table[row * H + j]) * times)) : 0.0));
      if (here) wanted[row * H + j] += value(dy[t * H + j]) * times;
    }
  near(dtable.values(), wanted, 1e-6, 1e-6);
}

TEMPLATE_TEST_CASE("matrix products, whole and ragged tiles", "[kernels]", float, Bf16) {
  using C = TestType;
  Device d("matmul");
  const std::vector<std::array<int, 3>> shapes = {{64, 64, 64}, {1, 5, 8}, {70, 33, 41}, {130, 64, 24}, {17, 129, 96}};
  std::uint64_t seed = 1;
  for (const auto& [M, N, K] : shapes)
    for (const char* form : {"nt", "nn", "tn"}) {
      INFO(form << " " << M << " x " << N << " x " << K);
      Draw draw(seed++);
      const auto m = static_cast<std::size_t>(M), n = static_cast<std::size_t>(N), k = static_cast<std::size_t>(K);
      const bool accumulate = seed % 2 == 0, has_bias = form[1] == 't' && seed % 3 == 0;
      Array<Bf16> a(d.memory, "a", draw.numbers<Bf16>(m * k)), b(d.memory, "b", draw.numbers<Bf16>(n * k)),
          bias(d.memory, "bias", draw.numbers<Bf16>(n));
      Array<C> c(d.memory, "c", draw.numbers<C>(m * n));
      const auto before = c.values();
      d.run(std::string("matmul_") + form + "_bf16_" + suffix<C>,
            {static_cast<std::uint32_t>((N + 63) / 64), static_cast<std::uint32_t>((M + 63) / 64)}, 128, a.begin(),
            form[0] == 't' ? M : K, b.begin(), has_bias ? bias.begin() : nullptr, c.begin(), N, M, N, K,
            int{accumulate});
      std::vector<double> wanted(m * n);
      for (std::size_t r = 0; r < m; ++r)
        for (std::size_t q = 0; q < n; ++q) {
          double sum = (accumulate ? value(before[r * n + q]) : 0.0) + (has_bias ? value(bias[q]) : 0.0);
          for (std::size_t x = 0; x < k; ++x)
            sum += value(a[form[0] == 'n' ? r * k + x : x * m + r]) * value(b[form[1] == 't' ? q * k + x : x * n + q]);
          wanted[r * n + q] = sum;
        }
      near(c.values(), wanted, unit<C>, 1e-5 * std::sqrt(K));
    }
}

/// The tiles of matmul_nt.cu, as kernels are named by them.
constexpr std::array<std::array<int, 2>, 4> nt_tiles = {{{32, 16}, {64, 32}, {64, 64}, {128, 128}}};

template <class C>
void run_tile(Device& d, const std::array<int, 2>& tile, const Bf16* a, int lda, const Bf16* b, const Bf16* bias, C* c,
              int ldc, int M, int N, int K, int accumulate) {
  const auto [rows, columns] = tile;
  const int tiles = (M + rows - 1) / rows * ((N + columns - 1) / columns);
  d.run("matmul_nt_bf16_" + std::string(suffix<C>) + "_" + std::to_string(rows) + "x" + std::to_string(columns),
        {static_cast<std::uint32_t>(tiles)}, 128, a, lda, b, bias, c, ldc, M, N, K, accumulate);
}

TEMPLATE_TEST_CASE("products of aligned rows in every tile, over columns of wider matrices", "[kernels]", float, Bf16) {
  using C = TestType;
  Device d("matmul_nt");
  const std::vector<std::array<int, 3>> shapes = {
      {1, 5, 8}, {33, 130, 136}, {70, 33, 40}, {130, 17, 264}, {1100, 20, 16}};
  std::uint64_t seed = 1;
  for (const auto& [M, N, K] : shapes)
    for (const auto& tile : nt_tiles) {
      INFO(tile[0] << " x " << tile[1] << ", " << M << " x " << N << " x " << K);
      Draw draw(seed++);
      const bool accumulate = seed % 2 == 0, has_bias = seed % 3 == 0;
      const int lda = K + 8, ldc = N + (seed % 4 == 0 ? 1 : 2);  // odd rows of C begin between pairs
      Array<Bf16> a(d.memory, "a", draw.numbers<Bf16>(static_cast<std::size_t>(M * lda))),
          b(d.memory, "b", draw.numbers<Bf16>(static_cast<std::size_t>(N * K))),
          bias(d.memory, "bias", draw.numbers<Bf16>(static_cast<std::size_t>(N)));
      Array<C> c(d.memory, "c", draw.numbers<C>(static_cast<std::size_t>(M * ldc)));
      const auto before = c.values();
      run_tile(d, tile, a.begin(), lda, b.begin(), has_bias ? bias.begin() : nullptr, c.begin(), ldc, M, N, K,
               int{accumulate});
      std::vector<double> wanted(before.size());
      for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i] = value(before[i]);
      for (int r = 0; r < M; ++r)
        for (int n = 0; n < N; ++n) {
          double& sum = wanted[static_cast<std::size_t>(r * ldc + n)];
          if (!accumulate) sum = 0;
          if (has_bias) sum += value(bias[static_cast<std::size_t>(n)]);
          for (int k = 0; k < K; ++k)
            sum += value(a[static_cast<std::size_t>(r * lda + k)]) * value(b[static_cast<std::size_t>(n * K + k)]);
        }
      near(c.values(), wanted, unit<C>, 1e-5 * std::sqrt(K));
    }
}

TEST_CASE("a row of a product has the same bits in every tile and among any rows", "[kernels]") {
  Device d("matmul_nt"), plain("matmul");
  Draw draw(11);
  const int N = 24, K = 200;
  const auto rows = draw.numbers<Bf16>(100 * K), weights = draw.numbers<Bf16>(N * K);
  const Bf16* none = nullptr;
  std::vector<float> first;
  for (const int M : {1, 7, 64, 100}) {
    const std::vector<Bf16> some(rows.begin(), rows.begin() + M * K);
    Array<Bf16> a(d.memory, "a", some), b(d.memory, "b", weights);
    Array<float> c(d.memory, "c", static_cast<std::size_t>(M * N));
    for (const auto& tile : nt_tiles) {
      run_tile(d, tile, a.begin(), K, b.begin(), none, c.begin(), N, M, N, K, 0);
      const std::vector<float> row(c.begin(), c.begin() + N);
      if (first.empty()) first = row;
      CHECK(row == first);
    }
    Array<Bf16> same_a(plain.memory, "a", some), same_b(plain.memory, "b", weights);
    Array<float> same_c(plain.memory, "c", static_cast<std::size_t>(M * N));
    plain.run("matmul_nt_bf16_f32", {1, static_cast<std::uint32_t>((M + 63) / 64)}, 128, same_a.begin(), K,
              same_b.begin(), none, same_c.begin(), N, M, N, K, 0);
    CHECK(std::vector<float>(same_c.begin(), same_c.begin() + N) == first);
  }
}

TEST_CASE("log-probabilities and their backward", "[kernels]") {
  Device d("loss");
  for (const int V : {1, 31, 500}) {
    Draw draw(static_cast<std::uint64_t>(V));
    const int T = 4;
    const float inverse = 1.0f / 0.7f, softcap = V == 31 ? 25.0f : 0.0f;  // of logits of up to 20
    const auto v = static_cast<std::size_t>(V);
    Array<float> logits(d.memory, "logits", draw.numbers<float>(T * v, 20.0));
    Array<std::int32_t> targets(d.memory, "targets", std::vector<std::int32_t>{0, -1, V - 1, V / 2});
    Array<float> logp(d.memory, "logp", T), lse(d.memory, "lse", T), entropy(d.memory, "entropy", T),
        dlogp(d.memory, "dlogp", draw.numbers<float>(T));
    Array<float> dlogits(d.memory, "dlogits", T * v);
    d.run("log_prob", {T}, 64, logits.begin(), targets.begin(), logp.begin(), lse.begin(), entropy.begin(), V, V,
          inverse);
    d.run("log_prob_backward_f32", {T}, 64, logits.begin(), lse.begin(), targets.begin(), dlogp.begin(),
          dlogits.begin(), 0, V, V, inverse, softcap);
    std::vector<double> wanted_logp(T), wanted_lse(T), wanted_entropy(T), wanted(T * v);
    for (std::size_t t = 0; t < T; ++t) {
      if (targets[t] < 0) continue;
      double sum = 0, most = -1e30;
      for (std::size_t j = 0; j < v; ++j) most = std::max(most, value(logits[t * v + j]) * inverse);
      for (std::size_t j = 0; j < v; ++j) sum += std::exp(value(logits[t * v + j]) * inverse - most);
      wanted_lse[t] = most + std::log(sum);
      wanted_logp[t] = value(logits[t * v + static_cast<std::size_t>(targets[t])]) * inverse - wanted_lse[t];
      for (std::size_t j = 0; j < v; ++j) {
        const double p = std::exp(value(logits[t * v + j]) * inverse - wanted_lse[t]);
        wanted_entropy[t] -= p > 0 ? p * std::log(p) : 0;
        const double share = softcap > 0 ? value(logits[t * v + j]) / softcap : 0.0;
        wanted[t * v + j] =
            dlogp[t] * inverse * ((static_cast<int>(j) == targets[t] ? 1.0 : 0.0) - p) * (1 - share * share);
      }
    }
    near(logp.values(), wanted_logp, 1e-6, 5e-6);
    near(lse.values(), wanted_lse, 1e-6, 1e-6);
    near(entropy.values(), wanted_entropy, 1e-5, 2e-6);
    near(dlogits.values(), wanted, 1e-5, 5e-6);
  }
}

TEST_CASE("parts of a vocabulary come to the whole one's log-probabilities", "[kernels]") {
  Device d("loss");
  const int V = 37, T = 4, each = 16, parts = 3;
  const float inverse = 1.0f / 0.7f;
  Draw draw(37);
  const auto all = draw.numbers<float>(static_cast<std::size_t>(T * V), 20.0);
  Array<float> logits(d.memory, "logits", all);
  Array<std::int32_t> targets(d.memory, "targets", std::vector<std::int32_t>{0, -1, V - 1, V / 2});
  Array<float> logp(d.memory, "logp", T), lse(d.memory, "lse", T), entropy(d.memory, "entropy", T),
      dlogp(d.memory, "dlogp", draw.numbers<float>(T)), dlogits(d.memory, "dlogits", static_cast<std::size_t>(T * V));
  d.run("log_prob", {T}, 64, logits.begin(), targets.begin(), logp.begin(), lse.begin(), entropy.begin(), V, V,
        inverse);
  d.run("log_prob_backward_f32", {T}, 64, logits.begin(), lse.begin(), targets.begin(), dlogp.begin(), dlogits.begin(),
        0, V, V, inverse, 0.0f);
  std::vector<float> stats;
  for (int p = 0; p < parts; ++p) {
    const int first = p * each, held = std::min(each, V - first);
    std::vector<float> columns(static_cast<std::size_t>(T * each), 0.0f);
    for (int t = 0; t < T; ++t)
      for (int j = 0; j < held; ++j)
        columns[static_cast<std::size_t>(t * each + j)] = all[static_cast<std::size_t>(t * V + first + j)];
    Array<float> part(d.memory, "part", columns), of_part(d.memory, "stats", static_cast<std::size_t>(4 * T)),
        d_part(d.memory, "dlogits of a part", static_cast<std::size_t>(T * each));
    d.run("vocab_stats", {T}, 64, part.begin(), targets.begin(), of_part.begin(), first, held, each, inverse);
    d.run("log_prob_backward_f32", {T}, 64, part.begin(), lse.begin(), targets.begin(), dlogp.begin(), d_part.begin(),
          first, held, each, inverse, 0.0f);
    const auto found = of_part.values();
    stats.insert(stats.end(), found.begin(), found.end());
    for (int t = 0; t < T; ++t)
      for (int j = 0; j < each; ++j)
        CHECK(d_part[static_cast<std::size_t>(t * each + j)] ==
              (j < held ? dlogits[static_cast<std::size_t>(t * V + first + j)] : 0.0f));
  }
  Array<float> gathered(d.memory, "all stats", stats), logp2(d.memory, "logp", T), lse2(d.memory, "lse", T),
      entropy2(d.memory, "entropy", T);
  d.run("vocab_log_prob", {1}, 32, gathered.begin(), targets.begin(), logp2.begin(), lse2.begin(), entropy2.begin(),
        parts, T, inverse);
  const auto wide = [](const std::vector<float>& v) { return std::vector<double>(v.begin(), v.end()); };
  near(logp2.values(), wide(logp.values()), 1e-6, 2e-6);
  near(lse2.values(), wide(lse.values()), 1e-6, 1e-6);
  near(entropy2.values(), wide(entropy.values()), 1e-5, 2e-6);
}

namespace {

/// Gradient, master and moments of a few tensors, and the launches that sum and step some of them.
struct Optimized {
  Optimized(Device& on, const std::vector<std::size_t>& sizes)
      : d(on), lr(d.memory, "lr", {1e-2f, 3.0f}), c(d.memory, "c", std::vector<float>{0.5f}), s(d.memory, "s", 1) {
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      Draw draw(sizes[i]);
      for (auto* list : {&g, &p, &m, &v})
        list->push_back(std::make_unique<Array<float>>(d.memory, "tensor", draw.numbers<float>(sizes[i])));
      for (std::size_t j = 0; j < sizes[i]; ++j) (*v[i])[j] = std::abs((*v[i])[j]);
    }
  }
  /// Tensors [begin, end) in one launch; blocks_of(n): of a tensor.
  template <class Blocks>
  ManyTensors many(std::size_t begin, std::size_t end, Blocks&& blocks_of) const {
    ManyTensors out{};
    out.count = static_cast<std::int32_t>(end - begin);
    for (std::size_t i = begin; i < end; ++i) {
      out.n[i - begin] = static_cast<std::int64_t>(g[i]->size());
      out.first_block[i - begin + 1] = out.first_block[i - begin] + static_cast<std::int32_t>(blocks_of(g[i]->size()));
    }
    return out;
  }
  void sum(std::size_t begin, std::size_t end, bool accumulate) {
    SquaredTensors t{};
    for (std::size_t i = begin; i < end; ++i) t.x[i - begin] = g[i]->begin();
    t.many = many(begin, end, [](std::size_t n) { return std::min<std::size_t>(4, (n + 63) / 64); });
    const std::int32_t blocks = t.many.first_block[t.many.count];
    Array<double> partial(d.memory, "partial", static_cast<std::size_t>(blocks));
    if (blocks > 0) d.run("sum_squares_partial_f32", {static_cast<std::uint32_t>(blocks)}, 64, t, partial.begin());
    d.run("sum_squares_finish", {1}, 64, t.many, partial.begin(), s.begin(), accumulate ? 1 : 0);
  }
  Counters step(std::size_t begin, std::size_t end) {
    SteppedTensors t{};
    for (std::size_t i = begin; i < end; ++i) {
      const std::size_t k = i - begin;
      t.g[k] = g[i]->begin(), t.p[k] = p[i]->begin(), t.m[k] = m[i]->begin(), t.v[k] = v[i]->begin();
    }
    t.many = many(begin, end, [](std::size_t n) { return (n + stepped_by_block - 1) / stepped_by_block; });
    return d.run("adamw_f32", {static_cast<std::uint32_t>(t.many.first_block[t.many.count])}, 128, t, lr.begin(),
                 c.begin(), 0.9f, 0.99f, 1e-8f, 0.1f);
  }
  Device& d;
  Array<float> lr, c, s;
  std::vector<std::unique_ptr<Array<float>>> g, p, m, v;
};

}  // namespace

TEST_CASE("sum of squares and AdamW of many tensors, in one launch as in many", "[kernels]") {
  Device d("optimizer");
  // One with nothing, one longer than a block's part, and an odd one behind it.
  const std::vector<std::size_t> sizes = {37, 0, 4096 + 5, 1, 500};
  Optimized together(d, sizes), apart(d, sizes);
  double squares = 0;
  std::vector<std::vector<double>> wanted;
  std::int64_t elements = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const auto &g = *together.g[i], &p = *together.p[i], &m = *together.m[i], &v = *together.v[i];
    wanted.emplace_back();
    for (std::size_t j = 0; j < sizes[i]; ++j, ++elements) {
      const auto at = [j](const Array<float>& x) { return value(const_cast<Array<float>&>(x)[j]); };
      squares += at(g) * at(g);
      const double x = 0.5 * at(g), mj = 0.9 * at(m) + 0.1 * x, vj = 0.99 * at(v) + 0.01 * x * x;
      wanted.back().push_back(
          at(p) -
          1e-2 * (mj / (1 - std::pow(0.9, 3)) / (std::sqrt(vj / (1 - std::pow(0.99, 3))) + 1e-8) + 0.1 * at(p)));
    }
  }
  together.sum(0, sizes.size(), false);
  CHECK(together.s[0] == Approx(squares).epsilon(3e-7));
  for (std::size_t i = 0; i < sizes.size(); ++i) apart.sum(i, i + 1, i > 0);
  CHECK(apart.s[0] == together.s[0]);
  const Counters used = together.step(0, sizes.size());
  // g, p, m and v read, p, m and v written; beside them three scalars of each of five blocks.
  CHECK(used.global_written_bytes == 3 * 4 * elements);
  CHECK(used.global_read_bytes == 4 * 4 * elements + 5 * 12);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    near(together.p[i]->values(), wanted[i], 2e-6, 2e-6);
    if (sizes[i] > 0) apart.step(i, i + 1);
    CHECK(apart.p[i]->values() == together.p[i]->values());
    CHECK(apart.v[i]->values() == together.v[i]->values());
  }
}

TEST_CASE("boxes land where they belong, cast on the way", "[kernels]") {
  Device d("boxes");
  Draw draw(9);
  struct Box {
    std::int64_t src_offset, src_pitch, dst_offset, dst_pitch, rows, cols;
  };
  const std::vector<Box> boxes = {{3, 20, 0, 7, 4, 7}, {100, 9, 40, 30, 2, 9}, {0, 1, 120, 1, 0, 0}};
  Array<float> src(d.memory, "src", draw.numbers<float>(120));
  Array<Bf16> dst(d.memory, "dst", std::vector<Bf16>(120, Bf16{0x1234}));
  Array<Box> list(d.memory, "boxes", boxes);
  d.run("copy_boxes_f32_bf16", {2, 3}, 32, src.begin(), dst.begin(), list.begin());
  std::vector<Bf16> wanted(120, Bf16{0x1234});
  for (const Box& b : boxes)
    for (std::int64_t i = 0; i < b.rows; ++i)
      for (std::int64_t j = 0; j < b.cols; ++j)
        wanted[static_cast<std::size_t>(b.dst_offset + i * b.dst_pitch + j)] =
            ptx::to_bf16(src[static_cast<std::size_t>(b.src_offset + i * b.src_pitch + j)]);
  CHECK(dst.values() == wanted);
}

TEST_CASE("hot kernels ask for the bytes that they must, in whole sectors, and meet no shared-memory bank twice",
          "[kernels]") {
  Device norm("norm");
  const int T = 3, H = 1024;
  Array<Bf16> x(norm.memory, "x", Draw(1).numbers<Bf16>(T * H)), w(norm.memory, "w", Draw(2).numbers<Bf16>(H)),
      y(norm.memory, "y", T * H);
  Array<float> rstd(norm.memory, "rstd", T);
  Bf16* none = nullptr;
  const Counters c =
      norm.run("rms_norm_bf16", {T}, 256, x.begin(), none, w.begin(), y.begin(), rstd.begin(), none, H, 1e-5f, 0.0f);
  CHECK(c.global_written_bytes == T * H * 2 + T * 4);
  CHECK(c.global_read_bytes == T * H * 2 * 2 + T * H * 2);  // x twice (the second time from L1), w once a row
  CHECK(c.global_sectors * 32 ==
        c.global_read_bytes + c.global_written_bytes - T * 4 + T * 32);  // rstd: one of 8 floats

  Device matmul("matmul");
  const int M = 64, N = 64, K = 64;
  Array<Bf16> a(matmul.memory, "a", Draw(3).numbers<Bf16>(M * K)), b(matmul.memory, "b", Draw(4).numbers<Bf16>(N * K));
  Array<float> out(matmul.memory, "c", M * N);
  const Counters m =
      matmul.run("matmul_nt_bf16_f32", {1, 1}, 128, a.begin(), K, b.begin(), none, out.begin(), N, M, N, K, 0);
  CHECK(m.global_read_bytes == 2 * (M + N) * K);
  // 16 bytes a lane are four passes at least, to fetch a tile as to read a fragment: none more.
  CHECK(m.shared_wavefronts == 4 * m.shared_requests);
  CHECK(m.flops >= 2LL * M * N * K);
  // The tiles of aligned rows swizzle instead, and meet no bank twice either.
  for (const auto& tile : nt_tiles) {
    INFO(tile[0] << " x " << tile[1]);
    Device aligned("matmul_nt");
    const int m_rows = tile[0], columns = tile[1], k = 256;
    Array<Bf16> left(aligned.memory, "a", Draw(3).numbers<Bf16>(static_cast<std::size_t>(m_rows * k))),
        right(aligned.memory, "b", Draw(4).numbers<Bf16>(static_cast<std::size_t>(columns * k)));
    Array<float> product(aligned.memory, "c", static_cast<std::size_t>(m_rows * columns));
    const Counters counted =
        aligned.run("matmul_nt_bf16_f32_" + std::to_string(m_rows) + "x" + std::to_string(columns), {1}, 128,
                    left.begin(), k, right.begin(), none, product.begin(), columns, m_rows, columns, k, 0);
    CHECK(counted.global_read_bytes == 2 * (m_rows + columns) * k);
    CHECK(counted.shared_wavefronts == 4 * counted.shared_requests);
  }
}
