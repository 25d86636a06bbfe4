#include "planner/train/schedule_time.h"

#include <algorithm>

namespace hotbunk {
namespace {

/// A stage's clock: what it computes is in order, and a pass and a message wait for each other.
struct StageClock {
  double computed = 0, passed = 0, exchanged = 0;
  void pass(double seconds) { passed = computed = std::max(computed, exchanged) + seconds; }
  void exchange(StageClock& other) {
    exchanged = other.exchanged = std::max({passed, other.passed, exchanged, other.exchanged});
  }
};

/// Rows behind which the slowest stage sets the pace, for each stage.
constexpr std::int64_t settled = 16;

}  // namespace

std::vector<double> stages_through(const Pipeline& p, std::span<const StagePasses> of_stages,
                                   std::int64_t micro_batches, double last_share) {
  const std::int64_t played = std::min(micro_batches, settled * p.stages), fills = std::min(p.warm_up(0), played);
  const bool defers = p.defers_weights();
  const auto share = [&](std::int64_t pass) { return pass == played - 1 ? last_share : 1.0; };
  std::vector<StageClock> clocks(of_stages.size());
  const auto clock = [&](std::int64_t stage) -> StageClock& { return clocks[static_cast<std::size_t>(stage)]; };
  const auto passes = [&](std::int64_t stage) { return of_stages[static_cast<std::size_t>(stage)]; };
  for (std::int64_t k = 0; k < fills; ++k)
    for (std::int64_t stage = 0; stage < p.stages && k < p.warm_up(stage); ++stage) {
      clock(stage).pass(share(k) * passes(stage).forward);
      clock(stage).exchange(clock(stage + 1));
    }
  for (std::int64_t i = 0; i < played; ++i)
    for (std::int64_t stage = p.stages - 1; stage >= 0; --stage) {
      const std::int64_t ahead = i + p.warm_up(stage), late = defers ? i - stage : -1;
      const StagePasses& own = passes(stage);
      if (ahead < played) clock(stage).pass(share(ahead) * own.forward);
      if (stage + 1 < p.stages) clock(stage).exchange(clock(stage + 1));
      clock(stage).pass(share(i) * (own.backward + (defers ? 0.0 : own.weight_grad)));
      if (late >= 0) clock(stage).computed += share(late) * own.weight_grad;
    }
  std::vector<double> out;
  double slowest = 0.0;
  for (const StagePasses& own : of_stages) slowest = std::max(slowest, own.forward + own.backward + own.weight_grad);
  for (std::int64_t stage = 0; stage < p.stages; ++stage) {
    double left = 0.0;  // weight gradients behind the last backward pass
    for (std::int64_t i = std::max<std::int64_t>(0, played - stage); defers && i < played; ++i) left += share(i);
    out.push_back(clock(stage).computed + left * passes(stage).weight_grad +
                  static_cast<double>(micro_batches - played) * slowest);
  }
  return out;
}

}  // namespace hotbunk
