// A file that is being written: it appears under its name when it is whole, and not before.
#pragma once
#include <cstddef>
#include <filesystem>
#include <span>
#include <string_view>

#include "base/diagnostic.h"
#include "base/file.h"

namespace hotbunk {

/// The file that writing to `path` replaces: what a chain of symbolic links points at, which need not exist yet. E103
/// for a chain without an end.
Result<std::filesystem::path> target_of_links(const std::filesystem::path& path);

/// Has no name while it is written where the file system can do that (O_TMPFILE), so that even a killed writer leaves
/// nothing; else a new one beside the target that nobody can foresee, opened only where nothing of that name exists,
/// and removed unless commit() succeeds. Not for targets that are links: resolve them first.
class PartialFile {
 public:
  /// E103 when the target's folder takes no file or the target is a folder. The folder must exist.
  static Result<PartialFile> create(std::filesystem::path target);
  PartialFile(PartialFile&& other) noexcept;
  PartialFile& operator=(PartialFile&&) = delete;
  ~PartialFile();

  const std::filesystem::path& target() const { return target_; }
  Status write(std::span<const std::byte>);
  /// All bytes are on the disk.
  Status sync();
  /// Replaces the target, and fsyncs its folder. After sync().
  Status commit();

 private:
  PartialFile(std::filesystem::path target, std::filesystem::path name, FileDescriptor fd);

  std::filesystem::path target_;
  std::filesystem::path name_;  // empty: it has none yet
  FileDescriptor fd_;
};

/// Whether it is a name that a writer who was killed may have left (a file's own name, without its folder).
bool is_partial_name(std::string_view);

/// All of it into a descriptor, however many calls that takes; errno says why not.
bool write_all(int fd, std::span<const std::byte>);

/// E103 with what errno says.
Diagnostic write_error(const std::filesystem::path&);

}  // namespace hotbunk
