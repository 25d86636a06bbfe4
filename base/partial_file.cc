#include "base/partial_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "base/limits.h"

namespace hotbunk {
namespace fs = std::filesystem;
namespace {

constexpr int most_links = 40;  // as the kernel
constexpr int most_tries = 100;
constexpr std::size_t digits = 16;

fs::path folder_of(const fs::path& file) { return file.has_parent_path() ? file.parent_path() : fs::path("."); }

/// Beside the target; short, for the target's own name may be as long as names can be.
fs::path name_beside(const fs::path& target) {
  std::uint64_t word = 0;
  if (::getrandom(&word, sizeof word, 0) != sizeof word) word = static_cast<std::uint64_t>(::getpid());
  return folder_of(target) / fmt::format(".{:0{}x}.partial", word, digits);
}

}  // namespace

Diagnostic write_error(const fs::path& path) {
  return {.code = "E103",
          .message = fmt::format("cannot write file: {}", system_error_text(errno)),
          .where = {path.string()},
          .notes = {},
          .help = {}};
}

bool is_partial_name(std::string_view name) {
  return name.size() == digits + 9 && name.starts_with('.') && name.ends_with(".partial") &&
         name.substr(1, digits).find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

bool write_all(int fd, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(n));
  }
  return true;
}

Result<fs::path> target_of_links(const fs::path& path) {
  fs::path at = path;
  for (int i = 0; i < most_links; ++i) {
    std::error_code none;
    if (!fs::is_symlink(at, none)) return at;
    const fs::path next = fs::read_symlink(at, none);
    if (none) break;
    at = at.parent_path() / next;  // an absolute path stays itself
  }
  errno = ELOOP;
  return fail(write_error(path));
}

PartialFile::PartialFile(fs::path target, fs::path name, FileDescriptor fd)
    : target_(std::move(target)), name_(std::move(name)), fd_(std::move(fd)) {}

PartialFile::PartialFile(PartialFile&& other) noexcept
    : target_(std::move(other.target_)), name_(std::move(other.name_)), fd_(std::move(other.fd_)) {
  other.name_.clear();
}

PartialFile::~PartialFile() {
  if (!name_.empty()) ::unlink(name_.c_str());
}

Result<PartialFile> PartialFile::create(fs::path target) {
  struct stat there {};
  if (::stat(target.c_str(), &there) != 0) {
    if (errno != ENOENT) return fail(write_error(target));  // a name too long, a folder that may not be searched
  } else if (S_ISDIR(there.st_mode)) {
    errno = EISDIR;
    return fail(write_error(target));
  }
  constexpr mode_t mode = 0644;
  FileDescriptor fd(::open(folder_of(target).c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, mode));
  if (fd) return PartialFile(std::move(target), {}, std::move(fd));
  for (int i = 0; i < most_tries; ++i) {
    fs::path name = name_beside(target);
    FileDescriptor named(::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode));
    if (named) return PartialFile(std::move(target), std::move(name), std::move(named));
    if (errno != EEXIST) break;
  }
  return fail(write_error(target));
}

Status PartialFile::write(std::span<const std::byte> bytes) {
  if (!write_all(fd_.get(), bytes)) return fail(write_error(target_));
  return {};
}

Status PartialFile::sync() {
  if (::fsync(fd_.get()) != 0) return fail(write_error(target_));
  return {};
}

Status PartialFile::commit() {
  const std::string self = fmt::format("/proc/self/fd/{}", fd_.get());
  for (int i = 0; name_.empty() && i < most_tries; ++i) {
    fs::path name = name_beside(target_);
    if (::linkat(AT_FDCWD, self.c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) == 0) name_ = std::move(name);
    else if (errno != EEXIST) break;
  }
  if (name_.empty() || ::rename(name_.c_str(), target_.c_str()) != 0) return fail(write_error(target_));
  name_.clear();
  if (!fd_.close()) return fail(write_error(target_));
  if (const FileDescriptor folder(::open(folder_of(target_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)); folder)
    ::fsync(folder.get());
  return {};
}

}  // namespace hotbunk
