// Which steps of a long run have rows of their own in a trace. Totals are kept over all steps beside them, so that a
// trace has the same size after three hundred steps and after three million.
#pragma once
#include <cstdint>

namespace hotbunk {

/// A pure function of the steps so far, so that every rank, a simulation and a measurement keep the same ones.
struct KeptSteps {
  static constexpr std::int32_t most = 256;  // of those that are kept at even distances
  std::int32_t head = 0;                     // steps from 1 on that are kept whatever comes: those with operations

  /// The distance of those in between: 1 up to `most` steps, then the smallest power of two that leaves at most so
  /// many. Doubling it drops every other step and asks for none that is gone.
  static std::int32_t distance(std::int32_t latest) {
    std::int32_t stride = 1;
    while (latest / stride > most) stride *= 2;
    return stride;
  }
  /// Whether `step` has rows when `latest` is the last one entered: the prologue, the first, every distance-th, and the
  /// last two (of a finished run the last iteration and the epilogue behind it).
  bool keeps(std::int32_t step, std::int32_t latest) const {
    return step <= 1 || step <= head || step + 1 >= latest || step % distance(latest) == 0;
  }
};

}  // namespace hotbunk
