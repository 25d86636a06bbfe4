// The closed form of one training step: seconds, bytes and traffic of a layout, without building its graph.
//
//   LayerCost   one layer (or embedding, or head) for one micro-batch on one rank: what each stream does, what stays
//   TrainModel  layer costs + pipeline schedule + data parallelism + optimizer -> TrainPrice
//
// Both call CostModel's primitives, so a FLOP costs the same here and in the simulator. Long for the terms of
// TrainPrice, each with its unit, which every answer names.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "layout/pipeline_schedule.h"
#include "planner/cost/cost_model.h"
#include "planner/cost/framework.h"
#include "planner/train/rank_groups.h"
#include "planner/train/token_load.h"
#include "spec/scenario.h"

namespace hotbunk {

/// Where optimizer state, gradients and parameters live in the data-parallel dimension.
enum class Sharding : std::uint8_t { replicated, zero1, zero2, zero3, fsdp };

/// One training layout with its batch: everything that the search varies.
struct TrainPoint {
  std::int64_t dp = 1, cp = 1, ulysses = 1, tp = 1, pp = 1, vpp = 1, ep = 1, etp = 1;
  std::int64_t fsdp = -1;  // size of the shard group, -1: dp * cp * ulysses
  /// The dimensions that the group lies in where a faster one is left out (layout.shard_over); none: of neighbours.
  ShardOver shard_over{};
  bool sp = false;
  Sharding sharding = Sharding::zero1;
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  Recompute recompute = Recompute::none;
  std::int64_t micro_batch = 1;       // sequences of one micro-batch, over the cp and ulysses ranks that share them
  std::int64_t micro_batches = 1;     // per optimizer step
  std::int64_t last_micro_batch = 0;  // sequences of the step's last one where it is shorter, 0: as many as the others
  bool optimizer_on_host = false;     // layer-wise offload: states on the host, step on the CPU (host_offload.cc)
  bool reshard_after_forward = true;
  std::int64_t reshard_ranks = 0;  // that keep a unit among them from forward to backward; 0: the shard group
  OptimizerName optimizer = OptimizerName::adamw;

