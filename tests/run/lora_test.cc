// scenarios/lora-cpu.yaml as a user runs it.
#include "tests/run/program.h"

using namespace hotbunk;

TEST_CASE("adapters train, go on bit for bit and in another layout, and begin another run") {
  const std::string scenario = (fs::path(source_folder) / "scenarios/lora-cpu.yaml").string();
  const auto folder = [](const char* name) { return (work_folder() / name).string(); };
  must_run(fmt::format("run {} --set steps=4 --out {}", scenario, folder("lora")));
  must_run(fmt::format("compare {}", folder("lora")));
  must_run(fmt::format("run {} --set steps=2 --out {}", scenario, folder("lora-half")));
  must_run(fmt::format("run --resume {} --set steps=4 --out {}", folder("lora-half"), folder("lora-on")));
  const auto bytes = [&](const char* run, const char* file) {
    std::ifstream in(work_folder() / run / "checkpoints" / file, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  for (const char* file :
       {"final/adapter_model.safetensors", "final/optimizer.safetensors", "merged/model.safetensors"}) {
    CAPTURE(file);
    CHECK(bytes("lora", file).size() > 1000);
    CHECK(bytes("lora", file) == bytes("lora-on", file));
  }
  // Four data ranks that have parameters whole go on where two of FSDP and two tensor-parallel ones were.
  must_run(
      fmt::format("run {} --set steps=3 --set train.layout.dp=4 --set train.layout.tp=1 --set train.layout.sp=false "
                  "--set train.engine=zero1 --resume {} --out {}",
                  scenario, folder("lora-half") + "/checkpoints/final", folder("lora-zero1")));
  must_run(fmt::format("compare {}", folder("lora-zero1")));
  const fs::path prompts = work_folder() / "lora-prompts.jsonl";
  std::ofstream(prompts) << "[1, 6, 7, 8, 3]\n";
  must_run(fmt::format("generate --model {} --tokens {} --temperature 0", folder("lora") + "/checkpoints/merged",
                       prompts.string()));
  const std::string adapter = "--set train.lora.adapter=" + folder("lora") + "/checkpoints/final";
  must_run(fmt::format("run {} {} --set steps=1 --out {}", scenario, adapter, folder("lora-begun")));
  const Result2 other = hotbunk_command(
      fmt::format("run {} {} --set train.lora.alpha=20 --out {}", scenario, adapter, folder("lora-other")));
  CHECK(other.code == 2);
  CHECK_THAT(other.err, Catch::Contains("error[E414]") && Catch::Contains("r 5, lora_alpha 10"));
  const Result2 more = hotbunk_command(
      fmt::format("run {} {} --set 'train.lora.targets=[q_proj]' --out {}", scenario, adapter, folder("lora-more")));
  CHECK(more.code == 2);
  CHECK_THAT(more.err, Catch::Contains("error[E414]") && Catch::Contains("a tensor that no matrix"));
  // PEFT's own folders have no manifest.
  const fs::path scaled = work_folder() / "lora-scaled";
  fs::create_directories(scaled);
  fs::copy_file(folder("lora") + "/checkpoints/final/adapter_model.safetensors", scaled / "adapter_model.safetensors");
  std::string config = bytes("lora", "final/adapter_config.json");
  config.insert(config.find('{') + 1, "\"use_rslora\": true,");
  std::ofstream(scaled / "adapter_config.json") << config;
  const Result2 rslora = hotbunk_command(
      fmt::format("run {} --set train.lora.adapter={} --out {}", scenario, scaled.string(), folder("lora-scaled-run")));
  CHECK(rslora.code == 2);
  CHECK_THAT(rslora.err, Catch::Contains("error[E414]") && Catch::Contains("use_rslora: true"));
}
