// Search over layouts. Every point of the space is priced in full, or provably no better than what is kept; a budget
// makes it any-time: then the gap that is left is proven too.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "planner/rl/rl_model.h"

namespace hotbunk {

class Workers;  // base/parallel.h

/// How training cuts layers and sequences; ranks beyond that share the data.
struct TrainCut {
  std::int64_t tp = 1, pp = 1, cp = 1, ulysses = 1, ep = 1, etp = 1;
  bool sp = false;
  static TrainCut of(const TrainPoint& p) { return {p.tp, p.pp, p.cp, p.ulysses, p.ep, p.etp, p.sp}; }
  friend auto operator<=>(const TrainCut&, const TrainCut&) = default;
};
/// "tp 2 sp pp 4"; "data" without any.
std::string describe(const TrainCut&);

/// The values that each knob may take; the space is their product, less what does not divide.
struct TrainSpace {
  std::int64_t ranks = 1;
  std::int64_t batch = 1;  // sequences per optimizer step, over all ranks
  bool ragged = false;     // the last micro-batch may be short; else dp x micro-batch divides the batch
  std::vector<std::int64_t> tp{1}, pp{1}, vpp{1}, cp{1}, ulysses{1}, ep{1}, etp{1}, micro_batch{1};
  bool etp_as_tp = false;      // beside the values of etp, which go with every tp
  std::vector<TrainCut> cuts;  // of all that these make only those; empty: all
  bool takes_cut(const TrainPoint& p) const {
    return cuts.empty() || std::ranges::find(cuts, TrainCut::of(p)) != cuts.end();
  }
  std::vector<TrainPoint> points;  // of those only these, sorted; empty: all
  bool takes(const TrainPoint& p) const { return points.empty() || std::ranges::binary_search(points, p); }
  std::vector<bool> sp{false, true};
  std::vector<PipelineSchedule> schedule{PipelineSchedule::one_f_one_b};  // others where vpp is 1
  std::vector<Recompute> recompute{Recompute::none, Recompute::selective, Recompute::full};
  std::vector<Sharding> sharding{Sharding::zero1};
  std::vector<std::int64_t> shard{-1};             // ranks that share one copy of what is sharded, -1: all data ranks
  std::optional<TrainLayout> own_group;            // its fsdp and shard_over are the only group; none: those of `shard`
  std::vector<std::int64_t> reshard_ranks{0};      // that keep a gathered unit between passes; 0: all that share it
  std::vector<bool> reshard{true};                 // gathered units are freed between forward and backward
  std::vector<bool> optimizer_on_host{false};      // layer-wise offload
  bool accumulates_on_host = true;                 // else only in steps of one micro-batch
  OptimizerName optimizer = OptimizerName::adamw;  // another one trains another model: no knob
};

/// All divisors up to sensible limits: tp within a node, pp up to the layers, micro-batches that divide the batch.
TrainSpace default_train_space(const ModelSpec&, std::int64_t ranks, std::int64_t ranks_per_node, std::int64_t batch,
                               TrainEngine);

/// What plans say of points; several threads ask at a time.
struct PlanPrices {
  /// Sets a point's bytes and seconds to what its plan has. False: nothing lowers the point, which is then no part of
  /// the search. None: estimates are all that there is.
  std::function<bool(const RlPoint&, RlPrice&)> use;
  /// Optional: the seconds of training and its log-prob passes, or of the rollout, that every lowered point with this
  /// training, or this rollout, has in its price; 0 where that is not known.
  std::function<double(const TrainPoint&)> training{};
  std::function<double(const RolloutPoint&)> rollout{};
  /// Optional, and for less than use() takes: no iteration of the point is shorter. Infinite where nothing lowers it.
  std::function<double(const RlPoint&)> least_seconds{};
  /// Optional: lowers what the plans of these points share, so that no thread that asks waits for what another lowers.
  std::function<void(const std::vector<RlPoint>&, Workers&)> prepare{};