  std::int64_t ranks() const { return dp * cp * ulysses * tp * pp; }
  std::int64_t data_ranks() const { return dp * cp * ulysses; }
  /// Whether a shard group may be cut out of the ranks that it lies in.
  bool shard_group_divides() const { return fsdp <= 0 || shard_over.over(dp, cp, ulysses) % fsdp == 0; }
  /// Of one shard group; below data_ranks() the layout is hybrid (HSDP), with a replica of the shards in every group.
  std::int64_t shard_ranks() const {
    return fsdp > 0 && sharding != Sharding::replicated ? std::min(fsdp, data_ranks()) : data_ranks();
  }
  std::int64_t replicas() const { return data_ranks() / shard_ranks(); }
  /// Gathers of a layer among all ranks that share it, in a micro-batch both ways; for backward few may have it.
  double full_gathers() const { return reshard_after_forward && reshard_ranks == 0 ? 2.0 : 1.0; }
  /// Layers stay gathered for all micro-batches of a step: in a pipeline there are others between a micro-batch's
  /// forward and its backward.
  bool holds_units() const { return gathers_units() && pp > 1 && !reshard_after_forward; }
  /// Of a pipeline's layers few ranks keep parts for all micro-batches of a step, and gather them among them in every
  /// pass.
  bool shares_parts() const { return gathers_units() && pp > 1 && reshard_ranks > 0; }
  /// Gathers of a layer among those few, in a step.
  double kept_gathers() const {
    return reshard_ranks > 0 ? static_cast<double>(micro_batches) * (shares_parts() ? 2.0 : 1.0) : 0.0;
  }
  /// Parameters are gathered unit by unit around each pass.
  bool gathers_units() const { return sharding == Sharding::zero3 || sharding == Sharding::fsdp; }
  /// How often a step gathers each unit among all ranks that share it: once where layers are held or parts of
  /// them shared, else in every micro-batch. Of seconds and bytes alike. (Our lowering gathers the root in every pass
  /// all the same: PassStreams.)
  double gathers_of_step() const {
    return holds_units() || shares_parts() ? 1.0 : static_cast<double>(micro_batches) * full_gathers();
  }
  /// And their shards, with gradients and optimizer state, live on the host.
  bool streams_from_host() const { return optimizer_on_host && gathers_units(); }
  /// Ranks that hold the same experts: fewer than hold the same of the other layers.
  std::int64_t expert_ranks() const { return std::max<std::int64_t>(1, data_ranks() * tp / (ep * etp)); }
  /// Of those, the ranks over which an expert is divided: what lies in one shard group.
  std::int64_t expert_shard_ranks() const {
    if (shard_ranks() == data_ranks()) return expert_ranks();
    return std::gcd(expert_ranks(), std::max<std::int64_t>(1, shard_ranks() * tp / (ep * etp)));
  }
  /// Elements of `ordinary` and `expert` whose optimizer state is this rank's.
  double own_elements(double ordinary, double expert) const {
    if (sharding == Sharding::replicated) return ordinary + expert;
    return ordinary / static_cast<double>(shard_ranks()) + expert / static_cast<double>(expert_shard_ranks());
  }
  /// Cuts the sequences of one data rank and step into micro-batches; none is longer than all of them.
  void set_sequences(std::int64_t sequences) {
    micro_batch = std::min(micro_batch, std::max<std::int64_t>(sequences, 1));
    micro_batches = std::max<std::int64_t>(1, (sequences - 1) / micro_batch + 1);
    last_micro_batch = sequences % micro_batch;
  }
  std::int64_t sequences() const {
    return last_micro_batch > 0 ? (micro_batches - 1) * micro_batch + last_micro_batch : micro_batches * micro_batch;
  }
  /// Full micro-batches that hold as many tokens: what is linear in tokens takes so many times as long. In double: a
  /// batch of absurd size must not overflow.
  double full_micro_batches() const {
    const auto m = static_cast<double>(micro_batches);
    return last_micro_batch > 0 ? m - 1.0 + static_cast<double>(last_micro_batch) / static_cast<double>(micro_batch)
                                : m;
  }
  /// visit(count, share): the full micro-batches of a step, and the last where it is shorter, as a share of a full one.
  template <class Visit>
  void visit_micro_batches(Visit visit) const {
    const double whole = static_cast<double>(micro_batches - (last_micro_batch > 0 ? 1 : 0));
    if (whole > 0.0) visit(whole, 1.0);
    if (last_micro_batch > 0) visit(1.0, static_cast<double>(last_micro_batch) / static_cast<double>(micro_batch));
  }
  friend auto operator<=>(const TrainPoint&, const TrainPoint&) = default;
};

/// What an optimizer keeps and does where that depends on the shapes of the weights (optimizer_cost.h): of one layer,
/// or an end of the model, unsharded.
struct OptimizerWork {
  double ordinary_bytes = 0, expert_bytes = 0;        // of state, divided among the shards
  double whole_bytes = 0;                             // of state that every shard holds
  double ordinary_matrices = 0, expert_matrices = 0;  // elements that are orthogonalized
  double ordinary_seconds = 0, expert_seconds = 0;    // of doing that on one rank
  double longest_seconds = 0;                         // for one matrix
  OptimizerWork& add(const OptimizerWork&, double count);
};

/// What the passes over one layer cost one rank for one micro-batch. Seconds are of the stream's own time.
struct LayerCost {
  double forward = 0, backward = 0;  // compute, without communication
  double weight_grad = 0;            // part of backward that a TP collective can hide behind
  double weight_grad_kernels = 0;    // of kernels_backward
  double accumulate = 0;             // adding weight gradients to those of earlier micro-batches
  double recompute_layer = 0;        // what full recomputation runs again
  double recompute_core = 0;         // forward again of what selective recomputation drops
  double recompute_tensor = 0, recompute_expert = 0, recompute_context = 0;  // its collectives
  double recompute_kernels = 0;                                              // and its launches
  double tensor_forward = 0, tensor_backward = 0;                            // TP collectives
  double hidden_tensor = 0;  // part of tensor_backward that overlaps weight gradients when allowed
  double expert_forward = 0, expert_backward = 0;        // EP all-to-all
  double context_forward = 0, context_backward = 0;      // CP ring or Ulysses all-to-all, beside attention
  double attention_forward = 0, attention_backward = 0;  // part of forward, backward: hides the CP ring
  double ring_forward = 0, ring_backward = 0;            // the CP ring's messages, were there nothing beside them
  bool context_again = false;  // selective recomputation runs attention's core again, and what that exchanges with it
  double kernels_forward = 0, kernels_backward = 0;  // launched
  double kept_bytes = 0;                             // for backward without recomputation
  double kept_selective_bytes = 0;                   // with selective recomputation
  double kept_full_bytes = 0;                        // with full recomputation: the layer's input
  double input_bytes = 0;                            // the layer's input in a micro-batch of mean sequences
  double transient_bytes = 0;                        // highest extra while its backward runs
  double parameters = 0;                             // elements on the rank, all experts included
  double expert_parameters = 0;                      // of which routed experts
  double adapter_parameters = 0;                     // elements on the rank beside `parameters`, which then are frozen
  double expert_adapter_parameters = 0;              // of which routed experts'
  double adapters_forward = 0, adapter_kernels = 0;  // of forward and kernels_forward: what adapters add
  double flops_forward = 0;                          // of the model without adapters
  double tensor_payload = 0, expert_payload = 0, context_payload = 0;  // bytes, forward + backward, DESIGN's payload
  double largest_weights = 0;    // distinct weight shapes, elements together (dummy gradients)
  double attention_weights = 0;  // of which the attention block's
  OptimizerWork optimizer{};     // zero where state is so many bytes per element
};

/// One tensor that backward keeps; `core`: dropped by selective recomputation of the attention core.
struct KeptTensor {
  double bytes = 0;
  bool core = false;
};

enum class Term : std::uint8_t {
  compute,
  recompute,
  tensor,
  expert,
  context,
  pipeline,
  bubble,
  data,
  optimizer,
  host,
  count
};
inline constexpr std::size_t num_terms = static_cast<std::size_t>(Term::count);
std::string_view name_of(Term);

/// Payload of one forward pass over all micro-batches on its busiest rank, in bytes.
struct ForwardTraffic {
  double tensor = 0, expert = 0, context = 0, pipeline = 0;
  double arriving = 0;  // gathered by tensor-parallel ranks that received disjoint parts from the stage before
};

/// A layout's answer. Device bytes are those of the fullest stage.
struct TrainPrice {
  double step_seconds = 0;
  std::array<double, num_terms> seconds{};     // exposed; sums to step_seconds
  double hidden_seconds = 0;                   // communication that ran beside compute
  double passes_seconds = 0;                   // until the last stage is through with its passes, on the device
  double launched_seconds = 0;                 // and on the host
  std::array<double, num_categories> bytes{};  // at the peak
  double peak_bytes = 0;                       // all categories but overhead
  double overhead_bytes = 0;
  double first_stage_bytes = 0, last_stage_bytes = 0;
  double host_bytes = 0;
  double state_bytes = 0;       // parameters, gradients, optimizer of the fullest stage, nothing gathered
  double grad_bytes = 0;        // of which gradients
  double source_bytes = 0;      // what a weight update reads: low-precision parameters, under FSDP the master shard,
                                // wherever it lives
  double activation_bytes = 0;  // of the fullest stage
  double tensor_payload = 0, expert_payload = 0, context_payload = 0, pipeline_payload = 0;  // per rank and step
  double arriving_payload = 0;                                                               // ForwardTraffic
  double data_gather_payload = 0, data_reduce_payload = 0;                                   // within the shard group
  double expert_data_gather_payload = 0, expert_data_reduce_payload = 0;  // of which experts', among their own replicas
  double kept_gather_payload = 0;  // among the few ranks that keep a unit from forward to backward
  double replica_payload = 0, expert_replica_payload = 0;  // of hybrid shards' gradients, all-reduced
  double optimizer_payload = 0;                            // matrices to the ranks that orthogonalize them, and back
  double host_up_bytes = 0, host_down_bytes = 0;           // over the host link, layer-wise offload
  double model_flops = 0;                                  // of one step, all ranks, no recomputation
  double tokens = 0;                                       // of one step, all ranks
  bool valid = true;

