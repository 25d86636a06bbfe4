// Priced plans (planner/priced) beside the closed form that priced them: seconds of the phases as simulated, memory as
// the plan books it. Long for the cases, which share the draws and what compares.
#include <fmt/format.h>

#include <array>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "exec/length_driver.h"
#include "graph/plan_json.h"
#include "graph/verify.h"
#include "lowering/phases.h"
#include "planner/answers/link_bytes.h"
#include "planner/priced/priced_plan.h"
#include "sim/model_cost.h"
#include "sim/sim_backend.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "spec/validate.h"
#include "tests/drawn_numbers.h"
#include "tests/paths.h"
#include "tests/planner/played.h"
#include "trace/gpu_timeline.h"
#include "trace/static_memory.h"
#include "trace/summary.h"

using namespace hotbunk;

namespace {

/// Scenarios of every engine, profile and layout that is priced and not lowered, with fixed lengths: what the closed
/// form takes as a mean is one number here.
class PricedDraws : private test::DrawnNumbers {
 public:
  explicit PricedDraws(std::uint64_t seed) : DrawnNumbers(seed), variants_(seed + 1) {}

  std::string scenario() {
    struct System {
      const char *profile, *engine, *rollout;
      bool megatron;
    };
    const System system = of<System>({{"verl-fsdp", "fsdp1", "sglang", false},
                                      {"verl-fsdp", "fsdp2", "vllm", false},
                                      {"slime-fsdp", "fsdp2", "sglang", false},
                                      {"verl-megatron", "megatron", "vllm", true},
                                      {"nemo-megatron", "megatron", "vllm", true},
                                      {"torchtitan", "fsdp2", "vllm", false},
                                      {"slime-megatron", "megatron", "sglang", true},
                                      {"megatron", "zero1", "sglang", true},
                                      {"hotbunk", "ddp", "vllm", false},
                                      {"hotbunk", "zero2", "sglang", false}});
    const auto nodes = of<std::int64_t>({1, 1, 2, 4}), world = 8 * nodes;
    const bool apart = in(0, 4) == 0;  // engines on as many ranks of their own
    const bool moe = system.megatron && in(0, 3) == 0;
    const std::string model = moe ? "qwen3-30b-a3b" : of<std::string>({"qwen2.5-7b", "llama-3.1-8b", "qwen3-4b"});
    const auto tp = system.megatron ? of<std::int64_t>({1, 2, 4}) : 1,
               pp = system.megatron ? of<std::int64_t>({1, 2, 2, 4}) : 1, cp = of<std::int64_t>({1, 1, 2}),
               dp = world / (tp * pp * cp), ep = moe ? of<std::int64_t>({1, 2}) : 1;
    const auto engine_tp = of<std::int64_t>({1, 2, 4}), prompt = in(128, 1024), response = in(64, 512);
    const auto samples = of<std::int64_t>({4, 8}), mini_batches = of<std::int64_t>({1, 2});
    std::string text =
        fmt::format("name: drawn\nmodel: {}\ncluster: {{gpu: {}, nodes: {}, gpus_per_node: 8}}\nprofile: {}\n", model,
                    of<std::string>({"h100-sxm-80gb", "b200-sxm-180gb"}), apart ? 2 * nodes : nodes, system.profile);
    if (apart) text += "placement: disaggregated\n";
    const std::string schedule =
        pp > 1 ? of<std::string>({"1f1b", "1f1b", "interleaved", "gpipe", "zero-bubble"}) : "1f1b";
    constexpr std::array reshards = {"true", "false", "2", "4"};
    const bool cuts = !system.megatron && dp * cp > 8;  // hybrid shards: replicas of them
    text += fmt::format(
        "train: {{engine: {}, layout: {{dp: {}, fsdp: {}, tp: {}, pp: {}, vpp: {}, cp: {}, ep: {}, sp: {}}}, "
        "pipeline_schedule: "
        "{}, micro_batch_tokens: {}, recompute: {}, reshard_after_forward: {}, offload: {}}}\n",
        system.engine, dp, cuts && std::string_view(system.engine) != "ddp" ? of<std::int64_t>({-1, 8}) : -1, tp, pp,
        schedule == "interleaved" || (schedule == "zero-bubble" && variants_.in(0, 2) == 0) ? 2 : 1, cp, ep,
        tp > 1 ? of<std::string>({"true", "true", "false"}) : "false", schedule,
        (prompt + response) * of<std::int64_t>({2, 4, 8}), of<std::string>({"none", "selective", "full"}),
        std::string_view(system.engine) == "fsdp2" ? reshards[static_cast<std::size_t>(variants_.in(0, 3))] : "true",
        apart ? "none" : of<std::string>({"none", "sleep", "sleep"}));
    text += fmt::format(
        "rollout: {{engine: {}, layout: {{tp: {}, dp: {}, order: {}}}, max_running_requests: {}, sleep: {}, "
        "sleep_level: {}, memory_fraction: 0.7}}\n",
        system.rollout, engine_tp, world / engine_tp, of<std::string>({"contiguous", "strided", "auto"}),
        of<std::int64_t>({64, 256}), apart ? "false" : of<std::string>({"true", "true", "false"}), in(1, 2));
    if (!apart) text += fmt::format("transition: {}\n", of<std::string>({"hotbunk", "verl", "slime", "auto"}));
    text += fmt::format(
        "algorithm: {{name: {}, prompts: {}, samples_per_prompt: {}, mini_batches: {}, reference: {}, old_logprobs: "
        "{}, max_staleness: {}}}\n",
        in(0, 4) == 0 ? "ppo" : "grpo", world * of<std::int64_t>({2, 4}), samples, mini_batches, flag(), flag(),
        apart ? in(0, 3) : 0);
    return text + fmt::format(
                      "workload: {{prompt_tokens: {{mean: {0}, max: {0}, distribution: fixed}}, response_tokens: "
                      "{{mean: {1}, max: {1}, distribution: fixed}}}}\n",
                      prompt, response);
  }

