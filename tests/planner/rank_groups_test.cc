// The closed form of where groups sit against the mesh's own groups, and what the order of dimensions costs.
#include <fmt/format.h>
#include <rapidcheck.h>

#include <algorithm>
#include <catch2/catch.hpp>

#include "layout/mesh.h"
#include "planner/answers/answers.h"
#include "spec/catalog.h"
#include "spec/loader.h"

using namespace hotbunk;

namespace {

/// A node of `ranks` GPUs in a cluster of whole nodes.
CostModel cost_of(std::int64_t ranks) {
  ClusterSpec cluster;
  cluster.gpus_per_node = ranks;
  return {Hardware{}, cluster};
}

std::vector<Rank> ranks_of(const std::vector<std::int64_t>& members) { return {members.begin(), members.end()}; }

void check_same(const GroupShape& closed, const CostModel& cost, const Mesh& mesh,
                const std::vector<std::string>& axes) {
  const GroupShape counted = cost.shape_of(ranks_of(mesh.group_of(0, axes)));
  RC_ASSERT(closed.ranks == counted.ranks);
  RC_ASSERT(closed.nodes == counted.nodes);
  RC_ASSERT(closed.per_node == counted.per_node);
  RC_ASSERT(closed.span == counted.span);
}

}  // namespace

TEST_CASE("where a layout's groups sit is what its mesh says, in any order of the dimensions") {
  CHECK(rc::check("closed form = mesh", [] {
    std::vector<std::string> names = {"tp", "cp", "ulysses", "ep", "dp", "pp"};
    for (std::size_t i = names.size(); i > 1; --i) std::swap(names[i - 1], names[*rc::gen::inRange<std::size_t>(0, i)]);
    const std::string order = fmt::format("{}", fmt::join(names, "-"));
    const auto size = [] { return std::int64_t{1} << *rc::gen::inRange(0, 4); };
    TrainPoint p{.dp = size(), .cp = size(), .ulysses = size(), .tp = size(), .pp = size()};
    p.etp = std::min(size(), p.tp);
    p.ep = std::min(size(), p.data_ranks() * p.tp / p.etp);
    const auto coin = [] { return *rc::gen::arbitrary<bool>(); };
    p.shard_over = {coin(), coin(), coin()};
    p.fsdp = std::min(size(), p.shard_over.over(p.dp, p.cp, p.ulysses));
    const CostModel cost = cost_of(std::int64_t{1} << *rc::gen::inRange(0, 5));
    RC_LOG(order + fmt::format(" dp {} cp {} ulysses {} tp {} pp {} ep {} etp {} on nodes of {}", p.dp, p.cp, p.ulysses,
                               p.tp, p.pp, p.ep, p.etp, cost.ranks_per_node()));
    const auto dense =
        mesh_from_order(order, {{"tp", p.tp}, {"cp", p.cp}, {"ulysses", p.ulysses}, {"dp", p.dp}, {"pp", p.pp}});
    const std::int64_t replicas = p.data_ranks() * p.tp / (p.ep * p.etp);
    const auto expert = mesh_from_order(order, {{"tp", p.etp}, {"ep", p.ep}, {"dp", replicas}, {"pp", p.pp}});
    RC_ASSERT(dense);
    RC_ASSERT(expert);
    const RankGroups g(p, axis_order(order), cost.ranks_per_node());
    check_same(g.tensor(), cost, *dense, {"tp"});
    check_same(g.context(), cost, *dense, {"cp"});
    check_same(g.ulysses(), cost, *dense, {"ulysses"});
    check_same(g.data(), cost, *dense, {"dp", "cp", "ulysses"});
    check_same(g.expert(), cost, *expert, {"ep"});
    check_same(g.expert_tensor(), cost, *expert, {"tp"});
    check_same(g.expert_replicas(), cost, *expert, {"dp"});
    RC_ASSERT(g.stages_agree() == check_expert_mesh(*dense, *expert).has_value());
    // A shard group and its repetitions make the data group.
    RC_ASSERT(g.shard().ranks == p.fsdp);
    RC_ASSERT(g.shard().ranks * g.replicas().ranks == p.data_ranks());
    std::vector<std::string> over;
    for (const auto& [named, axis] :
         {std::pair(p.shard_over.dp, "dp"), {p.shard_over.cp, "cp"}, {p.shard_over.ulysses, "ulysses"}})
      if (named || !p.shard_over.some()) over.emplace_back(axis);
    std::vector<Rank> nearest = ranks_of(dense->group_of(0, over));
    nearest.resize(static_cast<std::size_t>(p.fsdp));
    RC_ASSERT(g.shard().per_node == cost.shape_of(nearest).per_node);
    // A stage's neighbour: leaves the node where any rank's does.
    bool leaves = false;
    for (const auto& line : dense->groups({"pp"}))
      leaves = leaves || line.front() / cost.ranks_per_node() != line.back() / cost.ranks_per_node();
    RC_ASSERT((p.pp > 1 && g.pipeline_pair().nodes > 1) == leaves);
  }));
}

TEST_CASE("the order of the dimensions decides which of them pays for the network") {
  const auto priced = [](const char* order) {
    const auto s = load_scenario_text(
        "model: qwen2.5-32b\ncluster: {gpu: h100-sxm-80gb, nodes: 4}\nprofile: megatron\n"
        "train: {engine: megatron, layout: {dp: 4, tp: 4, pp: 2, sp: true}, recompute: full}\n"
        "rollout: {engine: sglang, layout: {tp: 4, dp: 8}}\n",
        "test.yaml", {fmt::format("train.layout.order={}", order)});
    REQUIRE(s);
    return ScenarioPricer::make(*s, catalog_root());
  };
  const auto ours = priced("tp-cp-ep-dp-pp"), pipeline_inside = priced("tp-pp-cp-ep-dp"),
             scattered = priced("dp-pp-tp-cp-ep");
  const auto at = [](const auto& pricer, Term t) {
    const TrainPrice price = (*pricer)->train().price((*pricer)->point().train);
    return price.seconds[static_cast<std::size_t>(t)];
  };
  REQUIRE(ours);
  REQUIRE(pipeline_inside);
  REQUIRE(scattered);
  // With pp behind tp two stages share a node and the data ranks do not.
  CHECK(at(pipeline_inside, Term::pipeline) < at(ours, Term::pipeline));
  CHECK(at(pipeline_inside, Term::tensor) == at(ours, Term::tensor));
  CHECK(at(scattered, Term::tensor) > 5.0 * at(ours, Term::tensor));
}
