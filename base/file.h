// Files read whole and written whole: a partial output never replaces a whole one.
#pragma once
#include <filesystem>
#include <string>
#include <string_view>

#include "base/diagnostic.h"

namespace hotbunk {

/// The whole file; E101 when it cannot be read, E102 when it is larger than max_bytes.
Result<std::string> read_file(const std::filesystem::path&, std::int64_t max_bytes = std::int64_t{1} << 30);

/// Writes beside the target, fsyncs, renames over it, fsyncs the folder. Creates missing parent folders. E103 on
/// failure.
Status write_file_atomic(const std::filesystem::path&, std::string_view content);

/// fsyncs a folder: the names in it are on disk. E103.
Status sync_folder(const std::filesystem::path&);

/// Whether a file of that path could be written, found out by writing another one beside it: asked before long work
/// whose result goes there. Creates missing parent folders. E103 when not.
Status check_writable(const std::filesystem::path&);

}  // namespace hotbunk
