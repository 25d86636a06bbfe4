#include "base/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/partial_file.h"

namespace hotbunk {
namespace fs = std::filesystem;
namespace {

Diagnostic read_error(const char* what, const fs::path& path, std::string help = "") {
  return {.code = "E101",
          .message = fmt::format("cannot {}: {}", what, std::strerror(errno)),
          .where = {path.string()},
          .notes = {},
          .help = std::move(help)};
}

Diagnostic too_large(const fs::path& path, std::int64_t max_bytes) {
  return {.code = "E102",
          .message = fmt::format("file is larger than the {} bytes this reader accepts", max_bytes),
          .where = {path.string()},
          .notes = {},
          .help = "check that the path names the file you mean"};
}

const char* kind_of(mode_t mode) {
  return S_ISFIFO(mode)   ? "a pipe"
         : S_ISSOCK(mode) ? "a socket"
         : S_ISCHR(mode)  ? "a device"
         : S_ISBLK(mode)  ? "a disk"
                          : "no file";
}

/// To its end: a file may grow, and those of /proc say that they are empty.
Result<std::string> read_all(int fd, const fs::path& path, std::int64_t max_bytes, std::int64_t expected) {
  std::string content;
  content.reserve(static_cast<std::size_t>(expected));
  char block[1 << 16];
  for (;;) {
    const ssize_t n = ::read(fd, block, sizeof block);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return fail(read_error("read file", path));
    if (n == 0) return content;
    content.append(block, static_cast<std::size_t>(n));
    if (static_cast<std::int64_t>(content.size()) > max_bytes) return fail(too_large(path, max_bytes));
  }
}

/// A pipe or a device takes what is written and replaces nothing; without a reader a pipe would block for ever.
Result<FileDescriptor> open_special(const fs::path& path) {
  FileDescriptor fd(::open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
  if (!fd) return fail(write_error(path));
  const int flags = ::fcntl(fd.get(), F_GETFL);
  ::fcntl(fd.get(), F_SETFL, flags & ~O_NONBLOCK);
  return fd;
}

bool is_special(const fs::path& path) {
  struct stat st {};
  return ::stat(path.c_str(), &st) == 0 && !S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode);
}

/// The target behind links, its folder made.
Result<fs::path> prepared(const fs::path& path) {
  auto target = target_of_links(path);
  if (!target) return target;
  std::error_code none;
  if (target->has_parent_path()) fs::create_directories(target->parent_path(), none);
  if (!none) return target;
  return fail(Diagnostic{.code = "E103",
                         .message = fmt::format("cannot create the file's folder: {}", std::strerror(none.value())),
                         .where = {path.string()},
                         .notes = {},
                         .help = {}});
}

}  // namespace

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  if (this == &other) return *this;
  close();
  fd_ = other.release();
  return *this;
}

FileDescriptor::~FileDescriptor() { close(); }

int FileDescriptor::release() { return std::exchange(fd_, -1); }

bool FileDescriptor::close() {
  const int fd = release();
  return fd < 0 || ::close(fd) == 0;
}

Result<RegularFile> open_regular_file(const fs::path& path) {
  // Not to wait for the other end of a pipe: what it is shows only when it is open.
  RegularFile file{FileDescriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY))};
  if (!file.fd) return fail(read_error("open file", path));
  struct stat st {};
  if (::fstat(file.fd.get(), &st) != 0) return fail(read_error("read file", path));
  if (S_ISDIR(st.st_mode)) {
    errno = EISDIR;
    return fail(read_error("read file", path));
  }
  if (!S_ISREG(st.st_mode))
    return fail(
        Diagnostic{.code = "E101",
                   .message = fmt::format("cannot read file: it is {}, not a regular file", kind_of(st.st_mode)),
                   .where = {path.string()},
                   .notes = {},
                   .help = "give a file; scenarios and token lines also come from standard input, named -"});
  file.bytes = st.st_size;
  return file;
}

Result<std::string> read_file(const fs::path& path, std::int64_t max_bytes) {
  auto file = open_regular_file(path);
  if (!file) return fail(std::move(file.error()));
  if (file->bytes > max_bytes) return fail(too_large(path, max_bytes));
  return read_all(file->fd.get(), path, max_bytes, file->bytes);
}

Result<std::string> read_file_or_stdin(const fs::path& path, std::int64_t max_bytes) {
  return path == "-" ? read_all(STDIN_FILENO, name_of_input(path), max_bytes, 0) : read_file(path, max_bytes);
}

std::string name_of_input(const fs::path& path) { return path == "-" ? "stdin" : path.string(); }

Status write_file_atomic(const fs::path& path, std::string_view content) {
  const auto bytes = std::as_bytes(std::span(content));
  if (is_special(path)) {
    auto fd = open_special(path);
    if (!fd) return fail(std::move(fd.error()));
    if (!write_all(fd->get(), bytes) || !fd->close()) return fail(write_error(path));
    return {};
  }
  auto target = prepared(path);
  if (!target) return fail(std::move(target.error()));
  auto file = PartialFile::create(*target);
  if (!file) return fail(std::move(file.error()));
  if (auto s = file->write(bytes); !s) return s;
  if (auto s = file->sync(); !s) return s;
  return file->commit();
}

Status sync_folder(const fs::path& path) {
  const fs::path folder = path.empty() ? fs::path(".") : path;
  const FileDescriptor fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // A filesystem whose folders cannot be synced says EINVAL: it has nothing to sync.
  if (fd && (::fsync(fd.get()) == 0 || errno == EINVAL)) return {};
  return fail(write_error(folder));
}

Status check_writable(const fs::path& path) {
  if (is_special(path)) {
    auto fd = open_special(path);
    if (!fd) return fail(std::move(fd.error()));
    return {};
  }
  auto target = prepared(path);
  if (!target) return fail(std::move(target.error()));
  if (auto file = PartialFile::create(*target); !file) {
    file.error().front().where = {path.string()};
    return fail(std::move(file.error()));
  }
  return {};
}

}  // namespace hotbunk
