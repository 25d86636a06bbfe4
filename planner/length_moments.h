// What a length distribution means for an engine: exec/lengths.h draws from it, the closed form takes its moments.
#pragma once
#include "spec/scenario.h"

namespace hotbunk {

/// E[L^2] in tokens^2. A cut at `max` never makes it more than mean * max, since L^2 <= L * max.
double mean_square(const LengthSpec&);
/// The longest of `n` draws: the quantile n / (n + 1), from the mean to `max`.
double longest_of(const LengthSpec&, double n);

}  // namespace hotbunk
