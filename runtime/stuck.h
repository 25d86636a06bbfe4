// The end of a process whose other threads may never return: not through main, and not through what they hold.
#pragma once
#include <string>

namespace hotbunk {

/// Called before such an end, with why, by a thread that watches the others: what it would wait for may never come.
using StuckEnd = void (*)(const std::string& why);
/// From here on; nullptr: nothing is done.
void on_stuck_end(StuckEnd);

/// Says "hotbunk: " and why on stderr, does what on_stuck_end() has left, and ends the process with exit code 3.
[[noreturn]] void end_stuck(const std::string& why);

}  // namespace hotbunk
