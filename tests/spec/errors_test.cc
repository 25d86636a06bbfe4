// Error goldens: tests/spec/errors/*.test hold a bad input, `----`, and exactly what a user reads on stderr
// (golden_text.h).
//
// The first line of the input says what reads it:
//   scenario [--set k=v]...   the rest is scenario.yaml
//   open PATH                 load_scenario of a path
//   config                    the rest is config.json
//   folder [FILE]...          the rest is config.json of a model folder that also has these files, empty
//   safetensors               the rest describes a file, see write_safetensors; it is opened as a checkpoint
//   weights                   the same, then every parameter of the first line's model config is loaded
//   index                     the rest is model.safetensors.index.json in an otherwise empty folder
//
// Lists of all that there is stand there as <classes of all families>, <models of the catalogue>: one more family or
// model changes no file.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <regex>
#include <set>
#include <sstream>

#include "base/file.h"
#include "spec/catalog.h"
#include "spec/family.h"
#include "spec/loader.h"
#include "spec/model_config.h"
#include "spec/safetensors.h"
#include "tests/golden_text.h"
#include "tests/paths.h"

namespace hotbunk {
namespace fs = std::filesystem;
namespace {

/// A folder of its own as working directory, so that messages hold the same relative paths everywhere.
class Scratch {
 public:
  Scratch()
      : home_(fs::current_path()), here_(fs::temp_directory_path() / ("hotbunk-errors-" + std::to_string(::getpid()))) {
    fs::create_directories(here_);
    fs::current_path(here_);
  }
  ~Scratch() {
    fs::current_path(home_);
    fs::remove_all(here_);
  }

 private:
  fs::path home_, here_;
};

/// Lines of: `header JSON`, `length N` (what the file claims; default: the truth), `data N` (zero bytes),
/// `f32 x y …` (values), `cut N` (bytes that remain of the file).
std::string safetensors_of(std::istream& lines) {
  std::string header, data, word;
  std::uint64_t length = 0, cut = ~std::uint64_t{0};
  bool lies = false;
  while (lines >> word) {
    if (word == "header") {
      std::getline(lines >> std::ws, header);
    } else if (word == "length") {
      lines >> length;
      lies = true;
    } else if (word == "data") {
      std::size_t n = 0;
      lines >> n;
      data.append(n, '\0');
    } else if (word == "cut") {
      lines >> cut;
    } else if (word == "f32") {
      std::string rest;
      std::getline(lines, rest);
      std::istringstream values(rest);
      for (std::string text; values >> text;) {
        const float value = std::strtof(text.c_str(), nullptr);
        data.append(reinterpret_cast<const char*>(&value), sizeof value);
      }
    } else {
      FAIL("unknown line " << word);
    }
  }
  if (!lies) length = header.size();
  std::string file(reinterpret_cast<const char*>(&length), 8);
  file += header + data;
  return file.substr(0, cut);
}

template <class T>
std::string rendered(const Result<T>& result) {
  return result ? "no error\n" : render(result.error());
}

std::string run_weights(std::istream& in) {
  std::string config;
  std::getline(in, config);
  REQUIRE(write_file_atomic("model/config.json", config));
  REQUIRE(write_file_atomic("model/model.safetensors", safetensors_of(in)));
  const auto model = load_model("model");
  REQUIRE(model);
  const auto checkpoint = Checkpoint::open(model->weights_path);
  if (!checkpoint) return render(checkpoint.error());
  if (const auto status = checkpoint->check_against(*model); !status) return render(status.error());
  std::string all;
  for (const auto& p : parameters_of(*model)) {
    const auto values = checkpoint->load_parameter(*model, p);
    if (!values) all += render(values.error());
  }
  return all;
}

std::string run_case(const std::string& input) {
  std::istringstream in(input);
  std::string first, command;
  std::getline(in, first);
  std::istringstream words(first);
  words >> command;
  const std::string rest = input.substr(std::min(input.size(), first.size() + 1));
  if (command == "scenario") {
    std::vector<std::string> overrides;
    for (std::string flag, value; words >> flag >> value;) overrides.push_back(value);
    return rendered(load_scenario_text(rest, "scenario.yaml", overrides));
  }
  if (command == "open") {
    std::string path;
    words >> path;
    return rendered(load_scenario(path));
  }
  if (command == "config") return rendered(model_from_text(rest, "config.json", "model"));
  if (command == "safetensors") {
    REQUIRE(write_file_atomic("model.safetensors", safetensors_of(in)));
    return rendered(Checkpoint::open("model.safetensors"));
  }
  if (command == "folder") {  // a model folder of this config and empty files of these names
    REQUIRE(write_file_atomic("bare/config.json", rest));
    for (std::string name; words >> name;) REQUIRE(write_file_atomic("bare/" + name, ""));
    return rendered(load_model("bare"));
  }
  if (command == "weights") return run_weights(in);
  if (command == "index") {
    REQUIRE(write_file_atomic("sharded/model.safetensors.index.json", rest));
    return rendered(Checkpoint::open("sharded"));
  }
  FAIL("unknown command " << command);
  return {};
}

std::string with_lists_named(std::string message) {
  std::vector<std::string_view> classes;
  for (const FamilySpec* family : families()) classes.push_back(family->class_name);
  const auto name = [&](const std::string& list, const std::string& as) {
    if (const auto at = message.find(list); at != std::string::npos) message.replace(at, list.size(), as);
  };
  name(fmt::format("{}", fmt::join(classes, ", ")), "<classes of all families>");
  name(fmt::format("{}", fmt::join(catalog_names("models"), ", ")), "<models of the catalogue>");
  return message;
}

}  // namespace

TEST_CASE("error goldens") {
  const Scratch scratch;
  const auto messages =
      test::check_golden_texts(fs::path(source_folder) / "tests/spec/errors",
                               [](const std::string& input) { return with_lists_named(run_case(input)); });
  std::set<std::string> seen;
  for (const auto& [file, message] : messages) {
    INFO(file);
    CHECK(message != "no error\n");
    CHECK(seen.insert(message).second);  // every golden shows a message of its own
  }
  CHECK(messages.size() >= 40);
}

TEST_CASE("docs/errors.md lists every code that a source file can report") {
  const fs::path root = source_folder;
  const auto page = read_file(root / "docs/errors.md");
  REQUIRE(page);
  std::set<std::string> codes;
  for (const char* part : {"base", "spec", "interop", "layout", "graph", "lowering", "trace", "exec", "planner", "sim",
                           "runtime", "backends", "rl", "reports", "cli"}) {
    for (const auto& entry : fs::recursive_directory_iterator(root / part)) {
      if (entry.path().extension() != ".cc" && entry.path().extension() != ".h") continue;
      const auto source = read_file(entry.path());
      REQUIRE(source);
      static const std::regex code_literal("\"(E[0-9]{3})\"");
      for (std::sregex_iterator at(source->begin(), source->end(), code_literal), end; at != end; ++at) {
        const std::string code = (*at)[1];
        INFO(entry.path().filename().string() << " " << code);
        if (codes.insert(code).second) CHECK(page->find("| " + code + " |") != std::string::npos);
      }
    }
  }
  CHECK(codes.size() > 50);
}

}  // namespace hotbunk
