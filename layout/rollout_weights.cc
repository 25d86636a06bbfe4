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
  RolloutRank(const ModelSpec& model, const EngineCut& cut, std::int64_t rank)
      : model_(model),
        cut_(cut),
        tp_(cut.tp),
        rank_(rank),
        sharers_(cut.attention_tp()),
        heads_(heads_of_rank(model, sharers_, rank % sharers_)),
        parameters_(model) {}

  std::vector<LocalWeight> weights() {
    const bool first = cut_.stage.first, last = cut_.stage.last;
    if (first || (last && model_.tie_embeddings)) weights_.push_back(table_slice("embedding", ParamRole::embedding));
    if (first && model_.learned_positions)
      weights_.push_back(table_slice("position_embedding", ParamRole::position_embedding));
    for (int layer = 0; layer < model_.layers; ++layer)
      if (cut_.has_layer(layer)) add_layer(layer);
    if (!last) return std::move(weights_);
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
    if (model_.attention_sinks)
      weights_.push_back(of_attention(row_slice(prefix + "sinks", layer, ParamRole::sinks, 1, heads_.query)));
    if (parameters_.find(layer, ParamRole::q_norm)) {
      replicate(prefix + "q_norm", layer, ParamRole::q_norm);
      replicate(prefix + "k_norm", layer, ParamRole::k_norm);
    }
    weights_.push_back(
        of_attention(column_slice(prefix + "o", layer, ParamRole::o_proj, rows_of(heads_.query, model_.value_dim()))));
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
      weights_.push_back(of_attention(row_slice(prefix + name, layer, role, cols, rows_of(heads_.query, of_one))));
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

  /// The columns of this rank of every expert that it has part of, expert by expert; and where groups have other
  /// experts, in their places those that the other groups have there.
  void add_experts(const std::string& prefix, int layer) {
    const auto experts = static_cast<int>(model_.moe->experts);
    const bool apart = cut_.experts > 1;
    const Range inner = of_expert(model_.moe->expert_intermediate);
    weights_.push_back(WeightBuilder(prefix + "router", layer, model_.hidden)
                           .add(parameters_.at(layer, ParamRole::router), {0, experts})
                           .build());
    WeightBuilder gate_up(prefix + "experts_gate_up", layer, model_.hidden),
        down(prefix + "experts_down", layer, inner.size());
    for (int e = 0; e < experts / cut_.experts; ++e) {
      gate_up.add(parameters_.at(layer, ParamRole::expert_gate, e), inner, 0, down_by_columns(inner))
          .add(parameters_.at(layer, ParamRole::expert_up, e), inner, 0, down_by_columns(inner));
      down.add(parameters_.at(layer, ParamRole::expert_down, e), {0, model_.hidden}, inner.begin,
               cut_.expert_columns() == 1 ? Step{} : Step{.cols = inner.size()});
    }
    weights_.push_back(gate_up.build());
    if (apart) share_places(weights_.back(), layer, {ParamRole::expert_gate, ParamRole::expert_up});
    weights_.push_back(down.build());
    if (apart) share_places(weights_.back(), layer, {ParamRole::expert_down});
    if (model_.moe->router_bias) replicate(prefix + "router_bias", layer, ParamRole::router_bias);
    if (model_.moe->biases) add_expert_biases(prefix, layer);
    if (model_.moe->shared_experts == 0) return;
    const Range shared = even_range(model_.moe->shared_experts * model_.moe->expert_intermediate, tp_, rank_);
    weights_.push_back(WeightBuilder(prefix + "shared_gate_up", layer, model_.hidden)
                           .add(parameters_.at(layer, ParamRole::shared_gate), shared, 0, down_by(shared))
                           .add(parameters_.at(layer, ParamRole::shared_up), shared, 0, down_by(shared))
                           .build());
    weights_.push_back(column_slice(prefix + "shared_down", layer, ParamRole::shared_down, shared));
  }

  /// Of gate and up those of this rank's columns; of what experts leave those of its part of the hidden size.
  void add_expert_biases(const std::string& prefix, int layer) {
    replicate(prefix + "router_linear_bias", layer, ParamRole::router_linear_bias);
    const Range inner = of_expert(model_.moe->expert_intermediate), out = of_expert(model_.hidden);
    WeightBuilder gate_up(prefix + "experts_gate_up_bias", layer, 1), down(prefix + "experts_down_bias", layer, 1);
    for (int e = 0; e < model_.moe->experts / cut_.experts; ++e) {
      gate_up.add(parameters_.at(layer, ParamRole::expert_gate_bias, e), inner, 0, down_by_columns(inner))
          .add(parameters_.at(layer, ParamRole::expert_up_bias, e), inner, 0, down_by_columns(inner));
      down.add(parameters_.at(layer, ParamRole::expert_down_bias, e), out, 0, down_by_columns(out));
    }
    weights_.push_back(gate_up.build());
    if (cut_.experts > 1)
      share_places(weights_.back(), layer, {ParamRole::expert_gate_bias, ParamRole::expert_up_bias});
    weights_.push_back(down.build());
    if (cut_.experts > 1) share_places(weights_.back(), layer, {ParamRole::expert_down_bias});
  }

  /// This rank's part of what the ranks share that have the same experts, and the step to the next one's.
  Range of_expert(std::int64_t width) const {
    return even_range(width, cut_.expert_columns(), rank_ % cut_.expert_columns());
  }
  LocalWeight::Step down_by_columns(Range rows) const { return cut_.expert_columns() == 1 ? Step{} : down_by(rows); }

  /// Of a stack of the first group's experts, with these parameters each: those of the other groups stand there as
  /// well.
  void share_places(LocalWeight& stack, int layer, const std::vector<ParamRole>& roles) const {
    const std::int64_t own = model_.moe->experts / cut_.experts;
    const std::vector<LocalWeight::Source> first = std::move(stack.sources);
    stack.sources.clear();
    for (std::int64_t holder = 0; holder < cut_.experts; ++holder)
      for (std::size_t i = 0; i < first.size(); ++i) {
        const auto expert = static_cast<int>(holder * own + static_cast<std::int64_t>(i / roles.size()));
        LocalWeight::Source source = first[i];
        source.parameter = parameters_.at(layer, roles[i % roles.size()], expert).name;
        source.holder = holder;
        stack.sources.push_back(std::move(source));
      }
  }

  using Step = LocalWeight::Step;
  struct HeadRoles {
    ParamRole query, key, value;
  };
  LocalWeight packed_heads(std::string name, int layer, std::int64_t cols, HeadRoles roles) const {
    const Range query = rows_of(heads_.query), key_value = rows_of(heads_.key_value);
    Step of_key_value = down_by(key_value);
    of_key_value.repeat = std::max<std::int64_t>(1, sharers_ / model_.kv_heads);
    return of_attention(WeightBuilder(std::move(name), layer, cols)
                            .add(parameters_.at(layer, roles.query), query, 0, down_by(query))
                            .add(parameters_.at(layer, roles.key), key_value, 0, of_key_value)
                            .add(parameters_.at(layer, roles.value), key_value, 0, of_key_value)
                            .build());
  }

  LocalWeight column_slice(std::string name, int layer, ParamRole role, Range columns) const {
    return WeightBuilder(std::move(name), layer, columns.size())
        .add(parameters_.at(layer, role), {0, model_.hidden}, columns.begin, Step{.cols = columns.size()})
        .build();
  }

  LocalWeight row_slice(std::string name, int layer, ParamRole role, std::int64_t cols, Range rows) const {
    return WeightBuilder(std::move(name), layer, cols).add(parameters_.at(layer, role), rows, 0, down_by(rows)).build();
  }

  /// Of the vocabulary's rows, or the positions'.
  LocalWeight table_slice(std::string name, ParamRole role) const {
    const ParamSpec& table = parameters_.at(-1, role);
    const std::int64_t rows = ceil_div(table.shape[0], sharers_);
    return of_attention(WeightBuilder(std::move(name), -1, model_.hidden)
                            .add(table, chunk_range(table.shape[0], sharers_, rank_ % sharers_), 0, {.rows = rows})
                            .pad_to(rows)
                            .build());
  }

  /// What the ranks that share attention have a part of; one rank by itself has all of it, as every other one.
  LocalWeight of_attention(LocalWeight w) const {
    w.of_attention = true;
    for (LocalWeight::Source& s : w.sources)
      if (cut_.attention > 1 && sharers_ == 1) s.step = {};
    return w;
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

  static Step down_by(Range rows) { return {.rows = rows.size()}; }
  Range rows_of(Range heads) const { return rows_of(heads, model_.head_dim); }
  static Range rows_of(Range heads, std::int64_t of_one) { return {heads.begin * of_one, heads.end * of_one}; }

  const ModelSpec& model_;
  const EngineCut& cut_;
  std::int64_t tp_, rank_, sharers_;  // of attention
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

std::string why_not_tensor_parallel(const ModelSpec& model, std::int64_t tp, std::int64_t expert_columns,
                                    std::int64_t attention_tp) {
  if (tp < 1) return fmt::format("tensor parallelism of {} ranks", tp);
  if (model.mlp_bias && (model.gated_mlp || model.moe)) return fmt::format("{} has biases in a gated MLP", model.name);
  const std::int64_t sharers = attention_tp > 0 ? attention_tp : tp;
  const std::string heads_over = sharers == tp ? fmt::format("tp {}", tp) : fmt::format("{} of tp {}", sharers, tp);
  if (model.heads % sharers) return fmt::format("{} attention heads do not divide over {}", model.heads, heads_over);
  if (!model.mla && model.kv_heads % sharers && sharers % model.kv_heads)
    return fmt::format("{} key/value heads neither divide over {} nor divide it", model.kv_heads, heads_over);
  const std::string over = expert_columns == tp ? fmt::format("tp {}", tp) : fmt::format("etp {}", expert_columns);
  if (model.moe && model.moe->expert_intermediate % expert_columns)
    return fmt::format("expert intermediate size {} does not divide over {}", model.moe->expert_intermediate, over);
  if (model.moe && model.moe->biases && model.hidden % expert_columns)
    return fmt::format("the hidden size {}, and with it the biases behind experts, does not divide over {}",
                       model.hidden, over);
  if ((!model.moe || model.moe->first_dense_layers > 0) && model.intermediate % tp)
    return fmt::format("intermediate size {} does not divide over tp {}", model.intermediate, tp);
  return "";
}

std::string why_not_rollout_tp(const ModelSpec& model, const EngineCut& cut) {
  if (model.moe && cut.experts > 1 && (cut.tp % cut.experts != 0 || model.moe->experts % cut.experts != 0))
    return fmt::format("{} experts over ep {} of tp {}: both have to divide by it", model.moe->experts, cut.experts,
                       cut.tp);
  return why_not_tensor_parallel(model, cut.tp, model.moe && cut.tp > 0 ? cut.expert_columns() : cut.tp,
                                 cut.attention_tp());
}

std::vector<LocalWeight> rollout_weights(const ModelSpec& model, const EngineCut& cut, std::int64_t tp_rank) {
  const std::string reason = why_not_rollout_tp(model, cut);
  HB_CHECK(reason.empty(), "{}", reason);
  HB_CHECK(tp_rank >= 0 && tp_rank < cut.tp, "tp rank {} of {}", tp_rank, cut.tp);
  return RolloutRank(model, cut, tp_rank).weights();
}

}  // namespace hotbunk
