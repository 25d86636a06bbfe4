// The closed form of one RL iteration: rollout, weight sync, sleep and wake, log-prob passes, training; colocated by
// shifts, or on two sets of GPUs.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "planner/rl/engine_parts.h"
#include "planner/rl/engine_schedule.h"
#include "planner/rl/step_parts.h"
#include "planner/rl/sync_model.h"
#include "planner/rl/transition_cost.h"
#include "planner/rl/weight_format.h"
#include "planner/train/train_model.h"

namespace hotbunk {

/// One rollout layout: `engines` engines of tp * cp * pp ranks each, none where nothing is sampled (SFT); inside an
/// engine tp is the fastest, pp the slowest.
struct RolloutPoint {
  std::int64_t tp = 1, engines = 1;
  bool strided = false;           // engine = rank mod engines: neighbours' shards lie in other engines
  double memory_fraction = 0.8;   // of the device, weights + KV
  std::int64_t ep = 1;            // ranks that whole experts are spread over; 1: experts are split by tp like the rest
  std::int64_t attention_dp = 1;  // groups of tp / attention_dp ranks, each with attention's weights and its own tokens
  std::int64_t cp = 1;  // ranks that prompts, and a sequence's cache where the engine divides it, are spread over
  std::int64_t pp = 1;  // pipeline stages
  std::int64_t ranks() const { return engines * tp * cp * pp; }
  std::int64_t attention_tp() const { return std::max<std::int64_t>(1, tp / attention_dp); }
  friend auto operator<=>(const RolloutPoint&, const RolloutPoint&) = default;
};

/// Payload of one rank of an engine in all steps, in bytes.
struct RolloutPayload {
  double reduce = 0, dispatch = 0;                // all-reduce over tp, all-to-all of experts
  double experts = 0;                             // all-reduce of experts that tp x cp ranks share
  double pipeline = 0, arriving = 0;              // sent to the next stage; all-gathered over tp where it arrives
  double context_gather = 0, context_reduce = 0;  // over cp: prompts' keys and values; partial attention of decoding
  /// The larger of each kind.
  void raise_to(const RolloutPayload&);
};

/// One token for every sequence that an engine decodes.
struct DecodeRound {
  double micro_batches = 1, sequences = 1;  // in flight, and in each of them
  double slowest_stage = 0, latency = 0;    // seconds of a micro-batch: in the slowest stage; through all and back
  double gap = 0;                           // seconds of the host before it
  double seconds() const { return std::max(micro_batches * slowest_stage, latency) + gap; }
};

struct RolloutPrice {
  double prefill_seconds = 0, decode_seconds = 0, tail_seconds = 0;  // tail: after the last admission
  double exchange_seconds = 0;                                       // all ranks learn all samples; own engine
  double weight_bytes = 0, pool_bytes = 0;                           // per rank
  double activation_bytes = 0;                                       // per rank, of one prefill step
  double lacking_bytes = 0;                                          // where it does not fit
  double start_lacking_bytes = 0;  // of these, what the engine's start asks for beyond what is free
  double kv_bytes_per_token = 0;   // per rank, of a token that the engine holds
  double slim_bytes = 0;           // all three of a rank of a stage with the fewest layers
  double pinned_bytes = 0;         // of host memory that its slept weights take beyond their own bytes
  double slots = 0;                // sequences decoded together by one engine
  double steps = 0;
  RolloutPayload sent;
  bool fits = false;  // weights and at least one sequence of the longest length
  double seconds() const { return prefill_seconds + decode_seconds + tail_seconds + exchange_seconds; }
};

/// What the seconds of that name in a RolloutPrice are spent on, to rounding.
struct RolloutParts {
  StepParts prefill, decode, tail;
};

/// Training's phases around the optimizer steps, and what happens between.
enum class RlPhase : std::uint8_t {
  rollout,
  sync,
  sleep,
  wake,
  reference,
  old_logprobs,
  values,
  critic,
  train,
  framework,
  count
};
inline constexpr std::size_t num_rl_phases = static_cast<std::size_t>(RlPhase::count);
std::string_view name_of(RlPhase);

struct RlPoint {
  TrainPoint train;
  RolloutPoint rollout;
  PlacementMode placement = PlacementMode::colocated;
  TransitionOrder transition{};  // colocated: what sleeps and in which order
  SyncMechanism sync = SyncMechanism::flattened_buckets;
  double bucket_bytes = 512.0 * 1024 * 1024;
  bool samples() const { return rollout.engines > 0; }
  bool sleeps() const { return training_sleeps(transition); }
  std::int64_t gpus() const {
    return placement == PlacementMode::colocated ? train.ranks() : train.ranks() + rollout.ranks();
  }
  /// Equal to the last knob; the order among points of one price, so that an answer does not depend on how it is found.
  friend auto operator<=>(const RlPoint&, const RlPoint&) = default;
};

struct RlPrice {
  double iteration_seconds = 0;
  std::array<double, num_rl_phases> seconds{};  // of each phase; their sum less `overlapped` is the iteration
  double overlapped = 0;                        // seconds that rollout and training run side by side (one step off)
  // Device bytes of one rank at each moment, overhead included; sync: from training to the rollout, wake: back.
  double train_bytes = 0, rollout_bytes = 0, sync_bytes = 0, wake_bytes = 0;
  double host_bytes = 0;  // of one rank
  bool fits = false;
  double peak_bytes() const { return std::max({train_bytes, rollout_bytes, sync_bytes, wake_bytes}); }
};

/// What a weight sync minds of the training layout: few of its layouts differ in it.
struct SyncSource {
  std::int64_t ranks = 1;            // that train
  std::int64_t holders = 1;          // of one copy of the weights
  std::int64_t parts = 1;            // that the weights are cut into
  bool stages = false;               // some ranks hold nothing of some layers
  bool shards_of_master = false;     // the sync reads fp32 shards
  bool whole = false;                // every rank has all parameters
  std::optional<TrainPoint> layout;  // what decides who holds what, where that is counted
  explicit SyncSource(const TrainPoint&, bool counted = false);
  friend auto operator<=>(const SyncSource&, const SyncSource&) = default;
};

/// What an iteration needs of a training point's price: small enough to keep a million of them.
struct TrainSide {
  double train_seconds = 0;                       // of an iteration's optimizer steps
  double old_seconds = 0, reference_seconds = 0;  // of the log-prob passes: what is trained, and the reference
  double values_seconds = 0, critic_seconds = 0;  // PPO: the critic's forward passes, and its optimizer steps
  /// Of all that a sample goes through but the actor's training.
  double scoring_seconds() const { return old_seconds + reference_seconds + values_seconds + critic_seconds; }
  double total_bytes = 0, overhead_bytes = 0, host_bytes = 0;
  // What log-prob passes work in, on the fullest stage: of the reference with the model where that comes up for it, of
  // what is trained, of the critic. 0: there is none.
  double reference_work = 0, old_work = 0, values_work = 0;
  double persistent() const { return params + optimizer + critic + reference + communicators + overhead_bytes; }
  /// Of optimizer steps and log-prob passes.
  double fullest_bytes() const {
    return std::max(total_bytes, persistent() + std::max({reference_work, old_work, values_work}));
  }
  double params = 0, optimizer = 0, reference = 0;  // persistent shards of one rank on the device, in bytes
  double critic = 0;                                // PPO: all that persists of the critic, which sleeps as moments do
  double communicators = 0;      // those that go with the parameters; all others are in overhead_bytes
  double swapped_reference = 0;  // on the host, brought up for its pass
  double slept_gradients = 0;    // on the host where training sleeps
  double host_copies = 0;        // of the weights, pinned, beside what sleeps
  double streamed_source = 0;    // what a sync reads, where it lives on the host for ever
};

/// Seconds of the forward passes of all micro-batches through the slowest stage of one model. Bubble: of the other
/// stages, once in an iteration; gathers: of parameters, exposed.
struct ForwardSeconds {
  double compute = 0, tensor = 0, expert = 0, context = 0, bubble = 0, gathers = 0;
  double sends = 0;  // between stages
  double total() const { return compute + tensor + expert + context + bubble + gathers + sends; }
};

/// Seconds of what sleeps or wakes: copies over the host link, memory of the device and of the host taken or given
/// back.
struct ShiftSeconds {
  double copies = 0, device = 0, host = 0;
  double total() const { return copies + device + host; }
};

/// Of all shifts of a cycle, on average where some skip iterations. Of the sync: taking memory for its buckets, and
/// bringing up parameters that sleep.
struct ShiftsSeconds {
  ShiftSeconds sleep, wake;
  double staging = 0, uploads = 0;
};

/// Rollout's share of a scenario, in the units of the closed form.
struct RlSetting {
  double prompts = 128, samples = 8, mini_batches = 1;
  double prompt_tokens = 512, response_tokens = 2048;                   // means
  double prompt_square = 512.0 * 512, response_square = 2048.0 * 2048;  // means of the squares
  double longest_prompt = 512, longest_response = 8192;                 // what has to fit
  double longest_sample = 512 + 8192;                                   // both of one sample
  LengthSpec responses{.mean = 2048, .max = 8192};                      // as drawn
  bool reference = false, old_logprobs = true;
  double sync_every = 1;         // iterations
  bool critic = false;           // PPO: a second model of the actor's layers with one output, in the actor's layout
  bool reference_apart = false;  // on as many GPUs of its own, at work beside the actor
  bool critic_apart = false;     // on as many GPUs of its own, at work beside the actor
  RolloutEngine engine = RolloutEngine::sglang;
  DType rollout_dtype = DType::bf16;
  double rollout_element_bytes = 2;  // of activations, and weights but those of `weights`
  double cache_element_bytes = 2;    // of the KV cache
  WeightFormat weights;              // of the layers' products
  double max_running = 256, max_prefill_tokens = 8192;
  double device_bytes = 80e9, host_bytes = 2e12;  // of one rank
  bool eager = false;                             // decode steps are launched kernel by kernel
  bool pool_by_need = false;                      // hotbunk's engine maps what its slots can use, others all they may
  double pool_tokens = 0;                         // of one engine, given; 0: what the memory fraction leaves
  double staged_buckets = 2;                      // of the sync on every rank
  bool keeps_weights = false;                     // sleep level 1: the rollout's weights move to the host and back
  bool own_engine = false;                        // hotbunk's: in the trainer's process, one arena for both
  bool sync_gathers = false;                      // own engine: all-gathers buckets, else reads its peers' parts
  bool direct = false;                            // the scenario's update is shard to shard
  bool sync_verifies = false;                     // own engine: hashes of every tensor on both sides
  bool stages_part = false;                       // and one rank's part of a bucket
  bool reference_on_device = false;               // beside the trained parameters; else on the host
  double price_per_gpu_hour = 0;                  // money, 0: unknown
  bool overlaps = false;                          // sampling weights may lag: disaggregated sides run at the same time
  // Of micro-batches of the passes that only score (train.logprob_micro_batch_*); both 0: training's.
  double logprob_tokens = 0, logprob_sequences = 0;
  bool prefix_shared = true;  // samples of one prompt prefill it once
  std::int64_t models_apart() const { return (critic_apart ? 1 : 0) + (reference_apart ? 1 : 0); }
};

class RlModel {
 public:
  RlModel(const TrainModel& train, RlSetting setting);

