// What kernels read that is no tensor of the plan and does not change: the boxes of an op's moves on this rank, the
// frequencies of rotary embeddings. On the device before the first op.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "backends/cuda/context.h"
#include "graph/boxes.h"

namespace hotbunk::cuda {

/// Boxes of one input and one output, which a kernel takes together.
struct BoxRun {
  std::int32_t input = 0, output = 0;
  std::int64_t boxes = 0, most_elements = 0;
  CUdeviceptr table = 0;  // struct Box of kernels/boxes.cu, 48 bytes each
};

class OpTables {
 public:
  /// Bytes of a box on the device.
  static constexpr std::int64_t box_bytes = 48;
  /// A kernel's grid has a box per row.
  static constexpr std::int64_t most_boxes = 65535;

  /// Of all ops of the program, on the rank with these places. RuntimeFailure when the device has no memory for them.
  OpTables(const Context&, const Program&, const Places&);

  /// In order of boxes_of; empty: nothing of the op is this rank's.
  std::span<const BoxRun> boxes(const Op&) const;
  /// Of what an op rotates (runtime/rope_frequencies.h).
  CUdeviceptr frequencies(const Op&) const;
  std::int64_t bytes() const { return memory_ ? memory_->bytes() : 0; }

 private:
  std::map<const Op*, std::vector<BoxRun>> boxes_;
  std::map<const Op*, CUdeviceptr> frequencies_;
  std::unique_ptr<DeviceBlock> memory_;
};

}  // namespace hotbunk::cuda