 private:
  test::DrawnNumbers variants_;  // of what is drawn
  template <class T>
  T of(std::vector<T> values) {
    return values[static_cast<std::size_t>(in(0, std::ssize(values) - 1))];
  }
  std::string flag() { return of<std::string>({"true", "false"}); }
};

/// Live bytes of a rank at the closed form's moments, overhead included.
struct Moments {
  std::int64_t train = 0, rollout = 0, sync = 0, wake = 0;
};
Moments moments_of(const Plan& plan) {
  Moments out;
  bool rolled_out = false;
  std::map<std::int16_t, SpaceMemory::PhasePeak> peaks;
  for (std::size_t p = 0; p < plan.programs.size(); ++p) {
    const auto rank = static_cast<Rank>(std::ranges::find(plan.program_of_rank, static_cast<std::int32_t>(p)) -
                                        plan.program_of_rank.begin());
    for (const auto& [phase, peak] : static_memory(plan, rank).device.phase_peaks)
      if (peak.peak_bytes > peaks[phase].peak_bytes) peaks[phase] = peak;
  }
  for (const auto& [phase, peak] : peaks) {
    const PhaseInfo& info = plan.phases[static_cast<std::size_t>(phase)];
    if (info.when != When::iteration) continue;
    const PlanPhase name = phase_named(info.name);
    const bool shifts = (is_transition(name) && name != PlanPhase::flush) || name == PlanPhase::sync;
    const bool trains = is_training(name), rolls = name == PlanPhase::rollout;
    if (!shifts && !trains && !rolls) continue;
    std::int64_t& moment = trains ? out.train : rolls ? out.rollout : rolled_out ? out.wake : out.sync;
    moment = std::max(moment, peak.peak_bytes + plan.overhead_bytes);
    rolled_out |= rolls;
  }
  return out;
}

}  // namespace