  double total_bytes() const { return peak_bytes + overhead_bytes; }
};

/// Ring attention in a pass: seconds of its cp - 1 messages one behind the other, and of the attention that they run
/// beside. What is longer of the two counts; PassPrice has the attention in its compute, the rest of the messages in
/// its context.
struct RingPrice {
  double messages = 0, attention = 0;
  double exposed() const { return std::max(0.0, messages - attention); }
};

/// One full micro-batch through one stage in one direction: seconds by what they are spent on, one behind the other,
/// and payload in bytes.
struct PassPrice {
  double compute = 0, recompute = 0, tensor = 0, expert = 0, context = 0;
  RingPrice ring, ring_again;  // in compute and context; again: in recompute and context
  ForwardTraffic payload;
  double total() const { return compute + recompute + tensor + expert + context; }
};
/// A pass that only scores: through the slowest stage, what that waits for messages from and to its neighbours, and the
/// seconds of all stages together.
struct ScoringPass {
  PassPrice slowest;
  double messages = 0;
  double all_stages = 0;
};

/// Bytes that a scoring pass works in on one stage, beside what persists: units gathered around its fullest moment, a
/// layer's activations or the logits, messages and the gathered sequence.
struct ScoringBytes {
  double gathered = 0, activations = 0, communication = 0;
  double total() const { return gathered + activations + communication; }
};

/// One stage of a pipeline as the calls of its schedule see it.
struct StagePrice {
  PassPrice forward, backward;
  double weight_grad = 0;  // of backward's compute, seconds: what no other stage waits for
  // Seconds behind a step's passes. Host: until it has launched them all; slowed: compute beside collectives.
  double data = 0, optimizer = 0, host = 0, slowed = 0;
  double kept_bytes = 0;  // of a pass until its backward: of one chunk, interleaved
  TrainPrice held;        // memory and data-parallel traffic of this stage
};

/// The tensors, by what they are for, that make the fullest stage's peak.
enum class PeakTensor : std::uint8_t {
  params,
  gathered,  // units around the peak under ZeRO-3 and FSDP, one unit's gradients under ZeRO-2
  grads,
  master,
  moments,
  kept,       // by all layers in flight, for backward
  ends_kept,  // by embedding and head
  logits,     // and their copies at the loss
  rebuilt,    // of the layer that is recomputed around the peak
  transient,  // of one layer's backward
  workspace,
  weight_grads,  // low-precision buffers per distinct weight shape
  pipeline,      // P2P buffers
  sequence,      // gathered activation under Megatron's sequence parallelism
  count
};
inline constexpr std::size_t num_peak_tensors = static_cast<std::size_t>(PeakTensor::count);
using PeakBytes = std::array<double, num_peak_tensors>;
std::string_view name_of(PeakTensor);

/// One of them with the arithmetic that gives it.
struct PeakPart {
  PeakTensor tensor{};
  Category category{};
  double bytes = 0;
  std::string why;
};

/// Sizes in bytes of one element of each kind of state.
struct StateBytes {
  double params = 2, grads = 4, master = 4;
  double moments = 8;            // AdamW's two; the momentum of another optimizer is half of it
  bool separate_master = false;  // of sharded units (FrameworkProfile::separate_master)

