// Which ranks train.layout.shard_over puts into a shard group.
#pragma once
#include <cstdint>
#include <string>

#include "spec/train_axes.h"

namespace hotbunk {

/// shard_over as a scenario has it: "[cp, dp]".
inline std::string listed_shard_over(const std::string& shard_over) {
  std::string out = "[";
  for (const char c : shard_over) out += c == '-' ? std::string(", ") : std::string(1, c);
  return out + "]";
}

/// Whether a shard group is of ranks that follow one another among the data ranks: no dimension of several ranks that
/// layout.shard_over leaves out is faster in the order than one whose ranks a group (of `fsdp` ranks) has several of.
/// Of an order that the loader let pass.
inline bool shard_groups_follow(const TrainLayout& l) {
  bool left_out = false;
  std::int64_t named = 1;  // ranks of the faster dimensions that it names: several whole groups, or a part of one
  for (const std::string& axis : axes_in_order(l)) {
    const std::int64_t size = is_data_axis(axis) ? ranks_of(l, axis) : 1;
    if (size == 1) continue;
    if (!l.shards_over(axis)) {
      left_out = true;
      continue;
    }
    if (left_out && named % l.shard_ranks() != 0) return false;
    named *= size;
  }
  return true;
}

/// Whether two layouts of the same dimensions put the same ranks into a shard group, as far as names say it.
inline bool same_shard_group(const TrainLayout& a, const TrainLayout& b) {
  if (a.shard_ranks() != b.shard_ranks()) return false;
  if (a.shard_ranks() == a.dp * a.cp * a.ulysses) return true;
  for (const std::string& axis : axes_in_order(a))
    if (is_data_axis(axis) && ranks_of(a, axis) > 1 && a.shards_over(axis) != b.shards_over(axis)) return false;
  return true;
}

}  // namespace hotbunk
