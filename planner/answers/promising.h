// Which training layouts of a lowered scenario's search are worth a plan of each: lowering all takes seconds, estimates
// milliseconds.
#pragma once
#include <vector>

#include "planner/answers/answers.h"
#include "planner/search/search.h"

namespace hotbunk {

struct Promising {
  /// Ways to cut training: the scenario's, data parallelism alone and, of those that execute, the best by estimate:
  /// first of each of the best kinds the best, for an estimate errs alike about all degrees of a kind, then the best of
  /// the others. Empty, which stands for all, where no estimate fits.
  std::vector<TrainCut> cuts;
  /// Their points: the scenario's own and, of each way to cut training and share its state, those that estimates
  /// promise. Empty, which stands for all, where estimates say too little of it: for the least memory, and where some
  /// parameters do not train, of which train.frozen has no estimate.
  std::vector<TrainPoint> points;
};

/// By estimate of training alone: what is beside it, rollout and sync, differs little between its layouts.
Promising promising_training(const ScenarioPricer&, const RlPoint& own, TrainSpace, const SearchOptions&);

}  // namespace hotbunk
