// What a length distribution means for an engine: exec/lengths.h draws from it, the closed form takes its moments.
#pragma once
#include <array>

#include "spec/scenario.h"

namespace hotbunk {

/// E[L^2] in tokens^2. A cut at `max` never makes it more than mean * max, since L^2 <= L * max.
double mean_square(const LengthSpec&);
/// The longest of `n` draws: the quantile n / (n + 1), from the mean to `max`.
double longest_of(const LengthSpec&, double n);
/// P(L > x).
double longer_than(const LengthSpec&, double x);

/// How an engine of `slots` works off `sequences` lengths, in decode steps. Every slot is full until the last one is
/// admitted: renewal theory says that each slot has then ended sequences / slots - 1 of them, which takes
/// (1 - cv^2) / 2 of a mean longer than as many means (lengths without spread end in waves instead). `all`: the mean of
/// the step when the last of `engines` such engines is done.
struct DrainSteps {
  double full = 0, all = 0;
  std::array<double, 4> running{};  // sequences in each quarter of the time from `full` to `all`, relative
};
DrainSteps drain_steps(const LengthSpec&, double sequences, double slots, double engines);

}  // namespace hotbunk
