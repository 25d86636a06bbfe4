// The host memory of one rank: fixed addresses, registered with the driver while mapped, so that copies run beside the
// host.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <string_view>

#include "backends/cuda/context.h"
#include "runtime/arena_books.h"

namespace hotbunk::cuda {

class PinnedArena final : public ArenaBooks {
 public:
  /// `threads`: that have pages and give them back. RuntimeFailure when the range cannot be reserved.
  PinnedArena(const Context&, BookOptions, int threads);
  ~PinnedArena() override;

  std::byte* base() const override { return base_; }

 private:
  void provide(std::int64_t begin, std::int64_t end, std::string_view who) override;  // zeroed
  void withdraw(std::int64_t begin, std::int64_t end) override;
  void pin(std::int64_t begin, std::int64_t end);
  /// The machine has the pages, and nobody may touch the addresses. False with errno.
  bool hide(std::int64_t begin, std::int64_t end);

  const Context& context_;
  const int threads_;
  std::byte* base_ = nullptr;  // at a huge page's begin
  void* reserved_ = nullptr;
  std::size_t reserved_bytes_ = 0;
  std::map<std::int64_t, std::int64_t> pinned_;  // begin -> end, as registered
};

}  // namespace hotbunk::cuda
