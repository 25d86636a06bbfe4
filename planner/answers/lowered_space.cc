#include "planner/answers/lowered_space.h"

#include <algorithm>
#include <future>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>

#include "base/check.h"
#include "base/parallel.h"
#include "layout/rollout_weights.h"
#include "layout/scenario_layout.h"
#include "lowering/lower.h"
#include "lowering/rollout.h"
#include "lowering/sample_rows.h"
#include "planner/answers/choices.h"
#include "planner/answers/plan_answer.h"
#include "planner/answers/plan_shifts.h"
#include "spec/validate.h"

namespace hotbunk {
namespace {

/// Values by key. Each is asked for once, by whoever comes first, and outside of the lock; others wait for it.
template <class Key, class Value>
class Known {
 public:
  /// Stays where it is.
  template <class Ask>
  const Value& value(const Key& key, Ask&& ask) {
    std::optional<std::promise<Value>> mine;
    const std::shared_future<Value>* answer = nullptr;
    {
      const std::scoped_lock lock(mutex_);
      const auto [at, added] = known_.try_emplace(key);
      if (added) at->second = mine.emplace().get_future().share();
      answer = &at->second;
    }
    if (!mine) return answer->get();
    try {
      mine->set_value(ask());
    } catch (...) {  // a fault is everybody's who asks
      mine->set_exception(std::current_exception());
    }
    return answer->get();
  }

 private:
  std::mutex mutex_;
  std::map<Key, std::shared_future<Value>> known_;
};

/// Phases of a job that are lowered together, for the same knobs decide what they do.
enum class PartKind : std::uint8_t { moves, sync, rollout, training, passes, saves };

constexpr PartKind part_of(PlanPhase p) {
  switch (p) {
    case PlanPhase::sync:
      return PartKind::sync;
    case PlanPhase::rollout:
    case PlanPhase::exchange:
      return PartKind::rollout;
    case PlanPhase::reference:
    case PlanPhase::old_logprobs:
      return PartKind::passes;
    case PlanPhase::train:
      return PartKind::training;
    case PlanPhase::checkpoint:
    case PlanPhase::export_:
      return PartKind::saves;
    default:
      return PartKind::moves;
  }
}

/// A part, and the knobs that decide it; the others have their defaults.
struct PartKey {
  PartKind kind{};
  TrainPoint train;
  std::int64_t rollout_tp = 1, rollout_ep = 1, rollout_cp = 1, attention_dp = 1;
  bool strided = false;  // of a sync, and of engines that cross nodes
  double bucket_bytes = 0;
  bool from_host = false;        // of a sync
  TransitionOrder transition{};  // of moves
  friend auto operator<=>(const PartKey&, const PartKey&) = default;
};

PartKey key_of(PartKind kind, const RlPoint& p, const JobPhases& phases, std::int64_t node_ranks) {
  PartKey key{.kind = kind, .train = {}};
  if (kind == PartKind::training || kind == PartKind::passes) {
    key.train = p.train;
    // Nothing is kept for a backward pass that is not there.
    if (kind == PartKind::passes)
      key.train.recompute = {}, key.train.reshard_after_forward = true, key.train.reshard_ranks = 0;
    return key;
  }
  key.train.tp = p.train.tp, key.train.pp = p.train.pp, key.train.dp = p.train.ranks() / (p.train.tp * p.train.pp);
  key.train.fsdp = p.train.fsdp, key.train.sharding = p.train.sharding;
  if (key.train.shard_over = p.train.shard_over; key.train.shard_over.some())
    key.train.dp = p.train.dp, key.train.cp = p.train.cp, key.train.ulysses = p.train.ulysses;
  // Which layers and which experts a rank has.
  key.train.vpp = p.train.vpp, key.train.ep = p.train.ep, key.train.etp = p.train.etp;
  key.train.optimizer_on_host = p.train.optimizer_on_host;
  if (kind == PartKind::saves) return key;
  key.rollout_tp = p.rollout.tp, key.rollout_ep = p.rollout.ep, key.rollout_cp = p.rollout.cp,
  key.attention_dp = p.rollout.attention_dp;
  if (kind == PartKind::sync || (kind == PartKind::rollout && p.rollout.ranks() > node_ranks))
    key.strided = p.rollout.strided;
  if (kind == PartKind::moves) key.transition = p.transition;
  if (kind == PartKind::sync)
    key.bucket_bytes = p.bucket_bytes, key.from_host = phases.find(PlanPhase::sync)->from_host;
  return key;
}

/// Bytes and shifts of the plans of a lowered scenario's points. A plan is put together of parts, each lowered once,
/// however many plans have it. Parts meet in nothing but the map of the transient section, so all answers are exact.
class PlanAnswers {
 public:
  PlanAnswers(const Scenario& s, const CostModel& cost)
      : scenario_(s), cost_(cost), node_ranks_(cost.ranks_per_node()), own_(rl_point_of(s)), shapes_(s.model) {}

