// The books of one rank's memory in one space: fixed addresses, mapped in chunks, a hard capacity.
//
// Two books are kept, independently of any plan (P1, P4):
//   mapped  what the machine holds for us, in chunks
//   live    the buffers that the program says are alive, checked against each other and against the mapping
// All calls are thread-safe. Offsets are in bytes from base(). How memory is had and given back is the backend's.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace hotbunk {

constexpr int arena_num_categories = 8;

struct BookOptions {
  std::string name = "device";      // for messages
  std::int64_t reserve_bytes = 0;   // size of the virtual range, in whole chunks; costs no memory
  std::int64_t capacity_bytes = 0;  // most bytes that may be mapped at once
  std::int64_t chunk_bytes = 4096;
};

/// Bytes. Peaks are over the whole life (counters) or since the last take_window.
struct ArenaCounters {
  std::int64_t mapped = 0, mapped_peak = 0;
  std::int64_t live = 0, live_peak = 0;
  std::array<std::int64_t, arena_num_categories> live_by_category{};
  std::array<std::int64_t, arena_num_categories> peak_by_category{};  // of each category alone
  std::array<std::int64_t, arena_num_categories> at_peak{};           // the split at live_peak (the first time)
};

class ArenaBooks {
 public:
  explicit ArenaBooks(BookOptions options) : book_(std::move(options)) {}
  virtual ~ArenaBooks() = default;
  ArenaBooks(const ArenaBooks&) = delete;
  ArenaBooks& operator=(const ArenaBooks&) = delete;

  /// Where offset 0 lies; nullptr of an arena of 0 bytes.
  virtual std::byte* base() const = 0;
  std::byte* at(std::int64_t offset) const { return base() + offset; }
  std::int64_t capacity_bytes() const { return book_.capacity_bytes; }

  /// Maps [begin, end), there to be used on return. Both multiples of the chunk, no chunk mapped yet.
  /// Throws RuntimeFailure with the arithmetic when the capacity is exceeded or the machine has no memory left (then
  /// nothing changed); InternalError when a chunk is mapped already. `who` asks, for the message.
  void map(std::int64_t begin, std::int64_t end, std::string_view who);
  /// Gives [begin, end) back. InternalError when a chunk is not mapped or a live buffer lies in it; RuntimeFailure when
  /// it is not taken back (the books then still hold the range).
  void unmap(std::int64_t begin, std::int64_t end);

  /// Books a buffer, "prefix" + "name". InternalError names both buffers when it overlaps a live one, or says which
  /// part is not mapped. A buffer of 0 bytes is legal and books nothing. Category: 0 .. arena_num_categories - 1.
  /// Memory is not touched. Returns how many more bytes are live than before; free likewise, a number below 0.
  std::int64_t alloc(std::int64_t offset, std::int64_t bytes, int category, std::string_view name,
                     std::string_view prefix = {});
  /// InternalError unless exactly this buffer is live.
  std::int64_t free(std::int64_t offset, std::int64_t bytes);

  ArenaCounters counters() const;
  /// Counters whose peaks cover the time since the last take_window (or the start): peaks of one phase.
  ArenaCounters take_window();
  /// Whether the buffer of this name is booked there.
  bool is_live(std::int64_t offset, std::string_view name) const;
  /// Whether all of [begin, end) is mapped.
  bool is_mapped(std::int64_t begin, std::int64_t end) const;

 protected:
  const BookOptions& book() const { return book_; }
  /// The range becomes usable. Throws RuntimeFailure, and then has changed nothing. Under the books' lock, as withdraw.
  virtual void provide(std::int64_t begin, std::int64_t end, std::string_view who) = 0;
  /// The range goes back to the machine. Throws RuntimeFailure with the reason, and then has changed nothing.
  virtual void withdraw(std::int64_t begin, std::int64_t end) = 0;
  std::int64_t mapped_now() const { return total_.mapped; }  // for provide

 private:
  struct Live {
    std::int64_t bytes = 0;
    int category = 0;
    std::string name;
  };
  using LiveMap = std::map<std::int64_t, Live>;  // by offset

  /// A new entry in front of this one.
  Live& entry(LiveMap::iterator before, std::int64_t offset);
  void check_range(std::int64_t begin, std::int64_t end, const char* what) const;
  bool covered(std::int64_t begin, std::int64_t end) const;  // is_mapped under the lock

  const BookOptions book_;
  mutable std::mutex mutex_;
  std::map<std::int64_t, std::int64_t> mapped_;  // begin -> end, disjoint, neighbours merged
  LiveMap live_;
  std::vector<LiveMap::node_type> spare_;  // of buffers that were freed, with their names' memory, for those to come
  ArenaCounters total_;
  ArenaCounters window_;
};

/// "4.0 KiB (4096 B)".
std::string bytes_text(std::int64_t);

}  // namespace hotbunk