/// What `explain` says that one rank sends in training and its log-prob passes, by phase, group family and kind of op:
/// wire bytes; of what is sent from rank to rank, payload.
using Sent = std::map<std::tuple<RlPhase, std::string, OpKind>, double>;
Sent said(const ScenarioPricer& pricer, const RlPoint& point) {
  const TrainPoint& p = point.train;
  const RlModel::Parts parts = pricer.rl().parts(point);
  const TrainPrice price = pricer.train().price(p);
  const OpKind sum = p.sharding == Sharding::replicated ? OpKind::all_reduce : OpKind::reduce_scatter;
  const std::string shard = p.replicas() > 1 ? "train_shard" : "train_data";
  const bool gathers = pricer.train().framework().gathered_context;
  const std::map<std::string, std::pair<std::string, OpKind>> names = {
      {"tp gather and scatter", {"train_tp", OpKind::all_gather}},
      {"tp all-reduce", {"train_tp", OpKind::all_reduce}},
      {"tp gather behind a hop", {"train_tp", OpKind::all_gather}},
      {"expert dispatch and combine", {"train_experts", OpKind::all_to_all}},
      {"cp ring", {"train_cp", gathers ? OpKind::all_gather : OpKind::send}},
      {"ulysses", {"train_cp", OpKind::all_to_all}},
      {"pipeline", {"train_pp", OpKind::send}},
      {"dp gradients", {shard, sum}},
      {"experts' gradients", {"train_expert_shard", sum}},
      {"replicas' gradients", {"train_replicas", OpKind::all_reduce}},
      {"experts' replicas' gradients", {"train_expert_replicas", OpKind::all_reduce}},
      {"dp parameters", {shard, OpKind::all_gather}},
      {"experts' parameters", {"train_expert_shard", OpKind::all_gather}},
      {"parameters kept among few", {"train_reshard", OpKind::all_gather}},
      {"optimizer's matrices", {shard, OpKind::all_to_all}}};
  Sent out;
  for (const LinkUse& use : link_bytes(pricer.rl(), point, price, parts.rollout, true)) {
    const bool trains = use.phase == RlPhase::train || use.phase == RlPhase::critic ||
                        use.phase == RlPhase::reference || use.phase == RlPhase::old_logprobs ||
                        use.phase == RlPhase::values;
    if (!trains || use.node_wire + use.network_wire <= 0.0) continue;
    const auto& [family, kind] = names.at(use.what);
    out[{use.phase, family, kind}] += use.node_wire + use.network_wire;
  }
  return out;
}

/// The same as simulated, the most that a rank sends of each.
Sent sent(const Plan& plan, const Trace& trace) {
  Sent most;
  for (const RankTraffic& rank : trace.traffic) {
    Sent own;
    for (const auto& [key, count] : rank) {
      const PlanPhase phase = phase_named(plan.phases[static_cast<std::size_t>(key.phase)].name);
      const std::string& family = plan.groups[static_cast<std::size_t>(key.group)].name;
      if (key.step == 0 || !family.starts_with("train_") || key.op == OpKind::barrier || key.op == OpKind::recv)
        continue;
      const OpKind kind = key.op == OpKind::send_recv ? OpKind::send : key.op;
      const bool whole = kind == OpKind::send || kind == OpKind::all_to_all || family == "train_cp";
      own[{rl_phase_of(phase), family, kind}] += static_cast<double>(whole ? count.payload_bytes : count.wire_bytes);
    }
    for (const auto& [what, bytes] : own) most[what] = std::max(most[what], bytes);
  }
  return most;
}

