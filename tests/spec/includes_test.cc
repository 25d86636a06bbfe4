// Who may include whom: the folders' order, as docs/contributing.md tells it. A folder is listed with what it may
// include besides itself; a new one needs a line here.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "spec/family.h"
#include "tests/paths.h"

namespace hotbunk {
namespace fs = std::filesystem;
namespace {

const std::map<std::string, std::vector<std::string>> may_include = {
    {"base", {}},
    {"spec", {"base"}},
    {"interop", {"base", "spec"}},
    {"layout", {"base", "spec"}},
    {"graph", {"base", "spec", "layout"}},
    {"model", {"base", "spec", "layout", "graph"}},
    {"shard", {"base", "spec", "layout", "graph", "model"}},
    {"lowering", {"base", "spec", "layout", "graph", "model", "shard"}},
    {"trace", {"base", "spec", "layout", "graph", "lowering"}},
    {"exec", {"base", "spec", "layout", "graph", "lowering", "trace"}},
    {"planner", {"base", "spec", "layout", "graph", "lowering", "trace"}},
    // The simulator prices ops with the planner's cost model; it knows no backend, and no backend knows it.
    {"sim", {"base", "spec", "graph", "trace", "exec", "planner"}},
    // What executing backends share knows none of them.
    {"runtime", {"base", "graph", "trace", "exec"}},
    {"backends/cpu_gloo", {"base", "graph", "trace", "exec", "runtime"}},
    {"backends/cuda", {"base", "graph", "trace", "exec", "runtime"}},
    {"rl", {"base", "spec", "layout", "graph", "lowering", "trace", "exec"}},
    {"reports", {"base", "spec", "layout", "graph", "lowering", "trace", "exec", "planner"}},
    {"cli",
     {"base", "spec", "interop", "layout", "graph", "lowering", "trace", "exec", "planner", "sim", "runtime",
      "backends/cpu_gloo", "backends/cuda", "rl", "reports"}},
};

/// Single headers beyond that: by the CPU backend's kernels the CUDA backend computes what lies in the host's memory.
const std::map<std::string, std::vector<std::string>> may_include_headers = {
    {"backends/cuda", {"backends/cpu_gloo/op_kernels.h"}},
};

/// The folder of a source file, or of an included path: "backends/cpu_gloo" of "backends/cpu_gloo/kernels/gemm.h".
/// "" of a file beside the includer (no folder of the tree).
std::string folder_of(const std::string& path) {
  const auto first = path.find('/');
  if (first == std::string::npos) return "";
  std::string folder = path.substr(0, first);
  if (folder == "backends") folder = path.substr(0, path.find('/', first + 1));
  return folder;
}

/// "" or what is wrong with a file's including of a header.
std::string complaint(const std::string& file, const std::string& header) {
  const std::string from = folder_of(file), to = folder_of(header);
  if (to.empty() || to == from) return "";
  const auto allows = [](const std::vector<std::string>& allowed, const std::string& what) {
    return std::ranges::find(allowed, what) != allowed.end();
  };
  if (allows(may_include.at(from), to)) return "";
  const auto headers = may_include_headers.find(from);
  return headers != may_include_headers.end() && allows(headers->second, header) ? "" : file + " includes " + header;
}

/// The types that a source text defines outside of functions and of unnamed namespaces, with their namespace. Formatted
/// as this tree is: what stands at the beginning of a line is in no other braces than a namespace's.
std::vector<std::string> types_defined(std::istream& text) {
  static const std::regex opens(R"(^(?:inline )?namespace ?([\w:]*) ?\{$)"), closes(R"(^\}  // namespace.*)"),
      defines(R"(^(?:struct|class|enum|enum class|union) (\w+)(?: final)?(?: :.*)? ?\{.*)");
  std::vector<std::string> within, out;
  for (std::string line; std::getline(text, line);) {
    std::smatch found;
    if (std::regex_match(line, found, opens)) within.push_back(found[1]);
    else if (std::regex_match(line, closes) && !within.empty()) within.pop_back();
    else if (std::regex_match(line, found, defines) && std::ranges::find(within, "") == within.end())
      out.push_back(fmt::format("{}::{}", fmt::join(within, "::"), found[1].str()));
  }
  return out;
}

}  // namespace

TEST_CASE("includes follow the folders' order: the simulator and the backends never meet") {
  static const std::regex include(R"re(^\s*#\s*include\s*"([^"]+)")re");
  std::size_t seen = 0;
  for (const auto& [folder, allowed] : may_include) {
    for (const auto& entry : fs::recursive_directory_iterator(fs::path(source_folder) / folder)) {
      const std::string ending = entry.path().extension().string();
      if (ending != ".cc" && ending != ".h" && ending != ".cu" && ending != ".cuh") continue;
      const std::string file = fs::relative(entry.path(), source_folder).generic_string();
      std::ifstream in(entry.path());
      for (std::string line; std::getline(in, line);)
        if (std::smatch found; std::regex_search(line, found, include)) {
          ++seen;
          CHECK_THAT(complaint(file, found[1]), Catch::Equals(""));
        }
    }
  }
  CHECK(seen > 800);  // files were found
}

TEST_CASE("a family costs one file: nobody but it names it, and nobody above asks which one a model is of") {
  // Of a config's defaults, its parameters' names and its files only model/families/ speaks; what computes, places and
  // prices a model asks what it has (ModelSpec). Other systems' launches and published tables give sizes alone: whoever
  // writes a config for these has to say of what form it is.
  const std::vector<std::string> may_name = {"interop/launch_model.cc", "planner/validate/validate.cc"};
  std::vector<std::string> names;  // what config.json says, and what the list of families is made of
  for (const FamilySpec* family : families()) {
    names.push_back(fmt::format("\"{}\"", family->model_type));
    names.push_back(std::string(family->class_name));
    if (!family->model_type_around.empty()) names.push_back(fmt::format("\"{}\"", family->model_type_around));
  }
  std::map<std::string, std::set<std::string>> named_by;
  for (const auto& [folder, allowed] : may_include)
    for (const auto& entry : fs::recursive_directory_iterator(fs::path(source_folder) / folder)) {
      const std::string ending = entry.path().extension().string();
      if (ending != ".cc" && ending != ".h" && ending != ".cu" && ending != ".txt") continue;
      const std::string file = fs::relative(entry.path(), source_folder).generic_string();
      const bool is_family = file.starts_with("model/families/");
      std::ifstream in(entry.path());
      for (std::string line; std::getline(in, line);) {
        for (const std::string& name : names)
          if (line.find(name) != std::string::npos) {
            named_by[name].insert(file);
            INFO(file << ": " << line);
            CHECK((is_family || std::ranges::find(may_name, file) != may_name.end()));
          }
        if (line.find("extern const FamilySpec ") != std::string::npos) {
          INFO(file << ": " << line);
          CHECK(is_family);
        }
        // They are part of spec/'s library, whose loader asks them: nothing above it.
        if (const std::string quoted = "#include \""; is_family && line.starts_with(quoted)) {
          const std::string header = line.substr(quoted.size());
          INFO(file << " includes " << header);
          CHECK((header.starts_with("base/") || header.starts_with("spec/") || header.starts_with("model/families/")));
        }
      }
    }
  for (const std::string& name : names) {
    INFO(name);
    CHECK(std::ranges::count_if(named_by[name],
                                [](const std::string& file) { return file.starts_with("model/families/"); }) == 1);
  }
}

TEST_CASE("a type of one name has one definition") {
  std::map<std::string, std::string> defined;
  for (const auto& [folder, allowed] : may_include)
    for (const auto& entry : fs::recursive_directory_iterator(fs::path(source_folder) / folder)) {
      const std::string ending = entry.path().extension().string();
      if (ending != ".cc" && ending != ".h") continue;
      const std::string file = fs::relative(entry.path(), source_folder).generic_string();
      std::ifstream in(entry.path());
      for (const std::string& type : types_defined(in)) {
        const auto [at, is_new] = defined.try_emplace(type, file);
        INFO(type << " of " << file << " and of " << at->second);
        CHECK((is_new || at->second == file));  // the linker takes either's members for both
      }
    }
  CHECK(defined.size() > 400);
  std::istringstream twice(
      "namespace a {\nstruct B {};\nnamespace {\nclass C {\n}  // namespace\nenum class D : int { x };\n}");
  CHECK(types_defined(twice) == std::vector<std::string>{"a::B", "a::D"});
}

TEST_CASE("every folder with sources has a place in the order") {
  for (const auto& entry : fs::directory_iterator(source_folder)) {
    const std::string name = entry.path().filename().string();
    if (!entry.is_directory() || !fs::exists(entry.path() / "CMakeLists.txt") || name == "tests" || name == "bench")
      continue;
    INFO(name);
    CHECK(may_include.contains(name));
  }
}

TEST_CASE("an include against the order is found") {
  CHECK(complaint("runtime/world.cc", "backends/cpu_gloo/arena.h") ==
        "runtime/world.cc includes backends/cpu_gloo/arena.h");
  CHECK_THAT(complaint("sim/engine.cc", "runtime/world.h"), !Catch::Equals(""));
  CHECK_THAT(complaint("sim/engine.cc", "backends/cuda/driver.h"), !Catch::Equals(""));
  CHECK_THAT(complaint("backends/cpu_gloo/arena.cc", "sim/engine.h"), !Catch::Equals(""));
  CHECK_THAT(complaint("backends/cpu_gloo/arena.cc", "planner/cost/hardware.h"), !Catch::Equals(""));
  CHECK_THAT(complaint("backends/cuda/driver.cc", "backends/cpu_gloo/kernels/gemm.h"), !Catch::Equals(""));
  CHECK_THAT(complaint("backends/cuda/driver.cc", "backends/cpu_gloo/op_kernels.h"), Catch::Equals(""));
  CHECK_THAT(complaint("backends/cpu_gloo/op_kernels.cc", "backends/cuda/driver.h"), !Catch::Equals(""));
  CHECK_THAT(complaint("base/hash.cc", "graph/plan.h"), !Catch::Equals(""));
  CHECK_THAT(complaint("backends/cpu_gloo/kernels/norm.cc", "backends/cpu_gloo/arena.h"), Catch::Equals(""));
  CHECK_THAT(complaint("sim/engine.cc", "exec/backend.h"), Catch::Equals(""));
  CHECK_THAT(complaint("cli/run.cc", "runtime/world.h"), Catch::Equals(""));
}

}  // namespace hotbunk
