// Which steps of a long run have rows of their own in a trace. Totals are kept over all steps beside them, so that a
// trace has the same size after three hundred steps and after three million.
#pragma once
#include <algorithm>
#include <cstdint>

namespace hotbunk {

/// A pure function of the steps so far and of how many ranks have rows, so that every rank keeps the same ones, and a
/// measurement those of a simulation that plays every rank.
struct KeptSteps {
  static constexpr std::int32_t of_few_ranks = 256;
  std::int32_t head = 0;             // steps from 1 on that are kept whatever comes: those with operations
  std::int32_t most = of_few_ranks;  // of those that are kept at even distances

  /// A rank's stays, traffic and their pictures take some 2.5 kB a step: of all ranks about 10 MB.
  static KeptSteps of(std::int64_t ranks, std::int32_t head = 0) {
    constexpr std::int64_t rank_steps = 4096, least = 4;
    return {head, static_cast<std::int32_t>(
                      std::clamp<std::int64_t>(rank_steps / std::max<std::int64_t>(1, ranks), least, of_few_ranks))};
  }
  /// The distance of those in between: 1 up to `most` steps, then the smallest power of two that leaves at most so
  /// many. Doubling it drops every other step and asks for none that is gone.
  std::int32_t distance(std::int32_t latest) const {
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
