// `import` and `export` from the outside: what is a result, what is narration, what is refused.
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include "tests/json.h"
#include "tests/run/program.h"

using namespace hotbunk;
using Json = nlohmann::json;

namespace {

fs::path launch(const std::string& name, const std::string& more = "") {
  const fs::path path = work_folder() / name;
  std::ofstream(path)
      << "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 \\\n"
         "  data.max_prompt_length=1024 data.max_response_length=3072 actor_rollout_ref.rollout.name=vllm \\\n"
         "  actor_rollout_ref.model.path=Qwen/Qwen2.5-7B actor_rollout_ref.actor.ppo_mini_batch_size=16 \\\n"
         "  actor_rollout_ref.actor.use_dynamic_bsz=True trainer.project_name=s3cr3t "
      << more << "\n";
  return path;
}

}  // namespace

TEST_CASE("import prints a scenario that every command reads, and the answer beside it") {
  const fs::path file = launch("run.sh");
  const Result2 r = hotbunk_command("import verl " + file.string());
  INFO(r.err);
  REQUIRE(r.code == 0);
  CHECK(r.err.find("Verdict: fits") != std::string::npos);
  CHECK(r.err.find("Where the seconds go") != std::string::npos);
  // What the answer stands on and nobody said; not what --set says. And the command that goes on from here.
  CHECK_THAT(r.err, Catch::Contains("Assumed, as the launch does not say it (--set KEY=VALUE does): cluster.gpu "
                                    "h100-sxm-80gb, workload.prompt_tokens.mean "));
  const Result2 said = hotbunk_command("import verl " + file.string() + " --set cluster.gpu=h200-sxm-141gb");
  CHECK_THAT(said.err, Catch::Contains("Assumed, as ") && !Catch::Contains("cluster.gpu h"));
  CHECK_THAT(said.err, Catch::Contains("Next: hotbunk import verl " + file.string() +
                                       " --set cluster.gpu=h200-sxm-141gb --out run.yaml\n"));
  // Of a launch by its words, the first of which is a flag, that command is words again.
  const std::string words =
      "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11008 --seq-length 4096 "
      "--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --vocab-size 32000";
  const Result2 flags = hotbunk_command("import megatron -- " + words);
  CHECK_THAT(flags.err, Catch::Contains("Next: hotbunk import megatron --out ") && Catch::Contains(" -- " + words));
  const fs::path scenario = work_folder() / "imported.yaml";
  std::ofstream(scenario) << r.out;
  CHECK(hotbunk_command("explain " + scenario.string()).code == 0);
  // And back: what export writes is the same launch.
  const Result2 back = hotbunk_command("export verl " + scenario.string());
  REQUIRE(back.code == 0);
  const fs::path again = work_folder() / "run_again.sh";
  std::ofstream(again) << back.out;
  const Result2 twice = hotbunk_command("import verl " + again.string() + " --json"),
                once = hotbunk_command("import verl " + file.string() + " --json");
  REQUIRE(twice.code == 0);
  Json a = json_from<Json>(once.out)["scenario"]["scenario"], b = json_from<Json>(twice.out)["scenario"]["scenario"];
  a.erase("name"), b.erase("name");
  CHECK(a == b);
}

TEST_CASE("import: the exit code is the answer's, a file is not written over, JSON is one document without secrets") {
  const fs::path file = launch("big.sh", "actor_rollout_ref.model.path=Qwen/Qwen2.5-72B-Instruct");
  const fs::path out = work_folder() / "out.yaml";
  fs::remove(out);
  const Result2 no = hotbunk_command("import verl " + file.string() + " --out " + out.string());
  CHECK(no.code == 1);
  CHECK(no.out.find("Verdict: no") != std::string::npos);
  CHECK(fs::exists(out));
  const Result2 again = hotbunk_command("import verl " + file.string() + " --out " + out.string());
  CHECK(again.code == 2);
  CHECK(again.err.find("E154") != std::string::npos);
  CHECK(hotbunk_command("import verl " + file.string() + " --overwrite --out " + out.string()).code == 1);
  const Result2 json = hotbunk_command("import verl " + launch("run.sh").string() + " --json");
  REQUIRE(json.code == 0);
  const Json doc = json_from<Json>(json.out);
  CHECK(doc["schema"] == "hotbunk.import/1");
  CHECK(doc["keys"].size() > 40);
  CHECK(doc["explanation"]["fits"] == true);
  CHECK(json.out.find("s3cr3t") == std::string::npos);
}

TEST_CASE("import: adapters are read and priced; export writes them for verl and refuses for slime") {
  const fs::path file = launch("lora.sh", "\\\n  actor_rollout_ref.model.lora_rank=32"),
                 out = work_folder() / "lora.yaml";
  fs::remove(out);
  const Result2 read = hotbunk_command("import verl " + file.string() + " --out " + out.string());
  INFO(read.err);
  CHECK(read.code == 0);
  REQUIRE(fs::exists(out));
  // Master copies and moments of adapters alone: a fraction of what training all of the model takes.
  const auto optimizer = [&](const std::string& more) {
    const Json doc = json_from<Json>(hotbunk_command("explain " + out.string() + more + " --json").out);
    for (const Json& part : doc["memory"]["children"][0]["children"])
      if (part["name"] == "optimizer") return part["bytes"].get<double>();
    return 0.0;
  };
  CHECK(optimizer("") > 0);
  CHECK(optimizer("") < 0.1 * optimizer(" --set train.lora.rank=0 --set train.lora.alpha=8"));
  const Result2 written = hotbunk_command("export verl " + out.string());
  CHECK(written.code == 0);
  CHECK(written.out.find("actor_rollout_ref.model.lora_rank=32") != std::string::npos);
  const Result2 refused = hotbunk_command("export slime " + out.string() + " --json");
  CHECK(refused.code == 2);
  CHECK(json_from<Json>(refused.out)["code"] == "E156");
}

TEST_CASE("import: words behind -- stand over the file; errors name its lines; a system that is none is refused") {
  const std::string file = launch("run.sh").string();
  const Result2 words =
      hotbunk_command("import verl " + file + " --json -- actor_rollout_ref.rollout.n=4 trainer.nnodes=2");
  INFO(words.err);
  REQUIRE(words.code == 0);
  const Json scenario = json_from<Json>(words.out)["scenario"]["scenario"];
  CHECK(scenario["algorithm"]["samples_per_prompt"] == 4);
  CHECK(scenario["cluster"]["nodes"] == 2);
  const Result2 bad = hotbunk_command("import verl " + file + " --json -- data.train_batch_size=65");
  CHECK(bad.code == 2);
  CHECK(json_from<Json>(bad.out)["code"] == "E151");
  const Result2 line = hotbunk_command("import verl " + launch("bad.sh", "\\\n  trainer.nnodes=x").string());
  CHECK(line.code == 2);
  CHECK(line.err.find("bad.sh:5") != std::string::npos);
  CHECK(hotbunk_command("import nobody " + file).code == 2);
  CHECK(hotbunk_command("import verl " + file + " --var X").code == 2);
  CHECK(hotbunk_command("export megatron " + (work_folder() / "imported.yaml").string()).code == 2);
}
