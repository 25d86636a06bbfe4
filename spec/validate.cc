// What a scenario that was read must hold to: long for its rules, of which each says its own arithmetic and remedy.
#include "spec/validate.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <ranges>
#include <set>
#include <sstream>
#include <tuple>

#include "base/format.h"
#include "spec/engine_experts.h"
#include "spec/expert_rounds.h"
#include "spec/family.h"
#include "spec/frozen.h"
#include "spec/kv_blocks.h"
#include "spec/names.h"
#include "spec/pipeline_split.h"
#include "spec/recompute_modules.h"
#include "spec/scenario_keys.h"
#include "spec/shard_over.h"
#include "spec/transition_check.h"
#include "spec/wrapping.h"

namespace hotbunk {
namespace {

using std::int64_t;

struct Factor {
  const char* name;
  int64_t value;
};

/// Product that stops at the largest integer instead of overflowing: files may hold any number.
int64_t product(const std::vector<Factor>& factors) {
  int64_t n = 1;
  for (const auto& f : factors)
    if (__builtin_mul_overflow(n, f.value, &n)) return std::numeric_limits<int64_t>::max();
  return n;
}

/// "dp 2 x tp 8 = 16": factors of 1 say nothing and are left out.
std::string equation(const std::vector<Factor>& factors) {
  std::vector<std::string> parts;
  for (const auto& f : factors)
    if (f.value != 1) parts.push_back(fmt::format("{} {}", f.name, f.value));
  if (parts.empty()) parts.push_back(fmt::format("{} 1", factors.front().name));
  const int64_t n = product(factors);
  if (n == std::numeric_limits<int64_t>::max()) return fmt::format("{} = more than 2^63", fmt::join(parts, " x "));
  return parts.size() == 1 ? parts.front() : fmt::format("{} = {}", fmt::join(parts, " x "), n);
}

class Validator {
 public:
  Validator(const Scenario& s, const ScenarioLocator& locate) : s_(s), locate_(locate) {}

  Diagnostics run() {
    capacity();
    ranks();
    shard_group();
    smaller_mesh();
    heads("train.layout", s_.train.layout.tp, s_.train.layout.ulysses);
    pipeline();
    experts();
    order();
    options();
    load();
    recomputed_modules();
    adapters();
    frozen();
    if (uses_rollout()) rollout();
    batches();
    lengths();
    disturbances();
    return std::move(problems_);
  }

 private:
  bool uses_rollout() const { return s_.algorithm.name != AlgorithmName::sft; }

  void report(const char* code, std::string_view key, std::string message, std::vector<std::string> notes = {},
              std::string help = {}) {
    problems_.push_back({.code = code,
                         .message = std::move(message),
                         .where = locate_(key),
                         .notes = std::move(notes),
                         .help = std::move(help)});
  }

  /// E211 unless `whole` % `part` == 0.
  void divides(std::string_view key, const char* what, int64_t whole, const char* by, int64_t part, std::string help) {
    if (whole % part == 0) return;
    report("E211", key, fmt::format("{} do not divide by {}", what, by),
           {fmt::format("{} {} % {} {} = {}", whole, what, by, part, whole % part)}, std::move(help));
  }

  void capacity() {
    const ClusterSpec& c = s_.cluster;
    if (c.gpu.is_cpu) return;  // a CPU rank's capacity is a budget of its own, not a part of a device
    const double all = static_cast<double>(c.device_memory_bytes) * static_cast<double>(c.ranks_per_device);
    if (all > static_cast<double>(c.gpu.memory_bytes))
      report("E223", "cluster.device_memory_gib", "the ranks of one device have more memory than the device",
             {fmt::format("{} ranks x {} = {}, {} has {}", c.ranks_per_device,
                          format_bytes(static_cast<double>(c.device_memory_bytes)), format_bytes(all), c.gpu.name,
                          format_bytes(static_cast<double>(c.gpu.memory_bytes)))},
             "leave the key out for an even share of the device");
  }

  // ---- ranks -------------------------------------------------------------------------------------------------------

  std::string cluster_equation() const {
    const ClusterSpec& c = s_.cluster;
    const std::string shared = c.ranks_per_device == 1 ? "" : fmt::format(" x {} ranks per device", c.ranks_per_device);
    return fmt::format("{} node{} x {} GPU{}{} = {}", c.nodes, c.nodes == 1 ? "" : "s", c.gpus_per_node,
                       c.gpus_per_node == 1 ? "" : "s", shared, c.ranks());
  }

  /// E203 when a layout does not use exactly the ranks of the cluster.
  void covers(std::string_view key, const std::string& title, const std::vector<Factor>& factors) {
    const int64_t found = product(factors), expected = s_.cluster.ranks();
    if (found == expected) return;
    const auto allowed = [](const std::string& path, int64_t value) {
      const ScenarioKey* k = find_scenario_key(path);
      return k != nullptr && static_cast<double>(value) <= k->high;
    };
    std::vector<std::string> ways;
    for (const auto& f : factors) {
      if (found == std::numeric_limits<int64_t>::max()) break;
      const int64_t others = found / f.value;
      if (expected % others == 0 && ways.empty() && allowed(fmt::format("{}.{}", key, f.name), expected / others))
        ways.push_back(fmt::format("{} to {}", f.name, expected / others));
    }
    if (found % s_.cluster.ranks_per_node() == 0 && allowed("cluster.nodes", found / s_.cluster.ranks_per_node()))
      ways.push_back(fmt::format("nodes to {}", found / s_.cluster.ranks_per_node()));
    report("E203", key, title, {fmt::format("{} ranks, but the cluster has {}", equation(factors), cluster_equation())},
           ways.empty() ? "" : fmt::format("set {}", fmt::join(ways, ", or ")));
  }

