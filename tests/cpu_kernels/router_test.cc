// Routers: choices, weights, what they add to the loss, and derivatives, against the same in double.
#include <numeric>
#include <span>

#include "backends/cpu_gloo/kernels/experts.h"
#include "tests/cpu_kernels/drawn_routing.h"

using namespace hotbunk;
using namespace hotbunk::kernels;
using namespace hotbunk::kernels::test;

namespace {

/// The weight of choice j, from other logits than those that chose.
double weight_of(const DrawnRouting& d, std::int64_t t, std::int64_t j, const std::vector<double>& logits) {
  double sum = 0;
  for (std::int64_t e = 0; e < d.r.experts; ++e) {
    bool counts = !d.r.renormalise;
    for (std::int64_t i = 0; i < d.r.choices; ++i) counts |= d.choice(t, i) == e;
    if (counts) sum += std::exp(logits[static_cast<std::size_t>(e)]);
  }
  return std::exp(logits[static_cast<std::size_t>(d.choice(t, j))]) / sum;
}

/// route_backward beside central differences of the weights by their definition, of drawn gradients.
template <class Weight>
void check_gradient(KernelContext& ctx, const Routing& routing, const DrawnRouting& d, Random& rng, Weight weight) {
  std::vector<float> d_weights(d.weights.size());
  for (float& x : d_weights) x = static_cast<float>(rng.normal());
  Tensor d_logits(DType::f32, routing.tokens, routing.experts);
  route_backward(ctx, routing, d_weights.data(), d.logits.data(), d.chosen.data(), d_logits.matrix());
  check_close(
      d_logits,
      [&](auto t, auto e) {
        const double h = 1e-5;
        double sum = 0;
        for (std::int64_t j = 0; j < routing.choices; ++j) {
          const auto at = [&](double shift) {
            std::vector<double> logits;
            for (std::int64_t i = 0; i < routing.experts; ++i) logits.push_back(d.logit(t, i) + (i == e ? shift : 0));
            return weight(d, t, j, logits);
          };
          sum += d_weights[static_cast<std::size_t>(t * routing.choices + j)] * (at(h) - at(-h)) / (2 * h);
        }
        return sum;
      },
      kF32Tolerance);
}

}  // namespace

TEST_CASE("route takes the largest logits, of equal ones the lower number, and weighs by a softmax") {
  KernelContext ctx(2);
  Random rng(71);
  for (const Routing& routing : routings()) {
    CAPTURE(routing.tokens, routing.experts, routing.choices, routing.renormalise);
    const DrawnRouting d(ctx, routing, rng);
    for (std::int64_t t = 0; t < routing.tokens; ++t) {
      std::vector<double> logits;
      for (std::int64_t e = 0; e < routing.experts; ++e) logits.push_back(d.logit(t, e));
      std::vector<std::int64_t> best(logits.size());
      std::iota(best.begin(), best.end(), 0);
      std::ranges::stable_sort(best, std::greater{},
                               [&](std::int64_t e) { return logits[static_cast<std::size_t>(e)]; });
      double sum = 0;
      for (std::int64_t j = 0; j < routing.choices; ++j) {
        CHECK(d.choice(t, j) == best[static_cast<std::size_t>(j)]);
        const double weight = d.weights[static_cast<std::size_t>(t * routing.choices + j)];
        CHECK(weight == Approx(weight_of(d, t, j, logits)).epsilon(1e-6));
        sum += weight;
      }
      if (routing.renormalise) CHECK(sum == Approx(1.0).epsilon(1e-6));
    }
  }
  const std::vector<float> equal = {1.0f, 3.0f, 3.0f, 3.0f, std::nanf("")};
  std::vector<float> weights(3);
  Index chosen(3);
  route(ctx, {1, 5, 3, true}, equal.data(), weights.data(), chosen.data());
  CHECK(chosen == Index{1, 2, 3});
}

namespace {

/// DeepSeek's weights by their definition, of the experts that were chosen.
double deepseek_weight(const DrawnRouting& d, std::int64_t t, std::int64_t j, const std::vector<double>& logits) {
  if (!d.r.sigmoid) return d.r.factor * weight_of(d, t, j, logits);
  const auto score = [&](std::int64_t i) {
    return 1.0 / (1.0 + std::exp(-logits[static_cast<std::size_t>(d.choice(t, i))]));
  };
  double sum = 0.0;
  for (std::int64_t i = 0; i < d.r.choices; ++i) sum += score(i);
  return d.r.factor * score(j) / (d.r.renormalise ? sum : 1.0);
}

}  // namespace

