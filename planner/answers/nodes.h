// How the trees of `explain` are put together.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "planner/answers/answers.h"

namespace hotbunk {

/// A node whose children are those of `parts` that are not empty.
inline CostNode node_of(std::string name, std::string why, double bytes, double seconds, std::vector<CostNode> parts) {
  CostNode out{std::move(name), std::move(why), bytes, seconds, {}};
  for (CostNode& p : parts)
    if (p.bytes > 0.0 || p.seconds > 0.0) out.children.push_back(std::move(p));
  return out;
}
inline CostNode bytes_of(std::string name, double bytes, std::string why = {}) {
  return {std::move(name), std::move(why), bytes, 0, {}};
}
inline CostNode seconds_of(std::string name, double seconds, std::string why = {}) {
  return {std::move(name), std::move(why), 0, seconds, {}};
}

}  // namespace hotbunk