  void ranks() {
    const TrainLayout& t = s_.train.layout;
    const RolloutLayout& r = s_.rollout.layout;
    const std::vector<Factor> train = {{"dp", t.dp}, {"cp", t.cp}, {"ulysses", t.ulysses}, {"tp", t.tp}, {"pp", t.pp}};
    const std::vector<Factor> rollout = {{"dp", r.dp}, {"tp", r.tp}, {"pp", r.pp}, {"cp", r.cp}};
    if (s_.placement == PlacementMode::disaggregated && uses_rollout()) {
      int64_t sum = 0;
      if (__builtin_add_overflow(product(train), product(rollout), &sum) || sum != s_.cluster.ranks())
        report(
            "E203", "train.layout", "training and rollout together do not cover the cluster",
            {"training: " + equation(train), "rollout: " + equation(rollout), "the cluster has " + cluster_equation()},
            "the ranks of both must add up to the cluster's when they are disaggregated");
      return;
    }
    covers("train.layout", "mesh does not cover the cluster", train);
    if (uses_rollout()) covers("rollout.layout", "rollout engines do not cover the cluster", rollout);
  }

  void shard_group() {
    const TrainLayout& t = s_.train.layout;
    if (!shard_dimensions()) return;
    std::vector<Factor> factors = {{"dp", t.dp}, {"cp", t.cp}, {"ulysses", t.ulysses}};
    const std::string all = equation(factors);
    std::erase_if(factors, [&](const Factor& f) { return !t.shards_over(f.name); });
    const int64_t group = product(factors);
    if (t.fsdp == -1 || (t.fsdp > 0 && group % t.fsdp == 0)) return;
    if (t.shard_over.empty())
      return report("E215", "train.layout.fsdp", "the shard group does not divide the data ranks",
                    {fmt::format("fsdp {}, {}", t.fsdp, all)},
                    fmt::format("set fsdp to -1 (all {}) or to a divisor of it", group));
    report("E215", "train.layout.fsdp", "the shard group does not divide the ranks that shard_over names",
           {fmt::format("fsdp {}; shard_over {}: {}, of data ranks {}", t.fsdp, listed_shard_over(t.shard_over),
                        equation(factors), all)},
           fmt::format("set fsdp to -1 (all {}) or to a divisor of it, or name more in shard_over", group));
  }

  /// train.layout.shard_over: each dimension of the data ranks at most once, and an engine that shards.
  bool shard_dimensions() {
    const TrainLayout& t = s_.train.layout;
    const std::string key = "train.layout.shard_over";
    if (t.shard_over.empty()) return true;
    const std::size_t before = problems_.size();
    const std::vector<std::string> known = {"dp", "cp", "ulysses"};
    std::vector<std::string> seen;
    std::istringstream in(t.shard_over);
    for (std::string axis; std::getline(in, axis, '-'); seen.push_back(axis)) {
      const std::string at = fmt::format("{}.{}", key, seen.size()), near = nearest_name(axis, known);
      if (!is_data_axis(axis))
        report("E215", at, fmt::format("'{}' is no dimension of the data ranks", axis.substr(0, 100)),
               {"some of dp, cp, ulysses"}, near.empty() ? "" : fmt::format("did you mean {}?", near));
      else if (std::ranges::count(seen, axis) > 0)
        report("E215", at, fmt::format("shard_over names {} twice", axis), {}, "name each dimension once");
    }
    if (s_.train.engine == TrainEngine::ddp)
      report("E215", key, "ddp shards nothing",
             {fmt::format("train.engine ddp, shard_over {}", listed_shard_over(t.shard_over))},
             "leave shard_over out, or set train.engine to zero1, zero2, fsdp1 or fsdp2");
    return problems_.size() == before;
  }

  /// A number of train.reshard_after_forward, as PyTorch has it: a true divisor of the ranks that share a copy.
  void smaller_mesh() {
    const TrainLayout& t = s_.train.layout;
    const int64_t few = s_.train.reshard_ranks, all = t.shard_ranks();
    const char* const key = "train.reshard_after_forward";
    if (few == 0) return;
    if (s_.train.engine != TrainEngine::fsdp2)
      return report("E215", key, "only FSDP2 reshards to a smaller mesh",
                    {fmt::format("train.engine {}, {} {}", name_of(s_.train.engine), key, few)},
                    "set it to true or false, or train.engine to fsdp2");
    if (few < all && all % few == 0) return;
    std::string some;
    for (std::int64_t n = 2; n < all; ++n)
      if (all % n == 0) some += fmt::format("{}, ", n);
    report("E215", key, "the smaller mesh is no part of the shard group",
           {fmt::format("{} {}, {} ranks share one copy of the parameters", key, few, all)},
           fmt::format("set it to {}true or false", some));
  }

  // ---- the model's dimensions --------------------------------------------------------------------------------------

