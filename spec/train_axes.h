// The dimensions of a training layout as axes of ranks, in the layout's order.
#pragma once
#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "spec/scenario.h"

namespace hotbunk {

/// The axes of layout.order, fastest first, with "ulysses" behind "cp" where it leaves it out: {"tp", "cp", "ulysses",
/// "ep", "dp", "pp"}. Of an order that the loader let pass.
inline std::vector<std::string> axes_in_order(const TrainLayout& l) {
  const bool has_ulysses = l.order.find("ulysses") != std::string::npos;
  std::istringstream in(l.order);
  std::vector<std::string> out;
  for (std::string axis; std::getline(in, axis, '-');) {
    out.push_back(axis);
    if (axis == "cp" && !has_ulysses) out.emplace_back("ulysses");
  }
  return out;
}

/// Ranks along an axis of the dense mesh; of "ep", which lies over the others' ranks (spec/expert_mesh.h), 1.
inline std::int64_t ranks_of(const TrainLayout& l, std::string_view axis) {
  return axis == "tp"        ? l.tp
         : axis == "cp"      ? l.cp
         : axis == "ulysses" ? l.ulysses
         : axis == "dp"      ? l.dp
         : axis == "pp"      ? l.pp
                             : 1;
}

/// Whether an axis's ranks have tokens of their own, as layout.shard_over may name it: "dp", "cp" or "ulysses".
inline bool is_data_axis(std::string_view axis) { return axis == "dp" || axis == "cp" || axis == "ulysses"; }

}  // namespace hotbunk
