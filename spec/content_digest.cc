#include "spec/content_digest.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <vector>

#include "base/hash.h"

namespace hotbunk {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t whole_bytes = std::int64_t{64} << 20, head_bytes = std::int64_t{8} << 20;
constexpr std::int64_t piece_bytes = 64 << 10, num_pieces = 256;

/// Adds [at, at + bytes) of the file; false when it cannot be read.
bool add_range(Hasher& hasher, int fd, std::int64_t at, std::int64_t bytes) {
  std::vector<std::byte> buffer(1 << 20);
  while (bytes > 0) {
    const auto want = static_cast<std::size_t>(std::min<std::int64_t>(bytes, std::ssize(buffer)));
    const ssize_t n = pread(fd, buffer.data(), want, at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    hasher.add(std::span(buffer.data(), static_cast<std::size_t>(n)));
    at += n;
    bytes -= n;
  }
  return true;
}

/// errno, or 0.
int add_file(Hasher& hasher, const fs::path& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe must not hold us up
  if (fd < 0) return errno;
  struct stat found {};
  int error = 0;
  if (fstat(fd, &found) != 0) error = errno;
  else if (!S_ISREG(found.st_mode)) error = EINVAL;
  if (error == 0) {
    const std::int64_t size = found.st_size;
    hasher.add(size);
    bool read = add_range(hasher, fd, 0, size <= whole_bytes ? size : head_bytes);
    for (std::int64_t i = 1; size > whole_bytes && i <= num_pieces && read; ++i) {
      const std::int64_t room = size - head_bytes - piece_bytes;  // the last piece ends where the file does
      read = add_range(hasher, fd, head_bytes + room / num_pieces * i + (i == num_pieces ? room % num_pieces : 0),
                       piece_bytes);
    }
    if (!read) error = errno != 0 ? errno : EIO;
  }
  close(fd);
  return error;
}

bool is_weights(const fs::path& file) {
  const std::string name = file.filename().string();
  return name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json");
}

}  // namespace

std::string content_digest(const fs::path& path) {
  std::error_code error;
  std::vector<fs::path> files;
  if (fs::is_directory(path, error)) {
    for (const auto& entry : fs::directory_iterator(path, error))
      if (is_weights(entry.path())) files.push_back(entry.path());
    std::sort(files.begin(), files.end());
    if (error || files.empty())
      return fmt::format("{} cannot be read: {}", path.string(), error ? error.message() : "it has no weights");
  } else {
    files.push_back(path);
  }
  Hasher hasher;
  for (const fs::path& file : files) {
    if (files.size() > 1) hasher.add(std::string_view(file.filename().native()));
    if (const int failed = add_file(hasher, file); failed != 0)
      return fmt::format("{} cannot be read: {}", file.string(), std::strerror(failed));
  }
  return hasher.hex();
}

}  // namespace hotbunk
