// What the tables of GPT training share: counted FLOPs, columns, and the settings that a source leaves open.
#pragma once
#include <string>

#include "planner/validate/validate_tables.h"

namespace hotbunk {

/// FLOPs of one GPT iteration as Megatron's papers count them: attention over the whole square, `passes` of 24 B s l h²
/// (3: forward and backward; 4: with full recomputation).
double megatron_flops(const ModelSpec&, double sequences, double s, double passes);

/// The fastest of the settings that a source leaves open: micro-batches of 1 to 16 sequences, and for pipelines the
/// number of interleaved chunks, up to 8.
struct Choice {
  TrainPoint point;
  TrainPrice price;
  std::string why;  // none was found
};
Choice fastest(const CellReader&, const TrainModel&, TrainPoint, std::int64_t sequences_per_replica, double capacity,
               bool any_micro_batch, bool any_interleave);

/// The columns of a GPT's architecture, of one name in all tables but vTrain's.
struct GptColumns {
  std::string layers = "layers", hidden = "hidden", heads = "heads", sequence = "seq";
};
ModelSpec gpt_of(CellReader&, const GptColumns&, std::int64_t vocab);

/// bf16 or fp16 parameters, fp32 gradients, master copy and moments.
TrainSetting mixed_precision(std::int64_t sequence);

}  // namespace hotbunk
