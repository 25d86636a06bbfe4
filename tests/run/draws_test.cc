// `simulate --seeds` and `disturbances` from the outside.
#include <catch2/catch.hpp>
#include <cmath>
#include <nlohmann/json.hpp>

#include "tests/json.h"
#include "tests/run/program.h"

using namespace hotbunk;
using Json = nlohmann::json;

TEST_CASE("simulate --seeds is the mean and the deviation of the simulations with these seeds") {
  const std::string file =
      scenario("draws", 2, 1).string() + " --set 'workload.response_tokens={mean: 4, max: 8, distribution: uniform}'";
  std::vector<double> seconds;
  for (int seed = 7; seed < 10; ++seed) {
    const Result2 one = hotbunk_command(fmt::format("simulate {} --json --set seed={}", file, seed));
    INFO(one.err);
    REQUIRE(one.code == 0);
    CHECK_FALSE(json_from<Json>(one.out).contains("seeds"));
    seconds.push_back(json_from<Json>(one.out)["iteration_seconds"].get<double>());
  }
  const Result2 all = hotbunk_command(fmt::format("simulate {} --json --set seed=7 --seeds 3", file));
  INFO(all.err);
  REQUIRE(all.code == 0);
  const Json doc = json_from<Json>(all.out);
  CHECK(doc["iteration_seconds"] == seconds[0]);  // the document is the first draw's
  const Json& spread = doc["seeds"];
  CHECK(spread["first"] == 7);
  CHECK(spread["count"] == 3);
  const Json& iteration = spread["figures"][0];
  CHECK(iteration["name"] == "iteration_seconds");
  const double mean = (seconds[0] + seconds[1] + seconds[2]) / 3;
  CHECK(iteration["mean"].get<double>() == Approx(mean));
  double squares = 0;
  for (const double s : seconds) squares += (s - mean) * (s - mean);
  CHECK(squares > 0);
  CHECK(iteration["standard_deviation"].get<double>() == Approx(std::sqrt(squares / 2)));
  CHECK(spread["phases"].size() == doc["phase_totals"].size());
  const Result2 text = hotbunk_command(fmt::format("simulate {} --seeds 2", file));
  CHECK(text.out.find("Seeds 0 to 1: 2 draws of lengths") != std::string::npos);
  CHECK(hotbunk_command(fmt::format("simulate {} --seeds 2 --lengths x", file)).code == 2);
}

TEST_CASE("a straggler makes the simulated iteration longer, and plan says that it is without") {
  const std::string file = scenario("straggler", 2, 1).string(),
                    slow = file + " --set 'disturbances.slow_ranks=[{rank: 1, factor: 3}]'";
  const auto seconds = [](const std::string& s) {
    return json_from<Json>(hotbunk_command("simulate " + s + " --json").out)["iteration_seconds"].get<double>();
  };
  CHECK(seconds(slow) > 1.2 * seconds(file));
  const Result2 plain = hotbunk_command("plan " + file), noted = hotbunk_command("plan " + slow);
  CHECK(noted.out == plain.out);
  CHECK(plain.err.find("disturbances") == std::string::npos);
  CHECK(noted.err.find("note: disturbances are played by `simulate` only: the plan is without them") !=
        std::string::npos);
}