  void heads(const std::string& layout, int64_t tp, int64_t ulysses) {
    const ModelSpec& m = s_.model;
    const std::string tp_key = layout + ".tp";
    divides(tp_key, "attention heads", m.heads, "tp", tp, fmt::format("set {} to a divisor of {}", tp_key, m.heads));
    if (!m.moe)
      divides(tp_key, "MLP columns", m.intermediate, "tp", tp,
              fmt::format("set {} to a divisor of {}", tp_key, m.intermediate));
    // B2: k >= tp splits whole KV heads, k < tp holds each on tp / k ranks. MLA has none to split.
    if (!m.mla && m.kv_heads % tp != 0 && tp % m.kv_heads != 0)
      report("E211", tp_key, "KV heads neither divide by tp nor tp by them",
             {fmt::format("{} KV heads, tp {}", m.kv_heads, tp)},
             fmt::format("set {} to a divisor or a multiple of {}", tp_key, m.kv_heads));
    if (ulysses == 1) return;
    // C1: needs a % P == 0; KV heads are repeated P / k times when k < P.
    const std::string key = layout + ".ulysses";
    const int64_t local = std::max<int64_t>(1, m.heads / tp);
    divides(key, "attention heads of one tp rank", local, "ulysses", ulysses,
            fmt::format("set {} to a divisor of {}", key, local));
    const int64_t kv = std::max<int64_t>(1, m.kv_heads / tp);
    if (!m.mla && kv % ulysses != 0 && ulysses % kv != 0)
      report("E211", key, "KV heads neither divide by ulysses nor ulysses by them",
             {fmt::format("{} KV heads{}, ulysses {}", kv,
                          tp > 1 ? fmt::format(" of one tp rank ({} / tp {})", m.kv_heads, tp) : "", ulysses)},
             fmt::format("set {} to a divisor or a multiple of {}", key, kv));
  }

  void pipeline() {
    const TrainLayout& t = s_.train.layout;
    const int64_t chunks = product({{"pp", t.pp}, {"vpp", t.vpp}}), layers = s_.model.layers;
    if (t.vpp > 1 && t.pp == 1)
      report("E212", "train.layout.vpp", "virtual stages need a pipeline", {fmt::format("vpp {}, pp 1", t.vpp)},
             "set vpp to 1, or pp above 1");
    const auto& split = s_.train.pipeline_split;
    if (const std::string asked = asked_split(); !asked.empty()) {
      if (const auto counts = pipeline_counts(pipeline_split_of(s_)); !counts) {
        const Diagnostic& why = counts.error().front();
        report("E212", asked, why.message, why.notes, why.help);
      }
      return;
    }
    if (split.empty()) {
      if (layers % chunks == 0) return;
      report("E212", "train.layout.pp", "layers do not divide into the pipeline's stages",
             {fmt::format("{} layers % ({}) = {}", layers, equation({{"pp", t.pp}, {"vpp", t.vpp}}), layers % chunks)},
             "give the layers of every stage in train.pipeline_split, or another pp");
      return;
    }
    const int64_t sum = std::accumulate(split.begin(), split.end(), int64_t{0});
    if (static_cast<int64_t>(split.size()) != chunks || sum != layers)
      report("E212", "train.pipeline_split", "the pipeline split does not hold the model's layers",
             {fmt::format("{} stages with {} layers; the layout has {} stages, the model {} layers", split.size(), sum,
                          chunks, layers)},
             "one number per stage (pp x vpp of them) that add up to the layers");
  }

  /// The first key that says how the pipeline is split, beside the list.
  std::string asked_split() const {
    const TrainSpec& t = s_.train;
    return t.first_stage_layers > 0  ? "train.num_layers_in_first_pipeline_stage"
           : t.last_stage_layers > 0 ? "train.num_layers_in_last_pipeline_stage"
           : t.account_for_embedding ? "train.account_for_embedding_in_pipeline_split"
           : t.account_for_loss      ? "train.account_for_loss_in_pipeline_split"
                                     : "";
  }

  void router_losses() {
    for (const auto& [key, coefficient] : {std::pair("train.router_aux_loss_coef", s_.train.router_aux_loss_coef),
                                           std::pair("train.router_z_loss_coef", s_.train.router_z_loss_coef)})
      if (coefficient > 0.0 && !s_.model.moe)
        report("E213", key, "a dense model has no routers", {fmt::format("{} is dense", s_.model.name)},
               fmt::format("leave {} out", key));
  }

