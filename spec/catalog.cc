#include "spec/catalog.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>

#include "base/cores.h"
#include "base/file.h"
#include "spec/yaml_tree.h"

namespace hotbunk {
namespace fs = std::filesystem;
namespace {

std::string extension_of(const std::string& kind) { return kind == "models" ? ".json" : ".yaml"; }

/// A cgroup file's first number; `fallback` when there is none ("max").
std::int64_t cgroup_number(const char* file, std::int64_t fallback) {
  std::ifstream in(file);
  std::int64_t value = 0;
  return in >> value && value > 0 ? value : fallback;
}

std::string lower_case(std::string_view text) {
  std::string out(text);
  for (char& c : out)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return out;
}

/// In lower case, without the vendor's name.
std::vector<std::string> words_of(std::string_view name) {
  std::vector<std::string> out(1);
  for (const char c : lower_case(name)) {
    if (c == '-' || c == '_' || c == ' ') out.emplace_back();
    else out.back() += c;
  }
  std::erase_if(out, [](const std::string& word) { return word.empty() || word == "nvidia"; });
  return out;
}

bool holds(const std::vector<std::string>& words, const std::vector<std::string>& asked) {
  auto at = words.begin();
  for (const std::string& word : asked) {
    at = std::find(at, words.end(), word);
    if (at == words.end()) return false;
    ++at;
  }
  return true;
}

/// Behind the last slash, in lower case.
std::string short_name(std::string_view hub_name) {
  return lower_case(hub_name.substr(hub_name.rfind('/') + 1));  // npos + 1: all of it
}

}  // namespace

fs::path catalog_root() {
  if (const char* given = std::getenv("HOTBUNK_CATALOG"); given != nullptr && *given != '\0') return given;
  std::error_code ec;
  const fs::path executable = fs::read_symlink("/proc/self/exe", ec);
  if (!ec) {
    fs::path installed = executable.parent_path().parent_path() / "share/hotbunk/catalog";
    if (fs::is_directory(installed, ec)) return installed;
  }
  return HOTBUNK_CATALOG_DIR;
}

std::vector<std::string> catalog_names(const std::string& kind) {
  std::vector<std::string> names;
  std::error_code ec;
  for (const auto& entry : fs::directory_iterator(catalog_root() / kind, ec))
    if (entry.path().extension() == extension_of(kind)) names.push_back(entry.path().stem().string());
  std::sort(names.begin(), names.end());
  return names;
}

fs::path catalog_file(const std::string& kind, const std::string& name) {
  if (name.empty() || name.size() > 200 || name.find('/') != std::string::npos || name.front() == '.') return {};
  const fs::path file = catalog_root() / kind / (name + extension_of(kind));
  std::error_code ec;
  return fs::exists(file, ec) ? file : fs::path();
}

std::vector<std::string> catalog_matches(const std::string& kind, const std::string& name) {
  if (!catalog_file(kind, name).empty()) return {name};
  const std::vector<std::string> asked = words_of(name);
  std::vector<std::string> out = catalog_names(kind);
  std::erase_if(out, [&](const std::string& entry) { return asked.empty() || !holds(words_of(entry), asked); });
  return out;
}

namespace {

/// A catalogue of the user's own need not have it.
Result<YamlNode> hub_names() {
  const fs::path file = catalog_root() / "hub_names.yaml";
  const auto text = read_file(file, std::int64_t{1} << 20);
  return text ? parse_yaml(*text, file.string()) : fail(text.error());
}

}  // namespace

std::string hub_name_of(const std::string& catalogue_name) {
  const auto names = hub_names();
  const YamlNode* const known = names ? names->find(catalogue_name) : nullptr;
  return known == nullptr || known->items.empty() ? "" : known->items.front().text;
}

std::string catalog_model_of_hub(const std::string& name) {
  const auto names = hub_names();
  if (!names) return "";
  const std::string asked = short_name(name);
  for (const YamlEntry& model : names->entries)
    for (const YamlNode& known : model.value.items)
      if (short_name(known.text) == asked) return model.key;
  return "";
}

LocalMachine local_machine() {
  LocalMachine machine;
  machine.cores = local_cores();
  machine.memory_bytes = static_cast<std::int64_t>(::sysconf(_SC_PHYS_PAGES)) * ::sysconf(_SC_PAGE_SIZE);
  machine.memory_bytes =
      std::min(machine.memory_bytes, cgroup_number("/sys/fs/cgroup/memory.max", machine.memory_bytes));
  return machine;
}

}  // namespace hotbunk
