#include "backends/cpu_gloo/kernels/attention.h"

#include <rapidcheck.h>

#include <limits>

#include "backends/cpu_gloo/kernels/paged_attention.h"
#include "backends/cpu_gloo/kernels/sinks.h"
#include "tests/cpu_kernels/dense.h"

using namespace hotbunk;
using namespace hotbunk::kernels;
using namespace hotbunk::kernels::test;

namespace {

/// Attention by its definition, one sequence and head at a time, in double.
struct NaiveAttention {
  NaiveAttention(const Tensor& packed, const HeadShape& heads, std::vector<std::int32_t> offsets, const Scores& rule)
      : qkv(dense(packed)), shape(heads), cu(std::move(offsets)), scores(rule) {}

  Dense qkv;  // [T][width]
  HeadShape shape;
  std::vector<std::int32_t> cu;
  Scores scores;

  /// q, k, v: [n][d]; p, the weights: [n][n], causal; slope: of the score by what was capped; lse: [n].
  struct Head {
    Dense q, k, v, p, slope;
    Eigen::VectorXd lse;
  };
  std::int64_t k_column(std::int64_t head) const { return shape.k_offset() + kv_head(head) * shape.head_dim; }
  std::int64_t v_column(std::int64_t head) const { return shape.v_offset() + kv_head(head) * shape.dv(); }
  std::int64_t kv_head(std::int64_t head) const { return head / (shape.num_heads / shape.num_kv_heads); }
  Head head_of(std::int64_t start, std::int64_t n, std::int64_t head) const {
    const std::int64_t d = shape.head_dim;
    Head x{qkv.block(start, head * d, n, d),
           qkv.block(start, k_column(head), n, d),
           qkv.block(start, v_column(head), n, shape.dv()),
           Dense::Zero(n, n),
           Dense::Ones(n, n),
           {}};
    Dense score = static_cast<double>(scores.scale) * x.q * x.k.transpose();
    if (const double cap = scores.softcap; cap > 0) {
      const Dense bent = (score / cap).array().tanh();
      score = cap * bent, x.slope = 1.0 - bent.array().square();
    }
    const Dense weights = score.array().exp();
    x.p.triangularView<Eigen::Lower>() = weights;
    for (std::int64_t query = 0; query < n && scores.window > 0; ++query)
      for (std::int64_t key = 0; key + scores.window <= query; ++key) x.p(query, key) = 0.0;
    const Eigen::VectorXd sums = x.p.rowwise().sum();
    x.p = sums.cwiseInverse().asDiagonal() * x.p;
    x.lse = sums.array().log();
    return x;
  }
  /// f(first token, tokens, head, Head)
  template <class F>
  void each_head(F&& f) const {
    for (std::size_t i = 0; i + 1 < cu.size(); ++i)
      for (std::int64_t h = 0; h < shape.num_heads; ++h)
        f(cu[i], cu[i + 1] - cu[i], h, head_of(cu[i], cu[i + 1] - cu[i], h));
  }

