// Ranks that were started by hand and would not compute the same are refused before the first step; a saved plan holds
// the scenario that it was made from.
#include <catch2/catch.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "tests/json.h"
#include "tests/run/launched.h"

using namespace hotbunk;
using Json = nlohmann::json;

namespace {

struct Launched {
  std::vector<int> codes;
  std::vector<std::string> err;
};

using Variables = std::map<std::string, std::string>;

/// One rank of a world of two; what it says is in `said`.
std::unique_ptr<Running> start(const ReservedPort& port, std::size_t rank, const std::string& arguments,
                               const fs::path& said, const Variables& more = {}, const std::string& before = "") {
  Variables variables = rank_variables(rank, 2, port);
  variables.insert(more.begin(), more.end());
  return std::make_unique<Running>("run " + arguments, said, variables, before);
}

/// The program as rank 0 and 1 of a world of two; what differs by rank is in `arguments` and `before` the program.
Launched launch(const std::string& common, const std::vector<std::string>& arguments,
                const std::vector<std::string>& before = {"", ""}, const std::vector<Variables>& more = {{}, {}}) {
  const ReservedPort port;
  const auto said = [](std::size_t r) { return work_folder() / fmt::format("rank{}.err", r); };
  std::vector<std::unique_ptr<Running>> ranks;
  for (std::size_t r = 0; r < 2; ++r)
    ranks.push_back(start(port, r, common + " " + arguments[r], said(r), more[r], before[r]));
  Launched out;
  for (std::size_t r = 0; r < 2; ++r) {
    out.codes.push_back(ranks[r]->wait());
    out.err.push_back(text_of(said(r)));
  }
  return out;
}

}  // namespace

TEST_CASE("ranks with different scenarios, options or tokens are refused before the first step, with what differs") {
  const fs::path file = scenario("agree", 2, 1, "steps: 1");
  const fs::path out = work_folder() / "agree";
  const std::string common = fmt::format("{} --overwrite --out {}", file.string(), out.string());
  const auto [arguments, difference] = GENERATE(table<std::string, std::string>({
      {"--set optimizer.lr=5", "optimizer.lr: rank 0 has 1e-06, rank 1 has 5"},
      {"--set seed=7", "seed: rank 0 has 0, rank 1 has 7"},
      {"--set steps=3", "steps: rank 0 has 1, rank 1 has 3"},
      {"--transport gloo", "--transport: rank 0 has by host, rank 1 has gloo"},
      {"--check", "--check: rank 0 has false, rank 1 has true"},
      {"--threads 2", "--threads: rank 0 has "},
  }));
  const Launched r = launch(common + (arguments == "--threads 2" ? "" : " --threads 1"),
                            {arguments == "--threads 2" ? "--threads 1" : "", arguments});
  INFO(arguments << "\n--- rank 0:\n" << r.err[0] << "--- rank 1:\n" << r.err[1]);
  for (std::size_t rank = 0; rank < 2; ++rank) {
    CHECK(r.codes[rank] == 2);
    CHECK_THAT(r.err[rank], Catch::Contains("error[E705]: rank 1 does not run what rank 0 runs") &&
                                Catch::Contains("= note: " + difference) && !Catch::Contains("step 1/"));
  }
  CHECK_FALSE(fs::exists(out / "metrics.jsonl"));
}

TEST_CASE("a rank that forms products in another way, of fp32 too, is refused before the first step") {
  const fs::path file = scenario("products", 2, 1, "steps: 1");
  const fs::path out = work_folder() / "products", alone = work_folder() / "products_alone";
  REQUIRE(hotbunk_command(fmt::format("run {} --overwrite --out {}",
                                      scenario("products_alone", 1, 1, "steps: 1").string(), alone.string()))
              .code == 0);
  const Json of_machine = json_from<Json>(text_of(alone / "run.json"));
  const bool lowered = of_machine["instruction_sets"].get<std::string>().find("oneDNN's AVX2 ") == std::string::npos;
  const bool other_bf16 = of_machine["bf16_products"] != "widened to fp32";
  const Launched r = launch(fmt::format("{} --overwrite --threads 1 --out {}", file.string(), out.string()), {"", ""},
                            {"", "env ONEDNN_MAX_CPU_ISA=AVX2"});
  INFO("--- rank 0:\n" << r.err[0] << "--- rank 1:\n" << r.err[1]);
  CHECK(r.codes == (lowered || other_bf16 ? std::vector{2, 2} : std::vector{0, 0}));
  if (lowered)
    CHECK_THAT(r.err[1], Catch::Contains("error[E705]: rank 1 does not run what rank 0 runs") &&
                             Catch::Contains("instruction sets: rank 0 has oneDNN's") &&
                             Catch::Contains("rank 1 has oneDNN's AVX2 and own kernels'"));
  if (other_bf16) CHECK_THAT(r.err[1], Catch::Contains("rank 1 has widened to fp32"));
}

