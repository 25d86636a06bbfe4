// Who holds what of a scenario's model, in training and in its engines.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "layout/layout.h"
#include "layout/rollout_weights.h"
#include "spec/expert_mesh.h"
#include "spec/scenario.h"

namespace hotbunk {

/// A rank that trains: what it holds of the parameters while it does not compute.
class TrainHoldings {
 public:
  /// Errors: E244 layers that do not divide over the stages, E242 and E243 expert meshes that do not fit the dense one.
  static Result<TrainHoldings> of(const Scenario&);

  /// Axes "tp", "cp", "ulysses", "dp", "pp" (train_mesh.h); of experts "etp", "ep", "dp" and "pp".
  const Mesh& dense() const { return layout_.dense; }
  const Mesh& expert() const { return layout_.expert; }
  /// The layers of a rank's stage, chunk by chunk.
  std::vector<StageChunk> chunks_of(std::int64_t rank) const;
  /// Place among the ranks that share one copy of what FSDP shards, and how many they are; one of one where parameters
  /// are whole (train.engine).
  std::int64_t shard_of(std::int64_t rank) const;
  std::int64_t shards() const { return shards_; }
  /// The ranks that hold one copy together, a shard each; and those that hold the same shard.
  std::vector<std::int64_t> shard_group(std::int64_t rank) const;
  std::vector<std::int64_t> replicas(std::int64_t rank) const;
  /// The rectangles of a parameter: one, up to three of a flat unit (layout/flat_units.h), none where the rank has
  /// nothing of it.
  std::vector<Rectangle> held(const ParamSpec&, std::int64_t rank) const;
  /// Their elements.
  std::int64_t elements(std::int64_t rank) const;

 private:
  TrainHoldings(const Scenario&, Layout, std::int64_t shards);
  /// The data ranks beside a rank, as they are numbered (train_mesh.h), and its place among them.
  const std::vector<std::int64_t>& data_of(std::int64_t rank) const;
  std::int64_t place_among_data(std::int64_t rank) const { return places_[static_cast<std::size_t>(rank)]; }

  /// Into how many parts a copy of a parameter is cut, and which is a rank's.
  struct Part {
    std::int64_t count = 1, index = 0;
  };
  Part part_of(const ParamSpec&, std::int64_t rank) const;

  ModelSpec model_;
  Layout layout_;
  std::int64_t shards_ = 1;
  std::vector<std::vector<std::vector<std::int64_t>>> data_;  // by stage and tensor-parallel place
  std::vector<std::int64_t> places_;                          // of each rank
  ExpertMesh experts_;
  std::vector<ParamSpec> parameters_;
  struct InUnit {
    std::int64_t offset = 0, shard_elements = 0;
  };
  /// By stage, where parameters lie in flat units; none where these are not what is cut.
  std::vector<std::map<std::string, InUnit>> flat_;
};

/// The layout of a scenario's engines. E244 as above.
Result<Layout> engine_layout(const Scenario&);

/// What each pipeline stage of an engine has, as its first tensor-parallel rank. Internal fault where engine_layout()
/// fails.
std::vector<EngineCut> engine_cuts(const Scenario&);

}  // namespace hotbunk
