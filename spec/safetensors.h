// safetensors in and out. Reading maps the file; nothing is believed before it is checked: header length, JSON, dtypes,
// shapes, offsets (no overlap, no hole, nothing outside the file). Writing puts elements at their place in files that
// several processes may share.
// Format: https://github.com/huggingface/safetensors (8-byte little-endian header length, JSON header, data).
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/diagnostic.h"
#include "base/dtype.h"
#include "spec/model.h"
#include "spec/stored_parameter.h"

namespace hotbunk {

/// A tensor inside a mapped file. `data` may be unaligned: use copy_as_f32 or memcpy.
struct TensorView {
  std::string name;
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;          // () is a scalar of one element
  std::span<const std::byte> data;          // row-major, numel * size_of(dtype) bytes
  std::shared_ptr<const std::string> file;  // where it stands, for messages

  std::int64_t numel() const { return static_cast<std::int64_t>(data.size()) / size_of(dtype); }
};

/// The header of one file: tensors with `data` inside `bytes`. Errors E401 (length), E402 (JSON), E403 (dtype), E404
/// (shape), E405 (offsets), all with the tensor's name. This is the whole trust boundary, and what the fuzzer drives.
Result<std::vector<TensorView>> parse_safetensors(std::span<const std::byte> bytes, const std::string& file);

/// E420: a model folder holds no safetensors to start from. Nobody is given random weights who names a folder.
Diagnostic no_weights(const std::filesystem::path& folder);

/// One file, or the shards that a `model.safetensors.index.json` names, as one set of tensors. Views stay valid while
/// the Checkpoint (or a copy of it) lives.
class Checkpoint {
 public:
  /// `path`: a .safetensors file, an index file, or a folder that holds model.safetensors(.index.json).
  static Result<Checkpoint> open(const std::filesystem::path& path);

  const std::vector<TensorView>& tensors() const { return tensors_; }  // sorted by name
  const TensorView* find(std::string_view name) const;                 // nullptr: not there

  /// The tensor, or E406 (missing, with the nearest name) or E407 (another shape).
  Result<TensorView> require(std::string_view name, std::span<const std::int64_t> shape) const;

  /// The tensor that has a parameter, with the same errors. Files of a base model leave out the "transformer." in front
  /// of its names, as GPT-2's do.
  Result<TensorView> require(const StoredParameter&) const;

  /// A whole parameter, as it is in memory, converted to fp32; also E403 (integers are no weights) and E408 (NaN or
  /// infinite: which element of the tensor).
  Result<std::vector<float>> load_parameter(const ModelSpec&, const ParamSpec&) const;

  /// Names and shapes of every parameter of the model (E406, E407), all of them collected. Tied heads may be present.
  Status check_against(const ModelSpec&) const;

 private:
  class Mapping;
  std::vector<std::shared_ptr<const Mapping>> mappings_;
  std::vector<TensorView> tensors_;
  std::string path_;
};

/// Elements [first, first + out.size()) converted to fp32 (from fp32, bf16, fp16 or fp64). The range must lie inside.
void copy_as_f32(const TensorView&, std::int64_t first, std::span<float> out);

/// The same of a parameter's elements, out of the tensor that has it.
void copy_as_f32(const TensorView&, const StoredParameter&, std::int64_t first, std::span<float> out);

/// E408 naming the tensor and the first element that is NaN or infinite; integers always pass. `first`: where the data
/// are no whole tensor, the element of it that they begin with.
Status check_finite(const TensorView&, std::int64_t first = 0);

/// What a writer is told beforehand: the header stands before the data.
struct TensorEntry {
  std::string name;
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;
};

/// Files of tensors, of which any process writes what it has, at its place: whoever has written first or last, and
/// however the elements were spread, the bytes are the same. One process makes the files and the others join it, with
/// the same arguments. They are there, and zero, before they are written: this is for a folder that nobody looks into
/// yet.
class SafetensorsWriter {
 public:
  /// `target`: a path ending in .safetensors gives that one file; any other path is a folder, in which
  /// model.safetensors, or shards of at most `max_shard_bytes` plus model.safetensors.index.json, are written.
  /// E103 when a file cannot be made; E409 when names repeat.
  static Result<SafetensorsWriter> create(const std::filesystem::path& target, std::vector<TensorEntry> entries,
                                          std::int64_t max_shard_bytes = std::int64_t{5} << 30,
                                          const std::map<std::string, std::string>& metadata = {{"format", "pt"}});
  /// Touches no file: another process makes them, before the first write here.
  static Result<SafetensorsWriter> join(const std::filesystem::path& target, std::vector<TensorEntry> entries,
                                        std::int64_t max_shard_bytes = std::int64_t{5} << 30,
                                        const std::map<std::string, std::string>& metadata = {{"format", "pt"}});
  SafetensorsWriter(SafetensorsWriter&&) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) noexcept;
  ~SafetensorsWriter();

  /// Elements from `first` on of the tensor with that number in `entries`. E103; what lies outside of the tensor is an
  /// internal fault. Nothing is synced. Best in the order of the entries: of many files some are open at a time.
  Status write(std::size_t entry, std::int64_t first, std::span<const std::byte> bytes);
  /// The same where they lie `step` elements apart, and those between are somebody else's: under a lock of the range.
  Status write(std::size_t entry, std::int64_t first, std::int64_t step, std::span<const std::byte> bytes);
  /// What this process has written is on the disk; of the one that made the files, what all have written before, and
  /// the index.
  Status finish();

 private:
  struct State;
  explicit SafetensorsWriter(std::unique_ptr<State>);
  std::unique_ptr<State> state_;
};

}  // namespace hotbunk
