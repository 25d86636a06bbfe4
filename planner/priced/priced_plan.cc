#include "planner/priced/priced_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/format.h"
#include "graph/verify.h"
#include "layout/train_mesh.h"
#include "lowering/lower.h"
#include "lowering/rollout.h"
#include "lowering/sample_rows.h"
#include "lowering/sleep.h"
#include "planner/rl/engine_step.h"

namespace hotbunk {
namespace {

std::int64_t whole_bytes(double bytes) { return std::llround(std::ceil(std::max(bytes, 0.0))); }

/// So many seconds and bytes for so many tokens, in proportion.
std::vector<PricePoint> per_token(double tokens, double seconds, double payload_bytes = 0.0) {
  const auto n = std::max<std::int64_t>(1, std::llround(tokens));
  return {{.tokens = 0}, {.tokens = n, .seconds = seconds, .payload_bytes = payload_bytes}};
}
/// Whatever the sizes.
std::vector<PricePoint> always(double seconds, double payload_bytes = 0.0) {
  return {{.seconds = seconds, .payload_bytes = payload_bytes}};
}

/// Batches at which a step of an engine is priced; between them prices are interpolated.
std::vector<std::int64_t> batches_up_to(std::int64_t most) {
  std::vector<std::int64_t> out;
  for (std::int64_t n = 1; n < most; n += n < 64 ? 1 : 8) out.push_back(n);
  out.push_back(std::max<std::int64_t>(most, 1));
  return out;
}

constexpr std::array exchanged = {StepPart::reduce,  StepPart::dispatch, StepPart::experts_reduce,
                                  StepPart::context, StepPart::logits,   StepPart::arrival,
                                  StepPart::hops};
double exchanged_seconds(const StepParts& parts) {
  double out = 0.0;
  for (const StepPart p : exchanged) out += parts.of(p).seconds;
  return out;
}

constexpr std::string_view wake_work = "wake_work";  // a phase that maps what training works in

class Writer {
 public:
  Writer(const ScenarioPricer& pricer, const RlPoint& point)
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

void Writer::add_families() {
  const TrainLayout& l = scenario_.train.layout;
  const std::int64_t world = point_.gpus();
  std::vector<Rank> all;
  for (std::int64_t r = 0; r < world; ++r) all.push_back(static_cast<Rank>(r));
  const Mesh mesh = train_mesh(l);
  const auto along = [&](const char* name, const std::vector<std::string>& axes) {
    GroupFamily f{name, {}};
    for (const auto& group : mesh.groups(axes)) f.groups.emplace_back(group.begin(), group.end());
    plan_.groups.push_back(std::move(f));
  };
  plan_.groups.push_back({"world", {all}});
  along("train_tp", {"tp"});
  along("train_cp", {"cp"});
  along("train_pp", {"pp"});
  along("train_data", {"cp", "dp"});
  if (!point_.samples()) return;
  GroupFamily engines{"engine", {}};
  const std::int64_t first = world - (apart() ? point_.rollout.ranks() : world);
  const std::int64_t each = (world - first) / point_.rollout.engines;
  for (std::int64_t e = 0; e < point_.rollout.engines; ++e) {
    std::vector<Rank> members;
    for (std::int64_t i = 0; i < each; ++i)
      members.push_back(static_cast<Rank>(first + rank_of_seat(scenario_.rollout.layout, {e, i})));
    engines.groups.push_back(std::move(members));
  }
  plan_.groups.push_back(std::move(engines));
}

GroupId Writer::family(std::string_view name) const {
  const auto found = std::ranges::find(plan_.groups, name, &GroupFamily::name);
  HB_CHECK(found != plan_.groups.end(), "no family '{}'", name);
  return static_cast<GroupId>(found - plan_.groups.begin());
}

/// Of the job's phases those that have a price; PPO's critic beside them. Where nothing of training wakes, what it
/// works in is taken in a phase of its own, when the rollout has given back what it had.
void Writer::add_phases() {
  bool rolled_out = false, wakes = false;
  for (const JobPhase& p : JobPhases(scenario_)) {
    if (rolled_out && !wakes && is_training(p.phase))
      plan_.phases.push_back({std::string(wake_work), When::iteration}), wakes = true;
    rolled_out |= p.phase == PlanPhase::rollout;
    wakes |= rolled_out && p.wakes.any();
    if (p.phase == PlanPhase::checkpoint || p.phase == PlanPhase::export_) continue;
    if (p.phase == PlanPhase::exchange && !setting().own_engine) continue;
    if (p.phase == PlanPhase::train && setting().critic)
      for (const char* name : {"values", "critic"}) plan_.phases.push_back({name, When::iteration, true});
    plan_.phases.push_back(p.info());
  }
}

/// Trainer and engines meet in the samples and in the weights. On policy the engines wait for the weights of each
/// training; where their weights may be older, they roll out what comes next beside it.
void Writer::add_phases_apart() {
  plan_.roles = {"trainer", "engines"};
  const std::vector<Player> trainer = {{.role = 0}}, engines = {{.role = 1}}, both = {{.role = 0}, {.role = 1}};
  const auto add = [&](PlanPhase p, const std::vector<Player>& players) {
    plan_.phases.push_back({std::string(name_of(p)), when_of(p), is_driven(p), 1, players});
  };
  add(PlanPhase::load, trainer);
  add(PlanPhase::start_rollout, engines);
  const auto sync = [&] {
    add(PlanPhase::sync, both);
    plan_.phases.back().every = static_cast<std::int32_t>(scenario_.sync.every);
  };
  if (!setting().overlaps) sync();
  add(PlanPhase::rollout, engines);
  plan_.phases.push_back({"samples", When::iteration, false, 1, both});
  if (setting().overlaps) sync();
  if (setting().reference) add(PlanPhase::reference, trainer);
  if (setting().old_logprobs) add(PlanPhase::old_logprobs, trainer);
  if (setting().critic)
    for (const char* name : {"values", "critic"}) plan_.phases.push_back({name, When::iteration, true, 1, trainer});
  add(PlanPhase::train, trainer);
}

Op& Writer::priced(OpKind kind, StreamId stream, std::string name, const std::vector<BufferId>& work,
                   std::vector<PricePoint> prices) {
  std::vector<Tensor> touched;
  for (BufferId id : work)
    if (id >= 0) touched.push_back(b().whole(id));
  Op& op = b().emit(kind, stream, std::move(name), {}, std::move(touched));
  op.prices = std::move(prices);
  return op;
}

void Writer::communicate(OpKind kind, StreamId stream, std::string_view group, std::string name,
                         const std::vector<BufferId>& work, std::vector<PricePoint> prices) {
  if (std::ranges::all_of(prices, [](const PricePoint& p) { return p.seconds <= 0.0 && p.payload_bytes <= 0.0; }))
    return;
  priced(kind, stream, std::move(name), work, std::move(prices)).group = family(group);
}

/// A part of training or of the rollout; with a copy on the host where it sleeps there.
void Writer::keep(std::vector<Backup>& to, const char* name, double size, Category category, SectionId device,
                  std::optional<SectionId> host) {
  if (size <= 0.0) return;
  const BufferId buffer = bytes(name, size, category, device);
  to.push_back({buffer, host ? bytes(fmt::format("host.{}", name), size, category, *host) : -1});
}

void Writer::add_train_buffers(const SleepParts& sleepers) {
  const auto host = [](bool sleeps, SectionId section) { return sleeps ? std::optional(section) : std::nullopt; };
  keep(shifts_.params, "train.params", train_.params, Category::params, sections::train_params,
       host(sleepers.params, sections::host_params));
  for (const auto& [name, size] :
       {std::pair("train.optimizer", train_.optimizer), std::pair("train.critic", train_.critic)})
    keep(shifts_.moments, name, size, Category::optimizer, sections::train_optimizer,
         host(sleepers.moments, sections::host_optimizer));
  keep(shifts_.reference, "train.reference", train_.reference, Category::params, sections::train_reference,
       host(sleepers.reference, sections::host_reference));
  if (train_.swapped_reference > 0.0)
    host_reference_ = bytes("host.reference", train_.swapped_reference, Category::params, sections::host_resident);
  if (const double rest = train_.host_bytes - train_.swapped_reference; rest >= 1.0)
    host_state_ = bytes("host.train", rest, Category::optimizer, sections::host_resident);
}

/// What a trainer's process holds beside its context, where the plan's overhead is of both roles.
void Writer::add_communicators() {
  const double bytes_beside = step_.overhead_bytes - model_.framework().context_bytes.value;
  if (bytes_beside >= 1.0)
    communicators_ = bytes("train.communicators", bytes_beside, Category::overhead, sections::train_params);
}

void Writer::add_rollout_buffers(const SleepParts& sleepers) {
  const bool backed_up = sleepers.weights && scenario_.rollout.sleep_level == 1;
  keep(shifts_.weights, "rollout.weights", rollout_.weight_bytes, Category::params, sections::rollout_weights,
       backed_up ? std::optional(sections::host_weights) : std::nullopt);
  shifts_.kv = bytes("rollout.kv_cache", rollout_.pool_bytes, Category::kv_cache, sections::kv_cache);
}

void Writer::load(std::int32_t phase) {
  b().begin_block(phase, "load");
  for (SectionId s :
       {sections::train_params, sections::train_optimizer, sections::train_reference, sections::host_resident})
    b().map(s);
  if (shifts_.keeps_host)
    for (SectionId s :
         {sections::host_params, sections::host_optimizer, sections::host_reference, sections::host_weights})
      b().map(s);
  for (const auto* part : {&shifts_.params, &shifts_.moments, &shifts_.reference})
    for (const Backup& m : *part) b().alloc(m.device);
  for (BufferId id : {host_state_, host_reference_})
    if (id >= 0) b().alloc(id, streams::host);
  if (communicators_ >= 0) b().alloc(communicators_);
  priced(OpKind::priced, streams::compute, "load", {}, always(0.0)).outputs = state();
}

/// Engines on GPUs of their own: what they hold never sleeps.
void Writer::start(std::int32_t phase) {
  b().begin_block(phase, "start");
  b().map(sections::rollout_weights);
  b().map(sections::kv_cache);
  for (const Backup& m : shifts_.weights) b().alloc(m.device);
  b().alloc(shifts_.kv);
  priced(OpKind::priced, streams::compute, "start", {}, always(0.0)).outputs = all_of(shifts_.weights, &Backup::device);
}

/// Finished samples reach the trainer.
void Writer::samples(std::int32_t phase) {
  b().begin_block(phase, "samples");
  b().emit(OpKind::barrier, streams::control, "samples", {}, {}).group = family("world");
}

/// Training's persistent buffers on the device.
std::vector<Tensor> Writer::state() {
  std::vector<Tensor> out;
  for (const auto* part : {&shifts_.params, &shifts_.moments, &shifts_.reference})
    for (const Backup& m : *part) out.push_back(b().whole(m.device));
  return out;
}

/// Staging stands for the whole of it. Bytes move while requests and casts of other buckets run; the closed form adds
/// them up, and so do these ops, one behind the other.
void Writer::sync(std::int32_t phase, bool from_host, Part part) {
  b().begin_block(phase, "sync");
  b().begin_call("sync", "sync.");
  const double host_staging = from_host ? std::min(point_.bucket_bytes, train_.params) : 0.0;
  const BufferId staging =
      b().transient("sync.buckets", DType::u8, whole_bytes(staging_ + host_staging), Category::communication);
  if (part.trains) {
    if (const double up = model_.cost().node_copy_seconds(train_.streamed_source); up > 0.0)
      priced(OpKind::priced, streams::h2d, "sync.stream_source", {staging}, always(up));
    if (from_host)
      priced(OpKind::priced, streams::h2d, "sync.upload", {staging},
             always(model_.cost().host_copy_seconds(train_.params)));
    compute("sync.requests", {staging},
            always(sync_.start + sync_.tensors + sync_.buckets + sync_.packing + sync_.hashing + sync_.quantizing));
  }
  communicate(OpKind::all_gather, streams::gather, "world", "sync.gather", {staging},
              always(sync_.moving, sync_.bytes_received));
  Op& load = priced(OpKind::priced, streams::compute, "sync.load", {staging}, always(0.0));
  if (part.trains) load.inputs = all_of(shifts_.params, from_host ? &Backup::host : &Backup::device);
  if (part.serves)
    for (const Tensor& t : all_of(shifts_.weights, &Backup::device)) load.outputs.push_back(t);
}

std::vector<Tensor> Writer::all_of(const std::vector<Backup>& part, BufferId Backup::*side) {
  std::vector<Tensor> out;
  for (const Backup& m : part) out.push_back(b().whole(m.*side));
  return out;
}

void Writer::rollout(std::int32_t phase) {
  const RolloutPoint& r = point_.rollout;
  const EngineStep engine(rl_, r);
  const double held = std::max(1.0, rl_.held_tokens());
  RolloutStage only;  // of an engine without stages
  each_stage(model_.model(), setting().engine, 1, [&](const RolloutStage& s, std::int64_t) { only = s; });
  const auto block = [&](const char* name, auto&& steps) {
    b().begin_block(phase, name);
    b().begin_call(fmt::format("rollout.{}", name), fmt::format("{}.", name));
    const BufferId work = b().transient(fmt::format("{}.activations", name), DType::u8,
                                        whole_bytes(rollout_.activation_bytes), Category::activations);
    const BufferId communicators = b().transient(fmt::format("{}.communicators", name), DType::u8,
                                                 whole_bytes(rl_.communicators(r)), Category::overhead);
    steps(std::vector<BufferId>{work, communicators});
  };
  // A token's pairs are the keys that it sees: a decode step of n sequences has n times the held ones.
  block("prefill", [&](const std::vector<BufferId>& work) {
    const double share = setting().prefix_shared ? 1.0 / std::max(setting().samples, 1.0) : 1.0;
    std::vector<PricePoint> computes, sends;
    const std::int64_t most = prefill_budget(scenario_);
    for (std::int64_t n = std::min<std::int64_t>(64, most);; n = std::min(2 * n, most)) {
      const double tokens = std::max(1.0, static_cast<double>(n) * share);
      const double sequences = std::max(1.0, static_cast<double>(n) / std::max(setting().prompt_tokens, 1.0));
      double slowest = 0.0, sent = 0.0;
      each_stage(model_.model(), setting().engine, r.pp, [&](const RolloutStage& s, std::int64_t) {
        const StepParts parts = engine.prefill<StepParts>(s, tokens, sequences);
        if (parts.total > slowest) slowest = parts.total, sent = exchanged_seconds(parts);
      });
      computes.push_back({.tokens = n, .seconds = slowest - sent});
      sends.push_back(
          {.tokens = n,
           .seconds = sent,
           .payload_bytes = engine.payload(only, tokens, tokens / static_cast<double>(r.cp), tokens).reduce});
      if (n >= most) break;
    }
    Op& op = priced(OpKind::priced, streams::compute, "prefill.layers", work, std::move(computes));
    op.inputs = all_of(shifts_.weights, &Backup::device);
    add_pool(op);
    communicate(OpKind::all_reduce, streams::tensor, "engine", "prefill.reduce", work, std::move(sends));
  });
  block("decode", [&](const std::vector<BufferId>& work) {
    std::vector<PricePoint> computes, sends;
    for (const std::int64_t n : batches_up_to(std::llround(rollout_.slots))) {
      const auto sequences = static_cast<double>(n);
      const double near = 0.5 * held, far = 1.5 * held;
      const double at_near = rl_.decode_round(r, sequences, near).seconds(),
                   at_far = rl_.decode_round(r, sequences, far).seconds();
      const double per_pair = (at_far - at_near) / (sequences * (far - near));
      const double sent = r.pp == 1 ? exchanged_seconds(engine.decode<StepParts>(only, sequences, held)) : 0.0;
      computes.push_back({.tokens = n,
                          .seconds = std::max(0.0, at_near - per_pair * sequences * near - sent),
                          .seconds_per_pair = per_pair});
      sends.push_back(
          {.tokens = n, .seconds = sent, .payload_bytes = engine.payload(only, sequences, sequences, 0.0).reduce});
    }
    priced(OpKind::priced, streams::compute, "decode.layers", work, std::move(computes)).inputs =
        all_of(shifts_.weights, &Backup::device);
    communicate(OpKind::all_reduce, streams::tensor, "engine", "decode.reduce", work, std::move(sends));
  });
}

/// The engine's pool as the scheduler counts it: blocks, and the bytes of one.
void Writer::add_pool(Op& op) {
  const double block = rollout_.kv_bytes_per_token * static_cast<double>(scenario_.rollout.block_tokens);
  const std::int64_t pool = b().buffer(shifts_.kv).bytes();
  const auto blocks = static_cast<std::int64_t>(static_cast<double>(pool) / std::max(block, 1.0) + 1e-6);
  op.outputs.push_back(
      b().view(shifts_.kv, DType::u8, {fixed(blocks), fixed(pool / std::max<std::int64_t>(blocks, 1))}));
}

/// Samples that all ranks learn, where our engine's come from many.
void Writer::exchange(std::int32_t phase) {
  b().begin_block(phase, "exchange");
  communicate(OpKind::all_gather, streams::control, "world", "exchange", {}, always(rollout_.exchange_seconds));
}

/// One forward pass over all micro-batches. A reference that lives on the host comes up first.
void Writer::passes(std::int32_t phase, std::string_view what, const TrainModel::Layers& layers, bool trained) {
  const ForwardSeconds seconds = rl_.forward_seconds(point_.train, layers, trained);
  const ForwardTraffic sent = model_.forward_traffic(point_.train, layers);
  const double times = setting().mini_batches;
  const auto part = [&](double of, double payload = 0.0) { return per_token(tokens(), times * of, times * payload); };
  b().begin_block(phase, "micro");
  b().begin_call(fmt::format("{}.micro", what), fmt::format("{}.", what));
  const auto named = [&](const char* name) { return fmt::format("{}.{}", what, name); };
  const double swapped = trained ? 0.0 : train_.swapped_reference;
  const std::vector<BufferId> work = {
      b().transient(named("weights"), DType::u8, std::max<std::int64_t>(whole_bytes(swapped), 64), Category::params)};
  if (swapped > 0.0)
    priced(OpKind::priced, streams::h2d, named("upload"), work,
           per_token(tokens(), model_.cost().host_copy_seconds(swapped)));
  communicate(OpKind::all_gather, streams::gather, "train_data", named("parameters"), work, part(seconds.gathers));
  compute(named("forward"), work, part(seconds.compute + seconds.bubble));
  communicate(tensor_kind(), streams::tensor, "train_tp", named("tensor"), work, part(seconds.tensor, sent.tensor));
  communicate(OpKind::all_to_all, streams::tensor, "train_data", named("expert"), work,
              part(seconds.expert, sent.expert));
  communicate(context_kind(), streams::tensor, "train_cp", named("context"), work, part(seconds.context, sent.context));
}

/// Gradients live from a step's first micro-batch to its end, what else a step works in for a micro-batch.
void Writer::optimizer_steps(std::int32_t phase, std::string_view what, const TrainPrice& price, double working) {
  const double step_tokens = tokens() / setting().mini_batches;
  const auto named = [&](const char* name) { return fmt::format("{}.{}", what, name); };
  const auto term = [&](Term t) { return price.seconds[static_cast<std::size_t>(t)]; };
  double left = working;
  const auto take = [&](double most) {
    const double taken = std::clamp(most, 0.0, left);
    left -= taken;
    return taken;
  };
  const BufferId grads = bytes(named("grads"), take(price.grad_bytes), Category::grads, sections::transient);
  b().begin_block(phase, "begin");
  b().alloc(grads);
  b().begin_block(phase, "micro");
  b().begin_call(named("micro"), named("micro."));
  std::vector<BufferId> work = {grads};
  for (const Category c : {Category::activations, Category::communication, Category::workspace})
    work.push_back(b().transient(fmt::format("{}.micro.{}", what, name_of(c)), DType::u8,
                                 whole_bytes(take(price.bytes[static_cast<std::size_t>(c)])), c));
  work.push_back(b().transient(named("micro.gathered"), DType::u8, whole_bytes(left), Category::params));
  const auto micro = [&](Term t) { return per_token(step_tokens, term(t)); };
  compute(named("micro.compute"), work, micro(Term::compute));
  if (term(Term::recompute) > 0.0) compute(named("micro.recompute"), work, micro(Term::recompute));
  communicate(tensor_kind(), streams::tensor, "train_tp", named("micro.tensor"), work,
              per_token(step_tokens, term(Term::tensor), price.tensor_payload));
  communicate(OpKind::all_to_all, streams::tensor, "train_data", named("micro.expert"), work,
              per_token(step_tokens, term(Term::expert), price.expert_payload));
  communicate(context_kind(), streams::tensor, "train_cp", named("micro.context"), work,
              per_token(step_tokens, term(Term::context), price.context_payload));
  b().begin_block(phase, "step");
  b().begin_call(named("step"), named("step."));
  // What a step waits for beyond its passes: nothing of it is a kernel.
  if (const double idle = term(Term::bubble) + term(Term::host); idle > 0.0)
    compute(named("step.bubble"), {grads}, always(idle));
  communicate(OpKind::all_gather, streams::tensor, "train_pp", named("step.pipeline"), {grads},
              always(term(Term::pipeline), price.pipeline_payload));
  // Parameters and gradients over the data ranks: the seconds of both that nothing hides, by what each moves.
  const double replicas = price.replica_payload,
               moved = price.data_reduce_payload + price.data_gather_payload + replicas;
  const auto share = [&](double payload) { return moved > 0.0 ? term(Term::data) * payload / moved : 0.0; };
  const bool replicated = point_.train.sharding == Sharding::replicated;
  communicate(replicated ? OpKind::all_reduce : OpKind::reduce_scatter, streams::reduce, "train_data",
              named("step.gradients"), {grads},
              always(moved > 0.0 ? share(price.data_reduce_payload) : term(Term::data), price.data_reduce_payload));
  communicate(OpKind::all_gather, streams::gather, "train_data", named("step.parameters"), {grads},
              always(share(price.data_gather_payload), price.data_gather_payload));
  communicate(OpKind::all_reduce, streams::reduce, "train_data", named("step.replicas"), {grads},
              always(share(replicas), replicas));
  Op& update =
      priced(OpKind::priced, streams::compute, named("step.optimizer"), {grads}, always(term(Term::optimizer)));
  for (const Tensor& t : state()) update.outputs.push_back(t);
  b().free(grads);
}

/// A phase in which training's side works.
void Writer::train_phase(std::string_view name, std::int32_t phase) {
  const double working = std::max(0.0, train_.total_bytes - train_.params - train_.optimizer - train_.critic -
                                           train_.reference - train_.overhead_bytes);
  if (name == "reference") passes(phase, name, layers_, false);
  else if (name == "old_logprobs") passes(phase, "old", layers_, true);
  else if (name == "values") passes(phase, name, rl_.critic_layers(point_.train, layers_), true);
  else if (name == "train") optimizer_steps(phase, name, step_, working);
  if (name != "critic") return;
  const TrainPrice t = model_.price(point_.train, rl_.critic_layers(point_.train, layers_));
  optimizer_steps(phase, name, t, std::max(0.0, t.peak_bytes - (t.state_bytes - t.grad_bytes)));
}

/// Of a role, or of both in one.
Program Writer::program(Part part) {
  builder_.emplace(plan_.phases);
  shifts_ = {.params = {}, .moments = {}, .reference = {}, .weights = {}, .keeps_host = !setting().own_engine};
  host_state_ = host_reference_ = communicators_ = -1;
  if (apart() && part.trains) add_communicators();
  const JobPhases phases = apart() ? JobPhases() : JobPhases(scenario_);
  if (part.trains) add_train_buffers(phases.sleepers());
  if (part.serves && point_.samples()) add_rollout_buffers(phases.sleepers());
  for (std::size_t i = 0; i < plan_.phases.size(); ++i) {
    const std::string& name = plan_.phases[i].name;
    const auto phase = static_cast<std::int32_t>(i);
    const JobPhase* const shift = phases.find(phase_named(name));
    if (part.trains && name == "load") load(phase);
    else if (name == "sync") sync(phase, shift && shift->from_host, part);
    else if (part.serves && name == "rollout") rollout(phase);
    else if (part.serves && apart() && name == "start_rollout") start(phase);
    else if (name == "samples") samples(phase);
    else if (name == wake_work) b().begin_block(phase, "work");
    else if (name == "exchange") exchange(phase);
    else if (shift && is_transition(shift->phase)) lower_transition(b(), shifts_, *shift, phase);
    else if (part.trains) train_phase(name, phase);
  }
  Draft draft = std::move(b().draft());
  run_passes(plan_, draft);
  return finish(plan_, std::move(draft), apart() || nothing_sleeps(scenario_));
}

PricedJob Writer::write() {
  plan_.scenario = scenario_.name;
  plan_.chunk_bytes = scenario_.cluster.gpu.is_cpu ? std::int64_t{4} << 10 : std::int64_t{2} << 20;
  plan_.device_capacity_bytes = std::llround(setting().device_bytes);
  plan_.host_capacity_bytes =
      scenario_.cluster.host_memory_bytes / std::max<std::int64_t>(1, scenario_.cluster.ranks_per_node());
  plan_.overhead_bytes = whole_bytes(apart() ? model_.framework().context_bytes.value : step_.overhead_bytes);
  plan_.streams = plan_streams();
  add_families();
  plan_.program_of_rank.assign(static_cast<std::size_t>(point_.gpus()), 0);
  if (apart()) {
    add_phases_apart();
    std::fill(plan_.program_of_rank.begin() + point_.train.ranks(), plan_.program_of_rank.end(), 1);
    plan_.programs = {program({.trains = true, .serves = false}), program({.trains = false, .serves = true})};
    plan_.programs[1].role = 1;
  } else {
    add_phases();
    plan_.programs = {program({})};
  }
  return {std::move(scenario_), std::move(plan_)};
}

}  // namespace

Result<PricedJob> priced_job(const ScenarioPricer& pricer) {
  const RlPoint point = pricer.point();
  if (auto why = pricer.why_unpriced(point)) return fail(std::move(*why));
  if (point.samples())
    if (const RolloutPrice rollout = pricer.rl().parts(point).rollout; !rollout.fits)
      return fail(Diagnostic{
          .code = "E302",
          .message = "the rollout has no room for its weights and one sequence's KV cache",
          .where = {},
          .notes = {fmt::format("weights of a rank take {}, {} more are needed than rollout.memory_fraction {} leaves",
                                format_bytes(rollout.weight_bytes), format_bytes(rollout.lacking_bytes),
                                pricer.scenario().rollout.memory_fraction)},
          .help = "raise rollout.layout.tp or rollout.memory_fraction, or lower workload.response_tokens.max"});
  PricedJob job = Writer(pricer, point).write();
  const std::vector<std::string> faults = verify(job.plan);
  HB_CHECK(faults.empty(), "a priced plan does not verify: {}", fmt::join(faults, "; "));
  return job;
}

}  // namespace hotbunk
