// Ranges that NVIDIA's profilers show: phases on the calling thread, bodies on the threads of streams. Nothing where
// the toolkit has no NVTX, and next to nothing where no profiler is attached.
#pragma once
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define HOTBUNK_NVTX 1
#endif

namespace hotbunk::cuda {

/// Finds the profiler, if any, before threads have ranges: left to the first range, entry points are written while
/// other threads read them.
inline void find_profiler() {
#ifdef HOTBUNK_NVTX
  nvtxInitialize(nullptr);
#endif
}

/// Of the calling thread, while it lives.
class NvtxRange {
 public:
  explicit NvtxRange([[maybe_unused]] const char* name) {
#ifdef HOTBUNK_NVTX
    nvtxRangePushA(name);
#endif
  }
  ~NvtxRange() {
#ifdef HOTBUNK_NVTX
    nvtxRangePop();
#endif
  }
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;
};

}  // namespace hotbunk::cuda
