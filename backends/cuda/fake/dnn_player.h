// Plays operation graphs of cuDNN over the device's memory of the driver's double, op by op in fp32: what is stored in
// 16 bits is rounded, and what a graph may not rely on is no number. Of a sequence that ragged offsets find, rows
// beyond its end read as NaN and are not written; of a product, rows and columns beyond what its overrides say are 0,
// as cuDNN pads them.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "backends/cuda/fake/fake_driver.h"

namespace hotbunk::cuda {

struct DnnTensorDouble {
  std::int64_t id = 0;
  int type = 0;
  std::array<std::int64_t, 4> dims{}, strides{};
  bool is_virtual = false, by_value = false;
  std::int64_t alignment = 1;  // bytes
  std::int64_t ragged = 0;     // the tensor of its offsets

  std::int64_t elements() const { return dims[0] * dims[1] * dims[2] * dims[3]; }
};
struct DnnOpDouble {
  int kind = 0;  // dnn::pointwise_op, matmul_op, reduction_op, reshape_op
  int mode = 0;  // of a pointwise op
  std::int64_t axis = -1;
  std::int64_t x = 0, b = 0, t = 0, y = 0;        // tensors; of a product a, b and c are x, b and y
  std::int64_t rows = 0, columns = 0, depth = 0;  // overrides of a product
};
struct DnnGraphDouble {
  std::map<std::int64_t, DnnTensorDouble> tensors;
  std::vector<DnnOpDouble> ops;

  /// "" or why these ops are no graph: one that reads what no op before it has made, shapes that do not fit.
  std::string why_wrong() const;
  /// What it asks for beside its tensors: the largest tensor between two ops, in 16 bits.
  std::int64_t workspace_bytes() const;
};

/// With the driver's double locked. Addresses by tensor; numbers of by-value tensors. RuntimeFailure: what is wrong.
std::vector<FakeDriver::Touch> play_graph(FakeDriver&, const DnnGraphDouble&,
                                          const std::map<std::int64_t, CUdeviceptr>& addresses,
                                          const std::map<std::int64_t, float>& values);

}  // namespace hotbunk::cuda
