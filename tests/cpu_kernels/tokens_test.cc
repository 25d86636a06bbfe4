// Embedding, rope, log-probs and the losses on them, sampling.
#include <map>

#include "backends/cpu_gloo/kernels/embedding.h"
#include "backends/cpu_gloo/kernels/loss.h"
#include "backends/cpu_gloo/kernels/rope.h"
#include "backends/cpu_gloo/kernels/sampling.h"
#include "tests/cpu_kernels/oracle.h"

using namespace hotbunk;
using namespace hotbunk::kernels;
using namespace hotbunk::kernels::test;

TEST_CASE("embedding looks up the rank's vocabulary range and scatters gradients back, threads alike") {
  Random rng(51);
  const std::int64_t h = 70, T = 400;
  const VocabRange range{10, 42};
  std::vector<std::int32_t> ids;
  for (std::int64_t t = 0; t < T; ++t) ids.push_back(static_cast<std::int32_t>(rng.below(60)));  // many twice or more
  for (DType dtype : kFloatTypes)
    for (DType out_type : kFloatTypes) {
      CAPTURE(name_of(dtype), name_of(out_type));
      KernelContext c1(1), c2(2);
      const Tensor table = Tensor::random(dtype, 32, h, h + 3, rng), dy = Tensor::random(dtype, T, h, h + 1, rng);
      Tensor out(out_type, T, h, h + 2);
      const auto inside = [&](std::int32_t id) { return id >= range.begin && id < range.end; };
      embedding_forward(c2, ids.data(), table.matrix(), range, out.matrix(), T, h);
      check_close(
          out, [&](auto t, auto j) { return inside(ids[t]) ? table.at(ids[t] - 10, j) : 0.0; }, 0.0);
      const Tensor d0 = Tensor::random(out_type, 32, h, 0, rng);
      Tensor one = d0, two = d0;
      embedding_backward(c1, ids.data(), dy.matrix(), range, one.matrix(), T, h);
      embedding_backward(c2, ids.data(), dy.matrix(), range, two.matrix(), T, h);
      CHECK(one.bytes() == two.bytes());
      check_close(
          two,
          [&](auto v, auto j) {
            double sum = d0.at(v, j);
            for (std::int64_t t = 0; t < T; ++t)
              if (ids[t] == v + 10) sum += dy.at(t, j);
            return sum;
          },
          kF32Tolerance);  // of bf16 beside one rounding, however many tokens are added
      embedding_forward(c2, ids.data(), table.matrix(), range, out.matrix(), 0, h);
      embedding_backward(c2, ids.data(), dy.matrix(), range, two.matrix(), 0, h);
    }
}

TEST_CASE("rope rotates dimension pairs (j, j + d/2) of q and k, or of their first numbers, and backward undoes it") {
  KernelContext ctx(2);
  Random rng(52);
  const HeadShape shape{3, 1, 20};
  for (DType dtype : kFloatTypes)
    for (const auto& [stride, turned] : {std::pair<std::int32_t, std::int64_t>{0, 0},
                                         {1, 0},     // fewer positions than tokens
                                         {1000, 0},  // more
                                         {1, 14},
                                         {1000, 4}}) {
      const std::int64_t T = 21, part = turned == 0 ? 20 : turned;
      CAPTURE(name_of(dtype), stride, turned);
      const std::vector<float> inv_freq = rope_inv_freq(part, 10000.0);
      std::vector<std::int32_t> positions;
      for (std::int32_t t = 0; t < T; ++t) positions.push_back(t % 7 * stride);
      const Tensor x = Tensor::random(dtype, T, shape.width(), shape.width() + 3, rng);
      Tensor y = x;
      rope(ctx, y.matrix(), positions.data(), inv_freq.data(), T, shape, RopeDirection::forward, 1.0f, turned);
      check_close(
          y,
          [&](auto t, auto c) {
            if (c >= shape.v_offset() || c % 20 >= part) return x.at(t, c);
            const std::int64_t base = c / 20 * 20, j = c % 20 % (part / 2);
            // The angle is formed in fp32, as the reference implementation does.
            const double angle = static_cast<float>(positions[t]) * inv_freq[j];
            const double lo = x.at(t, base + j), hi = x.at(t, base + j + part / 2);
            return c % 20 < part / 2 ? lo * std::cos(angle) - hi * std::sin(angle)
                                     : hi * std::cos(angle) + lo * std::sin(angle);
          },
          kF32Tolerance);
      rope(ctx, y.matrix(), positions.data(), inv_freq.data(), T, shape, RopeDirection::backward, 1.0f, turned);
      CHECK(error_of(y, [&](auto t, auto c) { return x.at(t, c); }) <= (dtype == DType::f32 ? 1e-6 : 4e-3));
      rope(ctx, y.matrix(), positions.data(), inv_freq.data(), 0, shape, RopeDirection::forward);
    }
}