  /// As PlanPrices has it, and so is prepare().
  bool use(const RlPoint& p, RlPrice& price) {
    const std::optional<Frame>& frame = frames_.value(FrameKey(p), [&] { return lowered_frame(p); });
    if (!frame) return false;
    const std::optional<Training>& training = trainings_.value(p.train, [&] { return lowered_training(p); });
    if (!training) return false;
    MappedBytes mapped{.phases = frame->phases};
    std::vector<std::vector<ShiftOp>> shifts;
    for (std::size_t stage = 0; stage < frame->shifts.size(); ++stage) {
      PhaseBytes transients = frame->transients[stage];
      raise(transients, training->transients[stage]);
      const JobMaps maps = maps_of(*frame, stage, transients);
      raise(mapped, maps.mapped());
      shifts.push_back(maps.shifts());
    }
    use_mapped_bytes(mapped, price);
    ComputedSeconds computed = training->computed;
    computed.rollout = frame->rollout_seconds, computed.sync = frame->sync_seconds;
    use_plan_seconds(computed, shifts_seconds(shifts[most_shifted(shifts)], cost_), price);
    return true;
  }

  double least_seconds(const RlPoint& p) {
    const std::optional<Frame>& frame = frames_.value(FrameKey(p), [&] { return lowered_frame(p); });
    if (!frame) return std::numeric_limits<double>::infinity();
    const std::optional<Training>& training = trainings_.value(p.train, [&] { return lowered_training(p); });
    return training ? training->seconds() + frame->least_seconds() : std::numeric_limits<double>::infinity();
  }
  double training_seconds_of(const TrainPoint& t) {
    RlPoint p = own_;
    p.train = t;
    if (!executes(with_point(scenario_, own_, p))) return 0.0;
    const std::optional<Training>& training = trainings_.value(t, [&] { return lowered_training(p); });
    if (!training) return 0.0;
    return training->seconds();
  }
  double rollout_seconds_of(const RolloutPoint& r) {
    RlPoint p = own_;
    p.rollout = r;
    const Scenario there = with_point(scenario_, own_, p);
    if (!executes(there)) return 0.0;
    const JobPhases phases(there);
    const Part& moves = part(key_of(PartKind::moves, p, phases, node_ranks_), there);
    const auto blocks = kv_pool_blocks(there, moves.weight_bytes, there.model.layers);
    return blocks ? rollout_seconds(p, there, phases, *blocks) : 0.0;
  }

  void prepare(std::vector<RlPoint> points, Workers& workers) {
    std::erase_if(points, [&](const RlPoint& p) {
      const bool new_frame = prepared_.insert(FrameKey(p)).second;
      return !prepared_trainings_.insert(p.train).second && !new_frame;
    });
    std::vector<std::vector<PartKey>> keys(points.size());
    workers.each(points.size(), [&](std::size_t i, int) { keys[i] = keys_of(points[i]); });
    std::map<PartKey, const RlPoint*> parts;
    for (std::size_t i = 0; i < points.size(); ++i)
      for (const PartKey& key : keys[i]) parts.try_emplace(key, &points[i]);
    const std::vector<std::pair<PartKey, const RlPoint*>> each(parts.begin(), parts.end());
    workers.each(each.size(),
                 [&](std::size_t i, int) { part(each[i].first, with_point(scenario_, own_, *each[i].second)); });
  }

 private:
  /// What one part takes, of each pipeline stage.
  struct Part {
    std::vector<PhaseBytes> transients;
    std::vector<std::vector<ShiftOp>> shifts;  // of moves and syncs
    // Of moves: the plan's chunks, and a rank's rollout weights.
    std::int64_t chunk_bytes = 0, weight_bytes = 0;
    ComputedSeconds seconds;                     // of training, passes and syncs
    std::shared_ptr<const WrittenPart> written;  // of rollouts, which have
    std::shared_ptr<const EngineBlocks> engine;  // the steps of an engine
  };

