#include "planner/rl/kv_pool.h"

#include <algorithm>
#include <cmath>

namespace hotbunk {

KvPool kv_pool(RolloutEngine engine, const PoolInputs& in) {
  const double free_at_init = in.device - in.context - in.leftovers;
  switch (engine) {
    case RolloutEngine::hotbunk:
      return {in.device * in.fraction - in.weights, 0.0};
    case RolloutEngine::sglang: {
      const double free_after_load = free_at_init - in.weights;
      return {free_after_load - free_at_init * (1.0 - in.fraction), 0.0};
    }
    case RolloutEngine::vllm: {
      const double requested = std::ceil(in.device * in.fraction);
      return {requested - in.weights - in.activations - in.context, std::max(0.0, requested - free_at_init)};
    }
  }
  return {};
}

}  // namespace hotbunk