  /// `leftovers`: bytes of a colocated trainer on the device while the engine runs. What does not fit beside them is
  /// priced with the least pool that would serve.
  RolloutPrice price_rollout(const RolloutPoint&, double leftovers = 0.0, RolloutParts* parts = nullptr) const;
  /// Bytes of a point's training on the device while its engine runs, as far as the engine's pool minds them. The shape
  /// is that of its transition, here as in combine.
  double leftovers(const RlPoint&, const ShiftShape&, const TrainSide&) const;
  /// The rollout beside so many bytes of training: `alone` with a smaller pool. Never faster. `parts` are alone's.
  RolloutPrice rollout_beside(const RolloutPoint&, double leftovers, const RolloutPrice& alone,
                              RolloutParts* parts = nullptr) const;
  RolloutPrice price_rollout(const RlPoint&, RolloutParts* parts = nullptr) const;
  /// What an engine needs of a device that nothing trains on.
  double apart_bytes(const RolloutPoint&, const RolloutPrice&) const;
  /// What every point with this rollout needs of a device beside a trainer that leaves `rest` there and has that much
  /// overhead. `alone`: the rollout without it, whose pool shrinks by no more than its rule says (kv_pool.h). Grows
  /// with both.
  double least_rollout_bytes(const RolloutPoint&, const RolloutPrice& alone, double rest, double overhead) const;
  /// Whether heads, columns and experts divide by the layout: what the loader asks of a scenario.
  bool divides(const RolloutPoint&) const;
  /// Bytes that the worst rank receives when shards of training become slices of rollout, shard to shard: counted
  /// rectangle by rectangle (reshard_volume.h) up to 64 ranks, else an estimate from the layouts' sizes.
  double reshard_bytes(const SyncSource&, const RolloutPoint&) const;
  /// What a sync minds of a training point; who holds what only where some mechanism of this model moves shards.
  SyncSource sync_source(const TrainPoint& p) const { return SyncSource(p, counts_shards_); }
  /// From parts that the search prices once each; the rollout is the one beside this training. No allocation.
  TrainSide train_side(const TrainPoint&, const TrainPrice&, const TrainModel::Layers&) const;
  /// The same with the bytes of one pipeline stage. `whole`: the price of the point.
  TrainSide stage_side(const TrainPoint&, const TrainModel::Layers&, std::int64_t stage, const TrainPrice& whole) const;
  RlPrice combine(const RlPoint&, const ShiftShape&, const TrainSide&, const RolloutPrice&, const SyncPrice&) const;
  /// Seconds 0: the layout does not divide, or the rollout does not hold its weights and one sequence.
  RlPrice price(const RlPoint&) const;
  /// Of a point, with those that a critic and a reference have for themselves beside the cluster's.
  std::int64_t gpus(const RlPoint& p) const { return p.gpus() + setting_.models_apart() * p.train.ranks(); }
  /// PPO's critic: the actor's layers and a head of one output.
  TrainModel::Layers critic_layers(const TrainPoint&, const TrainModel::Layers& actor) const;
  /// The parts that a point's price is combined from.
  struct Parts {
    TrainSide train;
    RolloutPrice rollout;
    SyncPrice sync;
  };
  Parts parts(const RlPoint&) const;
  /// Host bytes of one rank while models are loaded: whole ones, before each rank keeps its part; beside them an engine
  /// that started first, and sleeps.
  double loading_bytes(const RlPoint&, const RolloutPrice&) const;
  /// Host bytes of one rank in an iteration.
  double host_bytes(const RlPoint&, const TrainSide&, const RolloutPrice&, const ShiftPrice&) const;
  /// Device bytes of the sync's buckets on one rank.
  double staging_bytes(const RlPoint&, const SyncPrice&) const;
  /// What the point's shifts move; colocated.
  ShiftBytes shift_bytes(const RlPoint&, const TrainSide&, const RolloutPrice&, double staging) const;
  /// The price is the shape's, of these bytes.
  ShiftsSeconds shifts_seconds(const RolloutPoint&, const ShiftShape&, const ShiftPrice&, const ShiftBytes&,
                               const TrainSide&, const RolloutPrice&) const;
  /// Of a rollout's weight_bytes what is held in a narrow format.
  double narrow_bytes(const RolloutPoint&) const;
  /// Of the engine itself, beside the process's context; bytes.
  double communicators(const RolloutPoint&) const;
  /// Of the engine's captured graphs, bytes; `asleep`: where they go with its cache.
  double graphs() const { return setting_.eager ? 0.0 : engine_profile().graph_bytes.value; }
  double sleeping_graphs() const { return train_.framework().sleeps_graphs ? graphs() : 0.0; }
  /// What the engine holds while it works, beside weights, cache, activations and what sleeps with the cache; bytes.
  double engine_overhead(const RolloutPoint& r) const { return communicators(r) + graphs() - sleeping_graphs(); }
  /// What a pass that only scores is priced by: the point's sequences in its own micro-batches, and the layers' costs
  /// for these. Training's where it has no others.
  struct Scoring {
    const TrainModel* model = nullptr;
    TrainPoint point;
    TrainModel::Layers layers;
    bool bare = false;  // `layers` are without adapters
  };
  /// Whether the reference is a second model: beside adapters it is what is trained, without them, but in systems that
  /// load it all the same.
  bool reference_is_copy() const {
    return setting_.reference && (!train_.frozen() || train_.framework().own_reference);
  }
  /// `critic`: through the critic's layers; `layers`: the actor's, of training.
  Scoring scoring(const TrainPoint&, const TrainModel::Layers& layers, bool critic = false) const;
  /// One optimizer step's sequences. `trained`: through the parameters themselves, not a reference's.
  ForwardSeconds forward_seconds(const Scoring&, bool trained) const;
  /// Of an iteration, beside all passes: of an algorithm that samples.
  double framework_seconds() const {
    const FrameworkProfile& f = train_.framework();
    return f.iteration_seconds.value + f.sample_seconds.value * setting_.prompts * setting_.samples;
  }
  /// Of the process that drives the workers, behind the old log-probs.
  double driver_seconds() const {
    return train_.framework().logprob_token_seconds.value * setting_.prompts * setting_.samples *
           setting_.longest_sample;
  }
  /// Tokens trained in an iteration, prompts and responses.
  double tokens() const {
    return setting_.prompts * setting_.samples * (setting_.prompt_tokens + setting_.response_tokens);
  }
  /// One token for each of so many sequences.
  DecodeRound decode_round(const RolloutPoint&, double sequences, double context) const;
  /// Of the engine that samples; ours has none beside what its plan says.
  const EngineProfile& engine_profile() const {
    return setting_.engine == RolloutEngine::vllm     ? train_.framework().vllm
           : setting_.engine == RolloutEngine::sglang ? train_.framework().sglang
                                                      : own_engine_;
  }
  double state_tokens(const RolloutPoint&) const;
  /// Tokens that a running sequence holds on average.
  double held_tokens() const;
  /// What a weight update of the point has to move, and its price.
  SyncJob sync_job(const SyncSource&, const RolloutPoint&, PlacementMode, double bucket_bytes) const;
  SyncJob sync_job(const RlPoint& p) const {
    return sync_job(sync_source(p.train), p.rollout, p.placement, p.bucket_bytes);
  }
  /// With what the worst rank receives counted as layout/'s map has it, however many ranks there are.
  SyncPrice sync_price(const RlPoint& p) const;

