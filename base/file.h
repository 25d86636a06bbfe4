// Files read whole and written whole. Only regular files are read, and standard input where a user asks for it: a pipe
// or a device given by mistake neither blocks nor fills the memory. A partial output never replaces a whole one.
#pragma once
#include <filesystem>
#include <string>
#include <string_view>

#include "base/diagnostic.h"

namespace hotbunk {

/// The most bytes that a reader takes where its kind of file has no limit of its own (docs/errors.md, E102).
inline constexpr std::int64_t most_file_bytes = std::int64_t{1} << 30;

/// A descriptor that is closed with its owner; -1: none.
class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = -1) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.release()) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  ~FileDescriptor();
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release();
  /// Whether the system took all that was written.
  bool close();

 private:
  int fd_;
};

/// A regular file open for reading, and its size. A FIFO, a socket, a device or a folder is E101, at once.
struct RegularFile {
  FileDescriptor fd;
  std::int64_t bytes = 0;
};
Result<RegularFile> open_regular_file(const std::filesystem::path&);

/// The whole file. E101 when it cannot be read or is no regular file, E102 when it is larger than max_bytes: its size
/// is asked before it is read.
Result<std::string> read_file(const std::filesystem::path&, std::int64_t max_bytes = most_file_bytes);

/// The same of what is read once in a process: "-" is standard input, whatever that is.
Result<std::string> read_file_or_stdin(const std::filesystem::path&, std::int64_t max_bytes);

/// What messages call what read_file_or_stdin reads: "stdin" for "-".
std::string name_of_input(const std::filesystem::path&);

/// Writes beside the target (base/partial_file.h), fsyncs, renames over it, fsyncs the folder. Creates missing parent
/// folders. A symbolic link is followed: what it points at is replaced, the link stays. A device or a pipe (/dev/null,
/// /dev/stdout) is written into. E103 on failure, which leaves nothing behind.
Status write_file_atomic(const std::filesystem::path&, std::string_view content);

/// fsyncs a folder: the names in it are on disk. E103.
Status sync_folder(const std::filesystem::path&);

/// Whether a file of that path could be written, found out by beginning one: asked before long work whose result goes
/// there. Creates missing parent folders. E103 when not.
Status check_writable(const std::filesystem::path&);

}  // namespace hotbunk
