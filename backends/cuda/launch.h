// Kernel launches on one stream: names and values instead of an array of pointers.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>

#include "backends/cuda/context.h"
#include "base/dtype.h"

namespace hotbunk::cuda {

/// As it stands in a kernel's name: rms_norm_bf16. InternalError for a dtype that no kernel is written for.
std::string kernel_dtype(DType);

struct Grid {
  std::int64_t x = 1, y = 1;
};

class Launcher {
 public:
  Launcher(const Context& context, CUstream stream) : context_(context), stream_(stream) {}

  const Context& context() const { return context_; }
  const Driver& driver() const { return context_.driver(); }
  CUstream stream() const { return stream_; }

  /// Enqueues a kernel of `threads` per block; an empty grid is no launch. The values are the kernel's parameters, of
  /// exactly their types: device pointers are CUdeviceptr. RuntimeFailure names kernel and grid.
  template <class... T>
  void operator()(const std::string& kernel, Grid grid, int threads, const T&... values) const {
    if (grid.x <= 0 || grid.y <= 0) return;
    void* parameters[] = {const_cast<T*>(&values)...};
    enqueue(kernel, grid, threads, parameters);
  }

  /// Both are nothing for 0 bytes, which a driver refuses.
  void copy(CUdeviceptr to, CUdeviceptr from, std::int64_t bytes) const;
  void fill(CUdeviceptr to, unsigned char value, std::int64_t bytes) const;

 private:
  void enqueue(const std::string& kernel, Grid, int threads, void** parameters) const;

  const Context& context_;
  CUstream stream_;
};

/// Blocks of so many threads that cover n items; for kernels that walk on by the grid's size, at most a thousand.
inline std::int64_t blocks_of(std::int64_t n, int threads) { return (n + threads - 1) / threads; }
inline std::int64_t walking_blocks_of(std::int64_t n, int threads) {
  return std::min<std::int64_t>(blocks_of(n, threads), 1024);
}

}  // namespace hotbunk::cuda