  const RlSetting& setting() const { return setting_; }
  const TrainModel& train() const { return train_; }
  const ModelCounts& counts() const { return counts_; }
  /// FLOP/s, datasheet: of the layers' products; of attention and head.
  double product_peak() const { return product_peak_; }
  double wide_peak() const { return wide_peak_; }

 private:
  // rollout_price.cc: seconds of one engine's parts.
  bool blocks_divide(const RolloutPoint&) const;
  // Book: StepSeconds, or StepParts where someone asks what they are spent on.
  /// Of the slowest stage, and of all together.
  template <class Book>
  struct Stages {
    Book slowest, all;
  };
  template <class Book, class Step>
  Stages<Book> stages_of(const RolloutPoint&, Step) const;
  template <class Book>
  DecodeRound decode_rounds(const RolloutPoint&, double sequences, double context, double times, Book&) const;
  template <class Book>
  void prefill(const RolloutPoint&, const EngineSchedule&, Book&) const;
  template <class Book>
  RolloutPrice price_steps(const RolloutPoint&, double leftovers, Book& prefill, Book& decode, Book& tail) const;
  double exchange_seconds(const RolloutPoint&) const;
  RolloutPayload payload(const RolloutPoint&, double prompt, double whole, double local) const;
  // rollout_memory.cc
  /// Of one rank; token: of the cache, in all its layers.
  struct StageBytes {
    double weights = 0, token = 0, activations = 0;
  };
  StageBytes stage_bytes(const RolloutPoint&, const RolloutStage&) const;
  /// Tokens that an engine's pool holds, and what the device lacks for the longest sequence.
  struct Room {
    double tokens = 0, lacking_bytes = 0, start_lacking_bytes = 0;
  };
  Room room_of(const RolloutPoint&, double leftovers) const;
  void take_room(const RolloutPoint&, const Room&, RolloutPrice&) const;
  double prefill_activations(const RolloutPoint&, const RolloutStage&) const;
  struct HeaviestStage {
    double elements = 0, layers = 0, tensors = 0;
  };
  void quantize(const RolloutPoint&, SyncJob&) const;
  HeaviestStage heaviest_stage(const RolloutPoint&) const;
  ShiftSeconds shift_seconds(double copied, double mapped, OpKind) const;
  void add_critic(const TrainPoint&, const TrainModel::Layers&, const TrainPrice&, TrainSide&) const;
  TrainSide train_side(const TrainPoint&, const TrainPrice&, const TrainModel::Layers&, const TrainPrice& critic) const;
  void add_scoring(const Scoring&, TrainSide&) const;
  void colocate(const RlPoint&, const ShiftShape&, const TrainSide&, const RolloutPrice&, double staging,
                RlPrice&) const;
  void disaggregate(const RlPoint&, const TrainSide&, const RolloutPrice&, double staging, RlPrice&) const;

