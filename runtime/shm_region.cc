#include "runtime/shm_region.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <climits>
#include <cmath>
#include <cstring>
#include <ctime>
#include <fstream>

#include "base/check.h"
#include "base/limits.h"

namespace hotbunk {

std::string host_identity() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot_id;
  std::getline(file, boot_id);
  struct stat pid_namespace {};
  stat("/proc/self/ns/pid", &pid_namespace);
  return fmt::format("{}:{}", boot_id, pid_namespace.st_ino);
}

SharedMapping SharedMapping::create(const std::string& name, std::int64_t bytes) {
  SharedMapping m;
  m.fd_ = memfd_create(("hotbunk-" + name).c_str(), MFD_CLOEXEC);
  m.bytes_ = bytes;
  const auto size = static_cast<std::size_t>(bytes);
  void* p = MAP_FAILED;
  if (m.fd_ >= 0 && ftruncate(m.fd_, bytes) == 0)
    p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, m.fd_, 0);
  if (p == MAP_FAILED)
    throw RuntimeFailure(fmt::format("no shared memory of {} B for {}: {}", bytes, name, system_error_text(errno)));
  m.base_ = static_cast<std::byte*>(p);
  return m;
}

SharedMapping SharedMapping::open(int pid, int fd, std::int64_t bytes, std::span<const FilePiece> pieces,
                                  bool writable) {
  const std::string path = fmt::format("/proc/{}/fd/{}", pid, fd);
  const int opened = ::open(path.c_str(), (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC);
  if (opened < 0)
    throw RuntimeFailure(
        fmt::format("cannot open the memory of process {} ({}): {}; ranks share memory when they run as one user, in "
                    "one pid namespace",
                    pid, path, std::strerror(errno)));
  SharedMapping m;
  m.bytes_ = bytes;
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* p = mmap(nullptr, static_cast<std::size_t>(bytes), protection, MAP_SHARED | MAP_NORESERVE, opened, 0);
  int error = errno;
  if (p != MAP_FAILED) {
    m.base_ = static_cast<std::byte*>(p);
    if (!map_pieces(m.base_, opened, pieces, protection)) error = errno, p = MAP_FAILED;
  }
  close(opened);
  if (p == MAP_FAILED)
    throw RuntimeFailure(fmt::format("cannot map {} B of process {}: {}", bytes, pid, std::strerror(error)));
  return m;
}

SharedMapping::~SharedMapping() {
  if (base_ != nullptr) munmap(base_, static_cast<std::size_t>(bytes_));
  if (fd_ >= 0) close(fd_);
}

bool map_pieces(std::byte* base, int fd, std::span<const FilePiece> pieces, int protection) {
  return std::ranges::all_of(pieces, [&](const FilePiece& piece) {
    return mmap(base + piece.begin, static_cast<std::size_t>(piece.end - piece.begin), protection,
                MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd, piece.file_offset) != MAP_FAILED;
  });
}

std::string shared_handle(int fd, std::int64_t bytes, std::span<const FilePiece> pieces) {
  std::string out = fmt::format("{} {} {}", getpid(), fd, bytes);
  for (const FilePiece& piece : pieces) out += fmt::format(" {} {} {}", piece.begin, piece.end, piece.file_offset);
  return out;
}

SharedMapping open_shared(const std::string& handle, bool writable) {
  std::vector<std::int64_t> numbers;
  for (const char *at = handle.data(), *last = at + handle.size(); at < last;) {
    const auto [end, error] = std::from_chars(at, last, numbers.emplace_back());
    HB_CHECK(error == std::errc(), "shared-memory handle \"{}\"", handle);
    at = std::min(end + 1, last);
  }
  HB_CHECK(numbers.size() >= 3 && numbers.size() % 3 == 0, "shared-memory handle \"{}\"", handle);
  std::vector<FilePiece> pieces;
  for (std::size_t i = 3; i < numbers.size(); i += 3) pieces.push_back({numbers[i], numbers[i + 1], numbers[i + 2]});
  return SharedMapping::open(static_cast<int>(numbers[0]), static_cast<int>(numbers[1]), numbers[2], pieces, writable);
}

int SharedRegions::add(const std::byte* own, std::int64_t own_bytes, std::vector<SharedMapping> peers) {
  regions_.push_back({own, own_bytes, std::move(peers)});
  return static_cast<int>(regions_.size()) - 1;
}

std::optional<SharedRegions::Location> SharedRegions::locate(const void* p, std::int64_t bytes) const {
  const auto* begin = static_cast<const std::byte*>(p);
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    const Region& r = regions_[i];
    if (r.own != nullptr && begin >= r.own && begin + bytes <= r.own + r.own_bytes)
      return Location{static_cast<int>(i), begin - r.own};
  }
  return std::nullopt;
}

std::byte* SharedRegions::peer(int world_rank, int region, std::int64_t offset) const {
  if (region < 0 || region >= static_cast<int>(regions_.size())) return nullptr;
  std::byte* base = regions_[region].peers.at(world_rank).base();
  return base == nullptr ? nullptr : base + offset;
}

void SharedRegions::forget_peers() const {
  for (const Region& region : regions_)
    for (const SharedMapping& peer : region.peers)
      if (peer.base() != nullptr) madvise(peer.base(), static_cast<std::size_t>(peer.bytes()), MADV_DONTNEED);
}

void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected, double seconds) {
  static_assert(sizeof(word) == sizeof(std::uint32_t) && std::atomic<std::uint32_t>::is_always_lock_free);
  const double whole = std::floor(seconds);
  const timespec timeout{static_cast<time_t>(whole), static_cast<long>((seconds - whole) * 1e9)};
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &timeout, nullptr,
          0);  // EAGAIN, EINTR, ETIMEDOUT: the caller looks again
}

void futex_wake_all(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace hotbunk
