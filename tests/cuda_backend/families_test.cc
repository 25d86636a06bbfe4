// An iteration of each family beside the CPU backend's: scenarios/*-cpu.yaml, shortened to four samples on two ranks.
#include <fmt/format.h>

#include "tests/cuda_backend/runs.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

/// What makes a scenario of this folder a matter of seconds on the double. Experts and heads keep their numbers.
const char* const shorter =
    "--set steps=1 --set model.num_hidden_layers=2 --set cluster.ranks_per_device=2 --set train.layout.dp=2 "
    "--set train.layout.tp=1 --set train.layout.sp=false --set train.micro_batch_tokens=24 --set rollout.layout.tp=2 "
    "--set rollout.layout.dp=1 --set rollout.max_running_requests=4 --set rollout.max_prefill_tokens=20 "
    "--set task.digits=2 --set workload.prompt_tokens.mean=4 --set workload.prompt_tokens.max=4 --set "
    "algorithm.prompts=2 --set algorithm.samples_per_prompt=2 --set workload.response_tokens.mean=3 "
    "--set workload.response_tokens.max=3 --samples-every 1 --json";

}  // namespace

TEST_CASE(
    "every family on the double: bytes and calls as simulated, the CPU backend's tokens, its losses to rounding") {
  const Folder folder;
  struct Family {
    const char *file, *more;
  };
  for (const Family& f : {Family{"gemma2", ""},
                          {"gpt2", "--set model.n_layer=2"},
                          {"gpt-oss", "--set train.layout.etp=1"},
                          {"deepseek", "--set train.layout.etp=1"},
                          {"lora", ""}}) {
    INFO(f.file);
    std::string options = fmt::format("scenarios/{}-cpu.yaml {} {}", f.file, shorter, f.more);
    const Ended cpu = folder.run(fmt::format("cpu-{}", f.file), options),
                fake = folder.run(fmt::format("fake-{}", f.file), options + " --backend cuda-fake");
    INFO(cpu.err << fake.err);
    UNSCOPED_INFO(fmt::format("{:.1f} and {:.1f} s", cpu.seconds, fake.seconds));
    REQUIRE(cpu.code == 0);
    REQUIRE(fake.code == 0);
    CHECK(json_from<Json>(fake.out)["equal"] == true);  // P1, P2
    const std::string ours = fmt::format("fake-{}", f.file), theirs = fmt::format("cpu-{}", f.file);
    CHECK(tokens_of(folder, ours).size() == 4);
    CHECK(tokens_of(folder, ours) == tokens_of(folder, theirs));
    check_figures(folder.lines(ours, "metrics.jsonl"), folder.lines(theirs, "metrics.jsonl"), 2e-5);
  }
}
