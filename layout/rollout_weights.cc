#include "layout/rollout_weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "layout/packing.h"

namespace hotbunk {
namespace {

class RolloutRank {
 public:
  RolloutRank(const ModelSpec& model, std::int64_t tp, std::int64_t rank)
      : model_(model), tp_(tp), rank_(rank), heads_(heads_of_rank(model, tp, rank)), parameters_(model) {}

  std::vector<LocalWeight> weights() {
    weights_.push_back(table_slice("embedding", ParamRole::embedding));
    if (model_.learned_positions) weights_.push_back(table_slice("position_embedding", ParamRole::position_embedding));
    for (int layer = 0; layer < model_.layers; ++layer) add_layer(layer);
    norm("final_norm", -1, ParamRole::final_norm, ParamRole::final_norm_bias);
    if (parameters_.find(-1, ParamRole::lm_head)) weights_.push_back(table_slice("lm_head", ParamRole::lm_head));
    return std::move(weights_);
  }

 private:
  void add_layer(int layer) {
    const std::string prefix = fmt::format("layers.{}.", layer);
    norm(prefix + "input_norm", layer, ParamRole::input_norm, ParamRole::input_norm_bias);
    if (model_.mla) add_latent_attention(prefix, layer);
    else
      weights_.push_back(packed_heads(prefix + "qkv", layer, model_.hidden,
                                      {ParamRole::q_proj, ParamRole::k_proj, ParamRole::v_proj}));
    if (parameters_.find(layer, ParamRole::q_bias)) {
      weights_.push_back(
          packed_heads(prefix + "qkv_bias", layer, 1, {ParamRole::q_bias, ParamRole::k_bias, ParamRole::v_bias}));
    }
    if (parameters_.find(layer, ParamRole::q_norm)) {
      replicate(prefix + "q_norm", layer, ParamRole::q_norm);
      replicate(prefix + "k_norm", layer, ParamRole::k_norm);
    }
    weights_.push_back(column_slice(prefix + "o", layer, ParamRole::o_proj, rows_of(heads_.query, model_.value_dim())));
    if (model_.o_bias) replicate(prefix + "o_bias", layer, ParamRole::o_bias);
    if (model_.output_norms) replicate(prefix + "attention_out_norm", layer, ParamRole::attention_out_norm);
    norm(prefix + "post_norm", layer, ParamRole::post_norm, ParamRole::post_norm_bias);
    if (model_.output_norms) replicate(prefix + "mlp_out_norm", layer, ParamRole::mlp_out_norm);
    if (model_.is_moe_layer(layer)) return add_experts(prefix, layer);
    const Range intermediate = even_range(model_.intermediate, tp_, rank_);
    if (!model_.gated_mlp) {
      weights_.push_back(row_slice(prefix + "up", layer, ParamRole::up_proj, model_.hidden, intermediate));
      if (model_.mlp_bias)
        weights_.push_back(row_slice(prefix + "up_bias", layer, ParamRole::up_bias, 1, intermediate));
      weights_.push_back(column_slice(prefix + "down", layer, ParamRole::down_proj, intermediate));
      if (model_.mlp_bias) replicate(prefix + "down_bias", layer, ParamRole::down_bias);
      return;
    }
    weights_.push_back(WeightBuilder(prefix + "gate_up", layer, model_.hidden)
                           .add(parameters_.at(layer, ParamRole::gate_proj), intermediate, 0, down_by(intermediate))
                           .add(parameters_.at(layer, ParamRole::up_proj), intermediate, 0, down_by(intermediate))
                           .build());
    weights_.push_back(column_slice(prefix + "down", layer, ParamRole::down_proj, intermediate));
  }

  /// What makes latents is whole on every rank.
  void add_latent_attention(const std::string& prefix, int layer) {
    const MlaSpec& a = *model_.mla;
    const auto whole = [&](const char* name, ParamRole role) {
      const ParamSpec& p = parameters_.at(layer, role);
      weights_.push_back(WeightBuilder(prefix + name, layer, p.shape[1]).add(p, {0, p.shape[0]}).build());
    };
    const auto of_heads = [&](const char* name, ParamRole role, std::int64_t cols, std::int64_t of_one) {
      weights_.push_back(row_slice(prefix + name, layer, role, cols, rows_of(heads_.query, of_one)));
    };
    if (a.q_lora_rank > 0) {
      whole("q_a", ParamRole::q_a_proj);
      replicate(prefix + "q_a_norm", layer, ParamRole::q_a_norm);
      of_heads("q_b", ParamRole::q_b_proj, a.q_lora_rank, model_.head_dim);
    } else {
      of_heads("q", ParamRole::q_proj, model_.hidden, model_.head_dim);
    }
    whole("kv_a", ParamRole::kv_a_proj);
    replicate(prefix + "kv_a_norm", layer, ParamRole::kv_a_norm);
    of_heads("kv_b", ParamRole::kv_b_proj, a.kv_lora_rank, a.qk_nope_head_dim + a.v_head_dim);
  }

