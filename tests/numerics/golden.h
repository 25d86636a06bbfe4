// The goldens of tests/golden (see its README): what transformers computed for a tiny model, read back.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "rl/passes.h"
#include "spec/safetensors.h"
#include "spec/scenario.h"

namespace hotbunk::test {

// What there is in tests/golden, by name.

/// Every set of adapters that has goldens.
const std::vector<std::string>& golden_adapters();

/// Every model with parameters that do not train that has goldens.
const std::vector<std::string>& golden_frozen();

/// Every model whose routers add to the loss that has goldens.
const std::vector<std::string>& golden_router_losses();

/// Every model that has goldens.
const std::vector<std::string>& golden_models();

struct Golden {
  std::string folder;
  ModelSpec model;
  std::vector<TokenSequence> sequences;  // the first token of each is its prompt
  OptimizerSpec optimizer;
  double loss = 0, final_loss = 0;                             // before the first and after the last step
  std::vector<double> losses, grad_norms;                      // of each step
  std::vector<std::vector<std::int32_t>> prompts, new_tokens;  // greedy
  double bf16_floor = 0;                                       // floors.logits_bf16; 0: none
  double bf16_gradient_floor = 0;                              // floors.grads_bf16; 0: none
  double router_aux = 0, router_z = 0;                         // coefficients of what routers add to the loss

  /// Of a folder of adapters: the model has them (scripts/make_lora_goldens.py), and initial() is theirs.
  static Golden load(const std::string& name);
  std::int64_t num_tokens() const;
  std::int64_t longest_sequence() const;  // tokens
  /// A tensor of golden.safetensors, or an initial parameter.
  std::vector<float> tensor(const std::string& name) const;
  std::vector<float> initial(const std::string& parameter) const;

 private:
  std::vector<Checkpoint> files_;  // golden.safetensors, model.safetensors
};

/// max |a - b| / max |b|; infinite when the sizes differ or anything is not finite.
double relative_error(const std::vector<float>& a, const std::vector<float>& b);
/// |(a - from) - (b - from)| / |b - from| in Euclidean norms.
double update_error(const std::vector<float>& a, const std::vector<float>& b, const std::vector<float>& from);

}  // namespace hotbunk::test
