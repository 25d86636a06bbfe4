// What a scenario asks for that its system cannot do: one table (Capabilities, of the framework profile), which the
// search, levers, notes and lint look at.
#pragma once
#include <string>
#include <vector>

#include "planner/search/search.h"

namespace hotbunk {

/// One key of a scenario that the system's launches cannot say.
struct Lack {
  std::string key;   // "train.layout.cp"
  std::string what;  // "ring attention (cp 2)"
  friend bool operator==(const Lack&, const Lack&) = default;
};

/// Of the point, whose scenario gives what a point does not say. Empty: all of it can be launched.
std::vector<Lack> lacking(const Scenario&, const RlPoint&, const Capabilities&);

/// Whether the system lacks nothing of `p` but what it lacks of `own` already.
bool lacks_no_more(const Scenario&, const RlPoint& own, const RlPoint& p, const Capabilities&);

}  // namespace hotbunk
