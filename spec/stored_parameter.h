// Where a file in Hugging Face's format has a parameter. Most families store a parameter as it is here; GPT-2 stores
// its matrices (in, out), and q, k and v as one tensor; gpt-oss the experts of a layer as one tensor (expert, in, out),
// in which gate and up take turns. All that is not a file knows parameters only.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "spec/model.h"

namespace hotbunk {

struct StoredParameter {
  std::string tensor;               // its name in the file
  std::vector<std::int64_t> shape;  // of that tensor
  std::int64_t first = 0;           // which element of the tensor the parameter begins with; above 0: behind another
  std::int64_t cols = 1;            // of the parameter: its ins; 1 of a vector
  /// How far from one out of the parameter to the next, and from one in to the next, in elements of the tensor.
  std::int64_t row_step = 1, col_step = 1;

  /// Which element of the tensor is element i of the parameter, row-major.
  std::int64_t element(std::int64_t i) const { return first + i / cols * row_step + i % cols * col_step; }
  /// Its elements follow one another as they do here.
  bool in_order() const { return row_step == cols && (cols == 1 || col_step == 1); }
};
/// As the model's family says it (spec/family.h).
StoredParameter stored(const ModelSpec&, const ParamSpec&);

}  // namespace hotbunk
