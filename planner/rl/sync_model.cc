#include "planner/rl/sync_model.h"

#include <algorithm>
#include <cmath>

namespace hotbunk {

std::string_view name_of(SyncMechanism m) {
  constexpr std::string_view names[] = {"per tensor",     "stream", "handles per tensor", "bucketed", "broadcast",
                                        "point to point", "direct"};
  return names[static_cast<std::size_t>(m)];
}

const SyncConstants& sync_constants(SyncMechanism m) {
  // The slime figures (61 GB, 18,867 tensors; 120, 90, 30 and 7 s) differ by mechanism alone; each step of their
  // history removes one cost: gathers one by one (1.6 ms per tensor), a request per tensor (3.2 ms), a handle opened
  // and closed per tensor (1.2 ms). What remains is bytes and buckets. No second source confirms the 45 ms of a bucket;
  // later slime runs of GLM-4.5 bound it from above (docs/validation.md), and verl with vLLM takes longer.
  static const char* const slime = "fitted on slime's history of Qwen3-30B-A3B (weight_sync.csv)";
  static const char* const engine = "fitted on checkpoint-engine's broadcast rows (weight_sync.csv)";
  static const char* const nemo = "fitted on NeMo-RL's reshard rows (weight_sync.csv)";
  static const SyncConstants constants[] = {
      {{0.2, slime}, {6.0e-3, slime}, {0.0, slime}, {0.0, "cost model"}},
      {{0.2, slime}, {4.4e-3, slime}, {0.0, slime}, {0.0, "cost model"}},
      {{0.2, slime}, {1.2e-3, slime}, {45e-3, slime}, {0.0, "cost model"}},
      {{0.2, slime}, {50e-6, slime}, {45e-3, slime}, {0.0, "cost model"}},
      {{1.2, engine}, {0.0, engine}, {0.4e-3, engine}, {90e9, engine}},
      {{1.7, engine}, {0.0, engine}, {0.4e-3, engine}, {90e9, engine}},
      {{0.26, nemo}, {27e-6, nemo}, {0.0, nemo}, {0.0, "cost model"}},
  };
  return constants[static_cast<std::size_t>(m)];
}

namespace {

/// What lowering/sync.cc emits. Each bucket is packed, read (or gathered and unpacked) and done with before the next.
void price_own(SyncMechanism m, const SyncJob& job, const CostModel& cost, SyncPrice& out) {
  const double kernel = cost.hardware().kernel_overhead.value;
  const auto ranks = static_cast<double>(std::max<std::int64_t>(job.sources, 1));
  const GroupShape all = GroupShape::strided(job.sources, 1, cost.ranks_per_node());
  // Direct is priced only: every tensor in one read, nothing packed.
  const bool direct = m == SyncMechanism::shard_to_shard;
  const double buckets = direct ? job.taken_tensors() : std::ceil(job.model_bytes / std::max(job.bucket_bytes, 1.0));
  // Elements of a rank's parameters.
  const double own = job.model_bytes / job.target_element_bytes / (job.takes_own ? 1.0 : ranks);
  // One rank reads its own part.
  const bool gathers = job.gathers && job.sources > 1;
  if (job.takes_own) {  // nobody else's part is read
    const double slices = job.slice_bytes / job.target_element_bytes;
    out.packing =
        cost.memory_seconds(slices * (job.source_element_bytes + job.target_element_bytes)) + buckets * kernel;
    out.bytes_received = out.bytes_sent = out.peak_bytes = 0.0;
  } else {
    if (!direct)
      out.packing = cost.memory_seconds(own * (job.source_element_bytes + job.target_element_bytes)) + buckets * kernel;
    if (gathers && !direct) {
      out.moving = buckets * (cost.collective_seconds(OpKind::all_gather, all, job.model_bytes / buckets) + kernel);
      out.packing += cost.memory_seconds(2.0 * job.slice_bytes);
    } else {
      // Barriers order writers, readers and the next writers.
      out.moving = buckets * cost.collective_seconds(OpKind::peer_copy, all, job.received_bytes / buckets);
      out.buckets = buckets * 2.0 * cost.collective_seconds(OpKind::barrier, all, 0.0);
    }
  }
  if (job.verifies) {
    const double sums = 2.0 * job.tensors * 8.0;  // int64
    const auto everyone = static_cast<double>(std::max<std::int64_t>(job.targets, 1));
    out.hashing = cost.memory_seconds(own * job.source_element_bytes + job.slice_bytes) +
                  (2.0 * job.tensors + 1.0) * kernel +
                  cost.collective_seconds(OpKind::all_gather,
                                          GroupShape::strided(job.targets, 1, cost.ranks_per_node()), everyone * sums) +
                  cost.host_copy_seconds(everyone * sums, OpKind::fetch);
  }
}

/// Each pair of ranks exchanges the intersection of its shards. Where few trainers feed many engines, what one of them
/// sends takes longest.
void price_shards(const SyncJob& job, const GroupShape& all, const CostModel& cost, SyncPrice& out) {
  const double slices = std::max(job.target_parts, 1.0);
  out.bytes_received = job.received_bytes > 0 ? job.received_bytes : job.model_bytes / slices;
  out.bytes_sent =
      out.bytes_received * (job.apart > 0 ? static_cast<double>(job.targets) / static_cast<double>(job.apart) : 1.0);
  out.moving = cost.collective_seconds(OpKind::send, {2, all.nodes > 1 ? 2 : 1, 1},
                                       std::max(out.bytes_received, out.bytes_sent));
}

/// Whole tensors in buckets, in stages that run at the same time: trainers gather, or read host copies at the
/// mechanism's own rate; the bytes cross to every rank on other GPUs; engines copy their slices out. Where narrow
/// weights are made before they are handed over, gathers alone move wide ones.
void price_buckets(const SyncConstants& c, const SyncJob& job, const GroupShape& all, const CostModel& cost,
                   SyncPrice& out) {
  const bool from_host = c.bandwidth.value > 0.0;
  const double handed = job.handed();
  out.bytes_received = job.apart > 0 ? handed : job.model_bytes;
  out.peak_bytes = 2.0 * std::min(job.bucket_bytes, job.model_bytes);
  if (from_host) {
    out.moving = handed / c.bandwidth.value;
  } else if (job.sources > 1) {
    if (job.apart == 0) out.bytes_received *= static_cast<double>(job.sources - 1) / static_cast<double>(job.sources);
    const GroupShape sources = GroupShape::strided(job.sources, 1, cost.ranks_per_node());
    out.moving = cost.collective_seconds(OpKind::all_gather, sources, job.model_bytes);
  }
  if (from_host || job.apart > 0)
    out.moving = std::max(out.moving, cost.collective_seconds(OpKind::broadcast, all, handed));
  const double slices = std::max(job.target_parts, 1.0);
  out.moving = std::max(out.moving, cost.memory_seconds(2.0 * handed / slices));
  // Each further level of a broadcast's tree delays every bucket's hand-over; engines that share the trainers' GPUs are
  // asked by their own ranks, all at once.
  const double levels =
      from_host || job.apart > 0 ? 1.0 + std::log2(std::max(static_cast<double>(all.nodes), 1.0)) : 1.0;
  out.buckets = c.per_bucket.value * std::ceil(handed / std::max(job.bucket_bytes, 1.0)) * levels;
}

}  // namespace

GroupShape everyone(const SyncJob& job, std::int64_t ranks_per_node) {
  const std::int64_t ranks = job.apart > 0 ? job.apart + job.targets : std::max(job.sources, job.targets);
  return GroupShape::strided(ranks, 1, ranks_per_node);
}

SyncPrice price_sync(SyncMechanism m, const SyncJob& job, const CostModel& cost) {
  const SyncConstants& c = sync_constants(m);
  const GroupShape all = everyone(job, cost.ranks_per_node());
  const bool shards = m == SyncMechanism::shard_to_shard;
  SyncPrice out;
  if (shards) price_shards(job, all, cost, out);
  else price_buckets(c, job, all, cost, out);
  if (job.one_process && (shards || m == SyncMechanism::flattened_buckets)) {
    out.moving = out.buckets = 0.0;
    price_own(m, job, cost, out);
    return out;
  }
  out.start = c.start.value;
  // Gathering, every rank handles every tensor; shard to shard those that it needs.
  out.tensors = c.per_tensor.value * (shards ? job.taken_tensors() : job.tensors + job.scale_tensors);
  if (job.quantizing_bytes > 0.0)
    out.quantizing =
        cost.memory_seconds(job.quantizing_bytes * (shards ? job.quantized_slice : job.quantized_elements));
  return out;
}

SyncMechanism mechanism_of(const SyncSpec& s, PlacementMode placement) {
  switch (s.mode) {
    case SyncMode::direct:
      return SyncMechanism::shard_to_shard;
    case SyncMode::broadcast:
      return SyncMechanism::broadcast;
    case SyncMode::stream:
      return SyncMechanism::async_gather;
    case SyncMode::bucketed:
      return placement == PlacementMode::colocated ? SyncMechanism::flattened_buckets : SyncMechanism::broadcast;
  }
  return SyncMechanism::flattened_buckets;
}

}  // namespace hotbunk
