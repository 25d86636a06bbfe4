// What a YAML file may make of itself: aliases repeat values, and are bounded in values and in bytes.
#include <fmt/format.h>

#include <catch2/catch.hpp>

#include "spec/loader.h"
#include "spec/yaml_tree.h"

using namespace hotbunk;

namespace {

std::string aliases(std::size_t bytes, int count) {
  std::string text = fmt::format("a: &x {}\nb:\n", std::string(bytes, 'v'));
  for (int i = 0; i < count; ++i) text += "  - *x\n";
  return text;
}

void check_refused(const std::string& text) {
  const auto tree = parse_yaml(text, "laughs.yaml");
  REQUIRE_FALSE(tree);
  CHECK(tree.error()[0].code == "E201");
  CHECK(tree.error()[0].message == "anchors and aliases repeat more than 16.00 MiB");
  CHECK(tree.error()[0].where.line > 0);
}

}  // namespace

TEST_CASE("aliases of one long text are bounded by their bytes") {
  check_refused(aliases(1 << 20, 20));        // 21 MB of copies, of 21 values
  check_refused(aliases(1'300'000, 76'000));  // 99 GB
  CHECK(parse_yaml(aliases(1 << 10, 1000), "a.yaml").has_value());
}

TEST_CASE("anchors within anchors are copies too") {
  std::string text = std::string(1 << 20, 'v');
  for (int depth = 0; depth < 40; ++depth) text = fmt::format("[&a{} {}]", depth, text);
  check_refused(text);
}

TEST_CASE("a value of --set carries a name of bounded length, however long it is") {
  std::string list = "[1";
  for (int i = 0; i < 30'000; ++i) list += ",1";
  const auto scenario = load_scenario_text("model: qwen2.5-7b\n", "s.yaml", {"train.pipeline_split=" + list + "]"});
  REQUIRE_FALSE(scenario);
  for (const Diagnostic& d : scenario.error()) CHECK(d.where.file.size() < 300);
}

TEST_CASE("a key twice in one map is an error wherever it stands, with its path") {
  const auto tree = parse_yaml("a: {b: [{c: 1, c: 2}]}\nd: 1\nd: 2\n", "twice.yaml");
  REQUIRE_FALSE(tree);
  REQUIRE(tree.error().size() == 2);
  CHECK(tree.error()[0].message == "key a.b.c appears twice");
  CHECK(tree.error()[1].message == "key d appears twice");
  CHECK(tree.error()[1].where.line == 3);
}
