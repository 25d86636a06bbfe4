#include "planner/rl/engine_step.h"

#include <algorithm>
#include <cmath>

namespace hotbunk {
namespace {

/// Kernels of a layer besides its collectives: two norms, four products, rotary positions, the write to the cache,
/// attention, the activation (lowering/rollout.cc), and the norm of Q and K, and those of what goes back into the
/// stream.
double layer_kernels(const ModelSpec& m, const WeightFormat& weights) {
  // Narrow products: what enters each of the four is quantised by a kernel of its own (stated; engines fuse some).
  return (m.qk_norm ? 11.0 : 10.0) + (m.output_norms ? 2.0 : 0.0) + (weights.narrow ? 4.0 : 0.0);
}
/// Kernels around the layers: embedding; two row gathers, final norm, head, sampling (same source).
constexpr double front_kernels = 1.0, back_kernels = 5.0;
double end_kernels(const RolloutStage& s) { return (s.first ? front_kernels : 0.0) + (s.last ? back_kernels : 0.0); }
/// Copies between host and device that a step of our engine waits for: ids up, before the other feeds, which come
/// beside the first layer; tokens and log-probs down (same source).
constexpr double step_feeds = 1.0, step_fetches = 2.0;

}  // namespace

EngineStep::EngineStep(const RlModel& rl, const RolloutPoint& r)
    : rl_(rl),
      model_(rl.train().model()),
      cost_(rl.train().cost()),
      set_(rl.setting()),
      counts_(rl.counts()),
      r_(r),
      ways_(token_shares(set_.engine, r)),
      moe_(static_cast<double>(layer_kinds(model_).moe)),
      apart_(r.tp * r.cp * (r.strided ? r.engines : 1)) {
  const std::int64_t node = cost_.ranks_per_node(), engine = apart_ * r.pp;
  // Where stages or engines do not tile nodes, some engine has one boundary more between nodes than it need have.
  const bool tiles = apart_ >= node ? apart_ % node == 0 : node % apart_ == 0;
  const bool engines_tile = engine >= node ? engine % node == 0 : node % engine == 0;
  crossings_ = std::min(r.pp - 1, apart_ >= node ? r.pp - 1 : (engine - 1) / node + (tiles && engines_tile ? 0 : 1));
}

GroupShape EngineStep::group(std::int64_t members, std::int64_t apart) const {
  return GroupShape::strided(members, apart * (r_.strided ? r_.engines : 1), cost_.ranks_per_node());
}

double EngineStep::kernels(const RolloutStage& s) const {
  const double reductions = r_.tp > 1 ? 2.0 : 0.0;
  // Ours: log-sum-exps gathered, what was attended weighed and summed.
  const double parts = adds_parts() ? 3.0 : 0.0;
  return (layer_kernels(model_, set_.weights) + reductions + parts) * s.layers + end_kernels(s);
}

/// Whether rows go to ranks that have whole experts. Where ranks share each of some experts (SGLang's ep_size below
/// tp), all have all tokens and what they leave is summed, as of experts that all share.
bool EngineStep::sends_rows() const { return r_.ep > 1 && r_.ep >= r_.tp; }

/// Layers whose experts are split over the engine's tensor and context ranks alike, and summed over both.
double EngineStep::experts_reduced(const RolloutStage& s) const { return !sends_rows() && ways_ > 1.0 ? s.moe : 0.0; }

RolloutPayload EngineStep::payload(const RolloutStage& s, double whole, double local, double prompt) const {
  const double row = set_.rollout_element_bytes * static_cast<double>(model_.hidden);
  const auto groups = static_cast<double>(r_.attention_dp);
  const double summed = experts_reduced(s);
  RolloutPayload out;
  // After attention within its group (its own tokens), after the MLP over the whole engine.
  if (r_.attention_tp() > 1) out.reduce += s.layers * row * local / groups;
  if (s.first && r_.tp > 1 && r_.attention_dp == 1) out.reduce += row * local;  // the embedding, split by vocabulary
  if (sends_rows() && model_.moe) {
    out.dispatch = dispatch_bytes(s, whole);
    if (r_.tp > 1) out.reduce += s.dense() * row * local;
  } else if (r_.tp > 1) {
    out.reduce += (s.layers - summed) * row * local;
  }
  out.experts = summed * row * whole;
  if (!s.last) out.pipeline = boundary_tensors * row * local / static_cast<double>(r_.tp);
  if (!s.first && r_.attention_tp() > 1) out.arriving = boundary_tensors * row * local / groups;
  if (r_.cp == 1) return out;
  if (adds_parts()) {
    out.context_gather = s.layers * sums_bytes() * whole / groups;
    out.context_reduce = s.layers * attended_bytes() * whole / groups;
    return out;
  }
  out.context_gather = cache_bytes(model_, r_, s.layers, set_.rollout_element_bytes, groups) * prompt;
  if (cache_shares(set_.engine, r_) > groups)
    out.context_reduce = s.layers * attended_bytes() * (whole - prompt) / groups;
  return out;
}

/// Dispatch and combine: each rank sends its share of the tokens to their experts and the results back.
double EngineStep::dispatch_bytes(const RolloutStage& s, double tokens) const {
  const double row = set_.rollout_element_bytes * static_cast<double>(model_.hidden);
  return 2.0 * s.moe * row * tokens / (static_cast<double>(r_.tp) * ways_) *
         static_cast<double>(model_.moe->experts_per_token) * static_cast<double>(r_.ep - 1) /
         static_cast<double>(r_.ep);
}

/// Of one token in one layer, what its heads on this rank attended to: partial results that context ranks add up.
/// Engines that attend in the latent add these up; ours has made values of it.
double EngineStep::attended_bytes() const {
  const std::int64_t width = model_.mla && !adds_parts() ? model_.mla->kv_lora_rank : model_.value_dim();
  return set_.rollout_element_bytes * static_cast<double>(model_.heads * width) /
         static_cast<double>(r_.attention_tp());
}

/// Of one token in one layer, the log-sum-exps of its heads on this rank that all context ranks have of their parts.
double EngineStep::sums_bytes() const {
  return 4.0 * static_cast<double>(r_.cp * model_.heads) / static_cast<double>(r_.attention_tp());  // fp32
}

template <class Book>
void EngineStep::exchange(const RolloutStage& s, const Tokens& t, Book& book) const {
  const double row = set_.rollout_element_bytes * static_cast<double>(model_.hidden);
  const double mine = t.local / static_cast<double>(r_.attention_dp);
  const auto reduce = [&](double times, const GroupShape& ranks, double bytes, StepPart part) {
    book.add(part, times * cost_.collective_seconds(OpKind::all_reduce, ranks, bytes), times, times * bytes);
  };
  reduce(s.layers, group(r_.attention_tp()), mine * row, StepPart::reduce);
  const GroupShape engine = group(r_.tp);
  const double moe = sends_rows() ? s.moe : 0.0, summed = experts_reduced(s);
  if (moe > 0.0) {
    const double bytes = dispatch_bytes(s, t.whole);
    book.add(StepPart::dispatch,
             2.0 * moe * cost_.collective_seconds(OpKind::all_to_all, group(r_.ep), bytes / (2.0 * moe)), 2.0 * moe,
             bytes);
  }
  // The embedding's rows are split over the engine too.
  if (s.first && r_.attention_dp == 1) reduce(1.0, engine, t.local * row, StepPart::reduce);
  if (summed > 0.0) reduce(summed, group(r_.tp * r_.cp), t.whole * row, StepPart::experts_reduce);
  reduce(s.layers - moe - summed, engine, t.local * row, StepPart::reduce);
}

/// A prompt's ranks gather each other's keys and values before they attend. Decoding over a divided cache, each attends
/// to its part for all of its heads; with everyone's log-sum-exp the parts are scaled, then added up. Ours always does.
template <class Book>
void EngineStep::context(const RolloutStage& s, const Tokens& t, Book& book) const {
  if (r_.cp == 1) return;
  const auto groups = static_cast<double>(r_.attention_dp);
  const double mine = t.whole / groups;
  const GroupShape ranks = group(r_.cp, r_.tp);
  const auto each_layer = [&](OpKind kind, double bytes) {
    book.add(StepPart::context, s.layers * cost_.collective_seconds(kind, ranks, bytes), s.layers, s.layers * bytes);
  };
  if (!t.decode && !adds_parts()) {
    each_layer(OpKind::all_gather, mine * cache_bytes(model_, r_, 1.0, set_.rollout_element_bytes, 1.0));
    return;
  }
  if (cache_shares(set_.engine, r_) <= groups) return;
  each_layer(OpKind::all_gather, mine * sums_bytes());
  each_layer(OpKind::all_reduce, mine * attended_bytes());
}

template <class Book>
void EngineStep::arrive(const RolloutStage& s, const Tokens& t, Book& book) const {
  if (s.first) return;
  const double row = set_.rollout_element_bytes * static_cast<double>(model_.hidden);
  const double bytes = boundary_tensors * row * t.local / static_cast<double>(r_.attention_dp);
  book.add(StepPart::arrival, cost_.collective_seconds(OpKind::all_gather, group(r_.attention_tp()), bytes), 1.0,
           bytes);
}

double EngineStep::hops_seconds(double local, double sequences) const {
  if (r_.pp == 1) return 0.0;
  const std::int64_t node = cost_.ranks_per_node();
  const GroupShape near{2, 1, 1}, far{2, 2, 1, std::max<std::int64_t>(2, apart_ / node + 1), apart_ % node == 0};
  const double bytes = boundary_tensors * set_.rollout_element_bytes * static_cast<double>(model_.hidden) * local /
                       static_cast<double>(r_.tp);
  const auto across = static_cast<double>(crossings_), inside = static_cast<double>(r_.pp - 1) - across;
  return across * cost_.collective_seconds(OpKind::send, far, bytes) +
         inside * cost_.collective_seconds(OpKind::send, near, bytes) +
         cost_.collective_seconds(OpKind::send, leaves_node() ? far : near, 4.0 * sequences);
}

/// Of products that are known by their FLOPs and the bytes of their weights alone.
double EngineStep::lumped_seconds(double flops, double bytes) const {
  const double rate =
      rl_.product_peak() * cost_.hardware().gemm.efficiency.value * cost_.hardware().sustained_clock.value;
  return std::max(cost_.memory_seconds(bytes), flops / std::max(rate, 1.0));
}

/// `rows` tokens times a layer's weights of n x k. The result is wide whatever the operands are.
double EngineStep::product_seconds(double rows, double n, double k) const {
  const WeightFormat& w = set_.weights;
  if (!w.narrow) return cost_.gemm_seconds(rows, n, k, set_.rollout_dtype);
  return cost_.gemm_seconds(
      rows, n, k, rl_.product_peak(),
      w.operand_bytes * rows * k + w.stored_bytes * n * k + set_.rollout_element_bytes * rows * n);
}

/// Products with the weights that the tokens touch, streams of activations.
template <class Book>
void EngineStep::layers(const RolloutStage& s, const Tokens& t, Book& book) const {
  const ModelSpec& m = model_;
  const WeightFormat& w = set_.weights;
  const double e = set_.rollout_element_bytes, stored = w.narrow ? w.stored_bytes : e;
  const auto h = static_cast<double>(m.hidden), d = static_cast<double>(m.head_dim), tp = static_cast<double>(r_.tp),
             group = static_cast<double>(r_.attention_tp());
  const double mine = t.local / static_cast<double>(r_.attention_dp), dense = s.dense();
  const double q = static_cast<double>(m.heads) * d / group,
               kv = std::max(static_cast<double>(m.kv_heads) / group, 1.0) * d;
  // `times` products of `rows` tokens with n x k weights.
  const auto product = [&](StepPart part, double times, double rows, double n, double k) {
    book.add(part, times * product_seconds(rows, n, k), times, times * n * k * stored);
  };
  const auto lumped = [&](StepPart part, double times, double flops, double bytes) {
    book.add(part, times * lumped_seconds(flops, bytes), times, times * bytes);
  };
  if (m.mla) {
    lumped(StepPart::latent, s.layers, 2.0 * mine * counts_.attention / group, counts_.attention / group * stored);
  } else {
    const double full = m.attending_share() * s.layers, others = s.layers - full;
    product(StepPart::qkv, full, mine, (m.gated_attention ? 2.0 : 1.0) * q + 2.0 * kv, h);
    product(StepPart::output, full, mine, h, q);
    if (m.linear) {
      const LinearAttentionSpec& a = *m.linear;
      const auto of = [&](std::int64_t n) { return static_cast<double>(n) / group; };
      product(StepPart::qkv, others, mine, of(a.convolved() + a.values() + 2 * a.value_heads), h);
      product(StepPart::output, others, mine, h, of(a.values()));
      // A decoded token reads its sequence's state and writes it; a prompt's tokens do so a chunk at a time, and stream
      // queries, keys and values.
      const double states = 2.0 * mine * s.layers * state_bytes(m, r_, e);
      const double moved = t.decode ? states : states / 64.0 + 3.0 * e * mine * others * of(a.convolved());
      book.add(StepPart::attention, cost_.memory_seconds(moved), others, moved);
    }
  }
  const double width = static_cast<double>(m.intermediate) / tp;
  if (dense > 0.0) {
    product(StepPart::mlp, dense, t.local, (m.gated_mlp ? 2.0 : 1.0) * width, h);
    product(StepPart::mlp, dense, t.local, h, width);
  }
  double inner = dense * width;
  if (s.moe > 0.0) {
    // Experts: with many tokens nearly all are touched, with few only theirs.
    const auto layers = static_cast<double>(m.layers), ranks = static_cast<double>(r_.tp) * ways_;
    const double others = counts_.ends + layers * counts_.attention + (layers - moe_) * mlp_elements(m);
    const double active = std::max(0.0, counts_.active - others), all = std::max(0.0, counts_.parameters - others);
    const double share = static_cast<double>(m.moe->experts_per_token) / static_cast<double>(m.moe->experts);
    const double touched = active + (all - active) * (1.0 - std::pow(1.0 - share, std::max(t.whole, 1.0) - 1.0));
    const double part = s.moe / moe_;
    // Router, norms and biases stay wide.
    const double plain = w.narrow ? moe_ * (counts_.moe_layer - counts_.moe_layer_products) * (e - stored) : 0.0;
    lumped(StepPart::experts, 1.0, 2.0 * t.whole * active * part / ranks, (touched * stored + plain) * part / ranks);
    inner += s.moe * static_cast<double>(m.moe->experts_per_token * m.moe->expert_intermediate) / tp /
             (t.decode ? ways_ : 1.0);
  }
  // Two norms read the stream and the branch and write both; rotary positions go in place; the gate reads 2, writes 1.
  const double streamed = (mine * s.layers * (8.0 * h + 2.0 * (q + kv)) + 3.0 * t.local * inner) * e;
  book.add(StepPart::streams, cost_.memory_seconds(streamed), 1.0, streamed);
  if (!w.narrow) return;
  // What enters Q, K, V (MLA: the latents' projections, and queries out of theirs), the output and the MLP, then what
  // leaves the gate: read wide, written narrow.
  const double inputs =
      m.mla ? h + static_cast<double>(m.mla->q_lora_rank) + static_cast<double>(m.heads * m.mla->v_head_dim) / group
            : h + q;
  const double quantized = (mine * s.layers * inputs + t.local * (s.layers * h + inner)) * (e + w.operand_bytes);
  book.add(StepPart::quantize, cost_.memory_seconds(quantized), 4.0 * s.layers, quantized);
}

/// Head and sampling of `sequences` tokens, and what every step costs whatever its size.
template <class Book>
void EngineStep::ends(const RolloutStage& s, double sequences, Book& book) const {
  const double vocab = static_cast<double>(model_.vocab), logits = 4.0 * sequences * vocab;  // fp32
  if (s.last) {
    const double rows = vocab / static_cast<double>(r_.tp), h = static_cast<double>(model_.hidden);
    book.add(StepPart::head, cost_.gemm_seconds(sequences, rows, h, set_.rollout_dtype), 1.0,
             rows * h * set_.rollout_element_bytes);
    book.add(StepPart::sampling, cost_.memory_seconds(logits), 1.0, logits);
  }
  const double kernels = (layer_kernels(model_, set_.weights) + (adds_parts() ? 1.0 : 0.0)) * s.layers + end_kernels(s);
  book.add(StepPart::kernels, kernels * cost_.hardware().kernel_overhead.value, kernels);
  if (s.last)
    book.add(StepPart::logits, cost_.collective_seconds(OpKind::all_gather, group(r_.tp), logits), 1.0, logits);
  if (set_.engine != RolloutEngine::hotbunk) return;
  const double fed = s.first ? step_feeds * cost_.host_copy_seconds(4.0 * sequences, OpKind::feed) : 0.0,
               fetched = s.last ? step_fetches * cost_.host_copy_seconds(4.0 * sequences, OpKind::fetch) : 0.0;
  book.add(StepPart::feeds, fed + fetched, (s.first ? step_feeds : 0.0) + (s.last ? step_fetches : 0.0));
}

/// `keys`: that a query sees on average; flops and bytes of one layer.
template <class Book>
void EngineStep::attend(const RolloutStage& s, double flops, double keys, double bytes, Book& book) const {
  book.add(StepPart::attention, s.layers * cost_.attention_seconds(flops, keys, bytes, false, rl_.wide_peak()),
           s.layers, s.layers * bytes);
}

/// A step whose kernels the host launches one by one is not over before it has. SGLang and vLLM do so in prefill alone,
/// unless they are told to do without captured graphs (rollout.eager): their decode steps replay them, in which a
/// kernel costs the device's own start and drain.
template <class Book>
void EngineStep::launch(const RolloutStage& s, double each, Book& book) const {
  const double launched = kernels(s);
  book.add(StepPart::launches, std::max(0.0, launched * each - book.total), launched);
}

template <class Book>
Book EngineStep::decode(const RolloutStage& s, double sequences, double held) const {
  Book book;
  const Tokens t{sequences, sequences, true};
  const double split = cache_shares(set_.engine, r_);
  const double cache = sequences * held * cache_bytes(model_, r_, 1.0, set_.cache_element_bytes, split);
  const double flops =
      attention_flops_per_pair(model_, true) * sequences * held / (static_cast<double>(r_.attention_tp()) * split);
  layers(s, t, book);
  exchange(s, t, book);
  ends(s, sequences, book);
  attend(s, flops, held, cache, book);
  context(s, t, book);
  arrive(s, t, book);
  if (set_.engine == RolloutEngine::hotbunk) launch(s, cost_.hardware().launch.value, book);
  else if (set_.eager) launch(s, rl_.engine_profile().eager_kernel_seconds.value, book);
  return book;
}

template <class Book>
Book EngineStep::prefill(const RolloutStage& s, double tokens, double sequences) const {
  Book book;
  const Tokens t{tokens, tokens / ways_, false};
  const double e = set_.rollout_element_bytes;
  // Causal: a prompt of s tokens has s (s + 1) / 2 pairs.
  const double keys = (set_.prompt_square / std::max(set_.prompt_tokens, 1.0) + 1.0) / 2.0;
  const double heads = static_cast<double>(r_.attention_tp() * r_.attention_dp), apart = static_cast<double>(r_.cp);
  const double flops = attention_flops_per_pair(model_, false) * tokens * keys / (heads * apart);
  const double wide = static_cast<double>(2 * model_.heads * model_.head_dim) / (heads * ways_) * e;
  const double gathered = cache_bytes(model_, r_, 1.0, set_.own_engine ? set_.cache_element_bytes : e,
                                      static_cast<double>(r_.attention_dp) * apart / ways_);
  layers(s, t, book);
  exchange(s, t, book);
  ends(s, sequences, book);
  attend(s, flops, keys, tokens * (wide + gathered), book);
  context(s, t, book);
  arrive(s, t, book);
  launch(s, cost_.hardware().launch.value, book);
  return book;
}

template StepSeconds EngineStep::decode(const RolloutStage&, double, double) const;
template StepParts EngineStep::decode(const RolloutStage&, double, double) const;
template StepSeconds EngineStep::prefill(const RolloutStage&, double, double) const;
template StepParts EngineStep::prefill(const RolloutStage&, double, double) const;

}  // namespace hotbunk
