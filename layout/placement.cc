#include "layout/placement.h"

#include "base/check.h"
#include "spec/parameter_roles.h"

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

bool is_vector(ParamRole role) { return rule_of(role).vector; }

std::optional<int> tensor_parallel_dim(ParamRole role) {
  switch (rule_of(role).cut) {
    case RoleCut::whole:
      return std::nullopt;
    case RoleCut::columns:
    case RoleCut::query_columns:
      return 1;
    default:
      return 0;
  }
}

TensorPlacement tensor_parallel(const ParamSpec& parameter, const ModelSpec& model, std::int64_t vocab_multiple) {
  const RoleRule& rule = rule_of(parameter.role);
  const std::optional<int> dim = tensor_parallel_dim(parameter.role);
  if (!dim) return {};
  switch (rule.cut) {
    case RoleCut::vocabulary:
      return {{"tp", Placement::shard(*dim, vocab_multiple)}};
    case RoleCut::query_rows:
    case RoleCut::query_columns:
      return {{"tp", Placement::shard_blocks(*dim, parameter.shape[static_cast<std::size_t>(*dim)] / model.heads)}};
    case RoleCut::key_rows:
      return {{"tp", Placement::shard_blocks(*dim, model.head_dim)}};
    default:
      return {{rule.stack > 0 ? "etp" : "tp", Placement::shard(*dim)}};
  }
}

}  // namespace hotbunk
