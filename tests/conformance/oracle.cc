#include "tests/conformance/oracle.h"

#include <array>

#include "base/check.h"

namespace hotbunk::conformance {

Numbers::Numbers(DType dtype, std::vector<std::int64_t> shape, std::vector<double> values)
    : dtype_(dtype), shape_(std::move(shape)), values_(std::move(values)) {}

Formula formula_of(OpKind kind) {
  for (const auto& family : {row_formulas(), attention_formulas(), expert_formulas(), loss_formulas()})
    for (const NamedFormula& f : family)
      if (f.kind == kind) return f.formula;
  return nullptr;
}

std::vector<Wanted> expected(const OpCase& c, const std::vector<Numbers>& given, std::int64_t place) {
  const Formula formula = formula_of(c.kind);
  HB_CHECK(formula != nullptr, "{} has no formula", name_of(c.kind));
  OracleCall call{.op = {}, .drawn = c, .inputs = {}, .outputs = {}, .place = place};
  call.op.kind = c.kind, call.op.attrs = c.attrs;
  for (const std::size_t i : c.inputs) call.inputs.push_back(given[i]);
  for (const std::size_t i : c.outputs) {
    const Operand& o = c.operands[i];
    Wanted& e = call.outputs.emplace_back(Wanted{o.dtype, o.shape, {}, {}});
    const bool integers = o.dtype == DType::i32 || o.dtype == DType::i64;
    for (std::int64_t k = 0; k < given[i].size(); ++k)
      if (integers) e.wholes.push_back(o.value ? static_cast<std::uint64_t>(given[i].whole(k)) : 0);
      else e.numbers.push_back(o.value ? Bounded(given[i](k)) : Bounded());
  }
  formula(call);
  return std::move(call.outputs);
}

}  // namespace hotbunk::conformance