  /// Whether a sharded unit's one persistent shard is the master copy.
  bool shard_is_master(Sharding s) const { return s == Sharding::fsdp && !separate_master; }
  /// Of a shard in which micro-batches add up: FSDP's has the shard's own dtype, whatever gradients are reduced in.
  double shard_grads(Sharding s) const { return shard_is_master(s) ? master : grads; }
};

struct TrainSetting {
  std::int64_t sequence = 2048;    // tokens of one sequence
  std::string precision = "bf16";  // of the GEMMs
  StateBytes state{};
  double element_bytes = 2;                    // of activations
  double mean_keys = 0;                        // visible keys per query when packed, 0: causal over `sequence`
  bool momentum = false;                       // SGD and Adafactor keep one
  AxisOrder order = megatron_axes;             // of the dimensions over ranks
  std::vector<std::int64_t> pipeline_split{};  // layers of every stage (and chunk, stage fastest); empty: even
  bool ragged = false;    // `sequence` is a mean: splits pad each sequence, they need not divide the mean
  double loss_chunk = 0;  // tokens of which logits are alive at once, 0: all
  // Of ragged sequences: what a micro-batch may hold on one rank (train.micro_batch_tokens), and the longest sequence.
  double budget_tokens = 0, longest = 0;
  double length_variance = 0;   // of ragged sequences, tokens^2
  double budget_sequences = 0;  // of a micro-batch at most (train.micro_batch_sequences), 0: as many as the tokens hold
  double steps = 1;             // optimizer steps of an iteration
  /// Where micro-batches are padded to their longest sample: its mean tokens, of 1, 2, … samples; of more as of the
  /// last. Empty: samples are packed.
  std::vector<double> longest_of{};
  bool padded() const { return !longest_of.empty(); }
  double load_tokens = 0;  // what the fullest micro-batch holds where someone asks what else would fit; 0: derived
  bool prefetch = true;    // sharded units: the next is gathered while one computes
  double in_place_elements = 0;  // train.in_place_elements, of our own lowering; 0: all of a unit is copied
  double cpu_optimizer = 0;      // optimizer.cpu_fraction
  ContextExchange context_exchange = ContextExchange::automatic;
  bool flat_parameters = false;  // FSDP1: a unit is one flat parameter, freed once its stream gets there
};

/// Layers of each of so many chunks of a pipeline, as even as they divide. The longer ones are in the middle: the first
/// and last also hold the embedding and the head.
std::vector<std::int64_t> even_chunks(std::int64_t layers, std::int64_t chunks);

class TrainModel {
 public:
  TrainModel(const ModelSpec&, TrainSetting, const CostModel&, const FrameworkProfile&);

