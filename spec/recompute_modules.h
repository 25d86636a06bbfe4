// What of a layer selective recomputation computes again, as a choice of modules (train.recompute_modules).
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace hotbunk {

/// By the names of Megatron-core's --recompute-modules.
///   core_attn       the attention products, from q, k, v
///   layernorm       the norms of a layer
///   mla_up_proj     latent attention's up-projections and rotary positions
///   mlp             a dense layer's MLP; mlp_act: the activation inside it, and inside shared experts (not Megatron's)
///   moe             router, dispatch, experts, shared experts, combine
///   moe_act         the activation inside routed experts
///   shared_experts  their MLP
enum class RecomputeModule : std::uint8_t {
  core_attn,
  layernorm,
  mla_up_proj,
  mlp,
  mlp_act,
  moe,
  moe_act,
  shared_experts
};
inline constexpr std::array<std::string_view, 8> recompute_module_names{
    "core_attn", "layernorm", "mla_up_proj", "mlp", "mlp_act", "moe", "moe_act", "shared_experts"};

/// A set of them.
class RecomputeModules {
 public:
  constexpr RecomputeModules() = default;
  template <class... Module>
  explicit constexpr RecomputeModules(Module... modules) : bits_((bit(modules) | ...)) {}

  constexpr void add(RecomputeModule m) { bits_ |= bit(m); }
  constexpr bool has(RecomputeModule m) const { return (bits_ & bit(m)) != 0; }
  constexpr bool meets(RecomputeModules o) const { return (bits_ & o.bits_) != 0; }
  friend constexpr bool operator==(RecomputeModules, RecomputeModules) = default;

 private:
  static constexpr std::uint32_t bit(RecomputeModule m) { return 1U << static_cast<unsigned>(m); }
  std::uint32_t bits_ = 0;
};

/// What is elementwise, or nearly so: cheap to compute again. Ours, where a scenario names none.
inline constexpr RecomputeModules elementwise_modules{RecomputeModule::layernorm, RecomputeModule::mlp_act,
                                                      RecomputeModule::moe_act};

/// nullopt: no module is called so.
constexpr std::optional<RecomputeModule> recompute_module(std::string_view name) {
  for (std::size_t i = 0; i < recompute_module_names.size(); ++i)
    if (recompute_module_names[i] == name) return static_cast<RecomputeModule>(i);
  return std::nullopt;
}

/// Of "layernorm-mlp_act", the words of a scenario's key; what is no module is left out. Of "": `otherwise`.
constexpr RecomputeModules recompute_modules(std::string_view words, RecomputeModules otherwise) {
  if (words.empty()) return otherwise;
  RecomputeModules out;
  while (!words.empty()) {
    const std::size_t end = words.find('-');
    if (const auto module = recompute_module(words.substr(0, end))) out.add(*module);
    words = end == std::string_view::npos ? std::string_view() : words.substr(end + 1);
  }
  return out;
}

}  // namespace hotbunk
