// What answers say in words: how far a number was moved, which schedule is priced, who holds what, whose rates are
// sure.
#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <sstream>

#include "planner/answers/answers.h"
#include "spec/catalog.h"
#include "spec/loader.h"

namespace hotbunk {
namespace {

std::filesystem::path worked_file(const char* name) { return catalog_root().parent_path() / name; }

Scenario worked_scenario(const char* name, const std::vector<std::string>& sets = {}) {
  auto s = load_scenario(worked_file(name), sets);
  if (!s) FAIL(render(s.error()));
  return *s;
}

std::string words_of(const char* name, const std::vector<std::string>& sets = {}) {
  const auto p = ScenarioPricer::make(worked_scenario(name, sets), catalog_root());
  if (!p) FAIL(render(p.error()));
  return render(explain(**p));
}

constexpr const char *small = "qwen2.5-7b-colocated.yaml", *deep = "qwen2.5-32b-megatron.yaml",
                     *experts = "deepseek-v3-megatron.yaml";

}  // namespace

TEST_CASE("sensitivity says how far whole numbers and fractions were really moved, and folds what does nothing") {
  const std::vector<std::string> sets = {"rollout.memory_fraction=0.95", "algorithm.prompts=4"};
  const auto all = sensitivity(worked_scenario(small, sets), catalog_root());
  REQUIRE(all.has_value());
  const auto of = [&](const char* number) {
    for (const Sensitivity& s : *all)
      if (s.number == number) return s;
    FAIL(number);
    return Sensitivity{};
  };
  // 8 samples become 7 and 9, 4 prompts 3 and 5 where 10 % rounds to none, 0.95 no more than 1.
  CHECK(of("algorithm.samples_per_prompt").minus_change == Approx(-0.125));
  CHECK(of("algorithm.samples_per_prompt").plus_change == Approx(0.125));
  CHECK(of("algorithm.prompts").minus_change == Approx(-0.25));
  CHECK(of("algorithm.prompts").plus_change == Approx(0.25));
  CHECK(of("rollout.memory_fraction").plus_change == Approx(1 / 0.95 - 1));
  CHECK(of("gemm.efficiency").plus_change == Approx(0.1));
  const std::string text = render(*all);
  CHECK_THAT(text, Catch::Contains("changed by -12.5 and +12.5 %"));
  CHECK_THAT(text, Catch::Contains("no effect: ") && Catch::Contains("thread_switch"));
  // A line of nothing is there only to say what then does not fit.
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);)
    CHECK((line.find("+0.00 %    +0.00 %") == std::string::npos || line.find("does not fit") != std::string::npos));
}

TEST_CASE("a sweep over GPUs says whose efficiencies were fitted") {
  const auto rows = [](const char* gpus) {
    const auto r = sweep(worked_file(small), {"cluster.gpus_per_node=8"},
                         {*parse_axis(fmt::format("cluster.gpu={}", gpus))}, catalog_root());
    REQUIRE(r.has_value());
    return *r;
  };
  CHECK(standing_note(rows("h100-sxm-80gb,b200-sxm-180gb")).empty());
  CHECK(standing_note(rows("h800-sxm-80gb")).empty());
  CHECK_THAT(standing_note(rows("h100-sxm-80gb,h800-sxm-80gb")),
             Catch::Contains("h100-sxm-80gb: calibrated") && Catch::Contains("sibling h100-sxm-80gb, uncalibrated"));
  CHECK_THAT(standing_note(rows("h100-sxm-80gb,h20-sxm-96gb")), Catch::Contains("on H20, uncalibrated"));
  const auto twice = sweep(worked_file(small), {}, {*parse_axis("seed=1,2"), *parse_axis("seed=3")}, catalog_root());
  REQUIRE(!twice.has_value());
  CHECK(twice.error()[0].code == "E261");
}

TEST_CASE("explain names the micro-batches in flight, the schedule that is priced, and who shards the experts") {
  // One number in both places: of the whole moment and of what the layers keep.
  for (const char* schedule : {"1f1b", "gpipe"}) {
    const std::string text =
        words_of(deep, {fmt::format("train.pipeline_schedule={}", schedule), "train.recompute=none"});
    const auto flight =
        text.substr(text.find(" layers, ") + 9, text.find(" in flight of") - text.find(" layers, ") - 9);
    INFO(flight);
    CHECK_THAT(text, Catch::Contains(flight + " in flight on the fullest stage"));
    CHECK_THAT(text, Catch::Contains(std::string("schedule ") + schedule));
    CHECK((flight == "2 micro-batches") == (std::string(schedule) == "1f1b"));  // pp 2
  }
  CHECK_THAT(words_of(deep, {"train.pipeline_schedule=interleaved"}),
             Catch::Contains("schedule 1f1b: interleaved asks for a vpp of 2 or more"));
  CHECK_THAT(words_of(deep, {"train.pipeline_schedule=interleaved", "train.layout.vpp=2"}),
             Catch::Contains("schedule interleaved 1f1b in 2 chunks a stage"));
  CHECK_THAT(words_of(deep, {"train.pipeline_schedule=gpipe", "train.layout.vpp=2"}),
             Catch::Contains("schedule gpipe in 2 chunks a stage: every micro-batch is kept"));
  // DP 1 x CP 4 shards what is dense; experts over EP 32 exist once: 4 x 8 / 32.
  CHECK_THAT(words_of(experts), Catch::Contains("over 4 data ranks, experts over 1"));
  CHECK_THAT(words_of(small), !Catch::Contains("experts over"));
}

TEST_CASE("a rollout that is all tail says so, without a decode of 0 seconds") {
  // 512 sequences of an engine, as many slots: all run from the start.
  const std::string tail = words_of(small, {"rollout.max_running_requests=512"});
  CHECK_THAT(tail, Catch::Contains("512 from the start, the longest alone") && !Catch::Contains("    decode"));
  const std::string both = words_of(small);
  CHECK_THAT(both, Catch::Contains("steps of 256 sequences, ") && Catch::Contains("no more to admit"));
}

}  // namespace hotbunk
