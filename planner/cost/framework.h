// Framework profiles: what one training framework does that another does not, as settings, each with a source.
// scenarios/catalog/frameworks/NAME.yaml, schema hotbunk.framework/1; docs/planner.md lists the keys.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "base/diagnostic.h"
#include "spec/cluster.h"
#include "spec/recompute_modules.h"

namespace hotbunk {

/// What a launch of the framework can say, as data: the search proposes nothing else, levers turn nothing else, lint
/// names what a scenario asks for beyond it (planner/answers/lacking.h). By default all that a scenario can.
struct Capabilities {
  std::string source;                                  // of the table
  bool tensor = true, pipeline = true, expert = true;  // ways to cut the trained model
  bool ring = true, ulysses = true;                    // ways to cut sequences
  // Schedules besides 1F1B and its interleaved form, which every engine with pipelines has.
  bool gpipe = false, zero_bubble = false;
  bool shard_groups = true;       // a replica's shards over fewer than all data ranks
  bool layerwise_offload = true;  // of FSDP
  bool loss_chunks = false;       // known to form training's logits some tokens at a time (train.loss_chunk_tokens)
  bool padding = false;           // micro-batches may be padded to their longest sample (train.padding)
  bool critic_apart = false;      // PPO's critic on GPUs of its own
  bool reference_apart = false;   // the reference model, too
  bool strided_engines = true;    // an engine's ranks need not be neighbours
  bool rollout_pipeline = true, rollout_context = true, rollout_experts = true, attention_dp = true;
  bool apart = true;         // training and rollout on GPUs of their own
  bool awake = true;         // colocated, training may stay on the device
  bool sleeps_apart = true;  // parameters may sleep without the optimizer, and the optimizer without them
  bool reshard_choice = true, bucket_choice = true;  // train.reshard_after_forward, sync.bucket_mib are said
  bool padded_vocabulary = true;                     // train.make_vocab_size_divisible_by is said
  // Words of the scenario's keys; empty: all of them. A transition's name stands for it without what does not sleep.
  std::vector<std::string> syncs, syncs_apart, transitions, optimizers, recomputes;
  std::vector<std::string> shards_over;  // the dimensions whose data ranks share a copy, the only way; empty: all may
  bool has(const std::vector<std::string>& words, std::string_view word) const {
    return words.empty() || std::find(words.begin(), words.end(), word) != words.end();
  }
};

/// An engine's own time in a decode step (scenarios/catalog/engines/NAME.yaml, schema hotbunk.engine/1).
struct EngineProfile {
  Sourced decode_sequence_seconds{0.0, "none"};  // of its host, for each running sequence
  Sourced decode_node_seconds{0.0, "none"};      // for each layer and node beyond the first
  Sourced eager_kernel_seconds{0.0, "none"};     // of its host for a kernel that no graph holds (rollout.eager)
  Sourced graph_bytes{0.0, "none"};              // of its captured graphs, on top of the pool; none under rollout.eager
  // Of its host in a decode step of a model that keeps a recurrent state, and for each running sequence: what it hides
  // behind other models' steps.
  Sourced state_step_seconds{0.0, "none"}, state_sequence_seconds{0.0, "none"};
};

struct FrameworkProfile {
  std::string name = "hotbunk";
  std::string source;
  Capabilities can;
  EngineProfile vllm, sglang;  // the catalogue's, whatever the framework