  /// All outputs [T][a·dv] and log-sum-exps [T][a].
  std::pair<Dense, Dense> forward() const {
    const std::int64_t T = cu.back(), dv = shape.dv();
    Dense o = Dense::Zero(T, shape.num_heads * dv), lse = Dense::Zero(T, shape.num_heads);
    each_head([&](std::int64_t start, std::int64_t n, std::int64_t h, const Head& x) {
      o.block(start, h * dv, n, dv) = x.p * x.v;
      lse.block(start, h, n, 1) = x.lse;
    });
    return {o, lse};
  }
  /// dqkv [T][width] by the chain rule on the definition.
  Dense backward(const Dense& d_o) const {
    const std::int64_t T = cu.back(), d = shape.head_dim, dv = shape.dv();
    Dense g = Dense::Zero(T, shape.width());
    each_head([&](std::int64_t start, std::int64_t n, std::int64_t h, const Head& x) {
      const Dense up = d_o.block(start, h * dv, n, dv);
      const Dense dp = up * x.v.transpose();
      const Eigen::VectorXd mean = x.p.cwiseProduct(dp).rowwise().sum();
      const Dense ds = scores.scale * x.p.cwiseProduct(dp.colwise() - mean).cwiseProduct(x.slope);
      g.block(start, h * d, n, d) += ds * x.k;
      g.block(start, k_column(h), n, d) += ds.transpose() * x.q;
      g.block(start, v_column(h), n, dv) += x.p.transpose() * up;
    });
    return g;
  }
};

struct Case {
  HeadShape shape;
  std::vector<std::int32_t> cu;
  float softcap = 0.0f;
  std::int64_t window = 0;
};

/// bf16: the weights P ≤ 1 may be rounded to bf16 before they meet the values (half an ulp, 2⁻⁹).
double forward_tolerance(DType dtype) { return dtype == DType::f32 ? kF32Tolerance : 4e-3; }
/// bf16: the inputs are exact, but backward reads an o that was rounded to bf16: each of the d terms of D = Σ dO·O
/// carries up to 2⁻⁹ of |O|; P and dS may be rounded to bf16 as well. Short sequences, whose largest gradient is small,
/// are the worst: 0.0135 of it in some thousand random cases.
double backward_tolerance(DType dtype) { return dtype == DType::f32 ? 1e-5 : 2e-2; }

/// Errors of forward (o, lse) and backward against the definition; checks that padding is intact.
std::array<double, 3> errors(const Case& c, DType dtype, int threads, std::uint64_t seed) {
  Random rng(seed);
  KernelContext ctx(threads);
  const std::int64_t T = c.cu.back(), width = c.shape.width(), out = c.shape.num_heads * c.shape.dv();
  const Scores scale{static_cast<float>(1.0 / std::sqrt(static_cast<double>(c.shape.head_dim))), c.softcap, c.window};
  const Tensor qkv = Tensor::random(dtype, T, width, width + 3, rng, 1.5);
  const Tensor d_o = Tensor::random(dtype, T, out, out + 2, rng);
  Tensor o(dtype, T, out, out + 5), lse(DType::f32, T, c.shape.num_heads), dqkv(dtype, T, width, width + 1);
  attention_forward(ctx, qkv.matrix(), c.shape, c.cu, scale, o.matrix(), lse.f32());
  attention_backward(ctx, qkv.matrix(), o.matrix(), d_o.matrix(), lse.f32(), c.shape, c.cu, scale, dqkv.matrix());
  const NaiveAttention naive(qkv, c.shape, c.cu, scale);
  const auto [want_o, want_lse] = naive.forward();
  const auto want_g = naive.backward(dense(d_o));
  CHECK(o.padding_intact());
  CHECK(lse.padding_intact());
  CHECK(dqkv.padding_intact());
  return {dense_error(o, want_o), dense_error(lse, want_lse), dense_error(dqkv, want_g)};
}

}  // namespace

TEST_CASE("causal attention of packed sequences and its gradient equal the definition") {
  const Case cases[] = {
      {{2, 2, 64}, {0, 1}},                     // one token
      {{4, 2, 16}, {0, 64, 128}},               // whole tiles
      {{3, 1, 20}, {0, 5, 5, 70, 201}},         // odd head, an empty sequence, tails
      {{4, 2, 32}, {0, 5, 5, 70, 201}},         // a head that fits AMX tiles, with tails
      {{2, 1, 128}, {0, 150}},                  // wide heads, one long sequence: queries are cut
      {{2, 2, 8}, {0}},                         // no sequence
      {{1, 1, 24}, {0, 0}},                     // only an empty one
      {{4, 2, 16}, {0, 5, 70, 271}, 0.0f, 10},  // a window that a tile is wider than
      {{4, 2, 32}, {0, 5, 70, 271}, 0.0f, 64},  // one as wide
      {{2, 1, 20}, {0, 301}, 0.0f, 130},        // one over several tiles
      {{2, 2, 16}, {0, 90}, 0.0f, 1},           // a token sees itself alone
      {{4, 2, 32}, {0, 5, 70, 201}, 0.8f},      // a cap in the midst of the scores
      {{3, 1, 24}, {0, 5, 70, 201}, 1.5f, 33},
      {{4, 4, 24, 16}, {0, 5, 5, 70, 201}},  // values narrower than keys
      {{4, 2, 10, 37}, {0, 5, 70, 201}},     // wider, of no whole vectors
      {{2, 2, 32, 64}, {0, 90}},             // where AMX tiles would take keys
  };
  for (const Case& c : cases)
    for (DType dtype : kFloatTypes) {
      CAPTURE(name_of(dtype), c.shape.head_dim, c.cu);
      const auto [o, lse, g] = errors(c, dtype, 2, 21);
      CHECK(o <= forward_tolerance(dtype));
      CHECK(lse <= kF32Tolerance);
      CHECK(g <= backward_tolerance(dtype));
    }
}

