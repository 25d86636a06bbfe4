#include "tests/numerics/golden_checks.h"

#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "base/rounding.h"
#include "spec/stored_parameter.h"

namespace hotbunk::test {

void check_forward(const Golden& g, const TrainingResult& r) {
  CHECK(relative_error(r.probes.at("logits"), g.tensor("logits")) <= logit_bound);
  CHECK(relative_error(r.probes.at("logps"), g.tensor("logprobs")) <= logit_bound);
}

void check_steps(const Golden& g, const TrainingResult& r) {
  REQUIRE(r.losses.size() == g.losses.size() + 1);
  for (std::size_t i = 0; i < g.losses.size(); ++i) {
    CAPTURE(i);
    CHECK(r.losses[i] == Approx(g.losses[i]).epsilon(i == 0 ? loss_bound : scalar_bound));
    CHECK(r.grad_norms[i] == Approx(g.grad_norms[i]).epsilon(scalar_bound));
  }
  CHECK(r.losses.back() == Approx(g.final_loss).epsilon(scalar_bound));
}

void check_gradients(const Golden& g, const TrainingResult& r) {
  for (const ParamSpec& p : parameters_of(g.model)) {
    const std::string name = "grad." + stored(g.model, p).tensor;
    CAPTURE(p.name, name);
    if (p.frozen) CHECK_FALSE(r.probes.contains(name));
    else if (p.role == ParamRole::router_bias)
      CHECK(r.probes.at(name) == std::vector<float>(static_cast<std::size_t>(p.numel()), 0.0f));
    else CHECK(relative_error(r.probes.at(name), g.tensor(name)) <= gradient_bound);
  }
}

void check_after(const Golden& g, const TrainingResult& r) {
  for (const ParamSpec& p : parameters_of(g.model)) {
    const std::string name = stored(g.model, p).tensor;
    CAPTURE(name, p.frozen);
    const std::vector<float>& value = r.after5.at(name);
    if (p.frozen || p.role == ParamRole::router_bias) CHECK(value == g.initial(name));
    else CHECK(update_error(value, g.tensor("after5." + name), g.initial(name)) <= update_bound);
  }
}

void check_training(const Golden& g, const TrainingResult& r) {
  check_steps(g, r);
  check_gradients(g, r);
  check_after(g, r);
}

}  // namespace hotbunk::test
