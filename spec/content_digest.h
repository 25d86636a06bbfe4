// What is in files that ranks of several hosts, or runs of several days, should both have: compared by content, since
// paths differ and stay the same for other contents.
#pragma once
#include <filesystem>
#include <string>

namespace hotbunk {

/// A hash of a file, or of a model folder's safetensors and their index: names, sizes and bytes. Files up to 64 MiB are
/// hashed whole; of larger ones the first 8 MiB (in which the header stands) and 256 pieces of 64 KiB spread evenly,
/// the last bytes among them: other weights of the same shapes are noticed, a single changed byte of a large file may
/// not be. What cannot be read gives a text that says so, and equals no hash.
std::string content_digest(const std::filesystem::path& path);

}  // namespace hotbunk
