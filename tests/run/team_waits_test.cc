// How teams of ranks wait: on cores that no other rank has, awake for a while.
#include "cli/team_waits.h"

#include <catch2/catch.hpp>

using hotbunk::team_waits;

TEST_CASE("an idle team sleeps at once where ranks share cores, and not where every thread has one") {
  using Variables = std::vector<std::pair<std::string, std::string>>;
  const Variables asleep = {{"OMP_WAIT_POLICY", "passive"}},
                  awake = {{"OMP_WAIT_POLICY", "passive"}, {"GOMP_SPINCOUNT", "2000"}};
  CHECK(team_waits(1, 2, 2) == awake);
  CHECK(team_waits(4, 4, 16) == awake);
  CHECK(team_waits(2, 2, 2) == asleep);
  CHECK(team_waits(1, 3, 2) == asleep);
  // Their share of the cores: it fits, unless there are more ranks than cores.
  CHECK(team_waits(1, 0, 2) == awake);
  CHECK(team_waits(3, 0, 8) == awake);
  CHECK(team_waits(4, 0, 2) == asleep);
}
