// How a priced plan is written: the job around its blocks in priced_plan.cc, training's blocks in train_blocks.cc,
// those of the engine and the sync in engine_blocks.cc.
#pragma once
#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lowering/sleep.h"
#include "planner/priced/priced_plan.h"

namespace hotbunk {

inline std::int64_t whole_bytes(double bytes) { return std::llround(std::ceil(std::max(bytes, 0.0))); }

/// So many seconds and bytes for so many tokens, in proportion.
inline std::vector<PricePoint> per_token(double tokens, double seconds, double payload_bytes = 0.0) {
  const auto n = std::max<std::int64_t>(1, std::llround(tokens));
  return {{.tokens = 0}, {.tokens = n, .seconds = seconds, .payload_bytes = payload_bytes}};
}
/// Whatever the sizes.
inline std::vector<PricePoint> always(double seconds, double payload_bytes = 0.0) {
  return {{.seconds = seconds, .payload_bytes = payload_bytes}};
}

class PricedPlanWriter {
 public:
  PricedPlanWriter(const ScenarioPricer& pricer, const RlPoint& point)
      : scenario_(pricer.scenario()), rl_(pricer.rl()), model_(pricer.train()), point_(point) {
    if (point_.samples() && point_.placement == PlacementMode::colocated)
      scenario_.transition = to_text(point_.transition);
    scenario_.rollout.layout.order = point_.rollout.strided ? RankOrder::strided : RankOrder::contiguous;
    const TrainModel::Layers layers = model_.layers(point_.train);
    layers_ = layers;
    step_ = model_.price(point_.train, layers);
    train_ = rl_.train_side(point_.train, step_, layers);
    if (!point_.samples()) return;
    const RlModel::Parts parts = rl_.parts(point_);
    train_ = parts.train, rollout_ = parts.rollout, sync_ = parts.sync;
    staging_ = rl_.staging_bytes(point_, sync_);
  }

  PricedJob write();

 private:
  /// What a role does: both, where training and rollout take shifts on one set of GPUs.
  struct Part {
    bool trains = true, serves = true;
  };
  bool apart() const { return point_.placement == PlacementMode::disaggregated; }

  const RlSetting& setting() const { return rl_.setting(); }
  /// Tokens of the busiest data rank in all optimizer steps of an iteration.
  double tokens() const {
    return setting().mini_batches * static_cast<double>(point_.train.sequences()) *
           static_cast<double>(model_.setting().sequence);
  }
  /// Under sequence parallelism the payload is that of gathers and scatters, else of all-reduces.
  OpKind tensor_kind() const { return point_.train.sp ? OpKind::all_gather : OpKind::all_reduce; }
  OpKind context_kind() const { return point_.train.ulysses > 1 ? OpKind::all_to_all : OpKind::all_gather; }

  void add_families();
  void add_phases();
  void add_phases_apart();
  Program program(Part);
  GroupId family(std::string_view name) const;

  BufferId bytes(std::string name, double bytes, Category category, SectionId section) {
    return b().managed(std::move(name), DType::u8, whole_bytes(bytes), category, section);
  }
  ProgramBuilder& b() { return *builder_; }
  /// An op that costs what the points say, behind all that touched `work` before.
  Op& priced(OpKind kind, StreamId stream, std::string name, const std::vector<BufferId>& work,
             std::vector<PricePoint> prices);
  void compute(std::string name, const std::vector<BufferId>& work, std::vector<PricePoint> prices) {
    priced(OpKind::priced, streams::compute, std::move(name), work, std::move(prices));
  }
  /// Left out where it takes no time and moves nothing.
  void communicate(OpKind kind, StreamId stream, std::string_view group, std::string name,
                   const std::vector<BufferId>& work, std::vector<PricePoint> prices);

  void keep(std::vector<Backup>& to, const char* name, double size, Category, SectionId device,
            std::optional<SectionId> host);
  void add_train_buffers(const SleepParts&);
  void add_rollout_buffers(const SleepParts&);
  void add_communicators();
  std::vector<Tensor> state();
  std::vector<Tensor> all_of(const std::vector<Backup>&, BufferId Backup::*side);
  void load(std::int32_t phase);
  void start(std::int32_t phase);
  void samples(std::int32_t phase);
  void train_phase(std::string_view name, std::int32_t phase);
  void sync(std::int32_t phase, bool from_host, Part);
  void rollout(std::int32_t phase);
  void exchange(std::int32_t phase);
  void passes(std::int32_t phase, std::string_view what, const TrainModel::Layers&, bool trained);
  void optimizer_steps(std::int32_t phase, std::string_view what, const TrainPrice&, double working);
  void add_pool(Op&);

  Scenario scenario_;
  const RlModel& rl_;
  const TrainModel& model_;
  RlPoint point_;
  TrainModel::Layers layers_;
  TrainPrice step_;
  TrainSide train_;
  RolloutPrice rollout_;
  SyncPrice sync_;
  double staging_ = 0;

  Plan plan_;
  std::optional<ProgramBuilder> builder_;
  ShiftBuffers shifts_;
  BufferId host_state_ = -1, host_reference_ = -1, communicators_ = -1;
};

}  // namespace hotbunk
