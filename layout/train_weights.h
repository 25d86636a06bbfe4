// How one training rank holds the model: units, their parameters, and where each parameter's rows lie. Tensor
// parallelism cuts parameters first (layout/placement.h: tensor_parallel), and of what it leaves FSDP cuts the rows.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "layout/pipeline.h"
#include "layout/shard.h"
#include "spec/expert_mesh.h"
#include "spec/model.h"

namespace hotbunk {

/// One parameter of a unit on one rank. What a tensor-parallel rank has of it is Shard(0): rank w of W owns rows
/// [w * padded_rows, (w + 1) * padded_rows) of that, cut off at `rows`; the last ranks own fewer, possibly none.
struct UnitParam {
  std::string parameter;                        // Hugging Face name
  std::int64_t whole_rows = 0, whole_cols = 0;  // its shape; a 1-D parameter of n elements is (n, 1)
  std::int64_t rows = 0, cols = 0;  // a tensor-parallel rank's, the same on all; a vocabulary's is rounded up
  TensorStep step;
  Range shard;                    // the rows this rank owns
  std::int64_t padded_rows = 0;   // ceil(rows / W): the rows every rank's shard has room for
  std::int64_t shard_offset = 0;  // elements into this rank's flat unit shard
  std::int64_t full_offset = 0;   // elements into the unsharded unit buffer
  ParamRole role = ParamRole::embedding;
  int layer = -1, expert = -1;
  /// Where whole experts are spread over ranks, expert e of the first rank shares its place in memory with one of each
  /// other rank: the unit has the place once, and all these parameters. Together they are the tensor of which each rank
  /// has a piece: one below the other, or beside it, which `base` says: this one's first row and column there.
  std::int64_t spread = 1;
  struct {
    std::int64_t row = 0, col = 0;
  } base;
  bool apart = false;  // an expert's, of which other ranks have copies than of what else this rank has

  bool has_place() const { return base.row == 0 && base.col == 0; }
  std::int64_t rows_of_all() const { return step.cols > 0 ? whole_rows : spread * whole_rows; }
  std::int64_t elements() const { return rows * cols; }
  std::int64_t owned_elements() const { return shard.size() * cols; }
  std::int64_t padded_elements() const { return padded_rows * cols; }
};

/// What of a unit is cut into so many shards, back to back in a rank's shard and in the whole unit.
struct UnitRegion {
  std::int64_t shards = 1;
  std::int64_t shard_elements = 0, full_elements = 0;
  std::int64_t padding_elements() const { return shards * shard_elements - full_elements; }
};

/// What one all-gather makes whole: the parameters of one decoder layer, or of what is outside the layers: the final
/// norm and the head ("lm_head"), and the embeddings ("root"), with the norm where the head is the embedding.
/// The unsharded buffer holds the parameters back to back without padding, so neighbours of equal width form one
/// matrix: [q; k; v], their biases, and [gate; up] each lie as one packed block; [gate; up] of all experts as one stack
/// of such blocks, and their down projections as another.
struct ShardedUnit {
  std::string name;       // "root", "lm_head", "layers.3"
  int layer = -1;         // -1: of none
  bool adapters = false;  // LoRA's of the layer, which another unit has
  bool frozen = false;    // parameters that do not train; the layer's others are in another unit
  int kind = 0;           // units of one kind differ in the names of their parameters only
  std::vector<UnitParam> params;
  /// FSDP1: not the parameters are cut but the unit as a whole, back to back as it is computed with: rank w has
  /// elements [w * shard_elements, (w + 1) * shard_elements). Then no shard_offset or padded_rows of a parameter
  /// counts.
  bool flat = false;
  std::int64_t shard_elements = 0;  // what one rank contributes to the all-gather: sum of padded shards
  std::int64_t full_elements = 0;   // sum of rows * cols
  /// Of that, in front, what all data ranks share; behind it the experts, where others have copies of these and they
  /// are in another number of shards.
  UnitRegion shared, experts;
  /// Of a flat unit, which is one of the two.
  const UnitRegion& only_region() const { return experts.full_elements > 0 ? experts : shared; }
  std::int64_t padding_elements() const { return shared.padding_elements() + experts.padding_elements(); }
};

/// The last norm and the head, which nothing reads but the end of the model where the head is not the embedding.
bool is_of_head(ParamRole);

/// Gives units that differ in the names of their parameters only one kind.
void number_kinds(std::vector<ShardedUnit>&);

/// Whether training can cut the model over so many tensor-parallel ranks, and each expert over so many of these (0:
/// over all): "" or the reason, ready for a note.
std::string why_not_train_tp(const ModelSpec&, std::int64_t tp, std::int64_t expert_columns = 0);

/// The units of a model cut over `tp` tensor-parallel ranks and then over `world` ranks, as `rank` of these holds them
/// beside the first tensor-parallel rank: root, lm_head, layers.0, layers.1, …; behind them those of adapters,
/// layers.0.lora, … Experts lie as the mesh says, of whose blocks `spread` divide `blocks world` if the world is not 1;
/// by default the tensor-parallel ranks share each. Throws InternalError when rank is outside [0, world), or where
/// why_not_train_tp gives a reason. Source: PyTorch FSDP2 (fully_shard: DTensor Shard(0), torch.chunk semantics,
/// padding of the last shards).
std::vector<ShardedUnit> train_units(const ModelSpec&, std::int64_t tp, std::int64_t world, std::int64_t rank,
                                     const std::optional<ExpertMesh>& = {});
/// Those of a stage, in the same order; a stage has the ends of the model that are its.
std::vector<ShardedUnit> train_units(const ModelSpec&, const StagePart&, std::int64_t tp, std::int64_t world,
                                     std::int64_t rank, const std::optional<ExpertMesh>& = {});

}  // namespace hotbunk
