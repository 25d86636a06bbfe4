// What P3 holds a training run to beside a golden of transformers, PEFT or torch, with its bounds.
#pragma once
#include "tests/numerics/training_run.h"

namespace hotbunk::test {

// The bounds that P3 states. The goldens' own rounding (golden.json: floors) lies 5 to 20 times below each.
constexpr double logit_bound = 1e-5, gradient_bound = 1e-4, update_bound = 1e-3;
// Sums of squares and means over at most 70 tokens in another order: some ulps of fp32 (6e-8 each), times what five
// optimizer steps make of them. The first loss, before any step, is held to what P3 says.
constexpr double scalar_bound = 2e-5, loss_bound = 1e-5;

/// Logits and log-probs of one rank. Log-probs are differences of logits and their log-sum: their error is the logits',
/// whose size is the measure.
void check_forward(const Golden&, const TrainingResult&);

/// Loss and gradient norm of every step, and the loss after the last.
void check_steps(const Golden&, const TrainingResult&);

/// Every parameter's gradient in the first step; a frozen one has none.
void check_gradients(const Golden&, const TrainingResult&);

/// Weights after five steps, as far as transformers moved them; what no optimizer steps is what it was, to the bit.
void check_after(const Golden&, const TrainingResult&);

/// Gradients, steps and weights.
void check_training(const Golden&, const TrainingResult&);

}  // namespace hotbunk::test
