#include "cli/step_lines.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/json.h"
#include "base/limits.h"
#include "base/lines.h"

namespace hotbunk {
namespace {

Diagnostic cannot(const char* what, const std::filesystem::path& path) {
  return {.code = "E103",
          .message = fmt::format("cannot {} the file: {}", what, system_error_text(errno)),
          .where = {path.string()},
          .notes = {},
          .help = "check the folder, its permissions and the free space"};
}

/// Bytes of the lines that stay, and the last of them.
std::pair<std::int64_t, std::string> kept_lines(const std::filesystem::path& path, std::int64_t step) {
  std::int64_t bytes = 0;
  std::string line, last;
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return {bytes, last};  // a stream would wait at a pipe
  std::ifstream file(path, std::ios::binary);
  while (next_line(file, line) == LineRead::whole) {  // else it was being written
    const auto json = json_or_discarded<nlohmann::json>(line);
    if (!json.is_object() || !json.contains("step") || !json["step"].is_number_integer() ||
        json["step"].get<std::int64_t>() > step)
      break;
    bytes += static_cast<std::int64_t>(line.size()) + 1;
    last = line;
  }
  return {bytes, last};
}

}  // namespace

StepLines::StepLines(StepLines&& other) noexcept
    : path_(std::move(other.path_)),
      fd_(std::exchange(other.fd_, -1)),
      bytes_(other.bytes_),
      last_(std::move(other.last_)) {}

StepLines::~StepLines() {
  if (fd_ >= 0) ::close(fd_);
}

Result<StepLines> StepLines::create(const std::filesystem::path& path) { return continue_after(path, -1); }

Result<StepLines> StepLines::continue_after(const std::filesystem::path& path, std::int64_t step) {
  std::error_code ignored;
  std::filesystem::create_directories(path.parent_path(), ignored);
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (fd < 0) return fail(cannot("open", path));
  StepLines lines(path, fd);
  if (step >= 0) std::tie(lines.bytes_, lines.last_) = kept_lines(path, step);
  if (::ftruncate(fd, lines.bytes_) != 0) return fail(cannot("cut", path));
  return lines;
}

Status StepLines::add(std::string_view line) {
  std::string text(line);
  text += '\n';
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t n = ::write(fd_, text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      Diagnostic d = cannot("write", path_);
      if (::ftruncate(fd_, bytes_) != 0) d.notes.emplace_back("its last line is torn");
      return fail(std::move(d));
    }
    done += static_cast<std::size_t>(n);
  }
  bytes_ += static_cast<std::int64_t>(text.size());
  last_.assign(line);
  return {};
}

}  // namespace hotbunk
