// The closed form of an engine: prefill, decode with full slots, decode while the last sequences end; and the pool that
// its rules leave for the KV cache.
#include <algorithm>
#include <cmath>

#include "planner/rl/kv_pool.h"
#include "planner/rl/length_moments.h"
#include "planner/rl/rl_model.h"
#include "planner/train/layer_kinds.h"

namespace hotbunk {
namespace {

/// Bytes of K and V that a token of the engine costs one rank on average: attention groups hold tokens of their own, cp
/// ranks parts of each sequence. MLA caches its latent, which tensor parallelism does not split.
double kv_bytes_per_token(const ModelSpec& m, const RolloutPoint& r, double element) {
  const auto layers = static_cast<double>(m.layers), shares = static_cast<double>(r.attention_dp * r.cp);
  if (m.mla) return layers * static_cast<double>(m.mla->kv_lora_rank + m.mla->qk_rope_head_dim) * element / shares;
  const double heads = std::max(static_cast<double>(m.kv_heads) / static_cast<double>(r.attention_tp()), 1.0);
  return layers * heads * static_cast<double>(m.head_dim) * 2.0 * element / shares;
}

/// Elements of one layer's attention projections.
double attention_elements(const ModelSpec& m) {
  const auto h = static_cast<double>(m.hidden), heads = static_cast<double>(m.heads);
  if (!m.mla) return h * static_cast<double>(m.head_dim) * (2.0 * heads + 2.0 * static_cast<double>(m.kv_heads));
  const MlaSpec& a = *m.mla;
  const auto nope = static_cast<double>(a.qk_nope_head_dim), rope = static_cast<double>(a.qk_rope_head_dim),
             v = static_cast<double>(a.v_head_dim), q = static_cast<double>(a.q_lora_rank),
             kv = static_cast<double>(a.kv_lora_rank);
  const double queries = q > 0 ? h * q + q * heads * (nope + rope) : h * heads * (nope + rope);
  return queries + h * (kv + rope) + kv * heads * (nope + v) + heads * v * h;
}

/// FLOPs of attention for one query and one key it sees, all heads of a layer. Decoding MLA attends in the latent: keys
/// of kv_lora_rank + rope, values of kv_lora_rank.
double attention_flops_per_pair(const ModelSpec& m, bool decode) {
  const auto heads = static_cast<double>(m.heads);
  if (!m.mla) return 4.0 * heads * static_cast<double>(m.head_dim);
  const MlaSpec& a = *m.mla;
  const std::int64_t widths =
      decode ? 2 * a.kv_lora_rank + a.qk_rope_head_dim : a.qk_nope_head_dim + a.qk_rope_head_dim + a.v_head_dim;
  return 2.0 * heads * static_cast<double>(widths);
}

double moe_layers(const ModelSpec& m) { return static_cast<double>(layer_kinds(m).moe); }

/// Elements of one dense layer's MLP.
double mlp_elements(const ModelSpec& m) {
  return (m.gated_mlp ? 3.0 : 2.0) * static_cast<double>(m.hidden) * static_cast<double>(m.intermediate);
}

/// Kernels of a layer besides its collectives: two norms, four products, rotary positions, the write to the cache,
/// attention, the activation (lowering/rollout.cc), and the norm of Q and K.
double layer_kernels(const ModelSpec& m) { return m.qk_norm ? 11.0 : 10.0; }
/// Kernels around the layers: embedding, two row gathers, final norm, head, sampling (same source).
constexpr double end_kernels = 6.0;
/// Copies between host and device that a step of our engine waits for: ids up, before the other feeds, which come
/// beside the first layer; tokens and log-probs down (same source).
constexpr double step_feeds = 1.0, step_fetches = 2.0;

double step_kernels(const ModelSpec& m, const RolloutPoint& r) {
  const double reductions = r.tp > 1 ? 2.0 : 0.0;
  return (layer_kernels(m) + reductions) * static_cast<double>(m.layers) + end_kernels;
}
/// A step whose kernels the host launches one by one is not over before it has. SGLang and vLLM do so in prefill alone:
/// their decode steps replay captured graphs, in which a kernel costs the device's own start and drain.
double eager_seconds(const CostModel& cost, double kernels, double device_seconds) {
  return std::max(device_seconds, kernels * cost.hardware().launch.value);
}

}  // namespace

bool RlModel::divides(const RolloutPoint& r) const {
  const ModelSpec& m = train_.model();
  if (r.tp < 1 || r.engines < 1 || r.ep < 1 || r.attention_dp < 1 || r.cp < 1 || r.pp != 1 ||
      r.tp % r.attention_dp != 0)
    return false;
  const std::int64_t tp = r.attention_tp();
  if (m.heads % tp != 0 || (!m.mla && m.kv_heads % tp != 0 && tp % m.kv_heads != 0)) return false;
  if (!m.moe) return m.intermediate % tp == 0 && r.ep == 1;
  return m.moe->experts % r.ep == 0 && r.tp * r.cp % r.ep == 0;
}

double RlModel::rank_elements(const RolloutPoint& r) const {
  const ModelSpec& m = train_.model();
  const double attention = attention_elements(m) * static_cast<double>(m.layers);
  return attention / static_cast<double>(r.attention_tp()) + (parameters_ - attention) / static_cast<double>(r.tp);
}

RlModel::RolloutPayload RlModel::rollout_payload(const RolloutPoint& r, double tokens) const {
  const ModelSpec& m = train_.model();
  const double row = setting_.rollout_element_bytes * static_cast<double>(m.hidden);
  const auto layers = static_cast<double>(m.layers);
  RolloutPayload out;
  // After attention within its group (its own tokens), after the MLP over the whole engine.
  if (r.attention_tp() > 1) out.reduce += layers * row * tokens / static_cast<double>(r.attention_dp);
  if (r.tp > 1 && r.attention_dp == 1) out.reduce += row * tokens;  // the embedding, split over the vocabulary
  if (r.ep > 1 && m.moe) {
    const double moe = moe_layers(m);
    // Dispatch and combine: each rank sends its share of the tokens to their experts and the results back.
    out.dispatch = 2.0 * moe * row * tokens / static_cast<double>(r.tp) *
                   static_cast<double>(m.moe->experts_per_token) * static_cast<double>(r.ep - 1) /
                   static_cast<double>(r.ep);
    if (r.tp > 1) out.reduce += (layers - moe) * row * tokens;
  } else if (r.tp > 1) {
    out.reduce += layers * row * tokens;
  }
  return out;
}

double RlModel::rollout_exchange_seconds(const RolloutPoint& r, double tokens) const {
  const ModelSpec& m = train_.model();
  const CostModel& cost = train_.cost();
  const std::int64_t stride = r.strided ? r.engines : 1, node = cost.ranks_per_node();
  const auto layers = static_cast<double>(m.layers);
  const double row = setting_.rollout_element_bytes * static_cast<double>(m.hidden);
  const double mine = tokens / static_cast<double>(r.attention_dp);
  double seconds = layers * cost.collective_seconds(OpKind::all_reduce,
                                                    GroupShape::strided(r.attention_tp(), stride, node), mine * row);
  const GroupShape engine = GroupShape::strided(r.tp, stride, node);
  const double moe = r.ep > 1 ? moe_layers(m) : 0.0;
  if (moe > 0.0)
    seconds += 2.0 * moe *
               cost.collective_seconds(OpKind::all_to_all, GroupShape::strided(r.ep, stride, node),
                                       rollout_payload(r, tokens).dispatch / (2.0 * moe));
  // The embedding's rows are split over the engine too.
  if (r.attention_dp == 1) seconds += cost.collective_seconds(OpKind::all_reduce, engine, tokens * row);
  return seconds + (layers - moe) * cost.collective_seconds(OpKind::all_reduce, engine, tokens * row);
}

double RlModel::lumped_seconds(double flops, double weights) const {
  const CostModel& cost = train_.cost();
  const double rate = cost.peak_flops(setting_.rollout_dtype) * cost.hardware().gemm.efficiency.value;
  return std::max(cost.memory_seconds(weights * setting_.rollout_element_bytes), flops / std::max(rate, 1.0));
}

/// `tokens` pass through the layers of an engine: products with the weights they touch, streams of activations.
double RlModel::layers_seconds(const RolloutPoint& r, double tokens) const {
  const ModelSpec& m = train_.model();
  const CostModel& cost = train_.cost();
  const DType dtype = setting_.rollout_dtype;
  const auto h = static_cast<double>(m.hidden), d = static_cast<double>(m.head_dim), tp = static_cast<double>(r.tp),
             layers = static_cast<double>(m.layers), group = static_cast<double>(r.attention_tp());
  const double mine = tokens / static_cast<double>(r.attention_dp), moe = moe_layers(m), dense = layers - moe;
  const double q = static_cast<double>(m.heads) * d / group,
               kv = std::max(static_cast<double>(m.kv_heads) / group, 1.0) * d;
  double attention = 0.0;
  if (m.mla) attention = lumped_seconds(2.0 * mine * attention_elements(m) / group, attention_elements(m) / group);
  else attention = cost.gemm_seconds(mine, q + 2.0 * kv, h, dtype) + cost.gemm_seconds(mine, h, q, dtype);
  double seconds = layers * attention;
  const double width = static_cast<double>(m.intermediate) / tp;
  if (dense > 0.0)
    seconds += dense * (cost.gemm_seconds(tokens, (m.gated_mlp ? 2.0 : 1.0) * width, h, dtype) +
                        cost.gemm_seconds(tokens, h, width, dtype));
  double inner = dense * width;
  if (moe > 0.0) {
    // Experts: with many tokens nearly all are touched, with few only theirs.
    const double others = ends_ + layers * attention_elements(m) + dense * mlp_elements(m);
    const double active = std::max(0.0, active_ - others), all = std::max(0.0, parameters_ - others);
    const double share = static_cast<double>(m.moe->experts_per_token) / static_cast<double>(m.moe->experts);
    const double touched = active + (all - active) * (1.0 - std::pow(1.0 - share, std::max(tokens, 1.0) - 1.0));
    seconds += lumped_seconds(2.0 * tokens * active / tp, touched / tp);
    inner += moe * static_cast<double>(m.moe->experts_per_token * m.moe->expert_intermediate) / tp;
  }
  // Two norms read the stream and the branch and write both; rotary positions go in place; the gate reads 2, writes 1.
  const double streamed = mine * layers * (8.0 * h + 2.0 * (q + kv)) + 3.0 * tokens * inner;
  return seconds + cost.memory_seconds(streamed * setting_.rollout_element_bytes);
}

/// Head and sampling of `sequences` tokens, and what every step costs whatever its size.
double RlModel::step_seconds(const RolloutPoint& r, double sequences) const {
  const ModelSpec& m = train_.model();
  const CostModel& cost = train_.cost();
  const double vocab = static_cast<double>(m.vocab), logits = 4.0 * sequences * vocab;  // fp32
  const std::int64_t stride = r.strided ? r.engines : 1;
  double seconds =
      cost.gemm_seconds(sequences, vocab / static_cast<double>(r.tp), static_cast<double>(m.hidden),
                        setting_.rollout_dtype) +
      cost.memory_seconds(logits) +
      (layer_kernels(m) * static_cast<double>(m.layers) + end_kernels) * cost.hardware().kernel_overhead.value +
      cost.collective_seconds(OpKind::all_gather, GroupShape::strided(r.tp, stride, cost.ranks_per_node()), logits);
  if (setting_.engine == RolloutEngine::hotbunk)
    seconds += step_feeds * cost.host_copy_seconds(4.0 * sequences, OpKind::feed) +
               step_fetches * cost.host_copy_seconds(4.0 * sequences, OpKind::fetch);
  return seconds;
}

double RlModel::decode_step_seconds(const RolloutPoint& r, double slots, double context) const {
  const ModelSpec& m = train_.model();
  const auto layers = static_cast<double>(m.layers);
  const double shares = static_cast<double>(r.attention_tp() * r.attention_dp * r.cp);
  const double cache = slots * context * kv_bytes_per_token(m, r, setting_.rollout_element_bytes);
  const double flops = attention_flops_per_pair(m, true) * slots * context / shares;
  const double device = layers_seconds(r, slots) + rollout_exchange_seconds(r, slots) + step_seconds(r, slots) +
                        layers * train_.cost().attention_seconds(flops, context, cache / layers, false,
                                                                 train_.cost().peak_flops(setting_.rollout_dtype));
  const bool replays = setting_.engine != RolloutEngine::hotbunk;
  return replays ? device : eager_seconds(train_.cost(), step_kernels(m, r), device);
}

/// One step over `tokens` of prompts, with the head on the `sequences` that end in it.
double RlModel::prefill_step_seconds(const RolloutPoint& r, double tokens, double sequences) const {
  const ModelSpec& m = train_.model();
  const CostModel& cost = train_.cost();
  // Causal: a prompt of s tokens has s (s + 1) / 2 pairs.
  const double keys = (setting_.prompt_square / std::max(setting_.prompt_tokens, 1.0) + 1.0) / 2.0;
  const auto layers = static_cast<double>(m.layers);
  const double shares = static_cast<double>(r.attention_tp() * r.attention_dp * r.cp);
  const double flops = attention_flops_per_pair(m, false) * tokens * keys / shares;
  const double wide = static_cast<double>(2 * m.heads * m.head_dim) / shares * setting_.rollout_element_bytes;
  const double bytes = tokens * (wide + kv_bytes_per_token(m, r, setting_.rollout_element_bytes) / layers);
  const double device =
      layers_seconds(r, tokens) + rollout_exchange_seconds(r, tokens) + step_seconds(r, sequences) +
      layers * cost.attention_seconds(flops, keys, bytes, false, cost.peak_flops(setting_.rollout_dtype));
  return eager_seconds(cost, step_kernels(m, r), device);
}

/// Prompts fill the slots in steps of at most max_prefill_tokens. Then a sequence is admitted whenever one has ended:
/// of n ends over w decode steps w (1 - e^(-n / w)) steps see at least one, and each of them is followed by a prefill.
double RlModel::prefill_seconds(const RolloutPoint& r, double sequences, double slots, double full) const {
  const double first = std::min(sequences, slots), later = sequences - first;
  // Samples of one prompt find it in the cache where prefixes are shared.
  const double prompt = setting_.prefix_shared ? setting_.prompt_tokens *
                                                     std::ceil(sequences / std::max(setting_.samples, 1.0)) / sequences
                                               : setting_.prompt_tokens;
  const auto price = [&](double n, double least_steps) {
    if (n <= 0.0) return 0.0;
    const double steps = std::max({1.0, least_steps, std::ceil(n * prompt / setting_.max_prefill_tokens)});
    return steps * prefill_step_seconds(r, n * prompt / steps, n / steps);
  };
  const double mean = std::max(setting_.response_tokens, 1.0),
               spread = std::sqrt(std::max(0.0, setting_.response_square / (mean * mean) - 1.0));
  const double over = full * std::min(1.0, spread / 0.3);
  return price(first, 0.0) + price(later, over > 0.0 ? over * -std::expm1(-later / over) : 0.0);
}

/// Rows of finished samples, as long as the longest, and their log-probs: gathered by all ranks (lower_exchange).
double RlModel::exchange_seconds(const RolloutPoint& r) const {
  if (!setting_.own_engine) return 0.0;
  const CostModel& cost = train_.cost();
  const double rows = std::ceil(std::ceil(setting_.prompts * setting_.samples / static_cast<double>(r.engines)) /
                                static_cast<double>(r.tp));
  const auto world = static_cast<double>(r.ranks());
  double seconds = 0.0;
  for (const double values : {3.0 + setting_.longest_prompt + setting_.longest_response, setting_.longest_response}) {
    const double mine = 4.0 * rows * values;
    seconds += cost.host_copy_seconds(mine, OpKind::feed) + cost.host_copy_seconds(world * mine, OpKind::fetch) +
               cost.collective_seconds(OpKind::all_gather, GroupShape::strided(r.ranks(), 1, cost.ranks_per_node()),
                                       world * mine);
  }
  return seconds;
}

/// Of the engine itself, beside the process's context.
double RlModel::communicators(const RolloutPoint& r) const {
  return r.tp * r.cp > 1 ? train_.framework().communicator_bytes.value : 0.0;
}

/// The widest moment of a prefill step: the stream with Q, K, V and what was attended, or with the MLP's columns; or
/// the logits, a slice and the whole in fp32.
double RlModel::prefill_activations(const RolloutPoint& r) const {
  const ModelSpec& m = train_.model();
  const double e = setting_.rollout_element_bytes, tokens = setting_.max_prefill_tokens,
               h = static_cast<double>(m.hidden);
  const auto tp = static_cast<double>(r.tp), group = static_cast<double>(r.attention_tp());
  const double mine = tokens / static_cast<double>(r.attention_dp), d = static_cast<double>(m.head_dim);
  const double qkv = (2.0 * static_cast<double>(m.heads) + 2.0 * static_cast<double>(m.kv_heads)) * d / group;
  double width = static_cast<double>(m.intermediate) / tp;
  if (moe_layers(m) > 0.0)
    width = std::max(m.moe->first_dense_layers > 0 ? width : 0.0,
                     static_cast<double>(m.moe->experts_per_token * m.moe->expert_intermediate) / tp);
  const double sampled = std::min(setting_.max_running, tokens) * static_cast<double>(m.vocab) * 4.0;
  return std::max({e * mine * (2.0 * h + qkv), e * tokens * (h + std::max(h + 2.0 * width, 3.0 * width)),
                   2.0 * e * tokens * h + sampled * (r.tp > 1 ? 1.0 + 1.0 / tp : 1.0)});
}

RlModel::Room RlModel::room_of(const RolloutPoint& r, const RolloutPrice& price, double leftovers) const {
  const KvPool pool = kv_pool(setting_.engine, {.device = setting_.device_bytes,
                                                .fraction = r.memory_fraction,
                                                .context = train_.framework().context_bytes.value + communicators(r),
                                                .weights = price.weight_bytes,
                                                .activations = price.activation_bytes,
                                                .leftovers = leftovers});
  Room out{pool.bytes / price.kv_bytes_per_token, pool.lacking, pool.lacking};
  if (setting_.pool_tokens > 0) out.tokens = std::min(out.tokens, setting_.pool_tokens);
  // What has to fit is the longest prompt with the longest response; what is computed are the lengths that are drawn.
  const double longest = setting_.longest_prompt + setting_.longest_response;
  if (out.tokens < longest) {
    out.lacking_bytes = std::max(out.lacking_bytes, (longest - out.tokens) * price.kv_bytes_per_token);
    out.tokens = longest;
  }
  return out;
}

/// Tokens of a running sequence: its prompt and the age of its response, E[L^2] / (2 E[L]) at a random moment.
double RlModel::held_tokens() const {
  return setting_.prompt_tokens + setting_.response_square / (2.0 * std::max(setting_.response_tokens, 1.0));
}

void RlModel::take_room(const RolloutPoint& r, const Room& room, RolloutPrice& out) const {
  const double sequences =
      std::max(std::ceil(setting_.prompts * setting_.samples / static_cast<double>(r.engines)), 1.0);
  const double longest = setting_.longest_prompt + setting_.longest_response;
  out.lacking_bytes = room.lacking_bytes;
  out.start_lacking_bytes = room.start_lacking_bytes;
  out.fits = room.lacking_bytes <= 0.0;
  out.slots = std::clamp(std::min(setting_.max_running, room.tokens / held_tokens()), 1.0, sequences);
  out.pool_bytes = (setting_.pool_by_need ? std::min(room.tokens, setting_.max_running * longest) : room.tokens) *
                   out.kv_bytes_per_token;
}

RolloutPrice RlModel::price_rollout(const RolloutPoint& r, double leftovers) const {
  RolloutPrice out;
  if (r.pp > 1) return out;  // it is not priced as what it is not
  const double e = setting_.rollout_element_bytes;
  out.weight_bytes = rank_elements(r) * e;
  out.activation_bytes = prefill_activations(r);
  out.kv_bytes_per_token = kv_bytes_per_token(train_.model(), r, e);
  take_room(r, room_of(r, out, leftovers), out);
  const double sequences =
      std::max(std::ceil(setting_.prompts * setting_.samples / static_cast<double>(r.engines)), 1.0);
  const double held = held_tokens();
  // A prompt's pass samples the first token of its response.
  LengthSpec decoded = setting_.responses;
  decoded.mean = std::max(decoded.mean - 1.0, 0.0), decoded.max = std::max(decoded.max - 1.0, decoded.mean);
  const DrainSteps steps = drain_steps(decoded, sequences, out.slots, static_cast<double>(r.engines));
  const double tail = steps.all - steps.full;
  const double last = std::max(0.0, sequences * decoded.mean - steps.full * out.slots) / std::max(tail, 1.0);
  out.prefill_seconds = prefill_seconds(r, sequences, out.slots, steps.full);
  out.steps = steps.all;
  out.decode_seconds = steps.full > 0.0 ? steps.full * decode_step_seconds(r, out.slots, held) : 0.0;
  double sum = 0.0;
  for (double n : steps.running) sum += n;
  // Quarter by quarter: few sequences take simpler protocols and smaller tiles.
  for (double n : steps.running)
    if (tail > 0.0 && sum > 0.0)
      out.tail_seconds += tail / 4.0 * decode_step_seconds(r, std::clamp(4.0 * n / sum * last, 1.0, out.slots), held);
  out.exchange_seconds = exchange_seconds(r);
  const double distinct = setting_.prefix_shared ? std::ceil(sequences / std::max(setting_.samples, 1.0)) : sequences;
  const RolloutPayload sent =
      rollout_payload(r, distinct * setting_.prompt_tokens + steps.full * out.slots + tail * last);
  out.reduce_payload = sent.reduce;
  out.dispatch_payload = sent.dispatch;
  return out;
}

double RlModel::least_rollout_bytes(const RolloutPoint& p, const RolloutPrice& alone, double rest,
                                    double overhead) const {
  const double bytes = alone.weight_bytes + alone.pool_bytes + alone.activation_bytes + communicators(p);
  const double leftovers = rest + std::max(0.0, overhead - train_.framework().context_bytes.value);
  const double shrinks = setting_.engine == RolloutEngine::hotbunk  ? 0.0
                         : setting_.engine == RolloutEngine::sglang ? p.memory_fraction
                                                                    : 1.0;
  return bytes + rest + overhead - shrinks * leftovers;
}

double RlModel::leftovers(const RlPoint& p, const ShiftShape& shape, const TrainSide& train) const {
  if (setting_.engine == RolloutEngine::hotbunk || p.placement != PlacementMode::colocated) return 0.0;
  const ShiftBytes training{.params = train.params, .optimizer = train.optimizer + train.critic + train.reference};
  return shape.price(training).rollout_rest +
         std::max(0.0, train.overhead_bytes - train_.framework().context_bytes.value);
}

RolloutPrice RlModel::rollout_beside(const RolloutPoint& r, double leftovers, const RolloutPrice& alone) const {
  if (leftovers <= 0.0) return alone;
  RolloutPrice out = alone;
  take_room(r, room_of(r, alone, leftovers), out);
  if (out.slots == alone.slots) return out;
  out = price_rollout(r, leftovers);
  // Fewer sequences at a time read the weights more often; where the estimate of the rest says otherwise, it is wrong.
  out.decode_seconds += std::max(0.0, alone.seconds() - out.seconds());
  return out;
}

RolloutPrice RlModel::price_rollout(const RlPoint& p) const {
  const TrainModel::Layers l = train_.layers(p.train);
  const TrainSide train = train_side(p.train, train_.price(p.train, l), l);
  return rollout_beside(p.rollout, leftovers(p, ShiftShape(p.transition), train), price_rollout(p.rollout));
}

}  // namespace hotbunk
