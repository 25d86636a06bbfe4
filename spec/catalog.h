// Where the catalogue of models and GPUs is, what it holds, and what the local machine is.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

namespace hotbunk {

/// The first that exists of: $HOTBUNK_CATALOG, share/hotbunk/catalog beside the executable's folder, the source tree.
std::filesystem::path catalog_root();

/// Names in one kind ("models", "gpus"), sorted: the file names without their extension.
std::vector<std::string> catalog_names(const std::string& kind);

/// The file of an entry ("models/qwen2.5-7b.json"); empty when there is none.
std::filesystem::path catalog_file(const std::string& kind, const std::string& name);

struct LocalMachine {
  std::int64_t cores = 1;         // that this process may run on (affinity and cgroup quota)
  std::int64_t memory_bytes = 0;  // physical, or the cgroup's limit where that is lower
};
LocalMachine local_machine();

}  // namespace hotbunk