TEST_CASE("priced plans take what the closed form says, phase by phase, and hold what it holds") {
  PricedDraws draws(static_cast<std::uint64_t>(test::number_asked("HOTBUNK_PROPERTY_SEED", 1)));
  std::int64_t played = 0;
  std::map<RlPhase, double> worst;
  for (std::int64_t i = 0, cases = test::number_asked("HOTBUNK_PRICED_CASES", 330); i < cases; ++i) {
    const std::string text = draws.scenario();
    const auto s = load_scenario_text(text, "drawn.yaml");
    if (!s || unsupported_to_execute(*s).empty()) continue;
    const auto pricer = ScenarioPricer::make(*s, catalog_root());
    REQUIRE(pricer.has_value());
    const RlPoint point = (*pricer)->point();
    if ((*pricer)->why_unpriced(point)) continue;
    INFO(text);
    const auto job = priced_job(**pricer);
    if (!(*pricer)->rl().parts(point).rollout.fits) {
      REQUIRE_FALSE(job.has_value());
      CHECK(job.error().front().code == "E302");
      continue;
    }
    REQUIRE(job.has_value());
    const RlPrice price = (*pricer)->price(point);
    if (!price.fits) continue;  // its rollout's moment is what it would need
    const Moments moments = moments_of(job->plan);
    const auto near = [&point](std::int64_t bytes, double expected) {
      // The closed form's moments around training are those of its fullest stage; another may hold a norm more.
      return std::abs(static_cast<double>(bytes) - expected) <= (point.train.pp > 1 ? 1e-6 : 1e-9) * expected + 4096.0;
    };
    CAPTURE(moments.train, price.train_bytes, moments.rollout, price.rollout_bytes, moments.sync, price.sync_bytes,
            moments.wake, price.wake_bytes);
    CHECK(near(moments.train, price.train_bytes));
    CHECK(near(moments.rollout, price.rollout_bytes));
    if (point.placement == PlacementMode::colocated) CHECK(near(moments.sync, price.sync_bytes));
    if (moments.wake > 0 && point.placement == PlacementMode::colocated)
      CHECK(near(moments.wake, price.wake_bytes));  // else nothing sleeps that could wake
    // Whole chunks, and room that is taken before what was there is given back: more than is alive at a time.
    const double device = (*pricer)->rl().setting().device_bytes;
    if (price.peak_bytes() < 0.88 * device) CHECK(check_fit(job->plan).fits);
    const auto again = plan_from_json(plan_to_json(job->plan, {}), "plan.json");
    REQUIRE(again.has_value());
    CHECK(*again == job->plan);
    if (job->plan.num_ranks() > 32) continue;
    ++played;
    const Played result = play(*job, (*pricer)->train().cost());
    const auto& seconds = result.seconds;
    // Interleaved, the last stage's chunks go back to the first one: such a message is not played.
    const Sent expected = said(**pricer, point), actual = sent(job->plan, result.trace);
    for (const auto& [what, bytes] : expected) {
      const auto& [phase, family, kind] = what;
      const auto found = actual.find(what);
      INFO(name_of(phase) << ", " << family << ", " << name_of(kind) << ": explained " << bytes << " B, sent "
                          << (found == actual.end() ? 0.0 : found->second) << " B");
      const bool message =
          family == "train_pp" || (family == "train_tp" && !point.train.sp && kind == OpKind::all_gather);
      if (message && point.train.vpp > 1) continue;
      REQUIRE(found != actual.end());
      CHECK(std::abs(found->second / bytes - 1.0) < 2e-3);
    }
    for (const auto& [what, bytes] : actual)
      if (bytes > 0.0) CHECK(expected.contains(what));
    // What waits for memory is booked to the phase that maps it: sleep, wake and sync together.
    const auto check = [&](std::initializer_list<RlPhase> phases, double bound) {
      double simulated_s = 0.0, priced_s = 0.0;
      for (const RlPhase p : phases)
        simulated_s += seconds[static_cast<std::size_t>(p)], priced_s += price.seconds[static_cast<std::size_t>(p)];
      if (priced_s <= 0.0) {
        CHECK(simulated_s == 0.0);
        return;
      }
      // Between the two it is a matter of whom one asks.
      double error = simulated_s / priced_s - 1.0;
      if (error < 0.0 && phases.size() == 1)
        error = std::min(0.0, result.from_first[static_cast<std::size_t>(*phases.begin())] / priced_s - 1.0);
      INFO(name_of(*phases.begin()) << ": simulated " << simulated_s << " s, priced " << priced_s << " s, "
                                    << 100.0 * error << " %");
      CHECK(std::abs(error) < bound);
      double& w = worst[*phases.begin()];
      if (std::abs(error) > std::abs(w)) w = error;
    };
    check({RlPhase::rollout}, 0.03);
    // Apart, a sync is also what one role waits for the other.
    if (point.placement == PlacementMode::colocated) check({RlPhase::sync, RlPhase::sleep, RlPhase::wake}, 0.03);
    for (const RlPhase p : {RlPhase::reference, RlPhase::old_logprobs, RlPhase::values, RlPhase::critic, RlPhase::train,
                            RlPhase::framework})
      check({p}, 0.03);
  }
  REQUIRE(played > 5);
  for (const auto& [phase, error] : worst)
    if (std::getenv("HOTBUNK_PRICED_CASES") != nullptr)
      fmt::print("worst of {}: {} {:+.2f} %\n", played, name_of(phase), 100.0 * error);
}

