// The small scenarios that are shipped, one for each kind of layout, as a user tries them.
#include "tests/run/program.h"

using namespace hotbunk;

TEST_CASE("each small scenario is planned and run, and what ran is what was simulated") {
  int tried = 0;
  for (const auto& entry : fs::directory_iterator(fs::path(source_folder) / "scenarios")) {
    const std::string name = entry.path().filename();
    if (!name.ends_with("-cpu.yaml") || name.starts_with("qwen")) continue;  // what is no toy takes minutes
    CAPTURE(name);
    must_run(fmt::format("layout {}", entry.path().string()));
    must_run(fmt::format("plan {}", entry.path().string()));
    const fs::path out = work_folder() / (name + ".out");
    const Result2 run =
        hotbunk_command(fmt::format("run {} --set steps=3 --check --out {}", entry.path().string(), out.string()));
    INFO(run.err);
    CHECK(run.code == 0);
    CHECK(run.out.find("are the same in simulated and measured") != std::string::npos);
    ++tried;
  }
  CHECK(tried >= 2);
}
