// Which training layouts of a lowered scenario's search are worth a plan of each: lowering all takes seconds, estimates
// milliseconds.
#pragma once
#include <vector>

#include "planner/answers/answers.h"
#include "planner/search/search.h"

namespace hotbunk {

/// Ways to cut training of which plans are lowered: the scenario's, data parallelism alone and, of those that execute,
/// the best by estimate: first of each of the best kinds the best, for an estimate errs alike about all degrees of a
/// kind, then the best of the others. All where no estimate fits.
std::vector<TrainCut> promising_cuts(const ScenarioPricer&, const RlPoint& own, const RlSpace&, SearchOptions);

/// The training points of the space of which plans are lowered: the scenario's own and, of each way to cut training and
/// share its state, those that estimates promise.
std::vector<TrainPoint> promising_points(const ScenarioPricer&, const RlPoint& own, TrainSpace, const SearchOptions&);

}  // namespace hotbunk
