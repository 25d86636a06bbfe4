// What routers add to the loss in training, beside the weights that they give.
#pragma once
#include "spec/scenario.h"

namespace hotbunk {

/// Coefficients of a mean over the layers that have experts, and in each of a mean over sequences by their part of the
/// loss (docs/experts.md).
struct RouterLosses {
  double balance = 0.0, z = 0.0;
  bool any() const { return balance > 0.0 || z > 0.0; }
};

/// The scenario's coefficients, or else what the model's config asks for.
inline RouterLosses router_losses(const Scenario& s) {
  if (!s.model.moe) return {};
  const TrainSpec& t = s.train;
  return {t.router_aux_loss_coef > 0.0 ? t.router_aux_loss_coef : s.model.moe->balance_loss, t.router_z_loss_coef};
}

}  // namespace hotbunk
