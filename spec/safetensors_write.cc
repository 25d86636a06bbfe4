#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"
#include "base/partial_file.h"
#include "spec/safetensors.h"

namespace hotbunk {
namespace {

std::string_view safetensors_name(DType t) {
  switch (t) {
    case DType::f32:
      return "F32";
    case DType::bf16:
      return "BF16";
    case DType::f16:
      return "F16";
    case DType::f64:
      return "F64";
    case DType::i32:
      return "I32";
    case DType::i64:
      return "I64";
    case DType::u8:
      return "U8";
  }
  return "?";
}

std::int64_t bytes_of(const TensorEntry& entry) {
  std::int64_t n = size_of(entry.dtype);
  for (std::int64_t extent : entry.shape) n *= extent;
  return n;
}

/// All of it at its place in the file, however many calls that takes; errno says why not.
bool write_all_at(int fd, std::span<const std::byte> bytes, std::int64_t at) {
  while (!bytes.empty()) {
    const ssize_t n = ::pwrite(fd, bytes.data(), bytes.size(), at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(n)), at += n;
  }
  return true;
}

bool read_all_at(int fd, std::span<std::byte> bytes, std::int64_t at) {
  while (!bytes.empty()) {
    const ssize_t n = ::pread(fd, bytes.data(), bytes.size(), at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(n)), at += n;
  }
  return true;
}

/// A range of a file that no other process may hold meanwhile, on whichever host.
class RangeLock {
 public:
  RangeLock(int fd, std::int64_t at, std::int64_t bytes) : fd_(fd), range_{} {
    range_.l_type = F_WRLCK, range_.l_whence = SEEK_SET, range_.l_start = at, range_.l_len = bytes;
    do held_ = ::fcntl(fd_, F_OFD_SETLKW, &range_) == 0;
    while (!held_ && errno == EINTR);
  }
  ~RangeLock() {
    if (!held_) return;
    range_.l_type = F_UNLCK;
    ::fcntl(fd_, F_OFD_SETLK, &range_);
  }
  RangeLock(const RangeLock&) = delete;
  RangeLock& operator=(const RangeLock&) = delete;
  bool held() const { return held_; }

 private:
  int fd_;
  struct flock range_;
  bool held_ = false;
};

}  // namespace

struct SafetensorsWriter::State {
  struct Shard {
    std::filesystem::path path;
    std::vector<std::size_t> entries;
    std::string header;      // with its length in front
    std::int64_t bytes = 0;  // of data
  };
  /// Where an entry's bytes begin.
  struct Place {
    std::size_t shard = 0;
    std::int64_t at = 0;
  };
  std::vector<TensorEntry> entries;
  std::vector<Place> places;
  std::vector<Shard> shards;
  std::filesystem::path index;  // empty: one file
  bool made_them = false;
  /// On NFS a page of a file that may be read as well is read before a part of it is written, and may go back whole:
  /// what another host has written beside that part meanwhile is lost. So `both` is for what is locked meanwhile.
  struct Files {
    FileDescriptor write, both;
  };
  static constexpr std::size_t most_open = 64;  // shards: a process has 1024 descriptors, sockets among them
  std::map<std::size_t, Files> open;            // by shard
  std::set<std::size_t> touched;                // shards that are not known to be on the disk

  /// A descriptor of the shard, to write (O_WRONLY) or for both (O_RDWR). Nothing is synced: this is on the way of a
  /// stream, and finish() is not.
  Result<int> use(std::size_t shard, int access = O_WRONLY) {
    if (!open.contains(shard) && open.size() >= most_open)
      if (Status ok = close(open.begin()->first, false); !ok) return fail(std::move(ok.error()));
    Files& files = open[shard];
    FileDescriptor& file = access == O_RDWR ? files.both : files.write;
    if (!file) file = FileDescriptor(::open(shards[shard].path.c_str(), access | O_CLOEXEC));
    if (!file) return fail(write_error(shards[shard].path));
    touched.insert(shard);
    return file.get();
  }