TEST_CASE("log-prob passes hold what they work in: units, a layer's tensors or the logits, a reference that comes up") {
  const auto s = load_scenario_text(
      "name: passes\nmodel: qwen2.5-7b\ncluster: {gpu: b200-sxm-180gb, nodes: 1, gpus_per_node: 8}\nprofile: "
      "verl-fsdp\ntrain: {engine: fsdp2, layout: {dp: 8}, micro_batch_tokens: 8192}\nrollout: {engine: vllm, layout: "
      "{tp: 2, dp: 4}, sleep: true}\nalgorithm: {name: grpo, prompts: 64, samples_per_prompt: 8, reference: true, "
      "old_logprobs: true}\nworkload: {prompt_tokens: {mean: 1024, max: 1024, distribution: fixed}, response_tokens: "
      "{mean: 1024, max: 1024, distribution: fixed}}\n",
      "passes.yaml");
  REQUIRE(s.has_value());
  const auto pricer = ScenarioPricer::make(*s, catalog_root());
  REQUIRE(pricer.has_value());
  const RlPoint point = (*pricer)->point();
  const TrainModel& model = (*pricer)->train();
  const ScoringBytes held = model.scoring_bytes(point.train, model.layers(point.train));
  // 8,192 tokens: input and normed input of 3,584, three of 18,944 columns in the MLP, and its output, in bf16; against
  // fp32 logits and what else the profile holds of each, but a gradient in bf16, beside the stream.
  const double tokens = 8192, layer = 2 * tokens * (3 * 3584 + 3 * 18944.0),
               logits = (model.framework().loss_bytes.value - 2) * tokens * 152064 + 2 * tokens * 3584;
  CHECK(held.activations == Approx(std::max(layer, logits)).epsilon(1e-3));
  // Embedding and head in bf16, two more copies of a layer's 233,057,792 elements.
  CHECK(held.gathered == Approx(2 * (2 * 152064.0 * 3584 + 3584) + 2 * 2 * 233'057'792.0).epsilon(1e-3));
  CHECK(held.communication == 0.0);
  const auto job = priced_job(**pricer);
  REQUIRE(job.has_value());
  const TrainSide train = (*pricer)->rl().parts(point).train;
  REQUIRE(train.swapped_reference > 0.0);
  CHECK(train.reference_work == train.swapped_reference + train.old_work);
  for (const auto& [name, work] :
       {std::pair("reference", train.reference_work), std::pair("old_logprobs", train.old_work)}) {
    INFO(name);
    const auto phase = static_cast<std::int16_t>(job->plan.phase_index(name));
    const auto peaks = static_memory(job->plan, 0).device.phase_peaks;
    const auto peak = std::ranges::find(peaks, phase, [](const auto& p) { return p.first; });
    REQUIRE(peak != peaks.end());
    CHECK(std::abs(static_cast<double>(peak->second.peak_bytes + job->plan.overhead_bytes) - train.persistent() -
                   work) < 4096.0);
  }
}

TEST_CASE("slime's communicators go with the parameters and come for a sync, captured graphs go with the cache") {
  const auto s = load_scenario_text(
      "name: tags\nmodel: qwen2.5-7b\ncluster: {gpu: h100-sxm-80gb, nodes: 1, gpus_per_node: 8}\n"
      "train: {engine: megatron, layout: {dp: 2, tp: 4}, micro_batch_tokens: 4096, offload: sleep}\n"
      "profile: slime-megatron\nrollout: {engine: sglang, layout: {tp: 2, dp: 4}, sleep: true}\n"
      "algorithm: {name: grpo, prompts: 32, samples_per_prompt: 4}\n"
      "workload: {prompt_tokens: {mean: 256, max: 512}, response_tokens: {mean: 512, max: 2048}}\n",
      "tags.yaml");
  REQUIRE(s.has_value());
  const auto pricer = ScenarioPricer::make(*s, catalog_root());
  REQUIRE(pricer.has_value());
  const auto job = priced_job(**pricer);
  REQUIRE(job.has_value());
  const FrameworkProfile& frame = (*pricer)->train().framework();
  // Communicators of the data ranks and of the tensor-parallel ones; what stays is the context.
  const double communicators = 2 * frame.communicator_bytes.value;
  CHECK(static_cast<double>(job->plan.overhead_bytes) == frame.context_bytes.value);
  const RlModel::Parts of = (*pricer)->rl().parts((*pricer)->point());
  CHECK(of.train.communicators == communicators);
  const Played result = play(*job, (*pricer)->train().cost());
  const GpuTimeline timeline = gpu_timeline(job->plan, result.trace, 0);
  std::vector<std::string> moves;
  std::map<std::string, double> change;  // of the device by "tag action"
  std::int64_t before = 0;
  for (const TimelineStep& step : timeline.steps) {
    const std::string what = step.tag + " " + std::string(step.action);
    if (step.tag == "communicators" || step.tag == "graphs" || step.tag == "kv_cache" || step.tag == "parameters")
      moves.push_back(what), change[what] = static_cast<double>(step.device.total() - before);
    before = step.device.total();
    if (step.tag == "sync")  // rebuilt for it
      CHECK(static_cast<double>(step.peak_device_bytes) ==
            Approx(of.rollout.weight_bytes + communicators +
                   (*pricer)->rl().staging_bytes((*pricer)->point(), of.sync) +
                   std::min((*pricer)->point().bucket_bytes, of.train.params))
                .epsilon(1e-6));
  }
  CHECK(moves == std::vector<std::string>{"communicators dropped", "parameters to host", "kv_cache mapped empty",
                                          "graphs mapped empty", "kv_cache dropped", "graphs dropped",
                                          "parameters from host", "communicators mapped empty"});
  CHECK(change["communicators dropped"] == -communicators);
  CHECK(change["graphs mapped empty"] == frame.sglang.graph_bytes.value);
}