TEST_CASE(
    "ranks that were started by hand take rank 0's choice of products, and one that was told another is refused") {
  const fs::path file = scenario("chosen", 2, 1, "steps: 1"), out = work_folder() / "chosen";
  const std::string common =
      fmt::format("{} --overwrite --threads 1 --set train.precision.params=bf16 --set rollout.dtype=bf16 --out {}",
                  file.string(), out.string());
  // No machine's rule, and every machine can do it.
  const std::string told = "widened to fp32; some rows: oneDNN in fp32; many rows: oneDNN in fp32";
  const auto chosen = [&](const Variables& first, const Variables& second) {
    return launch(common, {"", ""}, {"", ""}, {first, second});
  };
  const auto products = [&] { return json_from<Json>(text_of(out / "run.json"))["bf16_products"]; };
  // Rank 1 would measure, were rank 0's word not above that.
  const Launched followed = chosen({{"HOTBUNK_BF16_PRODUCTS", told}}, {{"HOTBUNK_BF16_PRODUCTS", "measure"}});
  INFO("--- rank 0:\n" << followed.err[0] << "--- rank 1:\n" << followed.err[1]);
  CHECK(followed.codes == std::vector{0, 0});
  CHECK(products() == told);
  const Launched other = chosen({{"HOTBUNK_BF16_PRODUCTS", told}}, {{"HOTBUNK_BF16_PRODUCTS", "rule"}});
  INFO("--- rank 0:\n" << other.err[0] << "--- rank 1:\n" << other.err[1]);
  CHECK(other.codes == std::vector{2, 2});
  CHECK_THAT(other.err[1], Catch::Contains("error[E705]") &&
                               Catch::Contains(fmt::format("note: bf16 products: rank 0 has {}, rank 1 has ", told)));
}

TEST_CASE("weights and data are compared by content, not by path") {
  const fs::path first = work_folder() / "made";
  REQUIRE(hotbunk_command(
              fmt::format("run {} --overwrite --out {}", scenario("made", 1, 1, "steps: 1").string(), first.string()))
              .code == 0);
  const fs::path weights = first / "checkpoints/final", copy = work_folder() / "copy", other = work_folder() / "other";
  fs::copy(weights, copy, fs::copy_options::recursive);
  fs::copy(weights, other, fs::copy_options::recursive);
  {
    std::fstream tensor(other / "model.safetensors", std::ios::in | std::ios::out | std::ios::binary);
    tensor.seekp(-1, std::ios::end);
    tensor.put('\x3c');
  }
  const fs::path file = scenario("weights", 2, 1, "steps: 1");
  const auto run = [&](const fs::path& theirs) {
    return launch(
        fmt::format("{} --threads 1 --overwrite --out {}", file.string(), (work_folder() / "weights").string()),
        {"--set model=" + weights.string(), "--set model=" + theirs.string()});
  };
  const Launched same = run(copy);
  INFO(same.err[0] << same.err[1]);
  CHECK(same.codes == std::vector{0, 0});
  const Launched different = run(other);
  INFO(different.err[1]);
  CHECK(different.codes == std::vector{2, 2});
  CHECK_THAT(different.err[1], Catch::Contains("note: model.weights: rank 0 has "));
}

