// How many bytes of a device an engine gives to its KV cache when it starts: the rules of the engines, from what they
// would measure.
#pragma once
#include "spec/scenario.h"

namespace hotbunk {

/// What an engine finds on one rank's device, in bytes.
struct PoolInputs {
  double device = 0, fraction = 0.8;
  double context = 0;  // of its process, outside of the allocator: context, modules, communicators
  double weights = 0;
  double activations = 0;  // of one prefill step
  double leftovers = 0;    // of a colocated trainer that is awake
};

struct KvPool {
  double bytes = 0;    // may be negative: not even the weights fit
  double lacking = 0;  // free bytes that the start-up asks for and does not find
};

///   hotbunk  device * fraction - weights (lowering/lower.cc)
///   SGLang   free after load - free at init * (1 - fraction), that is free at init * fraction - weights
///   vLLM     ceil(device * fraction) - weights - activations - context; does not start with less than
///            ceil(device * fraction) free
/// SGLang measures what is free (the least over an engine's ranks) once its communicators stand, and again behind the
/// load; a trainer's leftovers are missing from both. vLLM profiles a step and counts what has been added since the
/// worker's own first look: leftovers take nothing from the pool, and only the check at the start-up sees them. Until
/// 0.10 (pull request 19312) they counted as non-torch memory; verl asks for 0.18 and later. Later ones (pull request
/// 25359) look when NCCL stands, so context and communicators take nothing either, and from 0.21 on they subtract an
/// estimate of the CUDA graphs (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS, gpu_worker.py), in practice 0.4 GiB and more:
/// without leftovers the two changes roughly make up for each other.
KvPool kv_pool(RolloutEngine, const PoolInputs&);

}  // namespace hotbunk
