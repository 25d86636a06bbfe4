#include "planner/train/schedule_time.h"

#include <algorithm>

namespace hotbunk {
namespace {

/// A stage's clock: what it computes is in order, and a pass and a message wait for each other.
struct StageClock {
  double computed = 0, passed = 0, exchanged = 0;
  void pass(double seconds, double beside) {
    passed = std::max(computed, exchanged) + std::max(0.0, seconds - beside);
    computed = passed + std::min(seconds, beside);
  }
  void exchange(StageClock& other, double message) {
    exchanged = other.exchanged = std::max({passed, other.passed, exchanged, other.exchanged}) + message;
  }
};

/// Rows behind which the slowest stage sets the pace, for each stage.
constexpr std::int64_t settled = 16;

/// The row of blocks, of whole rows of micro-batches.
class PlayedRow {
 public:
  PlayedRow(const Pipeline& p, std::span<const StagePasses> of_stages, std::int64_t micro_batches, double last_share,
            double message)
      : p_(p),
        of_stages_(of_stages),
        micro_batches_(micro_batches),
        passes_(micro_batches * p.chunks),
        last_share_(last_share),
        message_(message),
        clocks_(of_stages.size()) {}

  /// Seconds of a micro-batch in the steady state, of many.
  double pace() const { return pace_; }

  std::vector<double> play() {
    const std::int64_t fills = std::min(p_.warm_up(0), passes_);
    for (std::int64_t k = 0; k < fills; ++k)
      for (std::int64_t s = 0; s < p_.stages && k <= p_.warm_up(s); ++s) {
        forward(s, k, 0.0);
        if (k < p_.warm_up(s)) meet_next(s);
      }
    const std::int64_t from = passes_ / 4, to = from + passes_ / 2;
    for (std::int64_t i = 0; i < passes_; ++i) {
      for (std::int64_t s = p_.stages - 1; s >= 0; --s) turn(s, i, fills);
      if (i == from) pace_ = -clock(0).computed;
      if (i == to)
        pace_ = (pace_ + clock(0).computed) * static_cast<double>(p_.chunks) / static_cast<double>(to - from);
    }
    std::vector<double> out;
    for (std::int64_t s = 0; s < p_.stages; ++s) {
      double left = 0.0;  // weight gradients behind the last backward pass
      for (std::int64_t i = std::max<std::int64_t>(0, passes_ - s); p_.defers_weights() && i < passes_; ++i)
        left += share(i);
      out.push_back(clock(s).computed + left * of(s).weight_grad);
    }
    return out;
  }

 private:
  StageClock& clock(std::int64_t stage) { return clocks_[static_cast<std::size_t>(stage)]; }
  const StagePasses& of(std::int64_t stage) const { return of_stages_[static_cast<std::size_t>(stage)]; }
  /// A pass's part of a full micro-batch; interleaved, as many micro-batches as stages take turns.
  double share(std::int64_t pass) const {
    const std::int64_t micro = p_.chunks == 1 ? pass : pass / (p_.stages * p_.chunks) * p_.stages + pass % p_.stages;
    return (micro == micro_batches_ - 1 ? last_share_ : 1.0) / static_cast<double>(p_.chunks);
  }
  void meet_next(std::int64_t stage) {
    if (stage + 1 < p_.stages) clock(stage).exchange(clock(stage + 1), message_);
  }
  void forward(std::int64_t stage, std::int64_t pass, double beside) {
    if (pass < passes_) clock(stage).pass(share(pass) * of(stage).forward, beside);
  }
  /// The stage's i-th backward pass, in front of it the next forward one.
  void turn(std::int64_t stage, std::int64_t i, std::int64_t fills) {
    const std::int64_t own = p_.warm_up(stage), late = p_.defers_weights() ? i - stage : -1;
    const bool early = i == 0 && own < fills;  // it came with a fill
    if (!early) forward(stage, i + own, of(stage).beside);
    meet_next(stage);
    const StagePasses& passes = of(stage);
    clock(stage).pass(share(i) * (passes.backward + (p_.defers_weights() ? 0.0 : passes.weight_grad)), passes.beside);
    if (late >= 0) clock(stage).computed += share(late) * passes.weight_grad;
  }

  const Pipeline& p_;
  std::span<const StagePasses> of_stages_;
  std::int64_t micro_batches_, passes_;
  double last_share_, message_, pace_ = 0.0;
  std::vector<StageClock> clocks_;
};

}  // namespace

std::vector<double> stages_through(const Pipeline& p, std::span<const StagePasses> of_stages,
                                   std::int64_t micro_batches, double last_share, double message) {
  const std::int64_t played = std::min(micro_batches, settled * p.stages);
  PlayedRow row(p, of_stages, played, last_share, message);
  std::vector<double> out = row.play();
  if (micro_batches > played)  // a steady state, which a single pass has not
    for (double& seconds : out) seconds += static_cast<double>(micro_batches - played) * row.pace();
  return out;
}

}  // namespace hotbunk