TEST_CASE("rope frequencies: theta powers, and llama3 scaling of long wavelengths") {
  const auto plain = rope_inv_freq(64, 500000.0);
  CHECK(plain[0] == 1.0f);
  CHECK(plain[16] == Approx(1.0 / std::sqrt(500000.0)));
  const auto scaled = rope_inv_freq(64, 500000.0, Llama3RopeScaling{8.0, 1.0, 4.0, 8192.0});
  CHECK(scaled[0] == plain[0]);                  // wavelength 6.3 < 8192/4: kept
  CHECK(scaled[31] == Approx(plain[31] / 8.0));  // wavelength 2·10⁶ > 8192: divided
  // In between, by the formula: smooth = (8192/λ − 1)/3, f' = (1 − smooth)·f/8 + smooth·f.
  for (std::size_t j = 0; j < 32; ++j) {
    const double wavelength = 2 * M_PI * std::pow(500000.0, static_cast<double>(j) / 32);
    if (wavelength <= 2048 || wavelength >= 8192) continue;
    const double smooth = (8192 / wavelength - 1) / 3;
    CHECK(scaled[j] == Approx(plain[j] * ((1 - smooth) / 8 + smooth)));
  }
}

TEST_CASE("rope frequencies: linear divides all, yarn those that turn seldom") {
  const auto plain = rope_inv_freq(10, 100.0), linear = rope_inv_freq(10, 100.0, RampRopeScaling{4.0});
  for (std::size_t j = 0; j < 5; ++j) CHECK(linear[j] == Approx(plain[j] / 4.0));
  // Pair of r rotations in 32 positions: 10 ln(32 / 2πr) / (2 ln 100) is 0.26 for r = 4 and 1.77 for r = 1: from pair 0
  // on they begin to be divided, from pair 2 on they are.
  const RampRopeScaling yarn = yarn_rope_scaling(10, 100.0, 4.0, 32.0, 4.0, 1.0, true);
  CHECK(yarn.begin == 0.0);
  CHECK(yarn.end == 2.0);
  const auto scaled = rope_inv_freq(10, 100.0, yarn);
  for (const auto& [j, times] : {std::pair<std::size_t, double>{0, 1.0}, {1, 0.5 + 0.5 / 4}, {2, 0.25}, {4, 0.25}})
    CHECK(scaled[j] == Approx(plain[j] * times));
  const RampRopeScaling exact = yarn_rope_scaling(10, 100.0, 4.0, 32.0, 4.0, 1.0, false);
  CHECK(exact.begin == Approx(0.2622).epsilon(1e-3));
  CHECK(exact.end == Approx(1.7674).epsilon(1e-3));
  // Of 4 positions both ends are pair 0: no division by 0.
  const RampRopeScaling met = yarn_rope_scaling(10, 100.0, 4.0, 4.0, 4.0, 1.0, true);
  CHECK(met.begin == 0.0);
  CHECK(met.end == Approx(0.001));
}

TEST_CASE("rope's amplitude is of cosines and sines, and of the gradient") {
  KernelContext ctx(2);
  Random rng(58);
  const HeadShape shape{2, 1, 6};
  const std::vector<float> inv_freq = rope_inv_freq(6, 100.0);
  const std::vector<std::int32_t> positions{0, 3, 7};
  const Tensor x = Tensor::random(DType::f32, 3, shape.width(), shape.width(), rng);
  for (const RopeDirection direction : {RopeDirection::forward, RopeDirection::backward}) {
    Tensor once = x, more = x;
    rope(ctx, once.matrix(), positions.data(), inv_freq.data(), 3, shape, direction);
    rope(ctx, more.matrix(), positions.data(), inv_freq.data(), 3, shape, direction, 1.5f);
    check_close(
        more, [&](auto t, auto c) { return (c < shape.v_offset() ? 1.5 : 1.0) * once.at(t, c); }, kF32Tolerance);
  }
}

