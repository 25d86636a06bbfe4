// How large teams of ranks are, and how they wait: on cores that no other rank has, awake for a while.
#include "cli/teams.h"

#include <catch2/catch.hpp>

using hotbunk::check_thread_limit;
using hotbunk::team_waits;
using hotbunk::threads_of_rank;

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

TEST_CASE("a rank has the threads that were asked for, or its share of the cores, if OpenMP gives a team so many") {
  CHECK(threads_of_rank(4, 3, 2) == 3);
  CHECK(threads_of_rank(3, 0, 8) == 2);
  CHECK(threads_of_rank(4, 0, 2) == 1);
  CHECK(check_thread_limit(2, 2));
  CHECK(check_thread_limit(2, 3));
  const auto refused = check_thread_limit(3, 2);
  REQUIRE(!refused);
  CHECK(refused.error().front().code == "E710");
}
