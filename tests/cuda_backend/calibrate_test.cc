// calibrate on the driver's double: its logic, and that its times are no price.
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "tests/json.h"
#include "tests/paths.h"

namespace calibrate_test {
namespace {

using namespace hotbunk;
namespace fs = std::filesystem;

TEST_CASE("a profile of the double has all kinds of ops, says what it is, and is refused as a price unless asked for") {
  const fs::path folder = fs::temp_directory_path() / fmt::format("hotbunk_cuda_calibrate_test.{}", ::getpid());
  fs::create_directories(folder);
  const auto hotbunk = [&](const std::string& command) {
    const int status = std::system(fmt::format("cd {} && {} {} > {} 2> {} < /dev/null", source_folder, program_file,
                                               command, (folder / "out").string(), (folder / "err").string())
                                       .c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
  };
  const auto said = [&](const char* file) { return read_file(folder / file).value_or(""); };
  const std::string demo =
      "scenarios/demo.yaml --set model.num_hidden_layers=1 --set algorithm.prompts=2 --set "
      "algorithm.samples_per_prompt=2 "
      "--set algorithm.mini_batches=1 --set train.micro_batch_tokens=18 --set rollout.max_running_requests=4 "
      "--set rollout.max_prefill_tokens=20 --json";
  const std::string profile = (folder / "profile.yaml").string(), accepted = (folder / "profile.double.yaml").string();
  const int code = hotbunk(fmt::format("calibrate {} --backend cuda-fake --steps 2 --out {}", demo, profile));
  INFO(said("err"));
  REQUIRE(code == 0);
  const auto document = json_from<nlohmann::json>(said("out"));
  CHECK(document["device"] == "hotbunk driver double");
  CHECK(document["launch_seconds"].get<double>() > 0.0);
  const std::string text = said("profile.yaml");
  CHECK_THAT(text, Catch::Contains("the driver's double, no hardware") && Catch::Contains("own kernels"));
  for (const char* op : {"linear", "linear_wgrad", "attention", "paged_attention", "swiglu", "rms_norm", "h2d", "d2h",
                         "map", "unmap", "map_host", "unmap_host", "all_reduce", "all_gather", "launch"})
    CHECK_THAT(text, Catch::Contains(fmt::format("op: {},", op)));

  const auto simulated = [&](const std::string& with) {
    return hotbunk(fmt::format("simulate {} --set steps=1 --set cluster.calibration={}", demo, with));
  };
  CHECK(simulated(profile) == 2);
  CHECK_THAT(said("err"), Catch::Contains("E267"));
  fs::rename(profile, accepted);
  const int accepted_code = simulated(accepted);
  INFO(said("err"));
  CHECK(accepted_code == 0);
  fs::remove_all(folder);
}

}  // namespace
}  // namespace calibrate_test
