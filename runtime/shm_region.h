// Memory that processes of one host share: memfds, opened by a peer through /proc/<pid>/fd, and the futex that waits in
// them.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace hotbunk {

/// "boot id : pid namespace": processes with the same text see each other's pids on the same machine.
std::string host_identity();

/// Bytes [begin, end) of a mapping are those of its file from `file_offset` on. Two pieces may be the same bytes of the
/// file.
struct FilePiece {
  std::int64_t begin = 0, end = 0, file_offset = 0;
  friend bool operator==(const FilePiece&, const FilePiece&) = default;
};

/// A mapped memfd. Pages cost memory only when touched.
class SharedMapping {
 public:
  SharedMapping() = default;
  /// A new zeroed segment, owned and writable here. RuntimeFailure when the kernel refuses.
  static SharedMapping create(const std::string& name, std::int64_t bytes);
  /// The segment behind a descriptor of another process of this host, in these pieces (none: as it lies in its file).
  /// RuntimeFailure says why it cannot be opened.
  static SharedMapping open(int pid, int fd, std::int64_t bytes, std::span<const FilePiece>, bool writable);
  ~SharedMapping();
  SharedMapping(SharedMapping&& o) noexcept { swap(o); }
  SharedMapping& operator=(SharedMapping&& o) noexcept {
    swap(o);
    return *this;
  }

  std::byte* base() const { return base_; }
  int fd() const { return fd_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  void swap(SharedMapping& o) noexcept {
    std::swap(base_, o.base_);
    std::swap(bytes_, o.bytes_);
    std::swap(fd_, o.fd_);
  }

  std::byte* base_ = nullptr;
  std::int64_t bytes_ = 0;
  int fd_ = -1;  // only of the creator
};

/// Maps pieces of a file where they belong in a range of addresses from `base` on, in place of what is there. False
/// with errno.
bool map_pieces(std::byte* base, int fd, std::span<const FilePiece>, int protection);

/// "pid fd bytes", and each piece's "begin end file_offset": where a peer of this host finds a segment of this process.
std::string shared_handle(int fd, std::int64_t bytes, std::span<const FilePiece> = {});
/// That segment, mapped here. RuntimeFailure says why it cannot be opened.
SharedMapping open_shared(const std::string& handle, bool writable);

/// The arenas that ranks of this host share: by region index and world rank.
class SharedRegions {
 public:
  struct Location {
    int region = -1;
    std::int64_t offset = 0;
  };

  /// own: this rank's arena. peers: by world rank, empty for this rank and for other hosts.
  int add(const std::byte* own, std::int64_t own_bytes, std::vector<SharedMapping> peers);
  /// Where [p, p + bytes) of this rank lies, nullopt when in no region.
  std::optional<Location> locate(const void* p, std::int64_t bytes) const;
  /// nullptr when that rank's memory is not here or the region does not exist. Written only where that rank waits for
  /// what is written.
  std::byte* peer(int world_rank, int region, std::int64_t offset) const;
  /// Peers' pages that were read or written leave this process until they are again; what they hold stays.
  void forget_peers() const;

 private:
  struct Region {
    const std::byte* own;
    std::int64_t own_bytes;
    std::vector<SharedMapping> peers;
  };
  std::vector<Region> regions_;
};

/// Sleeps while word == expected, at most `seconds`; may wake early. Works across processes.
void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected, double seconds);
void futex_wake_all(std::atomic<std::uint32_t>& word);

}  // namespace hotbunk
