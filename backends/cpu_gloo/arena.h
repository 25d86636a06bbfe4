// The device memory of one rank on the CPU: addresses reserved once, mapped in chunks of 4 KiB, resident while mapped.
// Not copyable: it owns address space.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "runtime/arena_books.h"

namespace hotbunk {

constexpr std::int64_t arena_chunk_bytes = 4096;

struct ArenaOptions {
  std::string name = "device";      // for messages
  std::int64_t reserve_bytes = 0;   // size of the virtual range (rounded up to chunks); costs no memory
  std::int64_t capacity_bytes = 0;  // most bytes that may be mapped at once
  bool shared = false;              // memfd-backed, so that ranks of this host can read it (CpuWorld::share)
};

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

  /// Resident bytes of this range as the kernel counts them (Rss of /proc/self/smaps); slow, for tests and P4.
  std::int64_t resident_bytes() const;

 private:
  void provide(std::int64_t begin, std::int64_t end, std::string_view who) override;  // zeroed and resident
  void withdraw(std::int64_t begin, std::int64_t end) override;
  bool release(std::int64_t begin, std::int64_t end) noexcept;  // false: errno says why

  ArenaOptions options_;
  std::byte* base_ = nullptr;
  void* guarded_ = nullptr;  // the reservation around it
  std::size_t guarded_bytes_ = 0;
  int fd_ = -1;
};

}  // namespace hotbunk
