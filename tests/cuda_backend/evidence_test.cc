// Nothing is claimed of hardware that did not happen: hardware_evidence.json has a row for every kernel file, and the
// README says of it what the file says.
#include "backends/cuda/evidence.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <filesystem>

#include "backends/cuda/context.h"
#include "base/file.h"
#include "tests/paths.h"

using namespace hotbunk;

TEST_CASE("every kernel file has a row of evidence, and the README says whether any of it ran") {
  const auto evidence = cuda::hardware_evidence();
  const auto has = [&](const std::string& claim) {
    return std::ranges::find(evidence, claim, &cuda::Evidence::claim) != evidence.end();
  };
  CHECK(has("conformance suite"));
  std::size_t files = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::filesystem::path(source_folder) / "backends/cuda/kernels")) {
    if (entry.path().extension() != ".cu") continue;
    ++files;
    INFO(entry.path());
    CHECK(has("kernels/" + entry.path().filename().string()));
  }
  CHECK(files == cuda::kernel_file_names().size());

  const bool none = std::ranges::none_of(evidence, [](const cuda::Evidence& e) { return e.last_run.has_value(); });
  const auto readme = read_file(std::filesystem::path(source_folder) / "README.md");
  REQUIRE(readme);
  CHECK((readme->find("never ran on hardware") != std::string::npos) == none);
  CHECK((cuda::evidence_text() == "never ran on hardware") == none);
}
