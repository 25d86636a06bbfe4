// Runs of the program as a user starts them, and what they leave behind.
#pragma once
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "base/file.h"
#include "tests/json.h"
#include "tests/paths.h"

namespace hotbunk::test {

using Json = nlohmann::json;
namespace fs = std::filesystem;

struct Ended {
  int code = -1;
  std::string out, err;
  double seconds = 0;
};

class Folder {
 public:
  Folder() { fs::create_directories(root); }
  ~Folder() { fs::remove_all(root); }
  const fs::path root = fs::temp_directory_path() / fmt::format("hotbunk_cuda_run_test.{}", ::getpid());

  /// `launch`: what stands before the command; `node`: behind the names of what it says.
  Ended run(const std::string& name, const std::string& options, const std::string& launch = "",
            const std::string& node = "") const {
    return command(fmt::format("{}{} run {} --out {}", launch, program_file, options, (root / name).string()),
                   name + node);
  }
  /// Goes on, on the CPU backend, from the furthest checkpoint of a run.
  Ended resume(const std::string& name) const {
    return command(fmt::format("{} run --resume {}", program_file, (root / name).string()), name + ".resumed");
  }
  std::vector<Json> lines(const std::string& run, const char* file) const {
    const auto text = read_file(root / run / file);
    REQUIRE(text);
    std::vector<Json> all;
    std::istringstream in(*text);
    for (std::string line; std::getline(in, line);) all.push_back(json_from<Json>(line));
    return all;
  }

  /// A shell's, in the source's folder; `said` names what it says.
  Ended command(const std::string& line, const std::string& said) const {
    const fs::path out = root / (said + ".out"), err = root / (said + ".err");
    const auto start = std::chrono::steady_clock::now();
    const int status = std::system(
        fmt::format("cd {} && {} > {} 2> {} < /dev/null", source_folder, line, out.string(), err.string()).c_str());
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128, read_file(out).value_or(""), read_file(err).value_or(""),
            took.count()};
  }
};

inline bool is_time(const std::string& key) { return key.starts_with("timing_s/") || key == "perf/throughput"; }

/// What was sampled, sample by sample.
inline std::vector<Json> tokens_of(const Folder& folder, const std::string& run) {
  std::vector<Json> all;
  for (const Json& sample : folder.lines(run, "samples.jsonl")) all.push_back(sample["tokens"]);
  return all;
}

/// Figures of all steps agree as far as fp32 sums in another order do.
inline void check_figures(const std::vector<Json>& ours, const std::vector<Json>& theirs, double relative) {
  REQUIRE(ours.size() == theirs.size());
  for (std::size_t step = 0; step < ours.size(); ++step)
    for (const auto& [key, value] : theirs[step].items()) {
      if (is_time(key) || !value.is_number()) continue;
      INFO("step " << step + 1 << ", " << key << ": " << ours[step][key] << ", on the CPU " << value);
      const double a = ours[step][key].get<double>(), b = value.get<double>();
      // log-probs of a rollout over two ranks and of training differ by roundings of their own
      const double absolute = key.starts_with("rollout/logprob_gap") ? 2e-6 : 1e-8;
      CHECK(std::abs(a - b) <= relative * std::abs(b) + absolute);
    }
}

}  // namespace hotbunk::test