TEST_CASE("priced plans play lengths that differ: ranks and stages agree on what they exchange") {
  for (const char* layout :
       {"train: {engine: fsdp2, layout: {dp: 8}, micro_batch_tokens: 8192}\nprofile: verl-fsdp\n",
        "train: {engine: megatron, layout: {dp: 2, pp: 4}, micro_batch_tokens: 4096}\nprofile: verl-megatron\n",
        "train: {engine: megatron, layout: {dp: 1, tp: 2, pp: 2, cp: 2, vpp: 2}, pipeline_schedule: interleaved, "
        "micro_batch_tokens: 3072}\nprofile: slime-megatron\n",
        "train: {engine: megatron, layout: {dp: 2, tp: 2, pp: 2}, pipeline_schedule: zero-bubble, micro_batch_tokens: "
        "4096}\nprofile: verl-megatron\n",
        "train: {engine: megatron, layout: {dp: 2, tp: 2, pp: 2}, pipeline_schedule: gpipe, micro_batch_tokens: "
        "4096}\nprofile: verl-megatron\n"}) {
    INFO(layout);
    const auto s = load_scenario_text(
        fmt::format("name: ragged\nmodel: qwen2.5-7b\ncluster: {{gpu: b200-sxm-180gb, nodes: 1, gpus_per_node: "
                    "8}}\n{}rollout: {{engine: vllm, layout: {{tp: 2, dp: 4}}, sleep: true}}\nalgorithm: {{name: grpo, "
                    "prompts: 32, samples_per_prompt: 4, mini_batches: 2, reference: true, old_logprobs: "
                    "true}}\nworkload: {{prompt_tokens: {{mean: 256, max: 512}}, response_tokens: {{mean: 512, max: "
                    "2048}}}}\n",
                    layout),
        "ragged.yaml");
    REQUIRE(s.has_value());
    const auto pricer = ScenarioPricer::make(*s, catalog_root());
    REQUIRE(pricer.has_value());
    const auto job = priced_job(**pricer);
    REQUIRE(job.has_value());
    const Played result = play(*job, (*pricer)->train().cost());  // throws where ranks disagree or wait for ever
    const RlPrice price = (*pricer)->price((*pricer)->point());
    const auto train = static_cast<std::size_t>(RlPhase::train);
    CAPTURE(result.seconds[train], price.seconds[train]);
    // Micro-batches are packed as full as they go, and a pipeline waits for the longest of those under way.
    CHECK(std::abs(result.seconds[train] / price.seconds[train] - 1.0) < 0.4);
  }
}