  const TrainModel& train_;
  RlSetting setting_;
  EngineProfile own_engine_;          // what ours has beside its plan: nothing
  std::optional<TrainModel> scorer_;  // where passes that only score have micro-batches of their own
  ModelCounts counts_;
  double product_peak_ = 0, wide_peak_ = 0;
  /// What is known of pinned_beyond, by tensor parallelism and whether experts are whole; shared by copies of the
  /// model.
  struct PinnedCache {
    std::mutex mutex;
    std::map<std::pair<std::int64_t, bool>, double> known;
  };
  std::shared_ptr<PinnedCache> pinned_ = std::make_shared<PinnedCache>();
  struct ReshardCache;
  static std::shared_ptr<ReshardCache> new_reshard_cache(const ModelSpec&);
  std::optional<double> counted_bytes(const SyncSource&, const RolloutPoint&, std::int64_t most_ranks) const;
  std::optional<double> gathered_bytes(const TrainPoint&) const;
  double pinned_beyond(const RolloutPoint&) const;
  bool counts_shards_ = false;
  std::shared_ptr<ReshardCache> reshard_;  // what was counted, shared by copies of the model
};

/// What a scenario asks for, in the closed form's terms. Sequence: mean prompt + response, rounded up so that the
/// layout's splits divide it.
TrainPoint train_point_of(const Scenario&);
/// The point's shard group as the layout's fsdp and shard_over mean it with the point's dp, cp and ulysses.
void fill_shard_group(TrainLayout, TrainPoint&);
/// The layout with the shard group of a system that has but one way to choose it (Capabilities::shards_over).
TrainLayout shard_group_of(const Capabilities&, TrainLayout);
/// Gives a point that group, where the system has one; of others nothing changes.
void take_shard_group(const Capabilities&, const TrainLayout&, TrainPoint&);
/// The sequences that the scenario's tokens and batch make of the point's micro-batches, by its dp, cp and ulysses.
void fill_micro_batches(const Scenario&, TrainPoint&);
RolloutPoint rollout_point_of(const Scenario&);
TrainSetting train_setting_of(const Scenario&);
RlSetting rl_setting_of(const Scenario&);
RlPoint rl_point_of(const Scenario&);

}  // namespace hotbunk
