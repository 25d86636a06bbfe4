#include "planner/answers/trees.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/format.h"
#include "planner/answers/nodes.h"
#include "planner/answers/rollout_tree.h"
#include "spec/names.h"

namespace hotbunk {
namespace {

constexpr std::string_view why_of(Category c) {
  switch (c) {
    case Category::params:
      return "low-precision parameters, and units gathered around the peak";
    case Category::grads:
      return "gradients as reduced and accumulated";
    case Category::optimizer:
      return "master copy and moments, sharded over data parallelism where the engine does that";
    case Category::activations:
      return "what backward keeps, and the logits at the loss";
    case Category::communication:
      return "pipeline and sequence-parallel buffers";
    case Category::workspace:
      return "libraries' buffers";
    case Category::overhead:
      return "context and communicators, outside of the allocator";
    default:
      return "";
  }
}

CostNode training_bytes(const ScenarioPricer& s, const RlPoint& p, const RlPrice& price, const TrainPrice& train,
                        const RlModel::Parts& of) {
  const TrainModel::Layers l = s.train().layers(p.train);
  const double flight = s.train().in_flight(p.train, s.train().fullest_stage(p.train, l));
  CostNode out{"train",
               fmt::format("{:.4g} micro-batch{} in flight on the fullest stage, at the loss or in backward", flight,
                           flight > 1 ? "es" : ""),
               price.train_bytes,
               0,
               {}};
  const std::vector<PeakPart> parts = s.train().peak_parts(p.train, l);
  for (int c = 0; c < num_categories; ++c) {
    const double bytes = train.bytes[static_cast<std::size_t>(c)];
    if (bytes <= 0) continue;
    CostNode category =
        bytes_of(std::string(name_of(static_cast<Category>(c))), bytes, std::string(why_of(static_cast<Category>(c))));
    for (const PeakPart& part : parts)
      if (part.category == static_cast<Category>(c))
        category.children.push_back(bytes_of(std::string(name_of(part.tensor)), part.bytes, part.why));
    out.children.push_back(std::move(category));
  }
  const double rest = price.train_bytes - train.total_bytes();
  if (rest <= 0.5) return out;
  const double reference = of.train.reference, beside = of.train.total_bytes - train.total_bytes() - reference;
  out.children.push_back(
      node_of("beside it", "what else is on the device", rest, 0,
              {bytes_of("reference model", reference), bytes_of("critic", beside),
               bytes_of("log-prob passes, beyond training", of.train.fullest_bytes() - of.train.total_bytes),
               bytes_of("rollout, awake", price.train_bytes - of.train.fullest_bytes())}));
  return out;
}

/// What stays of a moment of the shifts, beside contexts and communicators.
CostNode shift_moment(std::string name, std::string why, const ShiftMoment& m, double overhead, double bytes) {
  why += fmt::format(", in {}", hotbunk::name_of(m.at));
  return node_of(std::move(name), std::move(why), bytes, 0,
                 {bytes_of("training's parameters", m.params, "the shards that the sync reads"),
                  bytes_of("training's other state", m.optimizer,
                           "moments, master copies beside the shards, a critic, a reference"),
                  bytes_of("rollout's weights", m.weights), bytes_of("kv_cache", m.kv),
                  bytes_of("captured graphs", m.graphs, "the engine's"),
                  bytes_of("training's communicators", m.communicators, "there with its parameters and for a sync"),
                  bytes_of("buckets", m.staging, "the sync's staging"),
                  bytes_of("overhead", overhead, std::string(why_of(Category::overhead)))});
}

/// The two sides of a disaggregated sync: the fuller one and the buckets.
CostNode sync_apart(const RlModel& rl, const RlPoint& p, const RlModel::Parts& of, double bytes) {
  const double staging = rl.staging_bytes(p, of.sync), fuller = bytes - staging;
  const RolloutPrice& r = of.rollout;
  const double generating = r.weight_bytes + r.pool_bytes + r.activation_bytes;
  const bool rollout =
      fuller > of.train.params + of.train.optimizer + of.train.critic + of.train.reference + of.train.overhead_bytes;
  CostNode side =
      rollout ? node_of("rollout's GPU", "the fuller side", fuller, 0,
                        {bytes_of("weights", r.weight_bytes), bytes_of("kv_cache", r.pool_bytes),
                         bytes_of("activations", r.activation_bytes), bytes_of("overhead", fuller - generating)})
              : node_of("trainer's GPU", "the fuller side", fuller, 0,
                        {bytes_of("parameters", of.train.params), bytes_of("other state", of.train.optimizer),
                         bytes_of("critic", of.train.critic), bytes_of("reference model", of.train.reference),
                         bytes_of("overhead", of.train.overhead_bytes)});
  return node_of("sync", "the fuller of both sides and the buckets", bytes, 0,
                 {std::move(side), bytes_of("buckets", staging)});
}

/// What stages and context ranks do to an engine's slices.
std::string slice_note(const RolloutPoint& r) {
  return r.pp > 1 ? fmt::format("the engine's slice in the fullest of {} stages", r.pp) : "the engine's slice";
}
std::string cache_note(const RlSetting& s, const RolloutPoint& r) {
  if (s.cache_element_bytes != s.rollout_element_bytes) {
    RlSetting alike = s;
    alike.cache_element_bytes = alike.rollout_element_bytes;
    return fmt::format(", {:.0f} B a number{}", s.cache_element_bytes, cache_note(alike, r));
  }
  if (r.cp == 1) return "";
  return cache_shares(s.engine, r) > static_cast<double>(r.attention_dp)
             ? fmt::format(", a sequence's divided among {} cp ranks", r.cp)
             : fmt::format(", whole on each of {} cp ranks ({} divides prompts alone)", r.cp, name_of(s.engine));
}

CostNode rollout_bytes(const ScenarioPricer& s, const RlPoint& p, const RlPrice& price, const RlModel::Parts& of) {
  const RolloutPrice& r = of.rollout;
  const double own = r.weight_bytes + r.pool_bytes + r.activation_bytes, left = price.rollout_bytes - own;
  const double communicators = s.rl().communicators(p.rollout), graphs = s.rl().graphs();
  const double context =
      p.placement == PlacementMode::colocated ? of.train.overhead_bytes : s.train().framework().context_bytes.value;
  const RlSetting& set = s.rl().setting();
  // Where the engine lacks room, what it lacks is no state of training's.
  double awake = left - context - communicators - graphs, lacking = 0.0;
  if (!r.fits) {
    const double rest = p.placement == PlacementMode::colocated
                            ? price_shift(p.transition, s.rl().shift_bytes(p, of.train, r, 0.0)).rollout_rest
                            : 0.0;
    lacking = std::max(0.0, awake - rest), awake = std::min(awake, rest);
  }
  CostNode weights = bytes_of("weights", r.weight_bytes, slice_note(p.rollout));
  if (const double narrow = s.rl().narrow_bytes(p.rollout); narrow > 0.0)
    weights.children = {
        bytes_of(
            "of products", narrow,
            fmt::format("{}, {:.5g} B an element with its scales", set.weights.products, set.weights.stored_bytes)),
        bytes_of("other weights", r.weight_bytes - narrow,
                 fmt::format("embedding, head, norms, biases, router: {}", name_of(set.rollout_dtype)))};
  return node_of(
      "rollout", "while the engine generates", price.rollout_bytes, 0,
      {std::move(weights),
       bytes_of("kv_cache", r.pool_bytes,
                fmt::format("{} per token and rank{}", format_bytes(r.kv_bytes_per_token), cache_note(set, p.rollout))),
       bytes_of("activations", r.activation_bytes, "of one prefill step"),
       node_of("beside the engine", p.sleeps() ? "of what sleeps only contexts" : "", left, 0,
               {bytes_of("training's state", awake, "awake"),
                bytes_of("contexts and communicators", context + communicators),
                bytes_of("captured graphs", graphs, "the engine's decode steps"),
                bytes_of("not there", lacking,
                         r.start_lacking_bytes > 0 ? "what the engine asks for at its start beyond what is free"
                                                   : "of what one sequence of the longest length needs")})});
}

/// The pipeline's schedule as it is priced, which with too few chunks is not the one that was asked for.
std::string schedule_of(const std::string& asked, const TrainPoint& p) {
  if (p.pp == 1) return {};
  if (asked == "zero-bubble") return "schedule zero-bubble (ZB-H1)";
  const std::string chunks = p.vpp > 1 ? fmt::format(" in {} chunks a stage", p.vpp) : std::string();
  if (asked == "gpipe") return fmt::format("schedule gpipe{}: every micro-batch is kept", chunks);
  if (p.vpp > 1) return "schedule interleaved 1f1b" + chunks;
  return asked == "interleaved" ? "schedule 1f1b: interleaved asks for a vpp of 2 or more" : "schedule 1f1b";
}

std::vector<CostNode> forward_parts(const RlModel& rl, const RlModel::Scoring& by, bool trained) {
  const ForwardSeconds f = rl.forward_seconds(by, trained);
  const double times = rl.setting().mini_batches;
  std::vector<CostNode> out = {seconds_of("compute", times * f.compute),
                               seconds_of("tensor", times * f.tensor),
                               seconds_of("expert", times * f.expert),
                               seconds_of("context", times * f.context),
                               seconds_of("bubble", times * f.bubble, "of filling the pipeline"),
                               seconds_of("data", times * f.gathers, "gathers that no pass hides")};
  if (by.point.pp > 1) out.push_back(seconds_of("pipeline", times * f.sends, "between stages"));
  return out;
}

std::vector<CostNode> train_parts(const TrainPrice& train, double times) {
  std::vector<CostNode> out;
  for (std::size_t t = 0; t < num_terms; ++t)
    out.push_back(seconds_of(std::string(name_of(static_cast<Term>(t))), times * train.seconds[t]));
  return out;
}

std::vector<CostNode> sync_parts(const RlSetting& set, SyncMechanism mechanism, const SyncPrice& sync, double staging,
                                 double from_host) {
  const std::string quantizing = mechanism == SyncMechanism::shard_to_shard ? "each rank its slice, once it has it"
                                 : set.engine == RolloutEngine::sglang
                                     ? "by the trainers behind the gather, whole tensors: sglang loads narrow ones"
                                     : "by the engines out of wide whole tensors that they are handed";
  const double n = set.sync_every;  // iterations that share one
  return {seconds_of("start", sync.start / n),
          seconds_of("bytes", sync.moving / n, "on the slowest of the stages that run at the same time"),
          seconds_of("packing", sync.packing / n, "casts and copies into buckets and out of them"),
          seconds_of("tensors", sync.tensors / n, "requests and handles of each"),
          seconds_of("buckets", sync.buckets / n, "requests and handles of each"),
          seconds_of("hashes", sync.hashing / n, "of both sides"),
          seconds_of("quantisation", sync.quantizing / n, quantizing),
          seconds_of("adapters", sync.merging / n, "gathered, and merged into their matrices"),
          seconds_of("cleanup", sync.cleanup / n, "the trainers' processes collect Python's garbage around it"),
          seconds_of("device memory", staging, "taken for buckets"),
          seconds_of("parameters from the host", from_host)};
}

std::vector<CostNode> shift_parts(const ShiftSeconds& s, bool down) {
  return {seconds_of("copies", s.copies, down ? "to the host" : "from the host"),
          seconds_of("device memory", s.device, down ? "given back" : "taken"),
          seconds_of("host memory", s.host, down ? "taken" : "given back")};
}

}  // namespace

CostNode memory_tree(const ScenarioPricer& s, const RlPoint& p, const RlPrice& price, const TrainPrice& train) {
  CostNode root{"device memory of the fullest rank", "the highest of the moments below", price.peak_bytes(), 0, {}};
  const bool sampled = s.scenario().algorithm.name != AlgorithmName::sft;
  const RlModel::Parts of = sampled ? s.rl().parts(p) : RlModel::Parts{};
  root.children.push_back(training_bytes(s, p, price, train, of));
  if (!sampled) return root;
  root.children.push_back(rollout_bytes(s, p, price, of));
  if (p.placement == PlacementMode::disaggregated) {
    root.children.push_back(sync_apart(s.rl(), p, of, price.sync_bytes));
    return root;
  }
  const ShiftBytes bytes = s.rl().shift_bytes(p, of.train, of.rollout, s.rl().staging_bytes(p, of.sync));
  const double overhead = of.train.overhead_bytes;
  root.children.push_back(shift_moment("sync", "the fullest moment from training to the rollout",
                                       fullest_moment(p.transition, bytes, false), overhead, price.sync_bytes));
  if (price.wake_bytes > 0)
    root.children.push_back(shift_moment("wake", "and from the rollout back to training",
                                         fullest_moment(p.transition, bytes, true), overhead, price.wake_bytes));
  return root;
}

CostNode time_tree(const ScenarioPricer& s, const RlPoint& p, const RlPrice& price, const TrainPrice& train) {
  CostNode root{"iteration", "", 0, price.iteration_seconds, {}};
  const RlModel& rl = s.rl();
  const double passes = rl.setting().mini_batches;
  const auto add = [&](RlPhase phase, const std::string& why, std::vector<CostNode> parts) {
    const double seconds = price.seconds[static_cast<std::size_t>(phase)];
    if (seconds > 0) root.children.push_back(node_of(std::string(name_of(phase)), why, 0, seconds, std::move(parts)));
  };
  const std::string schedule = schedule_of(s.scenario().train.pipeline_schedule, p.train);
  if (s.scenario().algorithm.name == AlgorithmName::sft) {
    add(RlPhase::train, schedule, train_parts(train, passes));
    return root;
  }
  const RlModel::Parts of = rl.parts(p);
  const TrainModel::Layers l = s.train().layers(p.train), critic = rl.critic_layers(p.train, l);
  std::vector<CostNode> reference = forward_parts(rl, rl.scoring(p.train, l), false);
  if (of.train.swapped_reference > 0)
    reference.push_back(seconds_of("host", s.train().cost().host_copy_seconds(of.train.swapped_reference),
                                   "the model from host memory"));
  add(RlPhase::rollout, "", rollout_nodes(rl, p, of.rollout));
  const ShiftBytes held = rl.shift_bytes(p, of.train, of.rollout, rl.staging_bytes(p, of.sync));
  const ShiftShape shape(p.transition);
  const ShiftPrice shift = shape.price(held);
  const ShiftsSeconds shifts = rl.shifts_seconds(p.rollout, shape, shift, held, of.train, of.rollout);
  const double from_host =
      s.train().cost().node_copy_seconds(of.train.streamed_source) / rl.setting().sync_every + shifts.uploads;
  add(RlPhase::sync, "", sync_parts(rl.setting(), p.sync, of.sync, shifts.staging, from_host));
  add(RlPhase::sleep, "", shift_parts(shifts.sleep, true));
  add(RlPhase::wake, "", shift_parts(shifts.wake, false));
  const char* const beside = "on GPUs of its own, beyond what the actor does meanwhile";
  if (rl.setting().reference_apart) add(RlPhase::reference, beside, {});
  else add(RlPhase::reference, "", std::move(reference));
  std::vector<CostNode> old = forward_parts(rl, rl.scoring(p.train, l), true);
  old.push_back(seconds_of("driver", rl.driver_seconds(),
                           "the process that drives the workers, for every token of the batch padded to the longest"));
  add(RlPhase::old_logprobs, "", std::move(old));
  if (rl.setting().critic_apart) add(RlPhase::values, beside, {}), add(RlPhase::critic, beside, {});
  else add(RlPhase::values, "", forward_parts(rl, rl.scoring(p.train, l, true), true));
  if (rl.setting().critic && !rl.setting().critic_apart)
    add(RlPhase::critic, schedule, train_parts(s.train().price(p.train, critic), passes));
  add(RlPhase::train, schedule, train_parts(train, passes));
  const double each = s.train().framework().iteration_seconds.value;
  add(RlPhase::framework, "",
      {seconds_of("iteration", each, "data, verification, collation, hand-overs: fitted"),
       seconds_of("samples", rl.framework_seconds() - each, "rewards and advantages, one by one")});
  if (price.overlapped > 0)
    root.children.push_back(
        seconds_of("overlapped", -price.overlapped, "rollout and training side by side, one step off"));
  return root;
}

CostNode host_tree(const ScenarioPricer& s, const RlPoint& p, const RlPrice& price) {
  CostNode out = node_of("host", "a rank's share of its node", price.host_bytes, 0, {});
  if (!p.samples()) return out;
  const RlModel& rl = s.rl();
  const RlModel::Parts of = rl.parts(p);
  const FrameworkProfile& frame = s.train().framework();
  const double pinned = p.placement == PlacementMode::colocated ? of.rollout.pinned_bytes : 0.0;
  const char* const rounded = "the allocator of pinned memory takes the next power of two for each tensor";
  if (const double loading = rl.loading_bytes(p, of.rollout); loading >= price.host_bytes) {
    const bool engine = frame.engine_first && rl.setting().keeps_weights && p.placement == PlacementMode::colocated;
    const double slept = engine ? of.rollout.weight_bytes : 0.0;
    out.children = {bytes_of("whole models", loading - frame.host_process_bytes.value - slept - (engine ? pinned : 0.0),
                             "while a rank loads, before it keeps its part"),
                    bytes_of("the engine's weights", slept, "it started first, and sleeps"),
                    bytes_of("pinned beyond them", engine ? pinned : 0.0, rounded),
                    bytes_of("processes", frame.host_process_bytes.value, frame.host_process_bytes.source)};
    std::erase_if(out.children, [](const CostNode& part) { return part.bytes < 1.0; });
    return out;
  }
  double asleep = 0.0;
  if (p.placement == PlacementMode::colocated)
    asleep = price_shift(p.transition, rl.shift_bytes(p, of.train, of.rollout, 0.0)).asleep;
  const double optimizer =
      of.train.host_bytes - of.train.swapped_reference - of.train.host_copies - frame.host_process_bytes.value;
  for (CostNode& part : std::vector<CostNode>{
           bytes_of("asleep", asleep, "what waits while the other side has the device"),
           bytes_of("pinned beyond it", pinned, rounded),
           bytes_of("gradients asleep", p.sleeps() ? of.train.slept_gradients : 0.0, "buffers sleep with the rest"),
           bytes_of("optimizer on the CPUs", optimizer, "gradients, master copy and moments"),
           bytes_of("reference model", of.train.swapped_reference),
           bytes_of("pinned weights", of.train.host_copies, frame.host_weight_copies.source),
           bytes_of("processes", frame.host_process_bytes.value, frame.host_process_bytes.source)})
    if (part.bytes >= 1.0) out.children.push_back(std::move(part));
  return out;
}

}  // namespace hotbunk
