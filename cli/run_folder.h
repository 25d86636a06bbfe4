// A folder holds one run. A run takes its folder before the work, under a lock, and keeps in folder.json what it wrote
// there: what was not finished, or is of two runs, is told from a whole run, and --overwrite removes nothing else.
#pragma once
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/command.h"

namespace hotbunk {

enum class Takes : std::uint8_t {
  unused,     // a folder without a run
  overwrite,  // whatever run wrote there
  resume      // goes on with what is there
};

/// An exclusive lock on a folder, held by this process: run.lock, with its pid and host, removed with the lock.
class FolderLock {
 public:
  /// E131 while another process holds it, with that one's pid. Creates the folder.
  static Result<FolderLock> take(const std::filesystem::path& folder);
  FolderLock(FolderLock&& other) noexcept : file_(std::move(other.file_)), fd_(std::exchange(other.fd_, -1)) {}
  FolderLock& operator=(FolderLock&&) = delete;
  ~FolderLock();

 private:
  FolderLock(std::filesystem::path file, int fd) : file_(std::move(file)), fd_(fd) {}
  std::filesystem::path file_;
  int fd_ = -1;
};

/// A folder that this process may write a run or a simulation to, as long as it keeps this.
struct ClaimedFolder {
  RunFolder folder;
  std::shared_ptr<FolderLock> lock;  // null: the process that started this rank holds it
};

/// `out`: --out; "": runs/NAME, or the first of runs/NAME-2, … without a run, which is said on stderr. E130 when --out
/// holds a run and may not be overwritten, E131 when it is in use, E132 when folder.json does not say that a run wrote
/// what is there, E133 when the model is read from the folder. Changes nothing in it.
Result<ClaimedFolder> claim_folder(const std::string& out, const Job&, Takes);
/// The same for a simulation, which replaces an earlier simulation, but no run.
Result<ClaimedFolder> claim_for_simulation(const std::string& out, const Job&);

/// For processes started from here: the folder is theirs.
void pass_on_claim(const ClaimedFolder&);

/// All that is read has been read, and the first step is next: removes what the overwritten run wrote, by its list, and
/// says in folder.json that a run or a simulation has begun here.
Status begin_in_folder(const RunFolder&, const Job&, std::string_view source, Takes);
/// All is written: notes the digest of every file that is read back.
Status end_in_folder(const RunFolder&);

/// When, where, from which commit and by which command the folder's run was made: rows of a report's provenance. Empty
/// without a folder.json.
std::vector<std::pair<std::string, std::string>> origin_of(const RunFolder&);

/// Whether the folder's run wrote all that it leaves. False without a folder.json.
bool has_ended(const RunFolder&);

/// E127 no run folder, E134 its run did not end or goes on, E115 files of another run.
Status check_whole_run(const RunFolder&);

}  // namespace hotbunk