TEST_CASE("attention: random shapes and lengths") {
  CHECK(rc::check("forward and backward equal the definition", [] {
    Case c;
    c.shape.num_kv_heads = *rc::gen::inRange(1, 4);
    c.shape.num_heads = c.shape.num_kv_heads * *rc::gen::inRange(1, 4);
    c.shape.head_dim = *rc::gen::inRange(1, 41);
    c.cu = {0};
    for (int length : *rc::gen::container<std::vector<int>>(3, rc::gen::inRange(0, 100)))
      c.cu.push_back(c.cu.back() + length);
    const DType dtype = *rc::gen::elementOf(std::vector<DType>{DType::f32, DType::bf16});
    if (*rc::gen::arbitrary<bool>()) c.softcap = 1.0f;
    if (*rc::gen::arbitrary<bool>()) c.window = *rc::gen::inRange(1, 120);
    if (*rc::gen::arbitrary<bool>()) c.shape.value_dim = *rc::gen::inRange(1, 41);
    if (*rc::gen::arbitrary<bool>()) c.shape.head_dim = 32 * (1 + c.shape.head_dim % 3);  // what AMX tiles take
    const auto [o, lse, g] = errors(c, dtype, 1 + *rc::gen::inRange(0, 2), 22);
    RC_ASSERT(o <= forward_tolerance(dtype));
    RC_ASSERT(lse <= kF32Tolerance);
    RC_ASSERT(g <= backward_tolerance(dtype));
  }));
}

TEST_CASE("attention's gradient equals finite differences of the definition") {
  Random rng(23);
  const HeadShape shape{2, 1, 6};
  const std::vector<std::int32_t> cu{0, 4, 9};
  Tensor qkv = Tensor::random(DType::f32, 9, shape.width(), 0, rng);
  const Tensor d_o = Tensor::random(DType::f32, 9, 12, 0, rng);
  const auto objective = [&] {
    return NaiveAttention(qkv, shape, cu, 0.5).forward().first.cwiseProduct(dense(d_o)).sum();
  };
  KernelContext ctx(2);
  Tensor o(DType::f32, 9, 12), lse(DType::f32, 9, 2), g(DType::f32, 9, shape.width());
  attention_forward(ctx, qkv.matrix(), shape, cu, 0.5f, o.matrix(), lse.f32());
  attention_backward(ctx, qkv.matrix(), o.matrix(), d_o.matrix(), lse.f32(), shape, cu, 0.5f, g.matrix());
  for (std::int64_t t = 0; t < 9; ++t)
    for (std::int64_t j = 0; j < shape.width(); ++j) {
      const double x = qkv.at(t, j), h = 1.0 / 1024;  // exact in fp32 next to values of unit size, up to 2⁻²⁴
      qkv.set(t, j, x + h);
      const double up_at = qkv.at(t, j), up = objective();
      qkv.set(t, j, x - h);
      const double down_at = qkv.at(t, j), down = objective();
      qkv.set(t, j, x);
      CHECK(g.at(t, j) == Approx((up - down) / (up_at - down_at)).margin(2e-5));
    }
}

