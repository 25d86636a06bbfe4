#include "layout/mesh.h"

#include <rapidcheck.h>

#include <catch2/catch.hpp>
#include <set>

#include "base/check.h"

using namespace hotbunk;
using Ranks = std::vector<std::int64_t>;

TEST_CASE("BACKGROUND B12: Megatron's default order, 64 GPUs, TP4 PP4 DP4: rank = tp + 4 dp + 16 pp") {
  const Mesh mesh = mesh_from_order(megatron_order, {{"tp", 4}, {"dp", 4}, {"pp", 4}}).value();
  REQUIRE(mesh.size() == 64);
  for (std::int64_t rank = 0; rank < 64; ++rank) {
    CHECK(rank == mesh.coordinate(rank, "tp") + 4 * mesh.coordinate(rank, "dp") + 16 * mesh.coordinate(rank, "pp"));
  }
  CHECK(mesh.group_of(21, {"tp"}) == Ranks{20, 21, 22, 23});
  CHECK(mesh.group_of(21, {"dp"}) == Ranks{17, 21, 25, 29});
  CHECK(mesh.group_of(21, {"pp"}) == Ranks{5, 21, 37, 53});
  CHECK(mesh.groups({"tp", "dp"}).at(1) == mesh.group_of(16, {"dp", "tp"}));
}

TEST_CASE("The order with pp before dp puts rank 4 into pipeline stage 1") {
  const Mesh mesh = mesh_from_order("tp-pp-dp", {{"tp", 4}, {"dp", 4}, {"pp", 4}}).value();
  CHECK(mesh.coordinate(4, "pp") == 1);
  CHECK(mesh.coordinate(4, "dp") == 0);
}

TEST_CASE("BACKGROUND C2: 16 GPUs, SP 4: mesh (dp 4, sp 4), group 0 = ranks 0-3") {
  const Mesh mesh({{"sp", 4}, {"dp", 4}});
  CHECK(mesh.groups({"sp"}).at(0) == Ranks{0, 1, 2, 3});
  CHECK(mesh.groups({"sp"}).size() == 4);
}

TEST_CASE("BACKGROUND B9: 128 GPUs hold a dense mesh TP8 CP4 PP4 and an expert mesh EP32 ETP1 PP4") {
  // 128 / (8 * 4 * 4) = DP 1 and 128 / (32 * 1 * 4) = EDP 1.
  const Mesh dense = mesh_from_order("tp-cp-dp-pp", {{"tp", 8}, {"cp", 4}, {"dp", 1}, {"pp", 4}}).value();
  const Mesh expert = mesh_from_order("etp-ep-edp-pp", {{"etp", 1}, {"ep", 32}, {"edp", 1}, {"pp", 4}}).value();
  CHECK(dense.size() == 128);
  CHECK(check_expert_mesh(dense, expert));

  const Mesh fewer = mesh_from_order("etp-ep-edp-pp", {{"ep", 16}, {"pp", 4}}).value();
  CHECK(check_expert_mesh(dense, fewer).error().at(0).code == "E242");
  const Mesh other_place = mesh_from_order("pp-etp-ep-edp", {{"ep", 32}, {"pp", 4}}).value();
  const Status status = check_expert_mesh(dense, other_place);
  REQUIRE_FALSE(status);
  CHECK(status.error().at(0).code == "E243");
  CHECK(
      status.error().at(0).notes.at(0) ==
      "rank 1: stage 0 of tp 8 x cp 4 x dp 1 x pp 4 = 128 ranks, stage 1 of pp 4 x etp 1 x ep 32 x edp 1 = 128 ranks");
}

TEST_CASE("A mesh over ranks in another order has their places, and groups of them") {
  const Mesh mesh({{"etp", 2}, {"ep", 3}},
                  {4, 0, 5, 1, 3, 2});  // (etp, ep): rank 4 is (0, 0), 0 is (1, 0), 5 is (0, 1)
  CHECK((mesh.coordinate(4, "etp") == 0 && mesh.coordinate(4, "ep") == 0));
  CHECK((mesh.coordinate(0, "etp") == 1 && mesh.coordinate(0, "ep") == 0));
  CHECK((mesh.coordinate(5, "etp") == 0 && mesh.coordinate(2, "ep") == 2));
  CHECK(mesh.group_of(5, {"etp"}) == Ranks{1, 5});
  CHECK(mesh.group_of(5, {"ep"}) == Ranks{3, 4, 5});
  CHECK(mesh.groups({"etp"}) == std::vector<Ranks>{{0, 4}, {1, 5}, {2, 3}});
  CHECK_THROWS_AS(Mesh({{"tp", 2}}, {0, 0}), InternalError);
  CHECK_THROWS_AS(Mesh({{"tp", 2}}, {0, 1, 2}), InternalError);
}

TEST_CASE("An order that is wrong says where, all mistakes at once") {
  const Result<Mesh> mesh = mesh_from_order("tp-dp-tp", {{"tp", 2}, {"dp", 0}, {"pp", 4}, {"cp", 1}});
  REQUIRE_FALSE(mesh);
  REQUIRE(mesh.error().size() == 3);
  CHECK(mesh.error()[0].message == "axis 'dp' has size 0");
  CHECK(mesh.error()[1].message == "rank order 'tp-dp-tp' names the axis 'tp' twice");
  CHECK(mesh.error()[2].message == "rank order 'tp-dp-tp' does not place the axis 'pp' of size 4");
  CHECK_THROWS_AS(Mesh({{"tp", 2}}).coordinate(2, "tp"), InternalError);
  CHECK_THROWS_AS(Mesh({{"tp", 2}}).extent("pp"), InternalError);
}

TEST_CASE("Groups partition the ranks, and coordinates identify them") {
  REQUIRE(rc::check("mesh", [] {
    const std::vector<MeshAxis> axes = {
        {"a", *rc::gen::inRange(1, 5)}, {"b", *rc::gen::inRange(1, 5)}, {"c", *rc::gen::inRange(1, 5)}};
    const Mesh mesh(axes);
    std::set<Ranks> coordinates;
    for (std::int64_t rank = 0; rank < mesh.size(); ++rank) {
      coordinates.insert({mesh.coordinate(rank, "a"), mesh.coordinate(rank, "b"), mesh.coordinate(rank, "c")});
    }
    RC_ASSERT(static_cast<std::int64_t>(coordinates.size()) == mesh.size());
    for (const std::vector<std::string>& along :
         std::vector<std::vector<std::string>>{{"a"}, {"b"}, {"c"}, {"a", "c"}, {"c", "b"}, {"a", "b", "c"}, {}}) {
      std::int64_t extent = 1;
      for (const std::string& axis : along) extent *= mesh.extent(axis);
      std::set<std::int64_t> seen;
      for (const Ranks& group : mesh.groups(along)) {
        RC_ASSERT(static_cast<std::int64_t>(group.size()) == extent);
        for (std::int64_t rank : group) {
          RC_ASSERT(seen.insert(rank).second);
          RC_ASSERT(mesh.group_of(rank, along) == group);
        }
      }
      RC_ASSERT(static_cast<std::int64_t>(seen.size()) == mesh.size());
    }
  }));
}
