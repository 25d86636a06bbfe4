// In which format an engine holds the weights of its layers' products, and what narrow ones cost beside the products.
#pragma once
#include <cstdint>
#include <string>

#include "spec/scenario.h"

namespace hotbunk {

/// Norms, biases, router, embedding and head stay in the engine's element type, so do the cache and what ranks
/// exchange. docs/planner-prices.md, "Narrow rollout weights", has the sources.
struct WeightFormat {
  std::string products = "bf16";  // whose peak the layers' products have
  double stored_bytes = 2;        // of a weight, with its part of the scales
  double operand_bytes = 2;       // of an activation as a product reads it, scales with it
  double scales = 0;              // tensors of scales beside a weight, which travel in an update
  std::int64_t block = 1;         // columns of one scale, of which a rank's slice must be a multiple
  bool narrow = false;
};

/// Of the scenario's rollout.dtype:
///   fp8    e4m3, an fp32 scale per 128 x 128 of a weight and per 1 x 128 of an activation (verl, slime, NeMo-RL)
///   mxfp8  e4m3, an e8m0 scale per 32
///   nvfp4  e2m1, an e4m3 scale per 16 and one more per tensor
WeightFormat weight_format_of(const RolloutSpec&);

}  // namespace hotbunk