TEST_CASE("a sequence's attention does not depend on its neighbours or on the number of threads") {
  Random rng(24);
  const HeadShape shape{4, 2, 32};
  const std::int64_t width = shape.width(), out = 128, n = 150;
  for (DType dtype : kFloatTypes) {
    const std::int64_t size = size_of(dtype);
    const Tensor qkv = Tensor::random(dtype, 300, width, 0, rng), d_o = Tensor::random(dtype, 300, out, 0, rng);
    KernelContext c1(1), c2(2);
    Tensor both(dtype, 300, out), alone(dtype, n, out), lse(DType::f32, 300, 4), lse_alone(DType::f32, n, 4);
    Tensor d_both(dtype, 300, width), d_alone(dtype, n, width);
    const std::vector<std::int32_t> two{0, 150, 300}, one{0, 150};
    attention_forward(c2, qkv.matrix(), shape, two, 0.2f, both.matrix(), lse.f32());
    attention_backward(c2, qkv.matrix(), both.matrix(), d_o.matrix(), lse.f32(), shape, two, 0.2f, d_both.matrix());
    const ConstMatrix second{qkv.bytes().data() + n * width * size, dtype, width};
    const ConstMatrix second_do{d_o.bytes().data() + n * out * size, dtype, out};
    attention_forward(c1, second, shape, one, 0.2f, alone.matrix(), lse_alone.f32());
    attention_backward(c1, second, alone.matrix(), second_do, lse_alone.f32(), shape, one, 0.2f, d_alone.matrix());
    const auto same = [&](const Tensor& whole, const Tensor& part, std::int64_t bytes_per_row) {
      return std::memcmp(part.bytes().data(), whole.bytes().data() + n * bytes_per_row,
                         static_cast<std::size_t>(n * bytes_per_row)) == 0;
    };
    CHECK(same(both, alone, out * size));
    CHECK(same(lse, lse_alone, 16));
    CHECK(same(d_both, d_alone, width * size));
  }
}

namespace {

/// Two sequences whose tokens lie in scattered blocks of a pool.
struct Paged {
  static constexpr std::int64_t kBlockSize = 8, kMaxBlocks = 20;
  HeadShape shape{6, 2, 40};
  std::vector<std::int32_t> cu{0, 130, 137};  // lengths 130 and 7
  std::vector<std::int32_t> table;
  Tensor qkv, pool;
  Paged(DType dtype, DType pool_type, Random& rng)
      : qkv(Tensor::random(dtype, 137, shape.width(), shape.width() + 4, rng)),
        pool(Tensor::filled(pool_type, 2 * kMaxBlocks, 2 * kBlockSize * 2 * 40, 0, NAN)) {
    for (std::int32_t b = 0; b < 2 * kMaxBlocks; ++b) table.push_back((b * 7 + 3) % (2 * kMaxBlocks));  // a permutation
  }
  KvPool view() { return {pool.data(), pool.dtype(), 2 * kMaxBlocks, kBlockSize}; }
  std::vector<std::int32_t> slots() const {
    std::vector<std::int32_t> s;
    for (std::size_t i = 0; i + 1 < cu.size(); ++i)
      for (std::int32_t p = 0; p < cu[i + 1] - cu[i]; ++p)
        s.push_back(table[i * kMaxBlocks + p / kBlockSize] * kBlockSize + p % kBlockSize);
    return s;
  }
};

}  // namespace