TEST_CASE("parts of a vocabulary add up to its log-probs, and their gradients are its columns") {
  KernelContext ctx(2);
  Random rng(59);
  for (std::int64_t vocab : {1, 16, 333, 9001})
    for (std::int64_t parts : {1, 2, 5}) {
      CAPTURE(vocab, parts);
      const std::int64_t T = 9, each = (vocab + parts - 1) / parts;
      const float temperature = 0.7f;
      const Tensor logits = Tensor::random(DType::f32, T, vocab, vocab, rng, 5.0);
      std::vector<std::int32_t> targets;
      for (std::int64_t t = 0; t < T; ++t) targets.push_back(t == 4 ? -1 : static_cast<std::int32_t>(rng.below(vocab)));
      Tensor logp(DType::f32, 1, T), lse(DType::f32, 1, T), entropy(DType::f32, 1, T);
      token_logprobs(ctx, {logits.f32(), vocab, vocab}, targets.data(), temperature, logp.f32(), lse.f32(),
                     entropy.f32(), T);
      const Tensor g = Tensor::random(DType::f32, 1, T, 0, rng);
      Tensor d(DType::f32, T, vocab, vocab);
      token_logprobs_backward(ctx, {logits.f32(), vocab, vocab}, targets.data(), temperature, lse.f32(), g.f32(),
                              d.matrix(), vocab, T);
      std::vector<VocabStats> stats(static_cast<std::size_t>(parts * T));
      for (std::int64_t p = 0; p < parts; ++p) {
        const std::int64_t begin = std::min(p * each, vocab), end = std::min(begin + each, vocab);
        const Logits part{logits.f32() + begin, vocab, end - begin, begin};
        vocab_stats(ctx, part, targets.data(), temperature, stats.data() + p * T, T);
        Tensor d_part(DType::f32, T, each, each);
        token_logprobs_backward(ctx, part, targets.data(), temperature, lse.f32(), g.f32(), d_part.matrix(), each, T);
        check_close(
            d_part, [&](auto t, auto j) { return begin + j < end ? d.at(t, begin + j) : 0.0; }, 1e-6);
      }
      Tensor merged_logp(DType::f32, 1, T), merged_lse(DType::f32, 1, T), merged_entropy(DType::f32, 1, T);
      merge_vocab_stats(ctx, stats.data(), parts, targets.data(), temperature, merged_logp.f32(), merged_lse.f32(),
                        merged_entropy.f32(), T);
      check_close(
          merged_logp, [&](auto, auto t) { return logp.at(0, t); }, 1e-6);
      check_close(
          merged_lse, [&](auto, auto t) { return lse.at(0, t); }, 1e-6);
      check_close(
          merged_entropy, [&](auto, auto t) { return entropy.at(0, t); }, 1e-5);
    }
}

TEST_CASE("token log-probs, entropy and their gradient") {
  KernelContext ctx(2);
  Random rng(53);
  for (std::int64_t vocab : {1, 16, 333, 9001})
    for (float temperature : {1.0f, 0.7f}) {
      CAPTURE(vocab, temperature);
      const std::int64_t T = 9, ld = vocab + 6;
      const Tensor logits = Tensor::random(DType::f32, T, vocab, ld, rng, 5.0);
      std::vector<std::int32_t> targets;
      for (std::int64_t t = 0; t < T; ++t) targets.push_back(t == 4 ? -1 : static_cast<std::int32_t>(rng.below(vocab)));
      Tensor logp(DType::f32, 1, T), lse(DType::f32, 1, T), entropy(DType::f32, 1, T);
      const Logits view{logits.f32(), ld, vocab};
      token_logprobs(ctx, view, targets.data(), temperature, logp.f32(), lse.f32(), entropy.f32(), T);
      const auto z = [&](std::int64_t t, std::int64_t j) { return logits.at(t, j) / temperature; };
      std::vector<double> naive_lse;
      for (std::int64_t t = 0; t < T; ++t) {
        double m = z(t, 0), sum = 0.0;
        for (std::int64_t j = 0; j < vocab; ++j) m = std::max(m, z(t, j));
        for (std::int64_t j = 0; j < vocab; ++j) sum += std::exp(z(t, j) - m);
        naive_lse.push_back(m + std::log(sum));
      }
      const auto lse_of = [&](std::int64_t t) { return naive_lse[static_cast<std::size_t>(t)]; };
      check_close(
          lse, [&](auto, auto t) { return t == 4 ? 0.0 : lse_of(t); }, 1e-6);
      check_close(
          logp, [&](auto, auto t) { return t == 4 ? 0.0 : z(t, targets[t]) - lse_of(t); }, 1e-6);
      check_close(
          entropy,
          [&](auto, auto t) {
            double h = 0.0;
            const double l = lse_of(t);
            for (std::int64_t j = 0; j < vocab; ++j) h -= std::exp(z(t, j) - l) * (z(t, j) - l);
            return t == 4 ? 0.0 : h;
          },
          1e-5);
      Tensor again(DType::f32, 1, T);  // without entropy: the same bits
      token_logprobs(ctx, view, targets.data(), temperature, again.f32(), lse.f32(), nullptr, T);
      CHECK(again.bytes() == logp.bytes());

      const Tensor g = Tensor::random(DType::f32, 1, T, 0, rng);
      for (DType out : kFloatTypes) {
        Tensor in_place = logits, d(out, T, vocab + 4, ld);
        const bool same = out == DType::f32;
        Tensor& target = same ? in_place : d;
        token_logprobs_backward(ctx, same ? Logits{in_place.f32(), ld, vocab} : view, targets.data(), temperature,
                                lse.f32(), g.f32(), target.matrix(), same ? vocab : vocab + 4, T);
        check_close(
            target,
            [&](auto t, auto j) {
              if (t == 4 || j >= vocab) return 0.0;
              return g.at(0, t) / temperature * ((j == targets[t] ? 1.0 : 0.0) - std::exp(z(t, j) - lse_of(t)));
            },
            kF32Tolerance);
      }
      token_logprobs(ctx, view, targets.data(), temperature, logp.f32(), lse.f32(), nullptr, 0);
    }
}

