// The closed form of an engine: prefill, decode with full slots, decode while the last sequences end.
#include <algorithm>
#include <cmath>

#include "planner/rl/engine_schedule.h"
#include "planner/rl/engine_step.h"

namespace hotbunk {

bool RlModel::divides(const RolloutPoint& r) const {
  const ModelSpec& m = train_.model();
  if (r.tp < 1 || r.engines < 1 || r.ep < 1 || r.attention_dp < 1 || r.cp < 1 || r.pp < 1 || r.pp > m.layers ||
      r.tp % r.attention_dp != 0)
    return false;
  const std::int64_t tp = r.attention_tp();
  if (setting_.weights.narrow && !blocks_divide(r)) return false;
  if (m.heads % tp != 0 || (!m.mla && m.kv_heads % tp != 0 && tp % m.kv_heads != 0)) return false;
  if (!m.moe) return m.intermediate % tp == 0 && r.ep == 1;
  return m.moe->experts % r.ep == 0 && r.tp * r.cp % r.ep == 0;
}

/// Engines refuse slices that cut a block of weights which share a scale (vLLM's and SGLang's
/// validate_fp8_block_shape).
bool RlModel::blocks_divide(const RolloutPoint& r) const {
  const ModelSpec& m = train_.model();
  const LayerKinds kinds = layer_kinds(m);
  const auto whole = [&](std::int64_t width, std::int64_t ranks) {
    return width % (std::max<std::int64_t>(ranks, 1) * setting_.weights.block) == 0;
  };
  const std::int64_t tp = r.attention_tp(), d = m.mla ? m.mla->v_head_dim : m.head_dim;
  if (!whole(m.heads * d, tp)) return false;
  if (!m.mla && !whole(m.kv_heads * d, std::min(tp, m.kv_heads))) return false;
  if (kinds.dense > 0 && !whole(m.intermediate, r.tp)) return false;
  if (kinds.moe == 0) return true;
  return whole(m.moe->expert_intermediate, r.tp * r.cp / r.ep) &&
         (m.moe->shared_experts == 0 || whole(m.moe->shared_experts * m.moe->expert_intermediate, r.tp));
}

template <class Book, class Step>
RlModel::Stages<Book> RlModel::stages_of(const RolloutPoint& r, Step step) const {
  Stages<Book> out;
  each_stage(train_.model(), setting_.engine, r.pp, [&](const RolloutStage& s, std::int64_t count) {
    const Book one = step(s);
    if (one.total > out.slowest.total) out.slowest = one;
    out.all.add(one, static_cast<double>(count));
  });
  return out;
}

/// With stages the engine keeps as many micro-batches in flight, each of which has every stage read its weights once.
/// Every sequence gets a token when all micro-batches have passed the slowest stage, or when one has passed all stages
/// and its tokens are back at the first, whichever takes longer; fewer sequences than stages leave stages idle.
template <class Book>
DecodeRound RlModel::decode_rounds(const RolloutPoint& r, double sequences, double context, double times,
                                   Book& book) const {
  const EngineStep step(*this, r);
  DecodeRound out;
  out.micro_batches = std::clamp(sequences, 1.0, static_cast<double>(r.pp));
  out.sequences = sequences / out.micro_batches;
  Stages<Book> s =
      stages_of<Book>(r, [&](const RolloutStage& stage) { return step.decode<Book>(stage, out.sequences, context); });
  s.all.add(StepPart::hops, step.hops_seconds(out.sequences, out.sequences), static_cast<double>(r.pp));
  out.slowest_stage = s.slowest.total;
  out.latency = s.all.total;
  const EngineProfile& host = engine_profile();
  const double nodes = std::ceil(static_cast<double>(r.tp) / static_cast<double>(train_.cost().ranks_per_node()));
  out.gap = host.decode_sequence_seconds.value * sequences +
            host.decode_node_seconds.value * static_cast<double>(train_.model().layers) * (nodes - 1.0);
  if (train_.model().linear) out.gap += host.state_step_seconds.value + host.state_sequence_seconds.value * sequences;
  if (out.gap > 0.0) book.add(StepPart::launches, times * out.gap, times);
  if (out.micro_batches * out.slowest_stage > out.latency) book.add(s.slowest, times * out.micro_batches);
  else book.add(s.all, times);
  book.count(times, times * sequences);
  return out;
}

DecodeRound RlModel::decode_round(const RolloutPoint& r, double sequences, double context) const {
  StepSeconds once;
  return decode_rounds(r, sequences, context, 1.0, once);
}

/// With pipeline stages the first steps follow each other from stage to stage; later ones go between decode steps and
/// cost the pipeline what its slowest stage takes.
template <class Book>
void RlModel::prefill(const RolloutPoint& r, const EngineSchedule& schedule, Book& book) const {
  const EngineStep step(*this, r);
  const auto pass = [&](const EngineSchedule::Prefill& of, bool fills) {
    const Stages<Book> s = stages_of<Book>(
        r, [&](const RolloutStage& stage) { return step.prefill<Book>(stage, of.tokens, of.sequences); });
    book.add(s.slowest, of.steps);
    book.count(of.steps, of.steps * of.tokens);
    if (!fills || r.pp == 1) return;
    book.add(StepPart::filling, s.all.total - s.slowest.total, static_cast<double>(r.pp - 1));
    book.add(StepPart::hops, step.hops_seconds(of.tokens / token_shares(setting_.engine, r), of.sequences),
             static_cast<double>(r.pp));
  };
  for (const EngineSchedule::Prefill& p : schedule.first) pass(p, true);
  for (const EngineSchedule::Prefill& p : schedule.later) pass(p, false);
}

/// Rows of finished samples, as long as the longest, and their log-probs: gathered by all ranks (lower_exchange).
double RlModel::exchange_seconds(const RolloutPoint& r) const {
  if (!setting_.own_engine) return 0.0;
  const CostModel& cost = train_.cost();
  const double rows = std::ceil(std::ceil(setting_.prompts * setting_.samples / static_cast<double>(r.engines)) /
                                static_cast<double>(r.tp * r.cp * r.pp));
  const auto world = static_cast<double>(r.ranks());
  double seconds = 0.0;
  for (const double values : {3.0 + setting_.longest_sample, setting_.longest_response}) {
    const double mine = 4.0 * rows * values;
    seconds += cost.host_copy_seconds(mine, OpKind::feed) + cost.host_copy_seconds(world * mine, OpKind::fetch) +
               cost.collective_seconds(OpKind::all_gather, GroupShape::strided(r.ranks(), 1, cost.ranks_per_node()),
                                       world * mine);
  }
  return seconds;
}

/// Of the stage that exchanges most of each kind.
RolloutPayload RlModel::payload(const RolloutPoint& r, double prompt, double whole, double local) const {
  const EngineStep step(*this, r);
  RolloutPayload out;
  each_stage(train_.model(), setting_.engine, r.pp,
             [&](const RolloutStage& s, std::int64_t) { out.raise_to(step.payload(s, whole, local, prompt)); });
  return out;
}

template <class Book>
RolloutPrice RlModel::price_steps(const RolloutPoint& r, double leftovers, Book& prompts, Book& decode,
                                  Book& ending) const {
  RolloutPrice out;
  if (r.pp > train_.model().layers) return out;
  take_room(r, room_of(r, leftovers), out);
  const double sequences =
      std::max(std::ceil(setting_.prompts * setting_.samples / static_cast<double>(r.engines)), 1.0);
  const double held = held_tokens();
  // Samples of one prompt find it in the cache where prefixes are shared.
  const double distinct = setting_.prefix_shared ? std::ceil(sequences / std::max(setting_.samples, 1.0)) : sequences;
  const double prompt = setting_.prompt_tokens * distinct / sequences;
  const EngineSchedule schedule =
      engine_schedule({.sequences = sequences,
                       .slots = out.slots,
                       .engines = static_cast<double>(r.engines),
                       .micro_batches = std::clamp(out.slots, 1.0, static_cast<double>(r.pp)),
                       .prompt_tokens = prompt,
                       .max_prefill_tokens = setting_.max_prefill_tokens,
                       .responses = setting_.responses});
  prefill(r, schedule, prompts);
  out.prefill_seconds = prompts.total;
  out.steps = schedule.steps;
  if (schedule.full.steps > 0.0) decode_rounds(r, out.slots, held, schedule.full.steps, decode);
  out.decode_seconds = decode.total;
  for (const EngineSchedule::Decode& d : schedule.tail) decode_rounds(r, d.sequences, held, d.steps, ending);
  out.tail_seconds = ending.total;
  out.exchange_seconds = exchange_seconds(r);
  const double prefilled = distinct * setting_.prompt_tokens;
  const double decoded = schedule.full.steps * out.slots + (schedule.steps - schedule.full.steps) * schedule.last;
  out.sent = payload(r, prefilled, prefilled + decoded, prefilled / token_shares(setting_.engine, r) + decoded);
  return out;
}

RolloutPrice RlModel::price_rollout(const RolloutPoint& r, double leftovers, RolloutParts* parts) const {
  if (parts) {
    *parts = {};
    return price_steps(r, leftovers, parts->prefill, parts->decode, parts->tail);
  }
  StepSeconds prompts, decode, ending;
  return price_steps(r, leftovers, prompts, decode, ending);
}

RolloutPrice RlModel::rollout_beside(const RolloutPoint& r, double leftovers, const RolloutPrice& alone,
                                     RolloutParts* parts) const {
  if (leftovers <= 0.0) return alone;
  RolloutPrice out = alone;
  take_room(r, room_of(r, leftovers), out);
  if (out.slots == alone.slots) return out;
  out = price_rollout(r, leftovers, parts);
  // Fewer sequences at a time read the weights more often; where the estimate of the rest says otherwise, it is wrong.
  const double held = std::max(0.0, alone.seconds() - out.seconds());
  out.decode_seconds += held;
  if (parts) parts->decode.add(StepPart::held, held);
  return out;
}

RolloutPrice RlModel::price_rollout(const RlPoint& p, RolloutParts* parts) const {
  const TrainModel::Layers l = train_.layers(p.train);
  const TrainSide train = train_side(p.train, train_.price(p.train, l), l);
  const RolloutPrice alone = price_rollout(p.rollout, 0.0, parts);
  return rollout_beside(p.rollout, leftovers(p, ShiftShape(p.transition), train), alone, parts);
}

}  // namespace hotbunk