  void experts() {
    router_losses();
    const TrainLayout& t = s_.train.layout;
    const RolloutLayout& r = s_.rollout.layout;
    expert_parallel("train.layout.ep", t.ep);
    if (t.etp > 1 && s_.model.moe)
      divides("train.layout.etp", "expert columns", s_.model.moe->expert_intermediate, "etp", t.etp, "");
    if (t.etp > 1 && !s_.model.moe)
      report("E213", "train.layout.etp", "a dense model has no experts to split",
             {fmt::format("etp {}, {} is dense", t.etp, s_.model.name)},
             "set train.layout.etp to 1; train.layout.tp splits a dense model's MLP");
    // B9: the expert mesh etp x ep x edp x pp lies over the same ranks as the dense one.
    const std::vector<Factor> dense = {{"dp", t.dp}, {"cp", t.cp}, {"ulysses", t.ulysses}, {"tp", t.tp}};
    const std::vector<Factor> expert = {{"ep", t.ep}, {"etp", t.etp}};
    if (product(dense) % product(expert) != 0)
      report("E213", "train.layout.ep", "the expert mesh does not fit over the dense mesh",
             {fmt::format("{} ranks per pipeline stage % ({}) = {}", product(dense), equation(expert),
                          product(dense) % product(expert))},
             "ep x etp must divide dp x cp x ulysses x tp");
    expert_capacity();
    expert_dispatch();
    if (!uses_rollout()) return;
    expert_parallel("rollout.layout.ep", r.ep);
    const int64_t engine = product({{"tp", r.tp}, {"cp", r.cp}});
    if (engine % r.ep != 0)
      report("E213", "rollout.layout.ep", "expert parallel does not divide an engine's ranks",
             {fmt::format("{} % ep {} = {}", equation({{"tp", r.tp}, {"cp", r.cp}}), r.ep, engine % r.ep)});
    else if (!may_spread_experts(s_.rollout.engine, r.ep, engine))
      report("E213", "rollout.layout.ep", "vllm's ranks have whole experts each, or columns of all of them",
             {fmt::format("ep {} of {}; --enable-expert-parallel is a flag, and its groups are as many as the ranks "
                          "(docs.vllm.ai, Expert Parallel Deployment)",
                          r.ep, equation({{"tp", r.tp}, {"cp", r.cp}}))},
             fmt::format("set rollout.layout.ep to 1 or to {}, or rollout.engine to sglang", engine));
  }

  void expert_dispatch() {
    if (s_.train.expert_dispatch != ExpertDispatch::per_rank || !problems_.empty()) return;
    if (expert_rounds(s_).most == 0)
      report("E235", "train.expert_dispatch", "copies of tokens travel only where data ranks have other experts each",
             {fmt::format("train.layout.ep {} x etp {} with tp {}: every data rank has all experts", s_.train.layout.ep,
                          s_.train.layout.etp, s_.train.layout.tp)},
             "leave train.expert_dispatch out, or raise train.layout.ep");
  }

  void expert_capacity() {
    const double times = s_.train.expert_capacity;
    if (times == 0.0 || !problems_.empty()) return;
    const std::string key = "train.expert_capacity";
    const ExpertRounds r = expert_rounds(s_);
    if (r.most == 0)
      return report("E235", key, "rows come to experts in rounds only where these lie over data ranks",
                    {fmt::format("train.layout.ep {} x etp {} with tp {}: every data rank has all experts",
                                 s_.train.layout.ep, s_.train.layout.etp, s_.train.layout.tp)},
                    "leave train.expert_capacity out, or raise train.layout.ep");
    if (r.rounds > max_expert_rounds)
      report("E235", key, "too little room for the rows of experts",
             {fmt::format("{} rows may come, {} x {} = {} at once: {} rounds, at most {} are planned", r.most, times,
                          r.sent, r.capacity, r.rounds, max_expert_rounds)},
             fmt::format("set it to {:.3g} or more",
                         static_cast<double>(r.most) / static_cast<double>(max_expert_rounds * r.sent) + 0.0005));
  }

  void expert_parallel(const std::string& key, int64_t ep) {
    if (ep == 1) return;
    if (!s_.model.moe)
      report("E213", key, "a dense model has no experts to spread",
             {fmt::format("ep {}, {} is dense", ep, s_.model.name)}, fmt::format("set {} to 1", key));
    else if (s_.model.moe->experts % ep != 0)
      report("E213", key, "experts do not divide by ep",
             {fmt::format("{} experts % ep {} = {}", s_.model.moe->experts, ep, s_.model.moe->experts % ep)},
             fmt::format("set {} to a divisor of {}", key, s_.model.moe->experts));
  }

  void order() {
    std::vector<std::string> parts;
    std::istringstream in(s_.train.layout.order);
    for (std::string part; std::getline(in, part, '-');) parts.push_back(part);
    std::vector<std::string> sorted = parts, all = {"cp", "dp", "ep", "pp", "tp"}, with_ulysses = all;
    with_ulysses.emplace_back("ulysses");
    std::sort(sorted.begin(), sorted.end());
    if (sorted != all && sorted != with_ulysses)
      report("E224", "train.layout.order",
             fmt::format("'{}' is no order of the dimensions", s_.train.layout.order.substr(0, 100)),
             {"it names tp, cp, ep, dp and pp (and ulysses, next to cp when left out) once each, joined by -"},
             "for example tp-cp-ep-dp-pp");
  }

  // ---- options -----------------------------------------------------------------------------------------------------