  /// What training and its passes take.
  struct Training {
    std::vector<PhaseBytes> transients;  // by stage
    ComputedSeconds computed;
    double seconds() const { return computed.reference + computed.old_logprobs + computed.train; }
  };

  /// All of a job but what its training computes with.
  struct Frame {
    JobPhases phases;
    bool keep_mapped = false;
    std::int64_t chunk_bytes = 0, pool_bytes = 0;
    // By pipeline stage.
    std::vector<std::vector<ShiftOp>> shifts;
    std::vector<PhaseBytes> transients;  // of what is not training
    double rollout_seconds = 0, sync_seconds = 0;
    double shift_seconds = 0;  // without what maps transients, which depends on training's: of any stage at least
    double least_seconds() const { return rollout_seconds + sync_seconds + shift_seconds; }
  };

  static void raise(PhaseBytes& to, const PhaseBytes& more) {
    for (std::size_t i = 0; i < num_plan_phases; ++i) to[i] = std::max(to[i], more[i]);
  }
  static void raise(std::vector<PhaseBytes>& to, const std::vector<PhaseBytes>& more) {
    to.resize(more.size());
    for (std::size_t i = 0; i < more.size(); ++i) raise(to[i], more[i]);
  }
  static void raise(MappedBytes& to, const MappedBytes& more) {
    raise(to.device, more.device), raise(to.host, more.host);
    to.device_peak = std::max(to.device_peak, more.device_peak);
    to.host_peak = std::max(to.host_peak, more.host_peak);
  }

  /// Of a frame's stage, whose transients need so much.
  static JobMaps maps_of(const Frame& f, std::size_t stage, const PhaseBytes& need) {
    return {f.phases, f.keep_mapped, f.chunk_bytes, f.shifts[stage], f.pool_bytes, need};
  }

  /// The knobs that decide a frame, those in which most differ first.
  struct FrameKey {
    RolloutPoint rollout;
    double bucket_bytes = 0;
    TransitionOrder transition;
    SyncMechanism sync{};
    PlacementMode placement{};
    TrainPoint train;
    explicit FrameKey(const RlPoint& p)
        : rollout(p.rollout),
          bucket_bytes(p.bucket_bytes),
          transition(p.transition),
          sync(p.sync),
          placement(p.placement),
          train(p.train) {
      const TrainPoint any;  // what training computes with
      train.micro_batch = any.micro_batch, train.micro_batches = any.micro_batches;
      train.last_micro_batch = any.last_micro_batch;
      train.recompute = any.recompute, train.reshard_after_forward = any.reshard_after_forward;
      train.reshard_ranks = any.reshard_ranks;
    }
    friend auto operator<=>(const FrameKey&, const FrameKey&) = default;
  };

  bool executes(const Scenario& there) const {
    const RolloutLayout& engines = there.rollout.layout;
    return unsupported_to_execute(there).empty() &&
           (!samples() || (engines.pp == 1 && why_not_rollout_tp(there.model, engine_cuts(there).front()).empty()));
  }
  static bool holds_a_sample(const Scenario& there) {  // E217
    return micro_batch_capacity(there) >= max_sample_tokens(there);
  }
  bool samples() const { return scenario_.algorithm.name != AlgorithmName::sft; }

