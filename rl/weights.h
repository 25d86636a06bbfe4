// Parameters on their way into and out of a plan: from safetensors or random initialisation into the shards that the
// `load` feeds name, and from gathered fetches into a Hugging Face folder.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/diagnostic.h"
#include "graph/plan.h"
#include "spec/model.h"
#include "spec/safetensors.h"

namespace hotbunk {

/// The initial value of every parameter. Reading is const and may happen on several threads.
class ParameterSource {
 public:
  /// Opens model.weights_path and checks names, shapes and that every weight is finite (E40x), or prepares random
  /// initialisation when it is empty.
  static Result<ParameterSource> open(const ModelSpec&, std::int64_t seed);

  /// Fills a feed's destination. `boxes`: source in elements of the row-major logical tensor, destination in elements
  /// of `dtype` (fp32 or bf16). What no box covers is zero.
  void read(const std::string& name, std::span<const Box> boxes, DType dtype, std::span<std::byte> destination) const;

  /// Elements [first, first + out.size()) of a parameter in fp32. At random: weights N(0, init_range), norms 1, biases
  /// 0; element i is a pure function of (seed, name, i), whatever the layout.
  void read_range(const std::string& name, std::int64_t first, std::span<float> out) const;

 private:
  ParameterSource(const ModelSpec&, std::int64_t seed, std::optional<Checkpoint>);
  std::map<std::string, ParamSpec, std::less<>> parameters_;
  std::optional<Checkpoint> checkpoint_;
  double init_range_ = 0.02;
  std::uint64_t seed_ = 0;
};

/// Streams the parameters that a checkpoint or export block fetches into a folder: config.json, model.safetensors. The
/// weights file appears only when all of it has been written.
class ParameterSink {
 public:
  /// `program.phases[phase]`'s fetches of Slot::exported say which parameters come, and in which order. E103.
  static Result<ParameterSink> create(const std::filesystem::path& folder, const ModelSpec&, const Program&,
                                      std::int16_t phase);

  /// The next parameter: E631 when it is not finite; boxes: source in elements of the fetched tensor, destination in
  /// elements of the logical one.
  Status take(const Op&, std::span<const std::byte> source);
  /// All parameters must have come.
  Status finish();

 private:
  ParameterSink(SafetensorsWriter, std::vector<TensorEntry>);
  SafetensorsWriter writer_;
  std::vector<TensorEntry> entries_;
  std::size_t next_ = 0;
};

}  // namespace hotbunk
