#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include "planner/answers/answers.h"
#include "spec/catalog.h"
#include "tests/json.h"
#include "tests/paths.h"

namespace hotbunk {

TEST_CASE("axes of a sweep") {
  using Points = std::vector<std::vector<std::string>>;
  CHECK(parse_axis("a.b=1,2,4")->points == Points{{"1"}, {"2"}, {"4"}});
  CHECK(parse_axis("a=2..8:3")->points == Points{{"2"}, {"5"}, {"8"}});
  CHECK(parse_axis("a=0.1..0.3:0.1")->points == Points{{"0.1"}, {"0.2"}, {"0.3"}});
  CHECK(parse_axis("a=-1..0.5:0.75")->points == Points{{"-1.00"}, {"-0.25"}, {"0.50"}});
  CHECK(parse_axis("a=1..2")->points == Points{{"1"}, {"2"}});
  // Lists, maps and quotes keep their commas and colons; paths their dots.
  CHECK(parse_axis("a=[8,12],[10,10]")->points == Points{{"[8,12]"}, {"[10,10]"}});
  CHECK(parse_axis("a=../x.json,../y.json")->points == Points{{"../x.json"}, {"../y.json"}});
  // Keys that move together.
  const auto linked = parse_axis("n,t.dp,m=1:8:{a: 1, b: 2},2:16:'x:y'");
  REQUIRE(linked.has_value());
  CHECK(linked->keys == std::vector<std::string>{"n", "t.dp", "m"});
  CHECK(linked->points == Points{{"1", "8", "{a: 1, b: 2}"}, {"2", "16", "'x:y'"}});
  CHECK(linked->name() == "n, t.dp, m");
  CHECK(linked->label(0) == "1:8:{a: 1, b: 2}");
  for (const char* bad : {"a=0.1..0.2:0",
                          "a=1...3",
                          "a=.5..1",
                          "a=0.1..9e9",
                          "a=0.0000000001..1",
                          "a=1..2:",
                          "a=0..100:0.001",
                          "a=9223372036854775807..9223372036854775807:0.5",
                          "",
                          "a",
                          "=1",
                          "a=",
                          "a=1,,2",
                          "a=5..1",
                          "a=1..9:0",
                          "a=0..99999999999",
                          "a=x..3",
                          "a,=1:2",
                          "a,b=1",
                          "a,b=1:2,3",
                          "a,b=1:2:3",
                          "a,b=1:"})
    CHECK_FALSE(parse_axis(bad).has_value());
  CHECK_THAT(parse_axis("a,b=1:2,3").error()[0].notes.at(0),
             Catch::Contains("2 keys move together, '3' has 1 value for them"));
}

TEST_CASE("dimensions that follow the nodes are swept with them") {
  const auto axis = parse_axis("cluster.nodes,train.layout.dp,rollout.layout.dp=1:4:2,2:8:4,4:16:8");
  REQUIRE(axis.has_value());
  const std::string file = std::string(source_folder) + "/scenarios/qwen2.5-7b-colocated.yaml";
  const auto rows = sweep(file, {}, {*axis}, catalog_root());
  REQUIRE((rows.has_value() && rows->size() == 3));
  for (const SweepRow& r : *rows) CHECK((r.valid && r.fits));
  // One row is what the file itself says, and more nodes are faster.
  CHECK((*rows)[0].values == std::vector<std::string>{"1", "4", "2"});
  CHECK((*rows)[1].iteration_seconds < (*rows)[0].iteration_seconds);
  CHECK((*rows)[2].iteration_seconds < (*rows)[1].iteration_seconds);
  CHECK_THAT(to_csv({*axis}, *rows), Catch::StartsWith("cluster.nodes,train.layout.dp,rollout.layout.dp,fits,") &&
                                         Catch::Contains("\n2,8,4,yes,"));
  // The same rows where the two dimensions are what the GPUs leave.
  const auto open = sweep(file, {"train.layout.dp=auto", "rollout.layout.dp=auto"},
                          {*parse_axis("cluster.nodes=1,2,4")}, catalog_root());
  REQUIRE((open.has_value() && open->size() == 3));
  for (std::size_t i = 0; i < 3; ++i) CHECK((*open)[i].iteration_seconds == (*rows)[i].iteration_seconds);
  const auto doc = json_from<nlohmann::json>(to_json({*axis}, *rows));
  CHECK(doc["axes"] == nlohmann::json({"cluster.nodes", "train.layout.dp", "rollout.layout.dp"}));
  CHECK(doc["rows"][2]["values"] == nlohmann::json({"4", "16", "8"}));
  const auto twice = sweep(file, {}, {*parse_axis("seed,seed=1:2")}, catalog_root());
  REQUIRE(!twice.has_value());
  CHECK(twice.error()[0].code == "E261");
  // A list in a cell of the table stands in quotes.
  SweepRow listed;
  listed.values = {"[8, 20]"};
  CHECK_THAT(to_csv({{{"train.pipeline_split"}, {{"[8, 20]"}}}}, {listed}), Catch::Contains("\n\"[8, 20]\",invalid,"));
}

}  // namespace hotbunk
