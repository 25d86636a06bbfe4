// What ranks tell each other outside a plan: results, once it is done.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "runtime/world.h"

namespace hotbunk {

/// Every rank's bytes, by rank, on every rank. Collective; `name` is used once. Not part of any plan's traffic.
std::vector<std::string> gather_strings(World&, std::string_view name, const std::string& mine);
/// The same on rank 0 only; nothing on the others, which hold no more than a MiB of each at a time.
std::vector<std::string> gather_strings_at_first(World&, std::string_view name, const std::string& mine);

}  // namespace hotbunk
