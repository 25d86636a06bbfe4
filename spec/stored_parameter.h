// Where a file in Hugging Face's format has a parameter. Most families store a parameter as it is here; GPT-2 stores
// its matrices (in, out), and q, k and v as one tensor. All that is not a file knows parameters only.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "spec/model.h"

namespace hotbunk {

struct StoredParameter {
  std::string tensor;               // its name in the file
  std::vector<std::int64_t> shape;  // of that tensor
  bool transposed = false;          // (in, out)
  std::int64_t first = 0;           // where, of the tensor's outs, the parameter's begin
  std::int64_t cols = 1;            // of the parameter: its ins; 1 of a vector

  /// Which element of the tensor is element i of the parameter, row-major.
  std::int64_t element(std::int64_t i) const {
    return transposed ? i % cols * shape[1] + first + i / cols : first * cols + i;
  }
};
/// Source: transformers, GPT2Attention and Conv1D.
StoredParameter stored(const ModelSpec&, const ParamSpec&);

}  // namespace hotbunk