TEST_CASE("paged attention reads what kv_write wrote: prefill, chunked prefill and decode equal full attention") {
  KernelContext ctx(2);
  for (DType dtype : kFloatTypes)
    for (const auto& [pool_type, scale] : {std::pair{DType::f32, Scores{0.16f}},
                                           {DType::bf16, Scores{0.16f}},
                                           {DType::f32, Scores{0.16f, 1.5f, 50}},
                                           {DType::bf16, Scores{0.16f, 0.0f, 7}},
                                           {DType::f32, Scores{0.16f, 0.0f, 100}}}) {
      CAPTURE(name_of(dtype), name_of(pool_type), scale.window, scale.softcap);
      Random rng(31);
      Paged p(dtype, pool_type, rng);
      const std::int64_t width = p.shape.width(), out = 240;
      std::vector<std::int32_t> slots = p.slots();
      kv_write(ctx, p.qkv.matrix(), slots.data(), 137, p.shape, p.view());

      Tensor seen = p.qkv;  // what the pool holds, in its dtype
      for (std::int64_t t = 0; t < 137; ++t)
        for (std::int64_t c = p.shape.k_offset(); c < width; ++c) {
          Tensor one(pool_type, 1, 1);
          one.set(0, 0, p.qkv.at(t, c));
          if (dtype == DType::f32) seen.set(t, c, one.at(0, 0));
        }
      const auto [want, lse] = NaiveAttention(seen, p.shape, p.cu, scale).forward();

      Tensor o(dtype, 137, out, out + 3), sums(DType::f32, 137, p.shape.num_heads),
          last(DType::f32, 3, p.shape.num_heads);
      const std::vector<std::int32_t> full{130, 7};
      paged_prefill_attention(ctx, p.qkv.matrix(), p.shape, p.view(), {p.table.data(), Paged::kMaxBlocks, full.data()},
                              p.cu, scale, o.matrix(), sums.f32());
      check_dense(o, want, kF32Tolerance);
      check_dense(sums, lse, kF32Tolerance);

      // The second chunk of sequence 0 only: tokens 90..129.
      Tensor chunk(dtype, 40, out, out + 3);
      const Matrix rows{static_cast<char*>(p.qkv.data()) + 90 * (width + 4) * size_of(dtype), dtype, width + 4};
      paged_prefill_attention(ctx, rows, p.shape, p.view(), {p.table.data(), Paged::kMaxBlocks, full.data()},
                              std::vector<std::int32_t>{0, 40}, scale, chunk.matrix());
      CHECK(error_of(chunk, [&](auto t, auto j) { return o.at(t + 90, j); }) == 0.0);

      // Decode of the last token of both sequences and an idle slot between: the same bits as prefill's.
      Tensor q(dtype, 3, width), decoded(dtype, 3, out);
      for (std::int64_t c = 0; c < width; ++c) {
        q.set(0, c, p.qkv.at(129, c));
        q.set(1, c, 0.5);
        q.set(2, c, p.qkv.at(136, c));
      }
      std::vector<std::int32_t> table3(p.table.begin(), p.table.begin() + Paged::kMaxBlocks);
      table3.insert(table3.end(), Paged::kMaxBlocks, -7);  // an idle slot's table is not read
      table3.insert(table3.end(), p.table.begin() + Paged::kMaxBlocks, p.table.end());
      const std::vector<std::int32_t> context{130, 0, 7};
      paged_decode_attention(ctx, q.matrix(), p.shape, p.view(), {table3.data(), Paged::kMaxBlocks, context.data()}, 3,
                             scale, decoded.matrix(), last.f32());
      for (std::int64_t h = 0; h < p.shape.num_heads; ++h) {
        CHECK((last.at(0, h) == sums.at(129, h) && last.at(2, h) == sums.at(136, h)));
        CHECK(last.at(1, h) == -std::numeric_limits<double>::infinity());
      }
      CHECK(error_of(decoded, [&](auto s, auto j) { return s == 1 ? 0.0 : o.at(s == 0 ? 129 : 136, j); }) == 0.0);
      CHECK(decoded.padding_intact());
    }
}