  // What runs.
  bool fused_attention = true;        // one kernel, nothing of size s x s in memory; else scores are materialised
  bool flash2_attention = false;      // that kernel is FlashAttention-2 (PyTorch's SDPA on Hopper, flash-attn 2)
  bool repeated_kv = false;           // K and V heads are repeated to as many as queries' before attention
  bool gathered_context = false;      // cp gathers K and V and merges blocks in fp32 (PyTorch), else a ring passes them
  bool dropout = false;               // masks are kept, 1 byte per element
  bool overlap_tensor = false;        // TP collectives of backward run beside the weight gradients
  bool overlap_grad_reduce = false;   // DP gradient reduction beside backward
  bool overlap_param_gather = false;  // gather of updated parameters beside the next forward
  bool overlap_pipeline = false;      // P2P beside compute
  bool fused_accumulation = true;     // products add weight gradients to what is there; else a pass of its own does
  bool overlap_expert = false;        // experts' exchanges of one micro-batch beside another's compute (1F1B overlap)
  bool distinct_dispatch = false;     // a token goes once to each node and rank of its experts, not once per expert
  bool uneven_chunks = false;         // interleaved chunks may differ in layers (Megatron-core's pipeline layout)
  bool lowered_ops = false;  // the ops are those of lowering/, byte by byte: residuals inside norms, units staged
  // What memory holds beyond parameters, gradients, optimizer and what backward needs.
  bool flat_units = false;  // sharded units move through flat buffers beside their tensors (PyTorch's FSDP2)
  // Sharded units keep shards in the dtype that is computed with beside the fp32 master copy (DeepSpeed's ZeRO-3);
  // FSDP's one shard is the master copy.
  bool separate_master = false;
  // Modules run op by op: a norm keeps its fp32 input and the normalised copy beside its output, a gated activation
  // silu(gate) beside gate and up.
  bool eager_activations = false;
  // Selective recomputation keeps every second matrix product and attention's output (torchtitan); else everything but
  // what the modules drop.
  bool selective_products = false;
  RecomputeModules recompute_modules{RecomputeModule::core_attn};
  bool recomputes(RecomputeModule m) const { return recompute_modules.has(m); }
  bool dummy_weight_grads = false;  // one low-precision buffer per distinct weight shape stays allocated
  Sourced loss_bytes{8.0, "bf16 logits, their gradient and one fp32 copy"};  // per logit at the loss, live at once
  Sourced loss_traffic{16.0, "one fused pass each way"};  // bytes moved per logit by softmax, loss and their gradient
  // Rows of the vocabulary on a tensor-parallel rank are padded to a multiple of it (Megatron's
  // --make-vocab-size-divisible-by); 1: every rank has as many whole rows, the last one padding.
  Sourced vocab_multiple{1, "as many whole rows on every rank"};
  bool pads_sequences = false;  // packed sequences are padded to a multiple of tp and 2 cp each, else the micro-batch
  Sourced token_multiple{1, "sequence parallelism's ranks have as many whole tokens each"};  // of tp, a micro-batch's
  Sourced workspace_bytes{0.0, "none"};  // libraries' buffers inside the allocator
  Sourced context_bytes{0.6e9, "CUDA context and modules, order of magnitude"};
  Sourced communicator_bytes{0.688e9, "NCCL issue 964: 688 MB for more than two ranks on A100"};
  Sourced dispatch_bytes{0.0, "as activations"};  // per element on the way to experts; back and gradients: activations
  // What an eager front end costs.
  Sourced forward_kernels{20, "stated"};  // kernels of one layer's forward besides those the cost model counts
  Sourced routing_kernels{12, "stated: softmax, top-k, masks, counts, offsets, sort indices, copies to the host"};
  Sourced loss_kernels{10, "stated: cast, maximum, difference, exponential, sum, look-up, mask, quotient, mean"};
  Sourced backward_kernels{2, "two gradients per product"};  // of the backward pass for each of forward_kernels
  Sourced kernel_seconds{0.0, "profile of the hardware"};    // device time of an uncounted kernel, 0: the hardware's
  Sourced kernel_overhead{0.0, "profile of the hardware"};   // device time beyond its roofline that each kernel takes
                                                             // under this front end, 0: the hardware's
  Sourced softmax_kernels{0, "fused whatever the shape"};    // instead of one, where batch x heads of a rank is no
                                                             // multiple of 4 (Megatron's fused softmax)
  Sourced elementwise_passes{1, "fused kernels"};  // memory traffic of norms, activations, residuals over fused ones
  Sourced collective_kernels{1, "one kernel"};     // host cost of a collective of a layer, in launches
  Sourced launch_seconds{0.0, "profile of the hardware"};  // host time per kernel, 0: the hardware's
  Sourced unit_tensors{1, "flat units"};  // collectives that a layer's gather or reduction takes under ZeRO-2, 3, FSDP
  Sourced rank_launches{0, "one flat buffer"};  // of each of them, for every rank: a copy into a list of shards
  Sourced data_rate{1.0, "the link's"};         // share of the link's rate that data-parallel collectives reach
  Sourced step_seconds{0.0, "none"};            // host time per optimizer step
  // What an RL iteration takes beyond its passes, fitted by scripts/fit_profiles.py (docs/validation.md).
  Sourced iteration_seconds{0.0, "none"};  // data, collation, metrics, hand-overs: of an iteration
  Sourced sample_seconds{0.0, "none"};     // rewards and advantages, one by one in the process that drives: of a sample
  // Of that process, for each token of the batch padded to the longest sample, behind the old log-probs: rows come back
  // padded, are joined with the batch and compared with what the engine says of the same tokens.
  Sourced logprob_token_seconds{0.0, "none"};
  // Of a weight update between two sides of the same GPUs: the trainers' processes collect Python's garbage around it.
  Sourced update_cleanup_seconds{0.0, "none"};
  // Host memory of a rank beside what sleeps (docs/planner-prices.md, "Host memory").
  bool sleeps_gradients = false;  // gradients' buffers go to the host with the rest and come back
  // Training's communicators go when its parameters do; they are there again with them, and for a weight update.
  bool rebuilds_communicators = false;
  bool sleeps_graphs = false;  // the engine's captured graphs go and come back with its KV cache
  bool own_reference = false;  // beside adapters, too, the reference is a model of its own
  // The engine starts on an empty device, before the trainer: its share of the device is whole, and what the trainer
  // keeps while it sleeps comes on top.
  bool engine_first = false;
  // The most that PyTorch was seen to keep reserved of a trainer that sleeps, beyond its tensors: blocks that a tensor
  // which stays, however small, holds. Of the device; in verdicts, not in prices.
  Sourced asleep_reserved_bytes{0.0, "none: segments that shrink, or a pool that is unmapped"};
  Sourced host_weight_copies{0.0, "none"};  // pinned copies of a rank's low-precision weights that stay
  Sourced host_process_bytes{0.0, "none"};  // of the processes of a rank: interpreter, libraries, driver
  Sourced host_node_bytes{0.0, "none"};     // of a node beside its ranks: object store, drivers, engines' processes
  Sourced host_share{1.0, "all of it"};     // of a node's memory that may be in use before its workers are killed
  // Whole models, in low precision, that a rank has in host memory while it loads its own; of a node in one process.
  Sourced load_copies{0.0, "none"};
  // GPUs whose network ports carry a weight update between two sets of GPUs.
  Sourced broadcast_ports{1.0, "one source rank, whose group has the engines alone (BACKGROUND F3)"};
  // Share by which predicted device bytes may be too low.
  Sourced memory_error{0.04,
                       "simumax_b200_reserved (docs/validation.md): 3.8 % low in the mean of 16 rows that no "
                       "constant is fitted on, torchtitan's 2.3 %"};
  Sourced host_step_passes{7, "fused: gradient, master, moments read, three written"};  // over host memory, where
                                                                                        // AdamW steps on the CPUs
};

/// E205 with file, line and key on anything unknown.
Result<FrameworkProfile> read_framework(const std::filesystem::path&);
Result<FrameworkProfile> parse_framework(const std::string& text, const std::string& file);
/// From the catalogue folder (scenarios/catalog); E209 for an unknown name, with the nearest one.
Result<FrameworkProfile> framework_named(const std::string& name, const std::filesystem::path& catalogue);

}  // namespace hotbunk
