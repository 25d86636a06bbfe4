// The device memory of one rank on the CPU: fixed addresses, mapped in chunks, a hard capacity, its own counters.
//
// Two books are kept, independently of any plan (P1, P4):
//   mapped  what the kernel holds for us, in chunks of 4 KiB; every mapped byte is resident from map() on
//   live    the buffers that the program says are alive, checked against each other and against the mapping
// All calls are thread-safe. Offsets are in bytes from base(). Not copyable: it owns address space.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

namespace hotbunk {

constexpr std::int64_t arena_chunk_bytes = 4096;
constexpr int arena_num_categories = 8;

struct ArenaOptions {
  std::string name = "device";      // for messages
  std::int64_t reserve_bytes = 0;   // size of the virtual range (rounded up to chunks); costs no memory
  std::int64_t capacity_bytes = 0;  // most bytes that may be mapped at once
  bool shared = false;              // memfd-backed, so that ranks of this host can read it (CpuWorld::share)
};

/// Bytes. Peaks are over the whole life (counters) or since the last take_window.
struct ArenaCounters {
  std::int64_t mapped = 0, mapped_peak = 0;
  std::int64_t live = 0, live_peak = 0;
  std::array<std::int64_t, arena_num_categories> live_by_category{};
  std::array<std::int64_t, arena_num_categories> peak_by_category{};  // of each category alone
  std::array<std::int64_t, arena_num_categories> at_peak{};           // the split at live_peak (the first time)
};

class Arena {
 public:
  /// Throws RuntimeFailure when the range cannot be reserved.
  explicit Arena(ArenaOptions);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  const ArenaOptions& options() const { return options_; }
  std::byte* base() const { return base_; }
  std::byte* at(std::int64_t offset) const { return base_ + offset; }
  bool contains(const void* p) const;
  /// The memfd of a shared arena, -1 otherwise.
  int fd() const { return fd_; }

  /// Maps [begin, end), zeroed and resident on return. Both multiples of arena_chunk_bytes, no chunk mapped yet.
  /// Throws RuntimeFailure with the arithmetic when the capacity is exceeded or the machine has no memory left (then
  /// nothing changed); InternalError when a chunk is mapped already. `who` asks, for the message.
  void map(std::int64_t begin, std::int64_t end, std::string_view who);
  /// Returns [begin, end) to the kernel. InternalError when a chunk is not mapped or a live buffer lies in it;
  /// RuntimeFailure when the kernel refuses (the books then still hold the range).
  void unmap(std::int64_t begin, std::int64_t end);

  /// Books a buffer. InternalError names both buffers when it overlaps a live one, or says which part is not mapped.
  /// A buffer of 0 bytes is legal and books nothing. Category: 0 .. arena_num_categories - 1. Memory is not touched.
  void alloc(std::int64_t offset, std::int64_t bytes, int category, std::string_view name);
  /// InternalError unless exactly this buffer is live.
  void free(std::int64_t offset, std::int64_t bytes);
  /// Fills with 0xff bytes (NaN in fp32 and bf16), so that a read before the first write shows. For debug modes: call
  /// it on the stream of the first use, since an earlier user of the range may still run when alloc is booked.
  void poison(std::int64_t offset, std::int64_t bytes);

  ArenaCounters counters() const;
  /// Counters whose peaks cover the time since the last take_window (or the start): peaks of one phase.
  ArenaCounters take_window();
  /// Resident bytes of this range as the kernel counts them (Rss of /proc/self/smaps); slow, for tests and P4.
  std::int64_t resident_bytes() const;
  /// Whether the buffer of this name is booked there.
  bool is_live(std::int64_t offset, std::string_view name) const;
  /// Whether all of [begin, end) is mapped.
  bool is_mapped(std::int64_t begin, std::int64_t end) const;

 private:
  struct Live {
    std::int64_t bytes;
    int category;
    std::string name;
  };

  void check_range(std::int64_t begin, std::int64_t end, const char* what) const;
  bool covered(std::int64_t begin, std::int64_t end) const;  // is_mapped under the lock
  void make_resident(std::int64_t begin, std::int64_t end, std::string_view who);
  bool release(std::int64_t begin, std::int64_t end) noexcept;  // false: errno says why

  ArenaOptions options_;
  std::byte* base_ = nullptr;
  void* guarded_ = nullptr;  // the reservation around it
  std::size_t guarded_bytes_ = 0;
  int fd_ = -1;
  mutable std::mutex mutex_;
  std::map<std::int64_t, std::int64_t> mapped_;  // begin -> end, disjoint, neighbours merged
  std::map<std::int64_t, Live> live_;            // by offset
  ArenaCounters total_;
  ArenaCounters window_;
};

}  // namespace hotbunk
