// FSDP1's wrap policies: which modules of a model are units, each with a flat parameter of its own.
#pragma once
#include <string>
#include <vector>

#include "spec/scenario.h"

namespace hotbunk {

/// Modules that may become units: what stands outside of the layers, the layers, and what stands directly in one
/// (attention, MLP, norms); in the model's order. What is further inside does not: q, k and v are multiplied as one
/// matrix, gate and up are, and all experts. Lists of modules (model.layers) have no forward and are none.
std::vector<std::string> wrappable_modules(const ModelSpec&);

/// A module with a flat parameter: "root" has what no other has. `layer`: in or of which it stands; -1: of none.
struct WrappedModule {
  std::string name;
  int layer = -1;
};
/// That of each of parameters_of(model), in their order.
///   layer   every decoder layer
///   size    from the inside out, each module that has as many parameters beside those of units inside it
///   names   each module whose name a pattern matches
/// Source: PyTorch 2 (torch/distributed/fsdp/wrap.py: _recursive_wrap, size_based_auto_wrap_policy,
/// transformer_auto_wrap_policy, lambda_auto_wrap_policy).
std::vector<WrappedModule> wrapped_modules(const ModelSpec&, const WrapSpec&);

/// The patterns of a policy by names.
std::vector<std::string> patterns_of(const WrapSpec&);
/// Whether the whole name matches; * is any text, dots too, and ? one character, as Python's fnmatch has it.
bool matches(const std::string& pattern, const std::string& module);

}  // namespace hotbunk
