#include "rl/carried_files.h"

#include <algorithm>
#include <regex>
#include <utility>

#include "base/file.h"

namespace hotbunk {

namespace fs = std::filesystem;

bool is_carried(std::string_view name) {
  static const std::regex names(
      R"(tokenizer[\w.-]*\.(json|model|jinja)(\.v\d+)?|tiktoken\.model|vocab\.(json|txt)|merges\.txt|added_tokens\.json|special_tokens_map\.json|generation_config\.json|chat_template\.(json|jinja))");
  return std::regex_match(name.begin(), name.end(), names);
}

Result<std::vector<CarriedFile>> read_carried(const fs::path& weights) {
  std::vector<CarriedFile> out;
  if (weights.empty()) return out;
  std::error_code ec;
  const fs::path folder = fs::is_directory(weights, ec) ? weights : weights.parent_path();
  for (const auto& entry : fs::directory_iterator(folder.empty() ? fs::path(".") : folder, ec)) {
    std::string name = entry.path().filename().string();
    if (!is_carried(name) || !entry.is_regular_file(ec)) continue;  // the hub's cache has links: they are followed
    auto bytes = read_file(entry.path());
    if (!bytes) return fail(std::move(bytes.error()));
    out.push_back({std::move(name), std::move(*bytes)});
  }
  std::ranges::sort(out, {}, &CarriedFile::name);
  return out;
}

}  // namespace hotbunk
