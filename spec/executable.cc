// Which of the scenarios that hold to all rules today's backends execute, and why not the others.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "spec/expert_mesh.h"
#include "spec/expert_rounds.h"
#include "spec/names.h"
#include "spec/pipeline_split.h"
#include "spec/validate.h"

namespace hotbunk {
namespace {

/// What the kernels compute in: parameters, activations and KV cache in fp32 or bf16, gradients in fp32 or, as those of
/// bf16 parameters, in bf16; the master copy and moments in fp32 (backends/cpu_gloo/op_kernels.cc refuses the rest op
/// by op, for plans from elsewhere).
template <class Need>
void executable_precision(const Scenario& s, const Need& need) {
  const Precision& p = s.train.precision;
  const auto computed_in = [](DType t) { return t == DType::f32 || t == DType::bf16; };
  need(computed_in(p.params), "train.precision.params {}: fp32 and bf16 are executed", name_of(p.params));
  need(computed_in(p.grads), "train.precision.grads {}: fp32 and bf16 are executed", name_of(p.grads));
  need(p.grads != DType::bf16 || p.params == DType::bf16,
       "train.precision.grads bf16 with params {}: gradients are bf16 where what is multiplied is; set "
       "train.precision.params to bf16, or grads to fp32",
       name_of(p.params));
  for (const auto& [key, dtype] : {std::pair{"master", p.master}, {"moments", p.moments}})
    need(dtype == DType::f32, "train.precision.{} {}: fp32 is executed", key, name_of(dtype));
  need(p.gemm == "params", "matrix products in {}", p.gemm);
  if (s.algorithm.name == AlgorithmName::sft) return;
  need(computed_in(s.rollout.dtype), "rollout.dtype {}: fp32 and bf16 are executed", name_of(s.rollout.dtype));
  need(!s.model.mla || s.rollout.kv_dtype() == s.rollout.dtype,
       "rollout.kv_cache_dtype {} with latents: these are kept in rollout.dtype where they are executed, {}",
       s.rollout.kv_cache_dtype, name_of(s.rollout.dtype));
}

/// Of the model itself.
template <class Need>
void executable_model(const Scenario& s, const Need& need) {
  need(!s.model.linear && !s.model.gated_attention,
       "{} has linear attention (gated delta nets) in {} of {} layers, and gates of attention's output: planned and "
       "simulated, no kernel computes them",
       s.model.name, s.model.linear_layers(), s.model.layers);
}

/// Which ranks may have other experts than their neighbours: tensor-parallel ones, data ranks of one copy of what is
/// sharded, where it is, or both.
template <class Need>
void executable_experts(const Scenario& s, const Need& need) {
  const TrainLayout& t = s.train.layout;
  if (!s.model.moe) return;
  const MoeSpec& moe = *s.model.moe;
  need(!moe.biases || s.model.hidden % t.etp == 0,
       "train.layout.etp {} with biases behind experts: {} of hidden size % {} = {}", t.etp, s.model.hidden, t.etp,
       s.model.hidden % t.etp);
  const ExpertMesh mesh = expert_mesh(s);
  if (!mesh.lies_apart()) return;
  const std::int64_t shards = s.train.engine == TrainEngine::ddp ? 1 : t.shard_ranks();
  const bool over_both = mesh.blocks > 1 || mesh.wholes > 1;
  const std::string where = !over_both ? (mesh.parts > 1 ? fmt::format(" x etp {}", t.etp) : "")
                            : mesh.blocks == 1
                                ? fmt::format(" over tp {} and {} data ranks", t.tp, mesh.spread)
                                : fmt::format(" x etp {} over blocks of {} of tp {}", t.etp, mesh.places, t.tp);
  need(shards == 1 || shards % mesh.spread == 0,
       "train.layout.ep {}{} with what {} data ranks shard: {} % {} = {}; ranks that spread experts have to be among "
       "those",
       t.ep, where, shards, shards, mesh.spread, shards % mesh.spread);
  // A place sends its part of a token's rows on average (filled_up): of tokens that divide, a whole number.
  need(!over_both || t.sp, "train.layout.ep {}{} without sequence parallelism: {}; set train.layout.sp to true", t.ep,
       where,
       mesh.blocks == 1 ? fmt::format("its places share rows of tokens evenly, which have to divide by tp {}", t.tp)
                        : std::string("a block needs tokens of its own"));
}

/// A flat parameter is stepped as a whole.
template <class Need>
void executable_flat(const Scenario& s, const Need& need) {
  need(!s.model.moe || !s.model.moe->router_bias,
       "train.engine fsdp1 with a router's bias (e_score_correction_bias): no optimizer steps it, and a flat parameter "
       "is stepped as a whole; fsdp2 leaves it out");
}

/// How an engine of ours shares a model: tensor parallelism, with all of some experts on each rank, columns of each, or
/// columns of some, and a pipeline; and its sequences: context parallelism.
template <class Need>
void executable_engines(const Scenario& s, const Need& need) {
  const RolloutLayout& r = s.rollout.layout;
  const ModelSpec& m = s.model;
  const bool has_mlp = !m.moe || m.moe->first_dense_layers > 0;
  need(r.attention_dp == 1 || !has_mlp || m.intermediate % r.tp == 0,
       "rollout.layout.tp {}: the {} columns of an MLP do not divide by it", r.tp, m.intermediate);
  need(r.tp % r.ep == 0,
       "rollout.layout.ep {} with tp {}: {} % {} = {}; of an engine's tensor-parallel ranks groups of one size have "
       "other experts each",
       r.ep, r.tp, r.tp, r.ep, r.tp % r.ep);
  if (m.moe && r.tp % r.ep == 0) {
    const std::int64_t columns = r.tp / r.ep;
    const std::string sharers = r.ep == 1 ? "it" : fmt::format("the {} ranks that share one with ep {}", columns, r.ep);
    need(m.moe->expert_intermediate % columns == 0,
         "rollout.layout.tp {}: the {} columns of an expert do not divide by {}; with ep {} ranks have whole ones",
         r.tp, m.moe->expert_intermediate, sharers, r.tp);
    need(!m.moe->biases || m.hidden % columns == 0,
         "rollout.layout.tp {}: biases behind experts, of the hidden size {}, do not divide by {}", r.tp, m.hidden,
         sharers);
  }
  need(m.layers % r.pp == 0, "rollout.layout.pp {}: {} layers do not divide by it", r.pp, m.layers);
}

}  // namespace

std::vector<std::string> unsupported_to_execute(const Scenario& s) {
  std::vector<std::string> reasons;
  const auto need = [&]<class... Args>(bool ok, fmt::format_string<Args...> why, Args&&... args) {
    if (!ok) reasons.push_back(fmt::format(why, std::forward<Args>(args)...));
  };
  need(s.profile == "hotbunk", "profile {}: hotbunk's own is executed, the rules of others are priced", s.profile);
  const ModelSpec& m = s.model;
  const TrainLayout& t = s.train.layout;
  const bool sft = s.algorithm.name == AlgorithmName::sft;
  need(!m.moe || m.moe->router_jitter == 0.0, "noise on what routers see (router_jitter_noise)");
  const auto scalings = {"llama3", "linear", "yarn"};
  need(!m.rope_scaling || std::ranges::count(scalings, m.rope_scaling->type) > 0,
       "rotary scaling {}: llama3, linear and yarn are executed", m.rope_scaling ? m.rope_scaling->type : "");
  const TrainEngine e = s.train.engine;
  need(e != TrainEngine::megatron, "train.engine {}: ddp, zero1, zero2, fsdp1 and fsdp2 are executed", name_of(e));
  if (e == TrainEngine::fsdp1) executable_flat(s, need);
  need(std::ranges::count(split_layers(s), 0) == 0, "a pipeline stage without layers");
  if (const std::int64_t few = s.train.reshard_ranks, apart = expert_mesh(s).spread; few > 0 && apart > 1)
    need(t.shard_ranks() % (few * apart) == 0,
         "train.reshard_after_forward {} with train.layout.ep {}: of {} ranks that share a copy, {} have the same "
         "experts, {} % {} = {}; those that keep a unit among them have to",
         few, t.ep, t.shard_ranks(), t.shard_ranks() / apart, t.shard_ranks() / apart, few,
         t.shard_ranks() / apart % few);
  executable_experts(s, need);
  const bool copies = s.train.expert_dispatch == ExpertDispatch::per_rank;
  need(!copies || expert_rounds(s).rounds == 1,
       "train.expert_dispatch per-rank with train.expert_capacity {}: a round has rows of experts, and no copies of "
       "tokens",
       s.train.expert_capacity);
  const ExpertMesh experts = expert_mesh(s);
  need(!copies || experts.may_send_copies(), "train.expert_dispatch per-rank with {} (etp {} of tp {})",
       experts.wholes > 1 ? "whole experts over tensor-parallel places" : "blocks of several tensor-parallel ranks",
       t.etp, t.tp);
  need(!t.sp || s.train.micro_batch_tokens % t.tp == 0,
       "train.micro_batch_tokens {} with sequence parallelism over tp {}: it has to divide", s.train.micro_batch_tokens,
       t.tp);
  need(sft || !s.train.scores_apart(), "log-prob passes in micro-batches of their own (train.logprob_micro_batch_*)");
  need(s.optimizer.name == OptimizerName::adamw, "optimizer {}: adamw is executed", name_of(s.optimizer.name));
  need(s.train.padding == Padding::none, "padded micro-batches (train.padding)");
  need(s.optimizer.cpu_fraction == 0 || (e != TrainEngine::fsdp1 && e != TrainEngine::fsdp2),
       "optimizer.cpu_fraction beside the shards of {}: train.offload layerwise is executed there", name_of(e));
  need(s.placement == PlacementMode::colocated, "disaggregated placement");
  need(m.heads <= 128 * m.kv_heads, "{} query heads per KV head: the kernels take 128", m.heads / m.kv_heads);
  need(sft || s.transition != "auto", "transition auto: `plan` names the order that it takes; set that one");
  need(s.algorithm.reference_placement == PlacementMode::colocated,
       "a reference model on GPUs of its own (algorithm.reference_placement)");
  need(s.workload.longest() == s.workload.prompt_tokens.max + s.workload.response_tokens.max, "workload.max_tokens");
  need(s.algorithm.name != AlgorithmName::ppo, "algorithm ppo: grpo and sft are executed");
  if (!sft) {
    need(s.rollout.engine == RolloutEngine::hotbunk, "rollout.engine {}: hotbunk is executed",
         name_of(s.rollout.engine));
    executable_engines(s, need);
    need(s.sync.mode == SyncMode::bucketed, "sync.mode {}: bucketed is executed", name_of(s.sync.mode));
  }
  executable_precision(s, need);
  executable_model(s, need);
  return reasons;
}

}  // namespace hotbunk