  /// Every expert's columns of this rank, expert by expert.
  void add_experts(const std::string& prefix, int layer) {
    const auto experts = static_cast<int>(model_.moe->experts);
    const Range inner = even_range(model_.moe->expert_intermediate, tp_, rank_);
    weights_.push_back(WeightBuilder(prefix + "router", layer, model_.hidden)
                           .add(parameters_.at(layer, ParamRole::router), {0, experts})
                           .build());
    WeightBuilder gate_up(prefix + "experts_gate_up", layer, model_.hidden),
        down(prefix + "experts_down", layer, inner.size());
    for (int e = 0; e < experts; ++e) {
      gate_up.add(parameters_.at(layer, ParamRole::expert_gate, e), inner, 0, down_by(inner))
          .add(parameters_.at(layer, ParamRole::expert_up, e), inner, 0, down_by(inner));
      down.add(parameters_.at(layer, ParamRole::expert_down, e), {0, model_.hidden}, inner.begin,
               {.cols = inner.size()});
    }
    weights_.push_back(gate_up.build());
    weights_.push_back(down.build());
    if (model_.moe->router_bias) replicate(prefix + "router_bias", layer, ParamRole::router_bias);
    if (model_.moe->shared_experts == 0) return;
    const Range shared = even_range(model_.moe->shared_experts * model_.moe->expert_intermediate, tp_, rank_);
    weights_.push_back(WeightBuilder(prefix + "shared_gate_up", layer, model_.hidden)
                           .add(parameters_.at(layer, ParamRole::shared_gate), shared, 0, down_by(shared))
                           .add(parameters_.at(layer, ParamRole::shared_up), shared, 0, down_by(shared))
                           .build());
    weights_.push_back(column_slice(prefix + "shared_down", layer, ParamRole::shared_down, shared));
  }

  struct HeadRoles {
    ParamRole query, key, value;
  };
  LocalWeight packed_heads(std::string name, int layer, std::int64_t cols, HeadRoles roles) const {
    return WeightBuilder(std::move(name), layer, cols)
        .add(parameters_.at(layer, roles.query), rows_of(heads_.query), 0, down_by(rows_of(heads_.query)))
        .add(parameters_.at(layer, roles.key), rows_of(heads_.key_value), 0, key_value_step())
        .add(parameters_.at(layer, roles.value), rows_of(heads_.key_value), 0, key_value_step())
        .build();
  }

  LocalWeight column_slice(std::string name, int layer, ParamRole role, Range columns) const {
    return WeightBuilder(std::move(name), layer, columns.size())
        .add(parameters_.at(layer, role), {0, model_.hidden}, columns.begin, {.cols = columns.size()})
        .build();
  }

  LocalWeight row_slice(std::string name, int layer, ParamRole role, std::int64_t cols, Range rows) const {
    return WeightBuilder(std::move(name), layer, cols).add(parameters_.at(layer, role), rows, 0, down_by(rows)).build();
  }

  /// Of the vocabulary's rows, or the positions'.
  LocalWeight table_slice(std::string name, ParamRole role) const {
    const ParamSpec& table = parameters_.at(-1, role);
    const std::int64_t rows = ceil_div(table.shape[0], tp_);
    return WeightBuilder(std::move(name), -1, model_.hidden)
        .add(table, chunk_range(table.shape[0], tp_, rank_), 0, {.rows = rows})
        .pad_to(rows)
        .build();
  }

  /// With its bias, where the model has them.
  void norm(const std::string& name, int layer, ParamRole weight, ParamRole bias) {
    replicate(name, layer, weight);
    if (model_.layer_norm) replicate(name + "_bias", layer, bias);
  }

  void replicate(std::string name, int layer, ParamRole role) {
    const ParamSpec& parameter = parameters_.at(layer, role);
    weights_.push_back(WeightBuilder(std::move(name), layer, 1).add(parameter, {0, parameter.shape[0]}).build());
  }

  static LocalWeight::Step down_by(Range rows) { return {.rows = rows.size()}; }
  LocalWeight::Step key_value_step() const {
    return {.rows = rows_of(heads_.key_value).size(), .repeat = std::max<std::int64_t>(1, tp_ / model_.kv_heads)};
  }
  Range rows_of(Range heads) const { return rows_of(heads, model_.head_dim); }
  static Range rows_of(Range heads, std::int64_t of_one) { return {heads.begin * of_one, heads.end * of_one}; }

  const ModelSpec& model_;
  std::int64_t tp_, rank_;
  HeadRanges heads_;
  ParameterIndex parameters_;
  std::vector<LocalWeight> weights_;
};

}  // namespace

HeadRanges heads_of_rank(const ModelSpec& model, std::int64_t tp, std::int64_t tp_rank) {
  const Range query = even_range(model.heads, tp, tp_rank);
  if (model.kv_heads >= tp) return {query, even_range(model.kv_heads, tp, tp_rank)};
  const std::int64_t head = tp_rank * model.kv_heads / tp;
  return {query, {head, head + 1}};
}

std::string why_not_rollout_tp(const ModelSpec& model, std::int64_t tp) {
  if (tp < 1) return fmt::format("tensor parallelism of {} ranks", tp);
  if (model.mlp_bias && (model.gated_mlp || model.moe)) return fmt::format("{} has biases in a gated MLP", model.name);
  if (model.heads % tp) return fmt::format("{} attention heads do not divide over tp {}", model.heads, tp);
  if (!model.mla && model.kv_heads % tp && tp % model.kv_heads) {
    return fmt::format("{} key/value heads neither divide over tp {} nor divide it", model.kv_heads, tp);
  }
  if (model.moe && model.moe->expert_intermediate % tp)
    return fmt::format("expert intermediate size {} does not divide over tp {}", model.moe->expert_intermediate, tp);
  if ((!model.moe || model.moe->first_dense_layers > 0) && model.intermediate % tp)
    return fmt::format("intermediate size {} does not divide over tp {}", model.intermediate, tp);
  return "";
}

std::vector<LocalWeight> rollout_weights(const ModelSpec& model, std::int64_t tp, std::int64_t tp_rank) {
  const std::string reason = why_not_rollout_tp(model, tp);
  HB_CHECK(reason.empty(), "{}", reason);
  HB_CHECK(tp_rank >= 0 && tp_rank < tp, "tp rank {} of {}", tp_rank, tp);
  return RolloutRank(model, tp, tp_rank).weights();
}

}  // namespace hotbunk