  void options() {
    const TrainSpec& t = s_.train;
    if (t.layout.sp && t.layout.tp == 1)
      report("E218", "train.layout.sp", "sequence parallel splits over the tp group, which has one rank",
             {"sp true, tp 1"}, "set train.layout.tp above 1, or sp to false");
    const bool fsdp = t.engine == TrainEngine::fsdp1 || t.engine == TrainEngine::fsdp2;
    if (t.offload == Offload::layerwise && !fsdp)
      report("E214", "train.offload", fmt::format("layer-wise offload belongs to FSDP, not to {}", name_of(t.engine)),
             {}, "set train.offload to sleep, or train.engine to fsdp2");
    wrapping();
    if (t.offload == Offload::layerwise && t.engine == TrainEngine::fsdp1) accumulation_on_host();
    const OptimizerSpec& o = s_.optimizer;
    if (t.offload == Offload::layerwise && o.name == OptimizerName::muon)
      report("E214", "train.offload", "layer-wise offload steps on the CPU, Muon's matrix products need the GPU", {},
             "set train.offload to sleep or none, or optimizer.name to adamw");
    if (o.momentum > 0 && o.name != OptimizerName::sgd && o.name != OptimizerName::adafactor)
      report("E227", "optimizer.momentum",
             fmt::format("optimizer.momentum is of sgd and adafactor, not of {}", name_of(o.name)), {},
             o.name == OptimizerName::muon ? "Muon always keeps one" : "its decay is optimizer.beta1");
    if (o.cpu_fraction > 0 && o.name == OptimizerName::muon)
      report("E214", "optimizer.cpu_fraction", "Muon's matrix products need the GPU", {},
             "set optimizer.name to adamw");
    // The optimizer steps in fp32: what rounds to 1 there divides by 0.
    const bool first_is_1 = static_cast<float>(o.beta1) >= 1;
    if (first_is_1 || static_cast<float>(o.beta2) >= 1)
      report("E206", first_is_1 ? "optimizer.beta1" : "optimizer.beta2", "a moment that never forgets",
             {fmt::format("beta1 {}, beta2 {}: bias correction divides by 1 - beta^step, in fp32", o.beta1, o.beta2)},
             "betas lie below 1");
    const double temperature = s_.rollout.temperature;
    if (temperature > 0 && temperature < least_temperature)
      report("E206", "rollout.temperature",
             fmt::format("rollout.temperature is {}, expected 0 or at least {}", temperature, least_temperature),
             {"logits are divided by it, in fp32"}, "greedy is temperature 0");
    if (uses_rollout() && s_.placement == PlacementMode::colocated && s_.rollout.engine == RolloutEngine::hotbunk &&
        s_.sync.transport == SyncTransport::ipc && s_.cluster.nodes > 1)
      report("E229", "sync.transport", "ipc reads the memory of peers on the same host",
             {fmt::format("cluster.nodes {}: ranks of different nodes share none", s_.cluster.nodes)},
             "set sync.transport to collective");
    if (uses_rollout() && s_.placement == PlacementMode::colocated)
      for (Diagnostic& d : check_transition(s_, locate_)) problems_.push_back(std::move(d));
    if (!s_.task.data.empty() && uses_rollout())
      report("E227", "task.data",
             fmt::format("task.data is read by sft, algorithm.name is {}", name_of(s_.algorithm.name)), {},
             "set algorithm.name to sft, or leave task.data out: prompts come from task.name");
    if (s_.algorithm.kl_coef > 0 && !s_.algorithm.reference)
      report("E219", "algorithm.kl_coef", "the KL term needs a reference model",
             {fmt::format("kl_coef {}, reference false", s_.algorithm.kl_coef)},
             "set algorithm.reference to true, or kl_coef to 0");
  }

  /// Source: PyTorch FullyShardedDataParallel, cpu_offload: outside of no_sync() a newly reduced gradient takes the
  /// place of what is there.
  void accumulation_on_host() {
    const TrainSpec& t = s_.train;
    const AlgorithmSpec& a = s_.algorithm;
    const int64_t samples = a.prompts * (uses_rollout() ? a.samples_per_prompt : 1) / a.mini_batches,
                  held =
                      product({{"tokens", t.micro_batch_tokens}, {"cp", t.layout.cp}, {"ulysses", t.layout.ulysses}});
    const double mean = s_.workload.prompt_tokens.mean + s_.workload.response_tokens.mean,
                 tokens = static_cast<double>(samples) * mean / static_cast<double>(t.layout.dp);
    if (tokens <= static_cast<double>(held)) return;
    report("E231", "train.offload", "FSDP1 adds up no gradients on the host, and a step has several micro-batches",
           {fmt::format("{} samples of a step x {} tokens on average / dp {} = {:.0f}; a micro-batch holds {}", samples,
                        mean, t.layout.dp, tokens, held),
            "a gradient that comes down takes the place of what came before it: PyTorch's documentation calls the "
            "result incorrect"},
           "set train.engine to fsdp2, train.offload to sleep, or more of algorithm.mini_batches or "
           "train.micro_batch_tokens");
  }