  /// What a layer of the kind costs under the point's tp, sp, cp, ulysses, ep, etp and micro-batch.
  /// `kept`: also lists the tensors that make kept_bytes, in the order of the forward pass.
  LayerCost dense_layer(const TrainPoint&, std::vector<KeptTensor>* kept = nullptr) const;
  LayerCost moe_layer(const TrainPoint&, std::vector<KeptTensor>* kept = nullptr) const;
  LayerCost embedding(const TrainPoint&) const;
  LayerCost head(const TrainPoint&) const;

  /// The layer costs that one point needs; points that share tp, sp, cp, ulysses, ep, etp and micro-batch share them.
  struct Layers {
    LayerCost dense, moe, embedding, head;
  };
  Layers layers(const TrainPoint&) const;

  /// No allocation. A point whose sizes do not divide comes back with valid = false (see why_invalid).
  TrainPrice price(const TrainPoint&, const Layers&) const;
  TrainPrice price(const TrainPoint& p) const { return price(p, layers(p)); }

  /// "" or the sentence that says what does not divide.
  std::string why_invalid(const TrainPoint&) const;
  bool divides(const TrainPoint&) const;

  const ModelSpec& model() const { return model_; }
  const TrainSetting& setting() const { return setting_; }
  /// Rows of the vocabulary on one tensor-parallel rank, with what pads them: of V / tp the next multiple of the
  /// scenario's train.make_vocab_size_divisible_by, or the profile's vocab_multiple.
  double vocab_rows(const TrainPoint& p) const {
    const double own = static_cast<double>(model_.vocab_multiple);
    const double multiple = own > 0.0 ? own : std::max(framework_.vocab_multiple.value, 1.0);
    return multiple * std::ceil(static_cast<double>(model_.vocab) / (multiple * static_cast<double>(p.tp)));
  }
  /// Tokens that a mean micro-batch is filled up with, on the cp and ulysses ranks that share it: its sequences to
  /// chunks of one size (and where the framework does that, to sequence parallelism's multiple), then the whole.
  double padding_tokens(const TrainPoint&) const;
  /// Tokens of a mean micro-batch as memory minds them: with what its samples are padded to.
  double mean_tokens(const TrainPoint& p) const {
    return static_cast<double>(p.micro_batch) * static_cast<double>(setting_.sequence) +
           (setting_.padded() ? padding_tokens(p) : 0.0);
  }
  /// So many tokens of a micro-batch, up to the multiple that it is filled up to as a whole.
  double filled_tokens(const TrainPoint& p, double tokens) const {
    const double multiple = micro_batch_multiple(p);
    return setting_.ragged ? std::ceil(tokens / multiple) * multiple : tokens;
  }
  /// Of so many tokens of a micro-batch those whose logits are alive at once.
  double loss_tokens(double tokens) const {
    return setting_.loss_chunk > 0.0 ? std::min(tokens, setting_.loss_chunk) : tokens;
  }
  const CostModel& cost() const { return cost_; }
  const FrameworkProfile& framework() const { return framework_; }
  /// Tokens of the fullest micro-batch, on the cp and ulysses ranks that share it. A mean one holds micro_batch
  /// sequences of mean length, but a buffer takes more: the scenario's own budget where that gives this micro-batch,
  /// else the least that holds the longest sequence; never more than all sequences of the step. Where buffers are of
  /// that size (lowered_ops) this is it. Elsewhere memory is that of the tokens which come: the most of
  /// `load_iterations` iterations, where the buffer would hold more.
  double fullest_tokens(const TrainPoint&) const;
  static constexpr double load_iterations = 1000;
  /// Whether that minds how many sequences a data rank trains: then points of one layer key do not share layers.
  /// Context parallelism by gathers of all keys and values, and not by a ring.
  bool gathers_context() const {
    return setting_.context_exchange == ContextExchange::automatic
               ? framework_.gathered_context
               : setting_.context_exchange == ContextExchange::all_gather;
  }
  bool load_follows_batch() const { return setting_.ragged && !framework_.lowered_ops; }
  /// P(some micro-batch of an iteration, on any data rank, holds more than so many tokens).
  double overflow_chance(const TrainPoint&, double tokens) const;
  /// The same model with micro-batches of so many tokens at most, on the ranks that share one.
  TrainModel with_load(double tokens) const;
  /// The same model with other micro-batches: of so many tokens on one rank at most (0: what the sequences take), and
  /// of so many sequences (0: what the tokens hold).
  TrainModel with_micro_batches(double tokens, double sequences) const;
  /// The sequences of the point in this model's own micro-batches. Ragged settings.
  TrainPoint cut(TrainPoint) const;
  /// 6 N + attention per token: model FLOPs of one step over all ranks.
  double model_flops(double tokens) const;
  RankGroups groups(const TrainPoint& p) const { return {p, setting_.order, cost_.ranks_per_node()}; }
  /// Whether where tp, cp and ep groups sit depends on dp and pp: then points of one layer key do not share layers.
  bool layers_follow_stages() const;
  /// Seconds that the forward passes of all micro-batches wait for gathered parameters; a full one computes `forward`.
  /// `trained`: the parameters themselves, not a reference of their precision.
  double exposed_gathers(const TrainPoint&, const Layers&, double forward, bool trained) const;
  /// What a scoring pass exchanges, beside the gathers of parameters.
  ForwardTraffic forward_traffic(const TrainPoint&, const Layers&) const;
  /// A forward pass on its own: no backward pass to hide behind.
  PassPrice scoring_pass(const TrainPoint&, const Layers&, std::int64_t stage) const;
  ScoringPass scoring_pass(const TrainPoint&, const Layers&) const;
  /// Of the stage, or of the fullest one. Without a backward pass a layer's tensors go as the next ones come.
  ScoringBytes scoring_bytes(const TrainPoint&, const Layers&, std::int64_t stage) const;
  ScoringBytes scoring_bytes(const TrainPoint&, const Layers&) const;
  /// Of a pass that only scores: logits and their copies.
  double scored_logits_bytes(const Layers&) const;
  /// `whole`: the price of the point.
  StagePrice stage_price(const TrainPoint&, const Layers&, std::int64_t stage, const TrainPrice& whole) const;
  /// Sending one micro-batch from a stage to the next: seconds and payload of the message, and of the gather that the
  /// tensor-parallel ranks of the next stage then need where they sent disjoint parts.
  struct Hop {
    double seconds = 0, gather_seconds = 0, payload = 0, gather_payload = 0;
    double total() const { return seconds + gather_seconds; }
  };
  Hop hop(const TrainPoint&, const Layers&) const;
  /// The fullest pipeline stage, and what fills it there: largest first, nothing of no bytes. Sums to peak_bytes.
  std::int64_t fullest_stage(const TrainPoint&, const Layers&) const;
  std::vector<PeakPart> peak_parts(const TrainPoint&, const Layers&) const;
  /// PyTorch's FSDP allocates gradients as backward makes them (zero_grad sets them to none): a step of one micro-batch
  /// finds none, and they grow layer by layer as what forward kept goes.
  bool grows_gradients(const TrainPoint& p) const {
    return framework_.flat_units && p.sharding == Sharding::fsdp && p.micro_batches == 1 && p.pp == 1 &&
           !p.streams_from_host();
  }
  /// Micro-batches (or chunks, over vpp) whose activations a stage holds at once.
  double in_flight(const TrainPoint&, std::int64_t stage) const;
  /// The fullest rank's bytes where a second model is sharded as the first and only one of them trains at a time: the
  /// peak of one beside the other's parameters and optimizer.
  double peak_of_both(const TrainPoint&, const Layers&, const Layers& second) const;
  /// The same tensors as peak_parts, of any stage.
  PeakBytes peak_bytes(const TrainPoint&, const Layers&, std::int64_t stage) const;
  std::int64_t layers_of(const TrainPoint& p, std::int64_t stage, bool moe) const {
    const StageLayers n = stage_layers(p, stage);
    return moe ? n.moe : n.dense;
  }
  /// Elements of embedding and head on a stage; a tied pair on one stage counts once.
  double end_parameters(const TrainPoint&, const Layers&, std::int64_t stage) const;
  /// Whether adapters alone are trained (train.lora).
  bool frozen() const { return model_.lora.on(); }
  /// Bytes of an element of a shard that nothing steps. PyTorch's FSDP has all shards in the dtype that the model was
  /// made in, trained or not; we keep frozen ones as they are computed with.
  double frozen_bytes(const TrainPoint& p) const {
    return setting_.state.shard_is_master(p.sharding) && !framework_.lowered_ops ? setting_.state.master
                                                                                 : setting_.state.params;
  }
  /// Bytes of all of a stage's shards that stream from the host: parameters up, reduced gradients down.
  struct StagedShards {
    double up = 0, down = 0;
  };
  StagedShards staged_shards(const TrainPoint& p, const Layers& l, std::int64_t stage) const {
    return staged_shards(p, stage_share(p, l, stage));
  }
  /// The layers of the model without its adapters, as a reference is computed.
  static Layers without_adapters(Layers);

