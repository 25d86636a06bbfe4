// What the joint search pairs: the training points and the rollouts of one placement, each priced once.
#pragma once
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/parallel.h"
#include "planner/search/search.h"

namespace hotbunk {

struct Trained {
  TrainPoint point;
  TrainSide side;
  double seconds = 0;        // of training and its log-prob passes, a reference brought up included; of plans at least
  std::uint32_t source = 0;  // of the segment's sync sources
};
struct Rolled {
  RolloutPoint point;
  RolloutPrice price;
  double seconds = 0;  // of plans at least
  // Of a device in the rollout, whatever trains beside it: with this one, and with this or any later one of the list.
  double least_bytes = 0, least_later_bytes = 0;
};

/// All training points of the space as estimates have them, sorted.
std::vector<Trained> estimated_training(const RlModel&, const TrainSpace&);

/// The points of one placement.
struct SearchSegment {
  PlacementChoice placement;
  double gpus = 0;
  std::vector<Trained> training;        // of a search that prunes without those that a variant of theirs beats
  std::vector<SyncSource> sources;      // that training points have, each once
  std::vector<double> sync_seconds;     // of each source: no way to move the weights to any rollout takes less
  std::vector<Rolled> rollouts;         // in the order in which lower bounds grow
  std::vector<TransitionOrder> orders;  // those in which training stays awake first
  std::vector<ShiftShape> shifts;       // one of each order
  std::size_t num_awake = 0;
  std::vector<SyncMechanism> sync;
  std::vector<double> bucket_bytes;
  std::int64_t rejected = 0;  // training points that do not divide
  // Training points before those that are beaten left, and how many of them have their state on the host.
  std::int64_t trained = 0, on_host = 0;

  /// Layer-wise offload keeps the state on the host for ever: nothing is left to sleep.
  std::size_t num_orders(const Trained& t) const { return t.point.optimizer_on_host ? num_awake : orders.size(); }
  /// Ways to move the weights.
  std::size_t num_syncs() const { return sync.size() * bucket_bytes.size(); }
  /// Sets the i-th of them, as SyncPrices has them.
  void set_sync(std::size_t i, RlPoint& p) const {
    p.sync = sync[i / bucket_bytes.size()], p.bucket_bytes = bucket_bytes[i % bucket_bytes.size()];
  }
  std::int64_t points() const;
};

/// Rollouts beside what training leaves on the device, each priced once: of all orders, syncs and training points of a
/// layout few leave another number of bytes.
class RolloutsBeside {
 public:
  const RolloutPrice& price(const RlModel& model, const Rolled& alone, double leftovers) {
    if (leftovers <= 0.0) return alone.price;
    if (known_.size() >= most) known_.clear();
    const auto [at, is_new] = known_.try_emplace({&alone, leftovers});
    if (is_new) at->second = model.rollout_beside(alone.point, leftovers, alone.price);
    return at->second;
  }

 private:
  using Key = std::pair<const Rolled*, double>;
  struct Hash {
    std::size_t operator()(const Key& k) const {
      return std::hash<const Rolled*>()(k.first) * 31 + std::hash<double>()(k.second);
    }
  };
  static constexpr std::size_t most = 1 << 16;  // 10 MB
  std::unordered_map<Key, RolloutPrice, Hash> known_;
};

/// Prices of a segment's ways to move the weights between one training and one rollout layout, buckets of the first
/// mechanism first.
struct SyncPrices {
  std::vector<SyncPrice> each;
  double least_seconds = 0;
};

/// These prices, each asked once: few training points differ as sources of a sync.
class SyncsBetween {
 public:
  const SyncPrices& price(const RlModel&, const SearchSegment&, const Trained&, const Rolled&);

 private:
  static constexpr std::size_t most = 1 << 19;  // prices, 38 MB
  std::map<std::pair<const SyncSource*, const Rolled*>, SyncPrices> known_;
  std::size_t held_ = 0;  // prices
};

/// The model learns the exact reshard volumes of the segment.
SearchSegment segment_of(RlModel&, const RlSpace&, const SearchOptions&, const PlacementChoice&, Workers&);

}  // namespace hotbunk
