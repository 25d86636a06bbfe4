#include "spec/model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <span>
#include <utility>

#include "base/check.h"
#include "spec/family.h"
#include "spec/frozen.h"
#include "spec/parameter_roles.h"

namespace hotbunk {

double RopeScaling::score_scale() const {
  if (mscale_all_dim == 0.0 || factor <= 1.0) return 1.0;
  const double mscale = 0.1 * mscale_all_dim * std::log(factor) + 1.0;
  return mscale * mscale;
}

std::int64_t ModelSpec::window_of(int layer) const {
  const bool full = !full_layers.empty() && full_layers[static_cast<std::size_t>(layer)];
  return full || sliding_window >= max_position ? 0 : sliding_window;
}

const LoraTarget* lora_target(const ModelSpec& model, ParamRole base) {
  const std::span<const LoraTarget> all = family_of(model).adapters;
  const auto at = std::ranges::find(all, base, &LoraTarget::base);
  return at == all.end() ? nullptr : &*at;
}

bool one_adapter_of_qkv(const ModelSpec& model) {
  const LoraTarget *const q = lora_target(model, ParamRole::q_proj), *const k = lora_target(model, ParamRole::k_proj);
  return q != nullptr && k != nullptr && q->a == k->a;
}

bool ModelSpec::adapts(ParamRole base) const {
  const LoraTarget* const target = lora.on() ? lora_target(*this, base) : nullptr;
  if (target == nullptr) return false;
  if (lora.targets == "all-linear") return true;
  return ("-" + lora.targets + "-").find(fmt::format("-{}-", target->module)) != std::string::npos;
}

bool ModelSpec::adapts_experts() const {
  return moe && (adapts(ParamRole::expert_gate) || adapts(ParamRole::expert_up) || adapts(ParamRole::expert_down));
}

ModelSpec base_of(ModelSpec model) {
  model.lora = {};
  return model;
}

namespace {

using Emit = LayerParameters::Emit;
using R = ParamRole;

/// Of a MoE layer's routed experts only [0, experts).
void visit_layer(const ModelSpec& m, std::int64_t layer, std::int64_t experts, const Emit& emit) {
  const FamilySpec& family = family_of(m);
  family.layer({m, static_cast<int>(layer), experts, fmt::format("{}.{}.", family.names.layers, layer), emit});
}

void visit_layers(const ModelSpec& m, const LayerFilter& wanted, const Emit& emit) {
  for (int layer = 0; layer < m.layers; ++layer)
    if (!wanted || wanted(layer)) visit_layer(m, layer, m.moe ? m.moe->experts : 0, emit);
}

void visit_front(const ModelSpec& m, const Emit& emit) {
  const FamilySpec::Names& names = family_of(m).names;
  emit({fmt::format("{}.weight", names.embedding), {m.vocab, m.hidden}, R::embedding, -1, -1});
  if (m.learned_positions)
    emit({fmt::format("{}.weight", names.positions), {m.max_position, m.hidden}, R::position_embedding, -1, -1});
}

void visit_back(const ModelSpec& m, const Emit& emit) {
  const std::string_view norm = family_of(m).names.final_norm;
  emit({fmt::format("{}.weight", norm), {m.hidden}, R::final_norm, -1, -1});
  if (m.layer_norm) emit({fmt::format("{}.bias", norm), {m.hidden}, R::final_norm_bias, -1, -1});
  if (!m.tie_embeddings) emit({"lm_head.weight", {m.vocab, m.hidden}, R::lm_head, -1, -1});
}

bool is_routed(R role) { return rule_of(role).stack > 0; }

/// Sum of numel with one routed expert standing for `experts` of them. long double, so that sizes read from a file
/// can be judged before integers overflow.
long double count(const ModelSpec& m, std::int64_t experts) {
  long double sum = 0, weight = 1;
  const Emit add = [&](const ParamSpec& p) {
    long double numel = weight * (is_routed(p.role) ? static_cast<long double>(experts) : 1.0L);
    for (std::int64_t extent : p.shape) numel *= static_cast<long double>(extent);
    sum += numel;
  };
  visit_front(m, add);
  visit_back(m, add);
  if (m.linear) {  // one layer of each kind stands for all of it
    std::int64_t linear = 0;
    int first[] = {-1, -1};
    for (int layer = 0; layer < m.layers; ++layer) {
      const bool is = m.is_linear_layer(layer);
      linear += is ? 1 : 0;
      if (first[is ? 1 : 0] < 0) first[is ? 1 : 0] = layer;
    }
    weight = static_cast<long double>(m.layers - linear);
    if (first[0] >= 0) visit_layer(m, first[0], 1, add);
    weight = static_cast<long double>(linear);
    if (first[1] >= 0) visit_layer(m, first[1], 1, add);
    return sum;
  }
  const std::int64_t dense = m.moe ? std::min(m.moe->first_dense_layers, m.layers) : m.layers;
  weight = static_cast<long double>(dense);
  if (dense > 0) visit_layer(m, 0, 1, add);
  weight = static_cast<long double>(m.layers - dense);
  if (m.layers > dense) visit_layer(m, dense, 1, add);
  return sum;
}

}  // namespace

std::vector<ParamSpec> parameters_of(const ModelSpec& model, const LayerFilter& wanted) {
  std::vector<ParamSpec> all;
  const Emit add = [&](ParamSpec p) { all.push_back(std::move(p)); };
  visit_front(model, add);
  visit_layers(model, wanted, add);
  visit_back(model, add);
  if (const auto patterns = frozen_patterns(model); !patterns.empty())
    for (ParamSpec& p : all) p.frozen = is_frozen(patterns, p.name);
  return all;
}

std::vector<LoraTarget> lora_targets_of(const ModelSpec& model) {
  std::vector<LoraTarget> out;
  for (const LoraTarget& t : family_of(model).adapters) {
    bool there = false;
    const Emit look = [&](const ParamSpec& p) { there |= p.role == t.base; };
    for (const std::int64_t layer : {std::int64_t{0}, model.layers - 1}) visit_layer(model, layer, 1, look);
    if (there) out.push_back(t);
  }
  return out;
}

std::vector<ParamSpec> adapters_of(const ModelSpec& model, const LayerFilter& wanted) {
  std::vector<ParamSpec> all;
  if (!model.lora.on()) return all;
  const std::int64_t rank = model.lora.rank;
  const std::string suffix = "weight";
  const Emit add = [&](const ParamSpec& p) {
    if (!model.adapts(p.role)) return;
    const LoraTarget& target = *lora_target(model, p.role);
    const std::string matrix = p.name.substr(0, p.name.size() - suffix.size());
    const std::string module = matrix.substr(0, matrix.rfind(target.module) + target.module.size()) + ".";
    bool shared = false;  // with a matrix before it, of the same layer and expert
    for (auto a = all.rbegin(); a != all.rend() && a->layer == p.layer && a->expert == p.expert && !shared; ++a)
      shared = a->role == target.a;
    if (!shared) all.push_back({module + "lora_A.weight", {rank, p.shape[1]}, target.a, p.layer, p.expert});
    all.push_back({matrix + "lora_B.weight", {p.shape[0], rank}, target.b, p.layer, p.expert});
  };
  visit_layers(model, wanted, add);
  return all;
}

long double approximate_parameter_count(const ModelSpec& model) {
  return count(model, model.moe ? model.moe->experts : 0);
}

std::int64_t parameter_count(const ModelSpec& model) {
  const long double n = approximate_parameter_count(model);
  HB_CHECK(n < 9.0e18L, "model {} has more parameters than 64 bits count", model.name);
  return static_cast<std::int64_t>(n);
}

std::int64_t active_parameter_count(const ModelSpec& model) {
  return static_cast<std::int64_t>(count(model, model.moe ? model.moe->experts_per_token : 0));
}

}  // namespace hotbunk
