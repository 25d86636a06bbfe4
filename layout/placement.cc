#include "layout/placement.h"

#include "base/check.h"

namespace hotbunk {

Rectangle whole(const ParamSpec& parameter) {
  HB_CHECK(parameter.shape.size() == 1 || parameter.shape.size() == 2, "{} has {} dimensions", parameter.name,
           parameter.shape.size());
  return {{0, parameter.shape[0]}, {0, parameter.shape.size() == 2 ? parameter.shape[1] : 1}};
}

Range part_of(Range range, const Placement& placement, std::int64_t parts, std::int64_t index) {
  if (placement.kind == Placement::Kind::shard) {
    const std::int64_t size = round_up(ceil_div(range.size(), parts), placement.block);
    return {std::min(range.end, range.begin + index * size), std::min(range.end, range.begin + (index + 1) * size)};
  }
  if (placement.kind == Placement::Kind::shard_blocks) {
    const std::int64_t blocks = range.size() / placement.block;
    HB_CHECK(range.size() % placement.block == 0 && blocks > 0 && (blocks % parts == 0 || parts % blocks == 0),
             "{} rows in blocks of {} over {} ranks", range.size(), placement.block, parts);
    const std::int64_t held = std::max<std::int64_t>(1, blocks / parts);
    const std::int64_t first = index * blocks / parts;
    return {range.begin + first * placement.block, range.begin + (first + held) * placement.block};
  }
  return range;
}

Rectangle place(Rectangle box, const TensorPlacement& axes, const Mesh& mesh, std::int64_t rank) {
  for (const auto& [axis, placement] : axes) {
    Range& cut = placement.dim == 0 ? box.rows : box.cols;
    cut = part_of(cut, placement, mesh.extent(axis), mesh.coordinate(rank, axis));
  }
  return box;
}

bool is_vector(ParamRole role) {
  switch (role) {
    case ParamRole::final_norm:
    case ParamRole::final_norm_bias:
    case ParamRole::input_norm:
    case ParamRole::post_norm:
    case ParamRole::input_norm_bias:
    case ParamRole::post_norm_bias:
    case ParamRole::q_bias:
    case ParamRole::k_bias:
    case ParamRole::v_bias:
    case ParamRole::o_bias:
    case ParamRole::q_norm:
    case ParamRole::k_norm:
    case ParamRole::up_bias:
    case ParamRole::down_bias:
    case ParamRole::router_bias:
    case ParamRole::q_a_norm:
    case ParamRole::kv_a_norm:
    case ParamRole::attention_out_norm:
    case ParamRole::mlp_out_norm:
      return true;
    default:
      return false;
  }
}

std::optional<int> tensor_parallel_dim(ParamRole role) {
  switch (role) {
    case ParamRole::embedding:
    case ParamRole::lm_head:
    case ParamRole::q_proj:
    case ParamRole::q_bias:
    case ParamRole::q_b_proj:
    case ParamRole::kv_b_proj:
    case ParamRole::k_proj:
    case ParamRole::v_proj:
    case ParamRole::k_bias:
    case ParamRole::v_bias:
    case ParamRole::gate_proj:
    case ParamRole::up_proj:
    case ParamRole::up_bias:
    case ParamRole::shared_gate:
    case ParamRole::shared_up:
    case ParamRole::expert_gate:
    case ParamRole::expert_up:
    case ParamRole::q_lora_b:
    case ParamRole::k_lora_b:
    case ParamRole::v_lora_b:
    case ParamRole::gate_lora_b:
    case ParamRole::up_lora_b:
      return 0;
    case ParamRole::o_proj:
    case ParamRole::down_proj:
    case ParamRole::shared_down:
    case ParamRole::expert_down:
    case ParamRole::o_lora_a:
    case ParamRole::down_lora_a:
      return 1;
    default:
      return std::nullopt;  // norms, biases after a sum, routers, MLA's a-projections, learned positions, what of an
                            // adapter meets the stream
  }
}

TensorPlacement tensor_parallel(const ParamSpec& parameter, const ModelSpec& model, std::int64_t vocab_multiple) {
  const std::optional<int> dim = tensor_parallel_dim(parameter.role);
  if (!dim) return {};
  switch (parameter.role) {
    case ParamRole::embedding:
    case ParamRole::lm_head:
      return {{"tp", Placement::shard(*dim, vocab_multiple)}};
    case ParamRole::q_proj:
    case ParamRole::q_bias:
    case ParamRole::q_b_proj:
    case ParamRole::kv_b_proj:
    case ParamRole::o_proj:
    case ParamRole::q_lora_b:
    case ParamRole::o_lora_a:
      return {{"tp", Placement::shard_blocks(*dim, parameter.shape[static_cast<std::size_t>(*dim)] / model.heads)}};
    case ParamRole::k_proj:
    case ParamRole::v_proj:
    case ParamRole::k_bias:
    case ParamRole::v_bias:
    case ParamRole::k_lora_b:
    case ParamRole::v_lora_b:
      return {{"tp", Placement::shard_blocks(*dim, model.head_dim)}};
    case ParamRole::expert_gate:
    case ParamRole::expert_up:
    case ParamRole::expert_down:
      return {{"etp", Placement::shard(*dim)}};
    default:
      return {{"tp", Placement::shard(*dim)}};
  }
}

}  // namespace hotbunk
