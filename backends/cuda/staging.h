// Pinned host memory through which a stream's feeds, fetches and counts pass.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "backends/cuda/context.h"

namespace hotbunk::cuda {

/// For the thread of one stream. Blocks are used again when the copy that read them is done; not copyable.
class Staging {
 public:
  Staging(const Context& context, CUstream stream) : context_(context), stream_(stream) {}
  /// The stream has been waited for.
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  /// So many bytes that no copy uses: the caller's until it enqueues a copy from there and says so by in_use(), or has
  /// waited for a copy to there.
  std::byte* take(std::int64_t bytes);
  /// The stream's last copy reads what was taken last.
  void in_use();

 private:
  struct Block {
    std::byte* data = nullptr;
    std::int64_t bytes = 0;
    CUevent copied = nullptr;
    bool in_use = false;
  };
  /// Blocks of one size or larger beyond which take() waits for a copy instead of taking more memory.
  static constexpr std::size_t most_blocks = 8;

  const Context& context_;
  CUstream stream_;
  std::vector<Block> blocks_;  // in order of use, the latest last
};

}  // namespace hotbunk::cuda