  Status close(std::size_t shard, bool syncs) {
    Files files = std::move(open[shard]);
    open.erase(shard);
    for (FileDescriptor* file : {&files.write, &files.both}) {
      if (!*file) continue;
      const bool synced = !syncs || ::fsync(file->get()) == 0;
      if (!synced || !file->close()) return fail(write_error(shards[shard].path));
    }
    return {};
  }

  void lay_out(const std::map<std::string, std::string>& metadata) {
    places.resize(entries.size());
    for (std::size_t s = 0; s < shards.size(); ++s) {
      nlohmann::ordered_json header;
      if (!metadata.empty()) header["__metadata__"] = metadata;
      std::int64_t offset = 0;
      for (const std::size_t e : shards[s].entries) {
        const std::int64_t end = offset + bytes_of(entries[e]);
        header[entries[e].name] = {{"dtype", safetensors_name(entries[e].dtype)},
                                   {"shape", entries[e].shape},
                                   {"data_offsets", {offset, end}}};
        places[e] = {s, offset};
        offset = end;
      }
      std::string text = header.is_null() ? "{}" : json_text(header);
      text.resize((text.size() + 7) / 8 * 8, ' ');  // data starts aligned, as the reference implementation does
      const std::uint64_t length = text.size();
      shards[s].header.assign(reinterpret_cast<const char*>(&length), sizeof length);
      shards[s].header += text;
      shards[s].bytes = offset;
      for (const std::size_t e : shards[s].entries) places[e].at += std::ssize(shards[s].header);
    }
  }

