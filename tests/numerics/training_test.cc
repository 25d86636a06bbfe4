// P3: what one rank computes agrees with Hugging Face transformers, and every way of computing it agrees as well.
#include <catch2/catch.hpp>

#include "tests/numerics/training_run.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

// The bounds that P3 states. The goldens' own rounding (golden.json: floors) lies 5 to 20 times below each.
constexpr double logit_bound = 1e-5, gradient_bound = 1e-4, update_bound = 1e-3;
// Sums of squares and means over at most 70 tokens in another order: some ulps of fp32 (6e-8 each), times what five
// optimizer steps make of them.
constexpr double scalar_bound = 2e-5;

void check_training(const Golden& g, const TrainingResult& r) {
  REQUIRE(r.losses.size() == g.losses.size() + 1);
  for (std::size_t i = 0; i < g.losses.size(); ++i) {
    CAPTURE(i);
    CHECK(r.losses[i] == Approx(g.losses[i]).epsilon(scalar_bound));
    CHECK(r.grad_norms[i] == Approx(g.grad_norms[i]).epsilon(scalar_bound));
  }
  CHECK(r.losses.back() == Approx(g.final_loss).epsilon(scalar_bound));
  for (const auto& [name, value] : r.after5) {
    CAPTURE(name);
    CHECK(update_error(value, g.tensor("after5." + name), g.initial(name)) <= update_bound);
  }
}

void check_gradients(const Golden& g, const TrainingResult& r) {
  for (const ParamSpec& p : parameters_of(g.model)) {
    CAPTURE(p.name);
    CHECK(relative_error(r.probes.at("grad." + p.name), g.tensor("grad." + p.name)) <= gradient_bound);
  }
}

/// Log-probs are differences of logits and their log-sum: their error is the logits', whose size is the measure.
void check_forward(const Golden& g, const TrainingResult& r) {
  CHECK(relative_error(r.probes.at("logits"), g.tensor("logits")) <= logit_bound);
  CHECK(relative_error(r.probes.at("logps"), g.tensor("logprobs")) <= logit_bound);
}

}  // namespace

TEST_CASE("logits, log-probs, loss, gradients and five AdamW steps agree with transformers") {
  for (const std::string& name : golden_models()) {
    CAPTURE(name);
    const Golden g = Golden::load(name);
    const TrainingResult r = train(g, golden_scenario(g, 1));
    CHECK(r.losses.at(0) == Approx(g.loss).epsilon(1e-6));
    check_forward(g, r);
    check_gradients(g, r);
    check_training(g, r);
  }
}
