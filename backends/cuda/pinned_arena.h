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
  /// RuntimeFailure when the range cannot be reserved.
  PinnedArena(const Context&, BookOptions);
  ~PinnedArena() override;

  std::byte* base() const override { return base_; }

 private:
  void provide(std::int64_t begin, std::int64_t end, std::string_view who) override;  // zeroed
  void withdraw(std::int64_t begin, std::int64_t end) override;
  void pin(std::int64_t begin, std::int64_t end);

  const Context& context_;
  std::byte* base_ = nullptr;
  std::map<std::int64_t, std::int64_t> pinned_;  // begin -> end, as registered
};

}  // namespace hotbunk::cuda
