// Where the groups of a training layout sit. How many members of a group share a node follows from the order of the
// dimensions over ranks (train.layout.order, fastest first) and the node's size: Megatron's default keeps tp inside
// nodes and sends pp across them.
#pragma once
#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "planner/cost/cost_model.h"

namespace hotbunk {

struct TrainPoint;

enum class RankAxis : std::uint8_t { tp, cp, ulysses, ep, dp, pp };
/// Some of the data ranks' dimensions; none of them: all.
struct ShardOver {
  bool dp = false, cp = false, ulysses = false;
  bool some() const { return dp || cp || ulysses; }
  std::int64_t over(std::int64_t of_dp, std::int64_t of_cp, std::int64_t of_ulysses) const {
    return (dp || !some() ? of_dp : 1) * (cp || !some() ? of_cp : 1) * (ulysses || !some() ? of_ulysses : 1);
  }
  friend auto operator<=>(const ShardOver&, const ShardOver&) = default;
};
/// As layout.shard_over has it; of all, "".
std::string text_of(const ShardOver&);
using AxisOrder = std::array<RankAxis, 6>;
inline constexpr AxisOrder megatron_axes{RankAxis::tp, RankAxis::cp, RankAxis::ulysses,
                                         RankAxis::ep, RankAxis::dp, RankAxis::pp};

/// Of a validated train.layout.order, e.g. "tp-cp-ep-dp-pp"; ulysses lies behind cp where it is left out. Throws
/// InternalError for anything else.
AxisOrder axis_order(std::string_view);

/// Closed form of layout/mesh.h's groups, of the one that rank 0 is in. The experts' mesh has etp for
/// tp, no cp, and as many data ranks as remain (Megatron's rank generator). No allocation.
class RankGroups {
 public:
  RankGroups(const TrainPoint&, const AxisOrder&, std::int64_t ranks_per_node);

  GroupShape tensor() const { return box({tp_}); }
  GroupShape context() const { return box({cp_}); }
  GroupShape ulysses() const { return box({ulysses_}); }
  /// Ranks that hold the same parameters but for sharding: dp x cp x ulysses.
  GroupShape data() const { return box({cp_, ulysses_, dp_}); }
  /// Those of them that divide the states: all, or under hybrid sharding the nearest ones.
  GroupShape shard() const;
  /// So many neighbours of a shard group.
  GroupShape among(std::int64_t ranks) const;
  /// Those that hold the same shard.
  GroupShape replicas() const;
  GroupShape expert() const { return box({ep_}); }
  GroupShape expert_tensor() const { return box({etp_}); }
  /// Ranks that hold the same experts.
  GroupShape expert_replicas() const { return box({edp_}); }
  /// Those of them in one shard group, which divide the experts' states, and those that hold the same shard of experts.
  GroupShape expert_shard() const { return box({{expert_shard_ranks_, edp_.stride}}); }
  GroupShape expert_shard_replicas() const {
    return box({{edp_.size / expert_shard_ranks_, edp_.stride * expert_shard_ranks_}});
  }
  /// Two neighbouring pipeline stages: on different nodes when at least some of them are.
  GroupShape pipeline_pair() const;
  /// A rank is in the same stage for its dense and its expert parameters.
  bool stages_agree() const { return pp_.size == 1 || pp_.stride == expert_stage_stride_; }

 private:
  struct Axis {
    std::int64_t size = 1, stride = 1;
  };
  GroupShape box(std::initializer_list<Axis>) const;
  std::array<Axis, 6> split_data(std::int64_t ranks) const;

  std::int64_t node_, shard_ranks_, expert_shard_ranks_;
  ShardOver shard_over_;
  Axis tp_, cp_, ulysses_, dp_, pp_, ep_, etp_, edp_;
  std::int64_t expert_stage_stride_ = 1;
};

}  // namespace hotbunk
