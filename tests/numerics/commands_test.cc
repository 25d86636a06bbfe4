// `hotbunk logprobs` and `hotbunk generate` as a user starts them: documents, lines, exit codes, messages.
#include <catch2/catch.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "tests/json.h"
#include "tests/numerics/golden.h"
#include "tests/numerics/training_run.h"
#include "tests/paths.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

struct Answer {
  int exit_code = -1;
  std::string out, err;
};

Answer run(const std::string& arguments, const std::filesystem::path& scratch) {
  const auto err = scratch / "stderr";
  const std::string command = std::string(build_folder) + "/hotbunk " + arguments + " 2>" + err.string();
  Answer answer;
  FILE* pipe = ::popen(command.c_str(), "r");
  REQUIRE(pipe != nullptr);
  char buffer[4096];
  for (std::size_t n; (n = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;) answer.out.append(buffer, n);
  answer.exit_code = WEXITSTATUS(::pclose(pipe));
  answer.err = read_file(err).value_or("");
  return answer;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

/// A JSONL file in the folder.
std::string written(const TemporaryFolder& folder, const std::string& text) {
  const auto file = folder.path() / "tokens.jsonl";
  REQUIRE(write_file_atomic(file, text).has_value());
  return file.string();
}

template <class Rows>
std::string jsonl(const Rows& rows) {
  std::string text;
  for (const auto& row : rows) text += json_text(nlohmann::json(row)) + "\n";
  return text;
}

}  // namespace

TEST_CASE("hotbunk logprobs prints what transformers computes") {
  const Golden g = Golden::load("llama-gqa");
  const TemporaryFolder folder;
  std::vector<std::vector<std::int32_t>> rows;
  for (const TokenSequence& s : g.sequences) rows.push_back(s.tokens);
  const std::string arguments = "logprobs --model " + g.folder + " --tokens " + written(folder, jsonl(rows));

  const Answer document = run(arguments + " --json", folder.path());
  REQUIRE(document.exit_code == 0);
  const auto json = json_from<nlohmann::json>(document.out);
  CHECK(json["schema"] == "hotbunk.logprobs/1");
  const Answer plain = run(arguments, folder.path());
  REQUIRE(plain.exit_code == 0);
  const auto lines = lines_of(plain.out);
  REQUIRE(lines.size() == rows.size());
  std::vector<float> from_document, from_lines;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto values = json["sequences"][i]["logprobs"].get<std::vector<float>>();
    CHECK(values.size() + 1 == rows[i].size());
    from_document.insert(from_document.end(), values.begin(), values.end());
    const auto line = json_from<nlohmann::json>(lines[i]).get<std::vector<float>>();
    from_lines.insert(from_lines.end(), line.begin(), line.end());
  }
  CHECK(from_lines == from_document);
  CHECK(relative_error(from_lines, g.tensor("logprobs")) <= 1e-5);
}

TEST_CASE("hotbunk generate prints the tokens that transformers generates") {
  const Golden g = Golden::load("qwen2-bias");
  const TemporaryFolder folder;
  const std::string arguments = "generate --model " + g.folder + " --tokens " + written(folder, jsonl(g.prompts)) +
                                " --max-new-tokens 12 --temperature 0 --seed 7";
  const Answer plain = run(arguments, folder.path());
  REQUIRE(plain.exit_code == 0);
  CHECK(plain.out == jsonl(g.new_tokens));
  const auto json = json_from<nlohmann::json>(run(arguments + " --json", folder.path()).out);
  CHECK(json["schema"] == "hotbunk.generate/1");
  for (std::size_t i = 0; i < g.prompts.size(); ++i) {
    CHECK(json["sequences"][i]["prompt_tokens"] == g.prompts[i].size());
    CHECK(json["sequences"][i]["tokens"] == g.new_tokens[i]);
    CHECK(json["sequences"][i]["logprobs"].size() == g.new_tokens[i].size());
  }
}

