#include "layout/packing.h"

#include "base/check.h"

namespace hotbunk {

WeightBuilder::WeightBuilder(std::string name, int layer, std::int64_t cols) {
  weight_.name = std::move(name);
  weight_.layer = layer;
  weight_.cols = cols;
}

WeightBuilder& WeightBuilder::add(const ParamSpec& parameter, Range rows, std::int64_t col_begin,
                                  LocalWeight::Step step) {
  if (rows.size() > 0) {
    const Piece piece{rows.begin,  rows.end, col_begin, col_begin + weight_.cols, weight_.rows * weight_.cols,
                      weight_.cols};
    weight_.sources.push_back({parameter.name, piece, step});
  }
  weight_.rows += rows.size();
  return *this;
}

WeightBuilder& WeightBuilder::pad_to(std::int64_t rows) {
  HB_CHECK(rows >= weight_.rows, "{}: {} rows do not fit into {}", weight_.name, weight_.rows, rows);
  weight_.rows = rows;
  return *this;
}

ParameterIndex::ParameterIndex(const ModelSpec& model) : parameters_(parameters_of(model)) {
  for (const ParamSpec& parameter : parameters_)
    by_place_[{parameter.layer, parameter.role, parameter.expert}] = &parameter;
}

const ParamSpec* ParameterIndex::find(int layer, ParamRole role, int expert) const {
  const auto found = by_place_.find({layer, role, expert});
  return found == by_place_.end() ? nullptr : found->second;
}

const ParamSpec& ParameterIndex::at(int layer, ParamRole role, int expert) const {
  const ParamSpec* parameter = find(layer, role, expert);
  HB_CHECK(parameter, "no parameter of role {} in layer {}", static_cast<int>(role), layer);
  return *parameter;
}

}  // namespace hotbunk
