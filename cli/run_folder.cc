#include "cli/run_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <vector>

#include "base/file.h"
#include "base/json.h"
#include "base/partial_file.h"
#include "base/printable.h"
#include "commit.h"
#include "rl/checkpoint.h"
#include "rl/manifest.h"

namespace hotbunk {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr const char* passed_on = "HOTBUNK_RUN_FOLDER";  // by the launcher of local ranks
constexpr const char* schema = "hotbunk.folder/1";

/// Names that a run may write. `read_back`: compare and report believe them, so they have digests.
struct File {
  const char* name;
  bool read_back;
};
constexpr std::array files = {
    File{"scenario.yaml", true},  File{"plan.json", true},      File{"trace.json", true},
    File{"simulated.json", true}, File{"lengths.jsonl", true},  File{"sync_hashes.jsonl", false},
    File{"summary.json", false},  File{"metrics.jsonl", false}, File{"samples.jsonl", false},
    File{"report.html", false},   File{"perfetto.json", false}, File{"run.json", true}};
/// Without these it is no run.
constexpr std::array needed = {"scenario.yaml", "plan.json", "trace.json"};
/// folder.json.
struct Record {
  std::string run;                  // random: no two runs have the same
  std::string source = "measured";  // or "simulated"
  std::string process;              // "pid 123 on host"
  std::string begun;                // "2026-11-23 09:37:25 UTC"
  std::string command;              // as it was given
  std::string commit;               // of the program's source
  bool ended = false;
  std::int64_t steps = 0, checkpoint_every = 0;  // which checkpoints are the run's
  std::map<std::string, std::string> digests;    // of the files that are read back
};

fs::path record_file(const RunFolder& folder) { return folder.root / "folder.json"; }

std::string this_process() {
  char host[256] = "";
  ::gethostname(host, sizeof host - 1);
  return fmt::format("pid {} on {}", ::getpid(), host);
}

/// As a shell would take it; "" where it is not known.
std::string this_command() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string out;
  for (std::string word; std::getline(file, word, '\0');) {
    const bool plain = !word.empty() && word.find_first_not_of(
                                            "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
                                            "0123456789_-+=:,./%@") == std::string::npos;
    if (!out.empty()) out += ' ';
    if (plain) {
      out += word;
      continue;
    }
    out += '\'';
    for (const char c : word) c == '\'' ? out += "'\\''" : out += c;
    out += '\'';
  }
  return printable_line(out);
}

std::string this_moment() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  char text[64];
  const std::size_t size = std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", &utc);
  return {text, size};
}

Status write_record(const RunFolder& folder, const Record& r) {
  const Json json = {{"schema", schema},    {"run", r.run},
                     {"source", r.source},  {"process", r.process},
                     {"begun", r.begun},    {"command", r.command},
                     {"commit", r.commit},  {"ended", r.ended},
                     {"steps", r.steps},    {"checkpoint_every", r.checkpoint_every},
                     {"digests", r.digests}};
  return write_file_atomic(record_file(folder), json_text(json, 1) + "\n");
}

/// Nothing where there is none, or none that this version wrote.
std::optional<Record> read_record(const RunFolder& folder) {
  const auto text = read_file(record_file(folder), 1 << 20);
  if (!text) return std::nullopt;
  const Json json = json_or_discarded<Json>(*text);
  if (!json.is_object() || json.value("schema", Json()) != schema) return std::nullopt;
  try {
    return Record{.run = json.at("run"),
                  .source = json.at("source"),
                  .process = json.at("process"),
                  .begun = json.value("begun", ""),
                  .command = json.value("command", ""),
                  .commit = json.value("commit", ""),
                  .ended = json.at("ended"),
                  .steps = json.at("steps"),
                  .checkpoint_every = json.at("checkpoint_every"),
                  .digests = json.at("digests")};
  } catch (const Json::exception&) {
    return std::nullopt;
  }
}

