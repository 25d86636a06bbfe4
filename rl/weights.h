// What a plan is fed when it loads: from safetensors or random initialisation into the shards that the `load` feeds
// name.
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
#include "graph/boxes.h"
#include "graph/slots.h"
#include "rl/checkpoint.h"
#include "spec/model.h"
#include "spec/safetensors.h"
#include "spec/scenario.h"

namespace hotbunk {

/// The initial value of every parameter. Reading is const and may happen on several threads.
class ParameterSource {
 public:
  /// Opens model.weights_path and checks its manifest, if it has one (E421), names, shapes and that every weight is
  /// finite (E40x), or prepares random initialisation when it is empty. Likewise model.lora.adapter (E40x, E414).
  static Result<ParameterSource> open(const ModelSpec&, std::int64_t seed);
  /// Of files that this rank is asked for nothing of: it opens none.
  static ParameterSource unread(const ModelSpec& model) { return {model, 0, std::nullopt, std::nullopt}; }

  /// Fills a feed's destination. `boxes`: source in elements of the row-major logical tensor, destination in elements
  /// of `dtype` (fp32 or bf16), no two of which overlap there. What no box covers is zero, or with `keeps` what it was.
  /// `threads`: that do it, at most; the bytes do not depend on it.
  void read(const std::string& name, std::span<const Box> boxes, DType dtype, std::span<std::byte> destination,
            bool keeps = false, int threads = 1) const;

  /// Elements [first, first + out.size()) of a parameter in fp32. At random: weights N(0, init_range), norms 1, biases
  /// 0; of adapters B is 0 and A uniform in ±1/sqrt(in), as PEFT's (Kaiming's with a = sqrt 5). Element i is a pure
  /// function of (seed, name, i), whatever the layout.
  void read_range(const std::string& name, std::int64_t first, std::span<float> out) const;

 private:
  ParameterSource(const ModelSpec&, std::int64_t seed, std::optional<Checkpoint>, std::optional<Checkpoint> adapters);
  struct Parameter {
    ParamSpec spec;
    StoredParameter stored;
  };
  std::map<std::string, Parameter, std::less<>> parameters_;
  std::optional<Checkpoint> checkpoint_, adapters_;
  double init_range_ = 0.02;
  float one_ = 1.0f;  // the weight of a norm that multiplies by 1
  std::uint64_t seed_ = 0;
};

/// AdamW's moments by parameter: a checkpoint's, or zeros.
class MomentSource {
 public:
  MomentSource() = default;  // zeros: nothing has been trained
  /// `file`: optimizer.safetensors of a checkpoint of this model (E40x).
  static Result<MomentSource> open(const std::filesystem::path& file, const ModelSpec&);

  /// As ParameterSource::read; `slot`: first_moment or second_moment.
  void read(const std::string& parameter, Slot slot, std::span<const Box> boxes, DType dtype,
            std::span<std::byte> destination, bool keeps = false, int threads = 1) const;
  bool are_zeros() const { return !file_; }

 private:
  std::optional<Checkpoint> file_;
};

/// All that the `load` phase feeds.
struct LoadSources {
  ParameterSource parameters;
  ParameterSource initial;  // the policy that training began with, which the reference is a copy of
  MomentSource moments;
  /// Of a scenario's own start, or of the checkpoint that a run goes on from. The files of a checkpoint are verified
  /// (E421, E40x). Without `opens_files` none is opened: this rank is asked for nothing that is in them.
  static Result<LoadSources> open(const Scenario&, const std::optional<SavedCheckpoint>&, bool opens_files = true);
};

}  // namespace hotbunk