  void wrapping() {
    const WrapSpec& w = s_.train.wrap;
    const bool flat = s_.train.engine == TrainEngine::fsdp1, by_names = w.policy == WrapPolicy::names;
    if (!flat && w.policy != WrapPolicy::layer)
      report("E227", "train.wrap.policy",
             fmt::format("train.wrap is of fsdp1; train.engine is {}", name_of(s_.train.engine)), {},
             "leave train.wrap out: the units of the others are the layers and the rest");
    if (!w.names.empty() && !by_names)
      report("E227", "train.wrap.names",
             fmt::format("train.wrap.names is of policy names; train.wrap.policy is {}", name_of(w.policy)), {},
             "set train.wrap.policy to names, or leave train.wrap.names out");
    if (w.min_parameters != WrapSpec{}.min_parameters && w.policy != WrapPolicy::size)
      report("E227", "train.wrap.min_parameters",
             fmt::format("train.wrap.min_parameters is of policy size; train.wrap.policy is {}", name_of(w.policy)), {},
             "set train.wrap.policy to size, or leave train.wrap.min_parameters out");
    if (!flat || !by_names) return;
    if (w.names.empty())
      report("E230", "train.wrap.policy", "a policy by names without names", {},
             "set train.wrap.names, for example to [model.layers.*.mlp]");
    const std::vector<std::string> modules = wrappable_modules(s_.model);
    for (const std::string& pattern : patterns_of(w))
      if (std::ranges::none_of(modules, [&](const std::string& m) { return matches(pattern, m); }))
        report("E230", "train.wrap.names", fmt::format("'{}' is no module that may be a unit", pattern.substr(0, 100)),
               {fmt::format("there are {}{}", fmt::join(modules | std::views::take(8), ", "),
                            modules.size() > 8 ? ", …" : ""),
                "what stands inside attention or an MLP is computed as one matrix"},
               "name modules as the model's parameters do, with * for any text and ? for one character");
  }

  /// E239: what the first rank reads comes over devices.
  void load() {
    if (s_.train.load == "rank0" && s_.train.offload == Offload::layerwise)
      report("E239", "train.load", "under train.offload: layerwise the state of training lies on the host",
             {"the first rank's broadcast goes from device to device"},
             "set train.load to shards: each rank reads its own part, unit by unit");
  }

  /// E238: modules of selective recomputation that are none, or where nothing is recomputed by module.
  void recomputed_modules() {
    const std::vector<std::string> known(recompute_module_names.begin(), recompute_module_names.end());
    const auto near = [&](const std::string& found) {
      const std::string name = nearest_name(found, known);
      return name.empty() ? "" : "did you mean " + name + "?";
    };
    const TrainSpec& t = s_.train;
    const std::string key = "train.recompute_modules";
    if (t.recompute_modules.empty()) return;
    if (t.recompute != Recompute::selective)
      return report("E238", key,
                    fmt::format("{} is of train.recompute: selective, not of {}", key, name_of(t.recompute)), {},
                    fmt::format("set train.recompute to selective, or leave {} out", key));
    std::istringstream in(t.recompute_modules);
    std::size_t i = 0;
    for (std::string module; std::getline(in, module, '-'); ++i)
      if (!recompute_module(module))
        report("E238", fmt::format("{}.{}", key, i), fmt::format("no module is called '{}'", module.substr(0, 100)),
               {fmt::format("some of {}", fmt::join(known, ", "))}, near(module));
  }

  /// E232: adapters for matrices that the model does not have, or that nobody makes one for.
  void adapters() {
    const ModelSpec& m = s_.model;
    if (!m.lora.on()) {
      const LoraSpec none;
      for (const auto& [name, is_set] :
           {std::pair("alpha", m.lora.alpha != none.alpha), std::pair("targets", m.lora.targets != none.targets),
            std::pair("adapter", m.lora.adapter != none.adapter)})
        if (is_set)
          report("E227", fmt::format("train.lora.{}", name),
                 fmt::format("train.lora.{} is of adapters, and train.lora.rank 0 has none", name), {},
                 "set train.lora.rank, or leave train.lora out");
      return;
    }
    const std::string key = "train.lora.targets";
    if (const std::string_view why = family_of(m).no_adapters; !why.empty())
      return report("E232", key, fmt::format("{} has no matrices that adapters are made for", m.name),
                    {std::string(why)}, "leave train.lora out, or take a Llama, Mistral, Qwen or Gemma model");
    std::vector<std::string> known;
    for (const LoraTarget& t : lora_targets_of(m)) {
      if (std::ranges::count(known, t.module) == 0) known.emplace_back(t.module);
    }
    const bool all = m.lora.targets == "all-linear";
    std::vector<std::string> found;
    std::istringstream in(all ? "" : m.lora.targets);
    for (std::string t; std::getline(in, t, '-');) found.push_back(t);
    if (!all && found.empty())
      report("E232", key, "train.lora.targets names no matrix", {}, "all-linear, or for example [q_proj, v_proj]");
    for (std::size_t i = 0; i < found.size(); ++i)
      if (std::ranges::count(known, found[i]) == 0)
        report("E232", fmt::format("{}.{}", key, i), fmt::format("no matrix is called '{}'", found[i].substr(0, 100)),
               {fmt::format("all-linear, or some of {}", fmt::join(known, ", "))});
      else if (std::ranges::count(found, found[i]) > 1)
        return report("E232", key, fmt::format("train.lora.targets names {} twice", found[i]), {}, "keep one of them");
    if (m.adapts_experts())
      only_executed("E232", key, "adapters of experts", "name no matrices of experts in train.lora.targets");
  }

