// Exhaustive search over layouts: every point of the space is priced in full, or provably no better than what is kept.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "planner/rl_model.h"

namespace hotbunk {

/// The values that each knob may take; the space is their product, less what does not divide.
struct TrainSpace {
  std::int64_t ranks = 1;
  std::int64_t batch = 1;  // sequences per optimizer step, over all ranks
  std::vector<std::int64_t> tp{1}, pp{1}, vpp{1}, cp{1}, ulysses{1}, ep{1}, etp{1}, micro_batch{1};
  std::vector<bool> sp{false, true};
  std::vector<Recompute> recompute{Recompute::none, Recompute::selective, Recompute::full};
  std::vector<Sharding> sharding{Sharding::zero1};
  std::vector<bool> optimizer_on_host{false};
};

/// All divisors up to sensible limits: tp within a node, pp up to the layers, micro-batches in powers of two.
TrainSpace default_train_space(const ModelSpec&, std::int64_t ranks, std::int64_t ranks_per_node, std::int64_t batch,
                               TrainEngine);

enum class Objective : std::uint8_t { seconds, memory };

struct TrainCandidate {
  TrainPoint point;
  TrainPrice price;
};

struct SearchOptions {
  std::size_t keep = 10;
  Objective objective = Objective::seconds;
  double device_bytes = 80e9;  // of one rank
  double host_bytes = 2e12;
  double headroom = 0.0;         // fraction of device_bytes left free
  int threads = 0;               // 0: the machine's
  bool prune = true;             // skip what cannot enter the kept ones; false: price every point
  std::int64_t most_points = 0;  // any-time: stop after so many prices, 0: never
};

struct TrainSearch {
  std::vector<TrainCandidate> best;        // feasible, best first; ties by the order of the space
  std::vector<TrainCandidate> infeasible;  // do not fit, but would be better than the best: the nearest ones
  std::vector<TrainCandidate> pareto;      // seconds against peak bytes, among the feasible
  std::int64_t priced = 0, rejected = 0, feasible = 0;  // rejected: do not divide
  bool complete = true;                                 // false: stopped by most_points
  std::string reason;                                   // why `best` is empty
};

/// Deterministic whatever the number of threads. No allocation per point.
TrainSearch search_train(const TrainModel&, const TrainSpace&, const SearchOptions&);

/// Rollout and transfer knobs beside the training ones.
struct RlSpace {
  TrainSpace train;
  std::vector<std::int64_t> rollout_tp{1};
  std::vector<bool> strided{false, true};
  std::vector<double> memory_fraction{0.8};
  std::vector<Offload> offload{Offload::none, Offload::sleep};
  std::vector<SyncMechanism> sync{SyncMechanism::flattened_buckets, SyncMechanism::shard_to_shard};
  std::vector<double> bucket_bytes{512.0 * 1024 * 1024, 2048.0 * 1024 * 1024};
};
RlSpace default_rl_space(const Scenario&);

struct RlCandidate {
  RlPoint point;
  RlPrice price;
  TrainPrice train;
  RolloutPrice rollout;
};

struct RlSearch {
  std::vector<RlCandidate> best, infeasible, pareto;
  std::int64_t priced = 0, pruned = 0, rejected = 0, feasible = 0;
  double limit_bytes = 0;  // of a device, headroom taken off
  bool complete = true;
  std::string reason;
};

/// Training, rollout, weight sync and sleep together: the iteration's seconds under all memory limits at once.
RlSearch search_rl(const RlModel&, const RlSpace&, const SearchOptions&);

/// Divisors of n, ascending.
std::vector<std::int64_t> divisors(std::int64_t n);

}  // namespace hotbunk
