// What a family of models says of itself: how config.json names it, which keys it has and what follows where they are
// absent, what its parameters are called and how its files hold them. Each stands in one file of model/families/, on
// what they share (model/families/parts.h). How such a model computes follows from its ModelSpec, whichever family it
// is of (model/decoder.cc); nobody else asks for the family.
#pragma once
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "spec/config_reader.h"
#include "spec/model.h"
#include "spec/stored_parameter.h"

namespace hotbunk {

/// The parameters of one layer, in Hugging Face's order, to whoever collects them; of a MoE layer's routed experts only
/// [0, experts).
class LayerParameters {
 public:
  using Emit = std::function<void(ParamSpec)>;
  /// All must outlive it. `prefix`: of the layer's names.
  LayerParameters(const ModelSpec& model, int layer, std::int64_t experts, std::string prefix, const Emit& emit)
      : model_(model), layer_(layer), experts_(experts), prefix_(std::move(prefix)), emit_(emit) {}

  const ModelSpec& model() const { return model_; }
  int layer() const { return layer_; }
  std::int64_t experts() const { return experts_; }
  void put(const std::string& name, std::vector<std::int64_t> shape, ParamRole role, int expert = -1) const {
    emit_({prefix_ + name, std::move(shape), role, layer_, expert});
  }
  /// A matrix (out, in), and a bias if it has one.
  void linear(const std::string& name, std::int64_t out, std::int64_t in, ParamRole role, bool bias,
              ParamRole bias_role) const {
    put(name + ".weight", {out, in}, role);
    if (bias) put(name + ".bias", {out}, bias_role);
  }

 private:
  const ModelSpec& model_;
  int layer_;
  std::int64_t experts_;
  std::string prefix_;
  const Emit& emit_;
};

struct FamilySpec {
  std::string_view class_name, model_type;  // in config.json's "architectures" and "model_type"
  /// The model_type of a larger model, a vision tower beside it, whose text_config is of this family.
  std::string_view model_type_around = {};

  /// Keys of its config.json besides those that all families have (config_keys).
  std::span<const std::string_view> keys = {}, keys_of_parts = {};
  /// From config.json, all but tokens and the deviation of initial values; and back, of what model_from_json reads.
  void (*read)(ConfigReader&, ModelSpec&) = nullptr;
  void (*write)(const ModelSpec&, nlohmann::json&) = nullptr;

  void (*layer)(const LayerParameters&) = nullptr;  // the parameters of a layer
  /// And of what is none; in front of a layer's number.
  struct Names {
    std::string_view embedding = "model.embed_tokens", positions = {}, final_norm = "model.norm",
                     layers = "model.layers";
  };
  Names names = {};
  /// How its files hold a parameter of a layer where that is not as it is here.
  void (*store)(const ModelSpec&, const ParamSpec&, StoredParameter&) = nullptr;

  /// Which of its matrices may have adapters; none of them: why.
  std::span<const LoraTarget> adapters = lora_targets;
  std::string_view no_adapters = {};
};

/// All of them, in the order of their files and in a file as they stand there. The build writes this list from what is
/// in model/families/ (cmake/families.cmake).
std::span<const FamilySpec* const> families();
/// By what config.json calls it; nullptr: there is none of that name.
const FamilySpec* find_family(std::string_view model_type);
/// Of a model that has one: all that a config or the catalogue gave.
const FamilySpec& family_of(const ModelSpec&);

}  // namespace hotbunk
