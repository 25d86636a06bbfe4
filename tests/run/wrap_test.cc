// scenarios/fsdp1-cpu.yaml as a user goes on with it: in units of another kind.
#include "tests/run/program.h"

using namespace hotbunk;

TEST_CASE("what flat parameters of one wrapping left goes on in another, and under FSDP2") {
  const std::string scenario = (fs::path(source_folder) / "scenarios/fsdp1-cpu.yaml").string();
  const auto folder = [](const char* name) { return (work_folder() / name).string(); };
  const std::string from = folder("flat") + "/checkpoints/final";
  must_run(fmt::format("run {} --set steps=1 --out {}", scenario, folder("flat")));
  const std::string unwrapped = "--set train.wrap.policy=layer --set train.wrap.min_parameters=100000000";
  for (const char* engine : {"fsdp1", "fsdp2"}) {
    must_run(fmt::format("run {} --set steps=2 {} --set train.engine={} --resume {} --out {}", scenario, unwrapped,
                         engine, from, folder(engine)));
    must_run(fmt::format("compare {}", folder(engine)));
  }
}
