// How a priced plan is written: the job around its blocks in priced_plan.cc, training's blocks in train_blocks.cc,
// those of the engine and the sync in engine_blocks.cc.
#pragma once
#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "layout/pipeline_schedule.h"
#include "lowering/sleep.h"
#include "planner/priced/priced_plan.h"
#include "planner/rl/step_parts.h"

namespace hotbunk {

inline std::int64_t whole_bytes(double bytes) { return std::llround(std::ceil(std::max(bytes, 0.0))); }

/// So many seconds and bytes for so many tokens, in proportion.
inline std::vector<PricePoint> per_token(double tokens, double seconds, double payload_bytes = 0.0) {
  const auto n = std::max<std::int64_t>(1, std::llround(tokens));
  return {{.tokens = 0}, {.tokens = n, .seconds = seconds, .payload_bytes = payload_bytes}};
}
/// As many bytes in every run: what ranks with other tokens take part in, too.
inline std::vector<PricePoint> per_run(double tokens, double seconds, double payload_bytes) {
  std::vector<PricePoint> out = per_token(tokens, seconds, payload_bytes);
  out[0].payload_bytes = payload_bytes;
  return out;
}
/// Whatever the sizes.
inline std::vector<PricePoint> always(double seconds, double payload_bytes = 0.0) {
  return {{.seconds = seconds, .payload_bytes = payload_bytes}};
}

/// What a priced plan has behind program_sections(): no op of ours holds communicators or graphs.
namespace priced_sections {
inline constexpr SectionId train_communicators{11};
inline constexpr SectionId graphs{12};
}  // namespace priced_sections

class PricedPlanWriter {
 public:
  PricedPlanWriter(const Scenario& scenario, const RlModel& rl, const RlPoint& point)
      : scenario_(scenario), rl_(rl), model_(rl.train()), point_(point) {
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
  std::int32_t iterations_ahead() const;
  /// Trainer and engines do not meet: what one gives waits until the other takes it.
  bool hands_over() const { return iterations_ahead() > 1; }

  const RlSetting& setting() const { return rl_.setting(); }
  /// Tokens of the busiest data rank in all optimizer steps of an iteration.
  double tokens() const {
    return setting().mini_batches * static_cast<double>(point_.train.sequences()) *
           static_cast<double>(model_.setting().sequence);
  }
  /// Under sequence parallelism the payload is that of gathers and scatters, else of all-reduces.
  OpKind tensor_kind() const { return point_.train.sp ? OpKind::all_gather : OpKind::all_reduce; }
  bool pipelined() const { return point_.train.pp > 1; }
  /// Tokens of a full micro-batch on the ranks that share its sequences.
  double micro_tokens() const {
    return static_cast<double>(point_.train.micro_batch) * static_cast<double>(model_.setting().sequence);
  }
  OpKind context_kind() const { return point_.train.ulysses > 1 ? OpKind::all_to_all : OpKind::all_gather; }
  bool passes_ring() const { return layers_.dense.ring_forward + layers_.moe.ring_forward > 0.0; }

  void add_families();
  void add_engine_families();
  void add_phases();
  void add_phases_apart();
  /// `stage`: of training's pipeline.
  Program program(Part, std::int64_t stage = 0);
  GroupId family(std::string_view name) const;
  /// The ranks that divide training's states.
  const char* shard_family() const { return point_.train.replicas() > 1 ? "train_shard" : "train_data"; }

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
  /// Ring attention's messages, each beside its part of the attention: `seconds` and payload of so many tokens, all
  /// layers together.
  void pass_around(const std::string& name, const std::vector<BufferId>& work, const RingPrice& seconds,
                   double payload_bytes, double tokens);
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
  void samples(std::int32_t phase, Part);
  void hand_over(const std::string& name, const std::vector<BufferId>& work, bool gives);
  /// Beside the passes of an iteration: an algorithm without samples has none.
  double framework_seconds() const { return point_.samples() ? rl_.framework_seconds() : 0.0; }
  void framework(std::int32_t phase);
  /// Of the pass `what`: while the driving process has the batch no kernel runs.
  double driver_seconds(std::string_view what) const { return what == "old" ? rl_.driver_seconds() : 0.0; }
  void train_phase(PlanPhase, std::int32_t phase);
  void sync(std::int32_t phase, bool from_host, Part);
  std::vector<BufferId> sync_staging(bool from_host);
  void rollout(std::int32_t phase);
  /// Of an engine's step with so many tokens.
  struct EngineTraffic {
    std::int64_t tokens = 0;
    StepParts parts;
    RolloutPayload payload;
  };
  RolloutPayload engine_payload(double whole, double local, double prompt) const;
  void exchange_in_engine(std::string_view step, const std::vector<EngineTraffic>&, const std::vector<BufferId>& work);
  void exchange(std::int32_t phase);
  void passes(std::int32_t phase, std::string_view what, const TrainPrice&, bool trained);
  std::vector<BufferId> scoring_work(std::string_view what, const RlModel::Scoring&, double swapped, double messages);
  void gathered_parameters(std::string_view what, BufferId weights, const TrainPrice&, double seconds);
  void optimizer_steps(std::int32_t phase, std::string_view what, const TrainPrice&, const TrainModel::Layers&,
                       double working);
  void step_end(std::string_view what, BufferId grads, const TrainPrice& moved, double data, double optimizer);
  void add_pool(Op&);

  // pipeline_blocks.cc: the same where training has stages.
  struct StageWork;
  TrainModel::Hop message() const;
  Tensor message_tensor(BufferId) const;
  void add_messages(StageWork&, double most_bytes);
  void stages_meet(const std::string& name, BufferId);
  void exchange_with(const StageWork&, const std::string& name, std::int64_t stage, bool sends, bool receives);
  void arrive(const StageWork&, const std::string& name);
  void pass(const StageWork&, const std::string& name, const PassPrice&, std::vector<BufferId> work, double beside);
  void stage_passes(std::int32_t phase, std::string_view what, const TrainPrice&, bool trained);
  void stage_steps(std::int32_t phase, std::string_view what, const TrainPrice& whole, const TrainModel::Layers&);
  StageWork stage_work(std::string_view what, const TrainPrice& whole, const TrainModel::Layers&);
  std::vector<BufferId> work_of(const StageWork&, const std::string& name, double activations, bool backward);
  void fill(const StageWork&, std::int64_t number);
  void forward(const StageWork&);
  void backward(const StageWork&, const PipelineStep&);
  void weight_gradients(const StageWork&, const std::string& name, std::vector<BufferId> behind);
  std::vector<BufferId> backward_pass(const StageWork&, const std::string& name, const PipelineStep&);
  std::int64_t most_passes() const;

  Scenario scenario_;
  const RlModel& rl_;
  const TrainModel& model_;
  RlPoint point_;
  TrainModel::Layers layers_;
  std::int64_t stage_ = 0;  // of the program at hand
  TrainPrice step_;
  TrainSide train_;
  RolloutPrice rollout_;
  SyncPrice sync_;
  double staging_ = 0;

  Plan plan_;
  std::optional<ProgramBuilder> builder_;
  ShiftBuffers shifts_;
  BufferId host_state_ = -1, host_reference_ = -1;
};

}  // namespace hotbunk