/// What a run may have left there: its files that are not empty, and checkpoints.
std::vector<std::string> contents(const RunFolder& folder) {
  std::vector<std::string> there;
  std::error_code ignored;
  for (const File& file : files)
    if (const auto bytes = fs::file_size(folder.root / file.name, ignored); !ignored && bytes > 0)
      there.push_back(file.name);
  for (const auto& entry : fs::directory_iterator(folder.checkpoints(), ignored))
    there.push_back("checkpoints/" + entry.path().filename().string());
  std::ranges::sort(there);
  return there;
}

std::string listed(std::vector<std::string> names) {
  constexpr std::size_t most = 6;
  const std::size_t more = names.size() - std::min(names.size(), most);
  names.resize(names.size() - more);
  return fmt::format("{}{}", fmt::join(names, ", "), more > 0 ? fmt::format(" and {} more", more) : "");
}

Diagnostic problem(const char* code, std::string message, const fs::path& where, std::vector<std::string> notes,
                   std::string help) {
  return {.code = code,
          .message = std::move(message),
          .where = {where.string()},
          .notes = std::move(notes),
          .help = std::move(help)};
}

/// E132, E133: why a run may not be removed from the folder.
Status may_overwrite(const RunFolder& folder, const Job& job, const std::vector<std::string>& there) {
  if (!there.empty() && !read_record(folder))
    return fail(problem("E132", "--overwrite removes what a run wrote, and no folder.json says that one wrote this",
                        folder.root, {"there: " + listed(there)}, "remove it yourself, or give another folder"));
  std::error_code ignored;
  const fs::path weights = job.scenario.model.weights_path;
  if (weights.empty()) return {};
  const fs::path inside =
      fs::weakly_canonical(weights, ignored).lexically_relative(fs::weakly_canonical(folder.root, ignored));
  if (inside.empty() || *inside.begin() == "..") return {};
  return fail(problem("E133", "--overwrite would remove the model that this run starts from", folder.root,
                      {"the model is read from " + weights.string()},
                      "give another --out, or copy the model elsewhere first"));
}

/// E130 and its like; nothing when the folder may be used.
Status may_use(const RunFolder& folder, const Job& job, Takes takes) {
  const std::vector<std::string> there = contents(folder);
  if (takes == Takes::resume) return {};
  if (takes == Takes::overwrite) return may_overwrite(folder, job, there);
  if (there.empty()) return {};
  const auto record = read_record(folder);
  const std::string what = !record ? "files of a run, without folder.json"
                                   : fmt::format("a {} run of {} steps, {}", record->source, record->steps,
                                                 record->ended ? "whole" : "which did not end");
  return fail(problem("E130", "the folder holds a run already", folder.root, {what, "there: " + listed(there)},
                      "give another --out, or --overwrite to remove what that run wrote"));
}

Result<ClaimedFolder> claim(const RunFolder& folder, const Job& job, Takes takes) {
  auto lock = FolderLock::take(folder.root);
  if (!lock) return fail(std::move(lock.error()));
  if (auto s = may_use(folder, job, takes); !s) return fail(std::move(s.error()));
  return ClaimedFolder{folder, std::make_shared<FolderLock>(std::move(*lock))};
}

/// A run that was asked to stop has a checkpoint of its last step, whatever checkpoint_every says.
bool is_of(const Record& record, const fs::path& checkpoint) {
  const std::string name = checkpoint.filename().string();
  if (name == "final" || name == "merged") return true;
  if (!name.starts_with("step_")) return false;
  std::int64_t step = 0;
  const char* const end = name.data() + name.size();
  if (std::from_chars(name.data() + 5, end, step).ptr != end || step > record.steps) return false;
  const bool due = record.checkpoint_every > 0 && step % record.checkpoint_every == 0;
  return due || is_checkpoint(checkpoint);
}

