// What was measured on a GPU beside what the simulator says with the profile that was measured there.
#include <catch2/catch.hpp>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/json.h"
#include "tests/run/launched.h"

using namespace hotbunk;

TEST_CASE("with the profile of an H100 the simulator gives the iterations that were measured there") {
  // scripts/gpu on NVIDIA H100 80GB HBM3, 2026-11-27, commit 2e406358bc02: seconds of phases, mean of iterations 2
  // and 3.
  struct Measured {
    std::string set;
    std::map<std::string, double> phases;
  };
  const std::vector<Measured> measured = {{"",
                                           {{"sleep_optimizer", 0.7533},
                                            {"sleep_train", 0.3577},
                                            {"rollout", 1.2967},
                                            {"wake_train", 0.6160},
                                            {"old_logprobs", 0.0915},
                                            {"train", 0.2577}}},
                                          {"--set model=llama-3.1-8b --set model.num_hidden_layers=4",
                                           {{"sleep_optimizer", 1.0721},
                                            {"sleep_train", 0.5214},
                                            {"rollout", 1.0032},
                                            {"wake_train", 0.9047},
                                            {"old_logprobs", 0.0963},
                                            {"train", 0.2616}}}};
  for (const Measured& m : measured) {
    const auto said = hotbunk_command("simulate scenarios/llama-3.2-1b-h100.yaml --set steps=1 --json " + m.set);
    INFO(said.err);
    REQUIRE(said.code == 0);
    double total = 0.0, simulated_total = 0.0, apart = 0.0;
    const auto document = json_from<nlohmann::json>(said.out);
    for (const auto& row : document.at("phases")) {
      const auto it = m.phases.find(row.at("name").get<std::string>());
      if (it == m.phases.end()) continue;
      const double seconds = row.at("seconds").get<double>();
      INFO(m.set << ' ' << it->first << ": " << seconds << " s, measured " << it->second);
      CHECK(std::abs(seconds - it->second) < 0.25 * it->second);
      total += it->second, simulated_total += seconds, apart += std::abs(seconds - it->second);
    }
    CHECK(std::abs(simulated_total - total) < 0.08 * total);
    CHECK(apart < 0.12 * total);
  }
}