  /// E234: parameters that do not train, beside what is not executed with such, or by patterns that split what is
  /// multiplied as one.
  void frozen() {
    const ModelSpec& m = s_.model;
    if (m.frozen.empty()) return;
    const std::string key = "train.frozen";
    if (m.lora.on())
      return report("E234", key, "adapters train beside a model that is frozen as a whole",
                    {fmt::format("train.lora.rank {}", m.lora.rank)}, "leave train.frozen out");
    const std::vector<ParamSpec> all = parameters_of(m);
    const std::vector<std::string> patterns = frozen_patterns(m);
    for (std::size_t i = 0; i < patterns.size(); ++i)
      if (std::ranges::none_of(all, [&](const ParamSpec& p) { return matches(patterns[i], p.name); }))
        report("E234", fmt::format("{}.{}", key, i),
               fmt::format("'{}' is the name of no parameter", patterns[i].substr(0, 100)),
               {fmt::format("there are {}, {}, {}, …", all[0].name, all[1].name, all[2].name)},
               "* is any text, dots too, and ? one character");
    if (std::ranges::all_of(all, &ParamSpec::frozen))
      return report("E234", key, "no parameter is left that trains", {fmt::format("all {} are frozen", all.size())},
                    "name fewer of them");
    if (const auto& [one, other] = split_group(m); !one.empty())
      report("E234", key, "of parameters that one op takes some train and some do not",
             {fmt::format("{} and {}", one, other),
              "q, k and v, gate and up, a matrix or norm and its bias, both tables of an embedding, and all experts of "
              "a layer are taken as one"},
             "name all of them, or none");
    only_executed("E234", key, "frozen parameters", "leave train.frozen out");
  }

  /// Of what closed forms do not price.
  void only_executed(const char* code, const std::string& key, const std::string& what, const std::string& or_else) {
    const std::string message = what + " are planned only in what is executed";
    if (s_.transition == "auto" && problems_.empty())
      return report(code, "transition", message,
                    {"transition auto leaves the order to what is priced, which knows none of them"},
                    "set transition to hotbunk, or " + or_else);
    if (const auto reasons = unsupported_to_execute(s_); problems_.empty() && !reasons.empty())
      report(code, key, message, {reasons.front()}, "change the setting named, or " + or_else);
  }

  void rollout() {
    const RolloutSpec& r = s_.rollout;
    if (r.layout.tp % r.layout.attention_dp != 0)
      report("E211", "rollout.layout.attention_dp", "attention data parallel does not divide tp",
             {fmt::format("tp {} % attention_dp {} = {}", r.layout.tp, r.layout.attention_dp,
                          r.layout.tp % r.layout.attention_dp)});
    else heads("rollout.layout", r.layout.tp / r.layout.attention_dp, 1);
    if (!r.quantization.empty() && r.engine == RolloutEngine::hotbunk)
      report("E214", "rollout.dtype", fmt::format("hotbunk's engine has no products in {}", r.quantization),
             {"sglang and vllm are planned with them; nothing executes them yet"},
             "set rollout.engine to sglang or vllm, or rollout.dtype to bf16");
    if (r.kv_cache_dtype == "fp8" && r.engine == RolloutEngine::hotbunk)
      report("E214", "rollout.kv_cache_dtype", "hotbunk's engine has no KV cache in fp8",
             {"sglang and vllm are planned with it; nothing executes it yet"},
             "set rollout.engine to sglang or vllm, or rollout.kv_cache_dtype to bf16");
    if (r.layout.pp > s_.model.layers)
      report("E212", "rollout.layout.pp", "an engine has more pipeline stages than the model has layers",
             {fmt::format("pp {}, {} layers", r.layout.pp, s_.model.layers)},
             fmt::format("set rollout.layout.pp to {} at most", s_.model.layers));
    if (static_cast<float>(r.top_p) <= 0)
      report("E206", "rollout.top_p", "top_p 0 leaves no token to sample", {},
             "greedy is temperature 0; 1 samples from all");
  }

  void batches() {
    const AlgorithmSpec& a = s_.algorithm;
    const bool sampled = uses_rollout();  // SFT reads one per prompt
    const int64_t samples = a.prompts * (sampled ? a.samples_per_prompt : 1), rest = samples % a.mini_batches;
    if (rest != 0)
      report("E216", "algorithm.mini_batches", "samples do not divide into mini-batches",
             {sampled ? fmt::format("{} prompts x {} samples = {}; % mini_batches {} = {}", a.prompts,
                                    a.samples_per_prompt, samples, a.mini_batches, rest)
                      : fmt::format("{} prompts % mini_batches {} = {}", samples, a.mini_batches, rest)},
             sampled ? "change mini_batches, prompts or samples_per_prompt" : "change mini_batches or prompts");
  }

  // ---- lengths -----------------------------------------------------------------------------------------------------

  void length(const std::string& key, const LengthSpec& l) {
    if (l.mean > l.max)
      report("E217", key + ".mean", "the mean length exceeds the longest",
             {fmt::format("mean {}, max {}", l.mean, l.max)});
    if (l.max != std::floor(l.max))
      report("E206", key + ".max", fmt::format("{}.max is {}, not a whole number of tokens", key, l.max));
  }

  /// A pass that only scores cuts micro-batches of its own where the scenario says so.
  void logprob_batches(const std::string& sum, double longest) {
    const TrainLayout& t = s_.train.layout;
    const int64_t tokens = s_.train.logprob_micro_batch_tokens;
    if (tokens == 0 || longest <= static_cast<double>(t.held_by(tokens))) return;
    report("E217", "train.logprob_micro_batch_tokens", "the longest sequence does not fit a micro-batch of log-probs",
           {sum, fmt::format("logprob_micro_batch_tokens {}{}", tokens,
                             t.sharers() == 1 ? "" : fmt::format(" on each of {} ranks", t.sharers()))},
           fmt::format("set train.logprob_micro_batch_tokens to {}",
                       t.share_of(static_cast<int64_t>(std::ceil(longest)))));
  }

