#include "planner/train/rank_groups.h"

#include <algorithm>

#include "base/check.h"
#include "planner/train/train_model.h"

namespace hotbunk {

std::string text_of(const ShardOver& over) {
  std::string out;
  for (const auto& [named, axis] : {std::pair(over.dp, "dp"), {over.cp, "cp"}, {over.ulysses, "ulysses"}})
    if (named) out += (out.empty() ? "" : "-") + std::string(axis);
  return out;
}

AxisOrder axis_order(std::string_view text) {
  constexpr std::string_view names[] = {"tp", "cp", "ulysses", "ep", "dp", "pp"};
  const bool all = text.find("ulysses") != std::string_view::npos;
  AxisOrder out = megatron_axes;
  std::string_view rest = text;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const std::string_view name = rest.substr(0, rest.find('-'));
    const auto* const found = std::find(std::begin(names), std::end(names), name);
    HB_CHECK(found != std::end(names), "'{}' is no order of the dimensions", text);
    out[i] = static_cast<RankAxis>(found - std::begin(names));
    if (!all && out[i] == RankAxis::cp) out[++i] = RankAxis::ulysses;
    rest.remove_prefix(std::min(rest.size(), name.size() + 1));
  }
  return out;
}

RankGroups::RankGroups(const TrainPoint& p, const AxisOrder& order, std::int64_t ranks_per_node)
    : node_(std::max<std::int64_t>(ranks_per_node, 1)),
      shard_ranks_(p.shard_ranks()),
      expert_shard_ranks_(p.expert_shard_ranks()),
      shard_over_(p.shard_over) {
  std::int64_t dense = 1, expert = 1;
  const auto next = [](Axis& axis, std::int64_t size, std::int64_t& stride) {
    axis = {size, stride};
    stride *= size;
  };
  for (const RankAxis axis : order) switch (axis) {
      case RankAxis::tp:
        next(tp_, p.tp, dense);
        next(etp_, p.etp, expert);
        break;
      case RankAxis::cp:
        next(cp_, p.cp, dense);
        break;
      case RankAxis::ulysses:
        next(ulysses_, p.ulysses, dense);
        break;
      case RankAxis::ep:
        next(ep_, p.ep, expert);
        break;
      case RankAxis::dp:
        next(dp_, p.dp, dense);
        next(edp_, p.expert_ranks(), expert);
        break;
      case RankAxis::pp:
        next(pp_, p.pp, dense);
        expert_stage_stride_ = expert;
        expert *= p.pp;
        break;
    }
}

/// Members of a group that spans these axes. Strides of one mesh nest, so that at most one axis is cut by the node: the
/// faster ones lie in it whole, the slower ones leave it at once.
GroupShape RankGroups::box(std::initializer_list<Axis> axes) const {
  GroupShape g;
  std::int64_t last = 0;
  for (const Axis& a : axes) {
    g.ranks *= a.size;
    g.per_node *= std::clamp<std::int64_t>(node_ / a.stride, 1, a.size);
    last += (a.size - 1) * a.stride;
    g.aligned = g.aligned && (a.size == 1 || a.stride % node_ == 0 || node_ % a.stride == 0);
  }
  g.nodes = (g.ranks + g.per_node - 1) / g.per_node;
  g.span = last / node_ + 1;
  return g;
}

/// The data axes cut into the part of one group of so many neighbours (first three) and its repetitions (last three).
std::array<RankGroups::Axis, 6> RankGroups::split_data(std::int64_t ranks) const {
  std::array<Axis, 6> out{cp_, ulysses_, dp_, {}, {}, {}};
  const auto by_stride = [](const Axis& a, const Axis& b) { return a.stride < b.stride; };
  auto* const last = out.begin() + 3;
  if (!shard_over_.some()) {
    std::sort(out.begin(), last, by_stride);
  } else {  // those that the group lies in first
    auto* at = out.begin();
    for (const bool named : {true, false}) {
      auto* const first = at;
      if (shard_over_.cp == named) *at++ = cp_;
      if (shard_over_.ulysses == named) *at++ = ulysses_;
      if (shard_over_.dp == named) *at++ = dp_;
      std::sort(first, at, by_stride);
    }
  }
  std::int64_t left = ranks;
  for (std::size_t i = 0; i < 3; ++i) {
    Axis& own = out[i];
    const std::int64_t taken = std::min(own.size, left);
    out[i + 3] = {own.size / taken, own.stride * taken};
    own.size = taken;
    left = std::max<std::int64_t>(1, left / taken);
  }
  return out;
}

GroupShape RankGroups::among(std::int64_t ranks) const {
  const auto a = split_data(ranks);
  return box({a[0], a[1], a[2]});
}

GroupShape RankGroups::shard() const {
  return shard_ranks_ == cp_.size * ulysses_.size * dp_.size ? data() : among(shard_ranks_);
}

GroupShape RankGroups::replicas() const {
  const auto a = split_data(shard_ranks_);
  return box({a[3], a[4], a[5]});
}

GroupShape RankGroups::pipeline_pair() const {
  const bool leaves = pp_.stride >= node_ || node_ % (pp_.stride * pp_.size) != 0;
  return {2, leaves ? 2 : 1, 1, leaves ? std::max<std::int64_t>(2, pp_.stride / node_ + 1) : 1,
          pp_.stride % node_ == 0};
}

}  // namespace hotbunk
