// What every step adds to a trace, folded while a run goes on: totals over all steps, rows of the kept ones
// (trace/kept_steps.h). Memory does not grow with the number of steps.
#pragma once
#include <cstdint>
#include <map>
#include <vector>

#include "trace/kept_steps.h"
#include "trace/trace.h"

namespace hotbunk {

/// One rank's stays in phases, in the order in which they end. A rank whose role plays phases some steps back
/// (graph/plan.h: Player) may be as many iterations ahead of what it still adds to an earlier one.
class StayFold {
 public:
  StayFold(const Plan&, Rank, KeptSteps);

  void add(const PhaseSpan&);
  /// The rows of a step; of the latest two that are complete they are always there.
  const std::vector<PhaseSpan>& rows(std::int32_t step) const;
  /// Appends phases and totals. The slowest iteration has rows too.
  void write(Trace&) const;

 private:
  using Rows = std::vector<PhaseSpan>;
  /// Of iterations before `step`, all is said.
  void close_before(std::int32_t step);

  const Plan& plan_;
  const std::int32_t ahead_;
  const KeptSteps kept_;
  std::map<std::int32_t, Rows> steps_;
  Rows slowest_;
  std::int64_t slowest_ns_ = -1;
  std::int32_t latest_ = 0;
  struct Open {
    std::int64_t begin_ns, end_ns;
  };
  std::map<std::int32_t, Open> open_;  // iterations that may go on
  std::vector<PhaseTotal> totals_;     // by phase; last: the iteration
};

/// One rank's traffic.
class TrafficFold {
 public:
  /// `ahead`: by how many iterations the rank's latest may be ahead of what it still adds to (StayFold).
  explicit TrafficFold(KeptSteps kept, std::int32_t ahead = 0) : kept_(kept), ahead_(ahead) {}

  void add(const TrafficKey&, const TrafficCount&);
  const RankTraffic& rows() const { return rows_; }
  const RankTraffic& totals() const { return totals_; }

 private:
  const KeptSteps kept_;
  const std::int32_t ahead_;
  std::int32_t latest_ = 0;
  RankTraffic rows_, totals_;
};

/// Learning curves: figures of all steps in rows that a picture cannot tell from all of them. The kept steps have whole
/// rows; of the others, cut into at most KeptSteps::of_few_ranks pieces of equal length, each figure's lowest and
/// highest value stay at their steps (the first where several are equal; NaN counts as the highest), so that no spike
/// is lost.
class MetricFold {
 public:
  /// Steps in ascending order.
  void add(const StepMetrics&);
  /// By step; whole rows and rows of some figures.
  std::vector<StepMetrics> rows() const;

 private:
  struct Point {
    std::int32_t step = 0;
    double value = 0.0;
  };
  struct Extremes {
    Point lowest, highest;
    void add(const Point&);
  };
  using Piece = std::map<std::string, Extremes>;

  const KeptSteps kept_{};
  std::int32_t latest_ = 0, piece_steps_ = 1;
  std::map<std::int32_t, StepMetrics> whole_;
  std::map<std::int32_t, Piece> pieces_;  // by step / piece_steps_
};

/// Rows of a slowest iteration that is another one on other ranks: what is left is there for all ranks.
void drop_partial_steps(Trace&);

/// From rows of the ranks that were played (Trace::players) to rows of all ranks, which do what those do.
void stand_in(Trace&);

/// Totals of a trace whose rows are all there, for traces made by hand.
void total_up(const Plan&, Trace&);

}  // namespace hotbunk
