// The experts' mesh over the dense one (BACKGROUND B9): who has which part of which experts.
#include "spec/expert_mesh.h"

#include <catch2/catch.hpp>
#include <map>
#include <numeric>
#include <set>
#include <tuple>

#include "layout/train_mesh.h"

using namespace hotbunk;

TEST_CASE("B9: TP8 CP4 PP4 are 128 GPUs with DP1, over which EP32 ETP1 lies with EDP1 and 8 of 256 experts a rank") {
  const TrainLayout l{.dp = 1, .cp = 4, .tp = 8, .pp = 4, .ep = 32, .etp = 1, .sp = true};
  REQUIRE(l.ranks() == 128);
  const ExpertMesh mesh = expert_mesh(l, true);
  CHECK(mesh == ExpertMesh{.blocks = 1, .places = 8, .wholes = 8, .spread = 4});
  const ShardMesh ranks{.shards = 4, .tensor = 8, .experts = mesh, .stages = 4};
  CHECK(ranks.expert_shards(4) * ranks.expert_replicas() == 1);  // EDP
  CHECK(l.etp * l.ep * 1 * l.pp == 128);
  CHECK(256 / (mesh.wholes * mesh.spread) == 8);
}

TEST_CASE("blocks and places are Megatron's order of the experts' mesh: etp fastest, then ep, then copies") {
  int several = 0, split = 0, split_in_block = 0;
  for (const std::int64_t tp : {1, 2, 3, 4, 6, 8, 12})
    for (const std::int64_t dp : {1, 2, 3, 4, 6})
      for (std::int64_t etp = 1; etp <= tp * dp; ++etp)
        for (std::int64_t ep = 1; ep * etp <= tp * dp; ++ep) {
          if (tp * dp % (etp * ep) != 0) continue;
          CAPTURE(tp, dp, etp, ep);
          const TrainLayout l{.dp = dp, .tp = tp, .ep = ep, .etp = etp, .sp = true};
          const ExpertMesh mesh = expert_mesh(l, true);
          CHECK((mesh.columns() == etp && mesh.groups() == ep && mesh.blocks * mesh.places == tp));
          CHECK((mesh.parts > 1) == (tp % etp != 0));
          CHECK((mesh.places * mesh.spread == etp * ep && mesh.wholes * mesh.spread % mesh.parts == 0));
          // A choice sends a row to each part: so many of a block's places have columns of one of them.
          CHECK(etp == mesh.parts * mesh.columns_of_block());
          split += mesh.parts > 1 ? 1 : 0, split_in_block += mesh.parts > 1 && mesh.wholes > 1 ? 1 : 0;
          // What shards by data ranks divides by the blocks that have other experts, or these by nothing.
          CHECK((std::gcd(mesh.blocks, mesh.spread) == 1 && dp % mesh.spread == 0));
          several += mesh.blocks > 1 && mesh.spread > 1 ? 1 : 0;
          std::map<std::pair<std::int64_t, std::int64_t>, std::set<std::int64_t>> copies;
          const auto by_place = block_ranks(l, mesh);
          REQUIRE(std::ssize(by_place) == mesh.places);
          for (std::int64_t p = 0; p < mesh.places; ++p)
            for (std::size_t b = 0; b < by_place[static_cast<std::size_t>(p)].size(); ++b) {
              const std::int64_t rank = by_place[static_cast<std::size_t>(p)][b];
              const std::int64_t at = static_cast<std::int64_t>(b) % mesh.spread * mesh.places + p, part = at % etp,
                                 holder = at / etp;
              CHECK((part == rank % etp && holder == rank / etp % ep));
              copies[{part, holder}].insert(rank / (etp * ep));
            }
          CHECK(std::ssize(copies) == etp * ep);
          for (const auto& [which, of] : copies) CHECK(std::ssize(of) == tp * dp / (etp * ep));
        }
  CHECK((several > 10 && split > 10 && split_in_block > 10));
  CHECK(expert_mesh({.tp = 4}, false) == ExpertMesh{.places = 4});  // a model without experts
}