// What random scenarios of other seeds found.
TEST_CASE(
    "a pipeline's step takes what its price says: rings behind deferred gradients, odd budgets, one micro-batch") {
  for (const auto& [training, workload] :
       {std::pair{
            "train: {engine: megatron, layout: {dp: 2, tp: 4, pp: 2, cp: 2, sp: true}, pipeline_schedule: "
            "zero-bubble, micro_batch_tokens: 1220}\ncluster: {gpu: b200-sxm-180gb, nodes: 4, gpus_per_node: 8}\n",
            "prompt_tokens: {mean: 146, max: 146, distribution: fixed}, response_tokens: {mean: 159, max: 159, "
            "distribution: fixed}"},
        // Two of 1,281 are 2,562 tokens, of which tp 4 has 640.5 each.
        {"train: {engine: megatron, layout: {dp: 2, tp: 4, pp: 4, sp: true}, micro_batch_tokens: 2562, recompute: "
         "selective}\ncluster: {gpu: b200-sxm-180gb, nodes: 4, gpus_per_node: 8}\n",
         "prompt_tokens: {mean: 980, max: 980, distribution: fixed}, response_tokens: {mean: 301, max: 301, "
         "distribution: fixed}"},
        // A step's eight samples of 1,219 tokens are one micro-batch.
        {"train: {engine: megatron, layout: {dp: 16, pp: 2}, pipeline_schedule: zero-bubble, micro_batch_tokens: "
         "39008}\ncluster: {gpu: b200-sxm-180gb, nodes: 4, gpus_per_node: 8}\n",
         "prompt_tokens: {mean: 843, max: 843, distribution: fixed}, response_tokens: {mean: 376, max: 376, "
         "distribution: fixed}"}}) {
    INFO(training);
    const auto s = load_scenario_text(
        fmt::format("name: pipeline\nmodel: qwen3-4b\nprofile: verl-megatron\n{}rollout: {{engine: vllm, layout: {{tp: "
                    "4, dp: 8}}, sleep: true}}\nalgorithm: {{name: grpo, prompts: 128, samples_per_prompt: 8, "
                    "mini_batches: 2}}\nworkload: {{{}}}\n",
                    training, workload),
        "pipeline.yaml");
    if (!s) FAIL(render(s.error()));
    const auto pricer = ScenarioPricer::make(*s, catalog_root());
    REQUIRE(pricer.has_value());
    const auto job = priced_job(**pricer);
    REQUIRE(job.has_value());
    const double simulated = play(*job, (*pricer)->train().cost()).seconds[static_cast<std::size_t>(RlPhase::train)],
                 priced = (*pricer)->price((*pricer)->point()).seconds[static_cast<std::size_t>(RlPhase::train)];
    CAPTURE(simulated, priced);
    CHECK(std::abs(simulated / priced - 1.0) <
          0.008);  // 0.7 % of the first; a sequence a micro-batch is 1 % of the second
  }
}

namespace {

/// The 7B on two sets of eight GPUs, so many steps, with so many prompts and these responses.
struct Apart {
  PricedJob job;
  RlPrice price;
  Trace trace;
  std::int16_t phase(const char* name) const { return static_cast<std::int16_t>(job.plan.phase_index(name)); }
  /// By step: when the last rank is through with its training, in seconds.
  std::map<std::int32_t, double> trained() const {
    std::map<std::int32_t, double> out;
    for (const PhaseSpan& p : trace.phases)
      if (p.phase == phase("train")) out[p.step] = std::max(out[p.step], 1e-9 * static_cast<double>(p.end_ns));
    return out;
  }
};

Apart play_apart(int staleness, int steps, int prompts, const std::string& responses) {
  const auto s =
      load_scenario(std::string(source_folder) + "/scenarios/qwen2.5-7b-colocated.yaml",
                    {"placement=disaggregated", "cluster.nodes=2", "train.offload=none", "rollout.sleep=false",
                     fmt::format("steps={}", steps), fmt::format("algorithm.prompts={}", prompts),
                     "workload.prompt_tokens={mean: 512, max: 512, distribution: fixed}",
                     "workload.response_tokens=" + responses, fmt::format("algorithm.max_staleness={}", staleness)});
  if (!s) FAIL(render(s.error()));
  const auto pricer = ScenarioPricer::make(*s, catalog_root());
  REQUIRE(pricer.has_value());
  auto job = priced_job(**pricer);
  if (!job) FAIL(render(job.error()));
  auto driver = LengthDriver::create(job->plan, job->scenario);
  REQUIRE(driver.has_value());
  (*driver)->take_steps_together();
  const ModelCost cost((*pricer)->train().cost());
  SimBackend backend(job->scenario.cluster, cost,
                     {.timeline = {.first_step = 0, .last_step = -1}, .granularity = Granularity::calls});
  RunOptions run{.steps = steps, .local_ranks = {}};
  for (Rank r = 0; r < job->plan.num_ranks(); ++r) run.local_ranks.push_back(r);
  auto trace = execute(job->plan, backend, **driver, run);
  if (!trace) FAIL(render(trace.error()));
  return {std::move(*job), (*pricer)->price((*pricer)->point()), std::move(*trace)};
}

}  // namespace