TEST_CASE("policy loss: gradient by finite differences, metrics by definition, masks, SFT") {
  KernelContext ctx(2);
  Random rng(54);
  const std::int64_t T = 200;
  Tensor now = Tensor::random(DType::f32, 1, T, 0, rng, 0.5), old(DType::f32, 1, T), ref(DType::f32, 1, T);
  const Tensor advantage = Tensor::random(DType::f32, 1, T, 0, rng), entropy = Tensor::random(DType::f32, 1, T, 0, rng);
  Tensor weight(DType::f32, 1, T);
  for (std::int64_t t = 0; t < T; ++t) {
    old.set(0, t, now.at(0, t) + 0.3 * rng.normal());
    ref.set(0, t, now.at(0, t) + 0.3 * rng.normal());
    weight.set(0, t, t % 5 == 0 ? 0.0 : 1.0 / 160);
  }
  now.set(0, 0, NAN);  // masked: must not be read into anything
  const PolicyLossConfig config{.clip_low = 0.2f, .clip_high = 0.28f, .kl_coef = 0.05f};
  struct Parts {
    double policy, k3;
    bool clipped;
  };
  const auto parts = [&](std::int64_t t, double x) {
    const double r = std::exp(x - old.at(0, t)), a = advantage.at(0, t), gap = ref.at(0, t) - x;
    const double low = 1 - static_cast<double>(config.clip_low), high = 1 + static_cast<double>(config.clip_high);
    const double bounded = -a * (r < low ? low : r > high ? high : r);
    return Parts{std::max(-a * r, bounded), std::exp(gap) - gap - 1, bounded > -a * r};
  };
  Tensor dlogp(DType::f32, 1, T), metrics = Tensor::filled(DType::f32, 1, kNumPolicyMetrics, 0, 0.25);
  const PolicyLossInputs in{now.f32(), old.f32(), ref.f32(), advantage.f32(), weight.f32(), entropy.f32()};
  policy_loss(ctx, in, config, dlogp.f32(), metrics.f32(), T);
  std::vector<double> want(kNumPolicyMetrics, 0.25);
  int clipped = 0;
  for (std::int64_t t = 0; t < T; ++t) {
    const double w = weight.at(0, t), x = now.at(0, t), h = 1e-6;
    if (w == 0.0) {
      CHECK(dlogp.at(0, t) == 0.0);
      continue;
    }
    const auto loss = [&](double at) { return w * (parts(t, at).policy + config.kl_coef * parts(t, at).k3); };
    CHECK(dlogp.at(0, t) == Approx((loss(x + h) - loss(x - h)) / (2 * h)).epsilon(1e-4).margin(1e-9));
    const Parts p = parts(t, x);
    clipped += p.clipped;
    want[kLoss] += loss(x);
    want[kPolicyLoss] += w * p.policy;
    want[kKlRef] += w * p.k3;
    want[kKlOld] += w * (old.at(0, t) - x);
    want[kClipped] += p.clipped;
    want[kTokens] += 1;
    want[kEntropy] += w * entropy.at(0, t);
    want[kSumAbsDiff] += std::abs(x - old.at(0, t));
    want[kMaxAbsDiff] = std::max(want[kMaxAbsDiff], std::abs(x - old.at(0, t)));
  }
  CHECK(clipped > 10);  // the case is exercised
  check_close(
      metrics, [&](auto, auto i) { return want[i]; }, 1e-7);

  // A NaN among the log-probs shows in the largest gap, wherever it stands and whatever comes after it.
  for (const std::int64_t at : {std::int64_t{1}, T - 1}) {
    const double kept = old.at(0, at);
    old.set(0, at, NAN);
    Tensor found = Tensor::filled(DType::f32, 1, kNumPolicyMetrics, 0, 0.0);
    policy_loss(ctx, in, config, dlogp.f32(), found.f32(), T);
    CHECK(std::isnan(found.at(0, kMaxAbsDiff)));
    old.set(0, at, kept);
    policy_loss(ctx, in, config, dlogp.f32(), found.f32(), T);  // a later micro-batch without one
    CHECK(std::isnan(found.at(0, kMaxAbsDiff)));
  }

  Tensor sft(DType::f32, 1, kNumPolicyMetrics);
  for (int i = 0; i < kNumPolicyMetrics; ++i) sft.set(0, i, 0.0);
  policy_loss(ctx, {.logp_new = now.f32(), .weight = weight.f32()}, config, dlogp.f32(), sft.f32(), T);
  double nll = 0.0;
  for (std::int64_t t = 0; t < T; ++t) {
    CHECK(dlogp.at(0, t) == -weight.at(0, t));
    if (weight.at(0, t) != 0.0) nll -= weight.at(0, t) * now.at(0, t);
  }
  CHECK(sft.at(0, kLoss) == Approx(nll));
  CHECK(sft.at(0, kSumAbsDiff) == 0.0);
  CHECK(sft.at(0, kMaxAbsDiff) == 0.0);
}