TEST_CASE("DeepSeek's routers choose within the best groups, weigh without the bias, and differentiate") {
  KernelContext ctx(2);
  Random rng(73);
  std::vector<float> bias(12);
  for (float& b : bias) b = static_cast<float>(0.4 * rng.normal());
  const ConstVector biased{bias.data(), DType::f32};
  const std::vector<Routing> all = {{40, 12, 3, false, false, 4, 2, 1.5f},
                                    {40, 12, 3, true, true, 4, 2, 2.5f, biased},
                                    {40, 12, 4, false, true, 3, 1, 1.0f, biased},
                                    {40, 12, 2, true, true, 1, 1, 2.0f, biased}};
  for (const Routing& routing : all) {
    CAPTURE(routing.sigmoid, routing.groups, routing.taken);
    const DrawnRouting d(ctx, routing, rng);
    const std::int64_t each = routing.experts / routing.groups;
    bool bias_mattered = false;
    for (std::int64_t t = 0; t < routing.tokens; ++t) {
      std::vector<double> logits, score;
      for (std::int64_t e = 0; e < routing.experts; ++e) {
        logits.push_back(d.logit(t, e));
        const double s = routing.sigmoid ? 1.0 / (1.0 + std::exp(-logits.back())) : logits.back();
        score.push_back(s + (routing.bias.data != nullptr ? bias[static_cast<std::size_t>(e)] : 0.0));
      }
      // How good each group is: its best, or its two best ones.
      std::vector<std::pair<double, std::int64_t>> groups;
      for (std::int64_t g = 0; g < routing.groups; ++g) {
        std::vector<double> of(score.begin() + g * each, score.begin() + (g + 1) * each);
        std::ranges::sort(of, std::greater{});
        groups.emplace_back(of[0] + (routing.bias.data != nullptr ? of[1] : 0.0), g);
      }
      std::ranges::sort(groups, std::greater{});
      std::vector<std::pair<double, std::int64_t>> open;
      for (std::int64_t g = 0; g < routing.taken; ++g)
        for (std::int64_t e = 0; e < each; ++e) {
          const std::int64_t expert = groups[static_cast<std::size_t>(g)].second * each + e;
          open.emplace_back(score[static_cast<std::size_t>(expert)], expert);
        }
      std::ranges::sort(open, std::greater{});
      for (std::int64_t j = 0; j < routing.choices; ++j) {
        CHECK(d.choice(t, j) == open[static_cast<std::size_t>(j)].second);
        const double weight = d.weights[static_cast<std::size_t>(t * routing.choices + j)];
        CHECK(weight == Approx(deepseek_weight(d, t, j, logits)).epsilon(1e-6));
        if (j > 0) bias_mattered |= d.logit(t, d.choice(t, j)) > d.logit(t, d.choice(t, j - 1));
      }
    }
    CHECK(bias_mattered == (routing.bias.data != nullptr));

    check_gradient(ctx, routing, d, rng, deepseek_weight);
  }
}

namespace {

/// Of a token's logits, by the definition.
double router_loss_of(const RouterLoss& r, const std::vector<double>& logits, std::span<const float> counts) {
  std::vector<double> score;
  double sum = 0.0, exps = 0.0, length = 0.0, balance = 0.0;
  for (const double x : logits) {
    score.push_back(r.sigmoid ? 1.0 / (1.0 + std::exp(-x)) : std::exp(x));
    sum += score.back(), exps += std::exp(x);
  }
  for (std::size_t e = 0; e < score.size(); ++e) {
    balance += static_cast<double>(r.experts) * counts[e] * score[e] / sum;
    length += counts[e] / static_cast<double>(r.choices);
  }
  return r.balance * balance + r.z * length * std::log(exps) * std::log(exps);
}

}  // namespace

TEST_CASE("what a router adds to the loss is of each sequence's counts, and its gradient the derivative") {
  KernelContext ctx(2);
  Random rng(75);
  constexpr std::int64_t T = 9, E = 5, C = 2, S = 3;
  const Index sequences = {0, 0, 0, 1, 1, 1, 1, -1, 2};
  for (const bool sigmoid : {false, true}) {
    const DrawnRouting d(ctx, {T, E, C, true, sigmoid}, rng);
    std::vector<float> counts(S * E, 7.0f), weights(T), expected(S * E, 0.0f);
    for (std::size_t i = 0; i < d.chosen.size(); ++i)
      if (const std::int32_t s = sequences[i / C]; s >= 0) ++expected[static_cast<std::size_t>(s * E + d.chosen[i])];
    expert_counts(d.chosen, sequences, C, E, counts);
    CHECK(counts == expected);
    for (float& w : weights) w = static_cast<float>(0.1 + std::abs(rng.normal()));
    const RouterLoss loss{T, E, C, 0.7, 0.3, sigmoid, 2};
    Tensor d_logits = Tensor::filled(DType::f32, T, E, 0, 1.5);
    const double found =
        router_loss(ctx, loss, d.logits.data(), counts.data(), sequences.data(), weights.data(), d_logits.matrix());
    const auto of_token = [&](std::int64_t t, std::int64_t e, double shift) {
      const std::int32_t s = sequences[static_cast<std::size_t>(t)];
      if (s < 0) return 0.0;
      std::vector<double> logits;
      for (std::int64_t i = 0; i < E; ++i) logits.push_back(d.logit(t, i) + (i == e ? shift : 0));
      return weights[static_cast<std::size_t>(t)] *
             router_loss_of(loss, logits, std::span(counts).subspan(static_cast<std::size_t>(s * E), E));
    };
    double all = 0.0;
    for (std::int64_t t = 0; t < T; ++t) all += of_token(t, 0, 0.0);
    CHECK(found == Approx(all).epsilon(1e-9));
    // Two ranks find the same, so each adds a half.
    constexpr double h = 1e-5;
    check_close(
        d_logits, [&](auto t, auto e) { return 1.5 + (of_token(t, e, h) - of_token(t, e, -h)) / (4 * h); },
        kF32Tolerance);
  }
}

TEST_CASE("route's backward is the derivative of its weights") {
  KernelContext ctx(2);
  Random rng(72);
  for (const Routing& routing : routings()) {
    CAPTURE(routing.tokens, routing.experts, routing.choices, routing.renormalise);
    const DrawnRouting d(ctx, routing, rng);
    check_gradient(ctx, routing, d, rng, weight_of);
  }
}
