// The closed form of one colocated RL iteration: rollout, weight sync, sleep and wake, log-prob passes, training.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <tuple>

#include "planner/sync_model.h"
#include "planner/train_model.h"

namespace hotbunk {

/// One rollout layout: `engines` engines of tp * cp ranks each.
struct RolloutPoint {
  std::int64_t tp = 1, engines = 1;
  bool strided = false;           // engine = rank mod engines: neighbours' shards lie in other engines
  double memory_fraction = 0.8;   // of the device, weights + KV
  std::int64_t ep = 1;            // ranks that whole experts are spread over; 1: experts are split by tp like the rest
  std::int64_t attention_dp = 1;  // groups of tp / attention_dp ranks, each with attention's weights and its own tokens
  std::int64_t cp = 1;            // ranks that a sequence's cache is spread over
  std::int64_t ranks() const { return engines * tp * cp; }
  std::int64_t attention_tp() const { return std::max<std::int64_t>(1, tp / attention_dp); }
  friend bool operator==(const RolloutPoint&, const RolloutPoint&) = default;
};

struct RolloutPrice {
  double prefill_seconds = 0, decode_seconds = 0, tail_seconds = 0;  // tail: after the last admission
  double weight_bytes = 0, pool_bytes = 0;                           // per rank
  double kv_bytes_per_token = 0;                                     // per rank, of a token that the engine holds
  double slots = 0;                                                  // sequences decoded together by one engine
  double steps = 0;
  double reduce_payload = 0, dispatch_payload = 0;  // all-reduce, all-to-all; bytes per rank, all steps
  bool fits = false;                                // weights and at least one sequence of the longest length
  double seconds() const { return prefill_seconds + decode_seconds + tail_seconds; }
};

/// Training's phases around the optimizer steps, and what happens between.
enum class RlPhase : std::uint8_t { rollout, sync, sleep, wake, reference, old_logprobs, train, count };
inline constexpr std::size_t num_rl_phases = static_cast<std::size_t>(RlPhase::count);
std::string_view name_of(RlPhase);

struct RlPoint {
  TrainPoint train;
  RolloutPoint rollout;
  Offload offload = Offload::sleep;
  SyncMechanism sync = SyncMechanism::flattened_buckets;
  double bucket_bytes = 512.0 * 1024 * 1024;
  friend bool operator==(const RlPoint&, const RlPoint&) = default;
};

struct RlPrice {
  double iteration_seconds = 0;
  std::array<double, num_rl_phases> seconds{};
  double train_bytes = 0, rollout_bytes = 0,
         sync_bytes = 0;  // device bytes of one rank at each moment, overhead included
  double host_bytes = 0;  // of one rank
  bool fits = false;
  double peak_bytes() const { return std::max({train_bytes, rollout_bytes, sync_bytes}); }
};

/// Rollout's share of a scenario, in the units of the closed form.
struct RlSetting {
  double prompts = 128, samples = 8, mini_batches = 1;
  double prompt_tokens = 512, response_tokens = 2048, longest_response = 8192;
  bool reference = false, old_logprobs = true;
  double rollout_element_bytes = 2;
  double max_running = 256;
  double device_bytes = 80e9, host_bytes = 2e12;  // of one rank
  bool prefix_shared = true;                      // samples of one prompt prefill it once
};

class RlModel {
 public:
  RlModel(const TrainModel& train, RlSetting setting) : train_(train), setting_(setting) {}

  RolloutPrice price_rollout(const RolloutPoint&) const;
  /// Bytes that the worst rank receives when shards of training become slices of rollout, shard to shard: exact for
  /// what learn_reshard has computed, else an estimate from the layouts' sizes.
  double reshard_bytes(const TrainPoint&, const RolloutPoint&) const;
  /// Counts the exact volume, rectangle by rectangle (layout/reshard.h), of FSDP shards of a dense model; no-op for
  /// others and above 64 ranks, where the estimate serves.
  void learn_reshard(const TrainPoint&, const RolloutPoint&);
  /// From parts that the search prices once each. No allocation.
  RlPrice combine(const RlPoint&, const TrainPrice&, const TrainModel::Layers&, const RolloutPrice&) const;
  RlPrice price(const RlPoint&) const;
  /// What a weight update of the point has to move.
  SyncJob sync_job(const RlPoint&) const;

  const RlSetting& setting() const { return setting_; }
  const TrainModel& train() const { return train_; }

 private:
  double decode_step_seconds(const RolloutPoint&, double slots, double context) const;
  /// Bytes of one rank's all-reduces and all-to-alls while an engine passes `tokens` through all layers once.
  struct RolloutPayload {
    double reduce = 0, dispatch = 0;
  };
  RolloutPayload rollout_payload(const RolloutPoint&, double tokens) const;
  double rollout_exchange_seconds(const RolloutPoint&, double tokens) const;
  double forward_seconds(const TrainPoint&, const TrainModel::Layers&) const;

  const TrainModel& train_;
  RlSetting setting_;
  std::map<std::tuple<std::int64_t, std::int64_t, bool>, double> exact_reshard_;  // (ranks, rollout tp, strided)
};

/// What a scenario asks for, in the closed form's terms. Sequence: mean prompt + response, rounded up so that the
/// layout's splits divide it.
TrainPoint train_point_of(const Scenario&);
RolloutPoint rollout_point_of(const Scenario&);
TrainSetting train_setting_of(const Scenario&);
RlSetting rl_setting_of(const Scenario&);
RlPoint rl_point_of(const Scenario&);

}  // namespace hotbunk
