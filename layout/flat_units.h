// FSDP1's units: modules that have a flat parameter of their own, and how it is cut.
#pragma once
#include <cstdint>
#include <vector>

#include "layout/train_weights.h"
#include "spec/scenario.h"

namespace hotbunk {

/// The units of a pipeline stage (spec/wrapping.h) of what a tensor-parallel rank has of it, each padded at its end and
/// cut into `world` equal parts, whatever parameters begin and end in one (into one: neither). The root comes first
/// where there is one; parameters stand in the order of train_units(), whose bounds on the ranks these are.
/// Which modules are wrapped does not depend on the stages: it is said of the whole model. In a part of it no unit
/// spans what other stages may have: what of a layer would be in a unit of no layer is that layer's own unit, and a
/// table that the first and the last stage both have is one, "embedding", which both cut alike. Experts that lie apart
/// (ExpertMesh::lies_apart) are flat parameters of their own, NAME.experts beside NAME, cut over the ranks that have
/// the same ones. Source: PyTorch FSDP1 (FlatParamHandle), without the padding between parameters of use_orig_params;
/// over the data ranks of a 2-D mesh what tensor parallelism has left, and experts by a process group of their own.
std::vector<ShardedUnit> flat_units(const ModelSpec&, const WrapSpec&, const StagePart&, std::int64_t tp,
                                    std::int64_t world, const ExpertMesh&);
/// Of a model that nothing else cuts.
std::vector<ShardedUnit> flat_units(const ModelSpec&, const WrapSpec&, std::int64_t world);

}  // namespace hotbunk
