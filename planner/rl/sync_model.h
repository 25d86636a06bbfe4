// Seconds of one whole-model weight update from training to rollout, by mechanism:
//   max over pipelined stages of bytes / bandwidth + per-tensor cost * tensors + per-bucket cost * buckets + start
#pragma once
#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string_view>

#include "planner/cost/cost_model.h"
#include "spec/scenario.h"

namespace hotbunk {

/// How the bytes travel; finer than SyncMode because the field's systems differ inside one mode.
enum class SyncMechanism : std::uint8_t {
  per_tensor_ipc,     // gather, serialise and open one handle per tensor, one after the other
  async_gather,       // the same with the gathers ahead
  bucketed,           // handles per tensor, requests per bucket
  flattened_buckets,  // one handle and one request per bucket
  broadcast,          // pipelined buckets, every receiver gets every byte
  point_to_point,     // receivers ask for what they lack
  shard_to_shard      // each pair exchanges the intersection of its shards
};

/// "bucketed", "direct", …: the scenario's word for it where it has one.
std::string_view name_of(SyncMechanism);

struct SyncConstants {
  Sourced start;       // s per update
  Sourced per_tensor;  // s
  Sourced per_bucket;  // s
  Sourced bandwidth;   // bytes/s of the slowest pipelined stage, 0: from the cost model
};
inline constexpr std::size_t num_sync_mechanisms = 7;
using SyncTable = std::array<SyncConstants, num_sync_mechanisms>;
/// scenarios/catalog/sync.yaml, each constant with two sources. E101, E201, E205.
Result<SyncTable> read_sync_table(const std::filesystem::path&);
/// What systems other than the one that a mechanism's constants were found on say of it (`elsewhere` in the table);
/// nullopt: nobody else measured it. `file` as read_sync_table's. E101, E201, E205.
Result<std::optional<SyncConstants>> sync_constants_elsewhere(SyncMechanism, const std::filesystem::path& file);
/// Of the catalogue. Throws InternalError where its table cannot be read: it is part of the program.
const SyncConstants& sync_constants(SyncMechanism);

struct SyncJob {
  double model_bytes = 0;   // as trainers gather it, in the element type of the rollout's activations
  double handed_bytes = 0;  // as engines are handed it, quantised before; 0: as gathered
  // Narrow weights. Bytes moved to quantise an element, 0: none is; elements that every rank quantises of whole
  // tensors, and of a slice; tensors of scales that are handed over.
  double quantizing_bytes = 0, quantized_elements = 0, quantized_slice = 0, scale_tensors = 0;
  double tensors = 0;  // parameters by their Hugging Face names
  double bucket_bytes = 512.0 * 1024 * 1024;
  std::int64_t sources = 1;    // ranks that hold the training shards
  double target_parts = 1;     // of the model, one on a rank of an engine: its tp; with stages by the fullest one
  double target_tensors = 0;   // that a rank of an engine takes part of; 0: all
  std::int64_t targets = 1;    // rollout ranks
  double ports = 1;            // of the network that carry what crosses from trainers to engines
  std::int64_t apart = 0;      // ranks of a trainer on GPUs of its own, from which all bytes must cross; 0: the same
  double received_bytes = -1;  // per rank, shard to shard; below 0: model_bytes / target_parts
  // Our engine lives in the trainer's process: an update is a list of ops (lowering/sync.cc), without requests.
  bool one_process = false;
  bool takes_own = false;  // of those, each rank takes its slices of what it has itself, nothing is packed
  bool gathers = false;    // buckets are all-gathered; else each rank reads what it needs of its peers' parts
  bool verifies = false;   // hashes of both sides of every tensor
  double source_element_bytes = 4, target_element_bytes = 2, slice_bytes = 0;  // slice: of one rank of an engine
  // Adapters, which are gathered (bytes of all of them) and merged: matrices that have them, their elements, the rank.
  double adapter_bytes = 0, merged_matrices = 0, merged_elements = 0, adapter_rank = 0;
  double cleanup_seconds = 0;  // that the trainers' processes collect garbage around it
  double handed() const { return handed_bytes > 0 ? handed_bytes : model_bytes; }
  double taken_tensors() const { return target_tensors > 0 ? target_tensors : tensors; }
};

struct SyncPrice {
  // Seconds: to begin; bytes on the slowest stage; per tensor and per bucket; casts and copies into buckets; hashes;
  // narrow weights made of wide ones; adapters gathered and merged into their matrices; garbage collected.
  double start = 0, moving = 0, tensors = 0, buckets = 0, packing = 0, hashing = 0, quantizing = 0, merging = 0;
  double cleanup = 0;
  double seconds() const { return moving + beside_moving(); }
  double beside_moving() const {
    return start + tensors + buckets + packing + hashing + quantizing + merging + cleanup;
  }
  double bytes_received = 0;  // worst rank
  double bytes_sent = 0;      // worst rank, shard to shard
  double peak_bytes = 0;      // staging on every rank: buckets
};
SyncPrice price_sync(SyncMechanism, const SyncJob&, const CostModel&);
SyncPrice price_sync(SyncMechanism, const SyncJob&, const CostModel&, const SyncConstants&);
/// All ranks of both sides, in the order of their nodes.
GroupShape everyone(const SyncJob&, std::int64_t ranks_per_node);

/// The mechanism that a scenario's sync settings mean.
SyncMechanism mechanism_of(const SyncSpec&, PlacementMode);
/// The scenario's word that means the mechanism, or the nearest to it.
SyncMode mode_of(SyncMechanism);

}  // namespace hotbunk
