// The device memory of one rank on the CPU: addresses reserved once, mapped in chunks of 4 KiB, resident while mapped.
// Not copyable: it owns address space.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "graph/byte_ranges.h"
#include "runtime/arena_books.h"
#include "runtime/shm_region.h"

namespace hotbunk {

constexpr std::int64_t arena_chunk_bytes = 4096;

struct ArenaOptions {
  std::string name = "device";      // for messages
  std::int64_t reserve_bytes = 0;   // size of the virtual range (rounded up to chunks); costs no memory
  std::int64_t capacity_bytes = 0;  // most bytes that may be mapped at once
  // Memfd-backed, so that ranks of this host can open it (CpuWorld::share). What is unmapped leaves the process and
  // stays in the file, for what is mapped there next.
  bool shared = false;
  // Of a shared arena: where its addresses lie in the file (none: offset by offset). Those of two pieces on the same
  // bytes are never mapped at once.
  std::vector<FilePiece> pieces = {};
};

/// Copies bytes whose addresses overlap nowhere.
using CopyBytes = std::function<void(std::byte* to, const std::byte* from, std::int64_t bytes)>;

class Arena final : public ArenaBooks {
 public:
  /// Throws RuntimeFailure when the range cannot be reserved.
  explicit Arena(const ArenaOptions&);
  ~Arena() override;

  const ArenaOptions& options() const { return options_; }
  std::byte* base() const override { return base_; }
  bool contains(const void* p) const;
  /// The memfd of a shared arena, -1 otherwise.
  int fd() const { return fd_; }

  /// What the file of a shared arena holds, in bytes: mapped, lent, or kept for what is mapped next.
  std::int64_t file_bytes() const;

  /// Resident bytes of this range as the kernel counts them (Rss of /proc/self/smaps); slow, for tests and P4.
  std::int64_t resident_bytes() const;

  // Pages that change their arena (docs/sync-and-sleep.md). Bytes that are copied only because the source is about to
  // go need not be copied: the whole pages among them get new addresses. Their home stays this arena, and they come
  // back to where they lay. Between the two calls this arena may be unmapped there and mapped again; nothing else may
  // be put into the pages' place (InternalError).

  /// Chunks of [begin, end) that are mapped from now on are filled by lend() of another arena, or when they are first
  /// touched: mapping them takes no memory yet.
  void fill_later(std::int64_t begin, std::int64_t end);

  /// Bytes [from, from + bytes) of this arena become bytes [at, at + bytes) of `to`, which must outlive this one's
  /// loans. Both ranges are mapped, and what is left here is lost. Whole pages move where both ranges begin equally far
  /// from a page's first byte; the rest is copied. RuntimeFailure when the machine has no memory for what is copied.
  /// Returns how many bytes moved.
  std::int64_t lend(std::int64_t from, std::int64_t bytes, Arena& to, std::int64_t at, const CopyBytes&);
  /// The reverse: bytes [at, at + bytes) of `holder` become bytes [to, to + bytes) of this arena. Whole pages come back
  /// that are this arena's and were lent from there; the rest is copied. RuntimeFailure when they do not come back.
  std::int64_t take_back(std::int64_t to, std::int64_t bytes, Arena& holder, std::int64_t at, const CopyBytes&);
  /// Of this arena's bytes those that are elsewhere.
  std::int64_t lent_bytes() const;
  /// Calls visit(begin, end) for the parts of [begin, end) whose pages are not lent, in order.
  void each_present(std::int64_t begin, std::int64_t end,
                    const std::function<void(std::int64_t begin, std::int64_t end)>& visit) const;

 private:
  /// Pages that are elsewhere.
  struct Loan {
    std::int64_t end;
    Arena* holder;
    std::int64_t at;  // there
  };
  /// Pages that are another arena's.
  struct Guest {
    std::int64_t end;
    Arena* home;
    std::int64_t home_begin;
  };

  void provide(std::int64_t begin, std::int64_t end, std::string_view who) override;  // resident, with any contents
  void withdraw(std::int64_t begin, std::int64_t end) override;
  bool release(std::int64_t begin, std::int64_t end) noexcept;  // false: errno says why
  void give_up(std::int64_t begin, std::int64_t end) noexcept;  // of a provide that failed: nothing of it is left
  bool populate(std::int64_t begin, std::int64_t end);          // false: errno says why
  /// InternalError where pages of the file are another part's now.
  void take(std::int64_t begin, std::int64_t end, std::string_view who);
  void punch(std::int64_t file_offset, std::int64_t bytes) const noexcept;  // these pages leave the file
  bool send_home(std::int64_t begin, std::int64_t end);  // the same; pages that are on loan here are freed
  bool make_private(std::int64_t begin, std::int64_t end, int protection);           // the same
  bool give(std::int64_t begin, std::int64_t end, Arena& to, std::int64_t at);       // false: the kernel does not
  bool fetch(std::int64_t begin, std::int64_t end, Arena& holder, std::int64_t at);  // false: they are not there
  /// Calls visit(begin, end, file_offset) for the parts of [begin, end) by pieces.
  void each_piece(
      std::int64_t begin, std::int64_t end,
      const std::function<void(std::int64_t begin, std::int64_t end, std::int64_t file_offset)>& visit) const;
  static void copy_part(Arena& from, std::int64_t begin, Arena& to, std::int64_t at, std::int64_t bytes,
                        const CopyBytes&);

  ArenaOptions options_;
  std::byte* base_ = nullptr;
  void* guarded_ = nullptr;  // the reservation around it
  std::size_t guarded_bytes_ = 0;
  int fd_ = -1;
  std::vector<std::pair<std::int64_t, std::int64_t>> filled_later_;
  mutable std::mutex moves_;  // of all below; of two arenas together, or one alone
  ByteRanges taken_, kept_;   // bytes of the file: mapped or lent; neither, and there
  std::map<std::int64_t, Loan> loans_;
  std::map<std::int64_t, Guest> guests_;
};

}  // namespace hotbunk