  /// None where nothing lowers the point, whatever its training computes with.
  std::optional<Frame> lowered_frame(const RlPoint& p) {
    const Scenario there = with_point(scenario_, own_, p);
    if (!executes(there)) return std::nullopt;
    Frame out{.phases = JobPhases(there), .keep_mapped = nothing_sleeps(there), .shifts = {}, .transients = {}};
    out.shifts.resize(static_cast<std::size_t>(there.train.layout.pp));
    out.transients.resize(out.shifts.size());
    const Part& moves = part(key_of(PartKind::moves, p, out.phases, node_ranks_), there);
    out.chunk_bytes = moves.chunk_bytes;
    if (samples()) {
      const auto blocks = kv_pool_blocks(there, moves.weight_bytes, there.model.layers);
      if (!blocks) return std::nullopt;
      out.pool_bytes = *blocks * kv_block_bytes(there);
      out.rollout_seconds = rollout_seconds(p, there, out.phases, *blocks);
      out.sync_seconds = part(key_of(PartKind::sync, p, out.phases, node_ranks_), there).seconds.sync;
    }
    for (const JobPhase& phase : out.phases) {
      if (is_training(phase.phase)) continue;
      const Part& of = part(key_of(part_of(phase.phase), p, out.phases, node_ranks_), there);
      raise(out.transients, of.transients);
      for (std::size_t stage = 0; stage < of.shifts.size(); ++stage)
        std::ranges::copy_if(of.shifts[stage], std::back_inserter(out.shifts[stage]),
                             [&](const ShiftOp& op) { return op.phase == phase.phase; });
    }
    out.shift_seconds = std::numeric_limits<double>::infinity();
    for (std::size_t stage = 0; stage < out.shifts.size(); ++stage) {
      std::vector<ShiftOp> shifts = maps_of(out, stage, out.transients[stage]).shifts();
      std::erase_if(shifts, [](const ShiftOp& op) { return op.kind != OpKind::copy && op.section == "transient"; });
      const ShiftsSeconds seconds = shifts_seconds(shifts, cost_);
      out.shift_seconds = std::min(out.shift_seconds, seconds.sleep.total() + seconds.wake.total() + seconds.staging);
    }
    return out;
  }

  /// What the phases of training take, of a point that something lowers; none where a micro-batch holds no sample.
  std::optional<Training> lowered_training(const RlPoint& p) {
    const Scenario there = with_point(scenario_, own_, p);
    // A frame is that of points with other micro-batches, too: sequence parallelism has to divide these.
    if (!executes(there) || !holds_a_sample(there)) return std::nullopt;
    const JobPhases phases(there);
    Training out;
    for (const JobPhase& phase : phases) {
      if (!is_training(phase.phase)) continue;
      const PartKind kind = part_of(phase.phase);
      const Part& of = part(key_of(kind, p, phases, node_ranks_), there);
      raise(out.transients, of.transients);
      if (kind == PartKind::training) out.computed.train = of.seconds.train;
      if (kind == PartKind::passes)
        out.computed.reference = of.seconds.reference, out.computed.old_logprobs = of.seconds.old_logprobs;
    }
    return out;
  }

  /// What decides an engine's steps beside the scenario.
  struct EngineKey {
    PartKey part;
    std::int64_t pool_tokens = 0, engines = 1;
    friend auto operator<=>(const EngineKey&, const EngineKey&) = default;
  };
  double rollout_seconds(const RlPoint& p, const Scenario& there, const JobPhases& phases, std::int64_t pool_blocks) {
    const PartKey key = key_of(PartKind::rollout, p, phases, node_ranks_);
    const std::int64_t tokens = pool_blocks * block_span(there.rollout);
    return engines_.value(EngineKey{key, tokens, p.rollout.engines}, [&] {
      return part(key, there).engine->seconds(there, static_cast<double>(tokens), cost_).total();
    });
  }

  /// Of the point's plan; none where nothing lowers it.
  std::vector<PartKey> keys_of(const RlPoint& p) const {
    std::vector<PartKey> out;
    const Scenario there = with_point(scenario_, own_, p);
    if (!executes(there) || !holds_a_sample(there)) return out;
    const JobPhases phases(there);
    for (const JobPhase& phase : phases) {
      const PartKind kind = part_of(phase.phase);
      if (std::ranges::find(out, kind, &PartKey::kind) == out.end())
        out.push_back(key_of(kind, p, phases, node_ranks_));
    }
    return out;
  }

  /// `there`: a scenario with the key's knobs, which executes.
  const Part& part(const PartKey& key, const Scenario& there) {
    return parts_.value(key, [&] { return lower_part(key, there); });
  }

