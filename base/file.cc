#include "base/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace hotbunk {
namespace {

Diagnostic os_error(const char* code, const char* what, const std::filesystem::path& path) {
  return {.code = code,
          .message = fmt::format("cannot {}: {}", what, std::strerror(errno)),
          .where = {path.string()},
          .notes = {},
          .help = {}};
}

bool write_all(int fd, std::string_view content) {
  while (!content.empty()) {
    const ssize_t n = ::write(fd, content.data(), content.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    content.remove_prefix(static_cast<std::size_t>(n));
  }
  return true;
}

}  // namespace

Result<std::string> read_file(const std::filesystem::path& path, std::int64_t max_bytes) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return fail(os_error("E101", "open file", path));
  struct stat st {};
  if (::fstat(fd, &st) != 0 || S_ISDIR(st.st_mode)) {
    if (S_ISDIR(st.st_mode)) errno = EISDIR;
    auto d = os_error("E101", "read file", path);
    ::close(fd);
    return fail(std::move(d));
  }
  std::string content;
  char block[1 << 16];
  for (;;) {
    const ssize_t n = ::read(fd, block, sizeof block);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      auto d = os_error("E101", "read file", path);
      ::close(fd);
      return fail(std::move(d));
    }
    if (n == 0) break;
    content.append(block, static_cast<std::size_t>(n));
    if (static_cast<std::int64_t>(content.size()) > max_bytes) {
      ::close(fd);
      return fail(Diagnostic{.code = "E102",
                             .message = fmt::format("file is larger than the {} bytes this reader accepts", max_bytes),
                             .where = {path.string()},
                             .notes = {},
                             .help = "check that the path names the file you mean"});
    }
  }
  ::close(fd);
  return content;
}

Status write_file_atomic(const std::filesystem::path& path, std::string_view content) {
  std::error_code ec;
  if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path(), ec);
  if (ec) {
    errno = ec.value();
    return fail(os_error("E103", "create the file's folder", path));
  }
  const std::filesystem::path temporary = fmt::format("{}.{}.tmp", path.string(), ::getpid());
  const int fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return fail(os_error("E103", "write file", path));
  const bool written = write_all(fd, content) && ::fsync(fd) == 0;
  const int saved = errno;
  ::close(fd);
  errno = saved;
  if (!written || ::rename(temporary.c_str(), path.c_str()) != 0) {
    auto d = os_error("E103", "write file", path);
    ::unlink(temporary.c_str());
    return fail(std::move(d));
  }
  return sync_folder(path.parent_path());
}

Status sync_folder(const std::filesystem::path& path) {
  const std::filesystem::path folder = path.empty() ? std::filesystem::path(".") : path;
  const int dir = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  // A filesystem whose folders cannot be synced says EINVAL: it has nothing to sync.
  const bool synced = dir >= 0 && (::fsync(dir) == 0 || errno == EINVAL);
  const int saved = errno;
  if (dir >= 0) ::close(dir);
  errno = saved;
  if (!synced) return fail(os_error("E103", "write folder", folder));
  return {};
}

Status check_writable(const std::filesystem::path& path) {
  std::filesystem::path probe = path;
  probe += fmt::format(".{}.probe", ::getpid());
  if (auto s = write_file_atomic(probe, ""); !s) {
    s.error().front().where = {path.string()};
    return s;
  }
  std::error_code ignored;
  std::filesystem::remove(probe, ignored);
  return {};
}

}  // namespace hotbunk
