// A loss or a gradient norm that is no finite number ends a run before the optimizer's step, and the op that made the
// first such number is named: the mini-batch is played once more, every output looked at. That is exact, since the
// step that was refused has changed nothing, and it costs a healthy run nothing.
#pragma once
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/diagnostic.h"
#include "graph/plan.h"

namespace hotbunk {

class Device;
class Driver;

/// Thrown by Driver::completed, on every rank alike: both numbers are sums over all ranks.
class Diverged : public RuntimeFailure {
 public:
  Diverged(std::int32_t step, std::int64_t mini, double loss, double grad_norm);
  std::int32_t step() const { return step_; }
  std::int64_t mini() const { return mini_; }

 private:
  std::int32_t step_;
  std::int64_t mini_;
};

/// Thrown by Driver::completed on a rank that cannot go on; execute() passes the diagnostics on.
class DriverFailure : public RuntimeFailure {
 public:
  explicit DriverFailure(Diagnostics problems) : RuntimeFailure(render(problems)), problems_(std::move(problems)) {}
  const Diagnostics& problems() const { return problems_; }

 private:
  Diagnostics problems_;
};

/// An op's output that holds NaN or infinity.
struct BadOutput {
  /// Of a block that Device::watch_numbers announced; before_all: the optimizer's state, which was so before them.
  static constexpr std::int64_t before_all = -1;
  std::int64_t block = 0;
  std::int64_t op = 0;  // the block's ops are counted in program order
  Rank rank = 0;
  OpKind kind = OpKind::alloc;
  std::string label;  // the op's
  std::string what;   // "3 NaN or infinite elements, the first at index 7 of 'train.x'"
  friend auto operator<=>(const BadOutput& a, const BadOutput& b) {
    return std::tuple(a.block, a.op, a.rank) <=> std::tuple(b.block, b.op, b.rank);
  }
  friend bool operator==(const BadOutput& a, const BadOutput& b) { return (a <=> b) == 0; }
};

/// Plays the mini-batch again and says E630. Every rank of the plan calls it, and all say the same.
Status explain_divergence(const Plan&, Device&, Driver&, std::int16_t phase, const Diverged&);

}  // namespace hotbunk
