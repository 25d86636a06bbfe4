#include "spec/catalog.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>

#include "base/cores.h"

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

LocalMachine local_machine() {
  LocalMachine machine;
  machine.cores = local_cores();
  machine.memory_bytes = static_cast<std::int64_t>(::sysconf(_SC_PHYS_PAGES)) * ::sysconf(_SC_PAGE_SIZE);
  machine.memory_bytes =
      std::min(machine.memory_bytes, cgroup_number("/sys/fs/cgroup/memory.max", machine.memory_bytes));
  return machine;
}

}  // namespace hotbunk
