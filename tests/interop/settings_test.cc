// Four forms of a launch, one list of keys.
#include "interop/settings.h"

#include <catch2/catch.hpp>

#include "tests/interop/launches.h"

namespace hotbunk {
namespace {

ShellCommand command(const std::vector<std::string>& words) {
  ShellCommand out;
  for (const std::string& word : words) out.push_back({word, {"launch.sh", 1, 1}, {}});
  return out;
}

std::string value(const Settings& all, const std::string& key) {
  for (const Setting& s : all)
    if (s.key == key) return s.value;
  return "(none)";
}

}  // namespace

TEST_CASE("hydra's overrides: plus signs, quotes, Python's words, the last wins") {
  const Settings s = hydra_settings(
      command({"a.b=1", "+c.d=True", "++e='x y'", "f=None", "a.b=2", "--config-name", "big.yaml", "word", "~gone"}));
  CHECK(value(s, "a.b") == "2");
  CHECK(value(s, "c.d") == "true");
  CHECK(value(s, "e") == "x y");
  CHECK(value(s, "f") == "null");
  CHECK(value(s, "--config-name") == "big.yaml");
  CHECK(s.size() == 5);
}

TEST_CASE("flags: bare ones, several values, negative numbers, the last wins") {
  const Settings s = flag_settings(command({"--a", "--b", "1", "--c=2", "--d", "1", "-2", "--b", "3", "--a.b.c", "x"}));
  CHECK(value(s, "a") == "true");
  CHECK(value(s, "b") == "3");
  CHECK(value(s, "c") == "2");
  CHECK(value(s, "d") == "[1, -2]");
  CHECK(value(s, "a.b.c") == "x");
}

TEST_CASE("a YAML stands over its defaults, and what refers to others is resolved by what they are in the end") {
  launch_file("base.yaml",
              "p:\n  tp: 1\n  length: 512\n  micro: 4\n  tokens: ${mul:${p.length}, ${p.micro}}\n  o: {lr: 1, wd: 2}\n "
              " same: ${.tp}\n"
              "  round: ${p.tp}\n  other: ${oc.select:p.none,7}\n  lost: ${nowhere.at.all}\n");
  const std::string file =
      launch_file("sub/recipe.yaml", "defaults: ../base.yaml\np:\n  tp: 4\n  length: 1024\n  o: null\n");
  auto s = yaml_settings(file);
  REQUIRE(s);
  resolve_interpolations(*s);
  CHECK(value(*s, "p.tp") == "4");
  CHECK(value(*s, "p.tokens") == "4096");  // 1024 x 4
  CHECK(value(*s, "p.same") == "4");
  CHECK(value(*s, "p.round") == "4");
  CHECK(value(*s, "p.other") == "7");
  CHECK(value(*s, "p.o") == "null");
  CHECK(value(*s, "p.o.lr") == "(none)");  // a map that null replaced
  CHECK(value(*s, "p.lost") == "${nowhere.at.all}");
  for (const Setting& setting : *s) CHECK(setting.undefined.empty() == (setting.key != "p.lost"));
}

TEST_CASE("files whose defaults name each other are an error, and so is what refers to itself") {
  const std::string a = launch_file("a.yaml", "defaults: b.yaml\n");
  launch_file("b.yaml", "defaults: a.yaml\n");
  const auto s = yaml_settings(a);
  REQUIRE(!s);
  CHECK(s.error()[0].code == "E155");
  Settings own = {{"x", "${y}", {}, {}, false}, {"y", "${x}", {}, {}, false}};
  resolve_interpolations(own);
  CHECK(!own[0].undefined.empty());
}

TEST_CASE("torchtitan's TOML: sections, comments, lists over lines; the rest is refused with its line") {
  const auto s = toml_settings(launch_file(
      "t.toml", "# x\n[model]\nname = \"llama3\" # why\n[a.b]\nn = 8\nf=8e-5\nl = [\"x\",\n  \"y\"]\nb = true\n"));
  REQUIRE(s);
  CHECK(value(*s, "model.name") == "llama3");
  CHECK(value(*s, "a.b.n") == "8");
  CHECK(value(*s, "a.b.f") == "8e-5");
  CHECK(value(*s, "a.b.l") == "[x, y]");
  CHECK(value(*s, "a.b.b") == "true");
  const auto bad = toml_settings(launch_file("bad.toml", "[a]\nx = 1\nno key\n"));
  REQUIRE(!bad);
  CHECK(bad.error()[0].code == "E201");
  CHECK(bad.error()[0].where.line == 3);
}

}  // namespace hotbunk