TEST_CASE("hotbunk logprobs says of hotbunk generate's tokens what generate said, to the bit") {
  for (const char* name : {"llama-gqa", "llama-tied", "llama3-rope", "mha-one-kv", "qwen2-bias", "qwen3-norm"})
    for (const char* temperature : {"0", "1"}) {
      CAPTURE(name, temperature);
      const Golden g = Golden::load(name);
      const TemporaryFolder folder;
      const std::string model = " --json --model " + g.folder;
      const Answer said = run("generate" + model + " --tokens " + written(folder, jsonl(g.prompts)) +
                                  " --max-new-tokens 40 --seed 3 --temperature " + temperature,
                              folder.path());
      REQUIRE(said.exit_code == 0);
      const auto generated = json_from<nlohmann::json>(said.out)["sequences"];
      REQUIRE(generated.size() == g.prompts.size());
      std::vector<std::vector<std::int32_t>> rows = g.prompts;
      for (std::size_t i = 0; i < rows.size(); ++i)
        for (const auto& id : generated[i]["tokens"]) rows[i].push_back(id);
      const Answer again = run("logprobs" + model + " --tokens " + written(folder, jsonl(rows)), folder.path());
      REQUIRE(again.exit_code == 0);
      const auto scored = json_from<nlohmann::json>(again.out)["sequences"];
      for (std::size_t i = 0; i < rows.size(); ++i) {
        const auto rollout = generated[i]["logprobs"].get<std::vector<float>>();
        auto training = scored[i]["logprobs"].get<std::vector<float>>();
        REQUIRE(training.size() == rows[i].size() - 1);
        training.erase(training.begin(), training.begin() + static_cast<std::ptrdiff_t>(g.prompts[i].size()) - 1);
        CHECK(!rollout.empty());
        CHECK(rollout == training);
      }
    }
}

TEST_CASE("what no model can be asked ends with exit code 2 and names file and line") {
  const Golden g = Golden::load("llama-gqa");  // 97 ids, 128 positions
  const TemporaryFolder folder;
  const std::string long_line = json_text(nlohmann::json(std::vector<int>(129, 1)));
  const std::string whole_line = json_text(nlohmann::json(std::vector<int>(128, 1)));
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"[1, 2]\n[3, 97]\n", "E123"},           {"[1, 2]\n[-1]\n", "E123"},       {"[1]\nhello\n", "E122"},
      {"[1]\n{\"tokens\": [1, 2]}\n", "E122"}, {"[1]\n[1.5]\n", "E122"},         {"[1]\n[]\n", "E124"},
      {"[1]\n" + long_line + "\n", "E124"},    {"[1]\n[99999999999]\n", "E123"},
  };
  for (const auto& [text, code] : cases) {
    CAPTURE(text);
    const std::string file = written(folder, text);
    for (const char* command : {"logprobs", "generate --max-new-tokens 2"}) {
      const Answer answer = run(std::string(command) + " --model " + g.folder + " --tokens " + file, folder.path());
      CHECK(answer.exit_code == 2);
      CHECK(answer.out.empty());
      CHECK(answer.err.find("error[" + code + "]") != std::string::npos);
      CHECK(answer.err.find(file + ":2") != std::string::npos);
    }
  }
  const std::string model = " --model " + g.folder + " --tokens ";
  CHECK(run("logprobs" + model + written(folder, whole_line), folder.path()).exit_code == 0);
  CHECK(run("generate --max-new-tokens 1" + model + written(folder, whole_line), folder.path()).exit_code == 2);
  CHECK(run("generate --max-new-tokens 128" + model + written(folder, "[1]"), folder.path()).exit_code == 2);
  CHECK(run("generate --max-new-tokens 127" + model + written(folder, "[1]"), folder.path()).exit_code == 0);
  CHECK(run("logprobs" + model + written(folder, "\n\n"), folder.path()).exit_code == 2);
  CHECK(run("logprobs" + model + "/nowhere.jsonl", folder.path()).exit_code == 2);
  CHECK(run("logprobs --model /nowhere --tokens " + written(folder, "[1]"), folder.path()).exit_code == 2);
}