TEST_CASE("ranks that hold parts of the keys find with their log-sum-exps what one that holds all of them finds") {
  KernelContext ctx(2);
  for (const DType dtype : kFloatTypes)
    for (const std::int64_t ranks : {2, 3, 5})
      for (const Scores scores : {Scores{0.16f}, Scores{0.16f, 1.5f, 50}, Scores{0.16f, 0.0f, 2}}) {
        CAPTURE(name_of(dtype), ranks, scores.window);
        Random rng(37);
        Paged p(dtype, dtype, rng);
        const auto [want, want_lse] = NaiveAttention(p.qkv, p.shape, p.cu, scores).forward();
        const double bound = dtype == DType::f32 ? kF32Tolerance : 2e-2;  // of bf16 each part was rounded
        const std::int64_t out = 240, heads = p.shape.num_heads;
        const std::vector<std::int32_t> full{130, 7};
        // Slots of blocks with `ranks` times as many tokens, as a scheduler hands them out.
        std::vector<std::int32_t> slots;
        for (std::size_t s = 0; s < 2; ++s)
          for (std::int32_t t = 0, span = static_cast<std::int32_t>(Paged::kBlockSize * ranks); t < full[s]; ++t)
            slots.push_back(p.table[s * Paged::kMaxBlocks + static_cast<std::size_t>(t / span)] * span + t % span);
        std::vector<Tensor> parts, sums, decoded, last;
        Tensor all(DType::f32, ranks * 137, heads), all_last(DType::f32, ranks * 3, heads);
        for (std::int64_t place = 0; place < ranks; ++place) {
          const KeyShare share{ranks, place};
          Paged own(dtype, dtype, rng);  // a pool of NaN
          kv_write(ctx, p.qkv.matrix(), held_slots(slots.data(), 137, share).data(), 137, p.shape, own.view());
          parts.emplace_back(dtype, 137, out, out + 3), sums.emplace_back(DType::f32, 137, heads);
          paged_prefill_attention(ctx, p.qkv.matrix(), p.shape, own.view(),
                                  {p.table.data(), Paged::kMaxBlocks, full.data(), share}, p.cu, scores,
                                  parts.back().matrix(), sums.back().f32());
          // Decode of the last token of both sequences, an idle slot between: the same bits.
          Tensor q(dtype, 3, p.shape.width());
          for (std::int64_t c = 0; c < p.shape.width(); ++c)
            q.set(0, c, p.qkv.at(129, c)), q.set(1, c, 0.5), q.set(2, c, p.qkv.at(136, c));
          std::vector<std::int32_t> table(p.table.begin(), p.table.begin() + Paged::kMaxBlocks);
          table.insert(table.end(), Paged::kMaxBlocks, -7);
          table.insert(table.end(), p.table.begin() + Paged::kMaxBlocks, p.table.end());
          const std::vector<std::int32_t> context{130, 0, 7};
          decoded.emplace_back(dtype, 3, out), last.emplace_back(DType::f32, 3, heads);
          paged_decode_attention(ctx, q.matrix(), p.shape, own.view(),
                                 {table.data(), Paged::kMaxBlocks, context.data(), share}, 3, scores,
                                 decoded.back().matrix(), last.back().f32());
          CHECK(error_of(decoded.back(),
                         [&](auto s, auto j) { return s == 1 ? 0.0 : parts.back().at(s == 0 ? 129 : 136, j); }) == 0.0);
          for (std::int64_t t = 0; t < 137; ++t)
            for (std::int64_t h = 0; h < heads; ++h) all.set(place * 137 + t, h, sums.back().at(t, h));
          for (std::int64_t t = 0; t < 3; ++t)
            for (std::int64_t h = 0; h < heads; ++h) all_last.set(place * 3 + t, h, last.back().at(t, h));
        }
        for (std::size_t r = 0; r < parts.size(); ++r) {
          attention_part(ctx, parts[r].matrix(), sums[r].f32(), all.f32(), ranks, 137, heads, 40);
          attention_part(ctx, decoded[r].matrix(), last[r].f32(), all_last.f32(), ranks, 3, heads, 40);
          check_dense(sums[r], want_lse, kF32Tolerance);
          CHECK(parts[r].padding_intact());
          CHECK(last[r].at(1, 0) == -std::numeric_limits<double>::infinity());
        }
        Tensor whole(DType::f32, 137, out), whole_last(DType::f32, 3, out);
        for (std::int64_t t = 0; t < 137; ++t)
          for (std::int64_t c = 0; c < out; ++c) {
            double sum = 0.0, sum_last = 0.0;
            for (const Tensor& part : parts) sum += part.at(t, c);
            for (const Tensor& part : decoded) sum_last += t < 3 ? part.at(t, c) : 0.0;
            whole.set(t, c, sum);
            if (t < 3) whole_last.set(t, c, sum_last);
          }
        check_dense(whole, want, bound);
        CHECK(error_of(whole_last, [&](auto s, auto j) { return s == 1 ? 0.0 : whole.at(s == 0 ? 129 : 136, j); }) ==
              0.0);
      }
}

