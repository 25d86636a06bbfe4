// What tests of the program as a user runs it share: a command, what it said, and a tiny job.
#pragma once
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "base/file.h"
#include "tests/paths.h"

namespace hotbunk {

namespace fs = std::filesystem;

struct Result2 {
  int code = -1;
  std::string out, err;
};

inline fs::path work_folder() {
  static const fs::path folder = [] {
    fs::path p = fs::temp_directory_path() / fmt::format("hotbunk_run_test.{}", ::getpid());
    fs::create_directories(p);
    return p;
  }();
  return folder;
}

inline std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> out;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) out.push_back(line);
  return out;
}
inline std::string text_of(const fs::path& p) { return read_file(p).value_or(""); }

/// A variable of the environment that programs find, as long as this lives; then it is what it was.
class EnvironmentVariable {
 public:
  EnvironmentVariable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    ::setenv(name, value, 1);
  }
  ~EnvironmentVariable() {
    if (before_) ::setenv(name_, before_->c_str(), 1);
    else ::unsetenv(name_);
  }
  EnvironmentVariable(const EnvironmentVariable&) = delete;
  EnvironmentVariable& operator=(const EnvironmentVariable&) = delete;

 private:
  const char* name_;
  std::optional<std::string> before_;
};

inline Result2 hotbunk_command(const std::string& arguments) {
  const fs::path out = work_folder() / "stdout", err = work_folder() / "stderr";
  const int status = std::system(
      fmt::format("{} {} > {} 2> {} < /dev/null", program_file, arguments, out.string(), err.string()).c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128, text_of(out), text_of(err)};
}

inline void must_run(const std::string& arguments) {
  const Result2 r = hotbunk_command(arguments);
  INFO(arguments << '\n' << r.err);
  REQUIRE(r.code == 0);
}

/// Processes whose parent is `pid`, the oldest first.
inline std::vector<int> children_of(int pid) {
  std::vector<int> out;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    std::ifstream stat(entry.path() / "stat");
    std::string text((std::istreambuf_iterator<char>(stat)), {});
    const auto close = text.rfind(')');
    int parent = 0;
    char state = 0;
    if (close != std::string::npos && std::sscanf(text.c_str() + close + 1, " %c %d", &state, &parent) == 2 &&
        parent == pid && state != 'Z')
      out.push_back(std::stoi(name));
  }
  std::ranges::sort(out);
  return out;
}

/// A tiny job; `extra` is YAML appended at the top level.
inline fs::path scenario(const std::string& name, int ranks, int tp, const std::string& extra = "") {
  fs::path path = work_folder() / (name + ".yaml");
  std::ofstream(path) << fmt::format(R"(
name: {0}
model: {{model_type: llama, architectures: [LlamaForCausalLM], hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
  num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 16, max_position_embeddings: 64, rms_norm_eps: 1.0e-5,
  rope_theta: 10000.0, tie_word_embeddings: true, initializer_range: 0.1, bos_token_id: 1, eos_token_id: 2}}
cluster: {{gpu: local-cpu, nodes: 1, gpus_per_node: 1, ranks_per_device: {1}, device_memory_mib: 8}}
train: {{layout: {{dp: {1}}}, micro_batch_tokens: 128, precision: {{params: fp32}}}}
rollout: {{engine: hotbunk, layout: {{tp: {2}, dp: {3}}}, max_running_requests: 16, max_prefill_tokens: 64, block_tokens: 4}}
sync: {{bucket_mib: 0.03, verify: true}}
algorithm: {{name: grpo, prompts: 6, samples_per_prompt: 4, reference: true}}
workload: {{prompt_tokens: {{mean: 4, max: 4}}, response_tokens: {{mean: 3, max: 3}}}}
task: {{name: reverse, digits: 2}}
{4}
)",
                                     name, ranks, tp, ranks / tp, extra);
  return path;
}

}  // namespace hotbunk