  bool operator()(const RlPoint& p, RlPrice& price) const { return use(p, price); }
  explicit operator bool() const { return use != nullptr; }
};

/// What "best" means; each is made smaller. Between equals the faster wins, and between those the leaner.
enum class Objective : std::uint8_t {
  seconds,         // of an iteration
  tokens_per_gpu,  // most tokens per second and GPU
  gpu_hours,       // per million samples
  money,           // per million samples, at cluster.gpu.price_per_hour
  memory,          // bytes at the fullest moment
  gpus             // fewest
};
inline constexpr std::size_t num_objectives = 6;
std::string_view name_of(Objective);

struct SearchOptions {
  std::size_t keep = 10;
  Objective objective = Objective::seconds;
  double device_bytes = 80e9;  // of one rank
  double host_bytes = 2e12;
  double headroom = 0.0;         // fraction of device_bytes left free
  int threads = 0;               // 0: the machine's
  bool prune = true;             // skip what provably changes nothing; false: price every point
  bool nearest = true;           // also find what nearly fits; false: skip what cannot fit
  bool front = true;             // of a joint search also the Pareto front; false: the best alone
  std::int64_t most_points = 0;  // any-time: stop after about so many prices, 0: never
  PlanPrices plan_prices{};      // of a joint search over what is lowered; none: the estimates
  /// Fractions of a byte are rounding: a pool of 0.9 of the device leaves a tenth of it.
  double limit_bytes() const {
    return headroom > 0.0 ? std::ceil(device_bytes * (1.0 - headroom)) + 1.0 : device_bytes;
  }
};

struct TrainCandidate {
  TrainPoint point;
  TrainPrice price;
};

struct TrainSearch {
  std::vector<TrainCandidate> best;        // feasible, best first
  std::vector<TrainCandidate> infeasible;  // do not fit, but would be better than the best: the nearest to fitting
  std::vector<TrainCandidate> pareto;      // seconds against peak bytes, among all that is feasible
  std::int64_t priced = 0, rejected = 0, feasible = 0;  // rejected: do not divide
  bool complete = true;                                 // false: stopped by most_points
  std::string reason;                                   // why `best` is empty
};

/// Objectives other than memory all mean the step's seconds: the GPUs are given. No allocation per point.
TrainSearch search_train(const TrainModel&, const TrainSpace&, const SearchOptions&);

/// One way to divide the GPUs.
struct PlacementChoice {
  PlacementMode mode = PlacementMode::colocated;
  std::int64_t train_ranks = 1, rollout_ranks = 1;  // colocated: the same GPUs
};

/// Rollout, transfer and shift knobs beside the training ones; `train.ranks` is set by each placement.
struct RlSpace {
  TrainSpace train;
  std::vector<PlacementChoice> placement;
  std::vector<std::int64_t> rollout_tp{1}, rollout_pp{1}, rollout_cp{1};  // engines = rollout ranks / (tp pp cp)
  // Of engines with stages: ranks of a stage, 0: any; and of the engine at most.
  std::int64_t stage_ranks = 0, most_engine_ranks = std::numeric_limits<std::int64_t>::max();
  /// Whether engines of that shape are part of the space.
  bool has_engine(std::int64_t tp, std::int64_t cp, std::int64_t pp) const {
    return pp == 1 || ((stage_ranks == 0 || tp * cp == stage_ranks) && tp * cp * pp <= most_engine_ranks);
  }
  std::vector<std::int64_t> attention_dp{1};
  bool spreads_experts = false;
  /// Groups of an engine's ranks that have other experts each: 1, where ranks have columns of all; and where they may
  /// be spread, as many as have whole ones and what lies between where the engine can (spec/engine_experts.h). Our
  /// context-parallel ranks have the same experts, other engines' spread them.
  std::vector<std::int64_t> expert_groups(RolloutEngine, std::int64_t tp, std::int64_t cp) const;
  std::vector<bool> strided{false, true};
  std::vector<double> memory_fraction{0.8};
  std::vector<TransitionOrder> transition;  // of colocated points
  std::vector<SyncMechanism> sync{SyncMechanism::flattened_buckets, SyncMechanism::shard_to_shard};
  std::vector<SyncMechanism> sync_apart{SyncMechanism::broadcast, SyncMechanism::shard_to_shard};  // disaggregated
  std::vector<double> bucket_bytes{512.0 * 1024 * 1024, 2048.0 * 1024 * 1024};
};
/// Orders in which exactly these parts sleep that the framework has: all legal ones, or its own.
std::vector<TransitionOrder> transition_choices(const Scenario&, const Capabilities&, bool params, bool optimizer);

/// Colocated on all ranks and disaggregated in eighths; the scenario's own values besides the usual ones, which are of
/// what the framework's launches can say (FrameworkProfile::can).
RlSpace default_rl_space(const Scenario&, const FrameworkProfile& = {});

struct RlCandidate {
  RlPoint point;
  RlPrice price;
};

struct RlSearch {
  std::vector<RlCandidate> best;        // feasible; of the variants of one layout (same_layout) the best stands for all
  std::vector<RlCandidate> infeasible;  // better than the best but too large: the nearest to fitting first
  std::vector<RlCandidate> pareto;      // seconds against the fullest moment, among all that is feasible
  std::int64_t points = 0;              // of the space, less what does not divide or holds no sequence
  std::int64_t priced = 0, feasible = 0, rejected = 0;
  double limit_bytes = 0;  // of a device, headroom taken off
  bool complete = true;    // false: stopped by most_points
  double gap = 0;          // the best may be better by this fraction of its value at most; 0 when complete
  std::string reason;      // why `best` is empty
};

/// Two points with the same parallel dimensions; micro-batch, schedule, recomputation, order, sync and fractions may
/// differ.
bool same_layout(const RlPoint&, const RlPoint&);

/// Training, rollout, weight sync and shifts together under all memory limits at once, pairs of training and rollout
/// with the smallest lower bound first.
RlSearch search_rl(const RlModel&, const RlSpace&, const SearchOptions&);

/// The objective's value of a priced point, as `infeasible` and the ranking compare it.
double objective_of(Objective, const RlModel&, const RlPoint&, const RlPrice&);

/// Divisors of n, ascending.
std::vector<std::int64_t> divisors(std::int64_t n);

}  // namespace hotbunk