/// What the run of this record wrote, and nothing else. First it is no whole run any more: a death on the way leaves
/// nothing that looks like one.
Status remove_run(const RunFolder& folder, Record record) {
  record.ended = false;
  if (auto s = write_record(folder, record); !s) return s;
  std::error_code ignored;
  for (const File& file : files) fs::remove(folder.root / file.name, ignored);
  std::vector<fs::path> partial, checkpoints;
  for (const auto& entry : fs::directory_iterator(folder.root, ignored))
    if (is_partial_name(entry.path().filename().string())) partial.push_back(entry.path());
  for (const fs::path& path : partial) fs::remove(path, ignored);
  for (const auto& entry : fs::directory_iterator(folder.checkpoints(), ignored))
    if (is_of(record, entry.path())) checkpoints.push_back(entry.path());
  for (const fs::path& path : checkpoints) remove_checkpoint(path);
  fs::remove(folder.checkpoints(), ignored);
  return {};
}

/// Who holds a lock, as it wrote there.
std::string holder(const fs::path& file) {
  const auto text = read_file(file, 4096);
  const std::string who = text ? text->substr(0, text->find('\n')) : "";
  return who.empty() ? "another process" : who;
}

}  // namespace

Result<FolderLock> FolderLock::take(const fs::path& folder) {
  const fs::path file = folder / "run.lock";
  std::error_code ec;
  fs::create_directories(folder, ec);
  if (ec) return fail(problem("E103", fmt::format("cannot create the file's folder: {}", ec.message()), file, {}, ""));
  for (;;) {
    const int fd = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (fd < 0)
      return fail(
          problem("E103", fmt::format("cannot write to the run folder: {}", std::strerror(errno)), folder, {}, ""));
    if (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
      const int error = errno;
      ::close(fd);
      if (error == EWOULDBLOCK)
        return fail(problem("E131", fmt::format("the folder is in use by {}", holder(file)), folder, {},
                            "wait for it, stop it, or give another --out"));
      return fail(problem("E103", fmt::format("cannot lock the run folder: {}", std::strerror(error)), folder, {},
                          "give an --out on a file system that has flock(2)"));
    }
    // The holder before may have removed the file between open and flock: then this is a lock on nothing.
    struct stat held {
    }, named{};
    if (::fstat(fd, &held) == 0 && ::stat(file.c_str(), &named) == 0 && held.st_ino == named.st_ino &&
        held.st_dev == named.st_dev) {
      const std::string who = this_process() + "\n";
      // It names the holder, no more: where it cannot be written, the lock holds all the same.
      [[maybe_unused]] const bool named_holder = ::ftruncate(fd, 0) == 0 && ::pwrite(fd, who.data(), who.size(), 0) > 0;
      return FolderLock(file, fd);
    }
    ::close(fd);
  }
}

FolderLock::~FolderLock() {
  if (fd_ < 0) return;
  ::unlink(file_.c_str());
  ::close(fd_);
}

Result<ClaimedFolder> claim_folder(const std::string& out, const Job& job, Takes takes) {
  if (const char* given = std::getenv(passed_on)) return ClaimedFolder{RunFolder{given}, nullptr};
  if (!out.empty()) return claim({out}, job, takes);
  const std::string name = "runs/" + job.scenario.name;
  auto claimed = claim({name}, job, takes);
  if (claimed || takes != Takes::unused) return claimed;
  const std::string why = claimed.error().front().message;
  for (int n = 2; !claimed && (claimed.error().front().code == "E130" || claimed.error().front().code == "E131"); ++n)
    claimed = claim({fmt::format("{}-{}", name, n)}, job, takes);
  if (claimed)
    fmt::print(stderr, "{}\n",
               printable_line(fmt::format("{}: {}; this run goes to {}", name, why, claimed->folder.root.string())));
  return claimed;
}

Result<ClaimedFolder> claim_for_simulation(const std::string& out, const Job& job) {
  const auto record = read_record({out});
  return claim({out}, job, record && record->source == "simulated" ? Takes::overwrite : Takes::unused);
}

