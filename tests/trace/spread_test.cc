#include "trace/spread.h"

#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

namespace hotbunk {
namespace {

using Json = nlohmann::ordered_json;

Json summary_of(double iteration, double tokens, std::int64_t peak, std::int64_t host, double train) {
  return {{"iteration_seconds", iteration},
          {"tokens_per_second", tokens},
          {"memory",
           {{"peak_bytes", peak},
            {"mapped_peak_bytes", peak + 1},
            {"by_rank", {{{"host", {{"peak_bytes", host}}}}, {{"host", {{"peak_bytes", host / 2}}}}}}}},
          {"phase_totals", {{{"name", "rollout"}, {"mean", iteration - train}}, {{"name", "train"}, {"mean", train}}}}};
}

}  // namespace

TEST_CASE("spread: mean and standard deviation of a draw, by figure and phase") {
  // 8, 10 and 12 s: mean 10, deviation sqrt((4 + 0 + 4) / 2) = 2. Memory is the same in all.
  std::vector<DrawnFigures> draws;
  for (const double s : {8.0, 10.0, 12.0}) draws.push_back(figures_of(summary_of(s, 240 / s, 1 << 30, 64, 3.0)));
  const Json spread = spread_json(draws, 40);
  CHECK(spread.at("first") == 40);
  CHECK(spread.at("count") == 3);
  CHECK(
      spread.at("figures").at(0) ==
      Json{{"name", "iteration_seconds"}, {"mean", 10.0}, {"standard_deviation", 2.0}, {"least", 8.0}, {"most", 12.0}});
  // 30, 24, 20 tokens/s: mean 24.67, deviations 5.33, -0.67, -4.67: sqrt(50.67 / 2) = 5.03.
  CHECK(spread.at("figures").at(1).at("standard_deviation").get<double>() == Approx(5.0332).epsilon(1e-4));
  CHECK(spread.at("figures").at(2) == Json{{"name", "peak_bytes"},
                                           {"mean", 1073741824.0},
                                           {"standard_deviation", 0.0},
                                           {"least", 1073741824.0},
                                           {"most", 1073741824.0}});
  CHECK(spread.at("figures").at(4).at("name") == "host_peak_bytes");
  CHECK(spread.at("figures").at(4).at("most") == 64.0);  // of the fullest rank
  CHECK(spread.at("phases").size() == 2);
  CHECK(spread.at("phases").at(0).at("name") == "rollout");
  CHECK(spread.at("phases").at(0).at("mean") == 7.0);
  const std::string text = render_spread(spread, false);
  INFO(text);
  CHECK(text.find("Seeds 40 to 42: 3 draws of lengths") != std::string::npos);
  CHECK(text.find("20.0 %") != std::string::npos);
  CHECK(text.find("1.00 GiB") != std::string::npos);
  CHECK_THROWS(spread_json({draws.front()}, 0));
}

}  // namespace hotbunk
