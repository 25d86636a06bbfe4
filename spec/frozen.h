// Parameters that do not train (ModelSpec::frozen), and what of a layer is frozen together or not at all.
#pragma once
#include <bitset>
#include <string>
#include <vector>

#include "spec/model.h"

namespace hotbunk {

/// By the number of a role: whether a layer's parameters of it do not train.
using FrozenRoles = std::bitset<num_param_roles>;
/// Layer by layer, behind those of no layer; empty: all train.
std::vector<FrozenRoles> frozen_roles(const ModelSpec&);

/// The patterns of ModelSpec::frozen: * is any text, dots too, and ? one character.
std::vector<std::string> frozen_patterns(const ModelSpec&);
bool is_frozen(const std::vector<std::string>& patterns, const std::string& parameter);

/// Of parameters that one product or one norm takes, some that train and some that do not: the first such pair's names;
/// two empty ones: there is none. What of a layer's experts lies together is one such group.
std::pair<std::string, std::string> split_group(const ModelSpec&);

}  // namespace hotbunk
