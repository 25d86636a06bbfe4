// scenarios/moe-cpu.yaml as a user runs it.
#include "tests/run/json_lines.h"
#include "tests/run/program.h"

using namespace hotbunk;

TEST_CASE("a mixture of experts trains, is what the plan says, goes on in another layout and generates") {
  const std::string scenario = (fs::path(source_folder) / "scenarios/moe-cpu.yaml").string();
  const fs::path run = work_folder() / "moe", on = work_folder() / "moe-on";
  must_run(fmt::format("run {} --set steps=2 --set checkpoint_every=1 --out {}", scenario, run.string()));
  must_run(fmt::format("compare {}", run.string()));
  // Saved by ranks that share experts, read by ranks that have whole ones.
  const fs::path whole = work_folder() / "moe-whole";
  must_run(fmt::format("run {} --set steps=3 --set train.layout.etp=1 --set train.layout.ep=2 --resume {} --out {}",
                       scenario, (run / "checkpoints/step_2").string(), whole.string()));
  must_run(fmt::format("compare {}", whole.string()));
  // A coefficient of routers' losses is of what is computed.
  const Result2 other = hotbunk_command(
      fmt::format("run {} --set steps=3 --set train.router_aux_loss_coef=0.01 --resume {} --out {}", scenario,
                  (run / "checkpoints/step_2").string(), (work_folder() / "moe-other").string()));
  INFO(other.err);
  CHECK(other.code == 2);
  CHECK_THAT(other.err, Catch::Contains("error[E424]") &&
                            Catch::Contains("train.router_aux_loss_coef: 0 in the checkpoint, 0.01 now"));
  // Read by 4 data ranks and served by engines of 1.
  must_run(
      fmt::format("run {} --set steps=4 --set train.layout.dp=4 --set train.layout.tp=1 --set train.layout.etp=1 --set "
                  "train.layout.sp=false --set rollout.layout.tp=1 --set rollout.layout.dp=4 --resume {} --out {}",
                  scenario, (whole / "checkpoints/final").string(), on.string()));
  must_run(fmt::format("compare {}", on.string()));

  const fs::path prompts = work_folder() / "moe-prompts.jsonl";
  std::ofstream(prompts) << "[1, 6, 7, 8, 3]\n";
  const Result2 said = hotbunk_command(fmt::format("generate --model {} --tokens {} --temperature 0 --max-new-tokens 3",
                                                   (on / "checkpoints/final").string(), prompts.string()));
  INFO(said.err);
  CHECK(said.code == 0);
  CHECK(said.out.starts_with("["));
}

TEST_CASE("routers with losses of their own train as the plan says") {
  const fs::path run = work_folder() / "router-losses";
  must_run(fmt::format("run {}/scenarios/router-losses-cpu.yaml --set steps=2 --check --out {}", source_folder,
                       run.string()));
  const auto steps = lines_of(run / "metrics.jsonl");
  REQUIRE(steps.size() == 2);
  for (const nlohmann::json& step : steps) {
    const auto loss = step.at("actor/router_loss").get<double>();
    CHECK(loss > 0.02);  // as of balanced routers, and a little
    CHECK(loss < 0.05);
  }
}

TEST_CASE("DeepSeek-V3 in small goes on in another layout, is served from its checkpoint, and says what it cannot do") {
  const std::string scenario = (fs::path(source_folder) / "scenarios/deepseek-cpu.yaml").string();
  const fs::path run = work_folder() / "deepseek", on = work_folder() / "deepseek-on";
  must_run(fmt::format("run {} --set steps=2 --out {}", scenario, run.string()));
  // Saved by pairs of ranks, read by data ranks that have other experts each, and served by one engine of all.
  must_run(
      fmt::format("run {} --set steps=3 --set train.engine=zero1 --set train.layout.dp=4 --set train.layout.tp=1 --set "
                  "train.layout.etp=1 --set train.layout.sp=false --set train.layout.ep=4 --set rollout.layout.tp=4 "
                  "--set rollout.layout.dp=1 --resume {} --out {}",
                  scenario, (run / "checkpoints/final").string(), on.string()));
  must_run(fmt::format("compare {}", on.string()));
  const fs::path prompts = work_folder() / "deepseek-prompts.jsonl";
  std::ofstream(prompts) << "[1, 6, 7, 8, 3]\n";
  const Result2 said = hotbunk_command(fmt::format("generate --model {} --tokens {} --temperature 0 --max-new-tokens 3",
                                                   (on / "checkpoints/final").string(), prompts.string()));
  INFO(said.err);
  CHECK(said.code == 0);
  CHECK(said.out.starts_with("["));
  const Result2 flat = hotbunk_command(
      fmt::format("run {} --set train.engine=fsdp1 --set train.layout.tp=1 --set train.layout.etp=1 --set "
                  "train.layout.sp=false --set train.layout.dp=4",
                  scenario));
  INFO(flat.err);
  CHECK(flat.code == 2);
  CHECK_THAT(flat.err, Catch::Contains("E250") && Catch::Contains("a router's bias"));
}

