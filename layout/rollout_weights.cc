#include "layout/rollout_weights.h"

#include <fmt/format.h>

#include <map>
#include <utility>

#include "base/check.h"

namespace hotbunk {
namespace {

// Fills one buffer from top to bottom with row blocks of parameters, each block cut to the columns [cols.begin,
// cols.end).
class BufferBuilder {
 public:
  BufferBuilder(std::string name, int layer, std::int64_t cols) {
    weight_.name = std::move(name);
    weight_.layer = layer;
    weight_.cols = cols;
  }

  BufferBuilder& add(const ParamSpec& parameter, Range rows, std::int64_t col_begin = 0) {
    if (rows.size() > 0) {
      weight_.sources.push_back(
          {parameter.name,
           {rows.begin, rows.end, col_begin, col_begin + weight_.cols, weight_.rows * weight_.cols, weight_.cols}});
    }
    weight_.rows += rows.size();
    return *this;
  }

  BufferBuilder& pad_to(std::int64_t rows) {
    weight_.rows = rows;
    return *this;
  }

  LocalWeight build() { return std::move(weight_); }

 private:
  LocalWeight weight_;
};

class RolloutRank {
 public:
  RolloutRank(const ModelSpec& model, std::int64_t tp, std::int64_t rank)
      : model_(model), tp_(tp), rank_(rank), heads_(heads_of_rank(model, tp, rank)), parameters_(parameters_of(model)) {
    for (const ParamSpec& parameter : parameters_) by_place_[{parameter.layer, parameter.role}] = &parameter;
  }

  std::vector<LocalWeight> weights() {
    weights_.push_back(vocabulary_slice("embedding", ParamRole::embedding));
    for (int layer = 0; layer < model_.layers; ++layer) add_layer(layer);
    replicate("final_norm", -1, ParamRole::final_norm);
    if (find(-1, ParamRole::lm_head)) weights_.push_back(vocabulary_slice("lm_head", ParamRole::lm_head));
    return std::move(weights_);
  }

 private:
  void add_layer(int layer) {
    const std::string prefix = fmt::format("layers.{}.", layer);
    replicate(prefix + "input_norm", layer, ParamRole::input_norm);
    weights_.push_back(
        packed_heads(prefix + "qkv", layer, model_.hidden, {ParamRole::q_proj, ParamRole::k_proj, ParamRole::v_proj}));
    if (find(layer, ParamRole::q_bias)) {
      weights_.push_back(
          packed_heads(prefix + "qkv_bias", layer, 1, {ParamRole::q_bias, ParamRole::k_bias, ParamRole::v_bias}));
    }
    if (find(layer, ParamRole::q_norm)) {
      replicate(prefix + "q_norm", layer, ParamRole::q_norm);
      replicate(prefix + "k_norm", layer, ParamRole::k_norm);
    }
    weights_.push_back(column_slice(prefix + "o", layer, ParamRole::o_proj, rows_of(heads_.query)));
    replicate(prefix + "post_norm", layer, ParamRole::post_norm);
    const Range intermediate = even_range(model_.intermediate, tp_, rank_);
    weights_.push_back(BufferBuilder(prefix + "gate_up", layer, model_.hidden)
                           .add(at(layer, ParamRole::gate_proj), intermediate)
                           .add(at(layer, ParamRole::up_proj), intermediate)
                           .build());
    weights_.push_back(column_slice(prefix + "down", layer, ParamRole::down_proj, intermediate));
  }

  struct HeadRoles {
    ParamRole query, key, value;
  };
  LocalWeight packed_heads(std::string name, int layer, std::int64_t cols, HeadRoles roles) const {
    return BufferBuilder(std::move(name), layer, cols)
        .add(at(layer, roles.query), rows_of(heads_.query))
        .add(at(layer, roles.key), rows_of(heads_.key_value))
        .add(at(layer, roles.value), rows_of(heads_.key_value))
        .build();
  }

  LocalWeight column_slice(std::string name, int layer, ParamRole role, Range columns) const {
    return BufferBuilder(std::move(name), layer, columns.size())
        .add(at(layer, role), {0, model_.hidden}, columns.begin)
        .build();
  }

  LocalWeight vocabulary_slice(std::string name, ParamRole role) const {
    return BufferBuilder(std::move(name), -1, model_.hidden)
        .add(at(-1, role), chunk_range(model_.vocab, tp_, rank_))
        .pad_to(ceil_div(model_.vocab, tp_))
        .build();
  }

  void replicate(std::string name, int layer, ParamRole role) {
    const ParamSpec& parameter = at(layer, role);
    weights_.push_back(BufferBuilder(std::move(name), layer, 1).add(parameter, {0, parameter.shape[0]}).build());
  }

  Range rows_of(Range heads) const { return {heads.begin * model_.head_dim, heads.end * model_.head_dim}; }

  const ParamSpec* find(int layer, ParamRole role) const {
    const auto found = by_place_.find({layer, role});
    return found == by_place_.end() ? nullptr : found->second;
  }
  const ParamSpec& at(int layer, ParamRole role) const {
    const ParamSpec* parameter = find(layer, role);
    HB_CHECK(parameter, "{} has no parameter of role {} in layer {}", model_.name, static_cast<int>(role), layer);
    return *parameter;
  }

  const ModelSpec& model_;
  std::int64_t tp_, rank_;
  HeadRanges heads_;
  std::vector<ParamSpec> parameters_;
  std::map<std::pair<int, ParamRole>, const ParamSpec*> by_place_;
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
  if (model.moe || model.mla || !model.gated_mlp || model.learned_positions || model.layer_norm || model.o_bias ||
      model.mlp_bias) {
    return fmt::format("{} is not a dense Llama-like decoder", model.name);
  }
  if (model.heads % tp) return fmt::format("{} attention heads do not divide over tp {}", model.heads, tp);
  if (model.kv_heads % tp && tp % model.kv_heads) {
    return fmt::format("{} key/value heads neither divide over tp {} nor divide it", model.kv_heads, tp);
  }
  if (model.intermediate % tp)
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
