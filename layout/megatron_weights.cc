#include "layout/megatron_weights.h"

#include <fmt/format.h>

#include "base/check.h"
#include "layout/packing.h"

namespace hotbunk {

LocalWeight megatron_qkv(const ModelSpec& model, int layer, std::int64_t tp, std::int64_t tp_rank) {
  HB_CHECK(tp_rank >= 0 && tp_rank < tp, "tp rank {} of {}", tp_rank, tp);
  const ParameterIndex parameters(model);
  const auto rows = [&](std::int64_t begin, std::int64_t end) {
    return Range{begin * model.head_dim, end * model.head_dim};
  };
  const HeadRanges heads = heads_of_rank(model, tp, tp_rank);
  const std::int64_t per_group = heads.query.size() / heads.key_value.size();
  WeightBuilder builder(fmt::format("layers.{}.qkv", layer), layer, model.hidden);
  std::int64_t query = heads.query.begin;
  for (std::int64_t kv = heads.key_value.begin; kv < heads.key_value.end; ++kv, query += per_group) {
    builder.add(parameters.at(layer, ParamRole::q_proj), rows(query, query + per_group))
        .add(parameters.at(layer, ParamRole::k_proj), rows(kv, kv + 1))
        .add(parameters.at(layer, ParamRole::v_proj), rows(kv, kv + 1));
  }
  return builder.build();
}

LocalWeight megatron_gate_up(const ModelSpec& model, int layer, std::int64_t tp, std::int64_t tp_rank) {
  HB_CHECK(tp_rank >= 0 && tp_rank < tp, "tp rank {} of {}", tp_rank, tp);
  const ParameterIndex parameters(model);
  const Range rows = even_range(model.intermediate, tp, tp_rank);
  return WeightBuilder(fmt::format("layers.{}.gate_up", layer), layer, model.hidden)
      .add(parameters.at(layer, ParamRole::gate_proj), rows)
      .add(parameters.at(layer, ParamRole::up_proj), rows)
      .build();
}

}  // namespace hotbunk
