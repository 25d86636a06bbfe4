// Scenario: the typed form of a scenario file. Every key, its default and its unit is here; docs/scenario.md is
// generated from the same table by `hotbunk plan --resolved`.
#pragma once
#include <cstdint>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/rounding.h"
#include "spec/cluster.h"
#include "spec/model.h"

namespace hotbunk {

enum class PlacementMode : std::uint8_t { colocated, disaggregated };
enum class TrainEngine : std::uint8_t { ddp, zero1, zero2, fsdp1, fsdp2, megatron };
enum class Recompute : std::uint8_t { none, selective, full };
enum class Offload : std::uint8_t { none, sleep, layerwise };
/// Which modules have a flat parameter of their own: decoder layers, modules of so many parameters, or named ones.
enum class WrapPolicy : std::uint8_t { layer, size, names };
/// What samples are filled up to: nothing, they are packed; the longest of their micro-batch; or that of the batch.
enum class Padding : std::uint8_t { none, micro_batch, batch };
enum class RolloutEngine : std::uint8_t { hotbunk, sglang, vllm };
enum class RankOrder : std::uint8_t { contiguous, strided, automatic };
enum class SyncMode : std::uint8_t { bucketed, stream, broadcast, direct };
/// How context-parallel ranks come by one another's keys and values; automatic: as the profile's framework does it.
enum class ContextExchange : std::uint8_t { automatic, ring, all_gather };
/// What of a token travels to experts of other data ranks; automatic: what costs less.
enum class ExpertDispatch : std::uint8_t { per_expert, per_rank, automatic };
enum class SyncTransport : std::uint8_t { ipc, collective };
enum class AlgorithmName : std::uint8_t { grpo, ppo, sft };
enum class OptimizerName : std::uint8_t { adamw, adamw_8bit, adamw_4bit, sgd, adafactor, muon };
enum class LengthDistribution : std::uint8_t { fixed, uniform, lognormal };
enum class LinkKind : std::uint8_t { network, nvlink, pcie };

/// Parallel dimensions of training. Ranks = dp * cp * ulysses * tp * pp; fsdp is the shard group's size within
/// dp*cp*ulysses, or within those of them that shard_over names: -1 is all of these.
struct TrainLayout {
  std::int64_t dp = 1, fsdp = -1, cp = 1, ulysses = 1, tp = 1, pp = 1, vpp = 1, ep = 1, etp = 1;
  bool sp = false;
  std::string order = "tp-cp-ep-dp-pp";  // fastest first (Megatron's default)
  std::string shard_over = {};           // "dp-cp": dimensions that a shard group lies in; "": dp, cp and ulysses
  bool shards_over(std::string_view axis) const {
    return shard_over.empty() || ("-" + shard_over + "-").find("-" + std::string(axis) + "-") != std::string::npos;
  }
  /// Ranks of those dimensions, and of them those that share one copy of what an engine shards.
  std::int64_t shardable() const {
    return (shards_over("dp") ? dp : 1) * (shards_over("cp") ? cp : 1) * (shards_over("ulysses") ? ulysses : 1);
  }
  std::int64_t shard_ranks() const { return fsdp > 0 ? fsdp : shardable(); }
  std::int64_t ranks() const { return dp * cp * ulysses * tp * pp; }
  /// Ranks that share a micro-batch's tokens.
  std::int64_t sharers() const { return cp * ulysses; }
  /// Of a sequence of so many tokens: context-parallel ranks have two chunks of it each, all of one size.
  std::int64_t padded(std::int64_t tokens) const { return cp > 1 ? round_up(tokens, 2 * cp) : tokens; }
  /// A micro-batch is filled up to a multiple of this, so that all its sharers, and with sp each of their
  /// tensor-parallel ranks, have as much of it.
  std::int64_t token_multiple() const {
    return cp * std::lcm(cp > 1 ? std::int64_t{2} : std::int64_t{1}, ulysses * (sp ? tp : 1));
  }
  /// Padded sequences fill a micro-batch up to a multiple of this: chunks of all sharers are of one size. What sequence
  /// parallelism adds comes on top where they leave no room for it (in what executes they do).
  std::int64_t chunk_multiple() const { return cp * std::lcm(cp > 1 ? std::int64_t{2} : std::int64_t{1}, ulysses); }
  /// Tokens of padded sequences that fit micro-batches of so many tokens on each sharer.
  std::int64_t held_by(std::int64_t micro_batch_tokens) const {
    return micro_batch_tokens * sharers() / chunk_multiple() * chunk_multiple();
  }
  /// What each sharer has of a micro-batch that holds so many tokens.
  std::int64_t share_of(std::int64_t tokens) const { return round_up(tokens, token_multiple()) / sharers(); }
  bool operator==(const TrainLayout&) const = default;
};

struct Precision {
  DType params = DType::bf16;  // compute and gathered dtype
  DType grads = DType::f32;    // whole gradients and their reduction
  DType master = DType::f32;
  DType moments = DType::f32;
  std::string gemm = "params";  // of matrix products: as params, or a narrower format that only planning knows
  bool operator==(const Precision&) const = default;
};

/// Of FSDP1: what is a unit (layout/flat_units.h).
struct WrapSpec {
  WrapPolicy policy = WrapPolicy::layer;
  std::int64_t min_parameters = 100'000'000;  // of size; PyTorch's default
  std::string names;                          // of names: patterns of modules, joined by "-"; * is any text
  auto operator<=>(const WrapSpec&) const = default;
};

struct TrainSpec {
  TrainEngine engine = TrainEngine::fsdp2;
  TrainLayout layout;
  ContextExchange context_exchange = ContextExchange::automatic;
  std::int64_t micro_batch_tokens = 4096;  // tokens of one micro-batch on one rank (after cp/ulysses, before SP)
  std::int64_t micro_batch_sequences = 0;  // of one micro-batch at most, beside its tokens; 0 = no such limit
  Padding padding = Padding::none;  // of every pass; micro_batch_tokens counts a sample's own tokens all the same
  // The same of the passes that only score (old log-probs, the reference's, a critic's values); both 0 = as training's.
  std::int64_t logprob_micro_batch_tokens = 0, logprob_micro_batch_sequences = 0;
  Recompute recompute = Recompute::none;
  std::string recompute_modules;  // of selective: "layernorm-mlp_act" (spec/recompute_modules.h); "" = the engine's own
  Precision precision;
  std::string load = "shards";  // who reads files at the start: "shards", each rank what it has; "rank0", the first
  Offload offload = Offload::sleep;
  bool reshard_after_forward = true;
  std::int64_t reshard_ranks = 0;  // of fsdp2: ranks that then keep a unit among them; 0: all that share it
  WrapSpec wrap;
  std::int64_t prefetch = 1;  // units gathered ahead of the one computed: 0 or 1
  /// Of a parameter, on each rank: from so many on, alike on all, it has a collective of its own; 0 = never.
  std::int64_t in_place_elements = 2'097'152;
  std::int64_t loss_chunk_tokens = 0;  // tokens of one logits chunk; 0 = the whole micro-batch at once
  std::string pipeline_schedule = "1f1b";
  std::vector<std::int64_t> pipeline_split;  // layers per stage; empty: by what follows (spec/pipeline_split.h)
  std::int64_t first_stage_layers = 0, last_stage_layers = 0;  // 0: as many as the others
  bool account_for_embedding = false, account_for_loss = false;
  double expert_capacity = 0;  // rows that come to a rank's experts at once, in multiples of an even share; 0 = all
  ExpertDispatch expert_dispatch = ExpertDispatch::per_expert;  // what of a token travels to experts of other ranks
  /// Of the losses that routers add (spec/router_loss.h); 0: of the first what the model's config asks for, of the
  /// second none.
  double router_aux_loss_coef = 0.0, router_z_loss_coef = 0.0;
  bool scores_apart() const { return logprob_micro_batch_tokens > 0 || logprob_micro_batch_sequences > 0; }
  /// Where micro-batches add up: FSDP casts what was reduced to its shard's dtype, the other engines add in their own.
  DType summed_grads() const {
    return engine == TrainEngine::fsdp1 || engine == TrainEngine::fsdp2 ? precision.master : precision.grads;
  }
  bool operator==(const TrainSpec&) const = default;
};

struct OptimizerSpec {
  OptimizerName name = OptimizerName::adamw;
  double lr = 1e-6, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.01;
  double max_grad_norm = 1.0;     // 0 = no clipping
  std::int64_t warmup_steps = 0;  // linear
  double momentum = 0;            // of SGD and Adafactor, 0 = none is kept
  /// Of the elements, those whose gradient, master copy and moments live in host memory for good and are stepped by
  /// the CPUs (Megatron's optimizer_cpu_offload with optimizer_offload_fraction).
  double cpu_fraction = 0;
  bool operator==(const OptimizerSpec&) const = default;
};

struct RolloutLayout {
  std::int64_t tp = 1, dp = 1, ep = 1, cp = 1, pp = 1, attention_dp = 1;
  RankOrder order = RankOrder::contiguous;
  std::int64_t ranks() const { return tp * pp * cp * dp; }
  bool operator==(const RolloutLayout&) const = default;
};

struct RolloutSpec {
  RolloutEngine engine = RolloutEngine::hotbunk;
  RolloutLayout layout;
  DType dtype = DType::bf16;            // weights and activations of the engine; default = train.precision.params
  std::string kv_cache_dtype = "auto";  // of its KV cache; auto: dtype
  std::string quantization;      // rollout.dtype fp8, mxfp8 or nvfp4: format of the layers' products, beside `dtype`
  double memory_fraction = 0.8;  // of the device, for weights + KV (SGLang's mem_fraction_static)
  std::int64_t max_running_requests = 256;  // slots of one engine
  std::int64_t max_prefill_tokens = 8192;   // capacity of one prefill step
  std::int64_t block_tokens = 16;           // tokens of one KV block
  std::int64_t kv_cache_tokens = 0;  // pool of one engine in tokens; 0 = what memory_fraction leaves, capped by need
  double temperature = 1.0, top_p = 1.0;
  std::int64_t top_k = 0;  // 0 = off
  bool eager = false;      // SGLang and vLLM without captured graphs: decode steps are launched kernel by kernel
  bool sleep = true;       // give weights and KV back while training runs
  std::int64_t sleep_level =
      2;  // 1: weights to the host, KV dropped; 2: both dropped (the next sync brings the weights)
  /// Of a number in the KV cache; of fp8 its byte, u8.
  DType kv_dtype() const { return kv_cache_dtype == "fp8" ? DType::u8 : dtype_from(kv_cache_dtype).value_or(dtype); }
  bool operator==(const RolloutSpec&) const = default;
};

struct SyncSpec {
  SyncMode mode = SyncMode::bucketed;
  std::int64_t bucket_bytes = std::int64_t{512} << 20;  // key: bucket_mib
  SyncTransport transport = SyncTransport::ipc;
  bool verify = false;     // hash every tensor on both sides after each sync (P5)
  std::int64_t every = 1;  // iterations from one sync to the next; between them the rollout keeps its weights
  bool operator==(const SyncSpec&) const = default;
};

struct AlgorithmSpec {
  AlgorithmName name = AlgorithmName::grpo;
  std::int64_t prompts = 128, samples_per_prompt = 8;  // per iteration
  std::int64_t mini_batches = 1;                       // optimizer steps per iteration
  bool reference = false;                              // reference log-probs by a frozen copy of the initial weights
  bool old_logprobs = true;  // recompute the sampling policy's log-probs with the training engine
  /// Of ppo: its critic beside the actor, by turns; or on as many GPUs of its own, which the cluster does not count.
  PlacementMode critic_placement = PlacementMode::colocated;
  /// The same of the reference model.
  PlacementMode reference_placement = PlacementMode::colocated;
  double clip_low = 0.2, clip_high = 0.2, kl_coef = 0.0;
  std::int64_t max_staleness =
      0;                      // iterations that the sampling weights may lag; > 0 lets rollout and training overlap
  bool normalize_std = true;  // group advantages divided by the group's standard deviation
  bool operator==(const AlgorithmSpec&) const = default;
};

struct LengthSpec {
  double mean = 512, max = 1024;  // tokens
  LengthDistribution distribution = LengthDistribution::lognormal;
  double cv = 0.5;  // coefficient of variation of the lognormal before truncation
  bool operator==(const LengthSpec&) const = default;
};

struct WorkloadSpec {
  LengthSpec prompt_tokens, response_tokens;
  std::int64_t max_tokens = 0;  // of a prompt and its response together; 0 = what both may have
  /// Tokens of the longest sample.
  double longest() const {
    const double both = prompt_tokens.max + response_tokens.max;
    return max_tokens > 0 && static_cast<double>(max_tokens) < both ? static_cast<double>(max_tokens) : both;
  }
  bool operator==(const WorkloadSpec&) const = default;
};

/// What a real run learns from: a built-in verifiable task, or token ids from a JSONL file (SFT).
struct TaskSpec {
  std::string name;         // "": none (simulation only); digit_sum | sort | reverse | add | parity
  std::int64_t digits = 4;  // size of a problem
  std::string data;         // SFT: path of JSONL, one array of token ids per line
  bool operator==(const TaskSpec&) const = default;
};

/// How a real run is driven.
struct RunSpec {
  double timeout_s = 600.0;       // a rank that is waited for may do nothing for so long; 0 = for ever
  bool checkpoint_async = false;  // checkpoints on the way are put on disk while the next steps train
  bool operator==(const RunSpec&) const = default;
};

/// One rank, or all ranks of one node, that take `factor` times as long.
struct Slowdown {
  std::int64_t rank = -1, node = -1;  // one of the two; -1: not this
  LinkKind link = LinkKind::network;  // of slow links
  double factor = 1.0;                // above 0
  bool operator==(const Slowdown&) const = default;
};

/// Times that scatter from op to op.
struct JitterSpec {
  double relative = 0.0;  // standard deviation over mean, 0 = none
  std::int64_t seed = 0;
  bool operator==(const JitterSpec&) const = default;
};

/// What is not as it should be in a cluster: `simulate` plays it, nothing else looks at it.
struct DisturbanceSpec {
  std::vector<Slowdown> slow_ranks, slow_nodes;  // their own ops: compute, not what they do with others
  std::vector<Slowdown> slow_links;
  JitterSpec jitter;
  bool none() const { return slow_ranks.empty() && slow_nodes.empty() && slow_links.empty() && jitter.relative == 0.0; }
  bool operator==(const DisturbanceSpec&) const = default;
};

/// Keys whose numbers were left open with `auto` (spec/auto_ranks.h): how they came to be is no part of what they are.
struct OpenKeys {
  std::vector<std::string> keys;
  bool operator==(const OpenKeys&) const { return true; }
};

struct Scenario {
  std::string name = "scenario";
  ModelSpec model;
  ClusterSpec cluster;
  PlacementMode placement = PlacementMode::colocated;
  TrainSpec train;
  OptimizerSpec optimizer;
  RolloutSpec rollout;
  SyncSpec sync;
  std::string transition = "hotbunk";  // order of sleep, wake and sync (spec/transition.h), steps joined by -; or auto
  AlgorithmSpec algorithm;
  WorkloadSpec workload;
  TaskSpec task;
  RunSpec run;
  DisturbanceSpec disturbances;
  std::string profile = "hotbunk";  // framework profile
  std::int64_t seed = 0;
  std::int64_t steps = 1;             // RL iterations of `simulate` and `run`
  std::int64_t checkpoint_every = 0;  // iterations; 0 = only at the end of a run
  OpenKeys open;
  bool operator==(const Scenario&) const = default;
};

}  // namespace hotbunk