  /// Layers of a stage, and the elements that each of its ranks holds.
  struct StageShare {
    double dense = 0, moe = 0;
    double ordinary = 0, expert = 0, ends = 0;  // ends: of the ordinary ones
    double adapters = 0, expert_adapters = 0;   // beside them, where they are frozen; of which experts'
    bool frozen = false;
    OptimizerWork optimizer{};
    double layers() const { return dense + moe; }
    double all() const { return ordinary + expert; }
    /// Of what is trained: all that a rank computes gradients of, and the part of it whose state is this rank's.
    double trained() const { return frozen ? adapters : all(); }
    double own_trained(const TrainPoint& p) const {
      return frozen ? p.own_elements(adapters - expert_adapters, expert_adapters) : p.own_elements(ordinary, expert);
    }
    double own_frozen(const TrainPoint& p) const { return frozen ? p.own_elements(ordinary, expert) : 0.0; }
  };

 private:
  friend class LayerBuilder;
  LayerCost dense_layer(const TrainPoint&, bool linear, std::vector<KeptTensor>* kept) const;
  double buffer_tokens(const TrainPoint&) const;
  double micro_batch_multiple(const TrainPoint&) const;
  TokenLoad load_of(const TrainPoint&) const;
  double loads(const TrainPoint&) const;
  struct StageTime;
  class Pace;
  struct StepOver;
  struct StepEnd;
  double launch_seconds() const;  // of the host, per kernel
  struct StageLayers {
    std::int64_t dense = 0, moe = 0;
  };
  StageLayers stage_layers(const TrainPoint&, std::int64_t stage) const;
  StageShare stage_share(const TrainPoint&, const Layers&, std::int64_t stage) const;
  OptimizerWork layer_work(const TrainPoint&, const LayerCost&, bool moe) const;
  OptimizerWork end_work(const TrainPoint&, const LayerCost&) const;
  double moment_bytes(const TrainPoint&, const StageShare&) const;
  double update_seconds(const TrainPoint&, const StageShare&) const;
  /// Seconds that gathers of parameters and reductions of gradients take on their own.
  struct DataSeconds {
    double reduce = 0, gather = 0;
  };
  DataSeconds data_seconds(const TrainPoint&, const StageShare&) const;
  /// Layer-wise offload, in seconds of one micro-batch: shards copied up for a gather, gradients down, and added to
  /// those of earlier micro-batches on the CPUs.
  struct HostPass {
    double up = 0, down = 0, add = 0;
  };
  /// `trained`, `frozen`: elements of this rank's shards.
  HostPass host_pass(const TrainPoint&, double trained, double frozen, double tensors) const;
  /// Bytes of a rank's shards of parameters as they lie there, for gathers and weight updates to read.
  double shard_bytes(const TrainPoint& p, double trained, double frozen) const {
    return trained * (setting_.state.shard_is_master(p.sharding) ? setting_.state.master : setting_.state.params) +
           frozen * frozen_bytes(p);
  }
  HostPass host_pass(const TrainPoint& p, const StageShare& held) const;
  double rank_tensors(const TrainPoint& p) const {
    return tensors_ - expert_tensors_ * (1.0 - 1.0 / static_cast<double>(p.ep));
  }
  double host_step_seconds(const TrainPoint&, double own, double moments) const;
  /// Of a rank's optimizer state, what lives in host memory for good: all of it under layer-wise offload, else the
  /// scenario's fraction where states lie beside parameters that stay.
  double host_fraction(const TrainPoint& p) const {
    if (p.optimizer_on_host) return 1.0;
    return p.gathers_units() && !setting_.state.separate_master ? 0.0 : setting_.cpu_optimizer;
  }
  /// Whether gradients of sharded units add up in host memory, beside shards that stay on the device: DeepSpeed's
  /// ZeRO-3 with its optimizer on the CPUs (runtime/zero/stage3.py: grad_partitions_flat_buffer lies on the device that
  /// the optimizer has, and each group's fp32 gradient beside it).
  bool sums_on_host(const TrainPoint& p) const {
    return p.gathers_units() && !p.streams_from_host() && host_fraction(p) > 0.0;
  }
  /// Bytes of gradients in host memory, of an element whose optimizer state is there.
  double host_grads(const TrainPoint& p) const {
    const StateBytes& b = setting_.state;
    return sums_on_host(p) ? b.grads + b.master : b.shard_grads(p.sharding);
  }
  StepEnd step_end(const TrainPoint&, const StageShare&, double backward, double forward) const;
  StepEnd stage_end(const TrainPoint&, const Layers&, const StageShare&, const StageTime&) const;
  double tied_ends_seconds(const TrainPoint&) const;
  static double hiding_passes(const TrainPoint&);
  /// Sharded units of one micro-batch as our lowering moves them: exposed beside either pass, and all there is.
  struct PassStreams {
    double forward = 0, backward = 0, all = 0;
  };
  /// Seconds of one unit on its two streams: the collective, and the kernels before and behind it, which take the
  /// device from compute.
  struct UnitSeconds {
    double gather = 0, gather_kernels = 0, reduce = 0, reduce_kernels = 0;
    double keep = 0, again = 0;  // where few keep it among them: to copy a part, to gather those of all of them
  };
  /// What units are gathered for: both passes of a step, a forward pass alone, or one of the reference.
  enum class UnitPass : std::uint8_t { step, forward, reference };
  struct Elements {
    double all = 0, trained = 0;
  };
  /// `copied`: the share that is gathered and reduced through copies.
  UnitSeconds unit_seconds(const TrainPoint&, const Elements&, double copied, UnitPass) const;
  UnitSeconds unit_seconds(const TrainPoint&, double elements, double adapters, double copied, UnitPass) const;
  /// Matrices of a layer, or outside of layers, that are alike.
  struct Matrices {
    double rows = 0, cols = 0, count = 0;
    bool expert = false;
  };
  static std::vector<Matrices> matrices_of(const ModelSpec&, int layer);
  double copied_share(const TrainPoint&, const std::vector<Matrices>&) const;
  struct UnitStreams {
    UnitSeconds root, head, layer;  // head: where it is a unit of its own
    double layers = 1;              // of them
  };
  UnitStreams unit_streams(const TrainPoint&, const Layers&, UnitPass) const;
  /// Of a micro-batch with `share` of a full one's tokens.
  PassStreams pass_streams(const TrainPoint&, const Layers&, const UnitStreams&, double forward, double backward,
                           double share) const;
  StageTime stage_time(const TrainPoint&, const Layers&, std::int64_t stage) const;
  /// Calls visit(stage, count) for the first of every `count` neighbouring stages of the same layers and ends, in
  /// order: each takes the time of the first, and holds no more micro-batches in flight.
  template <class Visit>
  void visit_stages(const TrainPoint&, Visit) const;
  std::array<std::int64_t, 7> stage_breaks(const TrainPoint&) const;
  bool fills_rows(const TrainPoint&) const;
  std::string linear_divides(const TrainPoint&) const;
  bool split_given(const TrainPoint&) const;
  double stage_bytes(const TrainPoint&, const Layers&, std::int64_t stage, TrainPrice*, PeakBytes* = nullptr) const;
  double sequence_bytes(const TrainPoint&) const;
  StagedShards staged_shards(const TrainPoint&, const StageShare&) const;
  double staged_bytes(const TrainPoint&, const StageShare&, double unit) const;
  void price_time(const TrainPoint&, const Layers&, TrainPrice&) const;
  void price_traffic(const TrainPoint&, const Layers&, TrainPrice&) const;
  void stage_traffic(const TrainPoint&, const Layers&, std::int64_t stage, TrainPrice&) const;
  ForwardTraffic pass_traffic(const TrainPoint&, const Layers&, std::int64_t stage) const;
  double kept_bytes(const TrainPoint&, const LayerCost&) const;
  double pipeline_payload(const TrainPoint&, const Layers&) const;
  void data_traffic(const TrainPoint&, const StageShare&, TrainPrice&) const;

