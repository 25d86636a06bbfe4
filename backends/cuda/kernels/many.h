// Kernels that take many tensors in one launch: the table of them that is a parameter of the kernel, as host and device
// see it.
//
// A parameter, not memory: it is copied with the launch, so nothing has to be alive or in order for it. 64 tensors are
// 2.8 KB, of the 4 KB that a kernel's parameters may take on every GPU (CUDA C++ Programming Guide, function
// parameters).
#pragma once
#include <cstdint>

namespace hotbunk {

inline constexpr int most_tensors = 64;  // of one launch

/// Blocks [first_block[i], first_block[i + 1]) of the launch work on tensor i, of n[i] elements.
struct ManyTensors {
  std::int64_t n[most_tensors];
  std::int32_t first_block[most_tensors + 1];
  std::int32_t count;
};

/// Gradients [n], of one dtype, of which the squares are summed.
struct SquaredTensors {
  const void* x[most_tensors];
  ManyTensors many;
};

/// Gradient [n], of one dtype, and fp32[n] master and moments of the tensors of one AdamW step.
struct SteppedTensors {
  const void* g[most_tensors];
  float* p[most_tensors];
  float* m[most_tensors];
  float* v[most_tensors];
  ManyTensors many;
};

/// Elements of a tensor that one block steps.
inline constexpr int stepped_by_block = 4096;
/// Blocks at most that share one tensor's squares; each leaves a partial sum.
inline constexpr int squared_by_blocks = 512;

}  // namespace hotbunk
