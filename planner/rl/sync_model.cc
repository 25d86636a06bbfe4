#include "planner/rl/sync_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <utility>

#include "base/check.h"
#include "base/file.h"
#include "spec/catalog.h"
#include "spec/yaml_tree.h"

namespace hotbunk {

std::string_view name_of(SyncMechanism m) {
  constexpr std::string_view names[] = {"per tensor",     "stream", "handles per tensor", "bucketed", "broadcast",
                                        "point to point", "direct"};
  return names[static_cast<std::size_t>(m)];
}

namespace {

constexpr const char* sync_names[num_sync_mechanisms] = {
    "per-tensor-ipc", "stream", "handles-per-tensor", "bucketed", "broadcast", "point-to-point", "direct"};
constexpr std::pair<const char*, Sourced SyncConstants::*> constant_keys[] = {
    {"start", &SyncConstants::start},
    {"per_tensor", &SyncConstants::per_tensor},
    {"per_bucket", &SyncConstants::per_bucket},
    {"bandwidth", &SyncConstants::bandwidth}};

/// A number >= 0 under the key; below 0: none.
double number_at(const YamlNode& of, const char* key) {
  const YamlNode* const value = of.find(key);
  char* end = nullptr;
  const double number = value ? std::strtod(value->text.c_str(), &end) : -1.0;
  return value == nullptr || end == value->text.c_str() || *end != 0 ? -1.0 : number;
}

Result<YamlNode> sync_file(const std::filesystem::path& path) {
  auto text = read_file(path, std::int64_t{1} << 20);
  if (!text) return fail(text.error());
  return parse_yaml(*text, path.string());
}

}  // namespace

Result<std::optional<SyncConstants>> sync_constants_elsewhere(SyncMechanism m, const std::filesystem::path& file) {
  const auto root = sync_file(file);
  if (!root) return fail(root.error());
  const YamlNode* const of = root->find(sync_names[static_cast<std::size_t>(m)]);
  const YamlNode* const there = of ? of->find("elsewhere") : nullptr;
  if (there == nullptr) return std::optional<SyncConstants>();
  const YamlNode* const source = there->find("source");
  SyncConstants out;
  for (const auto& [key, at] : constant_keys) {
    const double number = number_at(*there, key);
    if (!(number >= 0.0) || source == nullptr || source->text.empty())
      return fail(Diagnostic{.code = "E205",
                             .message = fmt::format("elsewhere.{}: expected numbers >= 0 and a source", key),
                             .where = there->where,
                             .notes = {},
                             .help = {}});
    out.*at = {number, source->text};
  }
  return std::optional(out);
}

Result<SyncTable> read_sync_table(const std::filesystem::path& path) {
  const auto root = sync_file(path);
  if (!root) return fail(root.error());
  SyncTable out;
  Diagnostics errors;
  const auto wrong = [&](const YamlNode& at, std::string message) {
    errors.push_back({.code = "E205", .message = std::move(message), .where = at.where, .notes = {}, .help = {}});
  };
  for (std::size_t i = 0; i < num_sync_mechanisms; ++i) {
    const YamlNode* const of = root->find(sync_names[i]);
    if (of == nullptr) {
      wrong(*root, fmt::format("no mechanism {}", sync_names[i]));
      continue;
    }
    for (const auto& [key, at] : constant_keys) {
      const YamlNode* const constant = of->find(key);
      const YamlNode* const source = constant ? constant->find("source") : nullptr;
      const YamlNode* const second = constant ? constant->find("second") : nullptr;
      const double number = constant ? number_at(*constant, "value") : -1.0;
      if (!(number >= 0.0) || source == nullptr || source->text.empty() || second == nullptr || second->text.empty())
        wrong(constant ? *constant : *of,
              fmt::format("{}.{}: expected {{value: number >= 0, source: text, second: text}}", sync_names[i], key));
      else out[i].*at = {number, source->text + "; " + second->text};
    }
  }
  if (!errors.empty()) return fail(std::move(errors));
  return out;
}

const SyncConstants& sync_constants(SyncMechanism m) {
  static const SyncTable table = [] {
    auto read = read_sync_table(catalog_root() / "sync.yaml");
    HB_CHECK(read.has_value(), "the catalogue's sync.yaml: {}", read.error().front().message);
    return std::move(*read);
  }();
  return table[static_cast<std::size_t>(m)];
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
  out.bytes_received = job.received_bytes >= 0 ? job.received_bytes : job.model_bytes / slices;
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
  // Every byte leaves through the ports of those who have it to send.
  if (job.apart > 0 && all.nodes > 1)
    out.moving =
        std::max(out.moving, cost.collective_seconds(OpKind::send, {2, 2, 1}, handed / std::max(job.ports, 1.0)));
  const double slices = std::max(job.target_parts, 1.0);
  out.moving = std::max(out.moving, cost.memory_seconds(2.0 * handed / slices));
  // Each further level of a broadcast's tree delays every bucket's hand-over; engines that share the trainers' GPUs are
  // asked by their own ranks, all at once.
  const double levels =
      from_host || job.apart > 0 ? 1.0 + std::log2(std::max(static_cast<double>(all.nodes), 1.0)) : 1.0;
  out.buckets = c.per_bucket.value * std::ceil(handed / std::max(job.bucket_bytes, 1.0)) * levels;
}

/// W + f B A of each matrix that has adapters. Ours merges the rows that a rank owns as it casts them; others the
/// matrices that they have gathered, on every rank.
double merging_seconds(const SyncJob& job, const CostModel& cost) {
  if (job.merged_matrices <= 0.0) return 0.0;
  const auto ranks = static_cast<double>(std::max<std::int64_t>(job.sources, 1));
  const double elements = job.merged_elements / (job.one_process && !job.takes_own ? ranks : 1.0);
  const double side = std::sqrt(elements / job.merged_matrices);
  double seconds = job.merged_matrices * cost.gemm_seconds(side, side, job.adapter_rank, DType::bf16);
  if (!job.one_process) seconds += cost.memory_seconds(2.0 * job.target_element_bytes * elements);
  if (job.sources > 1 && !job.takes_own)
    seconds += cost.collective_seconds(OpKind::all_gather, GroupShape::strided(job.sources, 1, cost.ranks_per_node()),
                                       job.adapter_bytes);
  return seconds;
}

}  // namespace

