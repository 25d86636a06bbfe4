// The manifest of a checkpoint: which files it has, how large they are and what is in them. A folder with a manifest is
// read only when every file is what it says.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "base/diagnostic.h"

namespace hotbunk {

/// XXH3-128 of a file's bytes, as 32 hex digits; E101.
Result<std::string> digest_of_file(const std::filesystem::path&);

/// One digest of config.json and all safetensors of a model folder, or of a single file; E101.
Result<std::string> digest_of_model(const std::filesystem::path&);

/// Writes manifest.json, schema "hotbunk.checkpoint/1": the step, the digest of scenario.yaml, and name, bytes and
/// digest of every other file in the folder. E101, E103.
Status write_manifest(const std::filesystem::path& folder, std::int64_t step);

/// Nothing where the folder has no manifest. E421 names the file that is missing, has another size or other bytes. A
/// missing optimizer.safetensors is no fault: it is what people leave out to save space, and its reader says so.
Status verify_manifest(const std::filesystem::path& folder);

/// Whether the folder's manifest names the file; nothing where there is none that can be read.
std::optional<bool> manifest_names(const std::filesystem::path& folder, const std::string& name);

}  // namespace hotbunk
