// train.context_exchange: auto as a user runs it.
#include "tests/json.h"
#include "tests/run/program.h"

using namespace hotbunk;

TEST_CASE("every command takes the same exchange of keys and values where the scenario leaves it open") {
  const std::string scenario = (fs::path(source_folder) / "scenarios/context-parallel-cpu.yaml").string() +
                               " --set train.context_exchange=auto --set steps=1";
  const fs::path run = work_folder() / "exchange-run", simulated = work_folder() / "exchange-simulated";
  const auto exchange_of = [](const std::string& text) {
    const std::string key = "context_exchange: ";
    const std::size_t at = text.find(key);
    REQUIRE(at != std::string::npos);
    const std::size_t value = at + key.size();
    return text.substr(value, text.find_first_of(" \n", value) - value);
  };
  const auto kept = [&](const fs::path& folder) {
    std::ifstream in(folder / "scenario.yaml");
    return exchange_of(std::string(std::istreambuf_iterator<char>(in), {}));
  };
  const std::string chosen = exchange_of(hotbunk_command("plan --resolved " + scenario).out);
  CHECK((chosen == "ring" || chosen == "all-gather"));
  const Result2 ran = hotbunk_command(fmt::format("run {} --check --out {}", scenario, run.string()));
  INFO(ran.err);
  CHECK(ran.code == 0);
  CHECK_THAT(ran.err, Catch::Contains("note: auto: train.context_exchange " + chosen + ", "));
  must_run(fmt::format("simulate {} --out {}", scenario, simulated.string()));
  CHECK(kept(run) == chosen);
  CHECK(kept(simulated) == chosen);
  CHECK_THAT(hotbunk_command("layout " + scenario).out, Catch::Contains("Keys and values come by " + chosen + ", "));
  CHECK_THAT(hotbunk_command("lint " + scenario).err,
             Catch::Contains("note: auto: train.context_exchange " + chosen + ", "));
  CHECK_THAT(hotbunk_command("plan " + scenario).out, Catch::Contains("train.context_exchange auto: " + chosen + ", "));
  // All rows of a search have the exchange that the scenario's own has.
  const auto rows = [&](const std::string& exchange) {
    const auto searched =
        hotbunk_command(fmt::format("plan {} --set train.context_exchange={} --json", scenario, exchange));
    return json_from<nlohmann::json>(searched.out).at("search").at("best");
  };
  const nlohmann::json left_open = rows("auto");
  CHECK(left_open == rows(chosen));
  CHECK(left_open != rows(chosen == "ring" ? "all-gather" : "ring"));
}
