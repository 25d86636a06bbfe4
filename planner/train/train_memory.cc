// Device bytes of one pipeline stage at its fullest moment, by category.
#include <fmt/format.h>

#include <algorithm>

#include "planner/train/optimizer_cost.h"
#include "planner/train/train_model.h"
#include "spec/names.h"

namespace hotbunk {
namespace {

struct States {
  double params = 0, grads = 0, master = 0, moments = 0, gathered = 0;
  double optimizer() const { return master + moments; }
};

/// A unit of elements that is gathered, and those of them that have gradients; where adapters alone are trained they
/// lie beside the frozen ones.
struct Unit {
  double parameters = 0, trained = 0;
};

/// Parameters, gradients and optimizer of a stage; experts are replicated over fewer ranks. `frozen`: bytes of an
/// element of a frozen shard. `copies`: of a gathered unit's parameters and gradient (unit_copies). `on_host`: of the
/// optimizer (host_fraction).
States states_of(const TrainPoint& p, const StateBytes& b, const TrainModel::StageShare& held, double frozen,
                 const Unit& unit, double copies, double moments, double on_host) {
  const double all = held.all() + held.adapters, own = held.own_trained(p), still = held.own_frozen(p);
  const bool shards_grads = p.sharding != Sharding::replicated && p.sharding != Sharding::zero1;
  States s{.params = all * b.params,
           .grads = shards_grads ? own * b.shard_grads(p.sharding) : held.trained() * b.grads};
  s.master = (1.0 - on_host) * own * b.master, s.moments = (1.0 - on_host) * moments;
  if (p.sharding == Sharding::zero2) s.gathered = unit.trained * b.grads;
  if (p.sharding == Sharding::zero3) {
    s.params = own * b.params + still * frozen;
    s.gathered = unit.parameters * 2.0 * b.params + unit.trained * b.grads;
  }
  if (p.sharding == Sharding::fsdp) {
    // One persistent shard in the master dtype, or a low-precision one beside it, frozen ones as they are kept; units
    // gathered at once, and the gradient of one.
    s.params = (b.separate_master ? own * b.params : 0.0) + still * frozen;
    // What is stepped on the host has its gradients there (TrainModel::sums_on_host).
    if (b.separate_master) s.grads *= 1.0 - on_host;
    s.gathered = (unit.parameters * (copies - 1.0) + unit.trained) * b.params;
    if (!p.reshard_after_forward) s.gathered = all * b.params + unit.trained * b.params;
    else if (p.reshard_ranks > 0) s.gathered += all * b.params / static_cast<double>(p.reshard_ranks);
  }
  if (p.streams_from_host()) s.params = s.grads = s.master = 0.0;
  return s;
}

/// Copies of one unit under FSDP: the one at work and its gradient, the next one where it is prefetched, and under
/// FSDP1 the one before: it belongs to the stream of the collectives and is recorded on that of the compute, so the
/// allocator gives it back only once that has passed it; the rate limiter lets the host run two gathers ahead
/// (torch/distributed/fsdp/_runtime_utils.py, limit_all_gathers).
double unit_copies(const TrainSetting& s) { return 2.0 + (s.prefetch ? 1.0 : 0.0) + (s.flat_parameters ? 1.0 : 0.0); }

/// Parameters and gradients of whole units under PyTorch's FSDP2 (torch/distributed/fsdp/_fully_shard: FSDPParamGroup,
/// foreach_all_gather, foreach_reduce), at the loss and in the backward of the layers.
struct FlatUnits {
  double at_loss = 0, in_layers = 0;
};

/// Elements: `unit` of a layer, `ends` of the root (embedding, head), `head` of it with a gradient, `all`; `kept`:
/// bytes that one layer keeps.
FlatUnits flat_units(const TrainPoint& p, const TrainSetting& s, const Unit& unit, double ends, double head, double all,
                     double kept) {
  const StateBytes& b = s.state;
  // The root stays whole from its forward to the end of backward. At the loss there are its head's gradient, which
  // waits for the embedding's, and the flat output of the last layer's gather, prefetched but not yet copied to its
  // tensors.
  const double root = (ends + head) * b.params, flat = unit.parameters * b.params;
  // In a layer's backward: its parameters, the flat output of the next gather, its gradients, and the input of the
  // reduction before (in the dtype of the reduction), freed when this layer's starts. The last layer's backward has no
  // reduction before, the one before it no longer what the last one kept.
  const double reduced = std::max(0.0, unit.trained * b.grads - kept);
  // Its part of what few ranks keep among them from forward to backward.
  const double parts = p.reshard_ranks > 0 ? (all - ends) * b.params / static_cast<double>(p.reshard_ranks) : 0.0;
  if (!p.reshard_after_forward)
    return {all * b.params + head * b.params, all * b.params + head * b.params + flat + reduced};
  // FSDP1 gathers into the flat parameter itself: where FSDP2 has the next one's flat output it has the next unit.
  return {root + parts + (s.prefetch ? flat : 0.0),
          root + parts + (unit_copies(s) - 1.0) * flat + unit.trained * b.params + reduced};
}

constexpr Category category_of(PeakTensor t) {
  switch (t) {
    case PeakTensor::params:
    case PeakTensor::gathered:
      return Category::params;
    case PeakTensor::grads:
      return Category::grads;
    case PeakTensor::master:
    case PeakTensor::moments:
      return Category::optimizer;
    case PeakTensor::workspace:
    case PeakTensor::weight_grads:
      return Category::workspace;
    case PeakTensor::pipeline:
    case PeakTensor::sequence:
      return Category::communication;
    default:
      return Category::activations;
  }
}

/// ZeRO-2 gathers nothing: what it holds of a whole unit are gradients.
constexpr Category category_of(PeakTensor t, Sharding sharding) {
  return t == PeakTensor::gathered && sharding == Sharding::zero2 ? Category::grads : category_of(t);
}

}  // namespace

std::string_view name_of(PeakTensor t) {
  constexpr std::string_view names[] = {
      "parameters",      "gathered units",          "gradients",         "master copy",      "moments",
      "kept by layers",  "kept by the ends",        "logits and copies", "rebuilt",          "backward's own",
      "library buffers", "weight-gradient buffers", "P2P buffers",       "gathered sequence"};
  return names[static_cast<std::size_t>(t)];
}

TrainModel::StagedShards TrainModel::staged_shards(const TrainPoint& p, const StageShare& held) const {
  if (!p.streams_from_host()) return {};
  const double own = held.own_trained(p);
  return {shard_bytes(p, own, held.own_frozen(p)), own * setting_.state.grads};
}

/// Two units' on their way up, one's reduced gradients on their way down. `unit`: its share of the stage's parameters.
double TrainModel::staged_bytes(const TrainPoint& p, const StageShare& held, double unit) const {
  const StagedShards all = staged_shards(p, held);
  return unit * ((setting_.prefetch ? 2.0 : 1.0) * all.up + all.down);
}

/// What backward needs of a layer's forward.
double TrainModel::kept_bytes(const TrainPoint& p, const LayerCost& c) const {
  return p.recompute == Recompute::none        ? c.kept_bytes
         : p.recompute == Recompute::selective ? c.kept_selective_bytes
                                               : c.kept_full_bytes;
}

double TrainModel::stage_bytes(const TrainPoint& p, const Layers& l, std::int64_t stage, TrainPrice* out,
                               PeakBytes* parts) const {
  PeakBytes bytes{};
  const auto at = [&](PeakTensor t) -> double& { return bytes[static_cast<std::size_t>(t)]; };
  const bool first = stage == 0, last = stage == p.pp - 1;
  const StageShare held = stage_share(p, l, stage);
  const double dense = held.dense, moe = held.moe, ends = end_parameters(p, l, stage);
  // The unit gathered around the peak, with its neighbour and its gradient (states_of): a layer, or at the loss the
  // root (embedding and head), which has no neighbour, hence two of the copies.
  const LayerCost& largest = moe > 0 && (dense == 0 || l.moe.parameters > l.dense.parameters) ? l.moe : l.dense;
  const Unit layer{largest.parameters + largest.adapter_parameters,
                   frozen() ? largest.adapter_parameters : largest.parameters};
  const double copies = p.sharding == Sharding::fsdp ? unit_copies(setting_) : 3.0;
  const double root = 2.0 / copies * (last ? ends : 0.0);
  const Unit unit = root > layer.parameters ? Unit{root, frozen() ? 0.0 : root} : layer;
  const double moments = moment_bytes(p, held);
  const States s = states_of(p, setting_.state, held, frozen_bytes(p), unit, copies, moments, host_fraction(p));
  at(PeakTensor::params) = s.params;
  at(PeakTensor::grads) = s.grads;
  at(PeakTensor::master) = s.master;
  at(PeakTensor::moments) = s.moments;

  const auto kept = [&](const LayerCost& c) { return kept_bytes(p, c); };
  const double flight = in_flight(p, stage);
  at(PeakTensor::kept) = flight * (dense * kept(l.dense) + moe * kept(l.moe));
  at(PeakTensor::ends_kept) = (first ? flight * l.embedding.kept_bytes : 0.0) + (last ? l.head.kept_bytes : 0.0);
  // Full recomputation rebuilds one layer at a time, selective only what the profile's modules drop. Of the kinds of
  // layers that the stage has, the one that needs most.
  const auto again = [&](const LayerCost& c) { return c.kept_bytes - kept(c); };
  const auto extra = [&](const LayerCost& c) { return again(c) + c.transient_bytes; };
  const LayerCost& widest = dense == 0 || (moe > 0 && extra(l.moe) > extra(l.dense)) ? l.moe : l.dense;
  // At the loss nothing is rebuilt yet; in the layers' backward the logits are gone.
  const double loss = last ? l.head.transient_bytes : 0.0;
  FlatUnits units{s.gathered, s.gathered};
  if (p.sharding == Sharding::fsdp && framework_.flat_units)
    units = flat_units(p, setting_, layer, ends, last && !frozen() ? l.head.parameters : 0.0,
                       held.all() + held.adapters, kept(widest));
  const double staged = staged_bytes(p, held, unit.parameters / std::max(held.all() + held.adapters, 1.0));
  units.at_loss += staged, units.in_layers += staged;
  if (loss + units.at_loss >= extra(widest) + units.in_layers) {
    at(PeakTensor::gathered) = units.at_loss;
    at(PeakTensor::logits) = loss;
  } else {
    at(PeakTensor::gathered) = units.in_layers;
    at(PeakTensor::rebuilt) = again(widest), at(PeakTensor::transient) = widest.transient_bytes;
  }

  // Bytes are linear in the layers done, so an end is the highest.
  if (grows_gradients(p)) {
    // The second layer is the last beside whose backward a unit is gathered.
    const double left = std::min(1.0, 2.0 / std::max(1.0, held.layers()));
    const double first_layers = left * at(PeakTensor::kept), grown = (1.0 - left) * at(PeakTensor::grads);
    const double in_layers = units.in_layers + extra(widest);
    const double start = at(PeakTensor::kept) + std::max(loss + units.at_loss, in_layers);
    const double end = grown + first_layers + in_layers;
    if (start >= end) {
      at(PeakTensor::grads) = 0.0;
    } else {
      at(PeakTensor::kept) = first_layers, at(PeakTensor::grads) = grown;
      at(PeakTensor::gathered) = units.in_layers, at(PeakTensor::logits) = 0.0;
      at(PeakTensor::rebuilt) = again(widest), at(PeakTensor::transient) = widest.transient_bytes;
    }
  }

  at(PeakTensor::workspace) = framework_.workspace_bytes.value;
  if (framework_.dummy_weight_grads) {
    const double shapes = moe > 0 && dense > 0
                              ? l.dense.largest_weights + l.moe.largest_weights - l.moe.attention_weights
                          : moe > 0 ? l.moe.largest_weights
                                    : l.dense.largest_weights;
    if (!frozen()) at(PeakTensor::weight_grads) = setting_.state.params * shapes;
  }
  at(PeakTensor::pipeline) = p.pp > 1 ? 2.0 * l.dense.kept_full_bytes : 0.0;
  at(PeakTensor::sequence) = sequence_bytes(p);
  double total = 0.0;
  for (double b : bytes) total += b;
  if (parts) *parts = bytes;
  if (out) {
    out->bytes = {};
    for (std::size_t i = 0; i < num_peak_tensors; ++i)
      out->bytes[static_cast<std::size_t>(category_of(static_cast<PeakTensor>(i), p.sharding))] += bytes[i];
    out->state_bytes = s.params + s.grads + s.optimizer();
    out->grad_bytes = s.grads;
    const double own = held.own_trained(p);
    out->source_bytes = p.gathers_units() ? shard_bytes(p, own, held.own_frozen(p)) : s.params;
    out->activation_bytes = out->bytes[static_cast<std::size_t>(Category::activations)];
    out->host_bytes = host_fraction(p) * (own * (setting_.state.master + host_grads(p)) + moments) +
                      (p.streams_from_host() ? held.own_frozen(p) * frozen_bytes(p) : 0.0);
  }
  return total;
}

ScoringBytes TrainModel::scoring_bytes(const TrainPoint& p, const Layers& l, std::int64_t stage) const {
  const StageShare held = stage_share(p, l, stage);
  const auto unit_of = [](const LayerCost& c, double count) {
    return count > 0 ? c.parameters + c.adapter_parameters : 0.0;
  };
  const double unit = std::max(unit_of(l.dense, held.dense), unit_of(l.moe, held.moe));
  const double ends = end_parameters(p, l, stage), all = held.all() + held.adapters;
  ScoringBytes out;
  if (p.gathers_units()) {
    // The root stays whole; of a layer's unit all copies but the gradient.
    const double copies = (p.sharding == Sharding::fsdp ? unit_copies(setting_) : 3.0) - 1.0;
    out.gathered = (p.reshard_after_forward ? ends + copies * unit : all) * setting_.state.params +
                   staged_bytes(p, held, unit / std::max(all, 1.0));
  }
  // A layer's input, and the tensors whose gradients make its backward's fullest moment (LayerCost::transient_bytes).
  for (const auto& [layer, count] : {std::pair(&l.dense, held.dense), std::pair(&l.moe, held.moe)})
    if (count > 0) out.activations = std::max(out.activations, layer->kept_full_bytes + layer->transient_bytes);
  if (stage == p.pp - 1) out.activations = std::max(out.activations, l.head.kept_full_bytes + scored_logits_bytes(l));
  out.communication = (p.pp > 1 ? 2.0 * l.dense.kept_full_bytes : 0.0) + sequence_bytes(p);
  return out;
}

/// Logits as at the loss, but for their gradient in the activations' dtype.
double TrainModel::scored_logits_bytes(const Layers& l) const {
  const double without_gradient = 1.0 - std::min(1.0, setting_.element_bytes / framework_.loss_bytes.value);
  return without_gradient * l.head.transient_bytes;
}

ScoringBytes TrainModel::scoring_bytes(const TrainPoint& p, const Layers& l) const {
  ScoringBytes out;
  visit_stages(p, [&](std::int64_t stage, std::int64_t) {
    if (const ScoringBytes one = scoring_bytes(p, l, stage); one.total() > out.total()) out = one;
  });
  return out;
}

/// Megatron's sequence parallelism gathers a layer's input.
double TrainModel::sequence_bytes(const TrainPoint& p) const {
  if (!p.sp) return 0.0;
  return setting_.element_bytes * fullest_tokens(p) / static_cast<double>(p.cp * p.ulysses) *
         static_cast<double>(model_.hidden);
}

/// Micro-batches (or, interleaved, chunks of 1/vpp of the stage's layers) whose activations a stage holds at once.
/// 1F1B: min(m, pp - stage). Interleaved 1F1B: warm-up of 2 (pp - stage - 1) + (vpp - 1) pp chunks and the current one.
/// GPipe keeps all of them; zero-bubble (ZB-H1) as many as 1F1B.
double TrainModel::in_flight(const TrainPoint& p, std::int64_t stage) const {
  if (p.pp == 1) return 1.0;
  if (p.schedule == PipelineSchedule::gpipe) return static_cast<double>(p.micro_batches);
  if (p.vpp == 1) return static_cast<double>(std::min(p.micro_batches, p.pp - stage));
  const std::int64_t chunks = std::min(p.micro_batches * p.vpp, 2 * (p.pp - stage - 1) + (p.vpp - 1) * p.pp + 1);
  return static_cast<double>(chunks) / static_cast<double>(p.vpp);
}

PeakBytes TrainModel::peak_bytes(const TrainPoint& p, const Layers& l, std::int64_t stage) const {
  PeakBytes bytes{};
  stage_bytes(p, l, stage, nullptr, &bytes);
  return bytes;
}

std::int64_t TrainModel::fullest_stage(const TrainPoint& p, const Layers& l) const {
  std::int64_t fullest = 0;
  double most = 0.0;
  visit_stages(p, [&](std::int64_t stage, std::int64_t) {
    if (const double bytes = stage_bytes(p, l, stage, nullptr); bytes > most) most = bytes, fullest = stage;
  });
  return fullest;
}

double TrainModel::peak_of_both(const TrainPoint& p, const Layers& l, const Layers& second) const {
  double most = 0.0;
  visit_stages(p, [&](std::int64_t stage, std::int64_t) {
    TrainPrice one, other;
    const double peak = stage_bytes(p, l, stage, &one), other_peak = stage_bytes(p, second, stage, &other);
    most = std::max({most, peak + other.state_bytes - other.grad_bytes, other_peak + one.state_bytes - one.grad_bytes});
  });
  return most;
}

std::vector<PeakPart> TrainModel::peak_parts(const TrainPoint& p, const Layers& l) const {
  if (!divides(p)) return {};
  const std::int64_t stage = fullest_stage(p, l);
  const PeakBytes bytes = peak_bytes(p, l, stage);
  const std::int64_t dense = layers_of(p, stage, false), moe = layers_of(p, stage, true);
  const double held = fullest_tokens(p) / static_cast<double>(p.cp * p.ulysses);
  const double vocab = vocab_rows(p);
  const std::string layers = moe == 0     ? fmt::format("{} layers", dense)
                             : dense == 0 ? fmt::format("{} MoE layers", moe)
                                          : fmt::format("{} dense and {} MoE layers", dense, moe);
  std::string over = fmt::format("over {} data ranks", p.shard_ranks());
  if (moe > 0) over += fmt::format(", experts over {:.0f}", static_cast<double>(p.expert_shard_ranks()));
  if (p.sharding == Sharding::replicated) over = "not sharded";
  const char* const trained = frozen() ? " of the adapters" : "";
  const auto why = [&](PeakTensor t) -> std::string {
    switch (t) {
      case PeakTensor::params:
        return frozen() ? fmt::format("{}, frozen: {} B each{}", layers, frozen_bytes(p),
                                      p.gathers_units() ? ", " + over : std::string())
                        : fmt::format("{} x {} B each{}", layers, setting_.state.params,
                                      p.gathers_units() ? ", " + over : std::string());
      case PeakTensor::gathered:
        return p.sharding == Sharding::zero2 ? "one unit's gradients before they are reduced"
               : p.streams_from_host() ? "units around the peak, and their shards on the way from the host and back"
               : framework_.flat_units ? "root and its gradient, the unit at work, the next one's flat copy, "
                                         "gradients, flat input of their reduction"
                                       : "the unit at work, its neighbour and its gradient";
      case PeakTensor::grads:
        return fmt::format("{} B each{}", setting_.state.shard_grads(p.sharding), trained);
      case PeakTensor::master:
        return fmt::format("{} B each{}, {}", setting_.state.master, trained, over);
      case PeakTensor::moments:
        return follows_shapes(p.optimizer)
                   ? fmt::format("{}, {}", name_of(p.optimizer), over)
                   : fmt::format("{} B each, {}",
                                 moment_bytes_each(p.optimizer, setting_.state.moments, setting_.momentum), over);
      case PeakTensor::kept:
        return fmt::format("{}, {:.4g} micro-batch{} in flight of {:.0f} tokens", layers, in_flight(p, stage),
                           in_flight(p, stage) > 1 ? "es" : "", held);
      case PeakTensor::logits:
        return fmt::format("{:.0f} tokens x {:.0f} vocabulary x {:.4g} B{}{}", loss_tokens(held), vocab,
                           framework_.loss_bytes.value,
                           loss_tokens(held) < held ? ", and the gradient of all tokens' stream" : "",
                           framework_.dummy_weight_grads ? ", and buffers of the head" : "");
      case PeakTensor::rebuilt:
        return "one layer, forward once more";
      case PeakTensor::transient:
        return "gradients inside the layer at work";
      default:
        return "";
    }
  };
  std::vector<PeakPart> out;
  for (std::size_t i = 0; i < num_peak_tensors; ++i)
    if (const auto t = static_cast<PeakTensor>(i); bytes[i] > 0)
      out.push_back({t, category_of(t, p.sharding), bytes[i], why(t)});
  std::stable_sort(out.begin(), out.end(), [](const PeakPart& a, const PeakPart& b) { return a.bytes > b.bytes; });
  return out;
}

}  // namespace hotbunk
