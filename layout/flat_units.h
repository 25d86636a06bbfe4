// FSDP1's units: modules that have a flat parameter of their own, and how it is cut.
#pragma once
#include <cstdint>
#include <vector>

#include "layout/train_weights.h"
#include "spec/scenario.h"

namespace hotbunk {

/// The units of a model (spec/wrapping.h), each padded at its end and cut into `world` equal parts, whatever parameters
/// begin and end in one (into one: neither). The root comes first where there is one; parameters stand in the order of
/// train_units().
/// Source: PyTorch FSDP1 (FlatParamHandle), without the padding between parameters of use_orig_params.
std::vector<ShardedUnit> flat_units(const ModelSpec&, const WrapSpec&, std::int64_t world);

}  // namespace hotbunk
