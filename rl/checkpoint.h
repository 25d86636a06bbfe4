// A checkpoint: one folder that is there whole or not at all. It is a Hugging Face model (config.json,
// model.safetensors: the master weights as they are; beside them what the model's own folder says of its tokens,
// carried_files.h) and all that a run needs to go on bit for bit: AdamW's moments, how far it came, and the scenario it
// ran. Where adapters are trained it is a PEFT adapter in the place of the model
// (adapter.h), and the model with them in it has a folder of its own.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/diagnostic.h"
#include "graph/bound.h"
#include "graph/slots.h"
#include "rl/carried_files.h"
#include "spec/model.h"

namespace hotbunk {

/// Its files.
namespace checkpoint_file {
inline constexpr const char *config = "config.json", *optimizer = "optimizer.safetensors", *state = "state.json",
                            *scenario = "scenario.yaml", *manifest = "manifest.json";
}

/// What decides how products are rounded, beside the computation itself: where it differs, so do bits.
struct Arithmetic {
  std::string bf16_products;     // what forms them; "": the run has none, or nobody said
  std::string instruction_sets;  // of the library and of our own kernels; "": nobody said
};

/// How far training came. Random numbers are counter-based and data comes in the order of its file, so that the seed
/// and the step are all there is to know of either.
struct TrainingState {
  std::int64_t step = 0;             // iterations done
  std::int64_t optimizer_step = 0;   // AdamW's count since its moments were zero: its bias corrections read it
  std::int64_t seed = 0;             // key of every random number
  std::int64_t sequences_taken = 0;  // of task.data, round and round
  std::string initial_weights;       // path of the policy that training began with; "": drawn from the seed
  std::string initial_digest;        // of the same, where the reference is made of it; else ""
  std::string data_digest;           // of task.data; "": none
  std::string plan_hash;
  Arithmetic arithmetic;  // of the process that wrote it
  std::string scenario;   // resolved YAML, paths absolute
};

/// "NAME.exp_avg" or "NAME.exp_avg_sq": a moment's name in optimizer.safetensors. `slot`: fed or fetched.
std::string moment_name(const std::string& parameter, Slot slot);

/// What a checkpoint has, or a model with adapters in its matrices; the same on every rank.
struct CheckpointContent {
  const ModelSpec& model;
  DType weights = DType::f32, moments = DType::f32;
  bool merged = false;  // every parameter with its adapter in it, and nothing else; else what training saves
};

/// How many elements, and of which tensors: counts that are equal are so tensor by tensor, but for one chance in 2^64.
struct ElementCount {
  std::int64_t elements = 0;
  std::uint64_t by_tensor = 0;  // each counted as its tensor's weight, modulo 2^64
  ElementCount& operator+=(const ElementCount& more) {
    elements += more.elements, by_tensor += more.by_tensor;
    return *this;
  }
  friend bool operator==(const ElementCount&, const ElementCount&) = default;
};

/// Writes what a checkpoint or export block fetches into a hidden folder beside its place, which takes the name when
/// all of it is on disk. The first rank makes the folder and its files, of their full size, and each rank writes what
/// it has into them: the files are the same whatever the layout. A process that ends before that leaves the checkpoint
/// that was there, whole, and something that sweep_checkpoints knows.
class CheckpointWriter {
 public:
  /// On the first rank. Without a state: of a merged model. `carried`: into the folder, as they are. E103.
  static Result<std::unique_ptr<CheckpointWriter>> create(const std::filesystem::path& folder, const CheckpointContent&,
                                                          std::optional<TrainingState>,
                                                          std::span<const CarriedFile> carried);
  /// On another rank; `partial`: where the first one said.
  static Result<std::unique_ptr<CheckpointWriter>> join(const std::filesystem::path& partial, const CheckpointContent&);
  ~CheckpointWriter();  // not in its place: the first rank's removes what is written

  /// The hidden folder.
  const std::filesystem::path& partial() const;
  /// Whether the parameter is one of its own.
  bool takes(const BoundOp&) const;
  /// Elements of a parameter or a moment that a rank with these places has: E103; E631 when one is not finite. Boxes:
  /// source in elements of the fetched tensor, destination in elements of the parameter.
  Status take(const BoundOp&, const Places&, std::span<const std::byte> source);
  /// How many elements all tensors have, and how many have been taken here.
  ElementCount elements() const;
  ElementCount taken() const;
  /// What this rank has written is on disk; on the first rank all is, which all must have written before.
  Status finish();
  /// It takes its place: who looks finds it from here on.
  Status place();

 private:
  struct State;
  explicit CheckpointWriter(std::unique_ptr<State>);
  std::unique_ptr<State> state_;
};

/// Clears what interrupted writes have left among a run's checkpoints: hidden folders of our names with our files in
/// them and nothing else. Brings back a checkpoint that made way for one that did not come. Returns what it removed.
/// Only for who owns the run folder: a write that is going on looks the same.
std::vector<std::string> sweep_checkpoints(const std::filesystem::path& checkpoints);

/// Removes a checkpoint's files, whole or not, and its folder if nothing else is in it; whether the folder is gone.
bool remove_checkpoint(const std::filesystem::path& folder);

/// A checkpoint to go on from.
struct SavedCheckpoint {
  std::filesystem::path folder;
  TrainingState state;
  bool has_moments = false;
};
/// Whether a folder says that it is one.
bool is_checkpoint(const std::filesystem::path& folder);
/// E101, E423 when state.json is not what it should be. Other files are not read: whoever reads them verifies.
Result<SavedCheckpoint> read_checkpoint(const std::filesystem::path& folder);

}  // namespace hotbunk