  void lengths() {
    const LengthSpec &prompt = s_.workload.prompt_tokens, &response = s_.workload.response_tokens;
    length("workload.prompt_tokens", prompt);
    length("workload.response_tokens", response);
    const double longest = s_.workload.longest();
    const bool capped = longest < prompt.max + response.max;
    const std::string sum = capped
                                ? fmt::format("workload.max_tokens {}", longest)
                                : fmt::format("prompt {} + response {} = {} tokens", prompt.max, response.max, longest);
    if (capped && prompt.mean + response.mean > longest)
      report("E217", "workload.max_tokens", "the mean lengths exceed the longest sample",
             {fmt::format("prompt {} + response {} on average, max_tokens {}", prompt.mean, response.mean, longest)});
    if (longest > static_cast<double>(s_.model.max_position))
      report("E217", "workload.response_tokens.max", "the longest sequence exceeds the model's positions",
             {sum, fmt::format("{} has max_position_embeddings {}", s_.model.name, s_.model.max_position)},
             uses_rollout() ? "lower workload.response_tokens.max"
                            : fmt::format("a sample of sft is a prompt and its response too: "
                                          "workload.prompt_tokens.max + workload.response_tokens.max = {} at most",
                                          s_.model.max_position));
    const TrainLayout& t = s_.train.layout;
    const std::vector<Factor> split = {
        {"micro_batch_tokens", s_.train.micro_batch_tokens}, {"cp", t.cp}, {"ulysses", t.ulysses}};
    const int64_t held = product(split), in_chunks = held / t.chunk_multiple() * t.chunk_multiple();
    if (longest > static_cast<double>(in_chunks))
      report("E217", "train.micro_batch_tokens", "the longest sequence does not fit a micro-batch",
             {sum, equation(split) + (t.cp * t.ulysses == 1 ? "" : " tokens") +
                       (in_chunks == held ? "" : fmt::format(", {} in {} equal chunks", in_chunks, 2 * t.cp))},
             fmt::format("set train.micro_batch_tokens to {}", t.share_of(static_cast<int64_t>(std::ceil(longest)))));
    if (!uses_rollout()) return;
    logprob_batches(sum, longest);
    if (prompt.max > static_cast<double>(s_.rollout.max_prefill_tokens))
      report("E217", "rollout.max_prefill_tokens", "the longest prompt does not fit a prefill step",
             {fmt::format("prompt {} tokens, max_prefill_tokens {}", prompt.max, s_.rollout.max_prefill_tokens)},
             fmt::format("set rollout.max_prefill_tokens to {:.0f}", prompt.max));
    const int64_t pool = pool_share(s_.rollout);
    const int64_t span = block_span(s_.rollout), whole_blocks = pool / span * span;
    if (s_.rollout.kv_cache_tokens > 0 && longest > static_cast<double>(whole_blocks))
      report("E217", "rollout.kv_cache_tokens", "the longest sequence does not fit the KV pool",
             {sum, s_.rollout.layout.attention_dp > 1
                       ? fmt::format("kv_cache_tokens {} / attention_dp {} = {} in blocks of {}",
                                     s_.rollout.kv_cache_tokens, s_.rollout.layout.attention_dp, pool, span)
                       : fmt::format("kv_cache_tokens {} in blocks of {}", pool, span)},
             "raise rollout.kv_cache_tokens, or 0 for what memory_fraction leaves");
  }

  // ---- disturbances ------------------------------------------------------------------------------------------------

  /// E228: nowhere in the cluster, or said before.
  void slow(const std::string& key, const std::vector<Slowdown>& all) {
    std::set<std::tuple<int64_t, int64_t, LinkKind>> seen;
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto& [rank, node, link, factor] = all[i];
      const bool is_rank = rank >= 0;
      const int64_t at = is_rank ? rank : node, count = is_rank ? s_.cluster.ranks() : s_.cluster.nodes;
      const char* const what = is_rank ? "rank" : "node";
      const std::string where = fmt::format("{}.{}", key, i);
      if (at >= count)
        report("E228", where, fmt::format("{} names {} {}, which the cluster does not have", key, what, at),
               {is_rank ? cluster_equation() : fmt::format("{} node{}", count, count == 1 ? "" : "s")},
               fmt::format("{}s are numbered from 0 to {}", what, count - 1));
      else if (!seen.emplace(rank, node, link).second)
        report("E228", where, fmt::format("{} names {} {} twice", key, what, at), {}, "keep one of them");
    }
  }

  void disturbances() {
    const DisturbanceSpec& d = s_.disturbances;
    slow("disturbances.slow_ranks", d.slow_ranks);
    slow("disturbances.slow_nodes", d.slow_nodes);
    slow("disturbances.slow_links", d.slow_links);
  }

  const Scenario& s_;
  const ScenarioLocator& locate_;
  Diagnostics problems_;
};

}  // namespace

Diagnostics validate(const Scenario& scenario, const ScenarioLocator& locate) {
  return Validator(scenario, locate).run();
}

}  // namespace hotbunk
