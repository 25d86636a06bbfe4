// The simulator: a Backend in virtual time that plays all ranks of a plan in one process.
//
// Device calls only enqueue; the engine advances at sync, and now and then before, as far as what all ranks have said
// determines. Bytes and calls are counted in program order at once, time is the engine's. `sync` returns the first
// failure known so far; a deadlock that involves ranks still to come is reported by a later sync or by take_trace.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "exec/backend.h"
#include "sim/engine.h"
#include "sim/op_cost.h"
#include "sim/rank_classes.h"
#include "sim/timeline.h"
#include "spec/cluster.h"

namespace hotbunk {

struct SimOptions {
  TimelineOptions timeline;
  bool enforce_capacity = true;        // E301 when mapped bytes + overhead exceed the plan's capacity
  std::int64_t device_slots = 0;       // ops that get their priced rate at once on a device; 0: ranks_per_device
  std::int64_t queue_depth = 1 << 14;  // calls that a rank's host is ahead of its device
  /// How finely ranks are played: call by call a driver may let a block run several times together (Args::times), and
  /// what shares a device's compute is rounded otherwise; all else is the same.
  Granularity granularity = Granularity::ops;
  /// With it copies, collectives and sends share the links of the cluster as it has them; none: only ranks of one
  /// device share its two directions. Outlives the backend.
  const CostModel* links = nullptr;
  std::vector<RankFactors> slow{};       // by rank, as the prices have them already; empty: none
  std::vector<Rank> by_op{};             // of those that are played, who is played op by op all the same
  std::optional<RankClasses> classes{};  // ranks that are alike; none: each is played
};

class SimWorld;

class SimBackend final : public Backend {
 public:
  /// The cost outlives the backend. Prices are those at a rank's share of its device (CostModel divides a shared
  /// device among its ranks), so by default ranks_per_device ops run at their price at the same time and more slow
  /// each other down.
  SimBackend(const ClusterSpec&, const OpCost&, SimOptions = {});
  ~SimBackend() override;

  Capability supports(const Op&) const override { return {}; }
  /// `local` must be the ranks that are played (SimOptions::classes), in order. One world at a time: a second call
  /// forgets the first.
  Result<std::vector<std::unique_ptr<Device>>> open(const Plan&, std::span<const Rank> local) override;
  Result<Trace> take_trace() override;

  /// Of the world that is open, after take_trace too.
  const Engine& engine() const;

 private:
  ClusterSpec cluster_;
  const OpCost& cost_;
  SimOptions options_;
  std::shared_ptr<SimWorld> world_;
};

}  // namespace hotbunk