  Part lower_part(const PartKey& key, Scenario there) {
    const PartKind kind = key.kind;
    const PhaseFilter wanted = [kind](PlanPhase p) { return part_of(p) == kind; };
    Part out;
    if (kind != PartKind::moves && kind != PartKind::sync) {
      if (kind == PartKind::rollout) use_least_pool(there);
      auto written = std::make_shared<const WrittenPart>(lowered(write_phases(there, wanted, shapes_)));
      out.transients = written->transients;
      const PlanBlocks blocks(*written);
      if (kind == PartKind::rollout) {
        out.engine = std::make_shared<const EngineBlocks>(there, blocks, cost_);
        out.written = std::move(written);
      } else if (kind != PartKind::saves) {
        const TrainingSeconds seconds = training_seconds(there, key.train, blocks, cost_);
        out.seconds = ComputedSeconds::of(there, {.training = seconds, .rollout = {}, .sync = {}});
      }
      return out;
    }
    use_least_pool(there);
    const PartOfPlan part = lowered(lower_phases(there, wanted, shapes_));
    out.transients = part.transients;
    for (std::size_t stage = 0; stage < part.plan.programs.size(); ++stage)
      out.shifts.push_back(shifts_of(there, part.plan, stage));
    out.chunk_bytes = part.plan.chunk_bytes;
    const auto weights = part.plan.programs[0].section_index("rollout_weights");
    for (const Buffer& b : part.plan.programs[0].buffers)
      if (b.section == weights) out.weight_bytes += b.bytes();
    if (kind == PartKind::sync)
      out.seconds =
          ComputedSeconds::of(there, {.training = {}, .rollout = {}, .sync = sync_seconds(there, part.plan, cost_)});
    return out;
  }
  /// Parts are the same beside any pool.
  static void use_least_pool(Scenario& s) {
    s.rollout.kv_cache_tokens = max_blocks_per_seq(s) * block_span(s.rollout) * s.rollout.layout.attention_dp;
  }
  /// What nothing refused before is lowered.
  template <class What>
  static What lowered(Result<What> part) {
    HB_CHECK(part, "a part of a plan is not lowered: {}", render(part.error()));
    return std::move(*part);
  }

  const Scenario& scenario_;
  const CostModel& cost_;
  const std::int64_t node_ranks_;
  const RlPoint own_;
  ModelShapes shapes_;
  Known<PartKey, Part> parts_;
  Known<FrameKey, std::optional<Frame>> frames_;
  Known<TrainPoint, std::optional<Training>> trainings_;
  Known<EngineKey, double> engines_;
  // What prepare() has seen; one thread calls it.
  std::set<FrameKey> prepared_;
  std::set<TrainPoint> prepared_trainings_;
};

}  // namespace

PlanPrices plan_prices(const Scenario& s, const CostModel& cost) {
  const auto answers = std::make_shared<PlanAnswers>(s, cost);
  return {.use = [answers](const RlPoint& p, RlPrice& price) { return answers->use(p, price); },
          .training = [answers](const TrainPoint& p) { return answers->training_seconds_of(p); },
          .rollout = [answers](const RolloutPoint& p) { return answers->rollout_seconds_of(p); },
          .least_seconds = [answers](const RlPoint& p) { return answers->least_seconds(p); },
          .prepare = [answers](const std::vector<RlPoint>& points,
                               Workers& workers) { answers->prepare(points, workers); }};
}

void keep_what_executes(RlSpace& space, const Scenario& s, SyncMechanism bucketed) {
  TrainSpace& t = space.train;
  // Tensor-parallel ranks share each expert, or have whole ones, or do as the scenario's own.
  std::erase_if(t.etp, [&](std::int64_t etp) { return etp != 1 && etp != s.train.layout.etp; });
  if (std::ranges::count(t.etp, 1) == 0) t.etp.insert(t.etp.begin(), 1);
  t.etp_as_tp = s.model.moe.has_value();
  // 1F1B has GPipe's bubble in less memory.
  const PipelineSchedule own_schedule = train_point_of(s).schedule;
  std::erase_if(t.schedule, [&](PipelineSchedule p) { return p == PipelineSchedule::gpipe && p != own_schedule; });
  // Copies of the shards pay where links between them are slower than within: of groups, a node is tried.
  const std::int64_t node = s.cluster.ranks_per_node(), own_group = train_point_of(s).fsdp;
  std::erase_if(t.shard, [&](std::int64_t group) { return group != -1 && group != node && group != own_group; });
  std::erase_if(space.placement, [](const PlacementChoice& p) { return p.mode != PlacementMode::colocated; });
  space.rollout_pp = space.rollout_cp = {1};
  space.attention_dp = {1};
  if (!s.model.moe) space.spreads_experts = false;
  space.sync = {bucketed};
  // Any legal order executes; tried are ours, in which each part sleeps as soon as the sync allows, and the scenario's.
  const TransitionOrder own = rl_point_of(s).transition;
  std::erase_if(space.transition, [&](const TransitionOrder& o) {
    const auto ours = transition_from("hotbunk", training_sleeps(o), s.rollout.sleep);
    return o != own && (!ours || *ours != o);
  });
}

}  // namespace hotbunk
