// A file that a run writes while it goes on: lines of JSON, each of one step, in order. What is in it is whole at any
// moment: a line gets there by one write, and one that does not fit the disk is taken back.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "base/diagnostic.h"

namespace hotbunk {

class StepLines {
 public:
  /// An empty file; what was there is gone. E103 when it cannot be written.
  static Result<StepLines> create(const std::filesystem::path&);
  /// Goes on after `step`: whole lines with a "step" of at most that stay, the first other one (later, torn, no JSON)
  /// and all behind it go. A file that is not there is made. E103.
  static Result<StepLines> continue_after(const std::filesystem::path&, std::int64_t step);
  StepLines(StepLines&&) noexcept;
  StepLines& operator=(StepLines&&) = delete;
  ~StepLines();

  /// `line` without its end. E103: nothing of it is in the file.
  Status add(std::string_view line);
  /// The last line, "" when there is none.
  const std::string& last() const { return last_; }
  std::int64_t bytes() const { return bytes_; }
  const std::filesystem::path& path() const { return path_; }

 private:
  StepLines(std::filesystem::path path, int fd) : path_(std::move(path)), fd_(fd) {}

  std::filesystem::path path_;
  int fd_ = -1;
  std::int64_t bytes_ = 0;
  std::string last_;
};

}  // namespace hotbunk