namespace {

std::pair<std::int32_t, float> sample_one(const std::vector<float>& logits, const SamplingParams& params, float u) {
  KernelContext ctx(1);
  std::int32_t token = -1;
  float logp = 0;
  const auto n = std::ssize(logits);
  sample_tokens(ctx, {logits.data(), 1, n, n}, params, &u, &token, &logp, 1);
  return {token, logp};
}

}  // namespace

TEST_CASE("sampling: greedy takes the lowest of equals; inverse transform hits every interval; truncation") {
  CHECK(sample_one({1, 3, 3, 2}, {.temperature = 0}, 0.9f).first == 1);
  // p ∝ 1, 2, 4, 1 → cumulative 1/8, 3/8, 7/8, 1.
  const std::vector<float> x{0.0f, std::log(2.0f), std::log(4.0f), 0.0f};
  for (const auto& [u, token] :
       {std::pair{0.0f, 0}, {0.12f, 0}, {0.13f, 1}, {0.37f, 1}, {0.38f, 2}, {0.87f, 2}, {0.88f, 3}, {0.9999999f, 3}})
    CHECK(sample_one(x, {}, u).first == token);
  CHECK(sample_one(x, {}, 0.5f).second == Approx(std::log(0.5)));
  // Temperature 1/2 squares the ratios: 1, 4, 16, 1 of 22.
  CHECK(sample_one(x, {.temperature = 0.5f}, 0.5f).second == Approx(std::log(16.0 / 22)));
  // top_k 2 keeps 2 (4/6) and 1 (2/6), in that order; the log-prob is still the untruncated one.
  CHECK(sample_one(x, {.top_k = 2}, 0.66f).first == 2);
  CHECK(sample_one(x, {.top_k = 2}, 0.67f).first == 1);
  CHECK(sample_one(x, {.top_k = 2}, 0.99f).second == Approx(std::log(2.0 / 8)));
  // top_p 0.7: 2 (0.5) then 1 (0.75 ≥ 0.7). top_p 0.8 also needs token 0, the lower index of the two at 1/8.
  CHECK(sample_one(x, {.top_p = 0.7f}, 0.99f).first == 1);
  CHECK(sample_one(x, {.top_p = 0.8f}, 0.99f).first == 0);
  CHECK(sample_one(x, {.top_p = 0.0f}, 0.99f).first == 2);
  const float inf = INFINITY;
  CHECK(sample_one({-inf, 0.0f, -inf}, {}, 0.0f).first == 1);
  CHECK(sample_one({-inf, 0.0f, -inf}, {}, 0.9999999f).first == 1);
}