  ModelSpec model_;
  TrainSetting setting_;
  CostModel cost_;
  FrameworkProfile framework_;
  double peak_ = 0, wide_peak_ = 0;  // of the layers' products; of what stays in 16 bits where those have less
  double quantized_bytes_ = 0;       // moved per weight of a layer's product and step
  double flops_per_token_ = 0;
  double parameters_ = 0, tensors_ = 0, expert_tensors_ = 0;  // of the whole model
  std::vector<Matrices> layer_matrices_, end_matrices_;       // of the last layer; of the embedding
  std::int64_t dense_layers_ = 0, moe_layers_ = 0;
};

template <class Visit>
void TrainModel::visit_stages(const TrainPoint& p, Visit visit) const {
  if (p.pp == 1) return visit(std::int64_t{0}, std::int64_t{1});
  if (split_given(p)) {
    for (std::int64_t stage = 0; stage < p.pp; ++stage) visit(stage, std::int64_t{1});
    return;
  }
  const auto breaks = stage_breaks(p);
  for (std::size_t i = 0; i < breaks.size(); ++i) {
    const std::int64_t next = i + 1 < breaks.size() ? breaks[i + 1] : p.pp;
    if (next > breaks[i]) visit(breaks[i], next - breaks[i]);
  }
}

}  // namespace hotbunk
