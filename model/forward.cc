#include "model/forward.h"

#include <utility>

namespace hotbunk {

ValueId Forward::make(std::string name, Width width, bool statistic) {
  values_.push_back({std::move(name), width, statistic});
  return static_cast<ValueId>(values_.size()) - 1;
}

ValueId Forward::input(std::string name, Width width) { return make(std::move(name), width); }

ValueId Forward::embedding(std::string op, std::string out, Weight table) {
  const ValueId y = make(std::move(out), Width::hidden);
  ops_.push_back({OpKind::embedding, std::move(op), {}, {table}, {y}});
  return y;
}

Forward::Normed Forward::rms_norm(std::string op, ValueId x, std::optional<ValueId> residual, Weight weight,
                                  std::string normed, std::string sum) {
  const Width width = value(x).width;
  const ValueId rstd = make(normed + ".rstd", Width::one, true), y = make(std::move(normed), width),
                added = make(std::move(sum), width);
  ForwardOp norm{OpKind::rms_norm, std::move(op), {x}, {weight}, {y, rstd, added}};
  if (residual) norm.inputs.push_back(*residual);
  ops_.push_back(std::move(norm));
  return {y, added};
}

ValueId Forward::linear(std::string op, ValueId x, std::string out, Width width, Weight matrix,
                        std::optional<Weight> bias) {
  const ValueId y = make(std::move(out), width);
  ForwardOp linear{OpKind::linear, std::move(op), {x}, {matrix}, {y}};
  if (bias) linear.weights.push_back(*bias);
  ops_.push_back(std::move(linear));
  return y;
}

ValueId Forward::qk_norm(std::string op, ValueId x, std::string out, Weight q, Weight k) {
  const ValueId rstd = make(out + ".rstd", Width::qk_heads, true), y = make(std::move(out), value(x).width);
  ops_.push_back({OpKind::qk_norm, std::move(op), {x}, {q, k}, {y, rstd}});
  return y;
}

ValueId Forward::rope(std::string op, ValueId x) {
  ops_.push_back({OpKind::rope, std::move(op), {x}, {}, {x}});
  return x;
}

ValueId Forward::attention(std::string op, ValueId x, std::string out) {
  const ValueId lse = make(out + ".lse", Width::heads, true), y = make(std::move(out), Width::attended);
  ops_.push_back({OpKind::attention, std::move(op), {x}, {}, {y, lse}});
  return y;
}

ValueId Forward::swiglu(std::string op, ValueId x, std::string out) {
  const ValueId y = make(std::move(out), Width::inner);
  ops_.push_back({OpKind::swiglu, std::move(op), {x}, {}, {y}});
  return y;
}

}  // namespace hotbunk