TEST_CASE("greedy sampling takes the first of the largest, wherever they are in a row") {
  for (std::size_t at = 0; at < 600; ++at) {
    std::vector<float> x(600, 1.0f);
    x[at] = 2.0f;
    CHECK(sample_one(x, {.temperature = 0}, 0.0f).first == static_cast<std::int32_t>(at));
  }
  Random rng(57);
  for (int i = 0; i < 300; ++i) {
    const auto n = 1 + static_cast<std::size_t>(rng.uniform() * 1100);
    const int values = i % 3 == 0   ? 1
                       : i % 3 == 1 ? 3
                                    : 1000;  // with 1 all are equal, with 3 the largest is there often
    std::vector<float> x(n);
    for (float& v : x) v = static_cast<float>(std::floor(rng.uniform() * values)) - 2.0f;
    if (i % 4 == 0) std::fill_n(x.begin(), n / 2, -INFINITY);
    if (i % 5 == 0) std::fill_n(x.begin() + static_cast<std::ptrdiff_t>(n / 3), n / 3, -0.0f);  // equals +0
    CAPTURE(i, n, values);
    CHECK(sample_one(x, {.temperature = 0}, 0.0f).first == std::max_element(x.begin(), x.end()) - x.begin());
  }
}

TEST_CASE("sampling reads tensor-parallel blocks, never picks padding, and does not depend on the split or batch") {
  Random rng(55);
  const std::int64_t S = 5, V = 24, vocab = 21;
  const Tensor logits = Tensor::random(DType::f32, S, V, 0, rng, 2.0);
  Tensor padded = logits;
  for (std::int64_t s = 0; s < S; ++s)
    for (std::int64_t c = vocab; c < V; ++c) padded.set(s, c, 100.0);  // would win if it were looked at
  std::vector<float> u{0.01f, 0.3f, 0.5f, 0.8f, 0.999f};
  for (const SamplingParams& params : {SamplingParams{}, SamplingParams{.temperature = 0},
                                       SamplingParams{.temperature = 0.8f, .top_k = 5, .top_p = 0.9f}}) {
    std::vector<std::vector<std::int32_t>> tokens;
    std::vector<std::vector<float>> logps;
    for (std::int64_t blocks : {1, 2, 3, 4}) {
      const std::int64_t width = V / blocks;
      std::vector<float> split;
      for (std::int64_t b = 0; b < blocks; ++b)
        for (std::int64_t s = 0; s < S; ++s)
          for (std::int64_t c = 0; c < width; ++c) split.push_back(static_cast<float>(padded.at(s, b * width + c)));
      KernelContext ctx(static_cast<int>(1 + blocks % 2));
      tokens.emplace_back(S);
      logps.emplace_back(S);
      sample_tokens(ctx, {split.data(), blocks, width, vocab}, params, u.data(), tokens.back().data(),
                    logps.back().data(), S);
    }
    for (std::size_t i = 1; i < tokens.size(); ++i) {
      CHECK(tokens[i] == tokens[0]);
      CHECK(logps[i] == logps[0]);
    }
    // The log-prob is what training computes for the same token, to the bit.
    KernelContext ctx(1);
    std::vector<float> logp(S), lse(S);
    const float temperature = params.temperature == 0 ? 1.0f : params.temperature;
    token_logprobs(ctx, {padded.f32(), V, vocab}, tokens[0].data(), temperature, logp.data(), lse.data(), nullptr, S);
    CHECK(logp == logps[0]);
  }
  KernelContext ctx(2);
  sample_tokens(ctx, {padded.f32(), 1, V, vocab}, {}, nullptr, nullptr, nullptr, 0);
}

TEST_CASE("sampled frequencies follow the softmax") {
  const std::vector<float> x{0.0f, 1.0f, -1.0f, 2.0f, 0.5f};
  double z = 0;
  for (float v : x) z += std::exp(v);
  std::map<std::int32_t, int> counts;
  Random rng(56);
  const int n = 20000;
  for (int i = 0; i < n; ++i) ++counts[sample_one(x, {}, static_cast<float>(rng.uniform())).first];
  for (std::int32_t j = 0; j < 5; ++j) {
    const double p = std::exp(x[j]) / z;
    CHECK(std::abs(counts[j] - n * p) < 4 * std::sqrt(n * p * (1 - p)));  // 4 sigma
  }
}
