// What plans, what simulates and what executes, asked of the code itself: a scenario that executes, with one setting
// after the other changed.
#pragma once
#include <string>
#include <vector>

namespace hotbunk {

struct CapabilityRow {
  std::string key, value;  // "train.engine", "megatron"
  bool plans = false, simulates = false, executes = false;
  std::string why{};  // not everything of it
};
std::vector<CapabilityRow> capabilities();

}  // namespace hotbunk
