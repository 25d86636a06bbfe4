// Which GPU of its node a rollout engine starts on.
#pragma once
#include <algorithm>
#include <cstdint>

namespace hotbunk {

/// Where rollout engine `engine` starts: its first GPU's number on its node.
///   colocated: (engine * g) mod gpus_per_node, with g = min(gpus_per_engine, gpus_per_node);
///   disaggregated: the same after the `actor_gpus` that training occupies.
constexpr std::int64_t engine_base_gpu(std::int64_t engine, std::int64_t gpus_per_engine, std::int64_t gpus_per_node,
                                       std::int64_t actor_gpus = 0) {
  return (actor_gpus + engine * std::min(gpus_per_engine, gpus_per_node)) % gpus_per_node;
}

}  // namespace hotbunk
