// What a weight update has to move from a training layout to a rollout's.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "planner/rl/reshard_volume.h"
#include "planner/rl/rl_model.h"
#include "planner/train/layer_kinds.h"

namespace hotbunk {

SyncSource::SyncSource(const TrainPoint& p, bool counted)
    : ranks(p.ranks()),
      holders(ranks / p.replicas()),
      // ZeRO-1 and 2 divide moments and gradients; what a sync reads is whole in every tensor- and pipeline-parallel
      // place.
      parts(std::max<std::int64_t>((p.gathers_units() ? p.shard_ranks() : 1) * p.tp * p.pp, 1)),
      stages(p.pp > 1),
      shards_of_master(p.sharding == Sharding::fsdp),
      whole((!p.gathers_units() || p.shard_ranks() == 1) && p.tp == 1 && p.pp == 1 && p.ep == 1) {
  if (!counted) return;
  layout = {.dp = p.dp,
            .cp = p.cp,
            .ulysses = p.ulysses,
            .tp = p.tp,
            .pp = p.pp,
            .vpp = p.vpp,
            .ep = p.ep,
            .etp = p.etp,
            .fsdp = p.fsdp,
            .shard_over = p.shard_over,
            .sharding = p.sharding};
  if (p.tp == 1 && p.pp == 1 && p.ep == 1 && !p.shard_over.some()) {  // all ranks are data ranks, whatever they share
    layout->dp = p.data_ranks(), layout->cp = layout->ulysses = 1, layout->etp = 1;
    if (!p.gathers_units()) layout->sharding = Sharding::replicated, layout->fsdp = -1;
  }
}

namespace {
/// Above so many ranks a search would count longer than it prices: the estimate serves.
constexpr std::int64_t most_counted = 64;
}  // namespace

struct RlModel::ReshardCache {
  explicit ReshardCache(const ModelSpec& model) : counter(model) {}
  const ReshardCounter counter;
  std::mutex mutex;
  std::map<std::pair<TrainPoint, RolloutPoint>, std::optional<double>> known;
};

std::shared_ptr<RlModel::ReshardCache> RlModel::new_reshard_cache(const ModelSpec& model) {
  return std::make_shared<ReshardCache>(model);
}

std::optional<double> RlModel::counted_bytes(const SyncSource& from, const RolloutPoint& to,
                                             std::int64_t most_ranks) const {
  // Of linear attention's matrices layout/ has no cuts.
  if (train_.model().linear) return std::nullopt;
  if (!from.layout || from.ranks != to.ranks() || from.ranks > most_ranks || !divides(to)) return std::nullopt;
  RolloutPoint shape = to;
  shape.memory_fraction = 0;  // a pool of any size
  {
    const std::lock_guard lock(reshard_->mutex);
    if (const auto at = reshard_->known.find({*from.layout, shape}); at != reshard_->known.end()) return at->second;
  }
  const ModelSpec& model = train_.model();
  const auto have = trainer_layout(*from.layout, train_.setting(), model);
  const auto need = engine_layout(shape, setting_.engine, model.layers);
  std::optional<double> out;
  if (have && need) {
    const std::vector<std::int64_t> elements = reshard_->counter.received(*have, *need);
    out = static_cast<double>(*std::ranges::max_element(elements)) * setting_.rollout_element_bytes;
  }
  const std::lock_guard lock(reshard_->mutex);
  reshard_->known.emplace(std::pair(*from.layout, shape), out);
  return out;
}

double RlModel::reshard_bytes(const SyncSource& p, const RolloutPoint& r) const {
  if (const auto exact = counted_bytes(p, r, most_counted)) return *exact;
  // A rank needs 1 / tp of its stage's weights and holds 1 / shard of them; how much of that lies in its own slice
  // depends on the order: with contiguous engines the shards run across the slices, with strided ones along them.
  // Training stages lie elsewhere than the engines': some rank then holds nothing of the layers that it needs.
  const HeaviestStage stage = heaviest_stage(r);
  const double bytes = counts_.parameters * setting_.rollout_element_bytes;
  const double need = stage.elements * setting_.rollout_element_bytes;
  const double held = bytes / static_cast<double>(p.parts);
  const double overlap = r.strided && r.pp == 1 ? 1.0 : 1.0 / static_cast<double>(r.tp);
  const double here = r.pp == 1 ? 1.0 : p.stages ? 0.0 : stage.layers / static_cast<double>(train_.model().layers);
  return std::max(0.0, need - held * overlap * here);
}

namespace {

/// What the last of `shards` ranks has of units that are cut as a whole, each into equal parts but for the last.
double last_shard(const ReshardCounter& counter, std::int64_t shards) {
  double out = 0.0;
  for (const auto& [elements, count] : counter.layer_units()) {
    const std::int64_t part = (elements + shards - 1) / shards;
    out += static_cast<double>(count) * static_cast<double>(std::max<std::int64_t>(0, elements - (shards - 1) * part));
  }
  return out;
}

}  // namespace

/// Whole tensors on every rank, of which each has its own part: what the rank with least receives. nullopt: who holds
/// what is not counted.
std::optional<double> RlModel::gathered_bytes(const TrainPoint& p) const {
  const SyncSource from(p, true);
  if (train_.setting().flat_parameters && p.sharding == Sharding::fsdp && p.shard_ranks() > 1) {
    if (p.tp * p.pp * p.ep > 1) return std::nullopt;
    return (counts_.parameters - last_shard(reshard_->counter, p.shard_ranks())) * setting_.rollout_element_bytes;
  }
  RolloutPoint everything;
  everything.engines = from.ranks;
  return counted_bytes(from, everything, std::numeric_limits<std::int64_t>::max());
}

SyncPrice RlModel::sync_price(const RlPoint& p) const {
  SyncPrice out = price_sync(p.sync, sync_job(p), train_.cost());
  if (p.placement != PlacementMode::colocated || setting_.own_engine) return out;
  if (p.sync == SyncMechanism::shard_to_shard) {
    const auto exact = counted_bytes(SyncSource(p.train, true), p.rollout, std::numeric_limits<std::int64_t>::max());
    if (exact && p.train.ranks() > most_counted) out.bytes_received = *exact;
  } else if (const auto exact = gathered_bytes(p.train)) {
    out.bytes_received = *exact;
  }
  return out;
}

/// The stage with most weights, the first of equals.
RlModel::HeaviestStage RlModel::heaviest_stage(const RolloutPoint& r) const {
  HeaviestStage out;
  each_stage(train_.model(), setting_.engine, r.pp, [&](const RolloutStage& s, std::int64_t) {
    const double elements = stage_elements(counts_, setting_.engine, r, s);
    if (elements > out.elements)
      out = {elements, s.layers,
             s.dense() * counts_.dense_layer_tensors + s.moe * counts_.moe_layer_tensors + (s.first ? 1.0 : 0.0) +
                 (s.last ? 2.0 : 0.0)};
  });
  return out;
}

SyncJob RlModel::sync_job(const SyncSource& from, const RolloutPoint& to, PlacementMode placement,
                          double bucket_bytes) const {
  const bool colocated = placement == PlacementMode::colocated;
  const StateBytes& state = train_.setting().state;
  const HeaviestStage stage = heaviest_stage(to);
  const double slice = stage.elements * setting_.rollout_element_bytes;
  const double model = counts_.parameters * setting_.rollout_element_bytes;
  SyncJob job{.model_bytes = model,
              .tensors = counts_.tensors,
              .bucket_bytes = bucket_bytes,
              .sources = from.holders,
              .target_parts = to.pp > 1 ? model / slice : static_cast<double>(to.tp),
              .target_tensors = to.pp > 1 ? stage.tensors : counts_.tensors,
              .targets = colocated ? from.ranks : to.ranks(),
              .ports = train_.framework().broadcast_ports.value,
              .apart = colocated ? 0 : from.ranks,
              .received_bytes = colocated ? reshard_bytes(from, to) : -1.0,
              .one_process = colocated && setting_.own_engine,
              .takes_own = from.whole && from.ranks > 1 && !train_.frozen(),  // each merges the rows that it owns
              .gathers = setting_.sync_gathers,
              .verifies = setting_.sync_verifies,
              .source_element_bytes = !from.shards_of_master || state.separate_master     ? state.params
                                      : train_.frozen() && train_.framework().lowered_ops ? state.params
                                                                                          : state.master,
              .target_element_bytes = setting_.rollout_element_bytes,
              .slice_bytes = slice,
              .cleanup_seconds = colocated ? train_.framework().update_cleanup_seconds.value : 0.0};
  // Where every rank has all of a frozen model, of merged rows each makes its own part and reads those of the others.
  if (from.whole && train_.frozen() && colocated)
    job.received_bytes = model * (1.0 - 1.0 / static_cast<double>(std::max<std::int64_t>(from.ranks, 1)));
  job.adapter_bytes = counts_.adapters * state.params, job.merged_matrices = counts_.adapted_matrices;
  job.merged_elements = counts_.adapted_elements, job.adapter_rank = static_cast<double>(train_.model().lora.rank);
  if (setting_.weights.narrow) quantize(to, job);
  return job;
}

/// SGLang is handed quantised tensors and their scales, vLLM quantises what it is handed.
void RlModel::quantize(const RolloutPoint& r, SyncJob& job) const {
  const WeightFormat& weights = setting_.weights;
  const LayerKinds kinds = layer_kinds(train_.model());
  const auto dense = static_cast<double>(kinds.dense), moe = static_cast<double>(kinds.moe);
  job.quantizing_bytes = setting_.rollout_element_bytes + weights.stored_bytes;
  job.quantized_elements = dense * counts_.dense_layer_products + moe * counts_.moe_layer_products;
  each_stage(train_.model(), setting_.engine, r.pp, [&](const RolloutStage& s, std::int64_t) {
    job.quantized_slice = std::max(job.quantized_slice, stage_products(counts_, setting_.engine, r, s));
  });
  if (setting_.engine != RolloutEngine::sglang) return;
  const double narrower = setting_.rollout_element_bytes - weights.stored_bytes;
  job.handed_bytes = job.model_bytes - narrower * job.quantized_elements;
  job.scale_tensors = weights.scales * (dense * counts_.dense_product_tensors + moe * counts_.moe_product_tensors);
}

}  // namespace hotbunk
