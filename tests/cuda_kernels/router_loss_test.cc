// What routers add to the loss, and its gradient, against its definition in fp64.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>

#include "tests/cuda_kernels/kernel_device.h"

using namespace hotbunk;
using namespace hotbunk::ptx;

namespace {

struct Router {
  int experts, choices, sigmoid, sharers;
};
constexpr double balance_factor = 0.7, z_factor = 0.3;

/// Of a token's logits, with its sequence's counts.
double loss_of(const Router& r, const std::vector<double>& logits, const float* counts) {
  double scores = 0, exps = 0, choices = 0, counted = 0;
  for (std::size_t e = 0; e < logits.size(); ++e) {
    const double score = r.sigmoid != 0 ? 1.0 / (1.0 + std::exp(-logits[e])) : std::exp(logits[e]);
    scores += score, exps += std::exp(logits[e]), choices += counts[e], counted += counts[e] * score;
  }
  return balance_factor * counted / scores + z_factor * choices / r.choices * std::log(exps) * std::log(exps);
}

}  // namespace

TEMPLATE_TEST_CASE("routers' losses are of each sequence's counts, and gradients their derivatives",
                   "[kernels][experts]", float, Bf16) {
  using E = TestType;
  const std::string name = suffix<E>;
  Device d("router_loss");
  // Fewer experts than a warp has lanes, and more.
  for (const Router& r : {Router{5, 2, 0, 1}, {40, 4, 1, 2}, {70, 3, 0, 2}}) {
    INFO(r.experts << " experts" << (r.sigmoid != 0 ? ", sigmoid" : ""));
    Draw draw(static_cast<std::uint64_t>(r.experts));
    constexpr int S = 3;
    const std::vector<std::int32_t> of = {0, 0, 2, 2, -1, 2, 0};  // the second sequence has no token here
    const int T = static_cast<int>(of.size()), n = T * r.choices;
    const auto all = static_cast<std::size_t>(T * r.experts);
    std::vector<std::int32_t> choice;
    for (int i = 0; i < n; ++i) choice.push_back(draw.between(0, r.experts - 1));
    std::vector<float> counted(static_cast<std::size_t>(S * r.experts));
    for (int i = 0; i < n; ++i)
      if (const std::int32_t s = of[static_cast<std::size_t>(i / r.choices)]; s >= 0)
        ++counted[static_cast<std::size_t>(s * r.experts + choice[static_cast<std::size_t>(i)])];
    Array<std::int32_t> chosen(d.memory, "experts", choice), sequences(d.memory, "sequences", of);
    Array<float> counts(d.memory, "counts", std::vector<float>(counted.size())),
        logits(d.memory, "logits", draw.numbers<float>(all, 3.0)),
        weights(d.memory, "weights", std::vector<float>{0.25f, 0.5f, 1.5f, 0.0f, 2.0f, 0.125f, 1.0f}),
        metrics(d.memory, "metrics", std::vector<float>{1.0f, 2.0f, 3.0f, 4.0f});
    Array<E> gradient(d.memory, "dlogits", draw.numbers<E>(all));
    Array<double> losses(d.memory, "losses", of.size());
    d.run("expert_counts", {static_cast<std::uint32_t>((n + 31) / 32)}, 32, chosen.begin(), sequences.begin(),
          counts.begin(), n, r.choices, r.experts);
    CHECK(counts.values() == counted);
    const std::vector<E> before = gradient.values();
    d.run("router_loss_" + name, {3}, 96, gradient.begin(), logits.begin(), counts.begin(), sequences.begin(),
          weights.begin(), losses.begin(), T, balance_factor, z_factor, r.experts, r.choices, r.sigmoid, r.sharers);
    d.run("router_loss_sum", {1}, 64, losses.begin(), metrics.begin(), T, 0, 2);
    double sum = 0;
    for (int t = 0; t < T; ++t) {
      const std::int32_t s = of[static_cast<std::size_t>(t)];
      const auto loss = [&](int expert, double by) {
        if (s < 0) return 0.0;
        std::vector<double> x;
        for (int e = 0; e < r.experts; ++e)
          x.push_back(logits[static_cast<std::size_t>(t * r.experts + e)] + (e == expert ? by : 0.0));
        return weights[static_cast<std::size_t>(t)] * loss_of(r, x, counted.data() + s * r.experts);
      };
      sum += loss(0, 0.0);
      for (int e = 0; e < r.experts; ++e) {
        const auto at = static_cast<std::size_t>(t * r.experts + e);
        // Of a token that adds nothing, the gradient is what it was, to the bit.
        if (s < 0 || weights[static_cast<std::size_t>(t)] == 0.0f) {
          CHECK(gradient[at] == before[at]);
          continue;
        }
        const double was = value(before[at]), slope = was + (loss(e, 1e-5) - loss(e, -1e-5)) / 2e-5 / r.sharers;
        INFO("token " << t << ", expert " << e << ": " << value(gradient[at]) << ", not " << slope);
        REQUIRE(std::abs(value(gradient[at]) - slope) <= unit<E> * std::abs(slope) + 1e-6);
      }
    }
    near(metrics.values(), {1.0 + sum, 2.0, 3.0 + sum, 4.0}, 1e-6, 0.0);
  }
}