TEST_CASE("experts over data ranks train, are what the plan says, and go on where each rank has all") {
  const std::string scenario = (fs::path(source_folder) / "scenarios/expert-parallel-cpu.yaml").string();
  const fs::path run = work_folder() / "spread", on = work_folder() / "spread-on", back = work_folder() / "spread-back";
  must_run(fmt::format("run {} --set steps=2 --out {}", scenario, run.string()));
  must_run(fmt::format("compare {}", run.string()));
  // Saved by pairs of ranks, read by ranks that have all experts, and again by four that have other ones each.
  must_run(fmt::format("run {} --set steps=3 --set train.layout.ep=1 --resume {} --out {}", scenario,
                       (run / "checkpoints/final").string(), on.string()));
  must_run(
      fmt::format("run {} --set steps=4 --set train.layout.ep=4 --set train.engine=zero1 --set "
                  "sync.transport=collective --resume {} --out {}",
                  scenario, (on / "checkpoints/final").string(), back.string()));
  must_run(fmt::format("compare {}", back.string()));
}

TEST_CASE("what a layout with experts cannot do is refused with the setting to change") {
  const std::string scenario = (fs::path(source_folder) / "scenarios/moe-cpu.yaml").string();
  const auto refused = [&](const std::string& sets, const std::string& why) {
    const Result2 r = hotbunk_command(fmt::format("run {} {}", scenario, sets));
    INFO(r.err);
    CHECK(r.code == 2);
    CHECK_THAT(r.err, Catch::Contains(why));
  };
  // Ranks that share an expert may have other tokens: 4 with tp 2, in any order of ranks.
  for (const char* order : {"tp-cp-ep-dp-pp", "dp-tp-cp-ep-pp"})
    must_run(fmt::format("run {} --set train.layout.etp=4 --set train.layout.order={} --set steps=1 --check --out {}",
                         scenario, order, (work_folder() / fmt::format("experts-shared-{}", order)).string()));
  refused(
      "--set train.layout.etp=1 --set train.layout.sp=false",
      "train.layout.ep 1 x etp 1 over blocks of 1 of tp 2 without sequence parallelism: a block needs tokens of its "
      "own; set train.layout.sp to true");
  refused("--set train.layout.etp=1 --set train.layout.ep=4 --set train.layout.sp=false",
          "train.layout.ep 4 over tp 2 and 2 data ranks without sequence parallelism: its places share rows of tokens "
          "evenly, which have to divide by tp 2; set train.layout.sp to true");
  // So may those that have whole ones, also where a shard group is of every second rank; and a unit that few keep is
  // kept by ranks with the same experts.
  for (const char* sets : {"--set train.layout.etp=1 --set train.layout.ep=4 --set train.layout.order=dp-tp-cp-ep-pp",
                           "--set 'train.layout={dp: 2, cp: 2, tp: 1, ep: 2, shard_over: [dp]}'",
                           "--set 'train.layout={dp: 4, tp: 1, ep: 2}' --set train.reshard_after_forward=2",
                           "--set 'train.layout={dp: 4, tp: 1, ep: 1, etp: 2}' --set train.reshard_after_forward=2"})
    must_run(fmt::format("run {} {} --set steps=1 --overwrite --check --out {}", scenario, sets,
                         (work_folder() / "experts-in-any-order").string()));
  refused(
      "--set 'train.layout={dp: 4, tp: 1, ep: 4}' --set train.reshard_after_forward=2",
      "train.reshard_after_forward 2 with train.layout.ep 4: of 4 ranks that share a copy, 1 have the same experts, "
      "1 % 2 = 1; those that keep a unit among them have to");
  refused(
      "--set rollout.layout.tp=2 --set rollout.layout.cp=2 --set rollout.layout.dp=1 --set rollout.layout.ep=4",
      "rollout.layout.ep 4 with tp 2: 2 % 4 = 2; of an engine's tensor-parallel ranks groups of one size have other "
      "experts each");
  refused("--set rollout.layout.tp=1 --set rollout.layout.pp=2", "rollout.layout.pp 2: 3 layers do not divide by it");
  refused(
      "--set train.layout.tp=1 --set train.layout.etp=1 --set train.layout.sp=false --set train.layout.dp=4 "
      "--set train.layout.ep=4 --set train.layout.fsdp=2",
      "train.layout.ep 4 with what 2 data ranks shard: 2 % 4 = 2; ranks that spread experts have to be among those");
  refused("--set train.layout.ep=4 --set train.layout.etp=2", "the expert mesh does not fit over the dense mesh");
  refused(
      "--set model.moe_intermediate_size=33 --set train.layout.etp=1 --set train.layout.tp=1 --set train.layout.dp=4 "
      "--set train.layout.sp=false",
      "the 33 columns of an expert do not divide by it");
}
