// A run that diverges: it ends before the optimizer's step, names the op that made the first number that is not finite,
// and replaces no good checkpoint by a bad one.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <nlohmann/json.hpp>
#include <vector>

#include "spec/safetensors.h"
#include "tests/json.h"
#include "tests/run/program.h"

using namespace hotbunk;
using Json = nlohmann::json;

namespace {

/// A model with an embedding table of its own, as a run without a step to speak of leaves it; made once.
const fs::path& model() {
  static const fs::path out = [] {
    const fs::path folder = work_folder() / "model";
    const Result2 r = hotbunk_command(fmt::format("run {} --set model.tie_word_embeddings=false --out {}",
                                                  scenario("model", 1, 1, "steps: 1").string(), folder.string()));
    if (r.code != 0) throw std::runtime_error(r.err);
    return folder / "checkpoints/final";
  }();
  return out;
}

struct Patch {
  std::string tensor;
  std::size_t first = 0, count = 1, stride = 1;  // elements
  float value = 0.0f;
};

/// A copy of the model with other weights.
fs::path model_with(const std::string& name, const std::vector<Patch>& patches) {
  const fs::path folder = work_folder() / name;
  fs::copy(model(), folder, fs::copy_options::recursive);
  std::string bytes = text_of(folder / "model.safetensors");
  const auto views = parse_safetensors(std::as_bytes(std::span(bytes.data(), bytes.size())), name);
  REQUIRE(views);
  for (const Patch& patch : patches) {
    const auto view = std::ranges::find(*views, patch.tensor, &TensorView::name);
    REQUIRE(view != views->end());
    REQUIRE(view->dtype == DType::f32);
    char* data = bytes.data() + (reinterpret_cast<const char*>(view->data.data()) - bytes.data());
    for (std::size_t i = 0; i < patch.count; ++i)
      std::memcpy(data + 4 * (patch.first + i * patch.stride), &patch.value, 4);
  }
  std::ofstream(folder / "model.safetensors", std::ios::binary) << bytes;
  fs::remove(folder / "manifest.json");  // a model of somebody's, no checkpoint that was changed
  return folder;
}

/// A file of task.data: one sequence a step (algorithm.prompts: 2, so each stands twice).
fs::path sequences(const std::string& name, const std::vector<std::string>& lines) {
  const fs::path file = work_folder() / (name + ".jsonl");
  std::ofstream out(file);
  for (const std::string& line : lines) out << line << '\n' << line << '\n';
  return file;
}

std::string sft(const fs::path& data) {
  return fmt::format("--set 'algorithm={{name: sft, prompts: 2}}' --set \"task.name=''\" --set task.data={}",
                     data.string());
}

std::size_t count_of(const std::string& text, const std::string& what) {
  std::size_t n = 0;
  for (auto at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++n;
  return n;
}

}  // namespace

TEST_CASE("a loss that is not finite ends the run before the optimizer, with the first op that made it") {
  // Finite weights whose products are not: 3e38 x activations of about 1, in the second layer only.
  const fs::path bad = model_with("overflow", {{"model.layers.1.mlp.down_proj.weight", 0, 64, 1, 3e38f}});
  for (const int ranks : {1, 2, 4}) {
    const std::string name = fmt::format("overflow{}", ranks);
    const fs::path out = work_folder() / name;
    const Result2 r = hotbunk_command(fmt::format("run {} --set model={} --out {}",
                                                  scenario(name, ranks, 1, "steps: 3\ncheckpoint_every: 1").string(),
                                                  bad.string(), out.string()));
    INFO(r.err);
    CHECK(r.code == 3);
    CHECK(count_of(r.err, "error[") == 1);  // one cause, said once
    CHECK_THAT(r.err, Catch::Contains("error[E630]: step 1, mini-batch 1: the loss is nan, the gradient norm is nan") &&
                          Catch::Contains("= note: phase train, block step") &&
                          Catch::Contains("op linear 'train.layers.1.down_proj' of layer 1 on rank 0, in "
                                          "micro-batch 1 of "));
    CHECK_FALSE(fs::exists(out / "checkpoints"));
  }
}

TEST_CASE("of several ranks the one whose data met the bad weight is named, with its micro-batch") {
  // Only token 15 has something in dimension 0, where the first norm's weight makes infinity of it.
  const fs::path bad = model_with("row", {{"model.embed_tokens.weight", 0, 16, 32, 0.0f},
                                          {"model.embed_tokens.weight", 15 * 32, 1, 1, 1.0f},
                                          {"model.layers.0.input_layernorm.weight", 0, 1, 1, 3e38f}});
  const fs::path data = work_folder() / "row.jsonl";
  std::ofstream(data) << "[1,3,4,5,2]\n[1,4,3,5,2]\n[1,5,4,3,2]\n[1,3,15,4,2]\n";
  const Result2 r = hotbunk_command(fmt::format(
      "run {} --set model={} --set 'algorithm={{name: sft, prompts: 4}}' --set \"task.name=''\" --set task.data={} "
      "--set train.micro_batch_tokens=8 --out {}",
      scenario("row", 2, 1, "steps: 1").string(), bad.string(), data.string(), (work_folder() / "row_run").string()));
  INFO(r.err);
  CHECK(r.code == 3);
  CHECK_THAT(r.err, Catch::Contains("error[E630]: step 1, mini-batch 1") &&
                        Catch::Contains(
                            "op rms_norm 'train.layers.0.input_norm' of layer 0 on rank 1, in micro-batch 2 of 2"));
}

TEST_CASE("weights that the optimizer overflows are its fault, and no checkpoint holds them") {
  // Weight decay of 1e3 x lr of 1e3 makes -3e43 of the row of a token that only the second step's data holds.
  const fs::path bad = model_with("decayed", {{"model.embed_tokens.weight", 15 * 32, 32, 1, 3e37f}});
  const fs::path data = sequences("decayed", {"[1,3,4,5,2]", "[1,15,4,5,2]"});
  const std::string keys = fmt::format("--set model={} {} --set optimizer.lr=1000 --set optimizer.weight_decay=1000",
                                       bad.string(), sft(data));
  const auto run = [&](const std::string& name, const char* more) {
    return hotbunk_command(
        fmt::format("run {} {} --out {}", scenario(name, 2, 1, more).string(), keys, (work_folder() / name).string()));
  };
  const Result2 second = run("decayed_second", "steps: 2");
  INFO(second.err);
  CHECK(second.code == 3);
  CHECK_THAT(second.err, Catch::Contains("error[E630]: step 2, mini-batch 1") &&
                             Catch::Contains("no micro-batch made them: op adamw 'train.adamw.root' on rank 1 had left "
                                             "them in the step before: 32 NaN or infinite"));
  const Result2 checkpoint = run("decayed_checkpoint", "steps: 2\ncheckpoint_every: 1");
  INFO(checkpoint.err);
  CHECK(checkpoint.code == 3);
  CHECK_THAT(checkpoint.err,
             Catch::Contains("error[E631]: a checkpoint of weights that are not finite is not written: "
                             "tensor \"model.embed_tokens.weight\" holds infinity at element (15, 0)") &&
                 Catch::Contains("= note: after step 1") && Catch::Contains("= note: on rank 1"));
  CHECK_FALSE(fs::exists(work_folder() / "decayed_checkpoint/checkpoints/step_1/model.safetensors"));
  // The last one is not written either, but what the run computed is.
  const Result2 last = run("decayed_last", "steps: 1");
  INFO(last.err);
  CHECK(last.code == 3);
  CHECK_THAT(last.err, Catch::Contains("error[E631]"));
  CHECK_FALSE(fs::exists(work_folder() / "decayed_last/checkpoints/final/model.safetensors"));
  CHECK_THAT(text_of(work_folder() / "decayed_last/metrics.jsonl"), Catch::Contains("actor/grad_norm"));
}

TEST_CASE("the last finite checkpoint survives a divergence") {
  const fs::path out = work_folder() / "survivor";
  const Result2 r =
      hotbunk_command(fmt::format("run {} --set optimizer.lr=1000 --set optimizer.weight_decay=1000 --out {}",
                                  scenario("survivor", 2, 2, "steps: 12\ncheckpoint_every: 1").string(), out.string()));
  INFO(r.err);
  CHECK(r.code == 3);
  CHECK_THAT(r.err, Catch::Contains("error[E630]: step ") && Catch::Contains("the first op that made one"));
  // Every checkpoint that is there loads: reading refuses weights that are not finite.
  int checkpoints = 0;
  for (const auto& entry : fs::directory_iterator(out / "checkpoints")) {
    ++checkpoints;
    CHECK(hotbunk_command(fmt::format("run {} --set model={} --out {}", scenario("from", 1, 1, "steps: 1").string(),
                                      entry.path().string(), (work_folder() / entry.path().filename()).string()))
              .err.find("E408") == std::string::npos);
  }
  CHECK(checkpoints >= 1);
  CHECK_FALSE(fs::exists(out / "checkpoints/final"));
  CHECK_FALSE(fs::exists(out / "trace.json"));
  CHECK_THAT(text_of(out / "metrics.jsonl"), Catch::Contains("\"step\":1"));
}