GroupShape everyone(const SyncJob& job, std::int64_t ranks_per_node) {
  const std::int64_t ranks = job.apart > 0 ? job.apart + job.targets : std::max(job.sources, job.targets);
  return GroupShape::strided(ranks, 1, ranks_per_node);
}

SyncPrice price_sync(SyncMechanism m, const SyncJob& job, const CostModel& cost) {
  return price_sync(m, job, cost, sync_constants(m));
}

SyncPrice price_sync(SyncMechanism m, const SyncJob& job, const CostModel& cost, const SyncConstants& c) {
  const GroupShape all = everyone(job, cost.ranks_per_node());
  const bool shards = m == SyncMechanism::shard_to_shard;
  SyncPrice out;
  out.merging = merging_seconds(job, cost);
  if (shards) price_shards(job, all, cost, out);
  else price_buckets(c, job, all, cost, out);
  if (job.one_process && (shards || m == SyncMechanism::flattened_buckets)) {
    out.moving = out.buckets = 0.0;
    price_own(m, job, cost, out);
    return out;
  }
  out.start = c.start.value;
  out.cleanup = job.cleanup_seconds;
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

SyncMode mode_of(SyncMechanism m) {
  switch (m) {
    case SyncMechanism::per_tensor_ipc:
    case SyncMechanism::async_gather:
      return SyncMode::stream;
    case SyncMechanism::bucketed:
    case SyncMechanism::flattened_buckets:
      return SyncMode::bucketed;
    case SyncMechanism::broadcast:
      return SyncMode::broadcast;
    default:
      return SyncMode::direct;
  }
}

}  // namespace hotbunk
