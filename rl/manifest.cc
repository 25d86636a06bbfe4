#include "rl/manifest.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "base/file.h"
#include "base/hash.h"
#include "base/json.h"
#include "rl/checkpoint.h"
#include "spec/json_read.h"

namespace hotbunk {
namespace {

namespace fs = std::filesystem;

constexpr const char* schema = "hotbunk.checkpoint/1";

Diagnostic differs(const fs::path& file, std::string why, std::vector<std::string> notes = {}) {
  return {
      .code = "E421",
      .message = fmt::format("the checkpoint is not as it was written: {} {}", file.filename().string(), why),
      .where = {file.string()},
      .notes = std::move(notes),
      .help = fmt::format("use another checkpoint; a folder without {} is taken as it is", checkpoint_file::manifest)};
}

struct Entry {
  std::uint64_t bytes = 0;
  std::string digest;
};

/// E421 when the manifest itself is not one.
Result<std::map<std::string, Entry>> read_entries(const fs::path& path) {
  const auto text = read_file(path, std::int64_t{16} << 20);
  if (!text) return tl::unexpected(text.error());
  const auto json = parse_json(*text, path.string(), {}, "E421");
  if (!json) return tl::unexpected(json.error());
  const auto bad = [&] { return fail(differs(path, fmt::format("is no manifest of schema {}", schema))); };
  if (!json->is_object() || !json->contains("schema") || (*json)["schema"] != schema || !json->contains("files") ||
      !(*json)["files"].is_array())
    return bad();
  std::map<std::string, Entry> entries;
  for (const auto& file : (*json)["files"]) {
    if (!file.is_object() || !file.contains("name") || !file["name"].is_string() || !file.contains("bytes") ||
        !file["bytes"].is_number_unsigned() || !file.contains("xxh3_128") || !file["xxh3_128"].is_string())
      return bad();
    const auto name = file["name"].get<std::string>();
    if (name.empty() || name.find('/') != std::string::npos || name == "..") return bad();
    entries[name] = {file["bytes"].get<std::uint64_t>(), file["xxh3_128"].get<std::string>()};
  }
  return entries;
}

}  // namespace

Result<std::string> digest_of_file(const fs::path& path) {
  const auto file = open_regular_file(path);
  if (!file) return tl::unexpected(file.error());
  Hasher hasher;
  std::vector<std::byte> block(std::size_t{1} << 20);
  for (;;) {
    const ssize_t n = ::read(file->fd.get(), block.data(), block.size());
    if (n == 0) return hasher.hex();
    if (n > 0) hasher.add(std::span(block).first(static_cast<std::size_t>(n)));
    else if (errno != EINTR)
      return fail(Diagnostic{.code = "E101",
                             .message = fmt::format("cannot read file: {}", std::strerror(errno)),
                             .where = {path.string()},
                             .notes = {},
                             .help = "check path and permissions"});
  }
}

Result<std::string> digest_of_model(const fs::path& path) {
  std::error_code ec;
  if (!fs::is_directory(path, ec)) return digest_of_file(path);
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(path, ec)) {
    const std::string name = entry.path().filename().string();
    const bool weights = entry.path().extension() == ".safetensors" && name != checkpoint_file::optimizer;
    if (!weights && name != checkpoint_file::config) continue;
    auto digest = digest_of_file(entry.path());
    if (!digest) return digest;
    files[name] = *digest;
  }
  Hasher hasher;
  for (const auto& [name, digest] : files) hasher.add(std::string_view(name)), hasher.add(std::string_view(digest));
  return hasher.hex();
}

Status write_manifest(const fs::path& folder, std::int64_t step) {
  nlohmann::ordered_json files = nlohmann::ordered_json::array();
  std::map<std::string, fs::path> sorted;
  for (const auto& entry : fs::directory_iterator(folder)) sorted[entry.path().filename().string()] = entry.path();
  std::string scenario;
  for (const auto& [name, path] : sorted) {
    const auto digest = digest_of_file(path);
    if (!digest) return tl::unexpected(digest.error());
    if (name == checkpoint_file::scenario) scenario = *digest;
    files.push_back({{"name", name}, {"bytes", fs::file_size(path)}, {"xxh3_128", *digest}});
  }
  const nlohmann::ordered_json manifest = {
      {"schema", schema}, {"step", step}, {"scenario", scenario}, {"files", std::move(files)}};
  return write_file_atomic(folder / checkpoint_file::manifest, json_text(manifest, 1) + "\n");
}

Status verify_manifest(const fs::path& folder) {
  const fs::path path = folder / checkpoint_file::manifest;
  std::error_code ec;
  if (!fs::exists(path, ec)) return {};
  const auto entries = read_entries(path);
  if (!entries) return tl::unexpected(entries.error());
  Diagnostics problems;
  for (const auto& [name, entry] : *entries) {
    const fs::path file = folder / name;
    if (!fs::exists(file, ec)) {
      if (name != checkpoint_file::optimizer) problems.push_back(differs(file, "is missing"));
      continue;
    }
    const auto bytes = fs::file_size(file, ec);
    if (ec || bytes != entry.bytes) {
      problems.push_back(differs(file, "has another size",
                                 {fmt::format("{} bytes were written, {} are there", entry.bytes, ec ? 0 : bytes)}));
      continue;
    }
    const auto digest = digest_of_file(file);
    if (!digest) return tl::unexpected(digest.error());
    if (*digest != entry.digest)
      problems.push_back(differs(file, "holds other bytes",
                                 {fmt::format("xxh3-128 {} was written, {} is there", entry.digest, *digest)}));
  }
  if (!problems.empty()) return fail(std::move(problems));
  return {};
}

std::optional<bool> manifest_names(const fs::path& folder, const std::string& name) {
  const auto entries = read_entries(folder / checkpoint_file::manifest);
  if (!entries) return std::nullopt;
  return entries->contains(name);
}

}  // namespace hotbunk
