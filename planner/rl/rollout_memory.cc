// What an engine holds: weights, the activations of a step, and the pool that its rules leave for the KV cache. With
// pipeline stages every rank sizes a pool for its own layers and the smallest decides how many tokens the engine holds
// (vLLM: the least number of blocks of all workers; SGLang: the least over the ranks).
#include <algorithm>
#include <bit>
#include <cmath>

#include "layout/rollout_weights.h"
#include "planner/rl/engine_step.h"
#include "planner/rl/kv_pool.h"

namespace hotbunk {

/// Of the engine itself, beside the process's context: one for the ranks of a stage, one for its neighbours.
double RlModel::communicators(const RolloutPoint& r) const {
  return ((r.tp * r.cp > 1 ? 1.0 : 0.0) + (r.pp > 1 ? 1.0 : 0.0)) * train_.framework().communicator_bytes.value;
}

/// The widest moment of a prefill step: the stream with Q, K, V and what was attended, or with the MLP's columns; or
/// the logits, a slice and the whole in fp32. Beside it what arrives from another stage and what leaves for one.
double RlModel::prefill_activations(const RolloutPoint& r, const RolloutStage& s) const {
  const ModelSpec& m = train_.model();
  const double e = setting_.rollout_element_bytes, h = static_cast<double>(m.hidden);
  const double ways = token_shares(setting_.engine, r), tokens = setting_.max_prefill_tokens / ways;
  const auto tp = static_cast<double>(r.tp), group = static_cast<double>(r.attention_tp());
  const double mine = tokens / static_cast<double>(r.attention_dp), d = static_cast<double>(m.head_dim);
  const double qkv = (2.0 * static_cast<double>(m.heads) + 2.0 * static_cast<double>(m.kv_heads)) * d / group;
  double width = static_cast<double>(m.intermediate) / tp;
  if (layer_kinds(m).moe > 0)
    width = std::max(m.moe->first_dense_layers > 0 ? width : 0.0,
                     static_cast<double>(m.moe->experts_per_token * m.moe->expert_intermediate) / tp);
  const double sampled =
      s.last ? std::min(setting_.max_running, setting_.max_prefill_tokens) * static_cast<double>(m.vocab) * 4.0 : 0.0;
  // Context ranks that divide a prompt gather the keys and values of one layer; of ours each has all log-sum-exps.
  const double sums = r.cp > 1 ? 4.0 * static_cast<double>((r.cp + 1) * m.heads) / group : 0.0;
  const double others =
      mine * (setting_.own_engine ? sums : static_cast<double>(r.cp - 1) * cache_bytes(m, r, 1.0, e, 1.0));
  const double handed = ((s.first ? 0.0 : 1.0) + (s.last ? 0.0 : 1.0)) * boundary_tensors * e * mine * h;
  return std::max({e * mine * (2.0 * h + qkv) + others, e * tokens * (h + std::max(h + 2.0 * width, 3.0 * width)),
                   2.0 * e * tokens * h + sampled * (r.tp > 1 ? 1.0 + 1.0 / tp : 1.0)}) +
         handed;
}

RlModel::StageBytes RlModel::stage_bytes(const RolloutPoint& r, const RolloutStage& s) const {
  const double e = setting_.rollout_element_bytes;
  const double narrow = setting_.weights.narrow
                            ? stage_products(counts_, setting_.engine, r, s) * (e - setting_.weights.stored_bytes)
                            : 0.0;
  return {stage_elements(counts_, setting_.engine, r, s) * e - narrow,
          cache_bytes(train_.model(), r, s.layers, setting_.cache_element_bytes, cache_shares(setting_.engine, r)),
          prefill_activations(r, s)};
}

double RlModel::narrow_bytes(const RolloutPoint& r) const {
  if (!setting_.weights.narrow) return 0.0;
  double fullest = 0.0, out = 0.0;
  each_stage(train_.model(), setting_.engine, r.pp, [&](const RolloutStage& s, std::int64_t) {
    if (const double weights = stage_bytes(r, s).weights; weights > fullest)
      fullest = weights, out = stage_products(counts_, setting_.engine, r, s) * setting_.weights.stored_bytes;
  });
  return out;
}

RlModel::Room RlModel::room_of(const RolloutPoint& r, double leftovers) const {
  // What has to fit is the longest prompt with the longest response; what is computed are the lengths that are drawn.
  const double longest = setting_.longest_sample + state_tokens(r);
  Room out{.tokens = std::numeric_limits<double>::infinity()};
  each_stage(train_.model(), setting_.engine, r.pp, [&](const RolloutStage& s, std::int64_t) {
    const StageBytes b = stage_bytes(r, s);
    const KvPool pool = kv_pool(setting_.engine, {.device = setting_.device_bytes,
                                                  .fraction = r.memory_fraction,
                                                  .context = train_.framework().context_bytes.value + communicators(r),
                                                  .weights = b.weights,
                                                  .activations = b.activations,
                                                  .leftovers = leftovers});
    double tokens = pool.bytes / b.token;
    if (setting_.pool_tokens > 0) tokens = std::min(tokens, setting_.pool_tokens);
    out.start_lacking_bytes = std::max(out.start_lacking_bytes, pool.lacking);
    out.lacking_bytes = std::max(out.lacking_bytes, pool.lacking);
    if (tokens < longest) out.lacking_bytes = std::max(out.lacking_bytes, (longest - tokens) * b.token);
    out.tokens = std::min(out.tokens, tokens);
  });
  out.tokens = std::max(out.tokens, longest);
  return out;
}

/// Of linear attention, as many tokens' worth of the cache as the states of a sequence take in the pool beside it.
double RlModel::state_tokens(const RolloutPoint& r) const {
  const ModelSpec& m = train_.model();
  const double token = cache_bytes(m, r, 1.0, setting_.cache_element_bytes, cache_shares(setting_.engine, r));
  return m.linear ? state_bytes(m, r, setting_.rollout_element_bytes) / token : 0.0;
}

double RlModel::held_tokens() const {
  return hotbunk::held_tokens(setting_.prompt_tokens, setting_.response_tokens, setting_.response_square);
}

/// Each number is what the fullest rank adds to the numbers before it: of weights alone, of weights with the cache, of
/// both with a step's activations. Stages that are not alike may each be the fullest at another moment.
void RlModel::take_room(const RolloutPoint& r, const Room& room, RolloutPrice& out) const {
  const double sequences =
      std::max(std::ceil(setting_.prompts * setting_.samples / static_cast<double>(r.engines)), 1.0);
  const double states = state_tokens(r), longest = setting_.longest_sample + states;
  out.lacking_bytes = room.lacking_bytes;
  out.start_lacking_bytes = room.start_lacking_bytes;
  out.fits = room.lacking_bytes <= 0.0;
  out.slots = std::clamp(std::min(setting_.max_running, room.tokens / (held_tokens() + states)), 1.0, sequences);
  const double tokens = setting_.pool_by_need ? std::min(room.tokens, setting_.max_running * longest) : room.tokens;
  double weights = 0.0, held = 0.0, working = 0.0;  // fullest at each moment
  StageBytes last;
  out.slim_bytes = 0.0;
  double slimmest = std::numeric_limits<double>::infinity();
  each_stage(train_.model(), setting_.engine, r.pp, [&](const RolloutStage& s, std::int64_t) {
    const StageBytes b = stage_bytes(r, s);
    const double both = b.weights + tokens * b.token, all = both + b.activations;
    weights = std::max(weights, b.weights);
    if (both > held) held = both, out.kv_bytes_per_token = b.token;
    working = std::max(working, all);
    if (b.token < slimmest) slimmest = b.token, out.slim_bytes = 0.0;
    if (b.token == slimmest) out.slim_bytes = std::max(out.slim_bytes, all);
    last = b;
  });
  out.weight_bytes = weights;
  if (setting_.keeps_weights) out.pinned_bytes = pinned_beyond(r);
  out.pool_bytes = r.pp > 1 ? held - weights : tokens * last.token;
  out.activation_bytes = r.pp > 1 ? working - held : last.activations;
}

/// vLLM keeps a slept tensor in pinned memory, for which PyTorch takes the next power of two
/// (ATen/core/CachingHostAllocator.h: PowerOf2Ceil; vllm/device_allocator/cumem.py: a pinned copy of each mapping).
/// What the device's allocator gives a mapping of its own, from 10 MiB on, in steps of 2 MiB.
double RlModel::pinned_beyond(const RolloutPoint& r) const {
  const bool whole_experts = r.ep > 1;
  const EngineCut cut{.tp = r.tp, .experts = whole_experts ? r.tp : 1};
  const ModelSpec& m = train_.model();
  // Of linear attention's matrices layout/ has no slices.
  if (setting_.engine != RolloutEngine::vllm || m.linear || setting_.weights.narrow || r.attention_dp > 1 || r.cp > 1 ||
      (whole_experts && r.ep != r.tp) || !why_not_rollout_tp(m, cut).empty())
    return 0.0;
  const auto key = std::pair(r.tp, whole_experts);
  {
    const std::lock_guard lock(pinned_->mutex);
    if (const auto at = pinned_->known.find(key); at != pinned_->known.end())
      return at->second / static_cast<double>(r.pp);
  }
  constexpr std::uint64_t own_mapping = 10 << 20, step = 2 << 20;
  double beyond = 0.0;
  for (const LocalWeight& w : rollout_weights(m, cut, 0)) {
    const auto bytes = static_cast<std::uint64_t>(static_cast<double>(w.elements()) * setting_.rollout_element_bytes);
    if (bytes < own_mapping) continue;
    beyond += static_cast<double>(std::bit_ceil((bytes + step - 1) / step * step) - bytes);
  }
  const std::lock_guard lock(pinned_->mutex);
  pinned_->known.emplace(key, beyond);
  return beyond / static_cast<double>(r.pp);
}

double RlModel::apart_bytes(const RolloutPoint& r, const RolloutPrice& p) const {
  return p.weight_bytes + p.pool_bytes + p.activation_bytes + train_.framework().context_bytes.value +
         communicators(r) + graphs();
}

/// Where a pool shrinks, all stages hold fewer tokens: none of those with the fewest layers loses more than the rule
/// takes, others may.
double RlModel::least_rollout_bytes(const RolloutPoint& p, const RolloutPrice& alone, double rest,
                                    double overhead) const {
  const double bytes = alone.slim_bytes + communicators(p) + graphs();
  const double leftovers = rest + std::max(0.0, overhead - train_.framework().context_bytes.value);
  const double shrinks = setting_.engine == RolloutEngine::hotbunk || train_.framework().engine_first ? 0.0
                         : setting_.engine == RolloutEngine::sglang ? p.memory_fraction
                                                                    : 1.0;
  return bytes + rest + overhead - shrinks * leftovers;
}

double RlModel::leftovers(const RlPoint& p, const ShiftShape& shape, const TrainSide& train) const {
  if (setting_.engine == RolloutEngine::hotbunk || p.placement != PlacementMode::colocated ||
      train_.framework().engine_first)
    return 0.0;
  const ShiftBytes training{.params = train.params, .optimizer = train.optimizer + train.critic + train.reference};
  return shape.price(training).rollout_rest +
         std::max(0.0, train.overhead_bytes - train_.framework().context_bytes.value);
}

}  // namespace hotbunk
