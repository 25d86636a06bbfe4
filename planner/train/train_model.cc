#include "planner/train/train_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "planner/train/layer_builder.h"
#include "planner/train/layer_kinds.h"
#include "planner/train/optimizer_cost.h"

namespace hotbunk {

std::string_view name_of(Term t) {
  constexpr std::string_view names[] = {"compute",  "recompute", "tensor", "expert",    "context",
                                        "pipeline", "bubble",    "data",   "optimizer", "host"};
  return names[static_cast<std::size_t>(t)];
}

TrainModel::TrainModel(const ModelSpec& model, TrainSetting setting, const CostModel& cost,
                       const FrameworkProfile& framework)
    : model_(model), setting_(std::move(setting)), cost_(cost), framework_(framework) {
  setting_.state.separate_master = framework_.separate_master;
  peak_ = cost_.peak_flops(setting_.precision);
  wide_peak_ = quantization_of(setting_.precision).stored_bytes > 0 ? cost_.peak_flops("bf16") : peak_;
  quantized_bytes_ = quantization_of(setting_.precision).moved_bytes;
  HB_CHECK(peak_ > 0.0 && setting_.sequence > 0, "no peak for {} or no sequence", setting_.precision);
  tensors_ = tensor_count(model_), expert_tensors_ = expert_tensor_count(model_);
  parameters_ = static_cast<double>(parameter_count(model_));
  layer_matrices_ = matrices_of(model_, model_.layers - 1), end_matrices_ = matrices_of(model_, -1);
  const LayerKinds kinds = layer_kinds(model_);
  dense_layers_ = kinds.dense, moe_layers_ = kinds.moe;
  // 2 FLOPs per weight and token forward, 4 backward, plus attention over the visible half of the sequence; the
  // embedding's look-up multiplies nothing, a tied one does as the head.
  const TrainPoint one{.micro_batch = 1};
  const Layers l = layers(one);
  flops_per_token_ = 3.0 *
                     (l.dense.flops_forward * static_cast<double>(dense_layers_) +
                      l.moe.flops_forward * static_cast<double>(moe_layers_) + l.head.flops_forward) /
                     static_cast<double>(setting_.sequence);
}

TrainModel::Layers TrainModel::layers(const TrainPoint& p) const {
  Layers l{dense_layer(p), moe_layers_ > 0 ? moe_layer(p) : LayerCost{}, embedding(p), head(p)};
  if (!follows_shapes(p.optimizer)) return l;
  l.dense.optimizer = layer_work(p, l.dense, false);
  if (moe_layers_ > 0) l.moe.optimizer = layer_work(p, l.moe, true);
  l.embedding.optimizer = end_work(p, l.embedding), l.head.optimizer = end_work(p, l.head);
  return l;
}

/// Tokens that a micro-batch's buffer holds.
double TrainModel::buffer_tokens(const TrainPoint& p) const {
  const auto sequence = static_cast<double>(setting_.sequence), mean = static_cast<double>(p.micro_batch) * sequence;
  const auto ways = static_cast<double>(p.cp * p.ulysses);
  const double budget = setting_.budget_tokens * ways;
  const double held = std::floor(budget / sequence), own = static_cast<double>(p.micro_batch);
  const double sequences = setting_.budget_sequences > 0.0 ? std::min(held, setting_.budget_sequences) : held;
  const bool by_budget =
      sequences == own || (sequences > own && p.micro_batches == 1) || (sequences < 1.0 && own == 1.0);
  const double all = static_cast<double>(p.sequences()) * std::max(setting_.longest, sequence);
  // A rank holds whole tokens.
  const double least = ways * std::ceil(std::max(mean, setting_.longest) / ways);
  return std::clamp(by_budget ? budget : least, mean, std::max(mean, all));
}

/// Cut by tokens, what limits a micro-batch below its budget is that the rank's step has no more sequences; cut by
/// sequences, each is so many of them.
TokenLoad TrainModel::load_of(const TrainPoint& p) const {
  const auto sequences = static_cast<double>(setting_.budget_sequences > 0.0 ? p.micro_batch : p.sequences());
  return {{static_cast<double>(setting_.sequence), setting_.length_variance, setting_.longest}, sequences};
}

/// Drawn in an iteration, over the data ranks.
double TrainModel::loads(const TrainPoint& p) const {
  return setting_.steps * static_cast<double>(p.dp) *
         (setting_.budget_sequences > 0.0 ? static_cast<double>(p.micro_batches) : 1.0);
}

double TrainModel::fullest_tokens(const TrainPoint& p) const {
  const double mean = static_cast<double>(p.micro_batch) * static_cast<double>(setting_.sequence);
  if (setting_.load_tokens > 0.0) return std::max(mean, setting_.load_tokens);
  if (!setting_.ragged) return mean;
  const TokenLoad load = load_of(p);
  if (setting_.padded()) {
    // As many samples as there are, or beside the longest as many as the budget has room for, each as long as that.
    const double longest = std::max(setting_.longest, 1.0),
                 budget = setting_.budget_tokens * static_cast<double>(p.cp * p.ulysses),
                 beside = std::floor(std::max(0.0, budget - longest) / static_cast<double>(setting_.sequence));
    const double count = setting_.budget_sequences > 0.0 ? static_cast<double>(p.micro_batch) : 1.0 + beside;
    return std::max(mean, longest * std::min(count, static_cast<double>(p.sequences())));
  }
  // Cut by sequences, a framework that sizes nothing beforehand has no budget of tokens.
  const double buffer = setting_.budget_sequences > 0.0 && !framework_.lowered_ops ? load.most() : buffer_tokens(p);
  if (framework_.lowered_ops) return buffer;
  const auto ways = static_cast<double>(p.cp * p.ulysses);  // a rank holds whole tokens
  const double most = ways * std::ceil(load.exceeded_with(1.0 / (load_iterations * std::max(loads(p), 1.0))) / ways);
  return std::clamp(most, mean, std::max(mean, buffer));
}

double TrainModel::overflow_chance(const TrainPoint& p, double tokens) const {
  if (!setting_.ragged || framework_.lowered_ops) return 0.0;
  if (setting_.padded()) {
    // As many samples as long as the longest of them: one that is too long is enough.
    if (setting_.budget_sequences <= 0.0) return 0.0;
    const auto count = static_cast<double>(p.micro_batch);
    const TokenLoad one({static_cast<double>(setting_.sequence), setting_.length_variance, setting_.longest}, 1.0);
    return -std::expm1(loads(p) * count * std::log1p(-std::min(one.exceeds(tokens / count), 1.0 - 1e-15)));
  }
  if (setting_.budget_sequences <= 0.0 && tokens >= buffer_tokens(p)) return 0.0;  // no micro-batch is cut so large
  return -std::expm1(loads(p) * std::log1p(-std::min(load_of(p).exceeds(tokens), 1.0 - 1e-15)));
}

TrainModel TrainModel::with_load(double tokens) const {
  TrainModel out = *this;
  out.setting_.load_tokens = tokens;
  return out;
}

TrainModel TrainModel::with_micro_batches(double tokens, double sequences) const {
  TrainModel out = *this;
  out.setting_.load_tokens = 0.0;
  out.setting_.budget_tokens = tokens;
  out.setting_.budget_sequences = sequences;
  return out;
}

TrainPoint TrainModel::cut(TrainPoint p) const {
  const std::int64_t all = p.sequences();
  const double sequence = static_cast<double>(setting_.sequence), ways = static_cast<double>(p.cp * p.ulysses);
  // A billion sequences are more than any batch, and far from overflowing the products they enter.
  double held = setting_.budget_tokens > 0.0 ? setting_.budget_tokens * ways / sequence : 1e9;
  if (setting_.budget_sequences > 0.0) held = std::min(held, setting_.budget_sequences);
  p.micro_batch = std::clamp<std::int64_t>(static_cast<std::int64_t>(std::min(held, 1e9)), 1, 1'000'000'000);
  p.set_sequences(all);
  return p;
}

double TrainModel::micro_batch_multiple(const TrainPoint& p) const {
  const auto tp = static_cast<double>(p.tp);
  const double more = framework_.token_multiple.value;
  return static_cast<double>(p.cp * p.ulysses) * (more > 1.0 ? tp * more : p.sp && p.tp > 1 ? tp : 1.0);
}

double TrainModel::padding_tokens(const TrainPoint& p) const {
  if (!setting_.ragged) return 0.0;
  if (setting_.padded()) {
    const auto known = static_cast<std::int64_t>(setting_.longest_of.size());
    const double each =
        setting_.longest_of[static_cast<std::size_t>(std::clamp<std::int64_t>(p.micro_batch, 1, known) - 1)];
    return static_cast<double>(p.micro_batch) * std::max(0.0, each - static_cast<double>(setting_.sequence));
  }
  const auto count = static_cast<double>(p.micro_batch), chunks = static_cast<double>(p.cp > 1 ? 2 * p.cp : 1);
  const double each = chunks * (framework_.pads_sequences ? static_cast<double>(p.tp) : 1.0);
  const double all = micro_batch_multiple(p);
  // Of lengths that vary what is left over is as likely one number as another.
  const auto filled = [&](double tokens, double multiple) {
    return setting_.length_variance > 0.0 ? 0.5 * (multiple - 1.0) : std::ceil(tokens / multiple) * multiple - tokens;
  };
  const double sequence = static_cast<double>(setting_.sequence), own = filled(sequence, each);
  return count * own + (all > each ? filled(count * (sequence + own), all) : 0.0);
}

bool TrainModel::layers_follow_stages() const {
  bool after = false;
  for (const RankAxis axis : setting_.order) {
    if (axis == RankAxis::dp || axis == RankAxis::pp) after = true;
    else if (after) return true;
  }
  return false;
}

double TrainModel::model_flops(double tokens) const { return flops_per_token_ * tokens; }

/// "" or why linear attention is not cut so: heads by tensor parallelism, and sequences by nothing that is priced.
std::string TrainModel::linear_divides(const TrainPoint& p) const {
  if (!model_.linear) return "";
  const LinearAttentionSpec& a = *model_.linear;
  if (p.cp > 1 || p.ulysses > 1)
    return fmt::format("linear attention hands a state from token to token: cp {} and ulysses {} have no price", p.cp,
                       p.ulysses);
  if (a.key_heads % p.tp != 0 || a.value_heads % p.tp != 0)
    return fmt::format("{} key and {} value heads of linear attention do not divide by tp {}", a.key_heads,
                       a.value_heads, p.tp);
  return "";
}

bool TrainModel::divides(const TrainPoint& p) const {
  const std::int64_t ways = p.cp * p.ulysses;
  if (p.dp < 1 || p.cp < 1 || p.ulysses < 1 || p.tp < 1 || p.pp < 1 || p.vpp < 1 || p.ep < 1 || p.etp < 1) return false;
  if (p.micro_batch < 1 || p.micro_batches < 1) return false;
  if (model_.heads % p.tp != 0 || (model_.heads / p.tp) % p.ulysses != 0) return false;
  if (!model_.mla && model_.kv_heads % p.tp != 0 && p.tp % model_.kv_heads != 0) return false;
  if (model_.intermediate % p.tp != 0) return false;
  if (!linear_divides(p).empty()) return false;
  // C1: KV heads are split or repeated whole.
  if (!model_.mla && model_.kv_heads % p.ulysses != 0 && p.ulysses % model_.kv_heads != 0) return false;
  if (!setting_.ragged && setting_.sequence % ways != 0) return false;
  if (p.pp > model_.layers || p.pp * p.vpp > model_.layers || (p.vpp > 1 && p.pp == 1)) return false;
  // Interleaved chunks are equal, or one layer short at both ends where the embedding and the head count as one each;
  // some frameworks take any split.
  const bool equal = framework_.uneven_chunks || split_given(p) || model_.layers % (p.pp * p.vpp) == 0 ||
                     (model_.layers + 2) % (p.pp * p.vpp) == 0;
  if (p.vpp > 1 && (!equal || !fills_rows(p))) return false;
  if (p.sp && (p.tp == 1 || (!setting_.ragged && setting_.sequence / ways % p.tp != 0))) return false;
  if (!p.shard_group_divides()) return false;
  if (p.ep > 1 || p.etp > 1) {
    if (!model_.moe || model_.moe->experts % p.ep != 0 || model_.moe->expert_intermediate % p.etp != 0) return false;
    if (p.data_ranks() * p.tp % (p.ep * p.etp) != 0 || !groups(p).stages_agree()) return false;
  }
  return true;
}

std::string TrainModel::why_invalid(const TrainPoint& p) const {
  if (divides(p)) return "";
  const std::pair<const char*, std::int64_t> sizes[] = {{"dp", p.dp},
                                                        {"cp", p.cp},
                                                        {"ulysses", p.ulysses},
                                                        {"tp", p.tp},
                                                        {"pp", p.pp},
                                                        {"vpp", p.vpp},
                                                        {"ep", p.ep},
                                                        {"etp", p.etp},
                                                        {"micro-batch", p.micro_batch},
                                                        {"micro-batches", p.micro_batches}};
  for (const auto& [name, size] : sizes)
    if (size < 1) return fmt::format("{} is {}", name, size);
  if (p.tp >= 1 && model_.heads % p.tp != 0) return fmt::format("{} heads do not divide by tp {}", model_.heads, p.tp);
  if (p.tp >= 1 && model_.intermediate % p.tp != 0)
    return fmt::format("intermediate size {} does not divide by tp {}", model_.intermediate, p.tp);
  if (std::string why = linear_divides(p); !why.empty()) return why;
  if (p.tp >= 1 && p.ulysses >= 1 && (model_.heads / p.tp) % p.ulysses != 0)
    return fmt::format("{} heads per tp rank do not divide by ulysses {}", model_.heads / p.tp, p.ulysses);
  if (p.pp * p.vpp > model_.layers)
    return fmt::format("{} layers are fewer than pp {} x vpp {}", model_.layers, p.pp, p.vpp);
  if (p.vpp > 1 && !fills_rows(p))
    return fmt::format("interleaving needs micro-batches ({}) divisible by pp ({})", p.micro_batches, p.pp);
  if (p.vpp > 1 && p.pp > 1 && !framework_.uneven_chunks && model_.layers % (p.pp * p.vpp) != 0)
    return fmt::format("{} interleaves equal chunks only: {} layers do not divide by pp {} x vpp {}", framework_.name,
                       model_.layers, p.pp, p.vpp);
  if (p.sp && p.tp == 1) return "sequence parallelism needs tp above 1";
  if ((p.ep > 1 || p.etp > 1) && !model_.moe)
    return fmt::format("expert parallelism (ep {}, etp {}) needs a model with experts", p.ep, p.etp);
  if (p.ep > 1 && model_.moe->experts % p.ep != 0)
    return fmt::format("{} experts do not divide by ep {}", model_.moe->experts, p.ep);
  if (p.ep * p.etp > 1 && p.data_ranks() * p.tp % (p.ep * p.etp) == 0 && !groups(p).stages_agree())
    return "this order puts a rank's experts into another pipeline stage: name pp last";
  if (p.etp > 1 && model_.moe->expert_intermediate % p.etp != 0)
    return fmt::format("{} columns of an expert % etp {} = {}", model_.moe->expert_intermediate, p.etp,
                       model_.moe->expert_intermediate % p.etp);
  if (p.ep * p.etp > 1 && p.data_ranks() * p.tp % (p.ep * p.etp) != 0)
    return fmt::format("{} ranks of a pipeline stage % (ep {} x etp {} = {}) = {}", p.data_ranks() * p.tp, p.ep, p.etp,
                       p.ep * p.etp, p.data_ranks() * p.tp % (p.ep * p.etp));
  if (p.fsdp > 0 && p.data_ranks() % p.fsdp != 0)
    return fmt::format("{} data ranks % fsdp {} = {}", p.data_ranks(), p.fsdp, p.data_ranks() % p.fsdp);
  if (!p.shard_group_divides())
    return fmt::format("{} ranks of the dimensions that shards lie in % fsdp {}",
                       p.shard_over.over(p.dp, p.cp, p.ulysses), p.fsdp);
  if (p.vpp > 1 && p.pp == 1) return fmt::format("vpp {} needs a pipeline, pp is 1", p.vpp);
  if (!model_.mla && model_.kv_heads % p.tp != 0 && p.tp % model_.kv_heads != 0)
    return fmt::format("{} KV heads neither divide by tp {} nor it by them", model_.kv_heads, p.tp);
  if (!model_.mla && model_.kv_heads % p.ulysses != 0 && p.ulysses % model_.kv_heads != 0)
    return fmt::format("{} KV heads neither divide by ulysses {} nor it by them", model_.kv_heads, p.ulysses);
  return fmt::format("{} tokens of a sequence, {} layers do not divide by cp {} x ulysses {}, tp {} and vpp {}",
                     setting_.sequence, model_.layers, p.cp, p.ulysses, p.tp, p.vpp);
}

/// Interleaved stages go through their chunks with as many micro-batches as there are stages: Megatron-core takes whole
/// rows of these, lowering's last row may be shorter.
bool TrainModel::fills_rows(const TrainPoint& p) const { return framework_.lowered_ops || p.micro_batches % p.pp == 0; }

bool TrainModel::split_given(const TrainPoint& p) const {
  return static_cast<std::int64_t>(setting_.pipeline_split.size()) == p.pp * p.vpp;
}

namespace {

/// A pipeline cut as evenly as its layers allow. The longer chunks are in the middle: the first and last also hold the
/// embedding and the head.
struct EvenCut {
  std::int64_t base, extra, first_long;
  EvenCut(std::int64_t layers, std::int64_t chunks)
      : base(layers / chunks), extra(layers % chunks), first_long((chunks - extra + 1) / 2) {}
  std::int64_t begin(std::int64_t i) const { return i * base + std::clamp<std::int64_t>(i - first_long, 0, extra); }
  /// The chunk that holds a layer.
  std::int64_t chunk_of(std::int64_t layer) const {
    const std::int64_t before = first_long * base, longer = extra * (base + 1);
    if (layer < before) return layer / base;
    if (layer < before + longer) return first_long + (layer - before) / (base + 1);
    return first_long + extra + (layer - before - longer) / base;
  }
};

}  // namespace

std::vector<std::int64_t> even_chunks(std::int64_t layers, std::int64_t chunks) {
  const EvenCut cut(layers, chunks);
  std::vector<std::int64_t> out;
  for (std::int64_t i = 0; i < chunks; ++i) out.push_back(cut.begin(i + 1) - cut.begin(i));
  return out;
}

/// Where what the stages hold can change, ascending: behind the first and before the last stage (the ends), at the
/// longer chunks and behind them, at the chunk where dense layers become MoE ones and behind it. A chunk is of stage
/// i mod pp, so its stage changes there, too.
std::array<std::int64_t, 7> TrainModel::stage_breaks(const TrainPoint& p) const {
  const EvenCut cut(model_.layers, p.pp * p.vpp);
  std::array<std::int64_t, 7> out{0, 1, p.pp - 1, 0, 0, 0, 0};
  if (cut.extra > 0) out[3] = cut.first_long % p.pp, out[4] = (cut.first_long + cut.extra) % p.pp;
  if (moe_layers_ > 0 && dense_layers_ > 0) {
    const std::int64_t mixed = cut.chunk_of(dense_layers_);
    out[5] = mixed % p.pp, out[6] = (mixed + 1) % p.pp;
  }
  std::sort(out.begin(), out.end());
  return out;
}

/// The dense layers come first in model order. As the setting splits them, else as even as possible.
TrainModel::StageLayers TrainModel::stage_layers(const TrainPoint& p, std::int64_t stage) const {
  std::int64_t own = 0, dense = 0;
  const auto add = [&](std::int64_t begin, std::int64_t layers) {
    own += layers;
    dense += std::clamp<std::int64_t>(dense_layers_ - begin, 0, layers);
  };
  if (split_given(p)) {
    std::int64_t begin = 0;
    for (std::int64_t i = 0; i < p.pp * p.vpp; ++i) {
      const std::int64_t layers = setting_.pipeline_split[static_cast<std::size_t>(i)];
      if (i % p.pp == stage) add(begin, layers);
      begin += layers;
    }
  } else {
    const EvenCut cut(model_.layers, p.pp * p.vpp);
    for (std::int64_t i = stage; i < p.pp * p.vpp; i += p.pp) add(cut.begin(i), cut.begin(i + 1) - cut.begin(i));
  }
  return {dense, own - dense};
}

double TrainModel::end_parameters(const TrainPoint& p, const Layers& l, std::int64_t stage) const {
  const double tied = p.pp == 1 && model_.tie_embeddings ? vocab_rows(p) * static_cast<double>(model_.hidden) : 0.0;
  return (stage == 0 ? l.embedding.parameters : 0.0) + (stage == p.pp - 1 ? l.head.parameters - tied : 0.0);
}

TrainModel::Layers TrainModel::without_adapters(Layers l) {
  for (LayerCost* of : {&l.dense, &l.moe}) {
    of->forward -= of->adapters_forward, of->kernels_forward -= of->adapter_kernels;
    of->adapter_parameters = of->expert_adapter_parameters = of->adapters_forward = of->adapter_kernels = 0.0;
  }
  return l;
}

TrainModel::StageShare TrainModel::stage_share(const TrainPoint& p, const Layers& l, std::int64_t stage) const {
  const StageLayers n = stage_layers(p, stage);
  const auto dense = static_cast<double>(n.dense), moe = static_cast<double>(n.moe);
  const double ends = end_parameters(p, l, stage);
  StageShare out{.dense = dense,
                 .moe = moe,
                 .ordinary = dense * l.dense.parameters + moe * (l.moe.parameters - l.moe.expert_parameters) +
                             end_parameters(p, l, stage),
                 .expert = moe * l.moe.expert_parameters,
                 .ends = ends,
                 .adapters = dense * l.dense.adapter_parameters + moe * l.moe.adapter_parameters,
                 .expert_adapters = moe * l.moe.expert_adapter_parameters,
                 .frozen = frozen()};
  if (!follows_shapes(p.optimizer)) return out;
  out.optimizer.add(l.dense.optimizer, dense).add(l.moe.optimizer, moe);
  const bool tied = p.pp == 1 && model_.tie_embeddings;
  if (stage == 0) out.optimizer.add(l.embedding.optimizer, 1.0);
  if (stage == p.pp - 1 && !tied) out.optimizer.add(l.head.optimizer, 1.0);
  return out;
}

TrainPrice TrainModel::price(const TrainPoint& p, const Layers& l) const {
  TrainPrice out;
  if (!divides(p)) {
    out.valid = false;
    return out;
  }
  // In double: a batch of absurd size must not overflow.
  out.tokens = static_cast<double>(p.dp) * static_cast<double>(p.micro_batch) * p.full_micro_batches() *
               static_cast<double>(setting_.sequence);
  out.model_flops = model_flops(out.tokens);
  price_time(p, l, out);
  price_traffic(p, l, out);
  out.first_stage_bytes = stage_bytes(p, l, 0, nullptr);
  out.last_stage_bytes = stage_bytes(p, l, p.pp - 1, nullptr);
  out.peak_bytes = stage_bytes(p, l, fullest_stage(p, l), &out);
  double communicators = 0.0;
  for (std::int64_t size : {p.data_ranks(), p.tp, p.pp, p.ep, p.cp * p.ulysses})
    communicators += size > 1 ? framework_.communicator_bytes.value : 0.0;
  out.overhead_bytes = framework_.context_bytes.value + communicators;
  out.bytes[static_cast<std::size_t>(Category::overhead)] = out.overhead_bytes;
  return out;
}

namespace {

/// Shares of a layer's payload that its forward pass moves: under SP a gather and a scatter of five (backward gathers
/// the kept shard once more), of the ring's K and V one of three, else half.
double forward_tensor(const TrainPoint& p) { return p.sp ? 0.4 : 0.5; }
double forward_context(const TrainPoint& p) { return p.cp > 1 ? 1.0 / 3.0 : 0.5; }

}  // namespace

void TrainModel::stage_traffic(const TrainPoint& p, const Layers& l, std::int64_t stage, TrainPrice& out) const {
  const double m = p.full_micro_batches();
  const StageShare held = stage_share(p, l, stage);
  const double dense = held.dense, moe = held.moe;
  const bool again = p.recompute == Recompute::full;  // forward's share once more
  out.tensor_payload =
      m * ((l.dense.tensor_payload * dense + l.moe.tensor_payload * moe) * (again ? 1.0 + forward_tensor(p) : 1.0) +
           (stage == 0 ? l.embedding.tensor_payload : 0.0) + (stage == p.pp - 1 ? l.head.tensor_payload : 0.0));
  const bool routes_again = p.recompute == Recompute::selective && framework_.recomputes(RecomputeModule::moe);
  out.expert_payload = m * l.moe.expert_payload * moe * (again || routes_again ? 1.5 : 1.0);
  const bool exchanges_again =
      again || (p.recompute == Recompute::selective && (dense > 0 ? l.dense : l.moe).context_again);
  out.context_payload = m * (l.dense.context_payload * dense + l.moe.context_payload * moe) *
                        (exchanges_again ? 1.0 + forward_context(p) : 1.0);
  data_traffic(p, held, out);
}

void TrainModel::data_traffic(const TrainPoint& p, const StageShare& held, TrainPrice& out) const {
  const StateBytes& b = setting_.state;
  const bool streams = p.gathers_units();
  const double every = static_cast<double>(p.micro_batches);
  if (const double on_host = host_fraction(p); on_host > 0.0) {
    const double own = on_host * held.own_trained(p);
    out.host_down_bytes = (streams ? every : 1.0) * own * b.grads;
    // What is stepped there comes up; where shards stream, frozen ones too; sums of gradients, to be added to.
    if (p.streams_from_host()) out.host_up_bytes = p.gathers_of_step() * shard_bytes(p, own, held.own_frozen(p));
    else out.host_up_bytes = own * b.params + (sums_on_host(p) ? (every - 1.0) * own * b.grads : 0.0);
  }
  if (p.data_ranks() <= 1) return;
  const double reductions = streams || p.sharding == Sharding::zero2 ? every : 1.0;
  const double gathers = p.sharding == Sharding::replicated ? 0.0 : streams ? p.gathers_of_step() : 1.0;
  // Experts are divided among their own replicas; where there are none in a shard group, not at all.
  const std::int64_t own = p.expert_shard_ranks();
  const double expert = own > 1 ? held.expert : 0.0, expert_adapters = own > 1 ? held.expert_adapters : 0.0;
  const double trained_expert = held.frozen ? expert_adapters : expert;
  const double trained = held.frozen ? held.adapters - expert_adapters : held.ordinary;
  out.expert_data_reduce_payload = trained_expert * b.grads * reductions;
  // Frozen parameters are gathered where units are; nothing changes them, so that nobody gathers them otherwise.
  out.expert_data_gather_payload = (streams ? expert + expert_adapters : trained_expert) * b.params * gathers;
  out.data_reduce_payload = trained * b.grads * reductions + out.expert_data_reduce_payload;
  out.data_gather_payload = (streams ? held.ordinary + held.adapters - expert_adapters : trained) * b.params * gathers +
                            out.expert_data_gather_payload;
  if (streams && p.reshard_ranks > 0)
    out.kept_gather_payload = p.kept_gathers() * (held.ordinary - held.ends + held.expert + held.adapters) * b.params;
  if (p.replicas() > 1) {
    out.replica_payload = trained / static_cast<double>(p.shard_ranks()) * b.grads * reductions;
    out.expert_replica_payload = p.expert_ranks() > own ? (held.frozen ? held.expert_adapters : held.expert) /
                                                              static_cast<double>(own) * b.grads * reductions
                                                        : 0.0;
  }
  out.optimizer_payload = 2.0 * orthogonalizer_bytes * own_matrices(p, held.optimizer);
}

/// Of one full micro-batch through one stage.
ForwardTraffic TrainModel::pass_traffic(const TrainPoint& p, const Layers& l, std::int64_t stage) const {
  const StageShare held = stage_share(p, l, stage);
  // The embedding's collective is forward's alone; of the head's, backward has the input gradient's [T, h].
  const double head = p.tp > 1 && stage == p.pp - 1 ? l.head.tensor_payload - l.embedding.tensor_payload : 0.0;
  return {.tensor = forward_tensor(p) * (l.dense.tensor_payload * held.dense + l.moe.tensor_payload * held.moe) +
                    (stage == 0 ? l.embedding.tensor_payload : 0.0) + head,
          .expert = 0.5 * l.moe.expert_payload * held.moe,
          .context = forward_context(p) * (l.dense.context_payload * held.dense + l.moe.context_payload * held.moe)};
}

ForwardTraffic TrainModel::forward_traffic(const TrainPoint& p, const Layers& l) const {
  ForwardTraffic out;
  const double m = p.full_micro_batches();
  visit_stages(p, [&](std::int64_t stage, std::int64_t) {
    const ForwardTraffic one = pass_traffic(p, l, stage);
    const ForwardTraffic t{.tensor = m * one.tensor, .expert = m * one.expert, .context = m * one.context};
    if (t.tensor + t.expert + t.context > out.tensor + out.expert + out.context) out = t;
  });
  if (p.pp == 1) return out;
  const Hop one = hop(p, l);
  out.pipeline = m * one.payload, out.arriving = m * one.gather_payload;
  return out;
}

/// Of a stage with most neighbours: between two stages and without chunks each sends in one direction.
double TrainModel::pipeline_payload(const TrainPoint& p, const Layers& l) const {
  const double passes = p.full_micro_batches() * static_cast<double>(p.vpp), sent = hop(p, l).payload;
  return (p.pp == 2 && p.vpp == 1 ? 1.0 : 2.0) * passes * sent;
}

/// Of the rank with most traffic.
void TrainModel::price_traffic(const TrainPoint& p, const Layers& l, TrainPrice& out) const {
  const auto sum = [](const TrainPrice& t) {
    return t.tensor_payload + t.expert_payload + t.context_payload + t.data_reduce_payload + t.data_gather_payload +
           t.replica_payload + t.expert_replica_payload + t.optimizer_payload;
  };
  std::int64_t most = 0;
  double bytes = -1.0;
  visit_stages(p, [&](std::int64_t stage, std::int64_t) {
    stage_traffic(p, l, stage, out);
    if (const double own = sum(out); own > bytes) bytes = own, most = stage;
  });
  stage_traffic(p, l, most, out);
  if (p.pp == 1) return;
  out.pipeline_payload = pipeline_payload(p, l);
  const Hop one = hop(p, l);
  if (one.payload > 0.0) out.arriving_payload = out.pipeline_payload / one.payload * one.gather_payload;
}

}  // namespace hotbunk
