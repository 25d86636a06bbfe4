// Which ranks train.layout.shard_over puts into a shard group.
#pragma once
#include <sstream>
#include <string>

#include "spec/scenario.h"

namespace hotbunk {

/// Whether a shard group is of ranks that follow one another among the data ranks: no dimension of several ranks that
/// layout.shard_over leaves out is faster in the order than one that it names. Of an order that the loader let pass.
inline bool shard_groups_follow(const TrainLayout& l) {
  std::string order = l.order;
  if (order.find("ulysses") == std::string::npos) order.insert(order.find("cp") + 2, "-ulysses");
  std::istringstream in(order);
  bool left_out = false;
  for (std::string axis; std::getline(in, axis, '-');) {
    const std::int64_t size = axis == "dp" ? l.dp : axis == "cp" ? l.cp : axis == "ulysses" ? l.ulysses : 1;
    if (size == 1) continue;
    if (left_out && l.shards_over(axis)) return false;
    left_out |= !l.shards_over(axis);
  }
  return true;
}

}  // namespace hotbunk
