#include "spec/scenario_keys.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/format.h"
#include "base/json.h"
#include "spec/key_makers.h"

namespace hotbunk {
namespace {

using namespace key_makers;
using std::int64_t;

void add_train(std::vector<ScenarioKey>& keys) {
  keys.push_back(choice("train.engine", HB_FIELD(train.engine), {"", "how training is distributed"}));
  const std::string rank_rule = "train ranks = dp x cp x ulysses x tp x pp";
  keys.push_back(integer_or_auto("train.layout.dp", HB_FIELD(train.layout.dp), 1, max_ranks,
                                 {"ranks", "data parallel; " + rank_rule + "; auto: what the others leave"}));
  keys.push_back(integer("train.layout.fsdp", HB_FIELD(train.layout.fsdp), -1, max_ranks,
                         {"ranks", "shard group inside dp x cp x ulysses; -1 = all of it, smaller = HSDP"}));
  keys.push_back(steps("train.layout.shard_over", HB_FIELD(train.layout.shard_over),
                       {"",
                        "dimensions that a shard group lies in, some of dp, cp and ulysses: it is the nearest fsdp of "
                        "their ranks (-1: all), and each rank of the others has a copy; empty = all three"}));
  keys.back().only_when_set = true;
  keys.push_back(integer_or_auto("train.layout.cp", HB_FIELD(train.layout.cp), 1, max_ranks,
                                 {"ranks", "context parallel: of each sequence two chunks a rank"}));
  keys.push_back(integer_or_auto("train.layout.ulysses", HB_FIELD(train.layout.ulysses), 1, max_ranks,
                                 {"ranks", "sequence parallel by all-to-all; divides the attention heads"}));
  keys.push_back(
      integer_or_auto("train.layout.tp", HB_FIELD(train.layout.tp), 1, max_ranks, {"ranks", "tensor parallel"}));
  keys.push_back(
      boolean("train.layout.sp", HB_FIELD(train.layout.sp), {"", "Megatron sequence parallel over the tp group"}));
  keys.push_back(
      integer_or_auto("train.layout.pp", HB_FIELD(train.layout.pp), 1, max_ranks, {"ranks", "pipeline stages"}));
  keys.push_back(
      integer("train.layout.vpp", HB_FIELD(train.layout.vpp), 1, 1024, {"", "model chunks per pipeline stage"}));
  keys.push_back(integer("train.layout.ep", HB_FIELD(train.layout.ep), 1, max_ranks,
                         {"ranks", "expert parallel: whole experts are spread over so many"}));
  keys.push_back(integer("train.layout.etp", HB_FIELD(train.layout.etp), 1, max_ranks,
                         {"ranks", "tensor parallel inside an expert"}));
  keys.push_back(string("train.layout.order", HB_FIELD(train.layout.order),
                        {"", "order of the dimensions over ranks, fastest first (Megatron's default)"}));
  keys.push_back(choice("train.context_exchange", HB_FIELD(train.context_exchange),
                        {"",
                         "how cp ranks get keys and values: passed around a ring beside attention, or all gathered "
                         "before it; auto: as the profile's framework does (ours: what takes less)"}));
  keys.push_back(
      integer_or_auto("train.micro_batch_tokens", HB_FIELD(train.micro_batch_tokens), 1, max_tokens,
                      {"tokens", "of one micro-batch on one rank, after the cp and ulysses split and before sp"}));
  keys.push_back(integer("train.micro_batch_sequences", HB_FIELD(train.micro_batch_sequences), 0, max_tokens,
                         {"sequences", "of one micro-batch at most, beside its tokens; 0 = as many as these hold"}));
  keys.push_back(choice("train.padding", HB_FIELD(train.padding),
                        {"",
                         "none: samples are packed; micro-batch: each is computed with the tokens of the longest of "
                         "its micro-batch, while micro_batch_tokens counts their own; batch: with those of the longest "
                         "of all samples of the iteration"}));
  keys.push_back(integer("train.logprob_micro_batch_tokens", HB_FIELD(train.logprob_micro_batch_tokens), 0, max_tokens,
                         {"tokens",
                          "of a micro-batch of passes that only score (old log-probs, reference, values); 0 = room for "
                          "train.logprob_micro_batch_sequences of the longest, else as training's"}));
  keys.push_back(
      integer("train.logprob_micro_batch_sequences", HB_FIELD(train.logprob_micro_batch_sequences), 0, max_tokens,
              {"sequences", "of it at most; 0 = as many as its tokens hold. Planned and simulated, not executed"}));
  keys.push_back(
      choice("train.recompute", HB_FIELD(train.recompute), {"", "what backward computes again instead of keeping"}));
  keys.push_back(
      steps("train.recompute_modules", HB_FIELD(train.recompute_modules),
            {"",
             "of selective, which parts of a layer: some of core_attn, layernorm, mla_up_proj, mlp, mlp_act, "
             "moe, moe_act, shared_experts; empty = the profile's (ours: layernorm, mlp_act, moe_act)"}));
  keys.back().only_when_set = true;
  keys.push_back(word("train.load", HB_FIELD(train.load), {"shards", "rank0"},
                      {"",
                       "who reads the files of a model or checkpoint: shards: each rank its own part; rank0: the first "
                       "rank, parameter by parameter, which it broadcasts"}));
  keys.back().only_when_set = true;
  keys.push_back(floating_type("train.precision.params", HB_FIELD(train.precision.params),
                               {"", "compute and gathered parameters"}));
  keys.push_back(floating_type(
      "train.precision.grads", HB_FIELD(train.precision.grads),
      {"",
       "gradients of whole units and their reduction; also where micro-batches add up, but for FSDP, whose shards "
       "add in precision.master as PyTorch's do"}));
  keys.push_back(floating_type("train.precision.master", HB_FIELD(train.precision.master),
                               {"", "the copy the optimizer updates"}));
  keys.push_back(floating_type(
      "train.precision.moments", HB_FIELD(train.precision.moments),
      {"", "AdamW's two moments, and the momentum of the others; adamw-8bit and -4bit have formats of their own"}));
  keys.push_back(word("train.precision.gemm", HB_FIELD(train.precision.gemm),
                      {"params", "tf32", "fp8", "mxfp8", "nvfp4"},
                      {"", "of matrix products; narrower formats are planned from datasheets, not executed"}));
  keys.push_back(choice("train.offload", HB_FIELD(train.offload),
                        {"", "sleep: the whole state to the host while rollout runs; layerwise: FSDP2's CPU offload"}));
  keys.push_back(boolean_or_count(
      "train.reshard_after_forward", HB_FIELD(train.reshard_after_forward), HB_FIELD(train.reshard_ranks), 2, max_ranks,
      {"",
       "free a unit's gathered parameters after its forward and gather again for backward; a number, of fsdp2: keep "
       "them meanwhile among so many neighbours"}));
  keys.push_back(
      integer("train.prefetch", HB_FIELD(train.prefetch), 0, 1, {"units", "gathered ahead of the one computed"}));
  keys.push_back(integer(
      "train.in_place_elements", HB_FIELD(train.in_place_elements), 0, 1'000'000'000'000,
      {"elements",
       "that a rank has of a parameter: from so many on, if all ranks have as many, it is gathered and reduced "
       "by itself, where it lies, as is a unit of one such parameter; the rest, and experts that other ranks have "
       "copies of, goes through copies, a unit at a time; 0 = all does"}));
  keys.back().only_when_set = true;
  keys.push_back(
      real("train.expert_capacity", HB_FIELD(train.expert_capacity), 0, 1024,
           {"even shares",
            "of rows that come to a rank's experts at once, where ep spreads these over data ranks: what is more comes "
            "in further rounds; 0 = room for all"}));
  keys.back().only_when_set = true;
  keys.push_back(choice("train.expert_dispatch", HB_FIELD(train.expert_dispatch),
                        {"",
                         "what of a token goes to experts of other data ranks: a row for each of its experts, or one "
                         "copy for each rank that has some of them; auto: what costs less"}));
  keys.back().only_when_set = true;
  keys.push_back(real("train.router_aux_loss_coef", HB_FIELD(train.router_aux_loss_coef), 0, 1e6,
                      {"",
                       "of the loss by which routers spread each sequence over the experts; 0 = the model's "
                       "router_aux_loss_coef if its config says output_router_logits, else none"}));
  keys.back().only_when_set = true;
  keys.push_back(real("train.router_z_loss_coef", HB_FIELD(train.router_z_loss_coef), 0, 1e6,
                      {"", "of the loss by which routers keep their logits small; 0 = none"}));
  keys.back().only_when_set = true;
  keys.push_back(integer("train.loss_chunk_tokens", HB_FIELD(train.loss_chunk_tokens), 0, max_tokens,
                         {"tokens", "of one chunk of logits; 0 = the whole micro-batch at once"}));
  keys.push_back(
      integer("train.make_vocab_size_divisible_by", HB_FIELD(model.vocab_multiple), 0, 1 << 20,
              {"rows",
               "of the embedding and the head on each tp rank are a multiple of it: the vocabulary is padded "
               "to one of it times tp; 0 = as the profile's framework does (ours: 1)"}));
  keys.back().only_when_set = true;
  keys.push_back(word("train.pipeline_schedule", HB_FIELD(train.pipeline_schedule),
                      {"gpipe", "1f1b", "interleaved", "zero-bubble"}, {"", "order of micro-batches in the pipeline"}));
  keys.push_back(make(
      "train.pipeline_split", KeyType::integers, 0, 1 << 14, {"layers", "of each stage, first to last; empty = even"},
      [](const Scenario& s) -> KeyValue { return s.train.pipeline_split; },
      [](Scenario& s, const KeyValue& v) { s.train.pipeline_split = std::get<std::vector<int64_t>>(v); }));
  keys.push_back(integer("train.num_layers_in_first_pipeline_stage", HB_FIELD(train.first_stage_layers), 0, 1 << 14,
                         {"layers", "of the first stage, all its chunks together; 0 = as many as the others"}));
  keys.back().only_when_set = true;
  keys.push_back(integer("train.num_layers_in_last_pipeline_stage", HB_FIELD(train.last_stage_layers), 0, 1 << 14,
                         {"layers", "of the last stage; 0 = as many as the others"}));
  keys.back().only_when_set = true;
  keys.push_back(boolean("train.account_for_embedding_in_pipeline_split", HB_FIELD(train.account_for_embedding),
                         {"", "the embedding counts as a layer of the first stage, which has one fewer"}));
  keys.back().only_when_set = true;
  keys.push_back(boolean("train.account_for_loss_in_pipeline_split", HB_FIELD(train.account_for_loss),
                         {"", "the head and the loss count as a layer of the last stage, which has one fewer"}));
  keys.back().only_when_set = true;
  keys.push_back(
      steps("train.frozen", HB_FIELD(model.frozen),
            {"",
             "patterns of parameters that do not train, as [model.embed_tokens.*, *.0.*]; * is any text, dots "
             "too, ? one character"}));
  keys.back().only_when_set = true;
  const std::size_t first_of_wrap = keys.size();
  keys.push_back(choice("train.wrap.policy", HB_FIELD(train.wrap.policy),
                        {"", "of fsdp1: which modules have a flat parameter of their own"}));
  keys.push_back(
      integer("train.wrap.min_parameters", HB_FIELD(train.wrap.min_parameters), 1, 1e15,
              {"parameters", "of policy size: what a module has at least, beside those inside it that are wrapped"}));
  keys.push_back(steps("train.wrap.names", HB_FIELD(train.wrap.names),
                       {"",
                        "of policy names: patterns of modules, as [model.layers.*.mlp, lm_head]; * is any text, dots "
                        "too, ? one character"}));
  for (std::size_t i = first_of_wrap; i < keys.size(); ++i) keys[i].only_when_set = true;
  // What is not adapted is not spoken of.
  const std::size_t first_of_lora = keys.size();
  keys.push_back(integer("train.lora.rank", HB_FIELD(model.lora.rank), 0, 1 << 16,
                         {"", "of the adapters that are trained in the place of the model; 0: the model is trained"}));
  keys.push_back(real("train.lora.alpha", HB_FIELD(model.lora.alpha), 1e-6, 1e6,
                      {"", "adapters are scaled by alpha / rank (PEFT's lora_alpha)"}));
  keys.push_back(
      steps("train.lora.targets", HB_FIELD(model.lora.targets),
            {"",
             "matrices of each layer that have one: all-linear, or some of q_proj, k_proj, v_proj, o_proj, "
             "gate_proj, up_proj, down_proj; of a family with other modules their names (c_attn, kv_b_proj)"}));
  keys.push_back(string("train.lora.adapter", HB_FIELD(model.lora.adapter),
                        {"", "folder of a PEFT adapter to begin with; empty: B is zero, A uniform (PEFT's own)"}));
  for (std::size_t i = first_of_lora; i < keys.size(); ++i) keys[i].only_when_set = true;

  keys.push_back(choice("optimizer.name", HB_FIELD(optimizer.name),
                        {"", "adamw is executed; the others are priced (bytes, step time, traffic)"}));
  keys.push_back(real("optimizer.lr", HB_FIELD(optimizer.lr), 0, 1e3, {"", "learning rate after warm-up"}));
  keys.push_back(real("optimizer.beta1", HB_FIELD(optimizer.beta1), 0, 1, {"", "decay of the first moment"}));
  keys.push_back(real("optimizer.beta2", HB_FIELD(optimizer.beta2), 0, 1, {"", "decay of the second moment"}));
  keys.push_back(
      real("optimizer.eps", HB_FIELD(optimizer.eps), 1e-30, 1, {"", "added to the root of the second moment"}));
  keys.push_back(
      real("optimizer.weight_decay", HB_FIELD(optimizer.weight_decay), 0, 1e3, {"", "decoupled weight decay"}));
  keys.push_back(real("optimizer.max_grad_norm", HB_FIELD(optimizer.max_grad_norm), 0, 1e9,
                      {"", "global gradient norm is clipped to it; 0 = no clipping"}));
  keys.push_back(integer("optimizer.warmup_steps", HB_FIELD(optimizer.warmup_steps), 0, 1e9,
                         {"optimizer steps", "linear warm-up from 0"}));
  keys.push_back(real("optimizer.cpu_fraction", HB_FIELD(optimizer.cpu_fraction), 0, 1,
                      {"",
                       "of the elements, those whose master copy and moments stay in host memory, with a copy of "
                       "the gradient, and are stepped by the CPUs; of megatron, zero1, zero2 and ddp, and of sharded "
                       "parameters under profile openrlhf (ZeRO-3)"}));
  keys.push_back(real("optimizer.momentum", HB_FIELD(optimizer.momentum), 0, 1,
                      {"", "of sgd and adafactor; 0 = none, and no state for it"}));
}

/// One word of two meanings: an element type, or a narrow format of the layers' products. Then what stays wide keeps
/// the type that training computes in (loader.cc).
ScenarioKey rollout_dtype() {
  ScenarioKey key = floating_type("rollout.dtype", HB_FIELD(rollout.dtype),
                                  {"",
                                   "weights and activations of the engine; fp8, mxfp8, nvfp4: of the layers' products "
                                   "under sglang and vllm, planned from datasheets",
                                   "train.precision.params"});
  key.get = [](const Scenario& s) -> KeyValue {
    return s.rollout.quantization.empty() ? std::string(name_of(s.rollout.dtype)) : s.rollout.quantization;
  };
  key.set = [](Scenario& s, const KeyValue& v) {
    const std::string& word = std::get<std::string>(v);
    const auto dtype = dtype_from(word);
    s.rollout.quantization = dtype ? "" : word;
    if (dtype) s.rollout.dtype = *dtype;
  };
  for (const char* format : {"fp8", "mxfp8", "nvfp4"}) key.choices.emplace_back(format);
  return key;
}

void add_rollout(std::vector<ScenarioKey>& keys) {
  keys.push_back(choice("rollout.engine", HB_FIELD(rollout.engine), {"", "whose memory rules the engine follows"}));
  keys.push_back(integer_or_auto("rollout.layout.tp", HB_FIELD(rollout.layout.tp), 1, max_ranks,
                                 {"ranks", "tensor parallel of one engine; rollout ranks = tp x pp x cp x dp"}));
  keys.push_back(integer_or_auto("rollout.layout.dp", HB_FIELD(rollout.layout.dp), 1, max_ranks,
                                 {"engines", "number of engines; auto: what the others leave"}));
  keys.push_back(integer("rollout.layout.ep", HB_FIELD(rollout.layout.ep), 1, max_ranks,
                         {"ranks", "expert parallel inside an engine; divides tp x cp, of hotbunk tp"}));
  keys.push_back(integer_or_auto(
      "rollout.layout.cp", HB_FIELD(rollout.layout.cp), 1, max_ranks,
      {"ranks",
       "context parallel of one engine: ranks that a sequence's cache (hotbunk), prompts (sglang) or both (vllm) are "
       "spread over"}));
  keys.push_back(integer_or_auto("rollout.layout.pp", HB_FIELD(rollout.layout.pp), 1, max_ranks,
                                 {"ranks", "pipeline stages of one engine"}));
  keys.push_back(integer(
      "rollout.layout.attention_dp", HB_FIELD(rollout.layout.attention_dp), 1, max_ranks,
      {"", "attention data parallel inside an engine: groups of its ranks with sequences of their own; divides tp"}));
  keys.push_back(
      choice("rollout.layout.order", HB_FIELD(rollout.layout.order),
             {"", "ranks of one engine: contiguous (0 1), strided (0 2) or what moves the fewest bytes in a sync"}));
  keys.push_back(rollout_dtype());
  keys.push_back(real("rollout.memory_fraction", HB_FIELD(rollout.memory_fraction), 0.01, 1,
                      {"", "of the device, for weights and KV cache"}));
  keys.push_back(integer("rollout.max_running_requests", HB_FIELD(rollout.max_running_requests), 1, 1 << 20,
                         {"requests", "decoded together by one engine"}));
  keys.push_back(integer("rollout.max_prefill_tokens", HB_FIELD(rollout.max_prefill_tokens), 1, max_tokens,
                         {"tokens", "capacity of one prefill step of an engine"}));
  keys.push_back(integer("rollout.block_tokens", HB_FIELD(rollout.block_tokens), 1, 4096,
                         {"tokens", "of one block of the KV cache"}));
  keys.push_back(
      word("rollout.kv_cache_dtype", HB_FIELD(rollout.kv_cache_dtype), {"auto", "fp32", "bf16", "fp8"},
           {"",
            "of keys and values in the engine's cache; auto: rollout.dtype. Of another type, log-probs are training's "
            "to its rounding, not to the bit; fp8 is planned for sglang and vllm"}));
  keys.back().only_when_set = true;
  keys.push_back(
      integer("rollout.kv_cache_tokens", HB_FIELD(rollout.kv_cache_tokens), 0, max_tokens,
              {"tokens", "KV pool of one engine; 0 = what memory_fraction leaves, at most what the requests need"}));
  keys.push_back(real("rollout.temperature", HB_FIELD(rollout.temperature), 0, 100,
                      {"", "of sampling; 0 = greedy, others from 1e-6"}));
  keys.push_back(real("rollout.top_p", HB_FIELD(rollout.top_p), 0, 1, {"", "probability mass sampled from; 1 = all"}));
  keys.push_back(integer("rollout.top_k", HB_FIELD(rollout.top_k), 0, 1 << 28,
                         {"tokens", "most probable ones sampled from; 0 = all"}));
  keys.push_back(boolean("rollout.eager", HB_FIELD(rollout.eager),
                         {"", "decode steps are launched kernel by kernel, without captured graphs; ours always are"}));
  keys.push_back(
      boolean("rollout.sleep", HB_FIELD(rollout.sleep), {"", "give weights and KV cache back while training runs"}));
  keys.push_back(
      integer("rollout.sleep_level", HB_FIELD(rollout.sleep_level), 1, 2,
              {"", "1: weights to the host, KV dropped; 2: both dropped, the next sync brings the weights"}));

  keys.push_back(choice("sync.mode", HB_FIELD(sync.mode), {"", "how weights travel from training to rollout"}));
  keys.push_back(bytes("sync.bucket_mib", HB_FIELD(sync.bucket_bytes), mib, 1.0 / 1024, 1 << 20,
                       {"MiB", "of one bucket of gathered weights"}));
  keys.push_back(choice("sync.transport", HB_FIELD(sync.transport),
                        {"", "ipc: peers read each other's shared memory, one host; collective: all-gather",
                         "ipc, collective on several nodes"}));
  keys.push_back(
      boolean("sync.verify", HB_FIELD(sync.verify), {"", "hash every tensor on both sides after each sync"}));
  keys.push_back(integer("sync.every", HB_FIELD(sync.every), 1, 1e9,
                         {"iterations", "from one sync to the next; above 1 the rollout samples from older weights"}));
}

void add_rest(std::vector<ScenarioKey>& keys) {
  keys.push_back(choice("algorithm.name", HB_FIELD(algorithm.name), {"", "what is optimised"}));
  keys.push_back(integer("algorithm.prompts", HB_FIELD(algorithm.prompts), 1, 1 << 24,
                         {"prompts", "per iteration, all ranks together"}));
  keys.push_back(integer("algorithm.samples_per_prompt", HB_FIELD(algorithm.samples_per_prompt), 1, 1 << 16,
                         {"samples", "the group of GRPO"}));
  keys.push_back(integer("algorithm.mini_batches", HB_FIELD(algorithm.mini_batches), 1, 1 << 20,
                         {"", "optimizer steps per iteration"}));
  keys.push_back(boolean("algorithm.reference", HB_FIELD(algorithm.reference),
                         {"", "log-probs of a frozen copy of the initial weights"}));
  keys.push_back(boolean("algorithm.old_logprobs", HB_FIELD(algorithm.old_logprobs),
                         {"", "recompute the sampling policy's log-probs with the training engine"}));
  keys.push_back(choice("algorithm.reference_placement", HB_FIELD(algorithm.reference_placement),
                        {"",
                         "the reference model uses the actor's GPUs, or has as many of its own beside the cluster's, "
                         "and works while the actor computes its log-probs"}));
  keys.push_back(choice("algorithm.critic_placement", HB_FIELD(algorithm.critic_placement),
                        {"",
                         "of ppo: the critic shares the actor's GPUs, or has as many of its own beside the "
                         "cluster's, and works at the same time"}));
  keys.push_back(real("algorithm.clip_low", HB_FIELD(algorithm.clip_low), 0, 1,
                      {"", "the ratio is clipped to at least 1 - clip_low"}));
  keys.push_back(real("algorithm.clip_high", HB_FIELD(algorithm.clip_high), 0, 1e3,
                      {"", "the ratio is clipped to at most 1 + clip_high"}));
  keys.push_back(real("algorithm.kl_coef", HB_FIELD(algorithm.kl_coef), 0, 1e3,
                      {"", "weight of the KL term to the reference; needs reference"}));
  keys.push_back(
      integer("algorithm.max_staleness", HB_FIELD(algorithm.max_staleness), 0, 1024,
              {"iterations", "that the sampling weights may lag; above 0 disaggregated rollout overlaps training"}));
  keys.push_back(boolean("algorithm.normalize_std", HB_FIELD(algorithm.normalize_std),
                         {"", "divide group advantages by the group's standard deviation"}));

  const auto lengths = [&](const std::string& prefix, auto field, const std::string& what) {
    keys.push_back(real(prefix + ".mean", [field](auto& s) -> auto& { return field(s).mean; }, 1, max_tokens,
                        {"tokens", "mean length of " + what}));
    keys.push_back(real(prefix + ".max", [field](auto& s) -> auto& { return field(s).max; }, 1, max_tokens,
                        {"tokens", "longest " + what}));
    keys.push_back(choice(prefix + ".distribution", [field](auto& s) -> auto& { return field(s).distribution; },
                          {"", "fixed: all of length mean; uniform: 1 to 2 mean - 1; lognormal"}));
    keys.push_back(real(prefix + ".cv", [field](auto& s) -> auto& { return field(s).cv; }, 0, 100,
                        {"", "standard deviation / mean of the lognormal, before it is cut at max"}));
  };
  lengths("workload.prompt_tokens", HB_FIELD(workload.prompt_tokens), "prompts");
  lengths("workload.response_tokens", HB_FIELD(workload.response_tokens), "responses");
  keys.push_back(integer("workload.max_tokens", HB_FIELD(workload.max_tokens), 0, max_tokens,
                         {"tokens", "of a prompt and its response together; 0 = what both may have"}));

  keys.push_back(
      string("task.name", HB_FIELD(task.name), {"", "built-in verifiable task of `run`; empty = simulation only"}));
  keys.push_back(integer("task.digits", HB_FIELD(task.digits), 1, 1024, {"", "size of one problem"}));
  keys.push_back(string("task.data", HB_FIELD(task.data), {"", "sft: JSONL file, one array of token ids per line"}));
  keys.push_back(real("run.timeout_s", HB_FIELD(run.timeout_s), 0, 1e9,
                      {"s",
                       "that a rank others wait for may spend without ending an operation or using its CPU before "
                       "the run ends; 0 = for ever"}));
  keys.push_back(boolean("run.checkpoint_async", HB_FIELD(run.checkpoint_async),
                         {"", "put checkpoints on disk while the next steps train, but for the last"}));
}

/// What nobody disturbs is not spoken of: the resolved form has these keys only where they are set.
void add_disturbances(std::vector<ScenarioKey>& keys) {
  const std::size_t first = keys.size();
  keys.push_back(slowdowns("disturbances.slow_ranks", HB_FIELD(disturbances.slow_ranks), {"rank", "factor"},
                           {"", "ranks whose own ops (kernels, priced blocks) take factor times as long"}));
  keys.push_back(slowdowns("disturbances.slow_nodes", HB_FIELD(disturbances.slow_nodes), {"node", "factor"},
                           {"", "the same of all ranks of a node; a rank of both takes the product"}));
  keys.push_back(slowdowns("disturbances.slow_links", HB_FIELD(disturbances.slow_links),
                           {"rank", "node", "link", "factor"},
                           {"",
                            "links of a rank, or of all ranks of a node, that have 1 / factor of their rate; link: "
                            "network (between nodes, the default), nvlink (inside a node), pcie (to the host)"}));
  keys.push_back(real("disturbances.jitter.relative", HB_FIELD(disturbances.jitter.relative), 0, 1,
                      {"", "standard deviation / mean of each single op's time, lognormal; 0 = none"}));
  keys.push_back(integer("disturbances.jitter.seed", HB_FIELD(disturbances.jitter.seed), 0, 9.0e15,
                         {"", "key of the jitter's random numbers"}));
  for (std::size_t i = first; i < keys.size(); ++i) keys[i].only_when_set = true;
}

std::vector<ScenarioKey> build() {
  std::vector<ScenarioKey> keys;
  keys.push_back(string("name", HB_FIELD(name), {"", "title in reports and run folders", "the file's name"}));
  keys.push_back(integer("seed", HB_FIELD(seed), 0, 9.0e15, {"", "key of every random number"}));
  keys.push_back(integer("steps", HB_FIELD(steps), 1, 1e9, {"iterations", "of `simulate` and `run`"}));
  keys.push_back(integer("checkpoint_every", HB_FIELD(checkpoint_every), 0, 1e9,
                         {"iterations", "between checkpoints; 0 = only at the end"}));
  keys.push_back(word(
      "profile", HB_FIELD(profile),
      {"hotbunk",
       "verl-fsdp",
       "verl-megatron",
       "slime-fsdp",
       "slime-megatron",
       "nemo-fsdp",
       "nemo-megatron",
       "openrlhf",
       "torchtitan",
       "torchtitan-compile",
       "megatron",
       "megatron-te",
       "megatron-te-overlap",
       "megatron-h100",
       "megatron-bridge",
       "megatron-bridge-graphs",
       "megatron-a100",
       "megatron-a100-flash",
       "megatron-sc21",
       "megatron-vtrain",
       "deepspeed-zero3"},
      {"",
       "framework whose rules and constants are followed; those behind torchtitan are the ones that `validate` "
       "predicts published rows by; verl and slime also set transition and sync.bucket_mib where they are left out"}));
  keys.push_back(
      choice("placement", HB_FIELD(placement), {"", "colocated: training and rollout share the ranks by shifts"}));
  keys.push_back(
      steps("transition", HB_FIELD(transition),
            {"", "order of sleep, wake and sync: hotbunk, slime, verl, verl-old, a list of steps, or auto"}));
  add_cluster_keys(keys);
  add_train(keys);
  add_rollout(keys);
  add_rest(keys);
  add_disturbances(keys);
  return keys;
}

const std::map<std::string, std::string, std::less<>>& sections() {
  static const std::map<std::string, std::string, std::less<>> docs = {
      {"cluster", "the machines"},
      {"cluster.gpu", "one device: a catalogue name, or a map"},
      {"cluster.gpu.tflops", "dense peak by precision; leave out what the device lacks"},
      {"train", "the training engine"},
      {"train.layout", "parallel dimensions of training"},
      {"train.precision", "dtypes: fp32, bf16 or fp16"},
      {"train.wrap", "of fsdp1: units"},
      {"train.lora", "low-rank adapters"},
      {"optimizer", "AdamW, or what else is priced"},
      {"rollout", "the generation engines"},
      {"rollout.layout", "parallel dimensions of rollout"},
      {"sync", "weights from training to rollout"},
      {"algorithm", "what one iteration does"},
      {"workload",
       "lengths that simulation draws and plans provide for; a sample, of sft too, is a prompt and a response"},
      {"workload.prompt_tokens", ""},
      {"workload.response_tokens", ""},
      {"task", "what a real run learns"},
      {"run", "how a real run is driven"},
      {"disturbances", "what is not as it should be: played by `simulate` only"},
      {"disturbances.jitter", "times that scatter"},
  };
  return docs;
}

}  // namespace

const std::vector<ScenarioKey>& scenario_keys() {
  static const std::vector<ScenarioKey> keys = build();
  return keys;
}

const ScenarioKey* find_scenario_key(std::string_view path) {
  for (const auto& key : scenario_keys())
    if (key.path == path) return &key;
  return nullptr;
}

bool is_scenario_section(std::string_view path) { return sections().contains(path); }

std::string_view scenario_section_doc(std::string_view path) {
  const auto at = sections().find(path);
  return at == sections().end() ? std::string_view{} : at->second;
}

std::vector<std::string> names_under(const std::string& section) {
  const std::string prefix = section.empty() ? "" : section + ".";
  std::vector<std::string> names;
  if (section.empty()) names.emplace_back("model");
  for (const auto& key : scenario_keys()) {
    if (!key.path.starts_with(prefix)) continue;
    const std::string rest = key.path.substr(prefix.size());
    const std::string name = rest.substr(0, rest.find('.'));
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return names;
}

std::string yaml_text(const std::string& text) {
  const bool plain = !text.empty() && text.size() < 200 &&
                     std::isalpha(static_cast<unsigned char>(text.front())) != 0 &&
                     std::all_of(text.begin(), text.end(), [](unsigned char c) {
                       return c < 128 && (std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.' || c == '/');
                     });
  static const std::vector<std::string> reserved = {"true", "false", "null", "yes", "no", "on",
                                                    "off",  "inf",   "nan",  "y",   "n"};
  std::string lower = text;
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (plain && std::find(reserved.begin(), reserved.end(), lower) == reserved.end()) return text;
  return json_text(nlohmann::json(text), -1, NotUtf8::replaced);
}

std::string yaml_of(const KeyValue& value) {
  struct Printer {
    std::string operator()(std::monostate) const { return "null"; }
    std::string operator()(int64_t x) const { return fmt::format("{}", x); }
    std::string operator()(double x) const { return fmt::format("{}", x); }
    std::string operator()(bool x) const { return x ? "true" : "false"; }
    std::string operator()(const std::string& x) const { return yaml_text(x); }
    std::string operator()(const std::vector<int64_t>& x) const { return fmt::format("[{}]", fmt::join(x, ", ")); }
    std::string operator()(const std::vector<Slowdown>& all) const {
      std::vector<std::string> maps;
      for (const Slowdown& x : all) {
        std::string at = x.rank >= 0 ? fmt::format("rank: {}", x.rank) : fmt::format("node: {}", x.node);
        if (x.link != LinkKind::network) at += fmt::format(", link: {}", name_of(x.link));
        maps.push_back(fmt::format("{{{}, factor: {}}}", at, x.factor));
      }
      return fmt::format("[{}]", fmt::join(maps, ", "));
    }
    std::string operator()(const Sourced& x) const {
      return fmt::format("{{value: {}, source: {}}}", x.value,
                         json_text(nlohmann::json(x.source), -1, NotUtf8::replaced));
    }
  };
  return std::visit(Printer{}, value);
}

}  // namespace hotbunk
