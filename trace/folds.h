// What every step adds to a trace, folded while a run goes on: totals over all steps, rows of the kept ones
// (trace/kept_steps.h). Memory does not grow with the number of steps.
#pragma once
#include <cstdint>
#include <map>
#include <vector>

#include "trace/kept_steps.h"
#include "trace/trace.h"

namespace hotbunk {

/// One rank's stays in phases, in the order in which they end.
class StayFold {
 public:
  StayFold(const Plan&, Rank, KeptSteps);

  void add(const PhaseSpan&);
  /// The rows of a step; of the latest two they are always there.
  const std::vector<PhaseSpan>& rows(std::int32_t step) const;
  /// Appends phases and totals. The slowest iteration has rows too.
  void write(Trace&) const;

 private:
  using Rows = std::vector<PhaseSpan>;
  void close_iteration();

  const Plan& plan_;
  const Rank rank_;
  const KeptSteps kept_;
  std::map<std::int32_t, Rows> steps_;
  Rows slowest_;
  std::int64_t slowest_ns_ = -1;
  std::int32_t latest_ = 0;
  std::int64_t begin_ns_ = -1, end_ns_ = 0;  // of the latest step's iteration so far; -1: it has none
  std::vector<PhaseTotal> totals_;           // by phase; last: the iteration
};

/// One rank's traffic.
class TrafficFold {
 public:
  explicit TrafficFold(KeptSteps kept) : kept_(kept) {}

  void add(const TrafficKey&, const TrafficCount&);
  const RankTraffic& rows() const { return rows_; }
  const RankTraffic& totals() const { return totals_; }

 private:
  const KeptSteps kept_;
  std::int32_t latest_ = 0;
  RankTraffic rows_, totals_;
};

/// Learning curves: figures of all steps in rows that a picture cannot tell from all of them. The kept steps have whole
/// rows; of the others, cut into at most KeptSteps::most pieces of equal length, each figure's lowest and highest value
/// stay at their steps (the first where several are equal; NaN counts as the highest), so that no spike is lost.
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

/// Totals of a trace whose rows are all there, for traces made by hand.
void total_up(const Plan&, Trace&);

}  // namespace hotbunk