TEST_CASE("decode has prefill's bits, whether a group's heads read keys in place or packed, one by one or together") {
  // Three and six kv heads of a query head each: in pairs, with one left over or none.
  const std::vector<HeadShape> shapes = {{2, 2, 64}, {3, 3, 64}, {6, 6, 32}, {4, 4, 32, 80}, {8, 4, 32},
                                         {3, 1, 64}, {4, 1, 64}, {5, 1, 64}, {2, 1, 20}};
  for (const auto& [dtype, kept] : {std::pair(DType::f32, DType::f32),
                                    {DType::bf16, DType::bf16},
                                    {DType::bf16, DType::f32},
                                    {DType::f32, DType::bf16}})
    for (const HeadShape& shape : shapes)
      for (const Scores scale : {Scores{0.16f}, Scores{0.16f, 1.5f, 70}})
        for (const auto& [threads, block] : {std::pair(1, 8), {2, 24}, {2, 5}, {1, 1}}) {
          CAPTURE(name_of(dtype), name_of(kept), shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.dv(),
                  scale.window, threads, block);
          KernelContext ctx(threads);
          Random rng(33);
          const std::int64_t length = 137, out = shape.num_heads * shape.dv(), sequences = 4;
          const std::int32_t blocks = (137 + block - 1) / block;
          const Tensor qkv = Tensor::random(dtype, length, shape.width(), 0, rng);
          Tensor pool =
              Tensor::random(kept, blocks, block * shape.num_kv_heads * (shape.head_dim + shape.dv()), 0, rng);
          std::vector<std::int32_t> table;  // of sequences that are one's beginnings, and one of none
          for (std::int32_t b = 0; b < sequences * blocks; ++b) table.push_back((b % blocks * 11 + 3) % blocks);
          const KvPool view{pool.data(), kept, blocks, block};
          const std::vector<std::int32_t> contexts{137, 0, 9, 65};
          const PagedContext paged{table.data(), blocks, contexts.data()};
          Tensor prefilled(dtype, length, out), q(dtype, sequences, shape.width()), decoded(dtype, sequences, out);
          paged_prefill_attention(ctx, qkv.matrix(), shape, view, paged, std::vector<std::int32_t>{0, 137}, scale,
                                  prefilled.matrix());
          for (std::int64_t s = 0; s < sequences; ++s)
            for (std::int64_t c = 0; c < shape.width(); ++c)
              q.set(s, c, qkv.at(std::max(contexts[static_cast<std::size_t>(s)], 1) - 1, c));
          paged_decode_attention(ctx, q.matrix(), shape, view, paged, sequences, scale, decoded.matrix());
          CHECK(error_of(decoded, [&](auto s, auto j) {
                  const std::int32_t context = contexts[static_cast<std::size_t>(s)];
                  return context == 0 ? 0.0 : prefilled.at(context - 1, j);
                }) == 0.0);
        }
}

TEST_CASE("kv_write skips slot -1, touches nothing else, and refuses slots outside the pool") {
  KernelContext ctx(2);
  const HeadShape shape{2, 2, 2};
  Random rng(32);
  const Tensor qkv = Tensor::random(DType::f32, 3, shape.width(), 0, rng);
  Tensor pool = Tensor::filled(DType::f32, 1, 2 * 2 * 2 * 4 * 2, 0, 9.0);  // 2 blocks × (k, v) × 2 heads × 4 tokens × 2
  const KvPool view{pool.data(), DType::f32, 2, 4};
  const std::int32_t slots[] = {5, -1, 2};
  kv_write(ctx, qkv.matrix(), slots, 3, shape, view);
  // Slot 5 = block 1, offset 1: first head's key at 1·2·2·4·2 + 1·2 = 34, the other's 4·2 = 8 later, values 2·8 later.
  // Slot 2: from 4.
  check_close(
      pool,
      [&](auto, auto i) {
        for (const auto& [token, at] : {std::pair{0, 34}, {2, 4}})
          for (int head = 0; head < 2; ++head)
            for (int j = 0; j < 2; ++j) {
              if (i == at + head * 8 + j) return qkv.at(token, 4 + head * 2 + j);
              if (i == at + 16 + head * 8 + j) return qkv.at(token, 8 + head * 2 + j);
            }
        return 9.0;
      },
      0.0);
  const std::int32_t bad[] = {8, 0, 0};
  CHECK_THROWS(kv_write(ctx, qkv.matrix(), bad, 3, shape, view));
  kv_write(ctx, qkv.matrix(), slots, 0, shape, view);
}