  /// A file of its full size, which is zero behind the header.
  Status make(const Shard& shard) const {
    FileDescriptor made(::open(shard.path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    const bool good = made && write_all_at(made.get(), std::as_bytes(std::span(shard.header)), 0) &&
                      ::ftruncate(made.get(), std::ssize(shard.header) + shard.bytes) == 0;
    if (good && made.close()) return {};
    return fail(write_error(shard.path));
  }

  Status write_index() const {
    if (index.empty()) {
      // A folder that was sharded before must not keep an index to old shards: readers prefer it.
      std::error_code ec;
      if (shards[0].path.filename() == "model.safetensors")
        std::filesystem::remove(shards[0].path.parent_path() / "model.safetensors.index.json", ec);
      return {};
    }
    nlohmann::ordered_json document;
    std::int64_t total = 0;
    for (const Shard& shard : shards) total += shard.bytes;
    document["metadata"]["total_size"] = total;
    for (const Shard& shard : shards)
      for (const std::size_t e : shard.entries)
        document["weight_map"][entries[e].name] = shard.path.filename().string();
    return write_file_atomic(index, json_text(document, 2) + "\n");
  }

  std::int64_t check(std::size_t entry, std::int64_t first, std::int64_t elements) const {
    HB_CHECK(entry < entries.size() && first >= 0 && elements >= 0 &&
                 (first + elements) * size_of(entries[entry].dtype) <= bytes_of(entries[entry]),
             "elements [{}, +{}) of entry {} of {}", first, elements, entry, entries.size());
    return places[entry].at + first * size_of(entries[entry].dtype);
  }
};

SafetensorsWriter::SafetensorsWriter(std::unique_ptr<State> state) : state_(std::move(state)) {}
SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter& SafetensorsWriter::operator=(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter::~SafetensorsWriter() = default;

Result<SafetensorsWriter> SafetensorsWriter::join(const std::filesystem::path& target, std::vector<TensorEntry> entries,
                                                  std::int64_t max_shard_bytes,
                                                  const std::map<std::string, std::string>& metadata) {
  auto state = std::make_unique<State>();
  const bool one_file = target.extension() == ".safetensors";
  const std::filesystem::path folder = one_file ? target.parent_path() : target;
  std::set<std::string> names;
  std::int64_t bytes = 0;  // in the shard
  state->shards.emplace_back();
  for (std::size_t e = 0; e < entries.size(); ++e) {
    const TensorEntry& entry = entries[e];
    if (!names.insert(entry.name).second || entry.name == "__metadata__")
      return fail(Diagnostic{.code = "E409",
                             .message = fmt::format("tensor name \"{}\" is taken", entry.name),
                             .where = {target.string()},
                             .notes = {},
                             .help = {}});
    if (!one_file && !state->shards.back().entries.empty() && bytes + bytes_of(entry) > max_shard_bytes)
      state->shards.emplace_back(), bytes = 0;
    bytes += bytes_of(entry);
    state->shards.back().entries.push_back(e);
  }
  const std::size_t n = state->shards.size();
  for (std::size_t i = 0; i < n; ++i)
    state->shards[i].path = one_file ? target
                            : n == 1 ? folder / "model.safetensors"
                                     : folder / fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, n);
  if (n > 1) state->index = folder / "model.safetensors.index.json";
  state->entries = std::move(entries);
  state->lay_out(metadata);
  return SafetensorsWriter(std::move(state));
}

Result<SafetensorsWriter> SafetensorsWriter::create(const std::filesystem::path& target,
                                                    std::vector<TensorEntry> entries, std::int64_t max_shard_bytes,
                                                    const std::map<std::string, std::string>& metadata) {
  auto writer = join(target, std::move(entries), max_shard_bytes, metadata);
  if (!writer) return writer;
  State& s = *writer->state_;
  std::error_code ec;
  if (const auto folder = s.shards.front().path.parent_path(); !folder.empty())
    std::filesystem::create_directories(folder, ec);
  for (const State::Shard& shard : s.shards)
    if (Status ok = s.make(shard); !ok) return fail(std::move(ok.error()));
  s.made_them = true;
  return writer;
}

Status SafetensorsWriter::write(std::size_t entry, std::int64_t first, std::span<const std::byte> bytes) {
  State& s = *state_;
  const std::int64_t width = size_of(s.entries.at(entry).dtype), elements = std::ssize(bytes) / width;
  const std::int64_t at = s.check(entry, first, elements);
  HB_CHECK(elements * width == std::ssize(bytes), "{} bytes are not whole elements of {}", bytes.size(), width);
  const std::size_t shard = s.places[entry].shard;
  const auto file = s.use(shard);
  if (!file) return tl::unexpected(file.error());
  if (write_all_at(*file, bytes, at)) return {};
  return fail(write_error(s.shards[shard].path));
}

Status SafetensorsWriter::write(std::size_t entry, std::int64_t first, std::int64_t step,
                                std::span<const std::byte> bytes) {
  if (step == 1) return write(entry, first, bytes);
  State& s = *state_;
  const auto width = static_cast<std::size_t>(size_of(s.entries.at(entry).dtype));
  const std::size_t n = bytes.size() / width, pitch = static_cast<std::size_t>(step) * width;
  HB_CHECK(n > 0 && step > 1 && n * width == bytes.size(), "{} bytes {} apart", bytes.size(), step);
  std::vector<std::byte> around((n - 1) * pitch + width);
  const std::int64_t at = s.check(entry, first, std::ssize(around) / size_of(s.entries[entry].dtype));
  const std::size_t shard = s.places[entry].shard;
  const auto file = s.use(shard, O_RDWR);
  if (!file) return tl::unexpected(file.error());
  const RangeLock lock(*file, at, std::ssize(around));
  if (lock.held() && read_all_at(*file, around, at)) {
    for (std::size_t i = 0; i < n; ++i) std::memcpy(around.data() + i * pitch, bytes.data() + i * width, width);
    if (write_all_at(*file, around, at)) return {};
  }
  return fail(write_error(s.shards[shard].path));
}

Status SafetensorsWriter::finish() {
  State& s = *state_;
  for (std::size_t i = 0; s.made_them && i < s.shards.size(); ++i) s.touched.insert(i);
  for (const std::size_t shard : std::exchange(s.touched, {})) {
    if (const auto file = s.use(shard); !file) return tl::unexpected(file.error());
    if (Status ok = s.close(shard, true); !ok) return ok;
  }
  s.touched.clear();  // use() notes them anew
  return s.made_them ? s.write_index() : Status{};
}

}  // namespace hotbunk
