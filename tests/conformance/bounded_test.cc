// The tolerances of the oracle: what fp32 comes to is within them, whatever the order, and they are no wider than that
// by much.
#include "tests/conformance/bounded.h"

#include <catch2/catch.hpp>
#include <random>
#include <vector>

namespace hotbunk::conformance {
namespace {

bool close(double x, Bounded b) { return std::abs(x - b.value) <= b.error; }

}  // namespace

TEST_CASE("sums of products in fp32, in any order, lie within their bound; a term more or less does not") {
  std::mt19937 random(7);
  std::uniform_real_distribution<float> drawn(-1.0f, 1.0f);
  for (const int n : {1, 2, 40, 300}) {
    std::vector<float> a, b;
    Sum sum;
    for (int i = 0; i < n; ++i) a.push_back(drawn(random)), b.push_back(drawn(random));
    for (std::size_t i = 0; i < a.size(); ++i) sum += Bounded(a[i]) * b[i];
    for (int order = 0; order < 20; ++order) {
      float found = 0.0f;
      std::vector<std::size_t> places(a.size());
      for (std::size_t i = 0; i < places.size(); ++i) places[i] = i;
      std::ranges::shuffle(places, random);
      for (const std::size_t i : places) found += a[i] * b[i];
      CHECK(close(found, sum));
      for (const std::size_t i : places)
        if (const float term = a[i] * b[i]; std::abs(term) > 0.01f) CHECK(!close(found - term, sum));
    }
    // Terms that are exact: only additions round.
    Sum whole;
    float found = 0.0f;
    for (const float x : a) whole += 1.5f + x / 2, found += 1.5f + x / 2;
    CHECK(close(found, whole));
    CHECK(!close(found - 1.0f, whole));
    CHECK(Bounded(sum).error > 0.0);
    CHECK(Bounded(sum).error < 1e-6 * n * n);
  }
}

TEST_CASE("functions of fp32 numbers lie within their bounds") {
  for (float x = -8.0f; x < 8.0f; x += 0.0371f) {
    CAPTURE(x);
    const float e = std::exp(x);
    CHECK(close(e, exp(Bounded(x))));
    CHECK(close(std::log(e), log(Bounded(e))));
    CHECK(close(std::tanh(x), tanh(Bounded(x))));
    CHECK(close(1.0f / (1.0f + std::exp(-x)), sigmoid(Bounded(x))));
    CHECK(close(std::sqrt(e), sqrt(Bounded(e))));
    CHECK(close(x / (e + 1.0f), Bounded(x) / (Bounded(e) + 1.0)));
    CHECK(close(std::exp(std::sqrt(e) * 0.3f), exp(sqrt(Bounded(e)) * constant(0.3f))));
    CHECK(!close(e * (1 + 1e-4f), exp(Bounded(x))));
    CHECK(!close(std::tanh(x) + 1e-5, tanh(Bounded(x))));
  }
}

TEST_CASE("rounding to bf16 is allowed once, where it is said") {
  for (float x = 0.25f; x < 4.0f; x += 0.0137f) {
    const double once = to_f32(to_bf16(x));
    CHECK(close(once, rounded(x, DType::bf16)));
    CHECK(!close(x * (1 + 0x1p-7), rounded(x, DType::bf16)));
    if (once != static_cast<double>(x)) CHECK(!close(once, rounded(x, DType::f32)));
  }
  CHECK(!close(0.0, Bounded()));  // what was never set is close to nothing
}

}  // namespace hotbunk::conformance