void pass_on_claim(const ClaimedFolder& claimed) { ::setenv(passed_on, claimed.folder.root.c_str(), 1); }

Status begin_in_folder(const RunFolder& folder, const Job& job, std::string_view source, Takes takes) {
  auto record = read_record(folder);
  if (record && takes != Takes::resume)
    if (auto s = remove_run(folder, *record); !s) return s;
  if (!record || takes != Takes::resume) {
    std::random_device random;
    record.emplace();
    record->run = fmt::format("{:08x}{:08x}", random(), random());
    record->source = source;
  }
  record->process = this_process();
  record->begun = this_moment(), record->command = this_command(), record->commit = HOTBUNK_COMMIT;
  record->ended = false;
  record->steps = job.scenario.steps;
  record->checkpoint_every = job.scenario.checkpoint_every;
  record->digests.clear();
  return write_record(folder, *record);
}

Status end_in_folder(const RunFolder& folder) {
  auto record = read_record(folder);
  if (!record) return fail(problem("E127", "no run folder: it has no folder.json", folder.root, {}, ""));
  std::error_code ignored;
  record->digests.clear();
  for (const File& file : files) {
    if (!file.read_back || !fs::exists(folder.root / file.name, ignored)) continue;
    const auto digest = digest_of_file(folder.root / file.name);
    if (!digest) return tl::unexpected(digest.error());
    record->digests[file.name] = *digest;
  }
  record->ended = std::ranges::all_of(needed, [&](const char* name) { return record->digests.contains(name); });
  return write_record(folder, *record);
}

std::vector<std::pair<std::string, std::string>> origin_of(const RunFolder& folder) {
  const auto record = read_record(folder);
  if (!record) return {};
  return {{"commit", record->commit},
          {"begun", record->begun},
          {"by", record->process},
          {"command", record->command},
          {"run", record->run}};
}

bool has_ended(const RunFolder& folder) {
  const auto record = read_record(folder);
  return record && record->ended;
}

Status check_whole_run(const RunFolder& folder) {
  const auto record = read_record(folder);
  std::error_code ignored;
  std::vector<std::string> missing;
  for (const char* name : needed)
    if (!fs::exists(folder.root / name, ignored)) missing.push_back(name);
  if (!record || (record->ended && !missing.empty()))
    return fail(problem(
        "E127",
        fmt::format("no run folder: it has no {}", missing.empty() ? std::string("folder.json") : missing.front()),
        folder.root, {}, "give the folder of `hotbunk run`, or of `hotbunk simulate --out`"));
  if (!record->ended) {
    const std::vector<std::string> there = contents(folder);
    return fail(problem("E134", fmt::format("the run of this folder has not ended ({})", record->process), folder.root,
                        {missing.empty() ? "its files may be of two runs" : "missing: " + listed(missing),
                         "there: " + (there.empty() ? "nothing" : listed(there))},
                        "wait if it still runs; else go on with `hotbunk run --resume`, or run it again with "
                        "--overwrite: metrics.jsonl and checkpoints are what it finished"));
  }
  std::vector<std::string> notes;
  for (const File& file : files) {
    const bool there = fs::exists(folder.root / file.name, ignored), listed_there = record->digests.contains(file.name);
    if (!file.read_back || (!there && !listed_there)) continue;
    const auto digest = there ? digest_of_file(folder.root / file.name) : std::string();
    if (!digest) return tl::unexpected(digest.error());
    if (!there || !listed_there || *digest != record->digests.at(file.name))
      notes.push_back(fmt::format("{} is {}", file.name,
                                  !there          ? "missing"
                                  : !listed_there ? "not of this run"
                                                  : "not as the run wrote it"));
  }
  if (notes.empty()) return {};
  return fail(problem("E115", "the run folder's files are not of one run", folder.root, std::move(notes),
                      "a file was changed, or comes from another run: run it again"));
}

}  // namespace hotbunk