TEST_CASE("a rank with another token is told so and ends; the run waits for its own, and is whole") {
  const fs::path file = scenario("token", 2, 1, "steps: 1");
  const std::string arguments =
      fmt::format("{} --threads 1 --overwrite --out {}", file.string(), (work_folder() / "token").string());
  const fs::path said0 = work_folder() / "token0.err", said1 = work_folder() / "token1.err";
  const ReservedPort port;
  const auto first = start(port, 0, arguments, said0, {{"HOTBUNK_TOKEN", "abc"}});
  for (const auto& [token, reason] :
       std::map<std::string, std::string>{{"abd", "this rank's HOTBUNK_TOKEN is not rank 0's"},
                                          {"", "rank 0 has a HOTBUNK_TOKEN, this rank has none"}}) {
    const auto stranger = start(port, 1, arguments, said1, {{"HOTBUNK_TOKEN", token}});
    CHECK(stranger->wait() == 3);
    CHECK_THAT(text_of(said1), Catch::Contains("refuses this rank: " + reason));
  }
  const auto second = start(port, 1, arguments, said1, {{"HOTBUNK_TOKEN", "abc"}});
  const int code = second->wait();
  INFO(text_of(said0) << text_of(said1));
  CHECK(code == 0);
  CHECK(first->wait() == 0);
}

TEST_CASE("ipc between ranks that share no memory is refused before the first step; gloo on one host is not") {
  const fs::path file = scenario("ipc", 2, 1, "steps: 1"), out = work_folder() / "ipc";
  REQUIRE(text_of(file).find("transport") == std::string::npos);  // ipc is the default
  const Result2 one_host =
      hotbunk_command(fmt::format("run {} --transport gloo --overwrite --out {}", file.string(), out.string()));
  INFO(one_host.err);
  CHECK(one_host.code == 0);
  if (std::system("unshare --pid --fork true 2> /dev/null") != 0) {
    std::fprintf(stderr, "skipped: no process namespaces here, so no second host\n");
    WARN("skipped: no process namespaces here, so no second host");
    return;
  }
  const std::string common = fmt::format("{} --threads 1 --overwrite --out {}", file.string(), out.string());
  const Launched two = launch(common, {"", ""}, {"", "unshare --pid --fork"});
  for (std::size_t r = 0; r < 2; ++r) {
    INFO(two.err[r]);
    CHECK(two.codes[r] == 2);
    CHECK_THAT(two.err[r], Catch::Contains("error[E706]: sync.transport ipc reads other ranks' memory, but they share "
                                           "none: rank 1 is not on rank 0's host") &&
                               Catch::Contains("help: set sync.transport to collective") &&
                               !Catch::Contains("step 1/"));
  }
  const Launched remedy = launch(common + " --set sync.transport=collective", {"", ""}, {"", "unshare --pid --fork"});
  INFO(remedy.err[0] << remedy.err[1]);
  CHECK(remedy.codes == std::vector{0, 0});
}

TEST_CASE("a saved plan refuses a scenario that it was not made from, though the plan is the same") {
  const fs::path file = scenario("saved", 1, 1, "steps: 1");
  const fs::path saved = work_folder() / "made_from.json", out = work_folder() / "made_from";
  REQUIRE(hotbunk_command(fmt::format("plan {} --out {}", file.string(), saved.string())).code == 0);
  const auto run = [&](const std::string& more) {
    return hotbunk_command(
        fmt::format("run {} --plan {} --overwrite --out {} {}", file.string(), saved.string(), out.string(), more));
  };
  CHECK(run("").code == 0);
  CHECK(run("--set run.timeout_s=20").code == 0);  // which does not change what is computed
  const Result2 drifted = run("--set optimizer.lr=5 --set seed=3");
  INFO(drifted.err);
  CHECK(drifted.code == 2);
  CHECK_THAT(drifted.err,
             Catch::Contains("error[E510]: the scenario is not the one that the saved plan was made from") &&
                 Catch::Contains("= note: optimizer.lr: saved 1e-06, now 5") &&
                 Catch::Contains("= note: seed: saved 0, now 3"));
  std::string text = text_of(saved);
  const auto at = text.find("\"optimizer.lr\":\"1e-06\"");
  REQUIRE(at != std::string::npos);
  text.replace(at, 22, "\"optimizer.lr\":\"5e-06\"");
  std::ofstream(saved) << text;
  const Result2 edited = run("--set optimizer.lr=5e-06");
  CHECK(edited.code == 2);
  CHECK_THAT(edited.err, Catch::Contains("error[E504]: what the plan was made from is not what was saved"));
}
