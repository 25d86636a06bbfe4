// Scripts are read as bash would expand them; what bash would have to run is named, not guessed.
#include <catch2/catch.hpp>

#include "interop/shell_expansion.h"
#include "tests/interop/launches.h"

namespace hotbunk {
namespace {

ShellScript script_of(const std::string& text, const std::map<std::string, std::string>& variables = {}) {
  auto script = parse_shell_script(text, "launch.sh", variables);
  if (!script) FAIL(render(script.error()));
  return std::move(*script);
}

std::vector<std::string> texts(const ShellCommand& command) {
  std::vector<std::string> out;
  for (const ShellWord& word : command) out.push_back(word.text);
  return out;
}

using Words = std::vector<std::string>;

}  // namespace

TEST_CASE("a command goes on over lines, comments and here-documents are none") {
  const ShellScript s =
      script_of("# python x\npython3 a.py \\\n  --one 1 \\\n  --two='2 3' # four\ncat <<'EOF'\npython3 b.py \"\nEOF\n");
  REQUIRE(s.commands.size() == 2);
  CHECK(texts(s.commands[0]) == Words{"python3", "a.py", "--one", "1", "--two=2 3"});
  CHECK(s.commands[0][2].where.line == 3);
  CHECK(s.commands[0][4].where.line == 4);
  CHECK(texts(s.commands[1]) == Words{"cat"});
}

TEST_CASE("variables, defaults, arithmetic and command substitution") {
  const ShellScript s = script_of(
      "N=4\nexport L=$((1024 * (N - 2)))\nM=${M:-\"org/name\"}\nE=${N:+set}\nF=/a/b.parquet\n"
      "run $N ${L} \"${M}-x\" ${E} ${N}x ${F##*/} ${F%.parquet} $(seq 2 2 6) ${#M} '$N' \"$((L+1))\" $((2*L))\n");
  REQUIRE(s.commands.size() == 1);
  CHECK(texts(s.commands[0]) == Words{"run", "4", "2048", "org/name-x", "set", "4x", "b.parquet", "/a/b", "2", "4", "6",
                                      "8", "$N", "2049", "4096"});
  // What the caller sets stands against the script.
  CHECK(texts(script_of("N=4\nrun $N", {{"N", "8"}}).commands[0]) == Words{"run", "8"});
}

TEST_CASE("arrays keep the place of each of their words") {
  const ShellScript s =
      script_of("A=(\n  --x 1\n  # --y 2\n  --z \"a b\"\n)\nA+=(--w)\npython3 t.py ${A[@]} \"${A[@]}\"\n");
  REQUIRE(s.commands.size() == 1);
  CHECK(texts(s.commands[0]) ==
        Words{"python3", "t.py", "--x", "1", "--z", "a", "b", "--w", "--x", "1", "--z", "a b", "--w"});
  CHECK(s.commands[0][2].where.line == 2);
  CHECK(s.commands[0][11].where.line == 4);
}

TEST_CASE("an array or arguments of nothing are no word, quoted or not; an empty text in quotes is one") {
  const ShellScript s = script_of("A=()\nrun --x 1 \"${A[@]}\" ${A[@]} \"$@\" $@ \"\" \"y$@\"\n");
  CHECK(texts(s.commands[0]) == Words{"run", "--x", "1", "", "y"});
}

TEST_CASE("what the script does not say is named and stays as it is written") {
  const ShellScript s = script_of("D=$HOME/data\nrun a=$D/x b=1 c=$(nproc) d=${NOT_THERE}\n");
  REQUIRE(s.commands.size() == 1);
  const ShellCommand& c = s.commands[0];
  CHECK(c[1].text == "a=$HOME/data/x");
  CHECK(c[1].undefined == Words{"$HOME"});
  CHECK(c[2].undefined.empty());
  CHECK(c[3].undefined == Words{"$(nproc)"});
  CHECK(c[4].undefined == Words{"$NOT_THERE"});
}

TEST_CASE("conditions on what is known choose; others are taken as true and noted") {
  const std::string text =
      "B=fsdp\nif [ \"$B\" == \"megatron\" ]; then X=1; elif [[ $B = fsdp && -z \"$NONE\" ]]; then X=2; else X=3; fi\n"
      "if command -v nvidia-smi; then Y=4; else Y=5; fi\n[ -n \"$NONE\" ] && Y=6\n"
      "case \"$B\" in meg*) Z=7 ;; fs*|x) Z=8 ;; *) Z=9 ;; esac\nfor i in 1 2; do W=$i; done\nrun $X $Y $Z $W\n";
  const ShellScript s = script_of(text);
  CHECK(texts(s.commands.back()) == Words{"run", "2", "4", "8", "2"});
  REQUIRE(s.notes.size() == 1);
  CHECK_THAT(s.notes[0], Catch::Contains("launch.sh:3"));
}

TEST_CASE("files that a script sources are read from its folder; functions where they are called") {
  launch_file("models/m.sh", "MODEL=(--layers 2)\n");
  const std::string file =
      launch_file("run.sh",
                  "DIR=\"$(cd -- \"$(dirname -- \"${BASH_SOURCE[0]}\")\" && pwd)\"\nsource \"${DIR}/models/m.sh\"\n"
                  "source nowhere.sh\ngo() {\n  N=3\n}\ngo\nrun ${MODEL[@]} $N\n");
  const auto s = read_shell_script(file, {});
  REQUIRE(s);
  CHECK(texts(s->commands.back()) == Words{"run", "--layers", "2", "3"});
  REQUIRE(s->notes.size() == 1);
  CHECK_THAT(s->notes[0], Catch::Contains("nowhere.sh is not here"));
}

TEST_CASE("quotes that do not close are an error with their place; odd texts end") {
  const auto s = parse_shell_script("A=1\nrun \"x\n", "launch.sh", {});
  REQUIRE(!s);
  CHECK(s.error()[0].code == "E150");
  CHECK(s.error()[0].where.line == 2);
  for (const char* odd : {"fi", "done )", "((", "$", "a=(", "if", "for", "case x", "}", ";;", "`", "\\", "x <<",
                          "f() {", "((1)) ||", "[ a = ]"})
    (void)parse_shell_script(odd, "launch.sh", {});
}

}  // namespace hotbunk
