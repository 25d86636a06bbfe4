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

/// Entries of a kind that a short name may mean: the entry itself; or all whose words (between dashes) hold the words
/// of the name in their order, whatever their case: "h100" and "NVIDIA H100 80GB" are h100-sxm-80gb, "a100" is two.
std::vector<std::string> catalog_matches(const std::string& kind, const std::string& name);

/// The catalogue's model for a name of the Hugging Face hub ("Qwen/Qwen2.5-7B-Instruct"; case and what stands before
/// the slash do not matter); "": none has that architecture, those sizes and rotary settings. Source: hub_names.yaml.
std::string catalog_model_of_hub(const std::string& name);

/// The other way round, what a launch can load: the first of the hub's names for a model of the catalogue ("Qwen/
/// Qwen2.5-7B"); "": there is none.
std::string hub_name_of(const std::string& catalogue_name);

struct LocalMachine {
  std::int64_t cores = 1;         // that this process may run on (affinity and cgroup quota)
  std::int64_t memory_bytes = 0;  // physical, or the cgroup's limit where that is lower
};
LocalMachine local_machine();

}  // namespace hotbunk
