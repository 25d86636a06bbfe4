// Building blocks of the packed weight lists (rollout_weights.cc, megatron_weights.cc).
#pragma once
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "layout/rollout_weights.h"

namespace hotbunk {

/// Fills one weight buffer from top to bottom with row blocks of parameters.
class WeightBuilder {
 public:
  WeightBuilder(std::string name, int layer, std::int64_t cols);

  /// Rows [rows.begin, rows.end) and columns [col_begin, col_begin + cols) of the parameter become the next rows.
  WeightBuilder& add(const ParamSpec&, Range rows, std::int64_t col_begin = 0, LocalWeight::Step = {});
  /// Rows up to `rows` that no source fills.
  WeightBuilder& pad_to(std::int64_t rows);
  LocalWeight build() { return std::move(weight_); }

 private:
  LocalWeight weight_;
};

/// The parameters of a model by layer (-1: outside the layers), role and expert (-1: none's).
class ParameterIndex {
 public:
  explicit ParameterIndex(const ModelSpec&);
  ParameterIndex(const ParameterIndex&) = delete;
  ParameterIndex& operator=(const ParameterIndex&) = delete;

  const ParamSpec* find(int layer, ParamRole, int expert = -1) const;  // nullptr: the model has none
  const ParamSpec& at(int layer, ParamRole, int expert = -1) const;    // InternalError: the model has none

 private:
  std::vector<ParamSpec> parameters_;
  std::map<std::tuple<int, ParamRole, int>, const ParamSpec*> by_place_;
};

}  // namespace hotbunk