TEST_CASE("on GPUs of their own, engines wait for the trainer or roll out beside it") {
  for (const int staleness : {0, 1, 2, 4}) {
    INFO("max_staleness " << staleness);
    const Apart played = play_apart(staleness, 9, 128, "{mean: 1024, max: 1024, distribution: fixed}");
    const auto trained = played.trained();
    REQUIRE(trained.size() == 9);
    // In the steady state one training follows another by an iteration's time: the sum of the phases on policy, else
    // the longer side and the sync. Engines that are four ahead need as many rollouts to come to it.
    const double steady = (trained.at(9) - trained.at(5)) / 4.0;
    CAPTURE(steady, played.price.iteration_seconds, played.price.overlapped);
    CHECK((played.price.overlapped > 0.0) == (staleness > 0));
    CHECK(std::abs(steady / played.price.iteration_seconds - 1.0) < 0.03);
    const double stated =
        summarize(played.job.plan, played.job.scenario, played.trace).at("iteration_seconds").get<double>();
    CHECK(std::abs(stated / steady - 1.0) < 0.25);  // of nine iterations the first fills the pipeline
  }
}

TEST_CASE("what engines are ahead evens out lengths that scatter") {
  constexpr int steps = 24;
  std::map<int, double> took;  // by staleness: the last training's end
  double trainer_seconds = 0.0, engine_seconds = 0.0;
  for (const int staleness : {1, 2, 4}) {
    const Apart played = play_apart(staleness, steps, 64, "{mean: 600, max: 8192, cv: 0.8}");
    // What each side does by itself, from the stays of each rank; a stay's waiting is for the other side.
    std::map<Rank, std::map<std::int32_t, double>> rollout;
    std::map<std::int32_t, double> training, sending, loading;
    for (const PhaseSpan& p : played.trace.phases) {
      const double busy = 1e-9 * static_cast<double>(p.end_ns - p.start_ns);
      const double alone = busy - 1e-9 * static_cast<double>(std::max<std::int64_t>(p.waiting_ns, 0));
      const bool trains = played.job.plan.role_of(p.rank) == 0;
      if (p.phase == played.phase("rollout")) rollout[p.rank][p.step] = busy;
      if (p.phase == played.phase("sync")) {
        double& most = (trains ? sending : loading)[p.step];
        most = std::max(most, alone);
      }
      if (p.rank != 0) continue;
      for (const char* name : {"reference", "old_logprobs", "train", "framework"})
        if (p.phase >= 0 && p.phase == played.phase(name)) training[p.step] += busy;
    }
    REQUIRE(rollout.size() == 8);
    took[staleness] = played.trained().at(steps);
    trainer_seconds = engine_seconds = 0.0;
    for (int s = 1; s <= steps; ++s) {
      double longest = 0.0;
      for (const auto& [rank, by_step] : rollout) longest = std::max(longest, by_step.at(s));
      trainer_seconds += sending[s] + training[s], engine_seconds += longest;
    }
    if (staleness == 1) continue;
    // The recurrence of docs/simulate-and-compare.md, rank by rank of the engines.
    std::map<Rank, double> engine;
    std::vector<double> given(steps + 1, 0.0);
    double trainer = 0.0;
    for (int s = 1; s <= steps; ++s) {
      double samples = 0.0;
      for (const auto& [rank, by_step] : rollout) {
        double& at = engine[rank];
        if (s > staleness) at = std::max(at, given[static_cast<std::size_t>(s - staleness)]) + loading[s - staleness];
        at += by_step.at(s);
        samples = std::max(samples, at);
      }
      given[static_cast<std::size_t>(s)] = std::max(samples, trainer) + sending[s];
      trainer = given[static_cast<std::size_t>(s)] + training[s];
    }
    CAPTURE(staleness, took[staleness], trainer);
    CHECK(std::abs(took[staleness] / trainer - 1.0) < 0.01);
  }
  CAPTURE(took[1], took[2], took[4], trainer_seconds, engine_seconds);
  CHECK(took[2] < 0.97 * took[1]);
  CHECK(took[4] < 0.995 * took[2]);
  CHECK(took[4] > trainer_seconds);
}
