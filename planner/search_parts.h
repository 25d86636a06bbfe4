// What the joint search pairs: the training points and the rollouts of one placement, each priced once.
#pragma once
#include <vector>

#include "planner/search.h"

namespace hotbunk {

struct Trained {
  TrainPoint point;
  TrainSide side;
  double seconds = 0;  // of training and its log-prob passes, a reference brought up included
};
struct Rolled {
  RolloutPoint point;
  RolloutPrice price;
};

/// The points of one placement.
struct Segment {
  PlacementChoice placement;
  double gpus = 0;
  std::vector<Trained> training;
  std::vector<Rolled> rollouts;         // in the order in which lower bounds grow
  std::vector<TransitionOrder> orders;  // those in which training stays awake first
  std::size_t num_awake = 0;
  std::vector<SyncMechanism> sync;
  std::int64_t rejected = 0;  // training points that do not divide
};

/// The model learns the exact reshard volumes of the segment.
Segment segment_of(RlModel&, const RlSpace&, const SearchOptions&, const PlacementChoice&);

}  // namespace hotbunk
